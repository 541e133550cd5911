"""Templates built by the SDKs, as they are published: images, steps, tags, and what fails (R-P5)."""

import json
import os
import traceback
import uuid

import httpx
import pytest
import wire
from cubesandbox import Template as CubeTemplate
from e2b import AsyncTemplate, Template
from e2b.exceptions import BuildException
from conftest import eventually
from registry import Registry, busybox_layer, layer


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    registry = Registry(tmp_path_factory.mktemp("registry"))
    yield registry
    registry.stop()


@pytest.fixture(scope="module")
def tiny(registry):
    """An image with a shell and a few settings, in a registry."""
    return registry.push(
        "team/tiny:1", [busybox_layer(), layer([("etc/motd", b"second layer\n", 0o644)])],
        Env=["PATH=/opt/bin:/bin", "GREETING=a b"],
    )


@pytest.fixture
def name():
    """A name for a template that is gone after the test."""
    name = "b" + uuid.uuid4().hex[:12]
    yield name
    wire.api("DELETE", f"/templates/{name}")


@pytest.fixture
def context(tmp_path):
    (tmp_path / "app/sub").mkdir(parents=True)
    (tmp_path / "app/main.sh").write_text("echo main\n")
    (tmp_path / "app/sub/deep file").write_text("deep\n")
    (tmp_path / "app/link").symlink_to("/etc/motd")
    (tmp_path / "one.txt").write_text("one\n")
    return tmp_path


def every_step(context, image):
    return (
        Template(file_context_path=str(context))
        .from_image(image)
        .copy("app", "/srv/app")
        .copy("one.txt", "/srv/renamed", user="root", mode=0o640)
        .set_envs({"COLOUR": "teal", "PATH": "/srv/bin:$PATH"})
        .set_workdir("/srv/work")
        .run_cmd("echo $COLOUR > made; id -un >> made; pwd >> made; echo noise >&2")
        .run_cmd("rm /etc/motd; mkdir -p /srv/bin; printf '#!/bin/sh\\necho tool\\n' > /srv/bin/tool; chmod 755 /srv/bin/tool",
                 user="root")
        .set_user("worker")
        .run_cmd("whoami > /tmp/who")
    )


def check_every_step(sandbox):
    run = lambda command: sandbox.commands.run(command).stdout
    assert run("cat /srv/work/made") == "teal\nuser\n/srv/work\n"
    assert run("cat '/srv/app/sub/deep file' /srv/renamed 2>/dev/null; true") == "deep\n"
    assert run("cat /tmp/who; id -un; pwd") == "worker\nworker\n/srv/work\n"
    assert sandbox.commands.run("stat -c '%a %U' /srv/renamed", user="root").stdout == "640 root\n"
    # BC-118: a link is copied as a link, and what a later step removed is gone.
    assert run("readlink /srv/app/link; ls /etc/motd 2>&1 | grep -c 'No such'") == "/etc/motd\n1\n"
    # BC-120: what the image and the steps say reaches commands, in login shells too.
    assert run("echo $COLOUR $GREETING; tool") == "teal a b\ntool\n"


def logged(build, *args, **options):
    lines = []
    build(*args, on_build_logs=lambda entry: lines.append(entry), **options)
    return [entry.message for entry in lines], lines


def test_every_kind_of_step_and_a_second_build_from_the_cache(context, tiny, name, new):
    messages, entries = logged(Template.build, every_step(context, tiny), name)
    assert not [m for m in messages if m.startswith("CACHED [")]
    assert any(entry.level == "warn" and entry.message == "noise" for entry in entries)
    check_every_step(new(name))
    # Nothing is uploaded and nothing is run again; the new build is as good as the first.
    messages, _ = logged(Template.build, every_step(context, tiny), name)
    assert len([m for m in messages if m.startswith("CACHED [")]) == 8, messages
    assert not [m for m in messages if m.startswith("Uploaded")]
    check_every_step(new(name))
    # A changed file is a changed step, and those after it.
    (context / "one.txt").write_text("changed\n")
    messages, _ = logged(Template.build, every_step(context, tiny), name)
    assert len([m for m in messages if m.startswith("CACHED [")]) == 1, messages
    sandbox = new(name)
    assert sandbox.commands.run("cat /srv/renamed", user="root").stdout == "changed\n"


async def test_every_kind_of_step_async(context, tiny, name, new):
    template = (
        AsyncTemplate(file_context_path=str(context))
        .from_image(tiny)
        .copy("app", "app")
        .run_cmd("cat app/main.sh > built")
    )
    info = await AsyncTemplate.build(template, name)
    assert info.name == name
    sandbox = new(name)
    assert sandbox.commands.run("pwd; sh app/main.sh; cat built").stdout == "/home/user\nmain\necho main\n"


