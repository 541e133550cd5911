//! What a sandbox needs of a root file system that an image may not have: accounts, a shell by the
//! name that clients call, the files that name the machine.
//!
//! An image's own files are kept; what is missing is added. All paths are resolved inside the root.

use std::{
    io,
    path::{Path, PathBuf},
};

use rustix::fs::{Gid, Mode, OFlags, Uid};

use crate::layers::Confined;

/// Changes when something else is added, so that layers are made anew.
pub(crate) const VERSION: &str = "1";

/// The user that commands run as when nobody is named (wire contract 2).
const USER: &str = "user";
/// The first number that is tried for it.
const USER_ID: u32 = 1000;
/// How many numbers are tried.
const USER_IDS_TRIED: u32 = 1000;
/// The longest list of accounts that is read, in bytes.
const ACCOUNTS_BYTES_MAX: u64 = 1 << 20;
/// Calls the image's own shell.
const OWN_SHELL: &[u8] = b"#!/bin/sh\nexec /bin/sh \"$@\"\n";
/// Files that name the machine, written to in every sandbox.
const NAMES: [(&str, &str); 3] = [
    ("etc/hostname", "sandbox\n"),
    ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("etc/machine-id", ""),
];
/// Folders that programs expect, with their modes.
const FOLDERS: [(&str, u32); 7] = [
    ("etc", 0o755),
    ("proc", 0o755),
    ("dev", 0o755),
    ("sys", 0o755),
    ("tmp", 0o1777),
    ("run", 0o755),
    ("root", 0o700),
];

/// Adds what is missing.
///
/// # Errors
/// A file of the root cannot be read or made.
pub(crate) fn provision(root: &Path) -> io::Result<()> {
    let root = Confined::open(root)?;
    for (path, mode) in FOLDERS {
        if !exists(&root, path) {
            let folder = root.make_folder(Path::new(path), |_, _| {})?;
            rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode))?;
        }
    }
    for (path, text) in NAMES {
        if !exists(&root, path) {
            root.replace_file(Path::new(path), text.as_bytes(), 0o644)?;
        }
    }
    add_shell(&root)?;
    add_user(&root, USER)
}

fn exists(root: &Confined, path: &str) -> bool {
    root.open_at(Path::new(path), OFlags::PATH).is_ok()
}

/// Clients call `/bin/bash`; an image without it has its own shell under that name, if it has one.
/// A link would not do: some shells ask by which name they were called.
fn add_shell(root: &Confined) -> io::Result<()> {
    if exists(root, "bin/bash") {
        return Ok(());
    }
    if exists(root, "usr/bin/bash") {
        return root.replace_link(Path::new("bin/bash"), Path::new("/usr/bin/bash"));
    }
    if exists(root, "bin/sh") {
        return root.replace_file(Path::new("bin/bash"), OWN_SHELL, 0o755);
    }
    Ok(())
}

/// Makes an account with a home, unless there is one of that name.
///
/// # Errors
/// A file of the root cannot be read or made.
pub(crate) fn add_user(root: &Confined, name: &str) -> io::Result<()> {
    let read = |path: &str| -> io::Result<String> {
        let bytes = root.read_file(Path::new(path), ACCOUNTS_BYTES_MAX)?;
        Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
    };
    let (passwd, group) = (read("etc/passwd")?, read("etc/group")?);
    let shell = match exists(root, "bin/bash") {
        true => "/bin/bash",
        false => "/bin/sh",
    };
    let (new_passwd, new_group) = with_accounts(&passwd, &group, name, shell);
    if new_passwd != passwd {
        root.replace_file(Path::new("etc/passwd"), new_passwd.as_bytes(), 0o644)?;
    }
    if new_group != group {
        root.replace_file(Path::new("etc/group"), new_group.as_bytes(), 0o644)?;
    }
    let Some((id, group, home)) = account(&new_passwd, name) else {
        return Ok(());
    };
    if !exists(root, &home.to_string_lossy()) {
        let folder = root.make_folder(&home, |_, _| {})?;
        let owner = (Some(Uid::from_raw(id)), Some(Gid::from_raw(group)));
        rustix::fs::fchown(&folder, owner.0, owner.1)?;
    }
    Ok(())
}

