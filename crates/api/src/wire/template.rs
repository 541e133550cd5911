//! Templates as clients read them (wire contract 1.6).

use sandhold_platform::{TemplateView, Warmth};
use serde::Serialize;

/// An entry of the list of templates, for clients of both kinds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TemplateBody {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u32,
    public: bool,
    is_default: bool,
    aliases: Vec<String>,
    names: Vec<String>,
    created_at: String,
    updated_at: String,
    created_by: Option<()>,
    last_spawned_at: Option<()>,
    spawn_count: u64,
    build_count: u64,
    envd_version: &'static str,
    build_status: &'static str,
    status: &'static str,
    size_bytes: u64,
    warm: bool,
}

/// One template with its build.
#[derive(Debug, Serialize)]
pub(crate) struct TemplateDetail {
    #[serde(flatten)]
    template: TemplateBody,
    builds: [BuildBody; 1],
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct BuildBody {
    #[serde(rename = "buildID")]
    build_id: String,
    status: &'static str,
    created_at: String,
    updated_at: String,
    finished_at: String,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u32,
}

/// `GET /templates/aliases/{name}`
#[derive(Debug, Serialize)]
pub(crate) struct AliasBody {
    #[serde(rename = "templateID")]
    template_id: String,
    public: bool,
}

/// The contract's version that sandboxes of every template speak.
const ENVD_VERSION: &str = "0.6.13";

impl TemplateBody {
    pub(crate) fn of(view: &TemplateView) -> Self {
        let built_at = view.built_at.to_rfc3339();
        Self {
            template_id: view.id.to_string(),
            build_id: view.build.to_string(),
            cpu_count: view.resources.cpu_count(),
            memory_mb: view.resources.memory_mib,
            disk_size_mb: view.resources.disk_mib,
            public: view.owner.is_none(),
            is_default: view.owner.is_none(),
            aliases: view.names.clone(),
            names: view.names.clone(),
            created_at: built_at.clone(),
            updated_at: built_at,
            created_by: None,
            last_spawned_at: None,
            spawn_count: 0,
            build_count: 1,
            envd_version: ENVD_VERSION,
            build_status: "ready",
            status: "ready",
            size_bytes: view.size_bytes,
            warm: view.warm == Warmth::Warm,
        }
    }
}

impl TemplateDetail {
    pub(crate) fn of(view: &TemplateView) -> Self {
        let template = TemplateBody::of(view);
        let build = BuildBody {
            build_id: template.build_id.clone(),
            status: "ready",
            created_at: template.created_at.clone(),
            updated_at: template.created_at.clone(),
            finished_at: template.created_at.clone(),
            cpu_count: template.cpu_count,
            memory_mb: template.memory_mb,
            disk_size_mb: template.disk_size_mb,
        };
        Self {
            template,
            builds: [build],
        }
    }
}

impl AliasBody {
    pub(crate) fn of(view: &TemplateView) -> Self {
        Self {
            template_id: view.id.to_string(),
            public: view.owner.is_none(),
        }
    }
}
