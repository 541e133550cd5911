//! Templates from images: a layout, a docker archive, a real registry; with an engine and a network
//! that only pretend.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    path::PathBuf,
    sync::Arc,
};

use crate::pretend::{Behaviour, Pretend};
use crate::support::{Access, Compression, Registry, TestImage, archive};
use sandhold_images::{
    Build, BuildError, BuildRequest, Builder, Cache, Credentials, Definition, Oven, Registries,
    Silent,
};
use sandhold_platform::Egress;
use sandhold_types::{SystemClock, SystemEntropy};
use serde_json::json;

struct World {
    folder: tempfile::TempDir,
    pretend: Pretend,
    registries: Registries,
}

impl World {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("agent"), "agent").unwrap();
        let mut registries = Registries::default();
        registries.allow_insecure("127.0.0.1");
        Self {
            pretend: Pretend::new(Behaviour::Ready).await,
            registries,
            folder,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Builds a template whose definition has this source.
    async fn build(&self, source: &str) -> Result<Arc<Build>, BuildError> {
        let text = format!("name = \"tiny\"\n[source]\n{source}\n");
        fs::write(self.path("template.toml"), text).unwrap();
        let definition = Definition::load(self.folder.path()).unwrap();
        let (clock, entropy) = (Arc::new(SystemClock), Arc::new(SystemEntropy));
        let builder = Builder::open(&self.path("shelf"), clock, entropy, &Silent).await?;
        let request = BuildRequest {
            definition: &definition,
            owner: None,
            agent: &self.path("agent"),
            cache: Cache::Use,
            registries: &self.registries,
            steps: &[],
            egress: Egress::Nothing,
            promised: None,
        };
        let oven = Oven {
            engine: &self.pretend,
            step_engine: &self.pretend,
            network: &self.pretend,
            entropy: &SystemEntropy,
            instances: &self.path("instances"),
            ready_budget: self.pretend.patience(),
        };
        let built = builder.build(&request, &oven, &Silent).await?;
        Ok(built.build)
    }

    async fn build_from(&self, reference: &str) -> Result<Arc<Build>, BuildError> {
        let source = format!("kind = \"image\"\nreference = \"{reference}\"");
        self.build(&source).await
    }
}

/// Two layers, the second of which removes a file of the first.
fn sample() -> TestImage {
    let below = archive(&[
        ("bin/sh", "shell"),
        ("etc/gone", "x"),
        ("srv/file", "below"),
    ]);
    let above = archive(&[("etc/.wh.gone", ""), ("srv/file", "above")]);
    let run = json!({ "Env": ["GREETING=a b", "PATH=/opt/bin:/bin"], "User": "1234:5",
        "WorkingDir": "/srv" });
    TestImage::new(&[below, above], Compression::Gzip, &run)
}

fn told(error: &BuildError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

fn assert_is_sample(build: &Build) {
    let text = |name: &str| fs::read_to_string(build.root_fs.join(name)).unwrap();
    assert_eq!(text("srv/file"), "above");
    assert!(!build.root_fs.join("etc/gone").exists());
    assert!(build.root_fs.join("home/user").is_dir());
    // BC-120: what the image says reaches commands.
    let settings: serde_json::Value = serde_json::from_str(&text(".sandhold/agent.json")).unwrap();
    assert_eq!(settings["environment"]["GREETING"], "a b");
    assert_eq!(settings["defaultUser"], "1234");
    assert_eq!(settings["defaultWorkdir"], "/srv");
    assert_eq!(
        text("etc/profile.d/zz-sandhold.sh"),
        "export PATH='/opt/bin:/bin'\n"
    );
}

#[tokio::test]
async fn a_layout_and_an_archive_of_one_image_are_one_root() {
    // R-P5
    let world = World::new().await;
    sample().write_layout(&world.path("layout"));
    sample().write_archive(&world.path("image.tar"));
    let layout = world
        .build("kind = \"oci-layout\"\npath = \"layout\"")
        .await;
    assert_is_sample(&layout.unwrap());
    let saved = world
        .build("kind = \"docker-archive\"\npath = \"image.tar\"")
        .await;
    assert_is_sample(&saved.unwrap());
    // A newer archive is a layout in an archive.
    let mut builder = tar::Builder::new(fs::File::create(world.path("new.tar")).unwrap());
    builder.append_dir_all("", world.path("layout")).unwrap();
    builder.finish().unwrap();
    let saved = world
        .build("kind = \"docker-archive\"\npath = \"new.tar\"")
        .await;
    assert_is_sample(&saved.unwrap());
}

#[tokio::test]
async fn a_changed_byte_is_found_wherever_it_lies() {
    // R-P5
    let world = World::new().await;
    let image = sample();
    for digest in image.blobs.keys() {
        let layout = world.path("layout");
        image.write_layout(&layout);
        let file = layout
            .join("blobs/sha256")
            .join(digest.trim_start_matches("sha256:"));
        let mut bytes = fs::read(&file).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&file, bytes).unwrap();
        let refused = world
            .build("kind = \"oci-layout\"\npath = \"layout\"")
            .await;
        let text = told(&refused.unwrap_err());
        assert!(text.contains(digest), "{text}");
    }
}

