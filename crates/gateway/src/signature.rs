//! Signed file URLs that name no sandbox (wire contract 2.1 c, 2.2).
//!
//! The signature is `v1_` and the unpadded standard base64 of SHA-256 over
//! `path:operation:user:token[:expiration]`. Whose token made it is found by trying: that routes
//! the request. Whether it may have what it asks for, expiration included, the agent decides.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use http::{Method, request::Parts};
use sandhold_types::{Timestamp, Token};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

const PREFIX: &str = "v1_";
/// Unpadded base64 of 32 bytes.
const DIGEST_LENGTH: usize = 43;
/// Longer paths than Linux knows are not hashed thousands of times.
const SIGNED_TEXT_LENGTH_MAX: usize = 8192;

/// The signed part of a request for `/files`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedFile {
    signature: String,
    /// `path:operation:user:`; the token comes next.
    before_token: String,
    /// Empty, or `:expiration`.
    after_token: String,
}

impl SignedFile {
    /// Reads the request's path and query; `None` if it is not for `/files` with a signature.
    #[must_use]
    pub fn from_request(head: &Parts) -> Option<Self> {
        if head.uri.path() != "/files" {
            return None;
        }
        let mut query = FileQuery::default();
        for (name, value) in url::form_urlencoded::parse(head.uri.query()?.as_bytes()) {
            query.note(&name, &value);
        }
        let operation = if head.method == Method::POST {
            "write"
        } else {
            "read"
        };
        let path = query.path.unwrap_or_default();
        let user = query.username.unwrap_or_default();
        Some(Self {
            signature: query.signature?,
            before_token: format!("{path}:{operation}:{user}:"),
            after_token: query
                .expiration
                .map(|expiration| format!(":{expiration}"))
                .unwrap_or_default(),
        })
    }

    /// Whether the signature can be one at all; if not, no token needs to be tried.
    #[must_use]
    pub fn is_well_formed(&self) -> bool {
        let length = self.before_token.len() + self.after_token.len();
        length <= SIGNED_TEXT_LENGTH_MAX
            && self
                .signature
                .strip_prefix(PREFIX)
                .is_some_and(|digest| digest.len() == DIGEST_LENGTH)
    }

    /// Whether its expiration, in seconds since the epoch, has passed. What is no number is left
    /// to the agent.
    #[must_use]
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.after_token
            .strip_prefix(':')
            .and_then(|expiration| expiration.parse::<u64>().ok())
            .is_some_and(|expiration| expiration < now.unix_s())
    }

    /// Whether `token` made the signature.
    #[must_use]
    pub fn is_signed_by(&self, token: &Token) -> bool {
        let digest = Sha256::new()
            .chain_update(&self.before_token)
            .chain_update(token.expose())
            .chain_update(&self.after_token)
            .finalize();
        let expected = STANDARD_NO_PAD.encode(digest);
        let given = self.signature.strip_prefix(PREFIX).unwrap_or_default();
        expected.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

/// The query parameters that count; of repeated ones the first, as the agent reads them.
#[derive(Default)]
struct FileQuery {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    expiration: Option<String>,
}

impl FileQuery {
    fn note(&mut self, name: &str, value: &str) {
        let field = match name {
            "path" => &mut self.path,
            "username" => &mut self.username,
            "signature" => &mut self.signature,
            "signature_expiration" => &mut self.expiration,
            _ => return,
        };
        field.get_or_insert_with(|| value.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn signed(method: Method, uri: &str) -> Option<SignedFile> {
        let request = Request::builder().method(method).uri(uri).body(());
        SignedFile::from_request(&request.unwrap().into_parts().0)
    }

    fn sign(text: &str) -> String {
        let digest = STANDARD_NO_PAD.encode(Sha256::digest(text));
        url::form_urlencoded::byte_serialize(format!("v1_{digest}").as_bytes()).collect()
    }

    #[test]
    fn the_token_that_signed_is_recognised() {
        // Wire contract 2.2: the path exactly as given, not resolved.
        let token = Token::new("secret".into());
        let signature = sign("/home/../a b:read::secret:1700000000");
        let uri = format!(
            "/files?path=%2Fhome%2F..%2Fa+b&signature={signature}&signature_expiration=1700000000"
        );
        let file = signed(Method::GET, &uri).unwrap();
        assert!(file.is_well_formed());
        assert!(file.is_signed_by(&token));
        assert!(!file.is_signed_by(&Token::new("other".into())));
        let write = signed(Method::POST, &uri).unwrap();
        assert!(!write.is_signed_by(&token), "signed for reading only");
        let later = signed(Method::GET, &uri.replace("1700000000", "1800000000")).unwrap();
        assert!(!later.is_signed_by(&token), "the expiration is signed");
    }

    #[test]
    fn only_signed_file_requests_are_claimed() {
        assert!(signed(Method::GET, "/files?path=/a").is_none());
        assert!(signed(Method::GET, "/files").is_none());
        assert!(signed(Method::GET, "/filesx?signature=v1_x").is_none());
        let uri = "/files?signature=v1_x&signature_expiration=100";
        let dated = signed(Method::GET, uri).unwrap();
        assert!(!dated.is_expired(Timestamp::from_unix_ms(100_000)));
        assert!(dated.is_expired(Timestamp::from_unix_ms(101_000)));
        let garbage = signed(Method::GET, "/files?signature=v1_x").unwrap();
        assert!(!garbage.is_well_formed());
    }
}
