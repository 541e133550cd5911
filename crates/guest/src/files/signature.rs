//! Signed file URLs (wire contract 2.2): access to one path, for one user, in one direction.
//!
//! `v1_` and the unpadded base64 of SHA-256 over `path:operation:user:token[:expiration]`. The
//! path is what the client wrote, not what it resolves to; a user that is not named is empty.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use sandhold_types::Token;
use sha2::{Digest as _, Sha256};

/// A query longer than this is no file query.
const QUERY_BYTES_MAX: usize = 64 << 10;

/// The direction a signature is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileOperation {
    /// Download.
    Read,
    /// Upload.
    Write,
}

impl FileOperation {
    fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The parameters of `/files`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileQuery {
    /// The path as the client wrote it.
    pub path: Option<String>,
    /// The user to act for.
    pub username: Option<String>,
    /// The signature.
    pub signature: Option<String>,
    /// When it ends, in seconds since the epoch, as the client wrote it.
    pub expiration: Option<String>,
}

/// The query is too long to be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the query is longer than {QUERY_BYTES_MAX} bytes")]
pub struct QueryTooLong;

impl FileQuery {
    /// Reads a query string. Parameters that nobody knows are ignored; of repeated ones the
    /// first counts.
    ///
    /// # Errors
    /// The query is absurdly long.
    pub fn parse(query: &str) -> Result<Self, QueryTooLong> {
        if query.len() > QUERY_BYTES_MAX {
            return Err(QueryTooLong);
        }
        let mut parsed = Self::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let field = match name.as_ref() {
                "path" => &mut parsed.path,
                "username" => &mut parsed.username,
                "signature" => &mut parsed.signature,
                "signature_expiration" => &mut parsed.expiration,
                _ => continue,
            };
            field.get_or_insert_with(|| value.into_owned());
        }
        Ok(parsed)
    }
}

/// Why a signature does not open the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignatureError {
    /// There is none.
    Missing,
    /// It is for something else, or made with another token.
    Wrong,
    /// It was right and is over.
    Expired,
    /// The expiration is no number.
    Expiration,
}

impl SignatureError {
    /// For people.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Missing => "neither an access token nor a signature was sent",
            Self::Wrong => "invalid signature",
            Self::Expired => "signature is already expired",
            Self::Expiration => "the signature's expiration is no number",
        }
    }
}

/// Makes the signature.
#[must_use]
pub fn sign(
    path: &str,
    operation: FileOperation,
    user: &str,
    token: &Token,
    expiration: Option<u64>,
) -> String {
    let mut text = format!("{path}:{}:{user}:{}", operation.as_str(), token.expose());
    if let Some(expiration) = expiration {
        text.push(':');
        text.push_str(&expiration.to_string());
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// Checks the signature of a query.
///
/// # Errors
/// It is missing, wrong or over.
pub fn check(
    query: &FileQuery,
    operation: FileOperation,
    token: &Token,
    now_unix_s: u64,
) -> Result<(), SignatureError> {
    let presented = query.signature.as_deref().ok_or(SignatureError::Missing)?;
    let expiration = match query.expiration.as_deref() {
        None | Some("") => None,
        Some(text) => Some(text.parse().map_err(|_| SignatureError::Expiration)?),
    };
    let expected = Token::new(sign(
        query.path.as_deref().unwrap_or(""),
        operation,
        query.username.as_deref().unwrap_or(""),
        token,
        expiration,
    ));
    if !expected.matches(presented) {
        return Err(SignatureError::Wrong);
    }
    match expiration {
        Some(end) if end < now_unix_s => Err(SignatureError::Expired),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_700_000_000;

    fn query(path: &str, user: Option<&str>, signature: &str, end: Option<&str>) -> FileQuery {
        FileQuery {
            path: Some(path.into()),
            username: user.map(Into::into),
            signature: Some(signature.into()),
            expiration: end.map(Into::into),
        }
    }

    #[test]
    fn a_signature_is_what_the_clients_compute() {
        // Computed with Python's hashlib from the scheme's description.
        assert_eq!(
            sign(
                "/a b",
                FileOperation::Read,
                "root",
                &Token::new("t".into()),
                Some(5)
            ),
            "v1_lU10c0STW85byO55gT7a0+kJwo4tJ9YJ16N35y5ZYpM"
        );
    }

    #[test]
    fn a_signature_opens_one_path_one_way_for_one_user_and_one_time() {
        let token = Token::new("secret".into());
        let end = NOW + 10;
        let end_text = end.to_string();
        let signature = sign("f", FileOperation::Read, "", &token, Some(end));
        let right = query("f", None, &signature, Some(&end_text));
        let check = |query: &FileQuery, operation, now| check(query, operation, &token, now);

        assert_eq!(check(&right, FileOperation::Read, NOW), Ok(()));
        let wrong = Err(SignatureError::Wrong);
        assert_eq!(check(&right, FileOperation::Write, NOW), wrong);
        for other in [
            query("g", None, &signature, Some(&end_text)),
            query("f", Some("root"), &signature, Some(&end_text)),
            query("f", None, &signature, None),
            query("f", None, &signature, Some("1700009999")),
            query("f", None, "v1_", Some(&end_text)),
        ] {
            assert_eq!(check(&other, FileOperation::Read, NOW), wrong, "{other:?}");
        }
        assert_eq!(
            check(&right, FileOperation::Read, end + 1),
            Err(SignatureError::Expired)
        );
        assert_eq!(
            check(
                &query("f", None, &signature, Some("-1")),
                FileOperation::Read,
                NOW
            ),
            Err(SignatureError::Expiration)
        );
        assert_eq!(
            check(&FileQuery::default(), FileOperation::Read, NOW),
            Err(SignatureError::Missing)
        );
    }

    #[test]
    fn queries_are_read_once_and_leniently() {
        let query = FileQuery::parse("path=a%2Fb+c&path=x&username=&other=1&%ff=%ff").unwrap();
        assert_eq!(query.path.as_deref(), Some("a/b c"));
        assert_eq!(query.username.as_deref(), Some(""));
        assert_eq!(
            FileQuery::parse(&"x".repeat(QUERY_BYTES_MAX + 1)),
            Err(QueryTooLong)
        );
    }
}
