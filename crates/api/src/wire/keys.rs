//! Keys as administrators and E2B's own tools read them.

use sandhold_store::{Bucket, KeyRecord, Role};
use sandhold_types::Token;
use serde::{Deserialize, Serialize};

use crate::error::ApiError;

/// The longest name that people may give a key, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RoleName {
    /// Work with the sandboxes of its own namespace and environment.
    Member,
    /// That, and manage all keys.
    Admin,
}

impl From<RoleName> for Role {
    fn from(name: RoleName) -> Self {
        match name {
            RoleName::Member => Self::Member,
            RoleName::Admin => Self::Admin,
        }
    }
}

impl From<Role> for RoleName {
    fn from(role: Role) -> Self {
        match role {
            Role::Member => Self::Member,
            Role::Admin => Self::Admin,
        }
    }
}

/// A key to make. Everything that is left out is as with the key that asks, save for the role,
/// which is `member`.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(crate) struct NewKeyBody {
    /// What people call it.
    name: Option<String>,
    /// The tenant it is for.
    namespace: Option<String>,
    /// The tenant's environment it is for.
    env: Option<String>,
    /// What it may do.
    role: Option<RoleName>,
}

/// What of it the store is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WantedKey {
    pub(crate) name: String,
    pub(crate) bucket: Bucket,
    pub(crate) role: Role,
}

impl NewKeyBody {
    pub(crate) fn wanted(self, asking: &Bucket) -> Result<WantedKey, ApiError> {
        let name = self.name.unwrap_or_default();
        if name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            let rule =
                format!("must be at most {NAME_BYTES_MAX} bytes, without control characters");
            return Err(ApiError::invalid("name", rule));
        }
        Ok(WantedKey {
            name,
            bucket: Bucket {
                namespace: part("namespace", self.namespace, &asking.namespace)?,
                env: part("env", self.env, &asking.env)?,
            },
            role: self.role.unwrap_or(RoleName::Member).into(),
        })
    }
}

fn part<T>(field: &'static str, given: Option<String>, asking: &T) -> Result<T, ApiError>
where
    T: std::str::FromStr<Err = sandhold_types::IdError> + Clone,
{
    let Some(text) = given else {
        return Ok(asking.clone());
    };
    text.parse().map_err(|refused: sandhold_types::IdError| {
        ApiError::invalid(field, format!("must be {}", refused.rule))
    })
}

/// A key without its secret.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeyBody {
    /// Its public name, by which it is revoked.
    id: String,
    /// What people call it.
    name: String,
    /// The tenant it is for.
    namespace: String,
    /// The tenant's environment it is for.
    env: String,
    /// What it may do.
    role: RoleName,
    /// A few of its first and last characters.
    hint: String,
    /// When it was made (RFC 3339).
    created_at: String,
    /// When it was last used (RFC 3339), to about a minute.
    last_used_at: Option<String>,
    /// When it was revoked (RFC 3339).
    revoked_at: Option<String>,
}

impl KeyBody {
    pub(crate) fn of(key: &KeyRecord) -> Self {
        Self {
            id: key.id.to_string(),
            name: key.name.clone(),
            namespace: key.bucket.namespace.to_string(),
            env: key.bucket.env.to_string(),
            role: key.role.into(),
            hint: key.hint.clone(),
            created_at: key.created_at.to_rfc3339(),
            last_used_at: key.last_used_at.map(|at| at.to_rfc3339()),
            revoked_at: key.revoked_at.map(|at| at.to_rfc3339()),
        }
    }
}

/// A key that was just made. This is the only time that its secret is told.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct CreatedKeyBody {
    #[serde(flatten)]
    record: KeyBody,
    /// The key itself.
    key: String,
}

impl CreatedKeyBody {
    pub(crate) fn of(record: &KeyRecord, key: &Token) -> Self {
        Self {
            record: KeyBody::of(record),
            key: key.expose().to_owned(),
        }
    }
}

/// All keys.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct KeysBody {
    /// Oldest first, revoked ones included.
    pub(crate) keys: Vec<KeyBody>,
}

/// `GET /teams`, as much as E2B's tools need: the key's own bucket is the team.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TeamBody {
    #[serde(rename = "teamID")]
    team_id: String,
    name: String,
    // The tools that ask have it already, and no answer tells a key a second time.
    api_key: &'static str,
    is_default: bool,
}

impl TeamBody {
    pub(crate) fn of(bucket: &Bucket) -> Self {
        Self {
            team_id: bucket.to_string(),
            name: bucket.to_string(),
            api_key: "",
            is_default: true,
        }
    }
}

/// An entry of `GET /api-keys`, the E2B form of the same.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TeamKeyBody {
    id: String,
    name: String,
    mask: MaskBody,
    created_at: String,
    last_used: Option<String>,
    created_by: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MaskBody {
    prefix: &'static str,
    value_length: usize,
    masked_value_prefix: String,
    masked_value_suffix: String,
}

impl TeamKeyBody {
    pub(crate) fn of(record: &KeyRecord, key: Option<&Token>) -> Self {
        let (front, behind) = record.hint.split_once('…').unwrap_or_default();
        Self {
            id: record.id.to_string(),
            name: record.name.clone(),
            mask: MaskBody {
                prefix: "e2b_",
                value_length: 40,
                masked_value_prefix: front.trim_start_matches("e2b_").to_owned(),
                masked_value_suffix: behind.to_owned(),
            },
            created_at: record.created_at.to_rfc3339(),
            last_used: record.last_used_at.map(|at| at.to_rfc3339()),
            created_by: None,
            key: key.map(|key| key.expose().to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::parse_body;

    fn wanted(body: &str) -> Result<WantedKey, String> {
        let asking = Bucket {
            namespace: "a".parse().unwrap(),
            env: "dev".parse().unwrap(),
        };
        let body: NewKeyBody = parse_body(body.as_bytes()).map_err(|e| e.to_string())?;
        body.wanted(&asking).map_err(|refused| refused.to_string())
    }

    #[test]
    fn a_new_key_is_for_the_bucket_that_asks_unless_told_otherwise() {
        let plain = wanted("{}").unwrap();
        assert_eq!(
            (plain.bucket.to_string(), plain.role),
            ("a:dev".into(), Role::Member)
        );
        let other = wanted(r#"{"namespace":"b","env":"prod","role":"admin","name":"ci"}"#).unwrap();
        assert_eq!(
            (other.bucket.to_string(), other.role),
            ("b:prod".into(), Role::Admin)
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = format!(r#"{{"name":"{}"}}"#, "x".repeat(10_000));
        for (body, field) in [
            (r#"{"namespace":"../x"}"#, "namespace"),
            (r#"{"env":""}"#, "env"),
            (r#"{"role":"root"}"#, "role"),
            (r#"{"name":"a\nb"}"#, "name"),
            (&long, "name"),
        ] {
            assert!(wanted(body).unwrap_err().starts_with(field), "{body}");
        }
    }
}
