//! Secrets that can be compared and sent, but not printed by accident.

use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::Entropy;

/// A bearer secret: an API key, an access token, a traffic token.
#[derive(Clone)]
pub struct Token(SecretString);

impl Token {
    /// How many random bytes a generated token has.
    const RANDOM_BYTES: usize = 24;

    /// Takes over a secret that came from outside.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(SecretString::from(text))
    }

    /// A fresh token of 48 hexadecimal digits behind `prefix`.
    #[must_use]
    pub fn generate(prefix: &str, entropy: &dyn Entropy) -> Self {
        let mut bytes = [0u8; Self::RANDOM_BYTES];
        entropy.fill(&mut bytes);
        Self::new(format!("{prefix}{}", hex::encode(bytes)))
    }

    /// A fresh API key. Older SDKs insist on `e2b_` and 40 hexadecimal digits.
    #[must_use]
    pub fn generate_api_key(entropy: &dyn Entropy) -> Self {
        let mut bytes = [0u8; 20];
        entropy.fill(&mut bytes);
        Self::new(format!("e2b_{}", hex::encode(bytes)))
    }

    /// The secret itself, for the one place that must send or store it.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }

    /// Compares in constant time.
    #[must_use]
    pub fn matches(&self, candidate: &str) -> bool {
        self.expose().as_bytes().ct_eq(candidate.as_bytes()).into()
    }

    /// SHA-256 in hexadecimal: what is stored and looked up instead of a key (R-P8). A key holds
    /// 160 random bits, so a slow hash would add cost and no strength.
    #[must_use]
    pub fn digest_hex(&self) -> String {
        hex::encode(Sha256::digest(self.expose().as_bytes()))
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.matches(other.expose())
    }
}

impl Eq for Token {}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[secret]")
    }
}

/// Writes and reads a secret as text, for records that only root can read. A [`Token`] by itself is
/// never serialised, so each place that does names this.
pub mod token_text {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Token;

    /// For `#[serde(with)]`.
    ///
    /// # Errors
    /// The serialiser's.
    pub fn serialize<S: Serializer>(token: &Token, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(token.expose())
    }

    /// For `#[serde(with)]`.
    ///
    /// # Errors
    /// It is no text.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Token, D::Error> {
        String::deserialize(deserializer).map(Token::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeededEntropy;

    #[test]
    fn a_token_is_never_printed() {
        let token = Token::generate("", &SeededEntropy::new(1));
        assert_eq!(format!("{token:?}"), "[secret]");
        assert!(token.matches(token.expose()));
        assert!(!token.matches(""));
    }

    #[test]
    fn api_keys_look_as_older_sdks_insist() {
        let key = Token::generate_api_key(&SeededEntropy::new(1));
        let digits = key.expose().strip_prefix("e2b_").unwrap();
        assert_eq!(digits.len(), 40);
        assert!(digits.bytes().all(|b| b.is_ascii_hexdigit()));
    }
}
