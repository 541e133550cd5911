//! The lines of an answer: one JSON object each, never blank (wire contract section 3).
//!
//! Pure: what a kernel said goes in, lines come out, each within a bound (BC-048).

use std::io;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::events::{Failure, Stream};

/// Longer text in a result is cut, with a marker.
const TEXT_BYTES_MAX: usize = 4 << 20;
/// A longer picture, document or data in a result is left out, with a marker in its text.
const BINARY_BYTES_MAX: usize = 48 << 20;
/// Printed text goes out in lines of at most this much.
const PRINTED_BYTES_MAX: usize = 1 << 20;

/// The MIME types that have a key of their own, and that key.
const KEYS: &[(&str, &str)] = &[
    ("text/plain", "text"),
    ("text/html", "html"),
    ("text/markdown", "markdown"),
    ("image/svg+xml", "svg"),
    ("image/png", "png"),
    ("image/jpeg", "jpeg"),
    ("application/pdf", "pdf"),
    ("text/latex", "latex"),
    ("application/json", "json"),
    ("application/javascript", "javascript"),
    ("e2b/data", "data"),
    ("e2b/chart", "chart"),
];

/// One line of the answer, without its line feed.
pub(super) type Line = Vec<u8>;

/// The n-th execution of its kernel began.
pub(super) fn began(count: u64) -> Line {
    line(&json!({"type": "number_of_executions", "execution_count": count}))
}

/// The execution is over; nothing follows.
pub(super) fn ended() -> Line {
    line(&json!({"type": "end_of_execution"}))
}

/// The execution is still going on.
pub(super) fn keepalive() -> Line {
    line(&json!({"type": "keepalive"}))
}

/// Printed text, in as many lines as it takes.
pub(super) fn printed(stream: Stream, text: &str, timestamp: &str) -> Vec<Line> {
    #[derive(Serialize)]
    struct Printed<'a> {
        r#type: &'static str,
        text: &'a str,
        timestamp: &'a str,
    }
    let r#type = match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    };
    pieces(text, PRINTED_BYTES_MAX)
        .map(|text| {
            line(&Printed {
                r#type,
                text,
                timestamp,
            })
        })
        .collect()
}

/// An error of the code.
pub(super) fn failed(failure: &Failure) -> Line {
    line(&json!({
        "type": "error",
        "name": cut(failure.name.clone()),
        "value": cut(failure.value.clone()),
        "traceback": cut(failure.traceback.clone()),
    }))
}

/// Something that was shown, by MIME type.
pub(super) fn showed(main: bool, mut bundle: Map<String, Value>) -> Line {
    let mut result = Map::new();
    let mut left_out = Vec::new();
    for (mime, key) in KEYS {
        if let Some(value) = bundle.remove(*mime) {
            let value = bounded(mime, value, &mut left_out);
            if !value.is_null() {
                result.insert((*key).to_owned(), value);
            }
        }
    }
    let extra: Map<String, Value> = bundle
        .into_iter()
        .map(|(mime, value)| {
            let value = bounded(&mime, value, &mut left_out);
            (mime, value)
        })
        .filter(|(_, value)| !value.is_null())
        .collect();
    if let Some(Value::String(text)) = result.get_mut("text") {
        strip_quotes(text);
    }
    if !left_out.is_empty() {
        let text = result
            .entry("text")
            .or_insert_with(|| Value::String(String::new()));
        if let Value::String(text) = text {
            text.push_str(&left_out.concat());
        }
    }
    result.insert(String::from("type"), json!("result"));
    result.insert(String::from("is_main_result"), json!(main));
    if !extra.is_empty() {
        result.insert(String::from("extra"), Value::Object(extra));
    }
    line(&result)
}

fn bounded(mime: &str, value: Value, left_out: &mut Vec<String>) -> Value {
    let is_text = mime.starts_with("text/") || mime == "application/javascript";
    match join_lines(value) {
        Value::String(text) if is_text => Value::String(cut(text)),
        Value::String(text) if text.len() > BINARY_BYTES_MAX => {
            left_out.push(format!("[left out: {mime} of {} bytes]", text.len()));
            Value::Null
        }
        other => other,
    }
}

/// Text may come as a list of lines.
fn join_lines(value: Value) -> Value {
    match value {
        Value::Array(lines) if !lines.is_empty() && lines.iter().all(Value::is_string) => {
            Value::String(lines.iter().filter_map(Value::as_str).collect())
        }
        other => other,
    }
}

/// A string's own quotes say nothing to a reader.
fn strip_quotes(text: &mut String) {
    for quote in ['\'', '"'] {
        if text.len() >= 2 && text.starts_with(quote) && text.ends_with(quote) {
            text.pop();
            text.remove(0);
            return;
        }
    }
}

fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let at = boundary_before(&text, TEXT_BYTES_MAX);
        let marker = format!("\n[cut: {} more bytes]", text.len() - at);
        text.truncate(at);
        text.push_str(&marker);
    }
    text
}

