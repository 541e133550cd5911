"""Terminals through the SDK (wire contract 2.3)."""

import time

import pytest
from conftest import eventually
from e2b import PtySize


class Terminal:
    """A PTY whose output is gathered by a thread, so that a test can wait for text in it."""

    def __init__(self, sandbox, cols=80, rows=24, **options):
        import threading

        self.sandbox = sandbox
        self.handle = sandbox.pty.create(PtySize(cols=cols, rows=rows), timeout=0, **options)
        self.pid = self.handle.pid
        self.output = bytearray()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        try:
            for _, _, data in self.handle:
                if data:
                    self.output += data
        except Exception as error:
            self.output += f"\n[{error}]".encode()

    def type(self, text):
        self.sandbox.pty.send_stdin(self.pid, text.encode())

    def shows(self, text, within=15):
        return eventually(lambda: text.encode() in self.output, within)


@pytest.fixture
def terminal(sandbox):
    return Terminal(sandbox, cols=111, rows=37)


def test_a_shell_answers(terminal):
    terminal.type("echo $((40+2)) $TERM\n")
    terminal.shows("42 xterm-256color")
    terminal.type("exit\n")
    terminal.thread.join(15)
    assert not terminal.thread.is_alive()


def test_kill_ends_it(terminal):
    assert terminal.sandbox.pty.kill(terminal.pid) is True
    terminal.thread.join(15)
    assert not terminal.thread.is_alive()
    assert terminal.sandbox.pty.kill(terminal.pid) is False


def test_connect_again(terminal):
    terminal.type("MARK=still-here\n")
    again = terminal.sandbox.pty.connect(terminal.pid, timeout=30)
    terminal.type("echo [$MARK]\n")
    terminal.shows("[still-here]")
    again.disconnect()


def test_bc_022_unfinished_syntax_in_a_terminal(terminal):
    terminal.shows("$ ")
    for start in ("cat <<E", 'echo "abc', "( echo a"):
        terminal.output.clear()
        terminal.type(f"{start}\n")
        terminal.shows("> ")
        terminal.output.clear()
        # With Enter: a signal that comes just before bash begins to read is seen by it with the next
        # key only. Without the Ctrl-C, Enter would bring another "> ".
        terminal.type("\x03\n")
        terminal.shows("$ ")
        mark = f"back-{time.monotonic_ns()}"
        terminal.type(f"echo {mark[:5]}''{mark[5:]}\n")
        terminal.shows(mark)


def test_bc_023_a_pager_has_a_terminal(terminal):
    terminal.type("echo term=$TERM; git --no-pager --version\n")
    terminal.shows("term=xterm-256color")
    terminal.shows("git version")


def test_bc_027_size_follows(terminal):
    terminal.type("stty size\n")
    terminal.shows("37 111")
    terminal.type("trap 'stty size' WINCH; while :; do sleep .1; done\n")
    terminal.shows("done\r\n")
    terminal.sandbox.pty.resize(terminal.pid, PtySize(cols=140, rows=50))
    terminal.shows("50 140")
    terminal.sandbox.pty.resize(terminal.pid, PtySize(cols=1, rows=1))
    terminal.shows("1 1")
    try:
        terminal.sandbox.pty.resize(terminal.pid, PtySize(cols=0, rows=0))
    except Exception as refused:
        assert "size" in str(refused) or "0" in str(refused)
    # A prompt needs more than one column.
    terminal.sandbox.pty.resize(terminal.pid, PtySize(cols=100, rows=30))
    terminal.shows("30 100")
    terminal.output.clear()
    terminal.type("\x03")
    terminal.shows("$ ")
    terminal.type("echo still''-alive\n")
    terminal.shows("still-alive")
