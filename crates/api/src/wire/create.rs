//! The body of a create, of all three kinds of clients (wire contract 1.2).

use std::collections::BTreeMap;

use sandhold_platform::{CreateSandbox, Owner, PublicTraffic};
use sandhold_types::{RequestId, Timestamp};
use serde::Deserialize;
use serde_json::Value;

use super::{
    WholeSeconds,
    lifecycle::{AutoFields, AutoResumeBody, LifecycleBody, Policy},
    lifetime::{ClockSigns, RouteGeneration, new_lifetime},
    network::NetworkBody,
    refuse,
};
use crate::{DefaultLifetimes, Dialect, Limits, error::ApiError};

/// `POST /sandboxes` and `POST /v2/sandboxes`. What is not named here is ignored, as it is by the
/// services that clients were written for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CreateBody {
    #[serde(rename = "templateID")]
    template_id: Option<String>,
    timeout: Option<WholeSeconds>,
    auto_pause: Option<bool>,
    auto_pause_memory: Option<bool>,
    auto_resume: Option<AutoResumeBody>,
    lifecycle: Option<LifecycleBody>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    #[serde(alias = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    network: Option<NetworkBody>,
    mcp: Option<Value>,
    iam: Option<IamBody>,
    volume_mounts: Option<Value>,
    distribution_scope: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct IamBody {
    tokens: Option<Value>,
}

/// What a create is, beside its body.
#[derive(Debug)]
pub(crate) struct CreateContext<'a> {
    pub(crate) generation: RouteGeneration,
    pub(crate) dialect: Dialect,
    pub(crate) owner: Owner,
    pub(crate) request: RequestId,
    pub(crate) now: Timestamp,
    pub(crate) limits: &'a Limits,
    pub(crate) defaults: DefaultLifetimes,
    pub(crate) domain: Option<&'a str>,
}

impl CreateBody {
    /// What the platform is asked for.
    pub(crate) fn into_request(
        self,
        context: CreateContext<'_>,
    ) -> Result<CreateSandbox, ApiError> {
        self.refuse_what_cannot_be_had()?;
        let limits = context.limits;
        let auto = AutoFields {
            auto_pause: self.auto_pause,
            auto_pause_memory: self.auto_pause_memory,
            auto_resume: self.auto_resume,
        };
        let signs = ClockSigns {
            generation: context.generation,
            dialect: context.dialect,
            has_auto_fields: auto.is_any_given(),
            has_lifecycle: self.lifecycle.is_some(),
        };
        let policy = Policy::of(&auto, self.lifecycle.as_ref())?;
        let lifetime = new_lifetime(
            signs,
            self.timeout,
            policy.on_timeout,
            context.defaults,
            limits.timeout_s_max,
            context.now,
        )?;
        let metadata = self.metadata.unwrap_or_default();
        check_pairs("metadata", &metadata, limits)?;
        let env_vars = self.env_vars.unwrap_or_default();
        check_pairs("envVars", &env_vars, limits)?;
        check_environment(&env_vars)?;
        let network = self.network.unwrap_or_default();
        let network = network.network(self.allow_internet_access, limits.network_ranges_max)?;
        Ok(CreateSandbox {
            owner: context.owner,
            request: context.request,
            template: check_template_name(self.template_id, limits)?,
            lifetime,
            auto_resume: policy.auto_resume,
            busy_with: policy.busy_with,
            timeout_keeps: policy.timeout_keeps,
            metadata,
            env_vars,
            egress: network.egress,
            public_traffic: network.public_traffic.unwrap_or(PublicTraffic::Allowed),
            mask_request_host: network.mask_request_host,
            domain: context.domain.map(str::to_owned),
        })
    }

    fn refuse_what_cannot_be_had(&self) -> Result<(), ApiError> {
        refuse("mcp", self.mcp.as_ref())?;
        let tokens = self.iam.as_ref().and_then(|iam| iam.tokens.as_ref());
        refuse("iam.tokens", tokens)?;
        refuse("volumeMounts", self.volume_mounts.as_ref())?;
        refuse("distributionScope", self.distribution_scope.as_ref())
    }
}

