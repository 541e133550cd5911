"""Watching folders, by the SDKs and by programs inside the sandbox."""

from conftest import eventually
from e2b import FilesystemEventType

INOTIFY = r"""
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
fd = libc.inotify_init()
assert libc.inotify_add_watch(fd, sys.argv[1].encode(), 0x100 | 0x2 | 0x8 | 0x80) > 0
print("watching", flush=True)
data = os.read(fd, 4096)
mask, length = struct.unpack_from("I4xI", data, 4)
print("saw", data[16:16 + length].rstrip(b"\0").decode(), flush=True)
"""


def gather(watch, within=15):
    """All that was seen so far, waiting for at least one."""
    seen = []

    def more():
        seen.extend(watch.get_new_events())
        return seen

    return lambda wanted: eventually(lambda: any(wanted(e) for e in more()), within)


def test_changes_are_seen(sandbox):
    sandbox.files.make_dir("w")
    watch = sandbox.files.watch_dir("w")
    saw = gather(watch)
    sandbox.files.write("w/a", "1")
    saw(lambda e: e.name == "a" and e.type == FilesystemEventType.CREATE)
    saw(lambda e: e.name == "a" and e.type == FilesystemEventType.WRITE)
    sandbox.commands.run("mv w/a w/b; rm w/b")
    saw(lambda e: e.name == "a" and e.type == FilesystemEventType.RENAME)
    saw(lambda e: e.name == "b" and e.type == FilesystemEventType.REMOVE)
    watch.stop()


def test_a_tree_is_watched_with_what_is_made_in_it(sandbox):
    sandbox.files.make_dir("w/x")
    watch = sandbox.files.watch_dir("w", recursive=True, include_entry=True)
    saw = gather(watch)
    sandbox.files.write("w/x/deep", "1")
    saw(lambda e: e.name == "x/deep")
    sandbox.files.make_dir("w/new")
    saw(lambda e: e.name == "new")
    sandbox.files.write("w/new/file", "1")
    saw(lambda e: e.name == "new/file")
    watch.stop()


def test_only_folders_that_are_there_can_be_watched(sandbox):
    import pytest
    from e2b import FileNotFoundException, SandboxException

    with pytest.raises(FileNotFoundException):
        sandbox.files.watch_dir("none")
    sandbox.files.write("file", "1")
    with pytest.raises(SandboxException):
        sandbox.files.watch_dir("file")


def test_bc_064_a_program_inside_sees_what_the_api_writes(sandbox):
    sandbox.files.write("/tmp/watch.py", INOTIFY)
    sandbox.files.make_dir("/home/user/seen")
    handle = sandbox.commands.run("python3 /tmp/watch.py /home/user/seen", background=True)
    lines = (out for out, _, _ in handle if out)
    assert next(lines) == "watching\n"
    sandbox.files.write("/home/user/seen/from-outside", "1")
    assert next(lines) == "saw from-outside\n"
