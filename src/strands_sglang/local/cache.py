"""Directories that are built once and then reused by every clone on the machine.

An SGLang environment takes minutes and gigabytes, a converted model half a minute, so both live
outside the clone. Promises: a directory that `build_once` returns is complete (a marker is written
last, and whatever lacks it is built anew), and processes that want the same directory at the same
time build it once, the others waiting for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

HOME_VARIABLE = "STRANDS_SGLANG_HOME"
COMPLETE_MARKER = ".complete"

Progress = Callable[[str], None]  # takes one line for a person who waits; called from the thread that does the work


def say(line: str) -> None:
    """Print a progress line at once, also when standard output is a pipe."""
    print(line, flush=True)


def home() -> Path:
    """Return the directory that holds everything that is kept between runs.

    `$STRANDS_SGLANG_HOME` if set, else `strands-sglang` under `$XDG_CACHE_HOME`, else under `~/.cache`.
    """
    override = os.environ.get(HOME_VARIABLE)
    if override:
        return Path(override).expanduser().absolute()
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "strands-sglang"


def build_once(
    directory: Path,
    build: Callable[[Path], None],
    *,
    usable: Callable[[Path], bool] = lambda _: True,
    progress: Progress = say,
) -> Path:
    """Return `directory`, building it first if it is missing, half made or no longer usable.

    Args:
        directory: Where the result lives. Its name should change whenever what is built changes.
        build: Fills the empty directory that it is given; raises if it cannot.
        usable: Tells for a complete directory whether it still works.
        progress: Takes a line when another process is building the same directory.

    Returns:
        The complete directory.

    Raises:
        Exception: Whatever `build` raises; the half-made directory is removed before.
    """

    def complete() -> bool:
        return (directory / COMPLETE_MARKER).is_file() and usable(directory)

    if complete():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.parent / f"{directory.name}.lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that is building {directory}")
        held = lock.acquire()
    with held:
        if complete():
            return directory
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir()
        try:
            build(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        (directory / COMPLETE_MARKER).touch()
        return directory
