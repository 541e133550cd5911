//! The loop of a run, answer by answer (R-G3).

use super::*;

const BEAT: u64 = 30_000;

fn of(keep: Keep) -> RunOf {
    RunOf {
        slot: "slot".parse().unwrap(),
        sandbox: "sandboxsandboxsandbo".parse().unwrap(),
        generation: Generation(7),
        run: "run".parse().unwrap(),
        replica: "replica".parse().unwrap(),
        timeout: Duration::from_secs(600),
        keep,
    }
}

/// A loop with its clock, and what it told.
struct Driven {
    task: RunLoop,
    now_ms: u64,
    told: Vec<RunEvent>,
    verbs: Vec<Verb>,
    killed: u32,
}

/// How the world answers.
struct World {
    artifacts: fn(u64) -> Result<Reply, CallError>,
    exit: fn(u64) -> Result<Reply, CallError>,
    kill: Result<Reply, CallError>,
    beat: fn(u64) -> Result<Answer, StoreError>,
    write: Result<Reply, CallError>,
}

const GOES_ON: Answer = Answer::RunGoesOn { cancelled: false };
const NOTHING_NEW: Reply = Reply::Artifacts {
    count: 0,
    cursor: 0,
};

impl Default for World {
    fn default() -> Self {
        Self {
            artifacts: |_| Ok(NOTHING_NEW),
            exit: |now_ms| Ok(Reply::Exit((now_ms > 5_000).then_some(3))),
            kill: Ok(Reply::Done),
            beat: |_| Ok(GOES_ON),
            write: Ok(Reply::Done),
        }
    }
}

impl Driven {
    fn new(task: RunLoop) -> Self {
        Self {
            task,
            now_ms: 1,
            told: Vec::new(),
            verbs: Vec::new(),
            killed: 0,
        }
    }

    /// To its end in `world`; how it ended, and what is to be removed.
    fn through(&mut self, world: &World) -> (WayOut, Option<SlotId>) {
        let mut input = Input::Go;
        for _ in 0..10_000 {
            let now = Timestamp::from_unix_ms(self.now_ms);
            input = match self.task.step(input, now) {
                Effect::Store(verb) => {
                    let answer = match &verb {
                        Verb::EndRun { slot, keep, .. } => Ok(match keep {
                            Keep::Sandbox => Answer::Done,
                            Keep::Nothing => Answer::Released {
                                slot: Some(slot.clone()),
                            },
                        }),
                        Verb::RunHeartbeat { .. } => (world.beat)(self.now_ms),
                        _ => Ok(GOES_ON),
                    };
                    self.verbs.push(verb);
                    Input::Store(answer)
                }
                Effect::Platform(call) => Input::Platform(match call {
                    Call::ReadArtifacts(..) => (world.artifacts)(self.now_ms),
                    Call::ReadExit(..) => (world.exit)(self.now_ms),
                    Call::KillProcesses(..) => {
                        self.killed += 1;
                        world.kill.clone()
                    }
                    Call::WriteFiles(..) => world.write.clone(),
                    _ => Ok(Reply::Done),
                }),
                Effect::Sleep(time) => {
                    self.now_ms += u64::try_from(time.as_millis()).unwrap();
                    Input::Go
                }
                Effect::Emit(event) => {
                    self.told.push(event);
                    Input::Go
                }
                Effect::Done(Outcome::RunEnded { way_out, remove }) => return (way_out, remove),
                Effect::Done(other) => panic!("{other:?}"),
            };
        }
        panic!("it does not end");
    }

    fn ended_with(&self) -> Keep {
        match self.verbs.last() {
            Some(Verb::EndRun { keep, .. }) => *keep,
            other => panic!("{other:?}"),
        }
    }
}

fn fresh(keep: Keep) -> Driven {
    Driven::new(RunLoop::new(of(keep), Rules::default()))
}

#[test]
fn a_run_tells_what_happens_and_is_cleaned_up() {
    // R-G3: started, progress for what is new, completed; the clean-up comes before the end.
    let mut run = fresh(Keep::Nothing);
    let world = World {
        artifacts: |now_ms| {
            Ok(Reply::Artifacts {
                count: u32::from(now_ms == 2_001),
                cursor: 0,
            })
        },
        ..World::default()
    };
    let (way_out, remove) = run.through(&world);
    assert_eq!(way_out, WayOut::Exited(3));
    assert_eq!(
        run.told,
        [
            RunEvent::Started,
            RunEvent::Progress { artifacts: 1 },
            RunEvent::Completed { exit_code: 3 }
        ]
    );
    assert_eq!((run.killed, run.ended_with()), (1, Keep::Nothing));
    assert!(remove.is_some(), "the slot is given back");
}

#[test]
fn what_was_written_last_is_read_until_nothing_is_new() {
    let mut run = fresh(Keep::Nothing);
    // After the exit at 5 s there are two more batches; each look takes a while.
    let world = World {
        exit: |_| Ok(Reply::Exit(Some(0))),
        artifacts: |_| Ok(NOTHING_NEW),
        ..World::default()
    };
    run.through(&world);
    assert_eq!(run.told.len(), 2);

    let mut task = RunLoop::new(of(Keep::Nothing), Rules::default());
    task.state = State::ToldProgress;
    task.exit = Some(0);
    task.confirmed_at = Timestamp::from_unix_ms(1);
    let next = task.step(Input::Go, Timestamp::from_unix_ms(2));
    assert!(matches!(next, Effect::Platform(Call::ReadArtifacts(..))));
}

