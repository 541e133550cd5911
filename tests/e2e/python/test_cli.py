"""The command line for people, as people and scripts use it, against the running server."""

import hashlib
import json
import os
import subprocess

import pytest

SANDHOLD = os.environ.get("SANDHOLD_BIN", "sandhold")


def cli(*arguments, stdin=b"", env=None):
    """Runs a command to its end; `stdin` is all of its input."""
    return subprocess.run(
        [SANDHOLD, *arguments],
        input=stdin,
        capture_output=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def lines(*arguments):
    result = cli(*arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode().splitlines()


@pytest.fixture(scope="module")
def sandbox_id():
    [sandbox] = lines("sandbox", "create", "--template", "base", "--metadata", "test=cli me")
    yield sandbox
    cli("sandbox", "kill", sandbox)


def test_exec_keeps_the_boundaries_of_arguments(sandbox_id):
    # BC-020
    result = cli("sandbox", "exec", sandbox_id, "--", "python3", "-c", 'print("a  b")')
    assert (result.stdout, result.returncode) == (b"a  b\n", 0)
    cli("sandbox", "exec", sandbox_id, "--", "mkdir", "-p", "/tmp/with space")
    result = cli("sandbox", "exec", "-w", "/tmp/with space", sandbox_id, "--", "pwd")
    assert result.stdout == b"/tmp/with space\n"


def test_exec_passes_output_and_status_through(sandbox_id):
    script = "echo out; echo err >&2; exit 7"
    result = cli("sandbox", "exec", sandbox_id, "--", "sh", "-c", script)
    assert (result.stdout, result.stderr, result.returncode) == (b"out\n", b"err\n", 7)
    killed = cli("sandbox", "exec", sandbox_id, "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 137
    missing = cli("sandbox", "exec", sandbox_id, "--", "no-such-program")
    assert missing.returncode == 125
    assert b"no-such-program" in missing.stderr


def test_exec_forwards_standard_input(sandbox_id):
    data = os.urandom(3_000_000)
    result = cli("sandbox", "exec", sandbox_id, "--", "sha256sum", stdin=data)
    assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_files_go_in_and_come_out(sandbox_id, tmp_path):
    here, back = tmp_path / "here", tmp_path / "back"
    here.write_bytes(os.urandom(1_000_000))
    there = "/home/user/a dir/file"
    assert cli("sandbox", "files", "put", sandbox_id, str(here), there).returncode == 0
    [line] = lines("sandbox", "files", "ls", sandbox_id, "/home/user/a dir")
    assert line.endswith("\tfile")
    assert cli("sandbox", "files", "get", sandbox_id, there, str(back)).returncode == 0
    assert back.read_bytes() == here.read_bytes()
    refused = cli("sandbox", "files", "rm", sandbox_id, "/home/user/a dir")
    assert refused.returncode != 0 and b"--recursive" in refused.stderr
    told = cli("sandbox", "files", "rm", "-r", sandbox_id, "/home/user/a dir")
    assert told.returncode == 0 and b"everything in it" in told.stderr


def test_lists_are_filtered_and_machine_readable(sandbox_id):
    result = lines("sandbox", "ls", "--metadata", "test=cli me", "--json")
    assert [found["sandboxID"] for found in json.loads(result[0])] == [sandbox_id]
    assert lines("sandbox", "ls", "--quiet", "--metadata", "test=another") == []
    assert any(line.startswith("base\t") for line in lines("template", "list"))


def test_run_keeps_state_and_tells_rich_results(tmp_path):
    [sandbox] = lines("sandbox", "create")
    try:
        assert lines("sandbox", "run", sandbox, "x = 6") == []
        assert lines("sandbox", "run", sandbox, "print('hello'); x * 7") == ["hello", "42"]
        plot = "import matplotlib.pyplot as p; p.bar(['a', 'b'], [1, 2]); p.show()"
        result = cli("sandbox", "run", "--save", str(tmp_path), sandbox, plot)
        assert b"png" in result.stderr and b"bar chart" in result.stderr
        [picture] = tmp_path.iterdir()
        assert picture.read_bytes().startswith(b"\x89PNG")
        failed = cli("sandbox", "run", sandbox, "1/0")
        assert failed.returncode == 1 and b"ZeroDivisionError" in failed.stderr
    finally:
        cli("sandbox", "kill", sandbox)


def test_the_end_of_a_sandbox_is_told():
    # R-L12
    [sandbox] = lines("sandbox", "create", "--template", "base")
    assert lines("sandbox", "kill", sandbox) == [f"{sandbox} has ended; its files are gone"]
    history = lines("sandbox", "history", sandbox)
    assert [line.split("\t")[1] for line in history][-1] == "killed"
    gone = cli("sandbox", "exec", sandbox, "--", "true")
    assert gone.returncode == 125 and b"was not found" in gone.stderr


def test_keys_are_made_shown_once_and_revoked():
    # R-P8
    result = cli("key", "create", "--name", "cli test", "--json")
    made = json.loads(result.stdout)
    own = {"SANDHOLD_API_KEY": made["key"]}
    assert cli("sandbox", "ls", env=own).returncode == 0
    assert cli("key", "list", env=own).returncode != 0, "a member manages no keys"
    assert made["key"].encode() not in cli("key", "list", "--json").stdout
    assert cli("key", "revoke", made["id"]).returncode == 0
    refused = cli("sandbox", "ls", env=own)
    assert refused.returncode != 0 and b"SANDHOLD_API_KEY" in refused.stderr


def test_no_server_is_told_with_what_to_do():
    result = cli("sandbox", "ls", "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert b"http://127.0.0.1:9" in result.stderr and b"sandhold up" in result.stderr


def test_a_failure_is_json_where_that_was_asked_for(sandbox_id):
    cases = [
        (["sandbox", "kill", "nosuchsandbox0000000"], "sandbox_not_found"),
        (["sandbox", "create", "--template", "no-such-template"], "template_not_found"),
        (["sandbox", "ls", "--url", "http://127.0.0.1:9"], "unreachable"),
        (["sandbox", "ls", "--api-key", "e2b_" + "0" * 40], "unauthenticated"),
    ]
    for command, code in cases:
        result = cli(*command, "--json")
        assert result.returncode != 0 and result.stdout == b"", command
        told = json.loads(result.stderr)
        assert told["code"] == code and told["message"], told
    result = cli("sandbox", "exec", "--json", "nosuchsandbox0000000", "--", "true")
    assert result.returncode == 125 and json.loads(result.stderr)["code"] == "sandbox_not_found"
    assert cli("sandbox", "kill", "nosuchsandbox0000000").stderr.startswith(b"sandhold: ")
