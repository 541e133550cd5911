"""What the tests share: sandboxes that are gone after the test, and waiting with a bound.

They run against the server of `scripts/with-server`, which sets the environment of the SDKs.
"""

import os
import time

import pytest
from e2b import Sandbox
from e2b_code_interpreter import Sandbox as Interpreter

for name in ("SANDHOLD_URL", "E2B_API_URL", "E2B_API_KEY"):
    if name not in os.environ:
        raise SystemExit(f"{name} is not set; run me by scripts/with-server")


def pytest_collection_modifyitems(items):
    """What takes minutes, most of them idle, starts first, so that the rest runs beside it."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture
def new():
    """Makes sandboxes of `base`, with any options of the SDK; all are killed after the test."""
    made = []

    def make(template="base", cls=Sandbox, **options):
        options.setdefault("timeout", 300)
        sandbox = cls.create(template, **options)
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        sandbox.kill()


@pytest.fixture
def sandbox(new):
    """A sandbox of the lightweight template."""
    return new()


@pytest.fixture
def interpreter(new):
    """A sandbox of the main template, through the code interpreter's SDK."""
    return new("code-interpreter-v1", cls=Interpreter)


@pytest.fixture(scope="module")
def shared():
    """One sandbox for the tests of a file that leave no trace in it."""
    sandbox = Sandbox.create("base", timeout=900)
    yield sandbox
    sandbox.kill()


def eventually(check, within=15.0, every=0.05):
    """Waits until `check` returns something true and returns it; fails after `within` seconds."""
    end = time.monotonic() + within
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < end, f"not so within {within} s: {check}"
        time.sleep(every)
