"""What the tests of sleep and waking share."""

import uuid

import wire
from conftest import eventually

# E2B's way to say: sleep when the time is over, and wake when somebody comes.
SLEEPS = {"on_timeout": "pause", "auto_resume": True}


def state(sandbox_id):
    """As it is told; asking for it wakes nobody."""
    return wire.api("GET", f"/sandboxes/{sandbox_id}").json().get("state")


def events(sandbox_id):
    return wire.api("GET", f"/sandboxes/{sandbox_id}/events").json()["events"]


def times(sandbox_id, name):
    """How often it went to a state."""
    return sum(event["state"] == name for event in events(sandbox_id))


def falls_asleep(sandbox_id, within=30.0):
    eventually(lambda: state(sandbox_id) == "paused" and times(sandbox_id, "paused"), within)


class Raw:
    """A sandbox made without an SDK, with whatever the body says."""

    def __init__(self, path="/sandboxes", **body):
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        made = wire.api("POST", path, headers=headers, json={"templateID": "base", **body})
        assert made.status_code == 201, made.text
        self.sandbox_id = made.json()["sandboxID"]
        self.sandbox_domain = made.json()["domain"]
        self._envd_access_token = made.json()["envdAccessToken"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        wire.api("DELETE", f"/sandboxes/{self.sandbox_id}")

