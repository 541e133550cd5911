//! Paging through lists: order, position, and the tokens that carry it.
//!
//! A token says after which sandbox or snapshot the next page begins. It is signed, and bound to the tenant and
//! to the filters of the first page, so a forged one or one that is used with another question is
//! refused (BC-082). A position is (start time, identifier), so pages neither repeat nor skip
//! one, whatever is made or removed between them.

use std::{fmt::Display, str::FromStr};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use hmac::{Hmac, Mac};
use sandhold_types::Timestamp;
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// The layout of tokens. Another one is another number.
const VERSION: u8 = 1;
const ID_BYTES: usize = 20;
const QUESTION_BYTES: usize = 16;
const MAC_BYTES: usize = 32;
const POSITION_END: usize = 1 + 8 + ID_BYTES;
const SIGNED_BYTES: usize = POSITION_END + QUESTION_BYTES;

/// Signs tokens.
#[derive(Clone)]
pub(crate) struct PageKey([u8; 32]);

/// What is asked, as far as pages of one answer to it belong together: the digest of tenant,
/// filters and order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question([u8; QUESTION_BYTES]);

/// Where a page ends.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position<Id> {
    /// When the last one of the page was started.
    pub(crate) started_at: Timestamp,
    /// Which it was.
    pub(crate) id: Id,
}

impl std::fmt::Debug for PageKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[secret]")
    }
}

impl Question {
    /// The digest of a question's parts, in a fixed order.
    pub(crate) fn of<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut digest = Sha256::new();
        for part in parts {
            // Lengths keep `["ab", "c"]` and `["a", "bc"]` apart.
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part.as_bytes());
        }
        let mut question = [0; QUESTION_BYTES];
        question.copy_from_slice(&digest.finalize()[..QUESTION_BYTES]);
        Self(question)
    }
}

impl PageKey {
    /// Takes over the key.
    #[must_use]
    pub(crate) fn new(key: [u8; 32]) -> Self {
        Self(key)
    }

    fn mac(&self, signed: &[u8]) -> Hmac<Sha256> {
        // HMAC takes keys of every length.
        #[allow(clippy::expect_used)]
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of any length");
        mac.update(signed);
        mac
    }

    /// The token of a page that ends at `position`.
    #[must_use]
    pub(crate) fn seal<Id: Display>(&self, question: Question, position: &Position<Id>) -> String {
        let mut token = Vec::with_capacity(SIGNED_BYTES + MAC_BYTES);
        token.push(VERSION);
        token.extend(position.started_at.unix_ms().to_be_bytes());
        token.extend(position.id.to_string().as_bytes());
        token.extend(question.0);
        let mac = self.mac(&token).finalize().into_bytes();
        token.extend(mac);
        URL_SAFE_NO_PAD.encode(token)
    }

    /// The position in a token; `None` when it was not made by this key for this question.
    #[must_use]
    pub(crate) fn open<Id: FromStr>(
        &self,
        question: Question,
        token: &str,
    ) -> Option<Position<Id>> {
        // Nothing longer is even decoded.
        if token.len() > 2 * (SIGNED_BYTES + MAC_BYTES) {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (signed, mac) = bytes.split_at_checked(SIGNED_BYTES)?;
        self.mac(signed).verify_slice(mac).ok()?;
        let same_question = signed.get(POSITION_END..)? == question.0;
        if signed.first() != Some(&VERSION) || !same_question {
            return None;
        }
        let started_at = u64::from_be_bytes(signed.get(1..9)?.try_into().ok()?);
        let id = std::str::from_utf8(signed.get(9..POSITION_END)?).ok()?;
        Some(Position {
            started_at: Timestamp::from_unix_ms(started_at),
            id: id.parse().ok()?,
        })
    }

    pub(crate) fn open_parameter<Id: FromStr>(
        &self,
        question: Question,
        token: Option<&str>,
    ) -> Result<Option<Position<Id>>, ApiError> {
        let Some(token) = token.filter(|token| !token.is_empty()) else {
            return Ok(None);
        };
        match self.open(question, token) {
            Some(position) => Ok(Some(position)),
            None => Err(ApiError::invalid(
                "nextToken",
                "is not a token of this server for these filters",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sandhold_types::{SandboxId, SeededEntropy};

    use super::*;

    fn position(seed: u64, ms: u64) -> Position<SandboxId> {
        Position {
            started_at: Timestamp::from_unix_ms(ms),
            id: SandboxId::generate(&SeededEntropy::new(seed)),
        }
    }

    proptest! {
        #[test]
        fn a_token_opens_to_what_was_sealed(seed: u64, ms in 0..253_370_764_800_000_u64, filter: String) {
            let (key, question) = (PageKey::new([7; 32]), Question::of([filter.as_str()]));
            let position = position(seed, ms);
            let token = key.seal(question, &position);
            prop_assert_eq!(key.open(question, &token), Some(position));
        }

        #[test]
        fn a_changed_token_does_not_open(seed: u64, at in 0..103_usize, other in "[A-Za-z0-9_-]") {
            // BC-082
            let (key, question) = (PageKey::new([7; 32]), Question::of(["a"]));
            let token = key.seal(question, &position(seed, 1));
            let mut forged = token.clone();
            let at = at.min(token.len() - 1);
            forged.replace_range(at..=at, &other);
            prop_assume!(forged != token);
            prop_assert_eq!(key.open::<SandboxId>(question, &forged), None);
        }

        #[test]
        fn garbage_does_not_open(token: String) {
            let key = PageKey::new([7; 32]);
            prop_assert_eq!(key.open::<SandboxId>(Question::of(["a"]), &token), None);
        }
    }

    #[test]
    fn a_token_is_for_one_key_and_one_question() {
        // BC-082
        let (key, other_key) = (PageKey::new([7; 32]), PageKey::new([8; 32]));
        let token = key.seal(Question::of(["tenant a", "x"]), &position(1, 1));
        let open = |key: &PageKey, question| key.open::<SandboxId>(question, &token);
        assert_eq!(open(&key, Question::of(["tenant b", "x"])), None);
        assert_eq!(open(&key, Question::of(["tenant ", "ax"])), None);
        assert_eq!(open(&other_key, Question::of(["tenant a", "x"])), None);
    }
}
