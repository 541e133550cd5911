//! Many worlds, and the same world twice.

use sandhold_governor::rules::Rules;
use sandhold_sim::world::{Report, World};

fn run(seed: u64) -> Report {
    let mut world = World::from_seed(seed, Rules::default());
    world.trace_everything();
    world.run()
}

#[test]
fn hundreds_of_worlds_hold() {
    // Issue 5; `make sim` runs ten thousand.
    let (mut leased, mut kills) = (0, 0);
    for seed in 1..=300 {
        let report = World::from_seed(seed, Rules::default()).run();
        assert_eq!(
            report.violation,
            None,
            "seed {seed}\n{}",
            report.trace.join("\n")
        );
        leased += report.leased;
        kills += report.kills;
    }
    // A world in which nothing happens proves nothing.
    assert!(leased > 5_000, "{leased} sandboxes were leased");
    assert!(kills > 2_000, "{kills} sandboxes were deleted");
}

#[test]
fn the_same_seed_is_the_same_world_byte_for_byte() {
    for seed in [3, 33, 333] {
        let (one, two) = (run(seed), run(seed));
        assert!(one.trace.len() > 100);
        assert_eq!(one.trace, two.trace);
        assert_eq!(one, two);
    }
    assert_ne!(
        run(3).trace_hash,
        run(4).trace_hash,
        "another seed is another world"
    );
}
