# Thin targets over scripts/, which say what they do.
.PHONY: demo test bench lint setup

demo:
	scripts/demo

test:
	scripts/test

bench:
	scripts/bench

lint:
	scripts/lint

setup:
	scripts/setup
