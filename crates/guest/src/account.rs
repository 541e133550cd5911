//! Users and groups, read from `/etc/passwd` and `/etc/group` directly.
//!
//! The agent is linked statically, so it must not touch NSS. The files are read again for every
//! request: a command may have added a user a moment ago, and they are a few kilobytes.

use std::{
    collections::BTreeMap,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

/// More than this of `passwd` or `group` is not read.
const DATABASE_BYTES_MAX: u64 = 1 << 20;
/// The kernel's own limit of supplementary groups.
const GROUPS_MAX: usize = 65_536;

/// One user, with everything a process of theirs needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// The login name.
    pub name: String,
    /// The user id.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// Every group, the primary one included.
    pub groups: Vec<u32>,
    /// The home directory.
    pub home: PathBuf,
    /// The login shell.
    pub shell: PathBuf,
}

impl Account {
    /// Whether this is the superuser.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }
}

/// Why there is no such account.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    /// Nobody has that name.
    #[error("user '{0}' does not exist")]
    Unknown(String),
    /// A database cannot be read.
    #[error("reading {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Where the accounts are.
#[derive(Debug, Clone)]
pub struct Accounts {
    passwd: PathBuf,
    group: PathBuf,
}

impl Accounts {
    /// The databases in this directory, `/etc` but for tests.
    #[must_use]
    pub fn in_dir(etc: &Path) -> Self {
        Self {
            passwd: etc.join("passwd"),
            group: etc.join("group"),
        }
    }

    /// The account of this name, or of this number.
    ///
    /// # Errors
    /// Nobody has it, or the databases cannot be read.
    pub fn find(&self, name: &str) -> Result<Account, AccountError> {
        let passwd = read_database(&self.passwd)?;
        let group = read_database(&self.group).unwrap_or_default();
        find_account(&passwd, &group, name).ok_or_else(|| AccountError::Unknown(name.to_owned()))
    }

    /// Names for user and group numbers, to show who owns a file.
    #[must_use]
    pub fn names(&self) -> OwnerNames {
        OwnerNames {
            users: parse_names(&read_database(&self.passwd).unwrap_or_default()),
            groups: parse_names(&read_database(&self.group).unwrap_or_default()),
        }
    }
}

/// Names of users and groups by number.
#[derive(Debug, Clone, Default)]
pub struct OwnerNames {
    users: BTreeMap<u32, String>,
    groups: BTreeMap<u32, String>,
}

impl OwnerNames {
    /// The user's name, or the number where there is none.
    #[must_use]
    pub fn user(&self, uid: u32) -> String {
        name_or_number(&self.users, uid)
    }

    /// The group's name, or the number where there is none.
    #[must_use]
    pub fn group(&self, gid: u32) -> String {
        name_or_number(&self.groups, gid)
    }
}

fn name_or_number(names: &BTreeMap<u32, String>, id: u32) -> String {
    names.get(&id).cloned().unwrap_or_else(|| id.to_string())
}

fn read_database(path: &Path) -> Result<String, AccountError> {
    let read = || -> io::Result<String> {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?
            .take(DATABASE_BYTES_MAX)
            .read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().map_err(|source| AccountError::Read {
        path: path.into(),
        source,
    })
}

/// Finds an account in the text of both databases. A number without an entry is an account too,
/// as images whose `USER` is a number expect.
pub(crate) fn find_account(passwd: &str, group: &str, name: &str) -> Option<Account> {
    let number = name.parse::<u32>().ok();
    let mut account = passwd
        .lines()
        .filter_map(parse_passwd_line)
        .find(|account| account.name == name)
        .or_else(|| {
            let number = number?;
            passwd
                .lines()
                .filter_map(parse_passwd_line)
                .find(|account| account.uid == number)
        })
        .or_else(|| number.map(account_without_entry))?;
    account.groups = supplementary_groups(group, &account.name, account.gid);
    Some(account)
}

fn account_without_entry(uid: u32) -> Account {
    Account {
        name: uid.to_string(),
        uid,
        gid: uid,
        groups: vec![uid],
        home: PathBuf::from("/"),
        shell: PathBuf::from("/bin/sh"),
    }
}

fn parse_passwd_line(line: &str) -> Option<Account> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty())?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1).filter(|home| !home.is_empty()).unwrap_or("/");
    let shell = fields
        .next()
        .filter(|shell| !shell.is_empty())
        .unwrap_or("/bin/sh");
    Some(Account {
        name: name.to_owned(),
        uid,
        gid,
        groups: vec![gid],
        home: PathBuf::from(home),
        shell: PathBuf::from(shell),
    })
}

fn supplementary_groups(group: &str, member: &str, primary: u32) -> Vec<u32> {
    let mut groups = vec![primary];
    for line in group.lines() {
        let mut fields = line.split(':');
        let gid = fields.nth(2).and_then(|gid| gid.parse::<u32>().ok());
        let is_member = fields
            .next()
            .is_some_and(|members| members.split(',').any(|name| name == member));
        if let Some(gid) = gid
            && is_member
            && !groups.contains(&gid)
            && groups.len() < GROUPS_MAX
        {
            groups.push(gid);
        }
    }
    groups
}

/// Name and number stand in the same columns of `passwd` and `group`.
fn parse_names(database: &str) -> BTreeMap<u32, String> {
    let mut names = BTreeMap::new();
    for line in database.lines() {
        let mut fields = line.split(':');
        if let (Some(name), Some(id)) = (fields.next(), fields.nth(1))
            && let Ok(id) = id.parse()
        {
            names.entry(id).or_insert_with(|| name.to_owned());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken\n:x:5:5::/:\n\
                          user:x:1000:1001:,,,:/home/user:\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:other,user\nuser:x:1001:\nx:y\n";

    #[test]
    fn an_account_has_its_supplementary_groups() {
        let user = find_account(PASSWD, GROUP, "user").unwrap();
        assert_eq!((user.uid, user.gid), (1000, 1001));
        assert_eq!(user.groups, [1001, 27]);
        assert_eq!(user.shell, Path::new("/bin/sh"));
    }

    #[test]
    fn numbers_name_accounts_too() {
        // BC-120: an image may say `USER 1234`.
        assert_eq!(find_account(PASSWD, GROUP, "1000").unwrap().name, "user");
        assert_eq!(find_account(PASSWD, GROUP, "1234").unwrap().uid, 1234);
        assert_eq!(find_account(PASSWD, GROUP, "nobody-here"), None);
        assert_eq!(find_account(PASSWD, GROUP, ""), None);
    }

    #[test]
    fn owners_without_a_name_are_numbers() {
        let names = OwnerNames {
            users: parse_names(PASSWD),
            groups: parse_names(GROUP),
        };
        assert_eq!(names.user(1000), "user");
        assert_eq!(names.group(27), "sudo");
        assert_eq!(names.user(77), "77");
    }
}
