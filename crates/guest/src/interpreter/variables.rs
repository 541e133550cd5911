//! Environment variables of kernels, and the code that changes them where a kernel has no other
//! way. Pure.

use std::collections::BTreeMap;

use super::language::Family;

/// No more variables than this come with one call.
const VARIABLES_MAX: usize = 1024;
/// Names and values together.
const VARIABLES_BYTES_MAX: usize = 1 << 20;

/// How a language sets a variable: its quoted name, its quoted value.
type Set = fn(&str, &str) -> String;
/// How a language unsets one.
type Unset = fn(&str) -> String;

/// What to change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) set: Vec<(String, String)>,
    pub(super) unset: Vec<String>,
}

impl Changes {
    /// What leads from one environment to another.
    pub(super) fn between(from: &BTreeMap<String, String>, to: &BTreeMap<String, String>) -> Self {
        Self {
            set: to
                .iter()
                .filter(|(name, value)| from.get(*name) != Some(value))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            unset: from
                .keys()
                .filter(|name| !to.contains_key(*name))
                .cloned()
                .collect(),
        }
    }

    /// Nothing is to be changed.
    pub(super) fn is_empty(&self) -> bool {
        self.set.is_empty() && self.unset.is_empty()
    }

    /// Code in the family's language that makes the changes; `None` if there is no way.
    pub(super) fn code(&self, family: &Family) -> Option<String> {
        let (set, unset): (Set, Unset) = match family {
            Family::Python => (
                |name, value| format!("__import__('os').environ[{name}] = {value}"),
                |name| format!("__import__('os').environ.pop({name}, None)"),
            ),
            Family::JavaScript => (
                |name, value| format!("Deno.env.set({name}, {value});"),
                |name| format!("Deno.env.delete({name});"),
            ),
            Family::R => (
                |name, value| format!("do.call(Sys.setenv, setNames(list({value}), {name}))"),
                |name| format!("Sys.unsetenv({name})"),
            ),
            Family::Java => (
                |name, value| format!("System.setProperty({name}, {value});"),
                |name| format!("System.clearProperty({name});"),
            ),
            Family::Bash => return Some(self.bash_code()),
            Family::Other(_) => return None,
        };
        let set = self
            .set
            .iter()
            .map(|(name, value)| set(&quoted(name), &quoted(value)));
        let unset = self.unset.iter().map(|name| unset(&quoted(name)));
        Some(set.chain(unset).collect::<Vec<_>>().join("\n"))
    }

    fn bash_code(&self) -> String {
        let set = self
            .set
            .iter()
            .filter(|(name, _)| is_shell_name(name))
            .map(|(name, value)| format!("export {name}={}", bash_quoted(value)));
        let unset = self
            .unset
            .iter()
            .filter(|name| is_shell_name(name))
            .map(|name| format!("unset {name}"));
        set.chain(unset).collect::<Vec<_>>().join("\n")
    }
}

/// Whether the variables of a call can be variables at all.
pub(super) fn check(variables: &BTreeMap<String, String>) -> Result<(), &'static str> {
    let bytes: usize = variables
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if variables.len() > VARIABLES_MAX || bytes > VARIABLES_BYTES_MAX {
        return Err("env_vars are too many or too long");
    }
    let bad_name = |name: &String| name.is_empty() || name.contains(['=', '\0']);
    if variables.keys().any(bad_name) || variables.values().any(|value| value.contains('\0')) {
        return Err("env_vars hold a name or a value that no variable can have");
    }
    Ok(())
}

/// A string literal that Python, JavaScript, R and Java read alike. (Java undoes `\u` escapes
/// before it looks for the end of a string, so what matters is not written that way.)
fn quoted(text: &str) -> String {
    let mut literal = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => literal.push_str("\\\""),
            '\\' => literal.push_str("\\\\"),
            '\n' => literal.push_str("\\n"),
            '\r' => literal.push_str("\\r"),
            '\t' => literal.push_str("\\t"),
            other => literal.push(other),
        }
    }
    literal.push('"');
    literal
}

/// A word that bash reads as this text, on one line.
pub(super) fn bash_quoted(text: &str) -> String {
    let mut word = String::from("$'");
    for character in text.chars() {
        match character {
            '\\' => word.push_str("\\\\"),
            '\'' => word.push_str("\\'"),
            '\n' => word.push_str("\\n"),
            '\r' => word.push_str("\\r"),
            // No variable and no program text of bash can hold it.
            '\0' => {}
            other => word.push(other),
        }
    }
    word.push('\'');
    word
}

fn is_shell_name(name: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn variables_of_a_call_come_and_go() {
        let sandbox = map(&[("A", "1"), ("B", "2")]);
        let call = map(&[("A", "1"), ("B", "3"), ("C", "4")]);
        let before = Changes::between(&sandbox, &call);
        assert_eq!(
            before.set,
            [("B".into(), "3".into()), ("C".into(), "4".into())]
        );
        assert_eq!(before.unset, [""; 0]);
        let after = Changes::between(&call, &sandbox);
        assert_eq!(after.set, [("B".into(), "2".into())]);
        assert_eq!(after.unset, ["C"]);
        assert!(Changes::between(&call, &call).is_empty());
    }

    #[test]
    fn hostile_values_stay_values() {
        let changes = Changes {
            set: vec![(String::from("A"), String::from("\"; evil('\\\n$(x)`y` é𝄞"))],
            unset: vec![],
        };
        assert_eq!(
            changes.code(&Family::JavaScript).unwrap(),
            "Deno.env.set(\"A\", \"\\\"; evil('\\\\\\n$(x)`y` é𝄞\");"
        );
        assert_eq!(
            changes.code(&Family::Bash).unwrap(),
            "export A=$'\"; evil(\\'\\\\\\n$(x)`y` é𝄞'"
        );
    }

    #[test]
    fn a_name_that_is_no_variable_of_the_shell_is_left_out() {
        let changes = Changes {
            set: vec![(String::from("a b; rm"), String::from("x"))],
            unset: vec![String::from("$(x)"), String::from("OK_1")],
        };
        assert_eq!(changes.code(&Family::Bash).unwrap(), "unset OK_1");
    }

    #[test]
    fn impossible_variables_are_refused() {
        assert!(check(&map(&[("A", "b=c")])).is_ok());
        for bad in [("", "x"), ("A=B", "x"), ("A", "x\0")] {
            assert!(check(&map(&[bad])).is_err(), "{bad:?}");
        }
        assert!(check(&map(&[("A", &"x".repeat(VARIABLES_BYTES_MAX))])).is_err());
    }
}