fn check_template_name(name: Option<String>, limits: &Limits) -> Result<String, ApiError> {
    let field = "templateID";
    let name = name.unwrap_or_default();
    if name.is_empty() {
        return Err(ApiError::invalid(field, "is required"));
    }
    if name.len() > limits.template_name_bytes_max {
        let rule = format!("is longer than {} bytes", limits.template_name_bytes_max);
        return Err(ApiError::invalid(field, rule));
    }
    if name.chars().any(char::is_control) {
        return Err(ApiError::invalid(field, "holds a control character"));
    }
    Ok(name)
}

pub(super) fn check_pairs(
    field: &'static str,
    pairs: &BTreeMap<String, String>,
    limits: &Limits,
) -> Result<(), ApiError> {
    if pairs.len() > limits.pairs_max {
        let rule = format!("has more than {} pairs", limits.pairs_max);
        return Err(ApiError::invalid(field, rule));
    }
    for (key, value) in pairs {
        if key.len() > limits.pair_key_bytes_max {
            let rule = format!("has a key of more than {} bytes", limits.pair_key_bytes_max);
            return Err(ApiError::invalid(field, rule));
        }
        if value.len() > limits.pair_value_bytes_max {
            let rule = format!("is longer than {} bytes", limits.pair_value_bytes_max);
            return Err(ApiError::invalid(format!("{field}.{key}"), rule));
        }
    }
    Ok(())
}

