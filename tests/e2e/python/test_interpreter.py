"""The code interpreter through its SDK, and the field cases about kernels (B)."""

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import wire
from conftest import eventually
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox as Interpreter
from e2b_code_interpreter.charts import ChartType

KERNEL_PORT = 49999


@pytest.fixture(scope="module")
def kernel():
    """One sandbox for the cells that leave no trace."""
    sandbox = Interpreter.create(timeout=900)
    yield sandbox
    sandbox.kill()


def execute(sandbox, code, **fields):
    """A cell through the raw protocol: every line is JSON and has a type."""
    body = {"code": code, "context_id": None, "language": None, "env_vars": None, **fields}
    headers = wire.agent_headers(sandbox, port=KERNEL_PORT)
    answer = httpx.post(wire.URL + "/execute", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.split("\n") if line]
    assert all(line["type"] for line in lines)
    return lines


def test_state_stays_between_calls(kernel):
    kernel.run_code("x = 6")
    execution = kernel.run_code("x * 7")
    assert execution.text == "42"
    assert execution.results[0].is_main_result
    second = kernel.run_code("x")
    assert second.execution_count == execution.execution_count + 1


def test_output_streams_and_is_kept(kernel):
    out, err, results = [], [], []
    execution = kernel.run_code(
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\n'c'",
        on_stdout=lambda m: out.append(m.line),
        on_stderr=lambda m: err.append(m.line),
        on_result=results.append,
    )
    assert "".join(out) == "".join(execution.logs.stdout) == "a\n"
    assert "".join(err) == "".join(execution.logs.stderr) == "b\n"
    assert len(results) == 1 and execution.text == "c"


def test_an_error_is_a_value(kernel):
    seen = []
    execution = kernel.run_code("def f(): 1/0\nf()", on_error=seen.append)
    assert execution.error.name == "ZeroDivisionError"
    assert execution.error.value == "division by zero"
    assert "f()" in execution.error.traceback
    assert len(seen) == 1


def test_rich_results(kernel):
    code = """
from IPython.display import display, HTML, Markdown, SVG, Latex, JSON, Javascript
display(HTML('<b>h</b>')); display(Markdown('*m*')); display(Latex('$l$'))
display(SVG('<svg xmlns="http://www.w3.org/2000/svg"></svg>'))
display(JSON({'j': 1})); display(Javascript('1'))
"""
    execution = kernel.run_code(code)
    assert execution.error is None
    assert [r.html for r in execution.results if r.html] == ["<b>h</b>"]
    assert [r.markdown for r in execution.results if r.markdown] == ["*m*"]
    assert [r.latex for r in execution.results if r.latex] == ["$l$"]
    assert any(r.svg for r in execution.results)
    assert [r.json for r in execution.results if r.json] == [{"j": 1}]
    assert [r.javascript for r in execution.results if r.javascript] == ["1"]


def test_a_data_frame_is_a_table(kernel):
    execution = kernel.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2]})")
    assert "<table" in execution.results[0].html


CHARTS = {
    ChartType.LINE: "plt.plot([1, 2, 3], [3, 1, 2], label='l')",
    ChartType.SCATTER: "plt.scatter([1, 2, 3], [3, 1, 2], label='s')",
    ChartType.BAR: "plt.bar(['a', 'b'], [1, 2])",
    ChartType.PIE: "plt.pie([1, 2, 3], labels=['a', 'b', 'c'])",
    ChartType.BOX_AND_WHISKER: "plt.boxplot([[1, 2, 3], [2, 3, 4]])",
}


@pytest.mark.parametrize("kind", CHARTS)
def test_charts_come_as_data(kernel, kind):
    code = f"import matplotlib.pyplot as plt\nplt.figure()\nplt.title('T')\n{CHARTS[kind]}\nplt.show()"
    execution = kernel.run_code(code)
    assert execution.error is None
    result = next(r for r in execution.results if r.png)
    assert base64.b64decode(result.png).startswith(b"\x89PNG")
    assert result.chart.type == kind
    assert result.chart.title == "T"
    assert result.chart.elements


def test_several_plots_are_one_superchart(kernel):
    code = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(1, 2)
