//! Identifiers: one macro, one check each, one textual form.

use std::fmt;

use crate::Entropy;

/// Why a text is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} must be {rule}")]
pub struct IdError {
    /// Which kind of identifier was read.
    pub kind: &'static str,
    /// The rule that the text breaks, in words.
    pub rule: &'static str,
}

/// A type for texts that keep a rule: the rule is checked wherever one is read, also from JSON.
#[macro_export]
macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $rule:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(::std::boxed::Box<str>);

        impl $name {
            /// The textual form.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = $crate::IdError;

            fn from_str(text: &str) -> ::std::result::Result<Self, $crate::IdError> {
                let check: fn(&str) -> bool = $check;
                if check(text) {
                    Ok(Self(text.into()))
                } else {
                    Err($crate::IdError { kind: stringify!($name), rule: $rule })
                }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl ::std::fmt::Debug for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl $crate::serde::Serialize for $name {
            fn serialize<S>(&self, serializer: S) -> ::std::result::Result<S::Ok, S::Error>
            where
                S: $crate::serde::Serializer,
            {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> $crate::serde::Deserialize<'de> for $name {
            fn deserialize<D>(deserializer: D) -> ::std::result::Result<Self, D::Error>
            where
                D: $crate::serde::Deserializer<'de>,
            {
                use $crate::serde::{Deserialize, de::Error};
                let text =
                    <::std::borrow::Cow<'de, str> as Deserialize>::deserialize(deserializer)?;
                text.parse().map_err(D::Error::custom)
            }
        }
    };
}

/// How many characters a generated identifier has. 36^20 leaves no room for a collision.
const RANDOM_ID_LENGTH: usize = 20;

/// The shortest and the longest identifier of a sandbox, of ours or of another service.
const SANDBOX_ID_LENGTH_MIN: usize = 16;
const SANDBOX_ID_LENGTH_MAX: usize = 40;

fn is_host_label(text: &str, length_max: usize) -> bool {
    !text.is_empty()
        && text.len() <= length_max
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

fn is_name(text: &str, length_max: usize) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    !text.is_empty()
        && text.len() <= length_max
        && text.bytes().all(inner)
        && text.as_bytes()[0].is_ascii_alphanumeric()
}

fn random_id(entropy: &dyn Entropy) -> Box<str> {
    const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    // Values at or above this would make the first letters likelier than the last.
    const UNBIASED_MAX: u8 = 252;
    let mut text = String::with_capacity(RANDOM_ID_LENGTH);
    let mut block = [0u8; 32];
    while text.len() < RANDOM_ID_LENGTH {
        entropy.fill(&mut block);
        let room = RANDOM_ID_LENGTH - text.len();
        let letters = block.iter().filter(|b| **b < UNBIASED_MAX);
        text.extend(
            letters
                .take(room)
                .map(|b| char::from(ALPHABET[usize::from(b % 36)])),
        );
    }
    text.into()
}

text_id!(
    /// A sandbox. Lower-case letters and digits, because it becomes a label of a host name. Ours have
    /// 20; those of other services (R-G16) have about as many.
    SandboxId,
    "16 to 40 lower-case letters and digits",
    |text| text.len() >= SANDBOX_ID_LENGTH_MIN && is_host_label(text, SANDBOX_ID_LENGTH_MAX)
);
text_id!(
    /// A template: what a `templateID` on the wire resolves to. Ours are lower-case letters and digits;
    /// other services (R-G16) have more in theirs.
    TemplateId,
    "1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit",
    |text| is_name(text, 64)
);
text_id!(
    /// One immutable build of a template. Sandboxes refer to the build they came from.
    BuildId,
    "1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit",
    |text| is_name(text, 64)
);
text_id!(
    /// A captured moment of a sandbox. Works wherever a template's identifier does.
    SnapshotId,
    "20 lower-case letters and digits",
    |text| text.len() == RANDOM_ID_LENGTH && is_host_label(text, RANDOM_ID_LENGTH)
);
text_id!(
    /// A tenant: product or team. The first half of a bucket (R-G2).
    Namespace,
    "1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit",
    |text| is_name(text, 64)
);
text_id!(
    /// An environment of a tenant, such as `dev` or `prod`. The second half of a bucket (R-G2).
    EnvName,
    "1 to 32 letters, digits, '-', '_' or '.', beginning with a letter or digit",
    |text| is_name(text, 32)
);
text_id!(
    /// An API key's public name; never the key itself.
    KeyId,
    "1 to 64 lower-case letters and digits",
    |text| is_host_label(text, 64)
);
text_id!(
    /// One request, from the edge to the engine. Found in logs, histories and error answers.
    RequestId,
    "1 to 128 letters, digits, '-', '_' or '.', beginning with a letter or digit",
    |text| is_name(text, 128)
);

macro_rules! generated {
    ($($name:ident),*) => {$(
        impl $name {
            /// A fresh identifier.
            #[must_use]
            pub fn generate(entropy: &dyn Entropy) -> Self {
                Self(random_id(entropy))
            }
        }
    )*};
}

generated!(SandboxId, SnapshotId, TemplateId, BuildId, KeyId, RequestId);

impl From<&SnapshotId> for TemplateId {
    /// Sandboxes that come from a snapshot name it as their template.
    fn from(snapshot: &SnapshotId) -> Self {
        Self(snapshot.0.clone())
    }
}

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The first of its kind.
            pub const INITIAL: Self = Self(1);

            /// The one after this.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

counter!(
    /// One life of a sandbox's processes: grows with every create, resume and rollback, so that a
    /// decision made about one life is never carried out on the next.
    Incarnation
);
counter!(
    /// One holding of a lease. Grows with every grant and never repeats (R-G6, R-G7).
    Generation
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeededEntropy;

    #[test]
    fn sandbox_ids_fit_into_a_host_name() {
        let entropy = SeededEntropy::new(7);
        let id = SandboxId::generate(&entropy);
        assert_eq!(id.as_str().parse::<SandboxId>(), Ok(id.clone()));
        assert_ne!(id, SandboxId::generate(&entropy));
    }

    #[test]
    fn hostile_identifiers_are_refused() {
        for text in [
            "",
            "UPPERCASEUPPERCASE12",
            "short",
            "../../../../etc/pass",
            "a\0bcdefghijklmnopqrs",
        ] {
            assert!(text.parse::<SandboxId>().is_err(), "{text:?}");
        }
        for text in ["", ".hidden", "a/b", "-x", "a b", &"x".repeat(65)] {
            assert!(text.parse::<Namespace>().is_err(), "{text:?}");
        }
    }
}
