"""Runs an agent's code in a sandbox, with the `e2b-code-interpreter` SDK as it is published.

Prints what is run, what comes back, and how long each step takes.
"""

import base64
import pathlib
import time

from e2b_code_interpreter import Sandbox

PLOT = pathlib.Path("demo-plot.png")

FIRST = """
import numpy as np
rolls = np.random.default_rng(7).integers(1, 7, size=(10_000, 2)).sum(axis=1)
print(f"rolled two dice {len(rolls)} times")
""".strip()

SECOND = """
print("the variable is still there:", len(rolls))
float(rolls.mean())
""".strip()

CHART = """
import matplotlib.pyplot as plt
totals, counts = np.unique(rolls, return_counts=True)
plt.figure(figsize=(7, 4))
plt.bar([str(t) for t in totals], counts)
plt.title("Sum of two dice")
plt.xlabel("sum")
plt.ylabel("times")
plt.show()
""".strip()


def step(title, action):
    """Runs `action`, says how long it took, and returns what it returned."""
    print(f"\n── {title}")
    started = time.perf_counter()
    result = action()
    print(f"   {(time.perf_counter() - started) * 1000:.0f} ms")
    return result


def run(sandbox, title, code):
    print(f"\n── {title}")
    for line in code.splitlines():
        print(f"   > {line}")
    started = time.perf_counter()
    execution = sandbox.run_code(code)
    took = (time.perf_counter() - started) * 1000
    if execution.error:
        raise SystemExit(f"   {execution.error.name}: {execution.error.value}\n{execution.error.traceback}")
    for line in execution.logs.stdout:
        print(f"   {line.rstrip()}")
    if execution.text:
        print(f"   = {execution.text}")
    print(f"   {took:.0f} ms")
    return execution


def main():
    sandbox = step("create a sandbox", Sandbox.create)
    try:
        print(f"   {sandbox.sandbox_id}")
        run(sandbox, "run Python", FIRST)
        run(sandbox, "run more Python in the same session", SECOND)
        execution = run(sandbox, "draw a plot", CHART)
        result = next(r for r in execution.results if r.png)
        PLOT.write_bytes(base64.b64decode(result.png))
        print(f"   saved as {PLOT}; as data: a {result.chart.type.value} chart "
              f"with {len(result.chart.elements)} elements")
        kernel = step("run a shell command", lambda: sandbox.commands.run("uname -sr; id -un"))
        print("   " + kernel.stdout.strip().replace("\n", "\n   "))
    finally:
        step("kill the sandbox", sandbox.kill)


if __name__ == "__main__":
    main()
