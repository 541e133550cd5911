//! Words of Dockerfiles: pairs, quotes, values of arguments. Pure.

use std::collections::BTreeMap;

/// Reads `NAME=value …`, or the old `NAME some value`. A `$` that a quote protects keeps a `\`
/// before it, so that it is still protected later.
pub(super) fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let text = joined(text);
    let words = split(&text)?;
    let first = words.first()?;
    if !first.contains('=') {
        let (name, value) = text.trim().split_once(char::is_whitespace)?;
        return is_name(name).then(|| vec![(name.to_owned(), value.trim().to_owned())]);
    }
    words.iter().map(|word| pair(word)).collect()
}

/// Reads `NAME`, `NAME=value` and several of them.
pub(super) fn declarations(text: &str) -> Option<Vec<(String, Option<String>)>> {
    let words = split(&joined(text))?;
    let read = words.iter().map(|word| match word.contains('=') {
        true => pair(word).map(|(name, value)| (name, Some(value))),
        false => is_name(word).then(|| (word.clone(), None)),
    });
    read.collect::<Option<Vec<_>>>()
        .filter(|list| !list.is_empty())
}

fn pair(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    is_name(name).then(|| (name.to_owned(), value.to_owned()))
}

fn is_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    !text.is_empty() && text.bytes().all(inner)
}

/// Lines that a `\` continues become one.
fn joined(text: &str) -> String {
    without_comments(text).replace("\\\n", " ")
}

/// Drops comments between lines that continue one another.
pub(super) fn without_comments(text: &str) -> String {
    let kept = text
        .lines()
        .enumerate()
        .filter(|(index, line)| *index == 0 || !line.trim_start().starts_with('#'));
    kept.map(|(_, line)| line).collect::<Vec<_>>().join("\n")
}

/// Splits at blanks outside of quotes, and takes the quotes away.
fn split(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (character, quote) {
            (blank, None) if blank.is_whitespace() => words.extend(word.take()),
            ('\'' | '"', None) => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (closing, Some(open)) if closing == open => quote = None,
            ('$', Some('\'')) => word.get_or_insert_default().push_str("\\$"),
            ('\\', None | Some('"')) => {
                let next = characters.next()?;
                let word = word.get_or_insert_default();
                // What the quotes do not need stays as it was written.
                if next == '$' || (quote.is_some() && next != '"' && next != '\\') {
                    word.push('\\');
                }
                word.push(next);
            }
            (other, _) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    quote.is_none().then_some(words)
}

/// Puts values of arguments in the place of `$NAME`, `${NAME}` and `${NAME:-word}`; every other
/// variable stays for the build to know.
pub(super) fn substitute(text: &str, arguments: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(position) = rest.find(['$', '\\']) {
        out.push_str(&rest[..position]);
        rest = &rest[position..];
        let length = match reference_length(rest) {
            Some((name, length)) => match arguments.get(name) {
                Some(value) => {
                    out.push_str(value);
                    rest = &rest[length..];
                    continue;
                }
                None => length,
            },
            // A protected dollar, or one that stands alone.
            None if rest.starts_with("\\$") => 2,
            None => 1,
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out.push_str(rest);
    out
}

/// The name at the beginning of a text that refers to one, and how long the reference is.
fn reference_length(text: &str) -> Option<(&str, usize)> {
    let behind = text.strip_prefix('$')?;
    let inner = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    match behind.strip_prefix('{') {
        Some(braced) => {
            let end = braced.find('}')?;
            let content = &braced[..end];
            let name = content.split(":-").next().unwrap_or(content);
            (!name.is_empty() && name.bytes().all(inner)).then_some((name, end + 3))
        }
        None => {
            let length = behind.bytes().take_while(|b| inner(*b)).count();
            (length > 0).then(|| (&behind[..length], length + 1))
        }
    }
}

/// A word for a shell.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_end_at_blanks_outside_of_quotes() {
        for (text, expected) in [
            ("a b", Some(vec!["a", "b"])),
            ("a=\"b c\" d='e f'", Some(vec!["a=b c", "d=e f"])),
            ("a\\ b", Some(vec!["a b"])),
            ("\"\" x", Some(vec!["", "x"])),
            ("\"a\\\"b\\n\"", Some(vec!["a\"b\\n"])),
            ("'$a' \"$a\" \\$a", Some(vec!["\\$a", "$a", "\\$a"])),
            ("'open", None),
            ("end\\", None),
        ] {
            let expected = expected.map(|l| l.into_iter().map(str::to_owned).collect::<Vec<_>>());
            assert_eq!(split(text), expected, "{text}");
        }
    }

    #[test]
    fn only_arguments_are_substituted() {
        let arguments = BTreeMap::from([("A".to_owned(), "1".to_owned())]);
        for (text, expected) in [
            ("$A ${A} ${A:-x} $B ${B:-y}", "1 1 1 $B ${B:-y}"),
            ("\\$A $$ $", "\\$A $$ $"),
            ("ж$Aж \\ж", "ж1ж \\ж"),
        ] {
            assert_eq!(substitute(text, &arguments), expected);
        }
    }
}
