"""The process in which one contender runs: it opens cases, runs rounds and reports what they cost.

    python benchmarks/worker.py SUBJECT CONTENDER

`harness.py` starts one per contender, each with the Python of its environment. A subject is a module in this folder,
a contender one of its functions: an asynchronous context manager that takes a case and yields the round to repeat.
Commands come as JSON lines on the standard input, measurements leave as JSON lines on the standard output. Subjects
import at the top what the standard library and this module have, since the environments differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import selectors
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any


class WatchingSelector(selectors.DefaultSelector):
    """Notes the longest time for which the event loop did not look for events, as nothing else could run.

    Other programs stretch the time on the clock, so the CPU time is noted, too, of all threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        """Begin to measure."""
        self.longest_s = self.longest_cpu_s = 0.0
        self._left = time.perf_counter(), time.process_time()

    def look(self) -> None:
        """End one iteration of the loop."""
        left, left_cpu = self._left
        self.longest_s = max(self.longest_s, time.perf_counter() - left)
        self.longest_cpu_s = max(self.longest_cpu_s, time.process_time() - left_cpu)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.look()
        events = super().select(timeout)
        self._left = time.perf_counter(), time.process_time()
        return events


SELECTOR = WatchingSelector()


async def cost_of(run: Callable[[], Awaitable[Any]], count: int) -> dict[str, float]:
    """Return CPU milliseconds of all threads for each of `count` operations, the seconds, and the largest stall."""
    gc.unfreeze()
    gc.collect()  # what the previous round left behind is not a cost of this one
    gc.freeze()  # a full collection costs as much as the rest of the program has loaded, and open connections
    SELECTOR.restart()
    began, cpu = time.perf_counter(), time.process_time()
    await run()
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
    SELECTOR.look()
    stalls = {"stall_ms": 1e3 * SELECTOR.longest_s, "stall_cpu_ms": 1e3 * SELECTOR.longest_cpu_s}
    return {"cpu_ms": 1e3 * cpu / count, "seconds": seconds} | stalls


async def main(subject: str, contender: str, report: Callable[[Any], None]) -> None:
    """Follow the commands until the standard input ends."""
    enter = getattr(importlib.import_module(subject), contender)
    async with contextlib.AsyncExitStack() as case:
        round_ = None
        for line in sys.stdin:
            command = json.loads(line)
            try:
                if "open" in command:
                    await case.aclose()
                    round_ = await case.enter_async_context(enter(command["open"]))
                    report({})
                else:
                    report(await round_())
            except Exception:
                report({"error": traceback.format_exc()})


def start(subject: str, contender: str) -> None:
    """Serve as the process of one contender."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a contender prints must not be taken for a measurement
    logging.disable(logging.WARNING)

    def report(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    asyncio.SelectorEventLoop(SELECTOR).run_until_complete(main(subject, contender, report))


if __name__ == "__main__":
    import worker  # as subjects import it, for it has one selector

    worker.start(*sys.argv[1:])
