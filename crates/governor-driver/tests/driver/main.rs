//! The driver, over books in a file and a platform that is played here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod front;
mod guest;
mod http;
mod kills;
mod played;
mod runs;
mod tls;

use std::time::Duration;

use sandhold_governor::{
    books::Answer,
    reclaimer::{Confirmed, Work},
    tasks::{Outcome, Reused},
};
use sandhold_governor_driver::{Admitted, DirectSandbox};
use sandhold_types::{Clock as _, SandboxId, Timestamp};

use crate::played::{Create, bucket, world};

#[tokio::test]
async fn one_owner_one_sandbox_and_a_fence_that_grows() {
    // R-G6, R-G7
    let world = world(3).await;
    let reclaimer = world.governor.start();
    let Outcome::Leased {
        grant: first,
        reused,
    } = world.take("o", "l1").await
    else {
        panic!("no lease");
    };
    assert_eq!(reused, Reused::No);
    let Outcome::Leased {
        grant: again,
        reused,
    } = world.take("o", "l1").await
    else {
        panic!("no renewal");
    };
    assert_eq!((reused, again.generation), (Reused::Yes, first.generation));
    let Outcome::Leased { grant: second, .. } = world.take("o", "l2").await else {
        panic!("no takeover");
    };
    assert_eq!(second.sandbox, first.sandbox);
    assert!(second.generation > first.generation);

    let release = |lease: &str| {
        let (owner, lease) = ("o".parse().unwrap(), lease.parse().unwrap());
        world.governor.release(bucket(), owner, lease)
    };
    let late = release("l1").await.unwrap();
    let current = Some(second.generation);
    assert_eq!(late, Answer::Stale { current }, "R-I5: the new one lives");
    assert_eq!(world.platform.state().sandboxes.len(), 1);
    assert!(matches!(
        release("l2").await.unwrap(),
        Answer::Released { .. }
    ));
    world.until_records(0).await;
    assert!(
        world.platform.state().sandboxes.is_empty(),
        "freed means gone"
    );
    reclaimer.abort();
}

#[tokio::test]
async fn a_create_that_failed_gives_its_slot_back_and_one_in_doubt_is_found() {
    // R-G5
    let world = world(1).await;
    world.platform.state().creates.push_back(Create::Refused);
    assert!(matches!(
        world.take("o", "l").await,
        Outcome::Unavailable(_)
    ));
    assert_eq!(world.records().await, 0);
    world
        .platform
        .state()
        .creates
        .push_back(Create::MadeWithoutAnswer);
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("it was made and not found");
    };
    assert!(
        world
            .platform
            .state()
            .sandboxes
            .contains_key(&grant.sandbox)
    );
}

#[tokio::test]
async fn what_is_not_fit_for_use_is_replaced() {
    // R-G9: three rounds of three tries.
    let world = world(5).await;
    let reclaimer = world.governor.start();
    world.platform.state().probes_fail = 9;
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("no lease");
    };
    assert_eq!(world.platform.state().made, 2);
    world.until_records(1).await;
    let living: Vec<_> = world.platform.state().sandboxes.keys().cloned().collect();
    assert_eq!(living, [grant.sandbox]);
    reclaimer.abort();
}

#[tokio::test]
async fn a_forgotten_sandbox_goes_in_two_rounds_and_not_in_one() {
    // R-G10
    let world = world(3).await;
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("no lease");
    };
    let removes = |work: &[Work]| work.iter().any(|w| matches!(w, Work::Remove { .. }));
    world.clock.advance(world.governor.rules().grey());
    assert!(
        !removes(&world.round().await.work),
        "one look proves nothing"
    );
    let hasty = world.governor.cycle().await.unwrap();
    assert!(
        !removes(&hasty.work),
        "a second look right after the first proves nothing new"
    );
    let dry = world.governor.dry_run().await.unwrap();
    assert_eq!(dry.confirmed, Confirmed::Yes);
    assert_eq!(world.records().await, 1, "a dry run does nothing");
    assert!(removes(&world.round().await.work));
    world.until_records(0).await;
    assert!(world.platform.state().sandboxes.is_empty());
    let (of, told) = world
        .governor
        .explain(&grant.sandbox)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(of, bucket());
    assert_eq!(told.colour.as_str(), "gone");
    let actions = told.last_actions.join("\n");
    assert!(actions.contains("condemned"), "R-G17: {actions}");
    assert!(
        actions.contains("its platform deleted it"),
        "R-G17: {actions}"
    );
}