def test_a_failing_step_is_reported_at_its_line(tiny, name):
    template = Template().from_image(tiny)
    template = template.run_cmd("echo fine")
    template = template.run_cmd("echo the reason >&2; exit 3")  # THE LINE
    template = template.run_cmd("echo never")
    with pytest.raises(BuildException) as caught:
        Template.build(template, name)
    assert "exit status 3" in str(caught.value) and "the reason" in str(caught.value)
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any("THE LINE" in (line or "") for line in lines), lines
    # The template is what it was before: not there.
    assert not Template.exists(name)
    # What was done before the failure is not done again.
    fixed = Template().from_image(tiny).run_cmd("echo fine").run_cmd("echo mended")
    messages, _ = logged(Template.build, fixed, name)
    assert [m for m in messages if m.startswith("CACHED [")] == ["CACHED [1/2] RUN echo fine"]


def test_what_an_image_cannot_be_is_told(registry, tiny, name):
    for image, reason in [
        (f"{registry.address}/team/none:1", "none:1"),
        ("not a reference!", "reference"),
        (registry.push("team/device:1", [layer([("x", b"", 0o644)]), layer([("../up", b"", 0o644)])]), "layer 2"),
    ]:
        with pytest.raises(BuildException) as caught:
            Template.build(Template().from_image(image), name)
        assert reason in str(caught.value), caught.value


def test_start_and_ready_commands(tiny, name, new):
    template = (
        Template()
        .from_image(tiny)
        .run_cmd("mkdir /srv && echo served > /srv/index.html", user="root")
        .set_start_cmd("httpd -f -p 8000 -h /srv", "wget -q -O /dev/null http://127.0.0.1:8000/")
    )
    Template.build(template, name, cpu_count=1, memory_mb=512)
    sandbox = new(name)
    # It runs already: nothing is waited for.
    answer = httpx.get(
        f"{os.environ['SANDHOLD_URL']}/", headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    )
    assert answer.text == "served\n"
    info = sandbox.get_info()
    assert (info.cpu_count, info.memory_mb) == (1, 512)


def test_from_a_template_with_all_that_it_has(name, new):
    # BC-116: folders of the layers below are renamed, in a step and in a sandbox.
    rename = "mv /usr/lib/python3 /usr/lib/p3x && python3 -S -c 'import os; os.rename(\"/usr/lib/p3x\", \"/usr/lib/python3\")'"
    made = Template().from_template("base").run_cmd("echo made > ~/made").run_cmd(rename, user="root")
    Template.build(made, name)
    sandbox = new(name)
    assert sandbox.commands.run("cat ~/made; sudo id -un").stdout == "made\nroot\n"
    sandbox.commands.run(rename, user="root")
    assert sandbox.commands.run("ls /usr/lib/python3 | wc -l").stdout != "0\n"
    # What the SDK begins with when nothing is named is the same template here.
    messages, _ = logged(Template.build, Template().from_base_image().run_cmd("echo made > ~/made"), name)
    assert len([m for m in messages if m.startswith("CACHED [")]) == 1


def test_force_does_it_again(tiny, name, new):
    template = lambda: Template().from_image(tiny).run_cmd("head -c 8 /dev/urandom | md5sum > ~/random")
    read = lambda: new(name).commands.run("cat ~/random").stdout
    Template.build(template(), name)
    first = read()
    Template.build(template(), name)
    assert read() == first
    Template.build(template(), name, skip_cache=True)
    assert read() != first
    forced = Template().from_image(tiny).skip_cache().run_cmd("head -c 8 /dev/urandom | md5sum > ~/random")
    Template.build(forced, name)
    assert read() != first


def test_tags_and_aliases(tiny, name, new):
    one = Template.build(Template().from_image(tiny).run_cmd("echo one > ~/v"), f"{name}:v1")
    two = Template.build(Template().from_image(tiny).run_cmd("echo two > ~/v"), name, tags=["v2", "default"])
    assert one.template_id == two.template_id
    value = lambda reference: new(reference).commands.run("cat ~/v").stdout
    assert value(name) == "two\n"
    assert value(f"{name}:v1") == "one\n"
    assert value(f"{name}:v2") == "two\n"
    assigned = Template.assign_tags(f"{name}:v1", ["stable", "production"])
    assert assigned.build_id == one.build_id and assigned.tags == ["stable", "production"]
    tags = {tag.tag: tag.build_id for tag in Template.get_tags(name)}
    assert tags == {
        "default": two.build_id, "v1": one.build_id, "v2": two.build_id,
        "stable": one.build_id, "production": one.build_id,
    }
    assert value(f"{name}:stable") == "one\n"
    Template.assign_tags(f"{name}:v1", "default")
    assert value(name) == "one\n"
    Template.remove_tags(name, ["stable"])
    assert "stable" not in {tag.tag for tag in Template.get_tags(name)}
    assert Template.exists(name) and not Template.exists(name + "x")
    # A further name, by which it is called first.
    alias = "a" + uuid.uuid4().hex[:12]
    info = CubeTemplate.set_alias(name, alias)
    assert info.name == alias
    assert value(alias) == value(name)


