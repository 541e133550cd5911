"""Files through the SDK, and the field cases about files (C)."""

import gzip
import hashlib
import io
import os
import re
from urllib.parse import quote, unquote

import httpx
import pytest
import wire
from e2b import (
    FileNotFoundException,
    FileType,
    SandboxException,
)

MEBIBYTE = 1024 * 1024


def digest(data):
    return hashlib.sha256(data).hexdigest()


def digest_in(sandbox, path):
    return sandbox.commands.run(f"sha256sum '{path}'").stdout.split()[0]


@pytest.fixture
def folder(shared, request):
    """A folder of the test's own in the shared sandbox."""
    path = "/home/user/" + "".join(c if c.isalnum() else "-" for c in request.node.name)
    shared.files.make_dir(path)
    return path


def test_write_and_read(shared, folder):
    info = shared.files.write(f"{folder}/deep/er/a.txt", "grüße\n")
    assert info.path == f"{folder}/deep/er/a.txt" and info.name == "a.txt"
    assert shared.files.read(info.path) == "grüße\n"
    shared.files.write(info.path, "short")
    assert shared.files.read(info.path) == "short"
    assert bytes(shared.files.read(info.path, format="bytes")) == b"short"
    assert b"".join(shared.files.read(info.path, format="stream")) == b"short"


def test_relative_paths_begin_at_home(shared, folder):
    shared.files.write("relative.txt", "x")
    assert shared.files.read("/home/user/relative.txt") == "x"
    assert shared.files.read("relative.txt", user="user") == "x"


def test_several_files_at_once(shared, folder):
    files = [{"path": f"{folder}/{i}", "data": f"data {i}"} for i in range(5)]
    written = shared.files.write_files(files)
    assert [w.path for w in written] == [f["path"] for f in files]
    assert [shared.files.read(f["path"]) for f in files] == [f["data"] for f in files]


def test_ways_to_upload(shared, folder):
    data = os.urandom(300_000)
    ways = {
        "multipart": {"data": data, "use_octet_stream": False},
        "octets": {"data": data, "use_octet_stream": True},
        "gzip": {"data": data, "gzip": True},
        "file": {"data": io.BytesIO(data)},
        "iterable": {"data": iter([data[:100], data[100:]])},
    }
    for name, way in ways.items():
        shared.files.write(f"{folder}/{name}", **way)
        assert digest_in(shared, f"{folder}/{name}") == digest(data), name


def test_list_stat_rename_remove(shared, folder):
    shared.files.write(f"{folder}/a", "12345")
    assert shared.files.make_dir(f"{folder}/d/e") is True
    assert shared.files.make_dir(f"{folder}/d/e") is False
    names = {e.name: e for e in shared.files.list(folder)}
    assert set(names) == {"a", "d"}
    assert names["a"].type == FileType.FILE and names["a"].size == 5
    assert names["a"].owner == "user" and names["a"].permissions.endswith("rw-r--r--")
    assert names["d"].type == FileType.DIR
    assert {e.path for e in shared.files.list(folder, depth=2)} >= {f"{folder}/d/e"}
    assert shared.files.exists(f"{folder}/a") is True
    moved = shared.files.rename(f"{folder}/a", f"{folder}/d/b")
    assert moved.path == f"{folder}/d/b"
    assert shared.files.exists(f"{folder}/a") is False
    assert shared.files.get_info(f"{folder}/d/b").size == 5
    shared.files.remove(f"{folder}/d")
    assert shared.files.list(folder) == []


def test_what_is_not_there_is_told(shared, folder):
    for call in (
        lambda: shared.files.read(f"{folder}/none"),
        lambda: shared.files.list(f"{folder}/none"),
        lambda: shared.files.get_info(f"{folder}/none"),
        lambda: shared.files.rename(f"{folder}/none", f"{folder}/other"),
    ):
        with pytest.raises(FileNotFoundException):
            call()
    with pytest.raises(SandboxException):
        shared.files.read(folder)
    with pytest.raises(SandboxException):
        shared.files.write(folder, "a directory is there")


def test_paths_with_dots_are_resolved_inside(shared, folder):
    shared.files.write(f"{folder}/x/../y.txt", "y")
    assert shared.files.read(f"{folder}/y.txt") == "y"
    # There is nothing above the root of a sandbox.
    hosts = shared.files.read("/../../../../etc/hostname").strip()
    assert hosts == shared.commands.run("hostname").stdout.strip()