#[tokio::test]
async fn a_holder_that_is_heard_is_left_alone() {
    // R-G10
    let world = world(3).await;
    let Outcome::Leased { grant, .. } = world.take("o", "l").await else {
        panic!("no lease");
    };
    for _ in 0..6 {
        let (owner, lease) = ("o".parse().unwrap(), "l".parse().unwrap());
        let beat = world
            .governor
            .heartbeat(bucket(), owner, lease, grant.generation)
            .await;
        assert!(matches!(beat.unwrap(), Answer::Granted(_)));
        assert_eq!(world.round().await.work, []);
    }
}

#[tokio::test]
async fn removals_run_side_by_side_within_their_budget() {
    // R-G14
    let world = world(100).await;
    for n in 0..40 {
        assert!(matches!(
            world.take(&format!("o{n}"), "l").await,
            Outcome::Leased { .. }
        ));
    }
    world.clock.advance(world.governor.rules().grey());
    world.round().await;
    world.round().await;
    // The blast radius holds the other half back for a round.
    world.until_records(20).await;
    world.round().await;
    world.until_records(10).await;
    let at_once = world.platform.state().kills_at_once;
    let most = world.governor.rules().settings().deletes_max as usize;
    assert!((2..=most).contains(&at_once), "{at_once} at once");
}

#[tokio::test]
async fn sandboxes_of_sdks_are_in_the_same_books() {
    // R-G19
    let world = world(1).await;
    let (short, second) = (Duration::from_millis(50), Duration::from_secs(5));
    let admitted = world.governor.admit_direct(&bucket(), short).await.unwrap();
    let Admitted::Slot { slot, generation } = admitted else {
        panic!("{admitted:?}");
    };
    let sandbox: SandboxId = "abcdefghij0123456789".parse().unwrap();
    let ends_at = world.clock.now().plus(Duration::from_secs(60));
    let direct = DirectSandbox {
        sandbox: sandbox.clone(),
        bucket: bucket(),
        ends_at,
    };
    world.platform.state().direct.push(direct);
    let bound = world
        .governor
        .bind_direct(slot, generation, sandbox.clone(), ends_at)
        .await;
    assert_eq!(bound.unwrap(), Answer::Done);
    let record = world.governor.view().await.unwrap().records.remove(0);
    assert_eq!(
        record.owner.as_str(),
        format!("writer:prod:direct:{sandbox}")
    );
    let full = world.governor.admit_direct(&bucket(), short).await.unwrap();
    assert!(
        matches!(full, Admitted::Refused(Answer::Waiting { .. })),
        "{full:?}"
    );

    // Its owner extends it; the fallback must not end it by what it was once.
    let later = world.clock.now().plus(Duration::from_secs(7_200));
    world.platform.state().direct[0].ends_at = later;
    world.round().await;
    world.clock.advance(Duration::from_secs(3_600));
    let work = world.round().await.work;
    let removes = work.iter().any(|w| matches!(w, Work::Remove { .. }));
    assert!(
        !removes,
        "it is asked for by name, and left alone: {work:?}"
    );
    assert_eq!(
        world.governor.view().await.unwrap().records[0].ends_at,
        later
    );

    // It ends by itself while somebody waits.
    let waiting = {
        let governor = world.governor.clone();
        tokio::spawn(async move { governor.admit_direct(&bucket(), second).await })
    };
    world.platform.state().direct.clear();
    let admitted = waiting.await.unwrap().unwrap();
    assert!(matches!(admitted, Admitted::Slot { .. }), "{admitted:?}");
}

#[tokio::test]
async fn a_direct_sandbox_that_the_books_do_not_know_is_counted() {
    // R-G19
    let world = world(5).await;
    world.platform.state().direct.push(DirectSandbox {
        sandbox: "abcdefghij0123456789".parse().unwrap(),
        bucket: bucket(),
        ends_at: Timestamp::FAR_FUTURE,
    });
    world.round().await;
    assert_eq!(world.records().await, 0, "it may be about to be bound");
    world.round().await;
    assert_eq!(world.records().await, 1);
    world.round().await;
    assert_eq!(world.records().await, 1, "once");
}
