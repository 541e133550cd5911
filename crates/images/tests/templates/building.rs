//! Templates from definition to catalogue, with an engine and a network that only pretend.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::pretend::{Behaviour, Heard, Pretend, identity};
use sandhold_images::{
    BuildError, BuildRequest, Builder, Builds, Built, Cache, Catalogue, Definition, Event, Oven,
    Registries, Silent, Stage, WarmMismatch,
};
use sandhold_platform::{Egress, PlatformError, Templates, Warmth};
use sandhold_types::{Namespace, SystemClock, SystemEntropy};

/// A definition, an agent and a catalogue directory.
struct World {
    folder: tempfile::TempDir,
    pretend: Pretend,
}

impl World {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let world = Self {
            pretend: Pretend::new(Behaviour::Ready).await,
            folder,
        };
        fs::create_dir_all(world.path("tree/etc")).unwrap();
        fs::write(world.path("tree/etc/motd"), "hello").unwrap();
        fs::write(world.path("tree/etc/resolv.conf"), "nameserver 10.0.0.1\n").unwrap();
        fs::write(world.path("agent"), "agent one").unwrap();
        world.define("tiny");
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn define(&self, name: &str) {
        let text = format!("name = \"{name}\"\n[source]\nkind = \"dir\"\npath = \"tree\"\n");
        fs::write(self.path("template.toml"), text).unwrap();
    }

    async fn build_for(
        &self,
        owner: Option<&str>,
        cache: Cache,
    ) -> Result<(Built, Heard), BuildError> {
        let heard = Heard::default();
        let definition = Definition::load(self.folder.path()).unwrap();
        let builder = self.builder(&self.path("shelf")).await;
        let request = BuildRequest {
            definition: &definition,
            owner: owner.map(|o| o.parse().unwrap()),
            agent: &self.path("agent"),
            cache,
            registries: &Registries::default(),
            steps: &[],
            egress: Egress::Nothing,
            promised: None,
        };
        let instances = self.path("instances");
        let oven = Oven {
            engine: &self.pretend,
            step_engine: &self.pretend,
            network: &self.pretend,
            entropy: &SystemEntropy,
            instances: &instances,
            ready_budget: self.pretend.patience(),
        };
        let built = builder.build(&request, &oven, &heard).await?;
        Ok((built, heard))
    }

    async fn build(&self) -> Built {
        self.build_for(None, Cache::Use).await.unwrap().0
    }

    async fn builder(&self, directory: &Path) -> Builder {
        let clock = Arc::new(SystemClock);
        Builder::open(directory, clock, Arc::new(SystemEntropy), &Silent)
            .await
            .unwrap()
    }

    fn catalogue(&self, shared: &[PathBuf]) -> Catalogue {
        open(&self.path("shelf"), shared)
    }
}

fn open(own: &Path, shared: &[PathBuf]) -> Catalogue {
    Catalogue::open(own, shared, identity(), Arc::new(SystemClock)).unwrap()
}

fn tenant(name: &str) -> Namespace {
    name.parse().unwrap()
}

fn current(catalogue: &Catalogue, reference: &str) -> Option<Arc<sandhold_images::Build>> {
    Builds::resolve(catalogue, &tenant("t"), reference)
}

