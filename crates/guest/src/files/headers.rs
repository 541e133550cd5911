//! The headers of downloads: what the client accepts, wants and is told. Pure.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Ranges in one header that are looked at; more make the header void.
const RANGES_MAX: usize = 16;
/// What RFC 5987 lets stand in a value.
const UNESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'!')
    .remove(b'#')
    .remove(b'$')
    .remove(b'&')
    .remove(b'+')
    .remove(b'-')
    .remove(b'.')
    .remove(b'^')
    .remove(b'_')
    .remove(b'`')
    .remove(b'|')
    .remove(b'~');

/// How the contents are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// As they are.
    Identity,
    /// Compressed.
    Gzip,
}

/// What `Accept-Encoding` lets us choose: gzip where it is wanted at least as much. `None` if it
/// forbids everything we have.
#[must_use]
pub fn choose_encoding(accept: Option<&str>) -> Option<Encoding> {
    let Some(accept) = accept else {
        return Some(Encoding::Identity);
    };
    let mut gzip = None;
    let mut identity = None;
    let mut any = None;
    for part in accept.split(',') {
        let mut pieces = part.split(';');
        let name = pieces
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase();
        let quality = pieces.find_map(quality).unwrap_or(1.0);
        match name.as_str() {
            "gzip" | "x-gzip" => gzip = Some(quality),
            "identity" => identity = Some(quality),
            "*" => any = Some(quality),
            _ => {}
        }
    }
    let gzip = gzip.or(any).unwrap_or(0.0);
    let identity_quality = identity.or_else(|| any.filter(|quality| *quality == 0.0));
    if gzip > 0.0 && gzip >= identity.unwrap_or(0.0) {
        return Some(Encoding::Gzip);
    }
    (identity_quality != Some(0.0)).then_some(Encoding::Identity)
}

fn quality(parameter: &str) -> Option<f32> {
    let value = parameter.trim().strip_prefix("q=")?;
    let quality: f32 = value.parse().ok()?;
    (0.0..=1.0).contains(&quality).then_some(quality)
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRange {
    /// The first byte.
    pub start: u64,
    /// How many; never zero.
    pub length: u64,
}

/// What a `Range` header means for a file of some size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeAnswer {
    /// The whole file: no range, one we do not understand, or several (which a server may
    /// answer so).
    Whole,
    /// This part.
    Part(ByteRange),
    /// Nothing of it is in the file: 416.
    Unsatisfiable,
}

/// Reads a `Range` header.
#[must_use]
pub fn read_range(header: Option<&str>, size: u64) -> RangeAnswer {
    let Some(ranges) = header.and_then(|header| header.trim().strip_prefix("bytes=")) else {
        return RangeAnswer::Whole;
    };
    let mut specs = ranges.split(',').take(RANGES_MAX);
    let (Some(spec), None) = (specs.next(), specs.next()) else {
        return RangeAnswer::Whole;
    };
    let Some((first, last)) = spec.trim().split_once('-') else {
        return RangeAnswer::Whole;
    };
    match (digits(first), digits(last)) {
        (Some(Some(start)), Some(end)) => {
            let end = end.unwrap_or(u64::MAX).min(size.saturating_sub(1));
            if end < start && last.is_empty() || start >= size {
                return RangeAnswer::Unsatisfiable;
            }
            match end.checked_sub(start) {
                Some(rest) => RangeAnswer::Part(ByteRange {
                    start,
                    length: rest + 1,
                }),
                None => RangeAnswer::Whole,
            }
        }
        (Some(None), Some(Some(suffix))) => {
            let length = suffix.min(size);
            if length == 0 {
                return RangeAnswer::Unsatisfiable;
            }
            RangeAnswer::Part(ByteRange {
                start: size - length,
                length,
            })
        }
        _ => RangeAnswer::Whole,
    }
}

/// A number, nothing (`Some(None)`), or something else (`None`).
#[allow(clippy::option_option)]
fn digits(text: &str) -> Option<Option<u64>> {
    if text.is_empty() {
        return Some(None);
    }
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // A number beyond all files is as good as the largest one.
    Some(Some(text.parse().unwrap_or(u64::MAX)))
}

/// `Content-Disposition` for a file of this name (RFC 6266): a harmless ASCII form for old
/// clients, and the real name.
#[must_use]
pub fn content_disposition(name: &str) -> String {
    let ascii: String = name
        .chars()
        .map(|character| match character {
            '"' | '\\' | '%' | ';' | '/' => '_',
            ' '..='~' => character,
            _ => '_',
        })
        .collect();
    if ascii == name {
        return format!("inline; filename=\"{ascii}\"");
    }
    let encoded = utf8_percent_encode(name, UNESCAPED);
    format!("inline; filename=\"{ascii}\"; filename*=UTF-8''{encoded}")
}

