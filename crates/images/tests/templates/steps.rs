//! Steps and their layers, with an engine and a network that only pretend; commands are run in the
//! root directory on this machine.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::pretend::{Behaviour, Heard, Pretend};
use sandhold_images::{
    Build, BuildError, BuildRequest, Builder, Cache, Context, Definition, Event, Output, Oven,
    PlannedStep, Registries, Silent, Step, StepError,
};
use sandhold_platform::Egress;
use sandhold_types::{Namespace, SystemClock, SystemEntropy};

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
        for (name, text) in [
            ("agent", "agent"),
            (
                "tree/etc/passwd",
                "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
            ),
            ("tree/etc/motd", "hello"),
            ("files/app/main", "main"),
        ] {
            world.write(name, text);
        }
        let text = "name = \"tiny\"\n[source]\nkind = \"dir\"\npath = \"tree\"\n";
        world.write("template.toml", text);
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    async fn build(&self, steps: &[Step]) -> (Result<Arc<Build>, BuildError>, Vec<Event>) {
        self.build_for("t", steps).await
    }

    async fn build_for(
        &self,
        owner: &str,
        steps: &[Step],
    ) -> (Result<Arc<Build>, BuildError>, Vec<Event>) {
        let planned: Vec<PlannedStep> = steps
            .iter()
            .map(|step| PlannedStep {
                step: step.clone(),
                force: false,
            })
            .collect();
        self.build_planned(owner, &planned).await
    }

    async fn build_planned(
        &self,
        owner: &str,
        steps: &[PlannedStep],
    ) -> (Result<Arc<Build>, BuildError>, Vec<Event>) {
        let heard = Heard::default();
        let definition = Definition::load(self.folder.path()).unwrap();
        let owner: Namespace = owner.parse().unwrap();
        let (clock, entropy) = (Arc::new(SystemClock), Arc::new(SystemEntropy));
        let builder = Builder::open(&self.path("shelf"), clock, entropy, &Silent)
            .await
            .unwrap();
        let request = BuildRequest {
            definition: &definition,
            owner: Some(owner),
            agent: &self.path("agent"),
            cache: Cache::Use,
            registries: &Registries::default(),
            steps,
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
        let built = builder.build(&request, &oven, &heard).await;
        (built.map(|built| built.build), heard.all())
    }

    fn copy(&self, destination: &str) -> Step {
        let into = self.path("archives");
        fs::create_dir_all(&into).unwrap();
        let context = Context::open(&self.path("files")).unwrap();
        Step::Copy {
            source: String::from("."),
            destination: destination.to_owned(),
            user: None,
            mode: None,
            archive: context.archive(&[String::from("app")], &into).unwrap(),
        }
    }
}

fn run(command: &str) -> Step {
    Step::Run {
        command: command.to_owned(),
        user: None,
        arguments: BTreeMap::new(),
    }
}

fn env(name: &str, value: &str) -> Step {
    Step::Env(vec![(name.to_owned(), value.to_owned())])
}

/// Numbers of the steps that were done, not found.
fn done(events: &[Event]) -> Vec<usize> {
    let done = events.iter().filter_map(|event| match event {
        Event::Instruction {
            number,
            cached: false,
            ..
        } => Some(*number),
        _ => None,
    });
    done.collect()
}

fn text(build: &Build, name: &str) -> String {
    fs::read_to_string(build.root_fs.join(name)).unwrap()
}

#[tokio::test]
async fn steps_make_files_and_settings() {
    // R-P5
    let world = World::new().await;
    let steps = [
        world.copy("srv/app"),
        env("COLOUR", "teal"),
        Step::Workdir(String::from("/srv/work")),
        run("echo $COLOUR > made; echo out; echo problem >&2; rm etc/motd"),
        Step::User(String::from("worker")),
    ];
    let (built, events) = world.build(&steps).await;
    let build = built.unwrap();
    assert_eq!(text(&build, "home/user/srv/app/main"), "main");
    assert_eq!(text(&build, "made"), "teal\n");
    assert!(!build.root_fs.join("etc/motd").exists());
    assert_eq!(
        fs::metadata(build.root_fs.join("srv/work")).unwrap().uid(),
        1000
    );
    assert!(text(&build, "etc/passwd").contains("\nworker:"));
    let settings: serde_json::Value =
        serde_json::from_str(&text(&build, ".sandhold/agent.json")).unwrap();
    assert_eq!(settings["environment"]["COLOUR"], "teal");
    assert_eq!(settings["defaultUser"], "worker");
    assert_eq!(settings["defaultWorkdir"], "/srv/work");
    for (output, line) in [(Output::Standard, "out"), (Output::Error, "problem")] {
        assert!(events.contains(&Event::Output {
            number: 4,
            output,
            text: line.to_owned(),
        }));
    }
    // The source, and every sandbox, is as it was or gone.
    assert!(world.path("tree/etc/motd").exists());
    assert_eq!(world.pretend.left(), (0, 0));
}

