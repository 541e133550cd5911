use std::time::Duration;

use sandhold_engine::EngineIdentity;
use sandhold_platform::{Owner, PauseKeeps, TemplateStamp};
use sandhold_types::{Resources, SandboxId, SeededEntropy, Token};

use super::*;

fn at(ms: u64) -> Timestamp {
    Timestamp::from_unix_ms(ms)
}

fn snapshot(seed: u64, name: Option<&str>) -> Snapshot {
    let entropy = SeededEntropy::new(seed);
    Snapshot {
        id: SnapshotId::generate(&entropy),
        owner: Owner {
            namespace: "team".parse().unwrap(),
            env: "dev".parse().unwrap(),
            key: "key1".parse().unwrap(),
        },
        kind: SnapshotKind::Kept,
        names: name
            .map(|name| SnapshotName {
                name: name.to_owned(),
                tag: SnapshotName::DEFAULT_TAG.to_owned(),
            })
            .into_iter()
            .collect(),
        source: SandboxId::generate(&entropy),
        template: TemplateStamp {
            id: "base".parse().unwrap(),
            build: "build1".parse().unwrap(),
            alias: None,
        },
        ancestors: Vec::new(),
        resources: Resources::default(),
        env_vars: BTreeMap::new(),
        keeps: PauseKeeps::Everything,
        taken_at: at(seed),
        source_paused_ms: 1,
        engine: EngineIdentity {
            name: "sim".to_owned(),
            version: "1".to_owned(),
            cpu_features: String::new(),
        },
        control_token: Token::new("control".to_owned()),
        boot_token: Token::new("boot".to_owned()),
        size_bytes: 0,
    }
}

/// A data directory with an image as an engine leaves it.
struct World {
    directory: tempfile::TempDir,
    image: PathBuf,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image-1");
        fs::create_dir(&image).unwrap();
        fs::write(image.join("pages"), vec![7; 8192]).unwrap();
        fs::write(image.join("state"), b"state").unwrap();
        Self { directory, image }
    }

    fn root(&self) -> PathBuf {
        self.directory.path().join("snapshots")
    }

    fn open(&self) -> Arc<Snapshots> {
        Arc::new(Snapshots::open(&self.root()).unwrap())
    }

    fn names(&self) -> usize {
        fs::read_dir(self.root()).unwrap().count()
    }
}

fn resolve(catalogue: &Snapshots, reference: &str) -> Option<SnapshotId> {
    let (namespace, env) = ("team".parse().unwrap(), "dev".parse().unwrap());
    let found = catalogue.resolve(&namespace, &env, reference)?;
    Some(found.id.clone())
}

#[test]
fn a_snapshot_outlives_what_it_was_made_of_and_the_process_that_made_it() {
    // R-T1, R-T4
    let world = World::new();
    let made = snapshot(1, None);
    let published = world.open().publish(made.clone(), &world.image).unwrap();
    assert!(published.size_bytes >= 8192);
    let shared = world.open().sizes(&made.id).unwrap();
    assert_eq!(shared.exclusive_bytes, 0, "its files are the sandbox's too");
    fs::remove_dir_all(&world.image).unwrap();
    let catalogue = world.open();
    let sizes = catalogue.sizes(&made.id).unwrap();
    assert_eq!(
        (sizes.exclusive_bytes, sizes.shared_bytes),
        (published.size_bytes, 0)
    );
    let lease = catalogue.lease(&made.id).unwrap();
    assert_eq!(fs::read(lease.image().join("state")).unwrap(), b"state");
    assert_eq!(lease.snapshot().control_token, made.control_token);
}

#[test]
fn a_name_stands_for_one_snapshot_of_a_bucket() {
    let world = World::new();
    let catalogue = world.open();
    let (first, second) = (snapshot(1, Some("env")), snapshot(2, Some("env")));
    catalogue.publish(first.clone(), &world.image).unwrap();
    for reference in ["env", "env:default", "team/env", first.id.as_str()] {
        assert_eq!(
            resolve(&catalogue, reference),
            Some(first.id.clone()),
            "{reference}"
        );
    }
    for reference in ["env:v2", "other/env", "", ":"] {
        assert_eq!(resolve(&catalogue, reference), None, "{reference}");
    }
    catalogue.publish(second.clone(), &world.image).unwrap();
    for catalogue in [catalogue, world.open()] {
        assert_eq!(resolve(&catalogue, "env"), Some(second.id.clone()));
        let id = first.id.as_str();
        assert_eq!(
            resolve(&catalogue, id),
            Some(first.id.clone()),
            "it keeps its ID"
        );
    }
    let catalogue = world.open();
    let (namespace, prod) = ("team".parse().unwrap(), "prod".parse().unwrap());
    assert!(
        catalogue
            .resolve(&namespace, &prod, first.id.as_str())
            .is_none()
    );
}

