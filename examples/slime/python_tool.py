"""A tool that runs Python code which a model wrote: in a process of its own, with limits, and gone afterwards.

Every run has an empty temporary folder, a small environment, limits on CPU time, memory, file sizes and open files, a
limit on wall-clock time, and one on output. When it ends, however it ends, everything in its process group is killed.

This keeps mistakes of a model from harming a training run. It does not keep hostile code in: that can still read files,
use the network, and start processes that leave the group. Run training in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

from strands import tool

# Limits are set by the new process itself: code between fork and exec of a process with threads may deadlock.
BOOTSTRAP = """
import resource, runpy, sys
cpu_s, memory, file_size, files = map(int, sys.argv[1:5])
for name, limit in (
    ("RLIMIT_CPU", cpu_s), ("RLIMIT_AS", memory), ("RLIMIT_FSIZE", file_size), ("RLIMIT_NOFILE", files),
    ("RLIMIT_CORE", 0),
):
    resource.setrlimit(getattr(resource, name), (limit, limit))
sys.argv = ["main.py"]
runpy.run_path("main.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Limits:
    """What a run may use.

    Attributes:
        wall_s: Seconds.
        cpu_s: Seconds of CPU time.
        memory_bytes: Address space.
        file_bytes: Largest file.
        open_files: Open files.
        output_characters: Characters of output; what comes beyond ends the run.
    """

    wall_s: float = 30.0
    cpu_s: int = 30
    memory_bytes: int = 4 << 30
    file_bytes: int = 16 << 20
    open_files: int = 64
    output_characters: int = 8000


DEFAULT_LIMITS = Limits()
CONCURRENT_RUNS = max(2, os.cpu_count() or 2)
"""Runs at a time in one event loop; the others wait, and their wall-clock time does not begin before."""

_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


@tool
async def execute_python_code(code: str) -> str:
    """Execute Python code and return what it prints.

    Args:
        code: A whole program. Only what it prints is returned.
    """
    return await run_python(code)


async def run_python(code: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """Run a program and return its output, errors included, with a last line on anything unusual.

    Args:
        code: The program.
        limits: What it may use.
    """
    loop = asyncio.get_running_loop()
    slots = _slots.setdefault(loop, asyncio.Semaphore(CONCURRENT_RUNS))
    async with slots:
        with tempfile.TemporaryDirectory(prefix="python-tool-", ignore_cleanup_errors=True) as folder:
            (Path(folder) / "main.py").write_text(code, encoding="utf-8", errors="replace")
            return await _run(folder, limits)


async def _run(folder: str, limits: Limits) -> str:
    given = [limits.cpu_s, limits.memory_bytes, limits.file_bytes, limits.open_files]
    # A pipe of our own: asyncio's would have `wait` wait for children of the program that hold it open.
    reads, writes = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-u", "-X", "utf8", "-c", BOOTSTRAP, *map(str, given)),
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writes,
            stderr=writes,
            start_new_session=True,  # a process group of its own
        )
    except BaseException:
        os.close(reads)
        raise
    finally:
        os.close(writes)
    output = bytearray()
    reading = asyncio.ensure_future(_read(reads, output, 4 * limits.output_characters))
    waiting = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({reading, waiting}, timeout=limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and not reading.result():  # it has closed its output, and may still run
            await asyncio.wait({waiting}, timeout=limits.wall_s)
        ended = waiting.done()
    finally:
        _kill_group(process.pid)
        await waiting
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reading, timeout=1.0)
    return _described(bytes(output), ended, process.returncode, limits, folder)


async def _read(pipe: int, output: bytearray, most: int) -> bool:
    """Collect output; True if there was more than there may be."""
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb"))
    try:
        while len(output) <= most:
            chunk = await stream.read(65536)
            if not chunk:
                return False
            output += chunk
        return True
    finally:
        transport.close()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _described(output: bytes, ended: bool, status: int | None, limits: Limits, folder: str) -> str:
    text = output.decode("utf-8", errors="replace").replace(f"{folder}/", "")
    if len(text) > limits.output_characters:
        half = limits.output_characters // 2
        return f"{text[:half]}\n[...]\n{text[-half:]}\n[the output was cut: print less]"
    if not ended:
        return f"{text}\n[stopped after {limits.wall_s:g} seconds]".lstrip()
    if status is not None and status < 0:
        return f"{text}\n[ended by {signal.Signals(-status).name}: a limit on time, memory or files]".lstrip()
    return text if text.strip() else "[nothing was printed: print what you want to see]"