def test_signed_urls(shared, folder):
    path = f"{folder}/signed.txt"
    shared.files.write(path, "signed")
    assert httpx.get(shared.download_url(path)).text == "signed"
    assert httpx.get(shared.download_url(path, use_signature_expiration=60)).text == "signed"
    upload = shared.upload_url(f"{folder}/up.txt", use_signature_expiration=60)
    answer = httpx.post(upload, files={"file": ("up.txt", b"uploaded")})
    assert answer.status_code == 200, answer.text
    assert shared.files.read(f"{folder}/up.txt") == "uploaded"


def test_ranges(shared, folder):
    shared.files.write(f"{folder}/r", "0123456789")
    get = lambda **h: wire.agent(shared, "GET", f"/files?path={folder}/r", headers=h)
    part = get(Range="bytes=2-4")
    assert part.status_code == 206 and part.content == b"234"
    assert part.headers["content-range"] == "bytes 2-4/10"
    assert get(Range="bytes=-3").content == b"789"
    assert get(Range="bytes=50-").status_code == 416


def test_bc_049_binary_is_the_same_in_every_mode(shared, folder):
    data = bytes.fromhex("FFD889500 0000A0D1A".replace(" ", "")) + os.urandom(MEBIBYTE)
    path = f"{folder}/binary"
    shared.files.write(path, data)
    assert digest(bytes(shared.files.read(path, format="bytes"))) == digest(data)
    assert digest(b"".join(shared.files.read(path, format="stream"))) == digest(data)
    identity = wire.agent(shared, "GET", f"/files?path={path}", headers={"Accept-Encoding": "identity"})
    assert int(identity.headers["content-length"]) == len(data)
    assert digest(identity.content) == digest(data)
    zipped = wire.agent(shared, "GET", f"/files?path={path}", headers={"Accept-Encoding": "gzip"})
    assert digest(zipped.content) == digest(data)


