//! Variables in the words of a step: `$NAME`, `${NAME}`, `${NAME:-word}`, and `\$` for a dollar.
//! Pure.

use std::collections::BTreeMap;

/// Puts values in the place of names. An unknown name is nothing, as in a shell.
pub(crate) fn expand(
    text: &str,
    environment: &BTreeMap<String, String>,
    search_path: &str,
) -> String {
    let value = |name: &str| match (environment.get(name), name) {
        (Some(value), _) => Some(value.as_str()),
        (None, "PATH") => Some(search_path),
        (None, _) => None,
    };
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(position) = rest.find(['$', '\\']) {
        expanded.push_str(&rest[..position]);
        rest = &rest[position..];
        if let Some(behind) = rest.strip_prefix("\\$") {
            expanded.push('$');
            rest = behind;
        } else if let Some((name, fallback, behind)) = reference(rest) {
            let found = value(name).filter(|value| fallback.is_none() || !value.is_empty());
            expanded.push_str(found.or(fallback).unwrap_or_default());
            rest = behind;
        } else {
            // One byte: both characters are ASCII.
            expanded.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    expanded.push_str(rest);
    expanded
}

/// A reference at the beginning of a text: its name, what stands for nothing, and what follows.
fn reference(text: &str) -> Option<(&str, Option<&str>, &str)> {
    let behind = text.strip_prefix('$')?;
    if let Some(inner) = behind.strip_prefix('{') {
        let (inner, rest) = inner.split_once('}')?;
        let (name, fallback) = match inner.split_once(":-") {
            Some((name, fallback)) => (name, Some(fallback)),
            None => (inner, None),
        };
        return (name_length(name) == name.len()).then_some((name, fallback, rest));
    }
    let length = name_length(behind);
    (length > 0).then(|| (&behind[..length], None, &behind[length..]))
}

fn name_length(text: &str) -> usize {
    let inner = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
    let length = text.bytes().take_while(inner).count();
    match text.bytes().next() {
        Some(first) if !first.is_ascii_digit() => length,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_values_and_all_else_stays() {
        let environment = BTreeMap::from([("A".into(), "1".into()), ("E".into(), String::new())]);
        for (text, expected) in [
            ("", ""),
            ("plain", "plain"),
            ("$A", "1"),
            ("x${A}y", "x1y"),
            ("$AB", ""),
            ("$A-$B", "1-"),
            ("${B:-two}", "two"),
            ("${E:-two}", "two"),
            ("${A:-two}", "1"),
            ("\\$A", "$A"),
            ("a\\b", "a\\b"),
            ("$", "$"),
            ("$$A", "$1"),
            ("${A", "${A"),
            ("${A!}", "${A!}"),
            ("$1", "$1"),
            ("ж$Aж", "ж1ж"),
            ("$PATH", "/p"),
        ] {
            assert_eq!(expand(text, &environment, "/p"), expected, "{text}");
        }
    }
}
