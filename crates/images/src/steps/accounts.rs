//! Users and groups of a root, as its own files name them.

use std::io;

use rustix::fs::{Gid, Uid};

use super::{StepError, file_error};
use crate::{layers::Confined, provision};

/// The longest list of accounts that is read, in bytes.
const ACCOUNTS_BYTES_MAX: u64 = 1 << 20;
/// The longest name of a user.
const NAME_LENGTH_MAX: usize = 32;

/// Numbers of `user`, `user:group`, by name or number.
pub(super) fn owner_of(root: &Confined, name: &str) -> Result<(Uid, Gid), StepError> {
    let read = |path: &str| -> io::Result<String> {
        let bytes = root.read_file(path.as_ref(), ACCOUNTS_BYTES_MAX)?;
        Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
    };
    let lists = || Ok((read("etc/passwd")?, read("etc/group")?));
    let (passwd, group) = lists().map_err(file_error("read the accounts of the root"))?;
    let (uid, gid) =
        numbers(&passwd, &group, name).ok_or_else(|| StepError::Account(name.to_owned()))?;
    Ok((Uid::from_raw(uid), Gid::from_raw(gid)))
}

/// Makes the account `name` if it is neither known nor a number.
pub(super) fn require_account(root: &Confined, name: &str) -> Result<(), StepError> {
    let user = name.split(':').next().unwrap_or_default();
    match owner_of(root, user) {
        Err(StepError::Account(_)) if is_new_name(user) => {
            provision::add_user(root, user).map_err(file_error(format!("add the user '{user}'")))
        }
        found => found.map(|_| ()),
    }
}

/// As `useradd` would take it.
fn is_new_name(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'-');
    (1..=NAME_LENGTH_MAX).contains(&name.len())
        && name.bytes().all(inner)
        && !name.starts_with(|c: char| c.is_ascii_digit() || c == '-')
}

fn numbers(passwd: &str, group: &str, name: &str) -> Option<(u32, u32)> {
    let (user, own_group) = match name.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (name, None),
    };
    let account = line_of(passwd, user);
    let uid = account
        .and_then(|line| field(line, 2))
        .or_else(|| number(user))?;
    let gid = match own_group {
        Some(own) => line_of(group, own)
            .and_then(|line| field(line, 2))
            .or_else(|| number(own))?,
        None => account.and_then(|line| field(line, 3)).unwrap_or(0),
    };
    Some((uid, gid))
}

fn line_of<'a>(list: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = list.lines();
    let named = lines.find(|line| line.split(':').next() == Some(name));
    named.or_else(|| {
        let number = number(name)?;
        list.lines().find(|line| field(line, 2) == Some(number))
    })
}

fn field(line: &str, index: usize) -> Option<u32> {
    number(line.split(':').nth(index)?)
}

/// Not the highest one, which means nobody to the kernel.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number| *number != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_found_by_name_and_number() {
        let (passwd, group) = ("root:x:0:0::/:\nme:x:7:8::/:\n", "staff:x:50:\n");
        for (name, found) in [
            ("me", Some((7, 8))),
            ("7", Some((7, 8))),
            ("1234", Some((1234, 0))),
            ("me:staff", Some((7, 50))),
            ("me:9", Some((7, 9))),
            ("1:2", Some((1, 2))),
            ("nobody", None),
            ("me:nobody", None),
            ("4294967295", None),
            ("", None),
        ] {
            assert_eq!(numbers(passwd, group, name), found, "{name}");
        }
    }

    #[test]
    fn only_names_that_a_system_can_have_become_accounts() {
        assert!(is_new_name("app-1"));
        for name in [
            "",
            "-x",
            "1x",
            "a b",
            "a:b",
            "a\nb",
            "../x",
            &"x".repeat(33),
        ] {
            assert!(!is_new_name(name), "{name:?}");
        }
    }
}