#[tokio::test]
async fn only_what_changed_and_what_follows_is_done_again() {
    // R-P5
    let world = World::new().await;
    let steps = |second: &str| {
        [
            run("echo a > a"),
            env("X", "1"),
            run(second),
            run("echo c > c"),
        ]
    };
    let (built, events) = world.build(&steps("echo b > b")).await;
    built.unwrap();
    assert_eq!(done(&events), [1, 2, 3, 4]);
    let (_, events) = world.build(&steps("echo b > b")).await;
    assert_eq!(done(&events), [0; 0]);
    let (built, events) = world.build(&steps("echo B > b")).await;
    assert_eq!(done(&events), [2, 3, 4]);
    let build = built.unwrap();
    assert_eq!(
        (text(&build, "a"), text(&build, "b")),
        ("a\n".into(), "B\n".into())
    );
    // A changed file is a changed step.
    let (_, events) = world.build(&[world.copy("/x"), run("true")]).await;
    assert_eq!(done(&events), [1, 2]);
    let (_, events) = world.build(&[world.copy("/x"), run("true")]).await;
    assert_eq!(done(&events), [0; 0]);
    world.write("files/app/main", "changed");
    let (_, events) = world.build(&[world.copy("/x"), run("true")]).await;
    assert_eq!(done(&events), [1, 2]);
}

#[tokio::test]
async fn a_forced_step_is_done_again_with_all_that_follows() {
    // R-P5
    let world = World::new().await;
    let planned = |force| {
        let step = |step, force| PlannedStep { step, force };
        [
            step(run("echo a > a"), false),
            step(run("echo b > b"), force),
            step(run("echo c > c"), false),
        ]
    };
    world.build_planned("t", &planned(false)).await.0.unwrap();
    let (built, events) = world.build_planned("t", &planned(true)).await;
    built.unwrap();
    assert_eq!(done(&events), [2, 3]);
}

#[tokio::test]
async fn tenants_find_nothing_of_each_other() {
    // R-P5
    let world = World::new().await;
    let steps = [run("echo secret > secret")];
    world.build_for("one", &steps).await.0.unwrap();
    let (built, events) = world.build_for("two", &steps).await;
    built.unwrap();
    assert_eq!(done(&events), [1]);
}

#[tokio::test]
async fn a_failing_step_is_named_and_what_came_before_stays_done() {
    // R-P5
    let world = World::new().await;
    let steps = [
        run("echo a > a"),
        run("echo why; exit 3"),
        run("echo c > c"),
    ];
    let (failed, _) = world.build(&steps).await;
    let Err(BuildError::Step { number, source }) = failed else {
        panic!("{failed:?}");
    };
    assert_eq!(number, 2);
    let StepError::Status { status, last } = &source else {
        panic!("{source:?}");
    };
    assert_eq!((*status, last.as_str()), (3, "why"));
    assert_eq!(world.pretend.left(), (0, 0));
    assert!(
        fs::read_dir(world.path("shelf/templates"))
            .unwrap()
            .next()
            .is_none()
    );
    let (built, events) = world.build(&[run("echo a > a"), run("true")]).await;
    built.unwrap();
    assert_eq!(done(&events), [2]);
}

#[tokio::test]
async fn layers_of_steps_outlive_a_collection_and_go_with_their_build() {
    // R-P5
    let world = World::new().await;
    world
        .build(&[run("echo a > a"), run("false")])
        .await
        .0
        .unwrap_err();
    let (clock, entropy) = (Arc::new(SystemClock), Arc::new(SystemEntropy));
    let shelf = world.path("shelf");
    let builder = Builder::open(&shelf, clock, entropy, &Silent).await;
    builder.unwrap().prune().unwrap();
    // A failed build's steps are kept for a while; its base is made again.
    let (built, events) = world.build(&[run("echo a > a"), run("true")]).await;
    built.unwrap();
    assert_eq!(done(&events), [2]);
    assert!(nobody_else_can_reach(&world.path("shelf/layers")));
    assert!(nobody_else_can_reach(&world.path("shelf/tmp")));
}

/// Tenants' files keep their set-user-ID bits.
fn nobody_else_can_reach(path: &Path) -> bool {
    fs::metadata(path).unwrap().mode() & 0o077 == 0
}