#[tokio::test]
async fn a_build_is_warm_complete_and_found_by_every_name() {
    // R-P5
    let world = World::new().await;
    let built = world.build().await;
    let catalogue = world.catalogue(&[]);
    let found = current(&catalogue, "tiny").unwrap();
    assert_eq!(found.id, built.build.id);
    let root = &found.root_fs;
    assert_eq!(fs::read_to_string(root.join("etc/motd")).unwrap(), "hello");
    assert_eq!(
        fs::read_to_string(root.join(".sandhold/agent")).unwrap(),
        "agent one"
    );
    // The source has a resolver of its own, and keeps it.
    let resolver = |root: &Path| fs::read_to_string(root.join("etc/resolv.conf")).unwrap();
    assert_eq!(resolver(root), "nameserver 169.254.0.22\n");
    assert_eq!(resolver(&world.path("tree")), "nameserver 10.0.0.1\n");
    let settings = fs::read_to_string(root.join(".sandhold/agent.json")).unwrap();
    assert!(settings.contains("\"defaultUser\": \"user\""), "{settings}");
    let warm = found.warm.as_ref().unwrap();
    assert!(warm.directory.join("memory").is_file());
    assert_eq!(warm.control_token.expose(), world.pretend.token());
    for reference in [
        "tiny:default",
        "tiny:latest",
        "t/tiny",
        found.template.as_str(),
    ] {
        assert!(current(&catalogue, reference).is_some(), "{reference}");
    }
    for reference in [
        "",
        "tin",
        "tiny:no",
        "other/tiny",
        "../tiny",
        &"x".repeat(10_000),
    ] {
        assert!(current(&catalogue, reference).is_none(), "{reference}");
    }
}

#[tokio::test]
async fn what_is_unchanged_is_not_made_again() {
    // R-T4
    let world = World::new().await;
    let first = world.build().await;
    let (again, heard) = world.build_for(None, Cache::Use).await.unwrap();
    assert!(again.reused);
    assert_eq!(again.build.id, first.build.id);
    assert!(!heard.began(Stage::Warm));

    fs::write(world.path("agent"), "agent two").unwrap();
    let (second, heard) = world.build_for(None, Cache::Use).await.unwrap();
    assert!(!second.reused);
    assert!(heard.all().contains(&Event::Cached {
        stage: Stage::RootFs
    }));
    assert!(heard.began(Stage::Agent) && heard.began(Stage::Warm));

    fs::write(world.path("tree/etc/motd"), "changed").unwrap();
    let (third, heard) = world.build_for(None, Cache::Use).await.unwrap();
    assert!(heard.began(Stage::RootFs));
    let motd = |built: &Built| fs::read_to_string(built.build.root_fs.join("etc/motd")).unwrap();
    assert_eq!(
        (motd(&first), motd(&third)),
        ("hello".into(), "changed".into())
    );
    assert_eq!(third.build.template, first.build.template);

    let (fresh, heard) = world.build_for(None, Cache::Ignore).await.unwrap();
    assert!(heard.began(Stage::RootFs));
    assert_ne!(fresh.build.root_fs, third.build.root_fs);
    let (kept, _) = world.build_for(None, Cache::Use).await.unwrap();
    assert_eq!(kept.build.id, fresh.build.id);
}

#[tokio::test]
async fn a_failed_bake_leaves_the_old_build_and_nothing_else() {
    let mut world = World::new().await;
    let first = world.build().await;
    for (behaviour, reason) in [
        (Behaviour::Ends, "ended before it was ready"),
        (Behaviour::RefusesQuiesce, "answered 500"),
        (Behaviour::SaysGarbage, "answered 418"),
        (Behaviour::FailsCapture, "capture the warm sandbox"),
    ] {
        world.pretend = Pretend::new(behaviour).await;
        fs::write(world.path("agent"), format!("agent {behaviour:?}")).unwrap();
        let error = world.build_for(None, Cache::Use).await.unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains(reason), "{behaviour:?}: {source}");
        assert_eq!(world.pretend.left(), (0, 0), "{behaviour:?}");
        assert_eq!(fs::read_dir(world.path("instances")).unwrap().count(), 0);
        let found = current(&world.catalogue(&[]), "tiny").unwrap();
        assert_eq!(found.id, first.build.id);
    }
}

#[tokio::test]
async fn an_agent_that_is_never_ready_is_given_up_with_what_it_waits_for() {
    let mut world = World::new().await;
    world.pretend = Pretend::new(Behaviour::NeverReady).await;
    let error = world.build_for(None, Cache::Use).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("waiting for python"), "{source}");
    assert!(source.contains("last words on the console"), "{source}");
    assert_eq!(world.pretend.left(), (0, 0));
}

