"""Templates by the command line: made from a definition, used at once, deleted."""

import json
import os
import uuid
from pathlib import Path

import pytest
import wire
from e2b import SandboxException


def base_root():
    """The root file system of `base`, as it lies in the catalogue of this machine."""
    shelf = Path(os.environ["SANDHOLD_TEMPLATES"].split(":")[0])
    for file in (shelf / "templates").glob("*.json"):
        template = json.loads(file.read_text())
        if template["names"][0] == "base":
            build = json.loads((shelf / "builds" / template["current"] / "build.json").read_text())
            return shelf / "layers" / build["root_layer"] / "root"
    raise AssertionError("there is no template 'base'")


@pytest.fixture
def define(tmp_path):
    """Writes a definition and builds it into the running server's own catalogue."""

    def build(settings="", check=True):
        name = "t" + uuid.uuid4().hex[:12]
        text = f'name = "{name}"\n[source]\nkind = "dir"\npath = "{base_root()}"\n{settings}'
        (tmp_path / "template.toml").write_text(text)
        made = wire.cli(
            "template", "build", str(tmp_path), "--owner", "default", "--data-dir", os.environ["SANDHOLD_DATA_DIR"],
            "--agent", os.environ["SANDHOLD_AGENT"], "--json", check=check,
        )
        return name, made

    return build


def test_a_new_template_is_used_without_a_restart_and_deleted(define, new):
    # R-P5
    name, made = define('overlay = "files"\n[resources]\nmemory_mib = 300\n', check=False)
    assert made.returncode != 0 and "source.overlay" in made.stderr
    name, made = define("[resources]\nmemory_mib = 300\n")
    result = json.loads(made.stdout.splitlines()[-1])
    assert result["event"] == "built" and result["reused"] is False
    sandbox = new(name)
    assert sandbox.get_info().memory_mb == 300
    assert sandbox.get_info().template_id == result["template"]
    assert name in wire.cli("template", "list").stdout
    wire.cli("template", "delete", name, "--yes")
    with pytest.raises(SandboxException):
        new(name)
    # What came from it lives on.
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_bc_087_the_start_command_sees_the_templates_environment_only(define, new):
    name, _ = define(
        "[agent]\nstartCommand = \"env > /tmp/e; exec sleep infinity\"\n"
        "readyCommand = \"test -s /tmp/e\"\n[agent.environment]\nFROM = \"template\"\n"
    )
    for value in ("1", "2"):
        sandbox = new(name, envs={"K": value})
        seen = sandbox.commands.run("cat /tmp/e").stdout.split("\n")
        assert "FROM=template" in seen
        assert not [line for line in seen if line.startswith(("K=", "SANDHOLD_"))]
        assert sandbox.commands.run("echo $K $FROM").stdout == f"{value} template\n"
        assert sandbox.commands.run("pgrep -c -x sleep").stdout == "1\n"


def test_the_default_templates_serve_everybody():
    listed = json.loads(wire.cli("template", "list", "--json").stdout)
    text = json.dumps(listed)
    assert '"base"' in text and '"code-interpreter-v1"' in text