def test_cube_builds_from_an_image(registry, name, new):
    image = registry.push(
        "team/served:1", [busybox_layer(), layer([("srv/index.html", b"cube\n", 0o644)])],
        Entrypoint=["httpd", "-f", "-h", "/srv"], Cmd=["-p", "9000"], Env=["PATH=/bin"], User="0",
    )
    job = CubeTemplate.build(
        image=image, name=name, cpu_count=500, memory_mb=256, envs={"COLOUR": "red"},
        args=["-p", "8080"], probe_port=8080, probe_path="/index.html",
    )
    status = eventually(
        lambda: (s := CubeTemplate.get_build_status(job.template_id, job.build_id)).status in ("ready", "error") and s,
        within=90,
    )
    assert status.status == "ready", status.error_message
    assert CubeTemplate.get_build_logs(job.template_id, job.build_id)["logs"]
    info = CubeTemplate.get(job.template_id)
    assert (info.name, info.status, info.memory_mb) == (name, "ready", 256)
    assert job.template_id in {t.template_id for t in CubeTemplate.list()}
    sandbox = new(name)
    assert sandbox.commands.run("echo $COLOUR; wget -q -O - http://127.0.0.1:8080/").stdout == "red\ncube\n"
    CubeTemplate.delete(job.template_id)
    assert not Template.exists(name)


def test_a_tenant_sees_only_its_own(tiny, name):
    # R-P8
    info = Template.build(Template().from_image(tiny).run_cmd("echo secret"), name)
    other = "u" + uuid.uuid4().hex[:12]
    key = json.loads(wire.cli("key", "create", "--namespace", other, "--env", "dev", "--json").stdout)["key"]
    get = lambda path: wire.api("GET", path, key=key)
    status = get(f"/templates/{info.template_id}/builds/{info.build_id}/status")
    assert (status.status_code, status.json()["error_code"]) == (404, "build_not_found")
    assert get(f"/templates/{name}/tags").status_code == 404
    # The same steps are done anew for it: nothing tells it that somebody did them before.
    made = Template.build_in_background(Template().from_image(tiny).run_cmd("echo secret"), name, api_key=key)
    done = lambda: (s := Template.get_build_status(made, api_key=key)).status.value in ("ready", "error") and s
    final = eventually(done, within=90)
    assert final.status.value == "ready", final.reason
    assert not [e.message for e in final.log_entries if e.message.startswith("CACHED [")]
    wire.api("DELETE", f"/templates/{name}", key=key)


def test_an_upload_needs_its_link_and_its_length(name):
    # R-P5, R-P8
    announced = wire.api("POST", "/v3/templates", json={"name": name}).json()
    path = f"/templates/{announced['templateID']}/files/"
    files = uuid.uuid4().hex * 2
    link = wire.api("GET", path + files)
    assert link.status_code == 201 and link.json()["present"] is False
    place = link.json()["url"]
    assert httpx.put(place.split("?")[0], content=b"x").status_code == 403
    assert httpx.put(place.replace("signature=", "signature=00"), content=b"x").status_code == 403
    chunked = httpx.put(place, content=iter([b"x"]))
    assert (chunked.status_code, chunked.json()["error_code"]) == (400, "invalid_request")
    assert httpx.put(place, content=b"x").status_code == 200
    assert wire.api("GET", path + files).json()["present"] is True
    assert wire.api("GET", path + "..%2Fetc%2Fpasswd").status_code == 400


def test_a_dockerfile_by_the_command_line(context, tiny, name, new):
    (context / "Dockerfile").write_text(f"""\
ARG BASE
FROM $BASE
ARG COLOUR=red
ENV P="a b"
WORKDIR /srv/app
COPY --chown=1234 app .
RUN echo $COLOUR > colour && \\
    id -u > who
USER 1234
EXPOSE 80
CMD ["sleep", "1000"]
""")
    options = [
        "--file", str(context / "Dockerfile"), "--name", name, "--build-arg", f"BASE={tiny}",
        "--build-arg", "COLOUR=teal", "--owner", "default", "--data-dir", os.environ["SANDHOLD_DATA_DIR"],
        "--agent", os.environ["SANDHOLD_AGENT"],
    ]
    made = wire.cli("template", "build", str(context), *options)
    assert "step 4 of 5: RUN" in made.stderr and "EXPOSE has no effect" in made.stderr, made.stderr
    sandbox = eventually(lambda: Template.exists(name)) and new(name)
    assert sandbox.commands.run('pwd; id -u; echo "$P"; cat colour who; stat -c %u main.sh').stdout == (
        "/srv/app\n1234\na b\nteal\n0\n1234\n"
    )
    again = wire.cli("template", "build", str(context), *options)
    assert "unchanged" in again.stdout, again.stdout
    # What cannot be carried out is told with its line.
    (context / "Dockerfile").write_text(f"FROM {tiny}\nRUN true\nVOLUME /data\n")
    refused = wire.cli("template", "build", str(context), *options, check=False)
    assert refused.returncode != 0 and "line 3" in refused.stderr, refused.stderr
    (context / "Dockerfile").write_text(f"FROM {tiny}\n\nRUN echo why; exit 4\n")
    failed = wire.cli("template", "build", str(context), *options, check=False)
    assert failed.returncode != 0 and "Dockerfile:3" in failed.stderr and "why" in failed.stderr, failed.stderr
