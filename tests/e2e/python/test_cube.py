"""The `cubesandbox` SDK, as it is published."""

import pytest
from conftest import eventually
from cubesandbox import Sandbox
import cubesandbox
from cubesandbox import _exceptions as errors


@pytest.fixture
def cube():
    sandbox = Sandbox.create(timeout=300, metadata={"by": "cube"}, envs={"COLOUR": "teal"})
    yield sandbox
    try:
        sandbox.kill()
    except Exception:
        pass


def test_code_keeps_state(cube):
    assert cube.run_code("x = 6").error is None
    assert cube.run_code("x * 7").text == "42"
    out = []
    execution = cube.run_code("print('hi'); 1/0", on_stdout=lambda m: out.append(m.text))
    assert "".join(out).strip() == "hi"
    assert execution.error.name == "ZeroDivisionError"


def test_commands(cube):
    result = cube.commands.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert cube.commands.run("id -un").stdout == "root\n"
    assert cube.commands.run("echo $COLOUR $X", envs={"X": "1"}).stdout == "teal 1\n"


def test_files(cube):
    cube.files.make_dir("/tmp/c")
    cube.files.write("/tmp/c/a.txt", "grüße")
    assert cube.files.read("/tmp/c/a.txt") == "grüße"
    assert [e["name"] for e in cube.files.list("/tmp/c")] == ["a.txt"]
    assert cube.files.exists("/tmp/c/a.txt") and not cube.files.exists("/tmp/none")
    assert int(cube.files.stat("/tmp/c/a.txt")["size"]) == len("grüße".encode())
    cube.files.make_dir("/tmp/c/d")
    cube.files.rename("/tmp/c/a.txt", "/tmp/c/d/b.txt")
    cube.files.remove("/tmp/c/d")
    assert cube.files.list("/tmp/c") == []


def test_watch(cube):
    cube.files.make_dir("/tmp/w")
    with cube.files.watch_dir("/tmp/w") as watcher:
        cube.files.write("/tmp/w/new", "1")
        assert next(iter(watcher)).name == "new"


def test_terminal(cube):
    size = cubesandbox.PtySize(rows=30, cols=100)
    handle = cube.pty.create(size)
    handle.send_stdin(b"stty size; exit\n")
    output = bytearray()
    handle.wait(on_data=output.extend)
    assert b"30 100" in output


def test_info_list_health(cube):
    info = cube.get_info()
    assert info["sandboxID"] == cube.sandbox_id
    assert str(info["state"]) == "running"
    assert info["metadata"] == {"by": "cube"}
    assert cube.sandbox_id in {s["sandboxID"] for s in Sandbox.list()}
    assert cube.sandbox_id in {s["sandboxID"] for s in Sandbox.list_v2()}
    assert Sandbox.health()["status"] == "ok"


def test_an_idle_clock_slides(cube):
    # R-L6: its timeout is a window that each use moves.
    cube.set_timeout(500)
    first = cube.get_info()["endAt"]
    cube.commands.run("sleep 1.1")
    assert eventually(lambda: cube.get_info()["endAt"] > first)
    cube.set_timeout(-1)
    assert cube.commands.run("echo for ever").stdout == "for ever\n"


def test_connect_and_kill(cube):
    again = Sandbox.connect(cube.sandbox_id)
    assert again.run_code("1 + 1").text == "2"
    cube.kill()
    with pytest.raises(errors.SandboxNotFoundError):
        Sandbox.connect(cube.sandbox_id)
    with pytest.raises(errors.SandboxNotFoundError):
        cube.get_info()


def test_errors():
    with pytest.raises(errors.TemplateNotFoundError):
        Sandbox.create("no-such-template")
    config = cubesandbox.Config(api_key="wrong")
    with pytest.raises(errors.AuthenticationError):
        Sandbox.list(config=config)