def test_bc_050_an_empty_file(shared, folder):
    path = f"{folder}/empty"
    shared.files.write(path, "")
    assert shared.files.read(path) == ""
    assert bytes(shared.files.read(path, format="bytes")) == b""
    assert b"".join(shared.files.read(path, format="stream")) == b""
    answer = wire.agent(shared, "GET", f"/files?path={path}", headers={"Accept-Encoding": "identity"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "0"
    ranged = wire.agent(shared, "GET", f"/files?path={path}", headers={"Range": "bytes=0-10"})
    assert ranged.status_code in (200, 416)
    assert shared.files.get_info(path).size == 0


@pytest.mark.parametrize("name", ["报告 v2.pdf", 'naïve;name=".txt', "line\r\nX-Evil: yes"])
def test_bc_053_content_disposition_holds_the_name_and_nothing_else(shared, folder, name):
    path = f"{folder}/{name}"
    shared.files.write(path, "x")
    answer = wire.agent(shared, "GET", f"/files?path={quote(path)}")
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    disposition = answer.headers["content-disposition"]
    # The exact name is in the extended form (RFC 5987); the plain one is for clients without it.
    extended = re.fullmatch(r".*; *filename\*=UTF-8''([A-Za-z0-9!#$&+.^_`|~%-]+)", disposition)
    assert unquote(extended[1]) == name


def test_bc_056_links_of_every_kind(shared, folder):
    shared.commands.run(
        f"cd {folder} && mkdir d && echo 1 > d/in && echo 2 > f && ln -s d to-dir && ln -s f to-file"
        " && ln -s nowhere dangling && ln -s loop loop && ln -s f c0"
        " && for i in $(seq 50); do ln -s c$((i-1)) c$i; done && mkdir only"
        " && mv to-dir to-file dangling loop only/ && cd only"
        " && ln -sfn ../d to-dir && ln -sfn ../f to-file && ln -s ../c30 chain"
    )
    entries = {e.name: e for e in shared.files.list(f"{folder}/only")}
    assert set(entries) == {"to-dir", "to-file", "dangling", "loop", "chain"}
    assert all(e.symlink_target for e in entries.values())
    assert entries["to-dir"].type in (FileType.DIR, FileType.SYMLINK)
    assert entries["to-file"].type in (FileType.FILE, FileType.SYMLINK)
    through = {e.name for e in shared.files.list(f"{folder}/only/to-dir")}
    assert through == {e.name for e in shared.files.list(f"{folder}/d")} == {"in"}
    raw = wire.rpc(shared, "filesystem.Filesystem/ListDir", {"path": f"{folder}/only", "depth": 1})
    assert raw.status_code == 200
    assert all(e["isSymlink"] for e in raw.json()["entries"])


def test_bc_058_mode_and_owner_are_kept_or_the_callers(shared, folder):
    run = lambda command: shared.commands.run(command, user="root").stdout
    run(f"cd {folder} && echo a > run.sh && chmod 755 run.sh && chown user:user run.sh")
    run(f"cd {folder} && echo s > secret && chmod 600 secret && chown root:root secret")
    shared.files.write(f"{folder}/run.sh", "b", user="user")
    assert run(f"stat -c '%a %U' {folder}/run.sh") == "755 user\n"
    with pytest.raises(SandboxException):
        shared.files.write(f"{folder}/secret", "mine now", user="user")
    assert run(f"cat {folder}/secret; stat -c '%a %U' {folder}/secret") == "s\n600 root\n"
    shared.files.write(f"{folder}/a/b/c/new", "n", user="user")
    owners = run(f"stat -c '%U' {folder}/a {folder}/a/b {folder}/a/b/c {folder}/a/b/c/new")
    assert owners.split() == ["user"] * 4
    shared.files.write(f"{folder}/r/new", "n", user="root")
    assert run(f"stat -c '%U' {folder}/r {folder}/r/new").split() == ["root"] * 2


@pytest.mark.parametrize("kibibytes", [96, 127, 128, 129, 1024, 64 * 1024])
def test_bc_059_sizes_without_a_cliff(shared, folder, kibibytes):
    data = os.urandom(1024) * kibibytes
    before = wire.agent_memory(shared)
    shared.files.write(f"{folder}/whole", data, use_octet_stream=True)
    chunks = (data[at : at + 65536] for at in range(0, len(data), 65536))
    answer = wire.agent(
        shared,
        "POST",
        f"/files?path={folder}/chunked",
        headers={"Content-Type": "application/octet-stream"},
        content=chunks,
    )
    assert answer.status_code == 200, answer.text
    assert digest_in(shared, f"{folder}/whole") == digest(data)
    assert digest_in(shared, f"{folder}/chunked") == digest(data)
    assert wire.agent_memory(shared) - before < 32 * MEBIBYTE
    shared.files.remove(folder)


def test_bc_059_a_large_upload_in_little_memory(new):
    sandbox = new("code-interpreter-v1")
    block = os.urandom(MEBIBYTE)
    before = wire.agent_memory(sandbox)
    sandbox.files.write("large", (block for _ in range(300)), request_timeout=150)
    assert wire.agent_memory(sandbox) - before < 32 * MEBIBYTE
    whole = hashlib.sha256()
    for _ in range(300):
        whole.update(block)
    assert digest_in(sandbox, "/home/user/large") == whole.hexdigest()


def test_bc_061_metadata_is_kept_and_checked(shared, folder):
    path = f"{folder}/m"
    shared.files.write(path, "x", metadata={"Author": "Zoe", "case-ID": "7"})
    expected = {"author": "Zoe", "case-id": "7"}
    assert shared.files.get_info(path).metadata == expected
    moved = shared.files.rename(path, f"{folder}/n")
    assert moved.metadata == expected
    assert shared.files.get_info(f"{folder}/n").metadata == expected
    # A write replaces all of it.
    shared.files.write(f"{folder}/n", "y", metadata={"only": "this"})
    assert shared.files.get_info(f"{folder}/n").metadata == {"only": "this"}
    upload = lambda headers: wire.agent(
        shared,
        "POST",
        f"/files?path={folder}/bad",
        headers={"Content-Type": "application/octet-stream", **headers},
        content=b"x",
    )
    assert upload({"X-Metadata-Author": "Zoë".encode()}).status_code == 400
    assert upload({"X-Metadata-Long": "v" * 5000}).status_code == 400


def test_gzip_that_lies_is_refused(shared, folder):
    upload = lambda content: wire.agent(
        shared,
        "POST",
        f"/files?path={folder}/z",
        headers={"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
        content=content,
    )
    assert upload(b"this is not gzip").status_code == 400
    assert upload(gzip.compress(b"x" * 1000)[:-8]).status_code == 400
    assert upload(gzip.compress(b"fine")).status_code == 200
    assert shared.files.read(f"{folder}/z") == "fine"
