//! Images that the tests make themselves, and a registry that they start themselves.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// How long the registry may take to listen.
const START_MAX: Duration = Duration::from_secs(20);

/// How a layer is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
}

/// An image: its documents and layers by digest.
#[derive(Debug, Clone)]
pub(crate) struct TestImage {
    pub(crate) blobs: BTreeMap<String, Vec<u8>>,
    pub(crate) manifest: Vec<u8>,
    config: Vec<u8>,
    archives: Vec<Vec<u8>>,
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// A tar archive of files by name.
pub(crate) fn archive(files: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o755);
        builder
            .append_data(&mut header, name, text.as_bytes())
            .unwrap();
    }
    builder.into_inner().unwrap()
}

impl TestImage {
    /// An image of these archives, with this part of its configuration.
    pub(crate) fn new(archives: &[Vec<u8>], compression: Compression, run: &Value) -> Self {
        let mut blobs = BTreeMap::new();
        let mut layers = Vec::new();
        for archive in archives {
            let (bytes, kind) = match compression {
                Compression::None => (archive.clone(), ""),
                Compression::Gzip => (gzip(archive), "+gzip"),
            };
            layers.push(json!({
                "mediaType": format!("application/vnd.oci.image.layer.v1.tar{kind}"),
                "digest": digest(&bytes),
                "size": bytes.len(),
            }));
            blobs.insert(digest(&bytes), bytes);
        }
        let diff_ids: Vec<String> = archives.iter().map(|a| digest(a)).collect();
        let config = json!({
            "os": "linux",
            "architecture": "amd64",
            "config": run,
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(&config),
                "size": config.len(),
            },
            "layers": layers,
        });
        blobs.insert(digest(&config), config.clone());
        Self {
            blobs,
            manifest: manifest.to_string().into_bytes(),
            config,
            archives: archives.to_vec(),
        }
    }

    /// Writes it as an OCI layout.
    pub(crate) fn write_layout(&self, folder: &Path) {
        let blobs = folder.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let manifest = (digest(&self.manifest), self.manifest.clone());
        for (name, bytes) in self.blobs.clone().into_iter().chain([manifest]) {
            fs::write(blobs.join(name.trim_start_matches("sha256:")), bytes).unwrap();
        }
        fs::write(
            folder.join("oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )
        .unwrap();
        let index = json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest(&self.manifest),
                "size": self.manifest.len(),
            }],
        });
        fs::write(folder.join("index.json"), index.to_string()).unwrap();
    }

    /// Writes it as older versions of `docker save` do.
    pub(crate) fn write_archive(&self, file: &Path) {
        let mut builder = tar::Builder::new(fs::File::create(file).unwrap());
        let mut append = |name: &str, bytes: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, bytes).unwrap();
        };
        let mut layers = Vec::new();
        for (number, archive) in self.archives.iter().enumerate() {
            let name = format!("{number}/layer.tar");
            append(&name, archive);
            layers.push(name);
        }
        append("config.json", &self.config);
        let list = json!([{ "Config": "config.json", "RepoTags": ["x:1"], "Layers": layers }]);
        append("manifest.json", list.to_string().as_bytes());
        builder.finish().unwrap();
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Who may use the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Everybody,
    /// `me` with the password `secret`.
    WithPassword,
}

/// Debian's `docker-registry` on a free port; it ends with this.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) address: String,
    access: Access,
    child: Child,
    pub(crate) folder: tempfile::TempDir,
}

/// `secret`, hashed with bcrypt.
const PASSWORD_HASH: &str = "$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";

impl Registry {
    pub(crate) fn start(access: Access) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let password = folder.path().join("htpasswd");
        fs::write(&password, format!("me:{PASSWORD_HASH}\n")).unwrap();
        let auth = match access {
            Access::Everybody => json!({}),
            Access::WithPassword => json!({ "htpasswd": { "realm": "test", "path": password } }),
        };
        // JSON is YAML.
        let config = json!({
            "version": "0.1",
            "log": { "level": "error" },
            "storage": { "filesystem": { "rootdirectory": folder.path().join("data") } },
            "auth": auth,
            "http": { "addr": address },
        });
        let file = folder.path().join("config.yml");
        fs::write(&file, config.to_string()).unwrap();
        drop(listener);
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry; scripts/setup installs it");
        let registry = Self {
            address,
            access,
            child,
            folder,
        };
        registry.wait_until_it_answers();
        registry
    }

    fn wait_until_it_answers(&self) {
        let end = Instant::now() + START_MAX;
        let url = format!("http://{}/v2/", self.address);
        // A refusal is an answer too.
        while let Err(error) = ureq::get(&url).call() {
            if matches!(error, ureq::Error::StatusCode(_)) {
                return;
            }
            assert!(
                Instant::now() < end,
                "the registry does not listen: {error}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn put(&self, method: &str, url: &str, kind: &str, bytes: &[u8]) -> Option<String> {
        let mut request = http::Request::builder()
            .method(method)
            .uri(url)
            .header("content-type", kind);
        if self.access == Access::WithPassword {
            // me:secret
            request = request.header("authorization", "Basic bWU6c2VjcmV0");
        }
        let answer = ureq::run(request.body(bytes.to_vec()).unwrap()).unwrap();
        let location = answer.headers().get("location")?;
        Some(location.to_str().unwrap().to_owned())
    }

    /// Pushes an image as `name` (with a tag).
    pub(crate) fn push(&self, image: &TestImage, name: &str) -> String {
        let (repository, tag) = name.split_once(':').unwrap();
        let base = format!("http://{}/v2/{repository}", self.address);
        for (digest, bytes) in &image.blobs {
            let uploads = format!("{base}/blobs/uploads/");
            let place = self.put("POST", &uploads, "text/plain", b"").unwrap();
            let url = format!("{place}&digest={}", digest.replace(':', "%3A"));
            self.put("PUT", &url, "application/octet-stream", bytes);
        }
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let url = format!("{base}/manifests/{tag}");
        self.put("PUT", &url, kind, &image.manifest);
        format!("{}/{name}", self.address)
    }

    /// Changes the stored bytes of a piece of content behind the registry's back.
    pub(crate) fn corrupt(&self, digest: &str) {
        let hex = digest.trim_start_matches("sha256:");
        let data = self
            .folder
            .path()
            .join("data/docker/registry/v2/blobs/sha256");
        let file = data.join(&hex[..2]).join(hex).join("data");
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
