//! The names that only the governor knows.

use std::{fmt, str::FromStr};

use sandhold_types::{EnvName, IdError, Namespace};

macro_rules! governor_id {
    ($(#[$doc:meta])* $name:ident, $length_max:literal, $rule:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Box<str>);

        impl $name {
            /// The textual form.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                let fits = !text.is_empty() && text.len() <= $length_max;
                if fits && text.bytes().all(|b| b.is_ascii_graphic()) {
                    Ok(Self(text.into()))
                } else {
                    Err(IdError { kind: stringify!($name), rule: $rule })
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

governor_id!(
    /// Who a sandbox is for: `namespace:env:project_id:session_run_id` unless the caller gives
    /// another (R-G2). It is only ever looked up inside its bucket, so one tenant cannot name
    /// another's.
    OwnerId,
    300,
    "1 to 300 printable ASCII characters without spaces"
);
governor_id!(
    /// One holding of an owner's sandbox, by the caller's own name for it (R-G6).
    LeaseId,
    128,
    "1 to 128 printable ASCII characters without spaces"
);
governor_id!(
    /// One place in a bucket. It is chosen before the sandbox is made and written into the
    /// sandbox's metadata, so that a create without an answer can be found again.
    SlotId,
    64,
    "1 to 64 printable ASCII characters without spaces"
);
governor_id!(
    /// One run (R-G3).
    RunId,
    64,
    "1 to 64 printable ASCII characters without spaces"
);
governor_id!(
    /// One process of the governor, for one life of it: a restarted process is another one.
    ReplicaId,
    64,
    "1 to 64 printable ASCII characters without spaces"
);

/// The scope of a quota: a tenant and one of its environments (R-G2).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bucket {
    /// Product or team.
    pub namespace: Namespace,
    /// `dev`, `staging`, `prod`, …
    pub env: EnvName,
}

impl Bucket {
    /// The owner of a run for which the caller gave none (R-G2).
    ///
    /// # Errors
    /// The parts do not make a valid owner.
    pub fn owner_of_run(&self, project: &str, session_run: &str) -> Result<OwnerId, IdError> {
        format!("{self}:{project}:{session_run}").parse()
    }

    /// The owner of a sandbox that was made directly, without the governor (R-G19).
    ///
    /// # Errors
    /// Never for a valid sandbox identifier.
    pub fn owner_of_direct(&self, sandbox: &str) -> Result<OwnerId, IdError> {
        format!("{self}:direct:{sandbox}").parse()
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.namespace, self.env)
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_tells_whose_it_is() {
        // R-G2, R-G19
        let bucket = Bucket {
            namespace: "writer".parse().unwrap(),
            env: "prod".parse().unwrap(),
        };
        let run = bucket.owner_of_run("book", "7").unwrap();
        assert_eq!(run.as_str(), "writer:prod:book:7");
        let direct = bucket.owner_of_direct("abc").unwrap();
        assert_eq!(direct.as_str(), "writer:prod:direct:abc");
    }

    #[test]
    fn hostile_names_are_refused() {
        for text in ["", "a b", "a\nb", "a\0", "é", &"x".repeat(301)] {
            assert!(text.parse::<OwnerId>().is_err(), "{text:?}");
            assert!(text.parse::<LeaseId>().is_err(), "{text:?}");
        }
    }
}