#[test]
fn it_says_every_30_s_that_it_is_alive() {
    let mut run = fresh(Keep::Nothing);
    let world = World {
        exit: |now_ms| Ok(Reply::Exit((now_ms > 5 * BEAT).then_some(0))),
        ..World::default()
    };
    run.through(&world);
    let beats = (run.verbs.iter())
        .filter(|verb| matches!(verb, Verb::RunHeartbeat { .. }))
        .count();
    assert!((4..=5).contains(&beats), "{beats}");
}

#[test]
fn a_cancel_or_the_deadline_ends_it() {
    let mut run = fresh(Keep::Sandbox);
    let world = World {
        beat: |_| Ok(Answer::RunGoesOn { cancelled: true }),
        exit: |_| Ok(Reply::Exit(None)),
        ..World::default()
    };
    assert_eq!(run.through(&world), (WayOut::Cancelled, None));
    assert_eq!((run.killed, run.ended_with()), (1, Keep::Sandbox));

    let mut run = fresh(Keep::Nothing);
    let world = World {
        exit: |_| Ok(Reply::Exit(None)),
        ..World::default()
    };
    assert_eq!(run.through(&world).0, WayOut::DeadlineExceeded);
    assert!((600_000..602_000).contains(&run.now_ms), "{}", run.now_ms);
}

#[test]
fn a_sandbox_that_does_not_answer_is_given_up() {
    // R-G9: and it is not kept, because nobody knows what goes on in it.
    let mut run = fresh(Keep::Sandbox);
    let world = World {
        artifacts: |_| Err(CallError::NoAnswer),
        exit: |_| Err(CallError::NoAnswer),
        kill: Err(CallError::NoAnswer),
        ..World::default()
    };
    let (way_out, remove) = run.through(&world);
    assert_eq!(way_out, WayOut::Unresponsive);
    assert_eq!(run.killed, Rules::default().settings().probe_tries);
    assert!(remove.is_some());
    assert!((60_000..70_000).contains(&run.now_ms), "{}", run.now_ms);
}

#[test]
fn a_sandbox_that_answers_now_and_then_is_not_given_up() {
    let mut run = fresh(Keep::Nothing);
    let world = World {
        artifacts: |now_ms| match now_ms / 1_000 % 50 {
            0 => Ok(NOTHING_NEW),
            _ => Err(CallError::NoAnswer),
        },
        exit: |now_ms| match now_ms {
            300_000.. => Ok(Reply::Exit(Some(0))),
            _ => Err(CallError::NoAnswer),
        },
        ..World::default()
    };
    assert_eq!(run.through(&world).0, WayOut::Exited(0));
}

#[test]
fn what_is_gone_needs_no_clean_up() {
    let mut run = fresh(Keep::Nothing);
    let world = World {
        artifacts: |_| Err(CallError::NotFound),
        ..World::default()
    };
    assert_eq!(run.through(&world).0, WayOut::SandboxGone);
    assert_eq!(run.killed, 0);
}

#[test]
fn a_run_whose_lease_passed_to_another_stops() {
    for (answer, way_out) in [
        (Answer::Stale { current: None }, WayOut::LeaseLost),
        (Answer::Busy, WayOut::LeaseLost),
    ] {
        let lost = matches!(answer, Answer::Busy);
        let world = World {
            exit: |_| Ok(Reply::Exit(None)),
            beat: if lost {
                |_| Ok(Answer::Busy)
            } else {
                |_| Ok(Answer::Stale { current: None })
            },
            ..World::default()
        };
        assert_eq!(fresh(Keep::Sandbox).through(&world).0, way_out);
    }
    let world = World {
        exit: |_| Ok(Reply::Exit(None)),
        beat: |_| Err(StoreError::NoAnswer),
        ..World::default()
    };
    assert_eq!(fresh(Keep::Sandbox).through(&world).0, WayOut::Unconfirmed);
}

#[test]
fn files_that_cannot_be_written_start_nothing() {
    let mut run = fresh(Keep::Nothing);
    let world = World {
        write: Err(CallError::Refused),
        ..World::default()
    };
    let (way_out, remove) = run.through(&world);
    assert_eq!((way_out, remove.is_some()), (WayOut::NotStarted, true));
    assert_eq!(run.told, [RunEvent::Error(WayOut::NotStarted)]);
}

#[test]
fn what_is_taken_over_goes_on_or_is_ended() {
    let of_mine = || of(Keep::Nothing);
    let mut run = Driven::new(RunLoop::taken_over(of_mine(), Rules::default()));
    assert_eq!(run.through(&World::default()).0, WayOut::Exited(3));
    assert_eq!(run.told, [RunEvent::Completed { exit_code: 3 }]);

    let mut run = Driven::new(RunLoop::abandoned(of_mine(), Rules::default()));
    assert_eq!(run.through(&World::default()).0, WayOut::ReplicaLost);
    assert_eq!(run.killed, 1, "it may have been launched");
}

#[test]
fn nothing_is_started_whose_end_was_asked_for() {
    // R-G3
    let mut driven = fresh(Keep::Nothing);
    driven.task.cancel();
    let (way_out, _) = driven.through(&World::default());
    assert_eq!(way_out, WayOut::Cancelled);
    assert_eq!(driven.told, [RunEvent::Error(WayOut::Cancelled)]);
}