axes[0].plot([1, 2], [1, 2]); axes[1].bar(['a'], [1])
plt.show()
"""
    result = next(r for r in kernel.run_code(code).results if r.png)
    assert result.chart.type == ChartType.SUPERCHART
    assert [c.type for c in result.chart.elements] == [ChartType.LINE, ChartType.BAR]


def test_environment_of_one_call(new):
    sandbox = new("code-interpreter-v1", cls=Interpreter, envs={"FOR_ALL": "a"})
    code = "import os; (os.environ.get('FOR_ALL'), os.environ.get('ONCE'))"
    assert sandbox.run_code(code, envs={"ONCE": "b"}).text == "('a', 'b')"
    assert sandbox.run_code(code).text == "('a', None)"


def test_contexts_are_apart(interpreter):
    context = interpreter.create_code_context(cwd="/tmp")
    assert context.cwd == "/tmp" and context.language == "python"
    interpreter.run_code("mark = 1", context=context)
    assert interpreter.run_code("mark", context=context).text == "1"
    assert interpreter.run_code("mark").error.name == "NameError"
    assert interpreter.run_code("import os; os.getcwd()", context=context).text == "/tmp"
    assert context.id in {c.id for c in interpreter.list_code_contexts()}
    interpreter.restart_code_context(context)
    assert interpreter.run_code("mark", context=context).error.name == "NameError"
    interpreter.remove_code_context(context)
    assert context.id not in {c.id for c in interpreter.list_code_contexts()}
    with pytest.raises(NotFoundException):
        interpreter.run_code("1", context=context)


@pytest.mark.parametrize(
    ("language", "code", "text"),
    [
        ("javascript", "const a = 20; a + 22", "42"),
        ("js", "[1, 2].map(x => x * 2).join()", "2,4"),
        ("typescript", "const n: number = 41; n + 1", "42"),
        ("ts", "interface A { x: number }\nconst a: A = { x: 42 }; a.x", "42"),
    ],
)
def test_other_languages(kernel, language, code, text):
    execution = kernel.run_code(code, language=language)
    assert execution.error is None, execution.error
    assert text in (execution.text or "".join(execution.logs.stdout))


def test_bash_keeps_its_state(kernel):
    kernel.run_code("COLOUR=teal; cd /tmp", language="bash")
    execution = kernel.run_code("echo $COLOUR; pwd", language="bash")
    assert "".join(execution.logs.stdout).split() == ["teal", "/tmp"]


def test_a_language_without_a_kernel_is_told(kernel):
    for language in ("r", "java", "cobol"):
        with pytest.raises(SandboxException) as refused:
            kernel.run_code("1", language=language)
        assert language in str(refused.value).lower()
    assert kernel.run_code("6 * 7").text == "42"


def test_language_and_context_together_are_refused(kernel):
    body = {"code": "1", "context_id": "default", "language": "python", "env_vars": None}
    headers = wire.agent_headers(kernel, port=KERNEL_PORT)
    assert httpx.post(wire.URL + "/execute", json=body, headers=headers).status_code == 400


def test_a_client_that_gives_up_interrupts_its_cell(interpreter):
    with pytest.raises(TimeoutException):
        interpreter.run_code("import time\nfor _ in range(600): time.sleep(0.1)", timeout=1)
    assert interpreter.run_code("'free again'", timeout=30).text == "free again"


def test_bc_030_a_bar_chart_has_picture_and_data(kernel):
    code = """