#[tokio::test]
async fn left_overs_of_a_killed_builder_are_removed() {
    // R-L3
    let world = World::new().await;
    world.pretend.leave_something_behind();
    assert_eq!(world.pretend.left(), (1, 1));
    let rubbish = world.path("shelf/tmp/build/image");
    fs::create_dir_all(&rubbish).unwrap();
    world.build().await;
    assert_eq!(world.pretend.left(), (0, 0));
    assert!(!rubbish.exists());
    // And by whoever opens the catalogue.
    fs::create_dir_all(&rubbish).unwrap();
    world.catalogue(&[]);
    assert!(!rubbish.exists());
}

#[tokio::test]
async fn a_new_build_is_seen_without_opening_again() {
    let world = World::new().await;
    let catalogue = world.catalogue(&[]);
    assert!(current(&catalogue, "tiny").is_none());
    let first = world.build().await;
    assert_eq!(current(&catalogue, "tiny").unwrap().id, first.build.id);
    fs::write(world.path("agent"), "agent two").unwrap();
    let second = world.build().await;
    assert_eq!(current(&catalogue, "tiny").unwrap().id, second.build.id);
    // The old one is still a build, for sandboxes that came from it.
    assert!(catalogue.build(&first.build.id).is_some());
}

#[tokio::test]
async fn bytes_go_when_nobody_refers_to_them() {
    // R-T5
    let world = World::new().await;
    let (built, _) = world.build_for(Some("t"), Cache::Use).await.unwrap();
    let build = built.build;
    let catalogue = world.catalogue(&[]);
    assert_eq!(current(&catalogue, "tiny").unwrap().id, build.id);
    Templates::delete(&catalogue, &tenant("t"), "tiny")
        .await
        .unwrap();
    assert!(current(&catalogue, "tiny").is_none());
    let gone = Templates::delete(&catalogue, &tenant("t"), "tiny").await;
    assert!(matches!(gone, Err(PlatformError::TemplateNotFound(_))));

    let in_use = BTreeSet::from([build.id.clone()]);
    assert!(catalogue.collect(&in_use).unwrap().builds.is_empty());
    assert!(build.root_fs.is_dir());
    assert!(catalogue.build(&build.id).is_some());

    let collected = catalogue.collect(&BTreeSet::new()).unwrap();
    assert_eq!(collected.builds, std::slice::from_ref(&build.id));
    assert_eq!(collected.layers, 2);
    assert!(catalogue.build(&build.id).is_none());
    for part in ["builds", "layers", "tmp", "templates"] {
        assert_eq!(
            fs::read_dir(world.path("shelf").join(part))
                .unwrap()
                .count(),
            0,
            "{part}"
        );
    }
}

#[tokio::test]
async fn a_superseded_build_that_another_process_uses_is_not_pruned() {
    let world = World::new().await;
    let first = world.build().await;
    let user = world.catalogue(&[]);
    assert!(current(&user, "tiny").is_some());
    fs::write(world.path("agent"), "agent two").unwrap();
    world.build().await;
    let builder = world.builder(&world.path("shelf")).await;
    assert!(builder.prune().unwrap().builds.is_empty());
    drop(user);
    assert_eq!(
        builder.prune().unwrap().builds,
        std::slice::from_ref(&first.build.id)
    );
}

#[tokio::test]
async fn nothing_is_collected_while_a_record_cannot_be_read() {
    let world = World::new().await;
    let built = world.build().await;
    let catalogue = world.catalogue(&[]);
    catalogue.remove("tiny").unwrap();
    for (text, reason) in [
        ("{", "cannot be understood"),
        ("{\"version\":99}", "version 99"),
        ("", "cannot be understood"),
    ] {
        let strange = world.path("shelf/builds/strange");
        fs::create_dir_all(&strange).unwrap();
        fs::write(strange.join("build.json"), text).unwrap();
        let error = catalogue.collect(&BTreeSet::new()).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains(reason), "{source}");
        assert!(built.build.root_fs.is_dir());
        fs::remove_dir_all(strange).unwrap();
    }
    assert_eq!(catalogue.collect(&BTreeSet::new()).unwrap().builds.len(), 1);
}

