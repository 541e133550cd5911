//! Rounds, told as the requirements tell them.

use super::*;
use crate::{
    books::{Answer, Books, BucketPolicy, Claim, Verb},
    ids::ReplicaId,
};

fn at(s: u64) -> Timestamp {
    Timestamp::from_unix_ms(1_000_000_000 + s * 1_000)
}

fn bucket() -> Bucket {
    Bucket {
        namespace: "a".parse().unwrap(),
        env: "prod".parse().unwrap(),
    }
}

fn slot() -> SlotId {
    "s1".parse().unwrap()
}

fn replica() -> ReplicaId {
    "r1".parse().unwrap()
}

fn sandbox() -> SandboxId {
    "sandboxsandboxsandbo".parse().unwrap()
}

/// Books with one bucket and one slot that was taken in it for a lease.
fn taken() -> (Books, Generation) {
    let mut books = Books::new(Rules::default(), None);
    let policy = BucketPolicy::new(1, Retention::After(Duration::from_secs(3_600)));
    let bucket = bucket();
    books.step(Verb::SetBucket { bucket, policy }, at(0));
    let taken = Verb::Acquire {
        slot: slot(),
        bucket: self::bucket(),
        owner: "o1".parse().unwrap(),
        claim: Claim::Lease {
            lease: "l1".parse().unwrap(),
            template: "main".parse().unwrap(),
            ttl: None,
        },
        maker: replica(),
    };
    match books.step(taken, at(0)).answer {
        Answer::MakeSandbox { generation, .. } => (books, generation),
        other => panic!("{other:?}"),
    }
}

/// What a round at this moment would do.
fn work_at(books: &mut Books, listing: Vec<Listed>, s: u64) -> Vec<Work> {
    let Answer::Books(view) = books.step(Verb::Read, at(s)).answer else {
        panic!("no view");
    };
    let evidence = Evidence {
        began_at: at(s),
        listing: Some(listing),
        view: *view,
    };
    Reclaimer::new(Rules::default()).plan(&evidence).work
}

#[test]
fn a_slot_condemned_while_its_maker_died_is_settled() {
    // R-G5: no slot is lost, whoever dies.
    let (mut books, _) = taken();
    let release = Verb::Release {
        bucket: bucket(),
        owner: "o1".parse().unwrap(),
        lease: "l1".parse().unwrap(),
    };
    let released = books.step(release, at(10)).answer;
    assert_eq!(released, Answer::Released { slot: Some(slot()) });
    assert_eq!(
        work_at(&mut books, Vec::new(), 179),
        [],
        "its maker may still bind it"
    );
    assert_eq!(
        work_at(&mut books, Vec::new(), 180),
        [Work::SettleMaking { slot: slot() }]
    );
    let settled = books.step(Verb::ExpireMaking { slot: slot() }, at(180));
    assert_eq!(settled.answer, Answer::Done);
    assert_eq!(books.used(&bucket()), 0);
}

#[test]
fn a_pause_is_noted_again_once_its_holder_is_heard_no_more() {
    // R-G13: only a pause that was seen after its holder was last heard counts.
    let (mut books, generation) = taken();
    let bind = Verb::Bind {
        slot: slot(),
        generation,
        sandbox: sandbox(),
        ends_at: Timestamp::FAR_FUTURE,
    };
    books.step(bind, at(1));
    let seen = Seen::Paused;
    let note = Work::Note { slot: slot(), seen };
    let listed = || {
        vec![Listed {
            sandbox: sandbox(),
            slot: slot(),
            bucket: bucket(),
            owner: "o1".parse().unwrap(),
            seen,
            ends_at: Timestamp::FAR_FUTURE,
            generation,
        }]
    };
    let noted = [note];
    assert_eq!(work_at(&mut books, listed(), 60), noted);
    books.step(Verb::NoteSeen { slot: slot(), seen }, at(60));
    let beat = Verb::Heartbeat {
        bucket: bucket(),
        owner: "o1".parse().unwrap(),
        lease: "l1".parse().unwrap(),
        generation,
        ends_at: None,
    };
    books.step(beat, at(90));
    assert_eq!(
        work_at(&mut books, listed(), 120),
        [],
        "held: nothing to write down with every look"
    );
    assert_eq!(work_at(&mut books, listed(), 240), noted);
    books.step(Verb::NoteSeen { slot: slot(), seen }, at(240));
    assert_eq!(work_at(&mut books, listed(), 300), []);
}
