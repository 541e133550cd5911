"""What comes out of one image differs in all that must differ (R-T6, BC-096)."""

from concurrent.futures import ThreadPoolExecutor

from e2b_code_interpreter import Sandbox as Interpreter
import wire

COUNT = 10

DRAW = """
import os, random, ssl, uuid, secrets, json, subprocess
import numpy as np
print(json.dumps({
    'random': random.random(),
    'numpy': float(np.random.rand()),
    'numpy generator': float(np.random.default_rng().random()),
    'uuid': str(uuid.uuid4()),
    'secrets': secrets.token_hex(8),
    'openssl': ssl.RAND_bytes(8).hex(),
    'urandom': os.urandom(8).hex(),
    'openssl program': subprocess.run(['sh', '-c', 'openssl rand -hex 8 || uuidgen || cat /proc/sys/kernel/random/uuid'], capture_output=True, text=True).stdout,
    'hostname': os.uname().nodename,
    'machine id': open('/etc/machine-id').read(),
}))
"""


def test_ten_of_one_image_draw_ten_different_values():
    # BC-096
    import json

    with ThreadPoolExecutor(5) as pool:
        sandboxes = list(pool.map(lambda _: Interpreter.create(timeout=300), range(COUNT)))
    try:
        def draw(sandbox):
            execution = sandbox.run_code(DRAW, timeout=60)
            assert execution.error is None, execution.error
            return json.loads("".join(execution.logs.stdout))

        with ThreadPoolExecutor(5) as pool:
            drawn = list(pool.map(draw, sandboxes))
        for name in drawn[0]:
            assert len({d[name] for d in drawn}) == COUNT, name
        assert len({wire.token(s) for s in sandboxes}) == COUNT
        assert len({s.sandbox_id for s in sandboxes}) == COUNT
        for sandbox, values in zip(sandboxes, drawn):
            assert len(values["machine id"].strip()) == 32
            assert sandbox.commands.run("hostname").stdout.strip() == values["hostname"]
    finally:
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda s: s.kill(), sandboxes))


def test_bc_097_the_clock_is_right_from_the_first_command(new):
    import time

    sandbox = new("code-interpreter-v1", cls=Interpreter)
    before = time.time()
    inside = float(sandbox.commands.run("date +%s.%N").stdout)
    after = time.time()
    assert before - 0.5 < inside < after + 0.5
    before = time.time()
    inside = float(sandbox.run_code("import time; time.time()").text)
    assert before - 0.5 < inside < time.time() + 0.5


def test_bc_094_the_first_request_after_a_create_is_answered(new):
    for _ in range(5):
        sandbox = new("code-interpreter-v1", cls=Interpreter)
        assert sandbox.run_code("6*7", timeout=15).text == "42"
        sandbox.kill()


def test_tokens_of_one_do_not_open_another(new):
    import httpx

    mine, other = new(), new()
    headers = {**wire.agent_headers(other), "X-Access-Token": wire.token(mine)}
    assert httpx.get(wire.URL + "/files?path=/etc/hostname", headers=headers).status_code == 401
    del headers["X-Access-Token"]
    assert httpx.get(wire.URL + "/files?path=/etc/hostname", headers=headers).status_code == 401
