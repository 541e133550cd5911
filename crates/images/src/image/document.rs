//! The documents of an image: index, manifest, configuration. Pure, and wary of what they say.

use serde::Deserialize;

use crate::layers::Digest;

/// The longest document, in bytes.
pub(crate) const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// The most layers of one image.
const LAYERS_MAX: usize = 512;
/// The platform that sandboxes have.
const OS: &str = "linux";
const ARCHITECTURE: &str = "amd64";

/// What a registry is told that we understand, and what documents may say that they are.
pub(crate) const MANIFEST_TYPES: [&str; 4] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];

/// Why a document is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DocumentError {
    #[error("it is no image document")]
    Syntax(#[from] serde_json::Error),
    #[error("it is larger than {DOCUMENT_BYTES_MAX} bytes")]
    TooLarge,
    #[error("its first version has no digests of layers and is not supported")]
    Version,
    #[error("it has no image for {OS}/{ARCHITECTURE}")]
    Platform,
    #[error("it names '{0}', which is no SHA-256 digest")]
    Digest(String),
    #[error("it names more than {LAYERS_MAX} layers")]
    TooManyLayers,
    #[error("it has a layer of the kind '{0}', which is not supported")]
    LayerKind(String),
    #[error("it has no image named '{0}'")]
    Name(String),
}

/// A piece of content and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blob {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

/// What an image manifest says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) config: Blob,
    pub(crate) layers: Vec<Blob>,
}

/// A document that was asked for as an image: it is one, or leads to one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Document {
    Manifest(Manifest),
    /// The manifest of our platform.
    Elsewhere(Blob),
}

