//! The client's metadata of a file: `X-Metadata-*` headers, kept as extended attributes
//! `user.e2b.*` (BC-061).

use std::{collections::BTreeMap, io, os::fd::AsFd};

use http::HeaderMap;
use rustix::fs::XattrFlags;

use crate::{
    filesystem::entry::{METADATA_PREFIX, METADATA_VALUE_BYTES_MAX, metadata_key},
    http_error::HttpError,
};

/// What the headers begin with.
const HEADER_PREFIX: &str = "x-metadata-";
/// The kernel's limit for a name, prefix included.
const NAME_BYTES_MAX: usize = 255;
/// Keys of one file.
const KEYS_MAX: usize = 256;
/// The kernel's limit for all names of a file's attributes.
const NAMES_BYTES_MAX: usize = 64 << 10;

/// Reads the metadata of an upload. Names are lower-case, as HTTP makes them.
///
/// # Errors
/// A value is too long or not printable ASCII, a name is too long, or there are too many.
pub fn from_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, HttpError> {
    let mut metadata = BTreeMap::new();
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else {
            continue;
        };
        if key.is_empty() || METADATA_PREFIX.len() + key.len() > NAME_BYTES_MAX {
            return Err(HttpError::bad_request(
                "a metadata key is empty or too long",
            ));
        }
        let bytes = value.as_bytes();
        if bytes.len() > METADATA_VALUE_BYTES_MAX {
            return Err(HttpError::bad_request(format!(
                "the value of metadata '{key}' is longer than {METADATA_VALUE_BYTES_MAX} bytes"
            )));
        }
        let printable = bytes.iter().all(|byte| (b' '..=b'~').contains(byte));
        let text = std::str::from_utf8(bytes).ok().filter(|_| printable);
        let text = text.ok_or_else(|| {
            HttpError::bad_request(format!(
                "the value of metadata '{key}' is not printable ASCII"
            ))
        })?;
        metadata.insert(key.to_owned(), text.to_owned());
        if metadata.len() > KEYS_MAX {
            return Err(HttpError::bad_request(format!(
                "more than {KEYS_MAX} metadata keys"
            )));
        }
    }
    Ok(metadata)
}

/// Makes this the whole metadata of the file.
///
/// # Errors
/// The filesystem keeps no attributes, or not so many.
pub fn replace(file: impl AsFd, metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let mut names = vec![0u8; NAMES_BYTES_MAX];
    match rustix::fs::flistxattr(&file, &mut names[..]) {
        Ok(length) => {
            for name in names[..length].split(|byte| *byte == 0) {
                if metadata_key(name).is_some_and(|key| !metadata.contains_key(key)) {
                    rustix::fs::fremovexattr(&file, name)?;
                }
            }
        }
        // A filesystem without attributes has none to remove.
        Err(rustix::io::Errno::NOTSUP) if metadata.is_empty() => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    for (key, value) in metadata {
        let name = format!("{METADATA_PREFIX}{key}");
        rustix::fs::fsetxattr(&file, name, value.as_bytes(), XattrFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&str, &[u8])]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (
                    name.parse::<HeaderName>().unwrap(),
                    HeaderValue::from_bytes(value).unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn keys_are_lower_case_and_values_plain() {
        // BC-061
        let read = from_headers(&headers(&[("X-Metadata-Author", b"Zoe"), ("Other", b"x")]));
        assert_eq!(
            read.unwrap(),
            BTreeMap::from([("author".into(), "Zoe".into())])
        );
        let long = vec![b'x'; METADATA_VALUE_BYTES_MAX + 1];
        for value in ["Zoë".as_bytes(), &long, b"a\tb"] {
            let error = from_headers(&headers(&[("X-Metadata-Author", value)])).unwrap_err();
            assert_eq!(error.status.as_u16(), 400);
        }
        let many: Vec<String> = (0..300)
            .map(|index| format!("x-metadata-k{index}"))
            .collect();
        let many: Vec<(&str, &[u8])> = many.iter().map(|name| (&name[..], &b"v"[..])).collect();
        assert!(from_headers(&headers(&many)).is_err());
        assert_eq!(from_headers(&headers(&many[..200])).unwrap().len(), 200);
    }

    #[test]
    fn replacing_leaves_nothing_of_before() {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        let first = BTreeMap::from([("a".into(), "1".into()), ("b".into(), "2".into())]);
        let second = BTreeMap::from([("b".into(), "3".into())]);
        replace(file.as_file(), &first).unwrap();
        replace(file.as_file(), &second).unwrap();
        assert_eq!(crate::filesystem::entry::read_metadata(file.path()), second);
    }
}
