"""A program that starts like an SGLang server and has children like one, and the pieces to run it in SGLang's place.

It imitates the process that a launcher starts, watches and stops, never the server: it answers only health checks.

As a program it takes SGLang's command line and reads FAKE_SGLANG_PIDS (a file for its own and its child's
process id) and FAKE_SGLANG_MODE: "healthy" (answers 503 twice, then 200), "dies" (prints a reason and exits
with code 3) or "never" (always 503).
"""

import os
import signal
import stat
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

# The child ignores the signal of a careless stop, and reports when it is ready to.
STUBBORN_CHILD = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def write_interpreter(path):
    """Write a program that, started as `python -m sglang.launch_server ...`, is the fake server."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_model(folder):
    """Write a folder that passes for a model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def main():
    mode = os.environ.get("FAKE_SGLANG_MODE", "healthy")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    child = subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    pids = Path(os.environ["FAKE_SGLANG_PIDS"])
    pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    pids.with_suffix(".new").rename(pids)
    print("loading weights", flush=True)
    if mode == "dies":
        print("out of memory", flush=True)
        sys.exit(3)
    refusals = 2

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802 - the name is the base class's
            nonlocal refusals
            refusals -= 1
            self.send_response(200 if refusals < 0 and mode == "healthy" else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