#[tokio::test]
async fn hostile_layers_leave_no_template_behind() {
    // R-P5
    let world = World::new().await;
    let hostile = TestImage::new(
        &[archive(&[("a", ""), ("b/.wh..", "")])],
        Compression::None,
        &json!({}),
    );
    hostile.write_layout(&world.path("layout"));
    let refused = world
        .build("kind = \"oci-layout\"\npath = \"layout\"")
        .await;
    let text = told(&refused.unwrap_err());
    assert!(
        text.contains("layer 1") && text.contains("b/.wh.."),
        "{text}"
    );
    assert_eq!(fs::read_dir(world.path("shelf/layers")).unwrap().count(), 0);
    assert_eq!(
        fs::read_dir(world.path("shelf/templates")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn an_image_comes_from_a_registry() {
    // R-P5
    let world = World::new().await;
    let registry = Registry::start(Access::Everybody);
    let name = registry.push(&sample(), "team/sample:1");
    assert_is_sample(&world.build_from(&name).await.unwrap());
    // By digest too, and what is there already is not fetched again.
    let by_digest = format!(
        "{}/team/sample@{}",
        registry.address,
        crate::support::digest(&sample().manifest)
    );
    for digest in sample().blobs.keys() {
        // The manifest and the configuration are still asked for; layers are not.
        if !String::from_utf8_lossy(&sample().blobs[digest]).contains("amd64") {
            registry.corrupt(digest);
        }
    }
    assert_is_sample(&world.build_from(&by_digest).await.unwrap());
    let missing = world.build_from(&name.replace("sample:1", "none:1")).await;
    let text = told(&missing.unwrap_err());
    assert!(
        text.contains("none:1") && text.contains(&registry.address),
        "{text}"
    );
}

#[tokio::test]
async fn a_registry_that_gives_other_bytes_is_not_believed() {
    // R-P5
    let world = World::new().await;
    let registry = Registry::start(Access::Everybody);
    let image = sample();
    let name = registry.push(&image, "sample:1");
    let layer = image
        .blobs
        .keys()
        .find(|d| !String::from_utf8_lossy(&image.blobs[*d]).contains("amd64"));
    registry.corrupt(layer.unwrap());
    let refused = world.build_from(&name).await;
    let text = told(&refused.unwrap_err());
    assert!(text.contains(layer.unwrap()), "{text}");
    assert_eq!(fs::read_dir(world.path("shelf/layers")).unwrap().count(), 0);
}

#[tokio::test]
async fn credentials_open_a_registry_and_only_their_own() {
    // R-P5
    let mut world = World::new().await;
    let registry = Registry::start(Access::WithPassword);
    let name = registry.push(&sample(), "private:1");
    assert!(world.build_from(&name).await.is_err());
    let credentials = |password: &str| Credentials {
        username: String::from("me"),
        password: password.to_owned(),
    };
    world
        .registries
        .set_credentials(&registry.address, credentials("wrong"));
    let text = told(&world.build_from(&name).await.unwrap_err());
    assert!(!text.contains("wrong"), "{text}");
    world
        .registries
        .set_credentials("127.0.0.1:1", credentials("secret"));
    assert!(world.build_from(&name).await.is_err());
    world
        .registries
        .set_credentials(&registry.address, credentials("secret"));
    assert_is_sample(&world.build_from(&name).await.unwrap());
}

#[tokio::test]
async fn mirrors_are_asked_first_and_their_failure_is_no_failure() {
    // R-P5
    let mut world = World::new().await;
    let (mirror, origin) = (
        Registry::start(Access::Everybody),
        Registry::start(Access::Everybody),
    );
    let elsewhere = "127.0.0.1:9";
    // Nobody listens at the name itself; its mirror has the image.
    mirror.push(&sample(), "sample:1");
    world.registries.add_mirror(elsewhere, &mirror.address);
    assert_is_sample(
        &world
            .build_from(&format!("{elsewhere}/sample:1"))
            .await
            .unwrap(),
    );
    // A mirror that is down, or does not have it, is passed over.
    let name = origin.push(&sample(), "other:1");
    world.registries.add_mirror(&origin.address, elsewhere);
    world
        .registries
        .add_mirror(&origin.address, &mirror.address);
    assert_is_sample(&world.build_from(&name).await.unwrap());
}

#[tokio::test]
async fn plain_http_needs_to_be_allowed() {
    // R-P5
    let mut world = World::new().await;
    world.registries = Registries::default();
    let registry = Registry::start(Access::Everybody);
    let name = registry.push(&sample(), "sample:1");
    assert!(world.build_from(&name).await.is_err());
    world.registries.allow_insecure(&registry.address);
    assert_is_sample(&world.build_from(&name).await.unwrap());
}

/// A registry that sends every client on to `target`, in the way that `answer` says.
fn sender_on(answer: &'static str, target: &TcpListener) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answer = answer.replace("TARGET", &target.local_addr().unwrap().to_string());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

#[tokio::test]
async fn a_tenant_cannot_have_the_host_fetch_from_where_only_the_host_reaches() {
    // R-P2
    let mut world = World::new().await;
    let registry = Registry::start(Access::Everybody);
    let name = registry.push(&sample(), "sample:1");
    let list = |name: &str| vec![String::from("public"), name.to_owned()];
    world.registries.allow_only(&list("other"));
    let text = told(&world.build_from(&name).await.unwrap_err());
    let mend = format!("--registry-allow {}", registry.address);
    assert!(text.contains(&mend), "{text}");
    world.registries.allow_only(&list(&registry.address));
    assert_is_sample(&world.build_from(&name).await.unwrap());
    // Neither does one that may be asked lead there.
    let inside = TcpListener::bind("127.0.0.1:0").unwrap();
    inside.set_nonblocking(true).unwrap();
    for answer in [
        "HTTP/1.1 307 On\r\nlocation: http://TARGET/secret\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 401 Who\r\nwww-authenticate: Bearer realm=\"http://TARGET/secret\",\
         service=\"s\"\r\ncontent-length: 0\r\n\r\n",
    ] {
        let public = sender_on(answer, &inside);
        let sample = format!("{public}/sample:1");
        world.registries.allow_only(&list(&public));
        let text = told(&world.build_from(&sample).await.unwrap_err());
        let mend = format!("--registry-allow {}", inside.local_addr().unwrap());
        assert!(text.contains(&mend), "{text}");
        assert!(inside.accept().is_err(), "it was asked");
        // Without the rule it would have been.
        world.registries.allow_only(&list("127.0.0.1"));
        let asked = world.build_from(&sample);
        let asked = tokio::time::timeout(std::time::Duration::from_secs(2), asked).await;
        assert!(!matches!(asked, Ok(Ok(_))));
        assert!(inside.accept().is_ok(), "{answer}: it leads nowhere");
    }
}