/// What no process can be given as its environment.
pub(super) fn check_environment(env_vars: &BTreeMap<String, String>) -> Result<(), ApiError> {
    for (name, value) in env_vars {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ApiError::invalid(
                "envVars",
                "has a name that is empty or holds '=' or NUL",
            ));
        }
        if value.contains('\0') {
            return Err(ApiError::invalid(format!("envVars.{name}"), "holds NUL"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sandhold_platform::Egress;
    use sandhold_types::{Clocking, OnTimeout};

    use super::*;
    use crate::request::parse_body;

    fn read_as(
        body: &str,
        generation: RouteGeneration,
        dialect: Dialect,
    ) -> Result<CreateSandbox, ApiError> {
        let body: CreateBody = parse_body(body.as_bytes())?;
        body.into_request(CreateContext {
            generation,
            dialect,
            owner: Owner {
                namespace: "a".parse().unwrap(),
                env: "dev".parse().unwrap(),
                key: "k".parse().unwrap(),
            },
            request: "r".parse().unwrap(),
            now: Timestamp::from_unix_ms(0),
            limits: &Limits::default(),
            defaults: DefaultLifetimes::default(),
            domain: Some("sandbox.test"),
        })
    }

    fn read(body: &str) -> Result<CreateSandbox, ApiError> {
        read_as(body, RouteGeneration::Second, Dialect::E2b)
    }

    #[test]
    fn the_body_that_e2b_sends() {
        let body = r#"{"templateID":"base","timeout":300,"metadata":{"k":"v"},"envVars":{"A":"1"},
            "allow_internet_access":true,"secure":true,"autoPause":false,
            "autoResume":{"enabled":false},"mcp":null,"iam":{"tokens":{}},"volumeMounts":[],"network":{"rules":{}}}"#;
        let request = read(body).unwrap();
        assert_eq!(request.template, "base");
        assert_eq!(request.metadata["k"], "v");
        assert_eq!(request.env_vars["A"], "1");
        assert_eq!(request.egress, Egress::Internet);
        assert_eq!(request.lifetime.on_timeout, OnTimeout::Kill);
        assert_eq!(request.domain.as_deref(), Some("sandbox.test"));
    }

    #[test]
    fn the_body_that_cube_sends() {
        let body = r#"{"templateID":"tpl","timeout":-1,"allow_internet_access":false,
            "network":{"allowPublicTraffic":false},
            "lifecycle":{"onTimeout":"kill","autoResume":false},"whatever":1}"#;
        let request = read_as(body, RouteGeneration::First, Dialect::Cube).unwrap();
        let never = Clocking::Idle { window_ms: None };
        assert_eq!(request.lifetime.clocking, never);
        assert_eq!(request.egress, Egress::Nothing);
        assert_eq!(request.public_traffic, PublicTraffic::TokenRequired);
    }

    #[test]
    fn what_cannot_be_had_is_refused_and_not_ignored() {
        for field in [
            r#""mcp":{"duckduckgo":{}}"#,
            r#""iam":{"tokens":{"a":{"audience":"x"}}}"#,
            r#""volumeMounts":[{"name":"v","path":"/v"}]"#,
            r#""distributionScope":["node-1"]"#,
        ] {
            let refused = read(&format!(r#"{{"templateID":"base",{field}}}"#)).unwrap_err();
            let code = refused.code();
            assert_eq!(
                code,
                sandhold_types::ErrorCode::NotSupported,
                "{field}: {refused}"
            );
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = "x".repeat(10_000);
        let many: Vec<_> = (0..257).map(|n| format!(r#""k{n}":"v""#)).collect();
        let many = format!("{{{}}}", many.join(","));
        let cases = [
            (String::from("{}"), "templateID"),
            (String::from(r#"{"templateID":""}"#), "templateID"),
            (String::from(r#"{"templateID":7}"#), "templateID"),
            (format!(r#"{{"templateID":"{long}"}}"#), "templateID"),
            (String::from(r#"{"templateID":"a\u0000"}"#), "templateID"),
        ];
        let base = [
            (r#""timeout":0"#, "timeout"),
            (r#""timeout":-7"#, "timeout"),
            (r#""timeout":1e30"#, "timeout"),
            (r#""timeout":99999999999999999999999999"#, "timeout"),
            (r#""timeout":1.5"#, "timeout"),
            (r#""timeout":"300""#, "timeout"),
            (r#""timeout":true"#, "timeout"),
            (r#""metadata":{"k":1}"#, "metadata.k"),
            (r#""metadata":["k"]"#, "metadata"),
            (&format!(r#""metadata":{{"{long}":"v"}}"#), "metadata"),
            (&format!(r#""metadata":{many}"#), "metadata"),
            (r#""envVars":{"":"v"}"#, "envVars"),
            (r#""envVars":{"a=b":"v"}"#, "envVars"),
            (r#""envVars":{"a":"\u0000"}"#, "envVars.a"),
            (r#""autoPause":"yes""#, "autoPause"),
            (r#""autoPauseMemory":false"#, "autoPauseMemory"),
            (r#""autoResume":true"#, "autoResume"),
            (r#""autoResume":{"enabled":1}"#, "autoResume.enabled"),
            (
                r#""lifecycle":{"onTimeout":"sleep"}"#,
                "lifecycle.onTimeout",
            ),
            (
                r#""autoPause":false,"lifecycle":{"onTimeout":"pause"}"#,
                "lifecycle.onTimeout",
            ),
            (
                r#""lifecycle":{"backgroundCommandsCount":"no"}"#,
                "lifecycle.backgroundCommandsCount",
            ),
            (r#""allow_internet_access":"yes""#, "allow_internet_access"),
            (r#""network":{"allowOut":["x y"]}"#, "network.allowOut[0]"),
        ];
        let base = base.map(|(f, field)| (format!(r#"{{"templateID":"base",{f}}}"#), field));
        for (body, field) in cases.into_iter().chain(base) {
            let refused = read(&body).unwrap_err();
            let code = refused.code();
            assert_eq!(
                code,
                sandhold_types::ErrorCode::InvalidRequest,
                "{field}: {refused}"
            );
            let text = refused.to_string();
            assert!(text.starts_with(field), "{field}: {text}");
        }
    }
}
