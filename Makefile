# Thin targets over scripts/, which say what they do.
.PHONY: demo test bench lint fuzz setup sim

demo:
	scripts/demo

test:
	scripts/test

bench:
	scripts/bench

lint:
	scripts/lint

fuzz:
	scripts/fuzz

setup:
	scripts/setup

sim:
	cargo run --release -p sandhold-sim -- --seeds 10000
	cargo test --release -p sandhold-governor-driver --test crowd -- --ignored --test-threads 1 --nocapture
