"""The asynchronous halves of the Python SDKs: the same calls once more."""

import asyncio

import pytest
from e2b import AsyncSandbox, CommandExitException, PtySize, SandboxNotFoundException, SandboxQuery
from e2b_code_interpreter import AsyncSandbox as AsyncInterpreter


@pytest.fixture
async def sandbox():
    sandbox = await AsyncSandbox.create("base", timeout=300, metadata={"by": "async"})
    yield sandbox
    await sandbox.kill()


@pytest.fixture
async def interpreter():
    sandbox = await AsyncInterpreter.create(timeout=300)
    yield sandbox
    await sandbox.kill()


async def until(seen, within=15):
    async with asyncio.timeout(within):
        await seen.wait()


async def test_life(sandbox):
    assert await sandbox.is_running()
    info = await sandbox.get_info()
    assert info.metadata == {"by": "async"}
    await sandbox.set_timeout(100)
    listed = AsyncSandbox.list(SandboxQuery(metadata={"by": "async"}))
    ids = set()
    while listed.has_next:
        ids |= {item.sandbox_id for item in await listed.next_items()}
    assert sandbox.sandbox_id in ids
    again = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert (await again.commands.run("echo x")).stdout == "x\n"
    assert await sandbox.kill() is True
    assert await sandbox.kill() is False
    with pytest.raises(SandboxNotFoundException):
        await sandbox.get_info()


async def test_commands(sandbox):
    assert (await sandbox.commands.run("echo out")).stdout == "out\n"
    with pytest.raises(CommandExitException):
        await sandbox.commands.run("exit 1")
    handle = await sandbox.commands.run("cat", background=True, stdin=True)
    await sandbox.commands.send_stdin(handle.pid, "in")
    await sandbox.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "in"
    sleeper = await sandbox.commands.run("sleep 300", background=True)
    assert sleeper.pid in {p.pid for p in await sandbox.commands.list()}
    assert await sleeper.kill() is True


async def test_many_at_once(sandbox):
    runs = [sandbox.commands.run(f"sleep 0.1; echo {i}") for i in range(30)]
    results = await asyncio.gather(*runs)
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(30)]


async def test_files_and_watch(sandbox):
    await sandbox.files.make_dir("w")
    seen = asyncio.Event()
    events = []

    async def on_event(event):
        events.append(event)
        seen.set()

    watch = await sandbox.files.watch_dir("w", on_event=on_event)
    await sandbox.files.write("w/a", "1")
    await until(seen)
    assert events[0].name == "a"
    await watch.stop()
    assert await sandbox.files.read("w/a") == "1"
    assert [e.name for e in await sandbox.files.list("w")] == ["a"]
    stream = await sandbox.files.read("w/a", format="stream")
    assert b"".join([chunk async for chunk in stream]) == b"1"
    await sandbox.files.remove("w")
    assert await sandbox.files.exists("w") is False


async def test_terminal(sandbox):
    seen = asyncio.Event()
    output = bytearray()

    async def on_data(data):
        output.extend(data)
        if b"33 99" in output:
            seen.set()

    terminal = await sandbox.pty.create(PtySize(rows=33, cols=99), on_data=on_data, timeout=0)
    await sandbox.pty.send_stdin(terminal.pid, b"stty size\n")
    await until(seen)
    assert await sandbox.pty.kill(terminal.pid) is True


async def test_code(interpreter):
    await interpreter.run_code("x = 6")
    assert (await interpreter.run_code("x * 7")).text == "42"
    out = []

    async def on_stdout(message):
        out.append(message.line)

    execution = await interpreter.run_code("print('hi'); 1/0", on_stdout=on_stdout)
    assert "".join(out) == "hi\n"
    assert execution.error.name == "ZeroDivisionError"
    context = await interpreter.create_code_context()
    assert (await interpreter.run_code("'x' in dir()", context=context)).text == "False"
    await interpreter.remove_code_context(context)