/// How an image wants to be run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ImageConfig {
    /// `NAME=value`.
    pub(crate) environment: Vec<String>,
    pub(crate) workdir: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) entrypoint: Vec<String>,
    pub(crate) command: Vec<String>,
    /// Digests of the layers as they are without compression.
    pub(crate) layers: Vec<Digest>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    schema_version: u32,
    config: Option<RawBlob>,
    #[serde(default)]
    layers: Vec<RawBlob>,
    #[serde(default)]
    manifests: Vec<RawBlob>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawBlob {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<RawPlatform>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawPlatform {
    os: String,
    architecture: String,
}

#[derive(Deserialize)]
struct RawConfig {
    os: Option<String>,
    architecture: Option<String>,
    config: Option<RawRun>,
    rootfs: Option<RawRootFs>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct RawRun {
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct RawRootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

impl RawBlob {
    fn blob(&self) -> Result<Blob, DocumentError> {
        Ok(Blob {
            digest: digest(&self.digest)?,
            size: self.size,
        })
    }

    /// An entry without a platform, as tools write for the only image of a layout, is ours.
    fn is_ours(&self) -> bool {
        self.platform
            .as_ref()
            .is_none_or(|p| p.os == OS && p.architecture == ARCHITECTURE)
    }
}

fn digest(text: &str) -> Result<Digest, DocumentError> {
    text.parse()
        .map_err(|_| DocumentError::Digest(text.chars().take(100).collect()))
}

/// Reads a manifest, or the one of our platform out of an index. `name` chooses among several
/// images of a layout.
///
/// # Errors
/// It is neither, or has no image for us.
pub(crate) fn read_document(bytes: &[u8], name: Option<&str>) -> Result<Document, DocumentError> {
    let raw: RawDocument = serde_json::from_slice(bytes)?;
    if raw.schema_version != 2 {
        return Err(DocumentError::Version);
    }
    let Some(config) = &raw.config else {
        return choose(&raw.manifests, name).map(Document::Elsewhere);
    };
    if raw.layers.len() > LAYERS_MAX {
        return Err(DocumentError::TooManyLayers);
    }
    let foreign = raw
        .layers
        .iter()
        .find(|layer| !is_archive(&layer.media_type));
    if let Some(layer) = foreign {
        let kind = layer.media_type.chars().take(100).collect();
        return Err(DocumentError::LayerKind(kind));
    }
    Ok(Document::Manifest(Manifest {
        config: config.blob()?,
        layers: raw
            .layers
            .iter()
            .map(RawBlob::blob)
            .collect::<Result<_, _>>()?,
    }))
}

/// The name that a layout gives one of its images.
const NAME_ANNOTATION: &str = "org.opencontainers.image.ref.name";

fn choose(manifests: &[RawBlob], name: Option<&str>) -> Result<Blob, DocumentError> {
    let is_called = |entry: &&RawBlob| {
        name.is_none_or(|name| {
            entry
                .annotations
                .get(NAME_ANNOTATION)
                .is_some_and(|n| n == name)
        })
    };
    let mut called = manifests.iter().filter(is_called).peekable();
    if let (Some(name), None) = (name, called.peek()) {
        return Err(DocumentError::Name(name.chars().take(100).collect()));
    }
    let ours = called.find(|entry| entry.is_ours());
    ours.ok_or(DocumentError::Platform)?.blob()
}

/// Whether a layer is a tar archive. What it is compressed with is told by its bytes.
fn is_archive(media_type: &str) -> bool {
    let archive = ["", "+gzip", "+zstd"];
    let of_oci = media_type.strip_prefix("application/vnd.oci.image.layer.v1.tar");
    let of_docker = media_type.strip_prefix("application/vnd.docker.image.rootfs.diff.tar");
    match (of_oci, of_docker) {
        (Some(rest), _) => archive.contains(&rest),
        (_, Some(rest)) => ["", ".gzip", ".zstd"].contains(&rest),
        _ => false,
    }
}

/// Reads a configuration.
///
/// # Errors
/// It is none, or is for another platform.
pub(crate) fn read_config(bytes: &[u8]) -> Result<ImageConfig, DocumentError> {
    let raw: RawConfig = serde_json::from_slice(bytes)?;
    let is = |said: &Option<String>, ours: &str| {
        said.as_deref()
            .is_none_or(|said| said.is_empty() || said == ours)
    };
    if !is(&raw.os, OS) || !is(&raw.architecture, ARCHITECTURE) {
        return Err(DocumentError::Platform);
    }
    let run = raw.config.unwrap_or_default();
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let layers = raw.rootfs.map(|root| root.diff_ids).unwrap_or_default();
    if layers.len() > LAYERS_MAX {
        return Err(DocumentError::TooManyLayers);
    }
    Ok(ImageConfig {
        environment: run.env.unwrap_or_default(),
        workdir: given(run.working_dir),
        user: given(run.user),
        entrypoint: run.entrypoint.unwrap_or_default(),
        command: run.cmd.unwrap_or_default(),
        layers: layers
            .iter()
            .map(|text| digest(text))
            .collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(letter: char) -> String {
        format!("sha256:{}", letter.to_string().repeat(64))
    }

    fn layer(kind: &str) -> String {
        let (config, layer) = (digest('a'), digest('b'));
        format!(
            r#"{{"schemaVersion":2,"config":{{"digest":"{config}","size":1}},
                "layers":[{{"mediaType":"{kind}","digest":"{layer}","size":2}}]}}"#
        )
    }

    #[test]
    fn a_manifest_names_archives_and_nothing_else() {
        // R-P5
        for kind in [
            "application/vnd.oci.image.layer.v1.tar",
            "application/vnd.oci.image.layer.v1.tar+gzip",
            "application/vnd.oci.image.layer.v1.tar+zstd",
            "application/vnd.docker.image.rootfs.diff.tar.gzip",
        ] {
            let read = read_document(layer(kind).as_bytes(), None).unwrap();
            let Document::Manifest(manifest) = read else {
                panic!("{kind}: no manifest");
            };
            assert_eq!(manifest.layers[0].digest.to_string(), digest('b'));
        }
        for kind in [
            "",
            "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
            "application/vnd.oci.image.layer.v1.tar+encrypted",
        ] {
            let read = read_document(layer(kind).as_bytes(), None);
            assert!(matches!(read, Err(DocumentError::LayerKind(_))), "{kind}");
        }
    }

    #[test]
    fn an_index_leads_to_the_image_of_our_platform() {
        let entry = |letter, architecture: &str, name: &str| {
            let digest = digest(letter);
            format!(
                r#"{{"digest":"{digest}","size":1,
                    "platform":{{"os":"linux","architecture":"{architecture}"}},
                    "annotations":{{"org.opencontainers.image.ref.name":"{name}"}}}}"#
            )
        };
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{},{},{}]}}"#,
            entry('a', "arm64", "one"),
            entry('b', "amd64", "one"),
            entry('c', "amd64", "two"),
        );
        let chosen = |name| match read_document(index.as_bytes(), name) {
            Ok(Document::Elsewhere(blob)) => blob.digest.to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(chosen(None), digest('b'));
        assert_eq!(chosen(Some("two")), digest('c'));
        let read = read_document(index.as_bytes(), Some("three"));
        assert!(matches!(read, Err(DocumentError::Name(_))));
        let only_arm = format!(
            r#"{{"schemaVersion":2,"manifests":[{}]}}"#,
            entry('a', "arm64", "x")
        );
        let read = read_document(only_arm.as_bytes(), None);
        assert!(matches!(read, Err(DocumentError::Platform)));
    }

    #[test]
    fn what_is_no_document_is_refused() {
        let bad_digest = layer("application/vnd.oci.image.layer.v1.tar")
            .replace(&digest('b'), "sha256:../../../etc/passwd");
        for bytes in [
            "",
            "[]",
            "{}",
            r#"{"schemaVersion":1,"fsLayers":[]}"#,
            r#"{"schemaVersion":2}"#,
            r#"{"schemaVersion":2,"manifests":[]}"#,
            &bad_digest,
        ] {
            assert!(read_document(bytes.as_bytes(), None).is_err(), "{bytes}");
        }
    }

    #[test]
    fn a_configuration_says_how_to_run() {
        // BC-120
        let text = r#"{"os":"linux","architecture":"amd64","config":{"Env":["P=a b"],
            "WorkingDir":"/srv/app","User":"1234","Entrypoint":["/run"],"Cmd":null}}"#;
        let read = read_config(text.as_bytes()).unwrap();
        assert_eq!(read.environment, ["P=a b"]);
        assert_eq!(read.workdir.as_deref(), Some("/srv/app"));
        assert_eq!(read.user.as_deref(), Some("1234"));
        assert_eq!((read.entrypoint.len(), read.command.len()), (1, 0));
        assert_eq!(read_config(b"{}").unwrap(), ImageConfig::default());
        let other = read_config(br#"{"architecture":"arm64"}"#);
        assert!(matches!(other, Err(DocumentError::Platform)));
    }
}