#[test]
fn bytes_stay_while_somebody_restores_from_them() {
    // Safety D: metadata first, bytes later.
    let world = World::new();
    let catalogue = world.open();
    let made = snapshot(1, None);
    catalogue.publish(made.clone(), &world.image).unwrap();
    let lease = catalogue.lease(&made.id).unwrap();
    catalogue.remove(&made.id).unwrap();
    assert!(catalogue.get(&made.id).is_none() && catalogue.lease(&made.id).is_none());
    assert!(lease.image().join("pages").exists());
    drop(lease);
    let nothing = BTreeSet::new();
    catalogue
        .collect(&nothing, Retention::ForEver, at(0))
        .unwrap();
    assert_eq!(world.names(), 0);
    assert!(
        world.image.join("pages").exists(),
        "the sandbox's own are its own"
    );
    let again = catalogue.remove(&made.id);
    assert!(matches!(again, Err(SnapshotError::Unknown(_))));
}

#[test]
fn what_was_cut_short_is_swept_up_and_what_cannot_be_read_is_left_alone() {
    // R-L3
    let world = World::new();
    let (kept, broken) = (snapshot(1, None), snapshot(2, None));
    let catalogue = world.open();
    for made in [&kept, &broken] {
        catalogue.publish(made.clone(), &world.image).unwrap();
    }
    let half = snapshot(3, None);
    fs::create_dir_all(world.root().join(half.id.as_str()).join("image")).unwrap();
    fs::write(
        world.root().join(broken.id.as_str()).join(RECORD_FILE),
        b"{",
    )
    .unwrap();
    let catalogue = world.open();
    assert_eq!(
        world.names(),
        2,
        "the half one is gone, the broken one is not"
    );
    assert_eq!(catalogue.list().len(), 1);
    let far = at(u64::MAX);
    let refused = catalogue.collect(&BTreeSet::new(), Retention::For(Duration::ZERO), far);
    assert!(matches!(
        refused,
        Err(SnapshotError::Unreadable { count: 1 })
    ));
    assert!(
        catalogue.get(&kept.id).is_some(),
        "an error while marking deletes nothing"
    );
}

#[test]
fn no_image_is_no_snapshot() {
    let world = World::new();
    let catalogue = world.open();
    let empty = world.directory.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let nested = world.directory.path().join("nested");
    fs::create_dir_all(nested.join("directory")).unwrap();
    for image in [empty, nested, world.directory.path().join("nothing")] {
        assert!(catalogue.publish(snapshot(1, None), &image).is_err());
        assert_eq!(world.names(), 0);
    }
}

#[test]
fn only_what_nothing_keeps_is_collected() {
    // R-T5
    let world = World::new();
    let catalogue = world.open();
    let mut temporary = snapshot(1, None);
    temporary.kind = SnapshotKind::Temporary;
    let (named, referred, due) = (
        snapshot(2, Some("env")),
        snapshot(3, None),
        snapshot(4, None),
    );
    let mut young = snapshot(5, None);
    young.taken_at = at(1_000);
    for made in [&temporary, &named, &referred, &due, &young] {
        catalogue.publish(made.clone(), &world.image).unwrap();
    }
    let kept = Retention::For(Duration::from_millis(500));
    let stands_on = BTreeSet::from([referred.id.clone()]);
    let never = catalogue
        .collect(&stands_on, Retention::ForEver, at(1_200))
        .unwrap();
    assert!(never.is_empty());
    let collected = catalogue.collect(&stands_on, kept, at(1_200)).unwrap();
    assert_eq!(collected, vec![due.id]);
    assert_eq!(catalogue.list().len(), 4);
    assert_eq!(catalogue.temporary(), BTreeSet::from([temporary.id]));
}