/// The lists of accounts with root and `name` in them. Pure.
fn with_accounts(passwd: &str, group: &str, name: &str, shell: &str) -> (String, String) {
    let (mut passwd, mut group) = (ended(passwd), ended(group));
    let has = |list: &str, name: &str| list.lines().any(|line| first_field(line) == name);
    if !has(&passwd, "root") {
        passwd.insert_str(0, &format!("root:x:0:0:root:/root:{shell}\n"));
    }
    if !has(&group, "root") {
        group.insert_str(0, "root:x:0:\n");
    }
    if !has(&passwd, name) {
        let own_group = group_of(&group, name);
        let id = free_id(&passwd, &group);
        let group_id = own_group.unwrap_or(id);
        if own_group.is_none() {
            group.push_str(&format!("{name}:x:{group_id}:\n"));
        }
        passwd.push_str(&format!("{name}:x:{id}:{group_id}::/home/{name}:{shell}\n"));
    }
    (passwd, group)
}

fn ended(list: &str) -> String {
    let end = if list.is_empty() || list.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    format!("{list}{end}")
}

fn first_field(line: &str) -> &str {
    line.split(':').next().unwrap_or_default()
}

/// The number in the third field.
fn number(line: &str) -> Option<u32> {
    line.split(':').nth(2)?.parse().ok()
}

fn group_of(group: &str, name: &str) -> Option<u32> {
    let mut lines = group.lines();
    lines
        .find(|line| first_field(line) == name)
        .and_then(number)
}

/// A number that is neither a user's nor a group's.
fn free_id(passwd: &str, group: &str) -> u32 {
    let taken: Vec<u32> = passwd
        .lines()
        .chain(group.lines())
        .filter_map(number)
        .collect();
    let mut ids = USER_ID..USER_ID + USER_IDS_TRIED;
    ids.find(|id| !taken.contains(id)).unwrap_or(USER_ID)
}

/// Number, group and home of a user, the home as a path in the root.
fn account(passwd: &str, name: &str) -> Option<(u32, u32, PathBuf)> {
    let line = passwd.lines().find(|line| first_field(line) == name)?;
    let fields: Vec<&str> = line.split(':').collect();
    let home = crate::layers::path_in_root(fields.get(5)?.as_bytes()).ok()?;
    let named = !home.as_os_str().is_empty();
    named.then_some((number(line)?, fields.get(3)?.parse().ok()?, home))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn accounts_are_added_and_never_changed() {
        let (passwd, group) = with_accounts("", "", USER, "/bin/sh");
        assert_eq!(
            passwd,
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
        );
        assert_eq!(group, "root:x:0:\nuser:x:1000:\n");
        let taken = "root:x:0:0::/root:/bin/ash\nnode:x:1000:1000::/home/node:/bin/sh";
        let (passwd, group) = with_accounts(taken, "root:x:0:\nuser:x:1001:\n", USER, "/bin/bash");
        assert!(passwd.starts_with(taken), "{passwd}");
        assert!(
            passwd.ends_with("user:x:1002:1001::/home/user:/bin/bash\n"),
            "{passwd}"
        );
        assert_eq!(group, "root:x:0:\nuser:x:1001:\n");
        let own = "root:x:0:0::/:/x\nuser:x:7:8::/srv/me:/bin/sh\n";
        assert_eq!(with_accounts(own, "root:x:0:\n", USER, "/bin/sh").0, own);
        assert_eq!(account(own, USER), Some((7, 8, "srv/me".into())));
    }

    #[test]
    fn a_bare_image_becomes_one_that_a_sandbox_can_use() {
        // R-P5
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir(root.join("bin")).unwrap();
        fs::write(root.join("bin/sh"), "").unwrap();
        provision(root).unwrap();
        assert_eq!(fs::read(root.join("bin/bash")).unwrap(), OWN_SHELL);
        assert!(root.join("home/user").is_dir());
        let passwd = fs::read_to_string(root.join("etc/passwd")).unwrap();
        provision(root).unwrap();
        assert_eq!(fs::read_to_string(root.join("etc/passwd")).unwrap(), passwd);
    }

    #[test]
    fn links_of_an_image_lead_nowhere_outside() {
        // R-P5
        let outside = tempfile::tempdir().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for name in ["etc", "home", "bin"] {
            symlink(outside.path(), root.join(name)).unwrap();
        }
        // Whether that works or not, what it makes is inside.
        let _ = provision(root);
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}
