//! The names that only the governor knows.

use std::fmt;

use sandhold_types::{EnvName, IdError, Namespace, text_id};

/// Names that callers choose are taken as they are; they never become part of a path or a host.
fn is_printable(text: &str, length_max: usize) -> bool {
    !text.is_empty() && text.len() <= length_max && text.bytes().all(|b| b.is_ascii_graphic())
}

text_id!(
    /// Who a sandbox is for: `namespace:env:project_id:session_run_id` unless the caller gives
    /// another (R-G2). It is only ever looked up inside its bucket, so one tenant cannot name
    /// another's.
    OwnerId,
    "1 to 300 printable ASCII characters without spaces",
    |text| is_printable(text, 300)
);
text_id!(
    /// One holding of an owner's sandbox, by the caller's own name for it (R-G6).
    LeaseId,
    "1 to 128 printable ASCII characters without spaces",
    |text| is_printable(text, 128)
);
text_id!(
    /// One place in a bucket. It is chosen before the sandbox is made and written into the
    /// sandbox's metadata, so that a create without an answer can be found again.
    SlotId,
    "1 to 64 printable ASCII characters without spaces",
    |text| is_printable(text, 64)
);
text_id!(
    /// One run (R-G3).
    RunId,
    "1 to 64 printable ASCII characters without spaces",
    |text| is_printable(text, 64)
);
text_id!(
    /// One process of the governor, for one life of it: a restarted process is another one.
    ReplicaId,
    "1 to 64 printable ASCII characters without spaces",
    |text| is_printable(text, 64)
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