#[tokio::test]
async fn tenants_see_their_own_and_everybodys() {
    // R-P8
    let world = World::new().await;
    world.build().await;
    world.define("private");
    world.build_for(Some("a"), Cache::Use).await.unwrap();
    let catalogue = world.catalogue(&[]);
    let names = |who: &str| -> Vec<String> {
        let views = Templates::list(&catalogue, &tenant(who));
        views.iter().map(|view| view.names[0].clone()).collect()
    };
    assert_eq!(names("a"), ["private", "tiny"]);
    assert_eq!(names("b"), ["tiny"]);
    assert!(Builds::resolve(&catalogue, &tenant("b"), "private").is_none());
    let view = Templates::resolve(&catalogue, &tenant("a"), "a/private").unwrap();
    assert_eq!(view.warm, Warmth::Warm);
    assert!(view.size_bytes > 0);
    let others = Templates::delete(&catalogue, &tenant("b"), "private").await;
    assert!(matches!(others, Err(PlatformError::TemplateNotFound(_))));
    let platforms = Templates::delete(&catalogue, &tenant("b"), "tiny").await;
    assert!(matches!(platforms, Err(PlatformError::Forbidden(_))));
    assert_eq!(catalogue.list_all().len(), 2);
}

#[tokio::test]
async fn a_shared_directory_is_only_read() {
    let world = World::new().await;
    let built = world.build().await;
    let own = world.path("own");
    let before = world.pretend.listing(&world.path("shelf"));
    let catalogue = open(&own, &[world.path("shelf")]);
    assert_eq!(current(&catalogue, "tiny").unwrap().id, built.build.id);
    assert!(catalogue.remove("tiny").is_err());
    catalogue.collect(&BTreeSet::new()).unwrap();
    assert_eq!(world.pretend.listing(&world.path("shelf")), before);
    // One that is not there is empty.
    let catalogue = open(&own, &[world.path("nowhere")]);
    assert!(Templates::list(&catalogue, &tenant("t")).is_empty());
}

#[tokio::test]
async fn an_image_from_a_richer_processor_is_not_restored() {
    // BC-092
    let world = World::new().await;
    let built = world.build().await;
    let mut poorer = identity();
    poorer.cpu_features = String::from("sse2");
    let clock = Arc::new(SystemClock);
    let catalogue = Catalogue::open(&world.path("shelf"), &[], poorer, clock).unwrap();
    assert!(current(&catalogue, "tiny").unwrap().warm.is_none());
    let reason = catalogue.warm_mismatch(&built.build.id).unwrap();
    assert!(matches!(reason, WarmMismatch::CpuFeatures { .. }));
    let view = Templates::resolve(&catalogue, &tenant("t"), "tiny").unwrap();
    assert_eq!(view.warm, Warmth::Cold);
}

#[tokio::test]
async fn builders_take_turns() {
    let world = World::new().await;
    let shelf = world.path("shelf");
    let first = world.builder(&shelf).await;
    let heard = Arc::new(Heard::default());
    let (waiting, shelf_2) = (Arc::clone(&heard), shelf.clone());
    let second = tokio::spawn(async move {
        let clock = Arc::new(SystemClock);
        Builder::open(&shelf_2, clock, Arc::new(SystemEntropy), &*waiting).await
    });
    heard
        .until(|event| *event == Event::Begin { stage: Stage::Wait })
        .await;
    // A catalogue opened now must not take the builder's files for rubbish.
    fs::create_dir_all(shelf.join("tmp/build")).unwrap();
    open(&shelf, &[]);
    assert!(shelf.join("tmp/build").exists());
    drop(first);
    second.await.unwrap().unwrap();
    assert!(!shelf.join("tmp/build").exists());
}
