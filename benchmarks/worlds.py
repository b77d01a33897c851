"""What worlds cost: start, programs, files, snapshots and forks, next to a bare process.

python benchmarks/worlds.py [--rounds 100]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from strands_env.sandbox import PythonSandbox, World

DEPTH = 30
AT_ONCE = 50


async def timed(what: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Return the milliseconds of a call, and its result."""
    began = time.perf_counter()
    result = await what()
    return (time.perf_counter() - began) * 1e3, result


async def measured(rounds: int) -> dict[str, list[float]]:
    """Measure each step several times."""
    figures: dict[str, list[float]] = {}

    async def take(name: str, what: Callable[[], Awaitable[Any]]) -> Any:
        milliseconds, result = await timed(what)
        figures.setdefault(name, []).append(milliseconds)
        return result

    command = [sys.executable, "-E", "-s", "-B", "-c", "print(1)"]
    bare = functools.partial(asyncio.to_thread, subprocess.run, command, capture_output=True)
    content = bytes(64 << 10)
    sandbox = PythonSandbox()
    for _ in range(rounds):
        world = await take("start", World().start)
        await take("execute true", functools.partial(world.execute, ["true"]))
        await take("execute python3 -c pass", functools.partial(world.execute, ["python3", "-c", "pass"]))
        await take("write 64 KiB", functools.partial(world.write, "/file", content))
        await take("read 64 KiB", functools.partial(world.read, "/file"))
        (fork,) = await take("fork", functools.partial(world.fork, 1))
        await take("stop", world.stop)
        await fork.stop()
        await take("a Python program, with its world", functools.partial(sandbox.run, "print(1)"))
        await take("the same as a bare process", bare)
    deep = await World().start()
    for number in range(DEPTH):
        await deep.execute(f"echo > /tmp/{number}")
        await take("snapshot", deep.snapshot)
    for _ in range(10):
        (fork,) = await take(f"fork at depth {DEPTH}", functools.partial(deep.fork, 1))
        await fork.stop()
    await deep.stop()
    worlds = [World() for _ in range(AT_ONCE)]
    await take(f"{AT_ONCE} starts at once", lambda: asyncio.gather(*(world.start() for world in worlds)))
    await asyncio.gather(*(world.stop() for world in worlds))
    return figures


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    figures = asyncio.run(measured(parser.parse_args().rounds))
    for name, values in figures.items():
        print(f"{name:36} {statistics.median(values):8.1f} ms   min {min(values):6.1f}   n {len(values)}")


if __name__ == "__main__":
    main()