fn pieces(text: &str, bytes_max: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let at = boundary_before(rest, bytes_max);
        let (piece, after) = rest.split_at(at);
        rest = after;
        Some(piece)
    })
}

/// The last place at or before `at` where the text may be divided.
fn boundary_before(text: &str, at: usize) -> usize {
    if at >= text.len() {
        return text.len();
    }
    (0..=at)
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0)
}

fn line(value: &impl Serialize) -> Line {
    let mut line = Vec::with_capacity(128);
    let mut serializer = serde_json::Serializer::with_formatter(&mut line, OneLine);
    if value.serialize(&mut serializer).is_err() {
        // Strings, numbers and JSON values have no way to fail; and this line is ignored.
        return b"{\"type\":\"keepalive\"}".to_vec();
    }
    line
}

/// JSON without the characters at which some clients end a line though JSON allows them.
struct OneLine;

impl serde_json::ser::Formatter for OneLine {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some((at, separator)) = rest
            .char_indices()
            .find(|(_, c)| matches!(c, '\u{85}' | '\u{2028}' | '\u{2029}'))
        {
            writer.write_all(&rest.as_bytes()[..at])?;
            write!(writer, "\\u{:04x}", u32::from(separator))?;
            rest = &rest[at + separator.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(main: bool, bundle: Value) -> Value {
        let Value::Object(bundle) = bundle else {
            panic!("bundles are objects")
        };
        serde_json::from_slice(&showed(main, bundle)).unwrap()
    }

    #[test]
    fn each_mime_type_has_its_key_and_others_are_extra() {
        let got = result(
            true,
            json!({
                "text/plain": "<Figure>",
                "image/png": "aGk=",
                "application/json": {"a": 1},
                "e2b/chart": {"type": "line"},
                "application/vnd.x": 5,
            }),
        );
        assert_eq!(
            got,
            json!({
                "type": "result",
                "is_main_result": true,
                "text": "<Figure>",
                "png": "aGk=",
                "json": {"a": 1},
                "chart": {"type": "line"},
                "extra": {"application/vnd.x": 5},
            })
        );
    }

    #[test]
    fn the_quotes_of_a_string_are_stripped_once() {
        for (text, want) in [
            ("'a'", "a"),
            ("\"it's\"", "it's"),
            ("''", ""),
            ("'", "'"),
            ("'a\"", "'a\""),
            ("\"'a'\"", "'a'"),
        ] {
            let got = result(false, json!({"text/plain": text}));
            assert_eq!(got["text"], want);
        }
    }

    #[test]
    fn lines_of_text_become_text() {
        let got = result(false, json!({"text/html": ["<p>", "</p>"]}));
        assert_eq!(got["html"], "<p></p>");
    }

    #[test]
    fn giant_text_is_cut_with_a_marker() {
        // BC-048
        let got = result(true, json!({"text/plain": "é".repeat(TEXT_BYTES_MAX)}));
        let text = got["text"].as_str().unwrap();
        assert!(text.len() < TEXT_BYTES_MAX + 64);
        assert!(
            text.ends_with("[cut: 4194304 more bytes]"),
            "{}",
            &text[text.len() - 40..]
        );
    }

    #[test]
    fn a_giant_picture_is_left_out_with_a_marker() {
        // BC-048
        let got = result(
            false,
            json!({"text/plain": "<Figure>", "image/png": "a".repeat(BINARY_BYTES_MAX + 1)}),
        );
        assert_eq!(got.get("png"), None);
        assert_eq!(
            got["text"],
            "<Figure>[left out: image/png of 50331649 bytes]"
        );
    }

    #[test]
    fn printed_text_is_divided_between_characters() {
        let text = "é".repeat(PRINTED_BYTES_MAX);
        let lines = printed(Stream::Stderr, &text, "2026-01-01T00:00:00Z");
        assert!(lines.len() > 1);
        let joined: String = lines
            .iter()
            .map(|line| {
                let value: Value = serde_json::from_slice(line).unwrap();
                assert_eq!(value["type"], "stderr");
                assert_eq!(value["timestamp"], "2026-01-01T00:00:00Z");
                value["text"].as_str().unwrap().to_owned()
            })
            .collect();
        assert!(joined == text);
    }

    #[test]
    fn a_line_is_one_line_to_every_client() {
        // A blank or broken line makes clients raise; Python's ends lines at U+2028 too.
        let text = "a\n\u{2028}\u{2029}\u{85}\0b\r\u{1c}é\n";
        let lines = printed(Stream::Stdout, text, "t");
        assert_eq!(lines.len(), 1);
        let line = std::str::from_utf8(&lines[0]).unwrap();
        let ends = ['\n', '\r', '\u{1c}', '\u{2028}', '\u{2029}', '\u{85}'];
        assert!(!line.contains(ends), "{line}");
        let value: Value = serde_json::from_str(line).unwrap();
        assert_eq!(value["text"], text);
        let failure = Failure {
            name: String::from("E\n"),
            value: String::new(),
            traceback: String::from("a\nb"),
        };
        assert!(!failed(&failure).contains(&b'\n'));
    }
}
