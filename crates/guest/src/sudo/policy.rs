//! Who may do everything without a password, by `/etc/sudoers`. Pure, but for reading the files.

use std::{collections::BTreeSet, fs, path::Path};

use crate::account::{Account, Accounts};

/// How many users get a socket.
const USERS_MAX: usize = 64;
/// More than this of a file is not read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The users, by `etc`, who may become anybody. Rules for single commands or with a password are
/// not kept by this `sudo`, so they allow nothing.
pub(super) fn allowed(etc: &Path, accounts: &Accounts) -> Vec<Account> {
    let mut rules = read(&etc.join("sudoers"));
    let further = fs::read_dir(etc.join("sudoers.d")).into_iter().flatten();
    let mut further: Vec<_> = further.flatten().map(|entry| entry.path()).collect();
    further.sort();
    for path in further {
        rules.push('\n');
        rules.push_str(&read(&path));
    }
    let passwd = read(&etc.join("passwd"));
    let names = passwd.lines().filter_map(|line| line.split(':').next());
    let group = read(&etc.join("group"));
    names
        .filter_map(|name| accounts.find(name).ok())
        .filter(|account| !account.is_root() && may(account, &rules, &group))
        .take(USERS_MAX)
        .collect()
}

fn read(path: &Path) -> String {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() <= FILE_BYTES_MAX => {
            fs::read_to_string(path).unwrap_or_default()
        }
        _ => String::new(),
    }
}

/// Whether one of the rules is `who host=(whoever) NOPASSWD: ALL` for this account.
fn may(account: &Account, rules: &str, group: &str) -> bool {
    rules.lines().any(|rule| {
        let rule = rule.split('#').next().unwrap_or_default();
        let Some((who, rest)) = rule.trim().split_once(char::is_whitespace) else {
            return false;
        };
        let Some((host, rest)) = rest.split_once('=') else {
            return false;
        };
        // As anybody, in all its spellings.
        let rest: String = rest.chars().filter(|c| !c.is_whitespace()).collect();
        let as_anybody = ["(ALL)", "(ALL:ALL)"]
            .iter()
            .any(|run_as| rest.strip_prefix(run_as) == Some("NOPASSWD:ALL"));
        host.trim() == "ALL" && as_anybody && is_meant(account, who, group)
    })
}

/// Reads `text` as rules and groups. Nobody is allowed everything without the words that say so.
pub(super) fn read_all(text: &str) {
    if let Some(account) = crate::account::find_account(text, text, "user") {
        let words: String = text.split_whitespace().collect();
        assert!(!may(&account, text, text) || words.contains("NOPASSWD:ALL"));
    }
}

fn is_meant(account: &Account, who: &str, group: &str) -> bool {
    if let Some(name) = who.strip_prefix('%') {
        let ids: BTreeSet<u32> = account.groups.iter().copied().collect();
        return group.lines().any(|line| {
            let mut fields = line.split(':');
            fields.next() == Some(name)
                && fields
                    .nth(1)
                    .and_then(|id| id.parse().ok())
                    .is_some_and(|id| ids.contains(&id))
        });
    }
    who == account.name || who == "ALL"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account {
            name: String::from("user"),
            uid: 1000,
            gid: 1000,
            groups: vec![1000, 27],
            home: "/home/user".into(),
            shell: "/bin/sh".into(),
        }
    }

    #[test]
    fn only_everything_without_a_password_counts() {
        let group = "sudo:x:27:user\nwheel:x:10:\n";
        let may = |rule: &str| may(&account(), rule, group);
        for rule in [
            "user ALL=(ALL) NOPASSWD:ALL",
            "user\tALL = (ALL:ALL)  NOPASSWD: ALL # why",
            "%sudo ALL=(ALL:ALL) NOPASSWD:ALL",
            "ALL ALL=(ALL) NOPASSWD: ALL",
            "root ALL=(ALL) ALL\nuser ALL=(ALL) NOPASSWD:ALL\n",
        ] {
            assert!(may(rule), "{rule}");
        }
        for rule in [
            "",
            "user ALL=(ALL) ALL",
            "user ALL=(ALL) NOPASSWD: /bin/ls",
            "user ALL=(www-data) NOPASSWD: ALL",
            "other ALL=(ALL) NOPASSWD:ALL",
            "%wheel ALL=(ALL) NOPASSWD:ALL",
            "# user ALL=(ALL) NOPASSWD:ALL",
            "user elsewhere=(ALL) NOPASSWD:ALL",
            "Defaults env_reset",
        ] {
            assert!(!may(rule), "{rule}");
        }
    }
}