import matplotlib.pyplot as plt
plt.figure(figsize=(7, 4)); plt.bar(['w', 'x', 'y'], [3, 1, 2], label='n')
plt.legend(); plt.tight_layout(); plt.show()
"""
    result = kernel.run_code(code).results[0]
    assert result.png
    assert result.chart.type == ChartType.BAR
    assert [e.label for e in result.chart.elements] == ["w", "x", "y"]
    assert [float(e.value) for e in result.chart.elements] == [3, 1, 2]


ERRORS = [
    ("x_undefined <- 2", "NameError"),
    ("def a(): 1/0\ndef b(): a()\ndef c(): b()\nc()", "ZeroDivisionError"),
    ("raise KeyError('ключ')", "KeyError"),
    ("raise SystemExit(3)", "SystemExit"),
    ("class E(Exception):\n  def __str__(self): raise ValueError('no')\nraise E()", "E"),
]


@pytest.mark.parametrize(("code", "name"), ERRORS)
def test_bc_033_errors_have_a_name_and_the_next_cell_works(kernel, code, name):
    execution = kernel.run_code(code)
    assert execution.error.name == name
    assert execution.error.traceback
    assert kernel.run_code("1+1").text == "2"


def test_bc_035_asyncio_in_cells(interpreter):
    run = interpreter.run_code
    assert run("import asyncio\nawait asyncio.sleep(0.1)").error is None
    assert run("async def f(): return 1\nasyncio.run(f())").error.name == "RuntimeError"
    threaded = "import threading\nr = []\nt = threading.Thread(target=lambda: r.append(asyncio.run(f())))\nt.start(); t.join(); r"
    assert run(threaded).text == "[1]"
    left = "async def tick():\n  while True:\n    print('tick'); await asyncio.sleep(0.2)\ntask = asyncio.create_task(tick())"
    assert run(left).error is None
    started = time.monotonic()
    assert run("6*7").text == "42"
    assert time.monotonic() - started < 15
    run("task.cancel()")


def test_bc_037_late_prints_of_a_thread_break_nothing(interpreter):
    code = "import threading, time\ndef late():\n  for i in range(15):\n    print('late', i); time.sleep(0.2)\nthreading.Thread(target=late).start()"
    execute(interpreter, code)
    lines = execute(interpreter, "print('B')")
    text = "".join(line["text"] for line in lines if line["type"] == "stdout")
    assert "B\n" in text
    assert lines[-1]["type"] == "end_of_execution"


@pytest.mark.parametrize(
    "code",
    ["input('who? ')", "import getpass; getpass.getpass()", "import sys; repr(sys.stdin.read())", "breakpoint()"],
)
def test_bc_041_asking_for_input_never_waits(kernel, code):
    started = time.monotonic()
    kernel.run_code(code, timeout=60)
    assert time.monotonic() - started < 20
    assert kernel.run_code("'alive'").text == "alive"


POOL = """
import multiprocessing as m
from multiprocessing import shared_memory
m.Semaphore(2)
total = 0
for method in ('fork', 'spawn', 'forkserver'):
    with m.get_context(method).Pool(4) as pool:
        total = sum(pool.map(abs, range(-500, 0)))
memory = shared_memory.SharedMemory(create=True, size=90 << 20)
memory.buf[-1] = 7
memory.close(); memory.unlink()
total
"""


def test_bc_042_multiprocessing(interpreter):
    assert interpreter.run_code(POOL, timeout=150).text == "125250"
    # What the last pools still hold goes with them.
    interpreter.run_code("del pool; import gc; gc.collect()")
    left = lambda: interpreter.commands.run("ls /dev/shm | wc -l").stdout.strip()
    eventually(lambda: left() == "0")


def test_bc_044_contexts_pile_up_to_a_limit(interpreter):
    made, refused = [], None
    for _ in range(60):
        try:
            made.append(interpreter.create_code_context())
        except SandboxException as error:
            refused = error
            break
        health = httpx.get(
            wire.URL + "/health", headers=wire.agent_headers(interpreter, port=KERNEL_PORT), timeout=10
        )
        assert health.status_code == 200
    assert refused is not None or len(made) == 60
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda c: interpreter.run_code("6*7", context=c).text, made)
        assert set(answers) <= {"42"}
    for context in made:
        interpreter.remove_code_context(context)
    kernels = "pgrep -fc ipykernel || true"
    eventually(lambda: int(interpreter.commands.run(kernels).stdout) <= 3, within=30)
    assert interpreter.run_code("6*7").text == "42"


def test_bc_045_two_cells_of_one_context_take_turns(kernel):
    cell = "import time\nfor i in range(50): print('{0}', i); time.sleep(.02)"
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(lambda letter: kernel.run_code(cell.format(letter)), "AB")
    assert "B" not in "".join(a.logs.stdout) and "A" not in "".join(b.logs.stdout)
    assert len("".join(a.logs.stdout).split("\n")) == 51
    assert abs(a.execution_count - b.execution_count) == 1


def test_bc_047_the_first_cells_need_no_network(new):
    sandbox = new("code-interpreter-v1", cls=Interpreter, allow_internet_access=False)
    cells = [("python", "6*7"), ("javascript", "6*7"), ("bash", "echo 42")]
    with ThreadPoolExecutor(3) as pool:
        executions = list(pool.map(lambda c: sandbox.run_code(c[1], language=c[0], timeout=60), cells))
    for execution in executions:
        assert execution.error is None
        assert "42" in (execution.text or "".join(execution.logs.stdout))


def test_bc_048_a_giant_result_does_not_kill_the_server(interpreter):
    for code in (
        "'z'*60_000_000",
        "{i: 'é'*50 for i in range(300000)}",
        "import os\nfrom IPython.display import Image, display\n"
        "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n' + os.urandom(30_000_000), format='png'))",
    ):
        try:
            execution = interpreter.run_code(code, timeout=120)
            assert execution.error is None or execution.error.name
        except SandboxException as limit:
            assert str(limit)
        assert interpreter.run_code("6*7", timeout=60).text == "42"
