//! Templates from an image, as CubeSandbox's clients ask for them (wire contract 1.6).

use std::collections::BTreeMap;

use sandhold_platform::{AnnouncedBuild, BuildBase, BuildPlan, NewBuild, RegistryLogin, StartWith};
use serde::{Deserialize, Serialize};

use super::build::resources;
use crate::error::ApiError;

/// `POST /templates`. Fields about CubeSandbox's own machines (`instanceType`, `nodes`,
/// `networkType`, `exposedPorts`) mean nothing here; every port of a sandbox can be reached.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageBuildBody {
    image: Option<String>,
    name: Option<String>,
    writable_layer_size: Option<String>,
    probe_port: Option<u16>,
    probe_path: Option<String>,
    cpu: Option<u32>,
    memory: Option<u32>,
    env: Option<Vec<String>>,
    registry_username: Option<String>,
    registry_password: Option<String>,
    command: Option<Vec<String>>,
    args: Option<Vec<String>>,
    allow_internet_access: Option<bool>,
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    dns: Option<Vec<String>>,
    enable_ivshmem: Option<bool>,
}

impl ImageBuildBody {
    /// What is asked for; `fallback_name` where the client names nothing.
    pub(crate) fn into_build(
        self,
        fallback_name: String,
    ) -> Result<(NewBuild, BuildPlan), ApiError> {
        self.refuse_unsupported()?;
        let image = self.image.filter(|image| !image.is_empty());
        let image = image.ok_or_else(|| ApiError::invalid("image", "is missing"))?;
        let login = match (self.registry_username, self.registry_password) {
            (None, None) => None,
            (Some(username), Some(password)) => Some(RegistryLogin { username, password }),
            _ => {
                let rule = "goes with registryUsername";
                return Err(ApiError::invalid("registryPassword", rule));
            }
        };
        let disk_mib = self.writable_layer_size.as_deref().map(mebibytes);
        let new = NewBuild {
            name: self.name.unwrap_or(fallback_name),
            tags: Vec::new(),
            resources: resources(self.cpu, self.memory, disk_mib.transpose()?)?,
        };
        let plan = BuildPlan {
            base: BuildBase::Image {
                reference: image,
                login,
            },
            environment: variables(&self.env.unwrap_or_default())?,
            steps: Vec::new(),
            start: StartWith::Image {
                entrypoint: self.command,
                arguments: self.args,
                ready: probe(self.probe_port, self.probe_path.as_deref())?,
            },
            force: false,
        };
        Ok((new, plan))
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let some = |list: &Option<Vec<String>>| list.as_ref().is_some_and(|l| !l.is_empty());
        if self.allow_internet_access == Some(false)
            || some(&self.allow_out)
            || some(&self.deny_out)
            || some(&self.dns)
        {
            let what = "a network rule of a template (give it to each sandbox)";
            return Err(ApiError::NotSupported(String::from(what)));
        }
        match self.enable_ivshmem {
            Some(true) => Err(ApiError::NotSupported(String::from("enableIvshmem"))),
            _ => Ok(()),
        }
    }
}

/// A size such as `512M` or `1G`.
fn mebibytes(text: &str) -> Result<u32, ApiError> {
    let wrong = || ApiError::invalid("writableLayerSize", "must be a size such as 512M or 1G");
    let text = text.trim_end_matches("iB").trim_end_matches('B');
    let (digits, factor) = match text.strip_suffix(['G', 'g']) {
        Some(digits) => (digits, 1024),
        None => (text.strip_suffix(['M', 'm']).ok_or_else(wrong)?, 1),
    };
    let number: u32 = digits.trim_end_matches('i').parse().map_err(|_| wrong())?;
    number.checked_mul(factor).ok_or_else(wrong)
}

fn variables(list: &[String]) -> Result<BTreeMap<String, String>, ApiError> {
    let pair = |text: &String| match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !text.contains('\0') => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err(ApiError::invalid("env", "must be a list of NAME=value")),
    };
    list.iter().map(pair).collect()
}

/// A command that succeeds when the port answers, with what an image may have for that.
fn probe(port: Option<u16>, path: Option<&str>) -> Result<Option<String>, ApiError> {
    let Some(port) = port else {
        return Ok(None);
    };
    let Some(path) = path.filter(|path| !path.is_empty()) else {
        return Ok(Some(format!(
            "(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null || nc -z 127.0.0.1 {port}"
        )));
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/-._~?=&%+".contains(&b);
    if !path.starts_with('/') || !path.bytes().all(plain) {
        return Err(ApiError::invalid("probePath", "must be the path of a URL"));
    }
    let url = format!("'http://127.0.0.1:{port}{path}'");
    Ok(Some(format!(
        "curl -fsS -o /dev/null {url} || wget -q -O /dev/null {url}"
    )))
}

/// The answer: a build that goes on.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageBuildAnswer {
    #[serde(rename = "jobID")]
    job_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    #[serde(rename = "templateID")]
    template_id: String,
    aliases: Vec<String>,
    status: &'static str,
    phase: &'static str,
    progress: u8,
}

impl ImageBuildAnswer {
    pub(crate) fn of(announced: &AnnouncedBuild) -> Self {
        Self {
            job_id: announced.build.to_string(),
            build_id: announced.build.to_string(),
            template_id: announced.template.to_string(),
            aliases: announced.names.clone(),
            status: "waiting",
            phase: "waiting",
            progress: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(NewBuild, BuildPlan), ApiError> {
        let body: ImageBuildBody = crate::request::parse_body(text.as_bytes())?;
        body.into_build(String::from("fallback"))
    }

    #[test]
    fn an_image_and_how_it_is_run() {
        // Wire contract 1.6
        let (new, plan) = read(
            r#"{"image":"x:1","cpu":500,"memory":256,"writableLayerSize":"8G","env":["A=b=c"],
                "command":["/run"],"args":["-v"],"probePort":80,"probePath":"/health",
                "nodes":["n"],"instanceType":"cubebox"}"#,
        )
        .unwrap();
        assert_eq!(new.name, "fallback");
        let resources = new.resources;
        assert_eq!((resources.cpu_milli, resources.memory_mib), (500, 256));
        assert_eq!(resources.disk_mib, 8192);
        assert_eq!(plan.environment["A"], "b=c");
        let StartWith::Image { ready, .. } = plan.start else {
            panic!("no image");
        };
        assert!(ready.unwrap().contains("http://127.0.0.1:80/health"));
    }

    #[test]
    fn what_is_wrong_or_cannot_be_had_is_told() {
        for (text, what) in [
            ("{}", "image"),
            (
                r#"{"image":"x","registryUsername":"u"}"#,
                "registryPassword",
            ),
            (
                r#"{"image":"x","writableLayerSize":"many"}"#,
                "writableLayerSize",
            ),
            (
                r#"{"image":"x","writableLayerSize":"4294967295G"}"#,
                "writableLayerSize",
            ),
            (r#"{"image":"x","env":["A"]}"#, "env"),
            (
                r#"{"image":"x","probePort":1,"probePath":"/';id"}"#,
                "probePath",
            ),
            (
                r#"{"image":"x","allowInternetAccess":false}"#,
                "network rule",
            ),
            (r#"{"image":"x","denyOut":["0.0.0.0/0"]}"#, "network rule"),
        ] {
            let refused = read(text).unwrap_err().to_string();
            assert!(refused.contains(what), "{text}: {refused}");
        }
    }
}
