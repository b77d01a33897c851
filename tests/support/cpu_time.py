"""What work costs in CPU time, on a machine of any speed."""

import gc
import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time that some work takes."""
    gc.disable()  # as in timeit: a collection visits everything that other tests have loaded
    try:
        begin = time.process_time()
        work()
        return time.process_time() - begin
    finally:
        gc.enable()


def write_a_million_numbers() -> None:
    """Do what takes a tenth of a second on an ordinary machine."""
    for number in range(1_000_000):
        str(number)


def on_this_machine(seconds: float) -> float:
    """Return how much CPU time these seconds of an ordinary machine are here: more, if this one is slower."""
    return seconds * max(1.0, 10 * cpu_seconds(write_a_million_numbers))
