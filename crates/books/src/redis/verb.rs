//! Verbs as the server's functions take them, and answers as they give them.

use sandhold_governor::{
    books::{Answer, Claim, Grant, Keep, Limit, RemovalRefused, Step, Verb},
    colour::{Colour, Seen},
    rules::Rules,
};

use crate::{
    Timed,
    text::{
        EVIDENCE, GROUNDS, Parts, Unreadable, flag, ms, of_word, read_audits, word_of,
        write_retention, write_run_defaults,
    },
};

const SEEN: [(Seen, &str); 3] = [
    (Seen::Running, "running"),
    (Seen::Paused, "paused"),
    (Seen::Unknown, "unknown"),
];

const REFUSALS: [(RemovalRefused, &str); 8] = [
    (RemovalRefused::Held(Colour::Black), "black"),
    (RemovalRefused::Held(Colour::Grey), "grey"),
    (RemovalRefused::Held(Colour::White), "white"),
    (RemovalRefused::GenerationChanged, "generation-changed"),
    (RemovalRefused::NoGround, "no-ground"),
    (RemovalRefused::Locked, "locked"),
    (RemovalRefused::Condemned, "condemned"),
    (RemovalRefused::Recovering, "recovering"),
];

/// The name of a verb's function and its arguments, in their order.
pub(super) fn step_of(verb: &Verb, rules: &Rules) -> (&'static str, Vec<String>) {
    macro_rules! args {
        ($name:expr $(, $arg:expr)*) => { ($name, vec![$($arg.to_string()),*]) };
    }
    match verb {
        Verb::SetBucket { bucket, policy } => {
            args!(
                "set_bucket",
                bucket,
                policy.quota,
                write_retention(policy.retention),
                write_run_defaults(&policy.runs)
            )
        }
        Verb::Acquire {
            slot,
            bucket,
            owner,
            claim,
            maker,
        } => match claim {
            Claim::Direct => args!("acquire", slot, bucket, owner, maker, "", "", ""),
            Claim::Lease {
                lease,
                template,
                ttl,
            } => {
                let ttl_ms = ms(ttl.unwrap_or_default().max(rules.black()));
                args!(
                    "acquire", slot, bucket, owner, maker, lease, template, ttl_ms
                )
            }
        },
        Verb::LeaveQueue { slot } => args!("leave_queue", slot),
        Verb::ReturnSlot { slot, maker } => args!("return_slot", slot, maker),
        Verb::Bind {
            slot,
            generation,
            sandbox,
            ends_at,
        } => args!("bind", slot, generation, sandbox, ends_at.unix_ms()),
        Verb::Heartbeat {
            bucket,
            owner,
            lease,
            generation,
            ends_at,
        } => {
            let ends_at = ends_at.map_or_else(String::new, |at| at.unix_ms().to_string());
            args!("heartbeat", bucket, owner, lease, generation, ends_at)
        }
        Verb::Release {
            bucket,
            owner,
            lease,
        } => args!("release", bucket, owner, lease),
        Verb::Discard { slot, generation } => args!("discard", slot, generation),
        Verb::BeginRun {
            slot,
            generation,
            run,
            replica,
        } => args!("run", "begin", slot, run, replica, generation),
        Verb::RunHeartbeat {
            slot,
            generation,
            run,
            replica,
        } => args!("run", "beat", slot, run, replica, generation),
        Verb::ClaimRun { slot, run, replica } => args!("run", "claim", slot, run, replica),
        Verb::CancelRun { slot, run } => args!("run", "cancel", slot, run),
        Verb::EndRun {
            slot,
            run,
            replica,
            keep,
        } => {
            let keep = match keep {
                Keep::Sandbox => "sandbox",
                Keep::Nothing => "nothing",
            };
            args!("run", "end", slot, run, replica, keep)
        }
        Verb::Lock { slot, by } => args!("run", "lock", slot, "", by),
        Verb::Unlock { slot, by } => args!("run", "unlock", slot, "", by),
        Verb::BeginRemoval {
            slot,
            generation,
            by,
            ground,
            seen,
        } => {
            let (ground, seen) = (word_of(&GROUNDS, *ground), word_of(&SEEN, *seen));
            args!("begin_removal", slot, generation, by, ground, seen)
        }
        Verb::BeginWake { slot } => args!("begin_wake", slot),
        Verb::ConfirmGone {
            slot,
            sandbox,
            evidence,
        } => args!("confirm_gone", slot, sandbox, word_of(&EVIDENCE, *evidence)),
        Verb::RemovalFailed { slot, by, awake } => {
            args!("removal_failed", slot, by, flag(*awake))
        }
        Verb::ExpireMaking { slot } => args!("expire_making", slot),
        Verb::AdoptStray {
            slot,
            sandbox,
            bucket,
            owner,
            ends_at,
        } => args!(
            "adopt_stray",
            slot,
            sandbox,
            bucket,
            owner,
            ends_at.unix_ms()
        ),
        Verb::NoteSeen { slot, seen } => args!("note_seen", slot, word_of(&SEEN, *seen)),
        Verb::FinishRecovery {
            highest,
            settled_from,
        } => args!("finish_recovery", highest, settled_from.unix_ms()),
        // Read is a transaction, not a function. The only other verb exists in simulations, which keep
        // their books in memory; to read instead changes nothing.
        _ => args!("leave_queue", ""),
    }
}

/// What a step says: when, the answer, and the audit entries, one on each line.
pub(super) fn read_reply(text: &str) -> Result<Timed, Unreadable> {
    let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
    let mut parts = Parts::of(first, "answer");
    let at = parts.time()?;
    let answer = read_answer(&mut parts)?;
    let audit = read_audits(rest)?;
    Ok(Timed {
        step: Step { answer, audit },
        at,
    })
}

fn read_answer(p: &mut Parts<'_>) -> Result<Answer, Unreadable> {
    let unreadable = Unreadable("answer");
    Ok(match p.text()? {
        "done" => Answer::Done,
        "granted" => Answer::Granted(Grant {
            slot: p.value()?,
            sandbox: p.value()?,
            generation: p.generation()?,
            expires_at: p.time()?,
            ends_at: p.time()?,
        }),
        "make" => Answer::MakeSandbox {
            slot: p.value()?,
            generation: p.generation()?,
        },
        "waiting" => Answer::Waiting { ahead: p.value()? },
        "being-made" => Answer::BeingMade,
        "capacity" => Answer::CapacityExceeded(match p.text()? {
            "bucket" => Limit::Bucket,
            _ => Limit::Global,
        }),
        "unknown-bucket" => Answer::UnknownBucket,
        "recovering" => Answer::Recovering,
        "stale" => Answer::Stale {
            current: p.optional()?.map(sandhold_types::Generation),
        },
        "unknown" => Answer::Unknown,
        "released" => Answer::Released {
            slot: p.optional()?,
        },
        "goes-on" => Answer::RunGoesOn {
            cancelled: p.text()? == "1",
        },
        "busy" => Answer::Busy,
        "remove" => Answer::Remove {
            generation: p.generation()?,
        },
        "refused" => Answer::Refused(of_word(&REFUSALS, p.text()?).ok_or(unreadable)?),
        "wake" => Answer::Wake,
        "no-wake-budget" => Answer::NoWakeBudget,
        _ => return Err(unreadable),
    })
}