/// A validator that changes whenever the file does.
#[must_use]
pub fn entity_tag(size: u64, modified_s: i64, modified_ns: i64, inode: u64) -> String {
    format!("\"{size:x}-{modified_s:x}-{modified_ns:x}-{inode:x}\"")
}

/// Whether an `If-None-Match` or `If-Match` list names this tag.
#[must_use]
pub fn names_tag(list: &str, tag: &str) -> bool {
    let bare = |tag: &str| tag.trim().trim_start_matches("W/").to_owned();
    list.trim() == "*" || list.split(',').any(|one| bare(one) == bare(tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_chosen_as_asked() {
        use Encoding::{Gzip, Identity};
        for (accept, expected) in [
            (None, Some(Identity)),
            (Some(""), Some(Identity)),
            (Some("gzip, deflate"), Some(Gzip)),
            (Some("br"), Some(Identity)),
            (Some("GZIP;q=0.5"), Some(Gzip)),
            (Some("gzip;q=0"), Some(Identity)),
            (Some("gzip;q=0.1, identity"), Some(Identity)),
            (Some("*"), Some(Gzip)),
            (Some("identity;q=0, gzip"), Some(Gzip)),
            (Some("identity;q=0"), None),
            (Some("*;q=0"), None),
            (Some("br, identity;q=0, *;q=0"), None),
            (Some("gzip;q=nonsense"), Some(Gzip)),
        ] {
            assert_eq!(choose_encoding(accept), expected, "{accept:?}");
        }
    }

    #[test]
    fn ranges_are_read_as_the_rfc_says() {
        let part = |start, length| RangeAnswer::Part(ByteRange { start, length });
        for (header, size, expected) in [
            (None, 10, RangeAnswer::Whole),
            (Some("bytes=0-3"), 10, part(0, 4)),
            (Some("bytes=4-"), 10, part(4, 6)),
            (Some("bytes=-3"), 10, part(7, 3)),
            (Some("bytes=-99"), 10, part(0, 10)),
            (Some("bytes=0-99"), 10, part(0, 10)),
            (Some("bytes=10-"), 10, RangeAnswer::Unsatisfiable),
            (Some("bytes=-0"), 10, RangeAnswer::Unsatisfiable),
            // BC-050: an empty file has no part.
            (Some("bytes=0-"), 0, RangeAnswer::Unsatisfiable),
            (Some("bytes=-1"), 0, RangeAnswer::Unsatisfiable),
            (Some("bytes=5-2"), 10, RangeAnswer::Whole),
            (Some("bytes=0-1,3-4"), 10, RangeAnswer::Whole),
            (Some("lines=0-1"), 10, RangeAnswer::Whole),
            (Some("bytes=a-b"), 10, RangeAnswer::Whole),
            (Some("bytes=-"), 10, RangeAnswer::Whole),
            (
                Some("bytes=99999999999999999999999-"),
                10,
                RangeAnswer::Unsatisfiable,
            ),
            (Some("bytes=1-99999999999999999999999"), 10, part(1, 9)),
        ] {
            assert_eq!(read_range(header, size), expected, "{header:?} of {size}");
        }
    }

    #[test]
    fn names_cannot_break_out_of_the_header() {
        // BC-053
        assert_eq!(
            content_disposition("plain name.txt"),
            "inline; filename=\"plain name.txt\""
        );
        assert_eq!(
            content_disposition("报告 v2.pdf"),
            "inline; filename=\"__ v2.pdf\"; filename*=UTF-8''%E6%8A%A5%E5%91%8A%20v2.pdf"
        );
        assert_eq!(
            content_disposition("naïve;name=\".txt"),
            "inline; filename=\"na_ve_name=_.txt\"; \
             filename*=UTF-8''na%C3%AFve%3Bname%3D%22.txt"
        );
        let hostile = content_disposition("a\r\nX-Evil: 1\".txt");
        assert!(!hostile.contains(['\r', '\n']), "{hostile}");
        assert!(axum::http::HeaderValue::from_str(&hostile).is_ok());
    }

    #[test]
    fn tags_are_compared_weakly() {
        assert!(names_tag("W/\"a\", \"b\"", "\"a\""));
        assert!(names_tag("*", "\"a\""));
        assert!(!names_tag("\"c\"", "\"a\""));
    }
}
