"""Debian's `docker-registry` on a free port, and small images that the tests make themselves."""

import gzip
import hashlib
import io
import json
import os
import socket
import subprocess
import tarfile

import httpx
from conftest import eventually

BUSYBOX = "/bin/busybox"


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer(files, links=()):
    """A compressed archive of files (name, bytes, mode) and symbolic links (name, target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data, mode in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return gzip.compress(out.getvalue(), mtime=0)


def busybox_layer():
    """A root with the static busybox and a name for each of its programs."""
    with open(BUSYBOX, "rb") as file:
        binary = file.read()
    names = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    links = [(f"bin/{name}", "busybox") for name in names if name != "busybox"]
    return layer([("bin/busybox", binary, 0o755)], links)


class Registry:
    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = "127.0.0.1:%d" % probe.getsockname()[1]
        config = folder / "registry.yml"
        # JSON is YAML.
        config.write_text(json.dumps({
            "version": "0.1", "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": self.address},
        }))
        self.process = subprocess.Popen(
            ["docker-registry", "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(self._answers)

    def _answers(self):
        try:
            return httpx.get(f"http://{self.address}/v2/").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self):
        self.process.kill()
        self.process.wait()

    def push(self, name, layers, **run):
        """Pushes an image and returns its reference."""
        repository, tag = name.split(":")
        base = f"http://{self.address}/v2/{repository}"
        config = json.dumps({
            "os": "linux", "architecture": "amd64", "config": run,
            "rootfs": {"type": "layers", "diff_ids": [digest(gzip.decompress(data)) for data in layers]},
        }).encode()
        for blob in [*layers, config]:
            place = httpx.post(f"{base}/blobs/uploads/").headers["location"]
            put = httpx.put(place, params={**httpx.URL(place).params, "digest": digest(blob)}, content=blob, timeout=60)
            assert put.status_code == 201, put.text
        described = lambda blob, kind: {"mediaType": kind, "digest": digest(blob), "size": len(blob)}
        oci = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2, "mediaType": f"{oci}.manifest.v1+json",
            "config": described(config, f"{oci}.config.v1+json"),
            "layers": [described(data, f"{oci}.layer.v1.tar+gzip") for data in layers],
        }
        put = httpx.put(
            f"{base}/manifests/{tag}", content=json.dumps(manifest),
            headers={"content-type": f"{oci}.manifest.v1+json"},
        )
        assert put.status_code == 201, put.text
        return f"{self.address}/{name}"
