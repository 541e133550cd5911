//! File work with the rights of a user.
//!
//! Linux keeps credentials per thread. The agent is root; for file work of a user it changes the
//! *effective* user, groups and thereby capabilities of the one blocking thread that does the
//! work, by the raw system calls (the C library's wrappers would change all threads), and changes
//! them back before the thread does anything else. `setfsuid` would be the classic way, but
//! gVisor does not have it.
//!
//! Invariants:
//! - Real and saved user stay root, so processes of the user can neither signal nor trace the
//!   agent meanwhile.
//! - A thread that cannot be changed back never returns: the agent aborts.
//! - Nothing in here waits for a client. Open files stay usable after the rights are gone, so
//!   contents are streamed outside.

use std::io;

use crate::account::Account;

/// "Leave as it is", to `setresuid` and `setresgid`.
const UNCHANGED: libc::c_long = -1;

/// Does the work with the rights of the account, on this thread. Blocking.
///
/// # Errors
/// The rights cannot be taken: the agent is not root, and the account is not its own.
pub fn with_rights<T>(account: &Account, work: impl FnOnce() -> T) -> io::Result<T> {
    let own = rustix::process::geteuid();
    if own.as_raw() == account.uid {
        return Ok(work());
    }
    if !own.is_root() {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    let borrowed = Borrowed::take(account)?;
    let result = work();
    drop(borrowed);
    Ok(result)
}

/// The thread has a user's rights while this lives.
struct Borrowed {
    groups: Vec<u32>,
}

impl Borrowed {
    fn take(account: &Account) -> io::Result<Self> {
        let groups = rustix::process::getgroups()?
            .into_iter()
            .map(rustix::process::Gid::as_raw)
            .collect();
        let borrowed = Self { groups };
        // From here on, a failure drops `borrowed` and thereby restores everything.
        set_groups(&account.groups)?;
        set_effective(libc::SYS_setresgid, account.gid)?;
        set_effective(libc::SYS_setresuid, account.uid)?;
        Ok(borrowed)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let restored = set_effective(libc::SYS_setresuid, 0)
            .and_then(|()| set_effective(libc::SYS_setresgid, 0))
            .and_then(|()| set_groups(&self.groups));
        if restored.is_err() {
            // A thread of the pool with the wrong rights would do other users' work with them.
            std::process::abort();
        }
    }
}

fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: the pointer and the length belong to one live slice; the kernel only reads it.
    let result = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    check(result)
}

fn set_effective(call: libc::c_long, id: u32) -> io::Result<()> {
    // SAFETY: three integers; nothing is dereferenced.
    let result = unsafe { libc::syscall(call, UNCHANGED, libc::c_long::from(id), UNCHANGED) };
    check(result)
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

    fn stranger() -> Account {
        Account {
            name: "stranger".into(),
            uid: 54_321,
            gid: 54_321,
            groups: vec![54_321],
            home: PathBuf::from("/"),
            shell: PathBuf::from("/bin/sh"),
        }
    }

    #[test]
    fn rights_are_those_of_the_user_and_come_back() {
        // BC-058
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "x").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();

        let as_stranger = with_rights(&stranger(), || fs::read(&secret)).unwrap();
        assert_eq!(
            as_stranger.unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
        assert!(
            with_rights(&stranger(), || fs::write(dir.path().join("new"), ""))
                .unwrap()
                .is_err()
        );
        assert_eq!(fs::read(&secret).unwrap(), b"x");
    }

    #[test]
    fn other_threads_keep_their_rights() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let other = with_rights(&stranger(), || {
            std::thread::scope(|_| rustix::process::geteuid().as_raw())
        });
        assert_eq!(other.unwrap(), 54_321);
        assert!(rustix::process::geteuid().is_root());
    }
}
