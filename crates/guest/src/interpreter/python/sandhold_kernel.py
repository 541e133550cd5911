"""Runs an IPython kernel for the Sandhold agent.

The agent starts this file in place of ``-m ipykernel_launcher`` and gives it the same arguments.
It adds what the agent's contract needs and what a plain kernel does not do:

* a side channel (a UNIX socket) on which a thread of its own reseeds every random number
  generator of the process and changes its environment, even while a cell runs;
* chart data of matplotlib figures and the data of pandas frames, as two more MIME types;
* a bound on the size of one result;
* a smaller process: debugger, completer and history database are left out.

Standard library only, apart from ipykernel itself: it has to run with whatever a template holds.
"""

import gc
import json
import os
import socket
import struct
import sys
import threading
import types

import sandhold_display
import sandhold_reseed

# The agent names the socket here; user code does not see the variable.
SIDE_CHANNEL_VARIABLE = "SANDHOLD_KERNEL_SIDE_CHANNEL"
# Modules to import before the kernel says that it is ready, separated by commas.
PRELOAD_VARIABLE = "SANDHOLD_KERNEL_PRELOAD"
# A request of the agent is entropy or an environment; a larger one is not from the agent.
REQUEST_BYTES_MAX = 16 << 20
# Optional parts of ipykernel and IPython that cost memory and serve only an interactive user.
LEFT_OUT = ("debugpy", "jedi")


def main():
    side_channel = os.environ.pop(SIDE_CHANNEL_VARIABLE, None)
    preload = os.environ.pop(PRELOAD_VARIABLE, "")
    app = start_application()
    import_modules(name for name in preload.split(",") if name)
    sandhold_display.install(app.shell)
    warm_up(app.shell, preload)
    if side_channel:
        listener = listen(side_channel)
        threading.Thread(
            target=serve, args=(listener,), name="sandhold-side-channel", daemon=True
        ).start()
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    # What is loaded now stays: neither collections nor the search for generators need to look
    # at it again, and its pages stay as they are in the image.
    gc.collect()
    gc.freeze()
    app.start()


def start_application():
    missing = [name for name in LEFT_OUT if name not in sys.modules]
    sys.modules.update(dict.fromkeys(missing))
    leave_out_terminal()
    try:
        from ipykernel.kernelapp import IPKernelApp
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False
        config.IPCompleter.use_jedi = False
        config.InteractiveShell.colors = "NoColor"
        config.IPKernelApp.log_level = "ERROR"
        app = IPKernelApp.instance(config=config)
        app.initialize(sys.argv[1:])
    finally:
        for name in missing:
            sys.modules.pop(name, None)
    return app


def leave_out_terminal():
    """IPython loads its terminal front end, 130 modules, for one function that needs a terminal."""

    def embed(*_, **__):
        raise RuntimeError("IPython.embed() needs a terminal")

    module = types.ModuleType("IPython.terminal.embed")
    module.embed = embed
    sys.modules[module.__name__] = module


def import_modules(names):
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # A template may preload what it does not hold.
            print(f"preload {name}: {error}", file=sys.__stderr__)


def warm_up(shell, preload):
    """Does once what the first result would wait for: fonts, renderers, lazy imports."""
    try:
        if "pandas" in preload:
            import pandas

            shell.display_formatter.format(pandas.DataFrame({"a": [1]}))
        if "matplotlib" in preload:
            import io

            from matplotlib.figure import Figure

            figure = Figure()
            axes = figure.subplots()
            axes.plot([1, 2], [1, 2], label="a")
            axes.legend()
            figure.savefig(io.BytesIO(), format="png", bbox_inches="tight")
            sandhold_display.figure_chart(figure)
    except Exception as error:  # Warmth is all that is lost.
        print(f"warming up: {error!r}", file=sys.__stderr__)


# The side channel: one request per connection, a length and JSON, answered by one byte.


def listen(path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(4)
    return listener


def serve(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                answer(connection)
            except Exception as error:
                print(f"side channel: {error!r}", file=sys.__stderr__)


def answer(connection):
    length = struct.unpack("<I", receive(connection, 4))[0]
    if length > REQUEST_BYTES_MAX:
        raise ValueError(f"a request of {length} bytes")
    request = json.loads(receive(connection, length))
    if "entropy" in request:
        sandhold_reseed.reseed(bytes.fromhex(request["entropy"]))
    for name in request.get("unset", ()):
        os.environ.pop(name, None)
    os.environ.update(request.get("set", {}))
    connection.sendall(b"\x01")


def receive(connection, length):
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            raise EOFError("the agent hung up")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main()
