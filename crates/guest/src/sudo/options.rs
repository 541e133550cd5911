//! The command line of `sudo`, as much of it as scripts use. Pure.

use super::ShellUse;

/// What was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    /// Run something.
    Run(Wanted),
    /// Nothing to run: renewing or forgetting a password that nobody has.
    Nothing,
    /// Print this.
    Print(&'static str),
}

/// A command and how to run it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) user: Option<String>,
    pub(super) command: Vec<String>,
    pub(super) shell: Shell,
    pub(super) keep: Keep,
    pub(super) directory: Option<String>,
    /// `NAME=value` before the command.
    pub(super) assignments: Vec<(String, String)>,
}

/// Newtype so that a default exists here only.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shell(pub(super) ShellUse);

impl Default for Shell {
    fn default() -> Self {
        Self(ShellUse::None)
    }
}

/// What of the environment is kept beyond the usual.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Keep {
    #[default]
    Usual,
    All,
    Also(Vec<String>),
}

const HELP: &str = "usage: sudo [-EHn] [-u user] [-D directory] [VAR=value] [-i | -s] [command]\n\
    In this sandbox sudo asks the sandbox's agent, by the rules of /etc/sudoers.\n";

/// Reads the arguments behind the program's name.
pub(super) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Parsed, String> {
    let mut arguments = arguments.into_iter().peekable();
    let mut wanted = Wanted::default();
    let mut nothing = false;
    while let Some(argument) = arguments.next_if(|a| a.starts_with('-') && a.len() > 1) {
        if argument == "--" {
            break;
        }
        if let Some(long) = argument.strip_prefix("--") {
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (long, None),
            };
            let mut value_of = |given: Option<String>| {
                let value = given.or_else(|| arguments.next());
                value.ok_or_else(|| format!("option '--{name}' needs a value"))
            };
            match name {
                "user" => wanted.user = Some(value_of(value)?),
                "chdir" => wanted.directory = Some(value_of(value)?),
                "prompt" => drop(value_of(value)?),
                "preserve-env" => wanted.keep = kept(value),
                "login" => wanted.shell = Shell(ShellUse::Login),
                "shell" => wanted.shell = Shell(ShellUse::Plain),
                "non-interactive" | "stdin" | "set-home" | "bell" => {}
                "validate" | "reset-timestamp" | "remove-timestamp" | "list" => nothing = true,
                "version" => return Ok(Parsed::Print("sudo of the sandbox's agent\n")),
                "help" => return Ok(Parsed::Print(HELP)),
                _ => return Err(format!("option '--{name}' is not known")),
            }
            continue;
        }
        let mut letters = argument[1..].chars();
        while let Some(letter) = letters.next() {
            let mut value = || {
                let rest: String = letters.by_ref().collect();
                let value = if rest.is_empty() {
                    arguments.next()
                } else {
                    Some(rest)
                };
                value.ok_or_else(|| format!("option '-{letter}' needs a value"))
            };
            match letter {
                'u' => wanted.user = Some(value()?),
                'D' => wanted.directory = Some(value()?),
                'p' => drop(value()?),
                'E' => wanted.keep = Keep::All,
                'i' => wanted.shell = Shell(ShellUse::Login),
                's' => wanted.shell = Shell(ShellUse::Plain),
                'n' | 'S' | 'H' | 'B' => {}
                'v' | 'k' | 'K' | 'l' => nothing = true,
                'V' => return Ok(Parsed::Print("sudo of the sandbox's agent\n")),
                'h' => return Ok(Parsed::Print(HELP)),
                _ => return Err(format!("option '-{letter}' is not known")),
            }
        }
    }
    let is_assignment = |a: &String| a.split_once('=').is_some_and(|(name, _)| is_name(name));
    while let Some(assignment) = arguments.next_if(is_assignment) {
        if let Some((name, value)) = assignment.split_once('=') {
            wanted.assignments.push((name.to_owned(), value.to_owned()));
        }
    }
    wanted.command = arguments.collect();
    match (wanted.command.is_empty(), wanted.shell.0) {
        (true, ShellUse::None) if nothing => Ok(Parsed::Nothing),
        (true, ShellUse::None) => Err(String::from("there is no command")),
        _ => Ok(Parsed::Run(wanted)),
    }
}

fn kept(list: Option<String>) -> Keep {
    match list {
        None => Keep::All,
        Some(list) => Keep::Also(list.split(',').map(str::to_owned).collect()),
    }
}

fn is_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.bytes().all(inner) && text.bytes().next().is_some_and(|b| !b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Wanted {
        match parse(line.split(' ').map(str::to_owned)) {
            Ok(Parsed::Run(wanted)) => wanted,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn what_scripts_use_is_understood() {
        assert_eq!(
            run("apt-get install -y jq").command,
            ["apt-get", "install", "-y", "jq"]
        );
        let wanted = run("-nEu other A=1 B= env -i X=2");
        assert_eq!(wanted.user.as_deref(), Some("other"));
        assert_eq!(wanted.keep, Keep::All);
        let pair = |n: &str, v: &str| (n.to_owned(), v.to_owned());
        assert_eq!(wanted.assignments, [pair("A", "1"), pair("B", "")]);
        assert_eq!(wanted.command, ["env", "-i", "X=2"]);
        assert_eq!(run("-uwww id").user.as_deref(), Some("www"));
        assert_eq!(run("--user=#33 -- -x").command, ["-x"]);
        assert_eq!(run("-i").shell.0, ShellUse::Login);
        assert_eq!(run("-s echo a").shell.0, ShellUse::Plain);
        let also = Keep::Also(vec!["A".into(), "B".into()]);
        assert_eq!(run("--preserve-env=A,B x").keep, also);
    }

    #[test]
    fn the_rest_is_told() {
        let parse = |line: &str| parse(line.split_whitespace().map(str::to_owned));
        assert_eq!(parse("-v"), Ok(Parsed::Nothing));
        assert_eq!(parse("-k"), Ok(Parsed::Nothing));
        assert!(matches!(parse("--help"), Ok(Parsed::Print(_))));
        for wrong in ["", "-u", "-Z x", "--strange x", "--", "A=1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
