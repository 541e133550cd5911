//! One suite for every implementation of the store.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::Future, sync::Arc};

use proptest::prelude::*;
use sandhold_store::*;
use sandhold_types::{Generation, KeyId, SandboxId, SeededEntropy, Timestamp, Token};

/// Small enough to be reached.
const LIMITS: StoreLimits = StoreLimits {
    keys_per_bucket_max: 8,
    idempotency_records_per_bucket_max: 20,
};

/// A store under test and what must live as long as it.
struct Subject {
    store: Arc<dyn Store>,
    _dir: tempfile::TempDir,
}

fn memory() -> Subject {
    let store = Arc::new(MemoryStore::with_limits(LIMITS));
    let _dir = tempfile::tempdir().unwrap();
    Subject { store, _dir }
}

fn sqlite() -> Subject {
    let _dir = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open_with(&_dir.path().join("state.db"), LIMITS).unwrap());
    Subject { store, _dir }
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(work)
}

macro_rules! conformance {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        mod in_memory { $(#[test] fn $name() { super::block_on(super::$name(&*super::memory().store)); })* }
        mod in_sqlite { $(#[test] fn $name() { super::block_on(super::$name(&*super::sqlite().store)); })* }
    };
}

conformance! {
    keys_are_found_by_digest_only;
    a_key_is_added_once;
    a_bucket_lists_only_its_own_keys;
    a_revoked_key_stays_revoked;
    the_last_admin_key_cannot_be_revoked;
    use_is_noted_and_never_goes_back;
    the_first_key_is_made_once;
    an_idempotency_key_belongs_to_one_request;
    a_dead_holder_loses_its_claim_and_can_do_no_harm;
    an_expired_record_is_as_good_as_gone;
    buckets_do_not_share_idempotency_keys;
    idempotency_records_are_bounded;
    keys_are_bounded;
    a_secret_is_the_same_for_everybody;
}

fn at(ms: u64) -> Timestamp {
    Timestamp::from_unix_ms(ms)
}

fn bucket(namespace: &str) -> Bucket {
    Bucket {
        namespace: namespace.parse().unwrap(),
        env: "dev".parse().unwrap(),
    }
}

fn key(seed: u64, namespace: &str, role: Role) -> NewKey {
    let entropy = SeededEntropy::new(seed);
    let token = Token::generate_api_key(&entropy);
    NewKey {
        id: KeyId::generate(&entropy),
        digest: KeyDigest::of(&token),
        bucket: bucket(namespace),
        role,
        name: format!("key {seed}"),
        hint: NewKey::hint_of(&token),
        created_at: at(1_000 + seed),
    }
}

fn sandbox(seed: u64) -> SandboxId {
    SandboxId::generate(&SeededEntropy::new(seed))
}

fn scope(namespace: &str, key: &str) -> IdempotencyScope {
    IdempotencyScope {
        bucket: bucket(namespace),
        key: key.to_owned(),
    }
}

fn claim(content: u8, now: u64) -> ClaimRequest {
    ClaimRequest {
        fingerprint: Fingerprint([content; 32]),
        request: format!("request-{now}").parse().unwrap(),
        now: at(now),
        claimed_until: at(now + 60),
        expires_at: at(now + 1_000),
    }
}

async fn created(store: &dyn Store, key: NewKey) -> KeyRecord {
    match store.create_key(key).await.unwrap() {
        CreateKeyOutcome::Created(record) => record,
        other => panic!("{other:?}"),
    }
}

async fn claimed(store: &dyn Store, scope: &IdempotencyScope, request: ClaimRequest) -> Claim {
    match store.claim_idempotency(scope, request).await.unwrap() {
        ClaimOutcome::Claimed(claim) => claim,
        other => panic!("{other:?}"),
    }
}

async fn keys_are_found_by_digest_only(store: &dyn Store) {
    // R-P8
    let new = key(1, "a", Role::Member);
    let record = created(store, new.clone()).await;
    assert_eq!(
        store.find_key(&new.digest).await.unwrap(),
        Some(record.clone())
    );
    assert_eq!(record.bucket, bucket("a"));
    assert_eq!((record.last_used_at, record.revoked_at), (None, None));
    let other = KeyDigest::of(&Token::new(String::from("another")));
    assert_eq!(store.find_key(&other).await.unwrap(), None);
}

async fn a_key_is_added_once(store: &dyn Store) {
    let new = key(1, "a", Role::Member);
    created(store, new.clone()).await;
    let same_id = NewKey {
        digest: key(2, "a", Role::Member).digest,
        ..new.clone()
    };
    let same_digest = NewKey {
        id: key(2, "a", Role::Member).id,
        ..new
    };
    for twin in [same_id, same_digest] {
        assert_eq!(
            store.create_key(twin).await.unwrap(),
            CreateKeyOutcome::Exists
        );
    }
    assert_eq!(store.list_keys(&KeyScope::All).await.unwrap().len(), 1);
}

async fn a_bucket_lists_only_its_own_keys(store: &dyn Store) {
    // R-P8
    for (seed, namespace) in [(3, "b"), (1, "a"), (2, "a")] {
        created(store, key(seed, namespace, Role::Member)).await;
    }
    let own = store
        .list_keys(&KeyScope::Bucket(bucket("a")))
        .await
        .unwrap();
    let names: Vec<_> = own.iter().map(|key| key.name.as_str()).collect();
    assert_eq!(names, ["key 1", "key 2"], "oldest first");
    assert_eq!(store.list_keys(&KeyScope::All).await.unwrap().len(), 3);
    let tenants = store.list_tenants().await.unwrap();
    let buckets: Vec<_> = tenants.iter().map(|t| t.bucket.to_string()).collect();
    assert_eq!(buckets, ["a:dev", "b:dev"]);
}

async fn a_revoked_key_stays_revoked(store: &dyn Store) {
    let new = key(1, "a", Role::Member);
    created(store, new.clone()).await;
    let revoke = |scope: KeyScope, ms| {
        let id = new.id.clone();
        async move { store.revoke_key(&scope, &id, at(ms)).await.unwrap() }
    };
    let elsewhere = KeyScope::Bucket(bucket("b"));
    assert_eq!(revoke(elsewhere, 5).await, RevokeOutcome::Unknown);
    assert_eq!(
        revoke(KeyScope::Bucket(bucket("a")), 7).await,
        RevokeOutcome::Revoked
    );
    assert_eq!(
        revoke(KeyScope::All, 9).await,
        RevokeOutcome::AlreadyRevoked
    );
    let kept = store.find_key(&new.digest).await.unwrap().unwrap();
    assert_eq!(kept.revoked_at, Some(at(7)));
}

async fn the_last_admin_key_cannot_be_revoked(store: &dyn Store) {
    let (first, second) = (key(1, "a", Role::Admin), key(2, "b", Role::Admin));
    created(store, first.clone()).await;
    created(store, key(3, "a", Role::Member)).await;
    let revoke =
        |id: KeyId| async move { store.revoke_key(&KeyScope::All, &id, at(5)).await.unwrap() };
    assert_eq!(revoke(first.id.clone()).await, RevokeOutcome::LastAdmin);
    created(store, second.clone()).await;
    assert_eq!(revoke(first.id).await, RevokeOutcome::Revoked);
    assert_eq!(revoke(second.id).await, RevokeOutcome::LastAdmin);
}

async fn use_is_noted_and_never_goes_back(store: &dyn Store) {
    let new = key(1, "a", Role::Member);
    created(store, new.clone()).await;
    for ms in [50, 40] {
        store.note_key_used(&new.id, at(ms)).await.unwrap();
        let noted = store.find_key(&new.digest).await.unwrap().unwrap();
        assert_eq!(noted.last_used_at, Some(at(50)));
    }
}

async fn the_first_key_is_made_once(store: &dyn Store) {
    let first = store
        .create_first_key(key(1, "a", Role::Admin))
        .await
        .unwrap();
    assert!(matches!(first, CreateKeyOutcome::Created(_)));
    let second = store
        .create_first_key(key(2, "a", Role::Admin))
        .await
        .unwrap();
    assert_eq!(second, CreateKeyOutcome::Exists);
}

async fn an_idempotency_key_belongs_to_one_request(store: &dyn Store) {
    let scope = scope("a", "k");
    let own = claimed(store, &scope, claim(1, 0)).await;
    assert_eq!(own.orphan, None);
    let ask = |content, now| store.claim_idempotency(&scope, claim(content, now));
    assert_eq!(ask(1, 1).await.unwrap(), ClaimOutcome::InProgress);
    assert_eq!(ask(2, 1).await.unwrap(), ClaimOutcome::Mismatch);
    let done = store
        .complete_idempotency(&scope, own.generation, &sandbox(1))
        .await
        .unwrap();
    assert_eq!(done, CompleteOutcome::Completed);
    assert_eq!(ask(1, 2).await.unwrap(), ClaimOutcome::Done(sandbox(1)));
    assert_eq!(ask(2, 2).await.unwrap(), ClaimOutcome::Mismatch);
    // Giving back what is complete does nothing.
    store
        .abandon_idempotency(&scope, own.generation)
        .await
        .unwrap();
    assert_eq!(ask(1, 3).await.unwrap(), ClaimOutcome::Done(sandbox(1)));
}

async fn a_dead_holder_loses_its_claim_and_can_do_no_harm(store: &dyn Store) {
    let scope = scope("a", "k");
    let dead = claimed(store, &scope, claim(1, 0)).await;
    let heir = claimed(store, &scope, claim(1, 60)).await;
    assert_eq!(heir.orphan, Some(("request-0".parse().unwrap(), at(0))));
    assert!(heir.generation > dead.generation);
    let late = store
        .complete_idempotency(&scope, dead.generation, &sandbox(1))
        .await
        .unwrap();
    assert_eq!(late, CompleteOutcome::Superseded);
    store
        .abandon_idempotency(&scope, dead.generation)
        .await
        .unwrap();
    let others = store.claim_idempotency(&scope, claim(1, 61)).await.unwrap();
    assert_eq!(others, ClaimOutcome::InProgress, "the heir still has it");
    // Generations never repeat, so not even a fresh record can be hit by an old holder.
    store
        .abandon_idempotency(&scope, heir.generation)
        .await
        .unwrap();
    let next = claimed(store, &scope, claim(1, 62)).await;
    assert!(next.generation > heir.generation);
    assert_eq!(next.orphan, None, "what was given back left nothing behind");
}

async fn an_expired_record_is_as_good_as_gone(store: &dyn Store) {
    let scope = scope("a", "k");
    let own = claimed(store, &scope, claim(1, 0)).await;
    store
        .complete_idempotency(&scope, own.generation, &sandbox(1))
        .await
        .unwrap();
    let before = store
        .claim_idempotency(&scope, claim(1, 999))
        .await
        .unwrap();
    assert_eq!(before, ClaimOutcome::Done(sandbox(1)));
    let after = claimed(store, &scope, claim(2, 1_000)).await;
    assert_eq!(after.orphan, None);
}

async fn buckets_do_not_share_idempotency_keys(store: &dyn Store) {
    // R-P8
    claimed(store, &scope("a", "k"), claim(1, 0)).await;
    claimed(store, &scope("b", "k"), claim(2, 0)).await;
    claimed(store, &scope("a", "other"), claim(2, 0)).await;
}

async fn idempotency_records_are_bounded(store: &dyn Store) {
    for n in 0..LIMITS.idempotency_records_per_bucket_max {
        claimed(store, &scope("a", &n.to_string()), claim(1, 0)).await;
    }
    let over = store
        .claim_idempotency(&scope("a", "one-more"), claim(1, 1))
        .await
        .unwrap();
    assert_eq!(over, ClaimOutcome::Full);
    // A record that is there already is answered, another bucket is not disturbed, and room comes
    // back as records expire.
    let held = store
        .claim_idempotency(&scope("a", "7"), claim(1, 1))
        .await
        .unwrap();
    assert_eq!(held, ClaimOutcome::InProgress);
    claimed(store, &scope("b", "one-more"), claim(1, 1)).await;
    claimed(store, &scope("a", "one-more"), claim(1, 1_000)).await;
}

async fn keys_are_bounded(store: &dyn Store) {
    for seed in 0..8 {
        created(store, key(seed, "a", Role::Member)).await;
    }
    let over = store.create_key(key(8, "a", Role::Member)).await.unwrap();
    assert_eq!(over, CreateKeyOutcome::Full);
    created(store, key(9, "b", Role::Member)).await;
}

async fn a_secret_is_the_same_for_everybody(store: &dyn Store) {
    let first = store.secret("pages", SecretBytes([1; 32])).await.unwrap();
    assert_eq!(first, SecretBytes([1; 32]));
    assert_eq!(
        store.secret("pages", SecretBytes([2; 32])).await.unwrap(),
        first
    );
    let other = store.secret("other", SecretBytes([3; 32])).await.unwrap();
    assert_eq!(other, SecretBytes([3; 32]));
}

#[test]
fn what_was_answered_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.db");
    let new = key(1, "a", Role::Member);
    block_on(async {
        let store = SqliteStore::open(&path).unwrap();
        created(&store, new.clone()).await;
        claimed(&store, &scope("a", "k"), claim(1, 0)).await;
        store.secret("pages", SecretBytes([1; 32])).await.unwrap();
    });
    block_on(async {
        let store = SqliteStore::open(&path).unwrap();
        assert!(store.find_key(&new.digest).await.unwrap().is_some());
        let held = store
            .claim_idempotency(&scope("a", "k"), claim(1, 1))
            .await
            .unwrap();
        assert_eq!(held, ClaimOutcome::InProgress);
        let kept = store.secret("pages", SecretBytes([2; 32])).await.unwrap();
        assert_eq!(kept, SecretBytes([1; 32]));
    });
}

#[test]
fn one_of_many_claims_at_once_wins() {
    let subject = sqlite();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .build()
        .unwrap();
    let claims: Vec<_> = (0..32)
        .map(|now| {
            let store = subject.store.clone();
            runtime.spawn(async move {
                let scope = scope("a", "k");
                store
                    .claim_idempotency(&scope, claim(1, now))
                    .await
                    .unwrap()
            })
        })
        .collect();
    let won = claims
        .into_iter()
        .map(|claim| runtime.block_on(claim).unwrap())
        .filter(|outcome| matches!(outcome, ClaimOutcome::Claimed(_)))
        .count();
    assert_eq!(won, 1);
}

/// A step of a random history.
#[derive(Debug, Clone)]
enum Step {
    Create {
        seed: u64,
        namespace: u8,
        admin: bool,
    },
    Revoke {
        seed: u64,
        namespace: Option<u8>,
        ms: u64,
    },
    Use {
        seed: u64,
        ms: u64,
    },
    Claim {
        namespace: u8,
        key: u8,
        content: u8,
        now: u64,
    },
    Complete {
        namespace: u8,
        key: u8,
        generation: u64,
    },
    Abandon {
        namespace: u8,
        key: u8,
        generation: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (seed, namespace, ms, generation) = (0..6_u64, 0..2_u8, 0..3_000_u64, 0..8_u64);
    prop_oneof![
        (seed.clone(), namespace.clone(), any::<bool>()).prop_map(|(seed, namespace, admin)| {
            Step::Create {
                seed,
                namespace,
                admin,
            }
        }),
        (
            seed.clone(),
            proptest::option::of(namespace.clone()),
            ms.clone()
        )
            .prop_map(|(seed, namespace, ms)| Step::Revoke {
                seed,
                namespace,
                ms
            }),
        (seed, ms.clone()).prop_map(|(seed, ms)| Step::Use { seed, ms }),
        (namespace.clone(), 0..3_u8, 0..2_u8, ms).prop_map(|(namespace, key, content, now)| {
            Step::Claim {
                namespace,
                key,
                content,
                now,
            }
        }),
        (namespace.clone(), 0..3_u8, generation.clone()).prop_map(
            |(namespace, key, generation)| Step::Complete {
                namespace,
                key,
                generation
            }
        ),
        (namespace, 0..3_u8, generation).prop_map(|(namespace, key, generation)| Step::Abandon {
            namespace,
            key,
            generation
        }),
    ]
}

fn namespace(index: u8) -> &'static str {
    ["a", "b"][usize::from(index)]
}

/// Carries out a step and tells all that can be seen of the store after it.
async fn observe(store: &dyn Store, step: &Step) -> String {
    let idempotency = |n: u8, k: u8| scope(namespace(n), &k.to_string());
    let outcome = match step.clone() {
        Step::Create {
            seed,
            namespace: n,
            admin,
        } => {
            let role = if admin { Role::Admin } else { Role::Member };
            format!(
                "{:?}",
                store
                    .create_key(key(seed, namespace(n), role))
                    .await
                    .unwrap()
            )
        }
        Step::Revoke {
            seed,
            namespace: n,
            ms,
        } => {
            let scope = n.map_or(KeyScope::All, |n| KeyScope::Bucket(bucket(namespace(n))));
            let id = key(seed, "a", Role::Member).id;
            format!("{:?}", store.revoke_key(&scope, &id, at(ms)).await.unwrap())
        }
        Step::Use { seed, ms } => {
            let id = key(seed, "a", Role::Member).id;
            format!("{:?}", store.note_key_used(&id, at(ms)).await.unwrap())
        }
        Step::Claim {
            namespace: n,
            key: k,
            content,
            now,
        } => {
            let claimed = store
                .claim_idempotency(&idempotency(n, k), claim(content, now))
                .await;
            format!("{:?}", claimed.unwrap())
        }
        Step::Complete {
            namespace: n,
            key: k,
            generation,
        } => {
            let scope = idempotency(n, k);
            let made = sandbox(generation);
            let done = store
                .complete_idempotency(&scope, Generation(generation), &made)
                .await;
            format!("{:?}", done.unwrap())
        }
        Step::Abandon {
            namespace: n,
            key: k,
            generation,
        } => {
            let scope = idempotency(n, k);
            format!(
                "{:?}",
                store
                    .abandon_idempotency(&scope, Generation(generation))
                    .await
                    .unwrap()
            )
        }
    };
    let keys = store.list_keys(&KeyScope::All).await.unwrap();
    format!(
        "{outcome} {keys:?} {:?}",
        store.list_tenants().await.unwrap()
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_history_looks_the_same_in_both(history in proptest::collection::vec(step(), 1..40)) {
        let (model, real) = (memory(), sqlite());
        block_on(async {
            for step in &history {
                let expected = observe(&*model.store, step).await;
                let seen = observe(&*real.store, step).await;
                assert_eq!(expected, seen, "after {step:?}");
            }
        });
    }
}
