"""What the commands `strands-sglang` and `strands-env` print: results, messages, tables of facts, progress.

Results go to standard output, everything else to standard error. Texts fit into 80 columns. Colors and progress appear
on a terminal only; `NO_COLOR` switches colors off (no-color.org), `FORCE_COLOR` on (force-color.org).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

WIDTH = 80
FAILED = 1
NO_READER = 141
"""What a shell reports for a command that SIGPIPE ended."""

PROGRESS_AFTER = 2.0
"""Seconds of silence before a wait is shown."""

_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}
_COLORED = re.compile(r"(\n|\x1b\[(?:0|1|3[123])m)")
_PLAIN = re.compile(r"(\n)")
"""What of a text a terminal interprets: ends of lines, and where there are colors, those of `paint`."""


def say(command: str, *lines: str, code: Any = 0) -> Any:
    """Print lines of a command's result and flush; return the exit code.

    Of the lines, a terminal interprets the colors of `paint` only.

    Args:
        command: Name of the command, for an error.
        *lines: The lines, without their newlines.
        code: Exit code if everything could be written.
    """
    kept = _COLORED if _has_colors() else _PLAIN
    error = _print("".join(f"{_shown(line, kept)}\n" for line in lines), sys.stdout)
    if error is None:
        return code
    if isinstance(error, BrokenPipeError):
        return NO_READER
    tell(f"{command}: standard output: {error.strerror or error}")
    return FAILED


def tell(line: str) -> None:
    """Print a line on standard error, if anything reads it; without the credentials of addresses in it."""
    _print(f"{_shown(without_credentials(line))}\n", sys.stderr)


def accept_any_text() -> None:
    """Let standard output write out what its encoding lacks, as standard error does."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not a file, or a closed one
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def log(level: int) -> None:
    """Log to standard error, in text that no terminal interprets."""
    handler = logging.StreamHandler()
    handler.setFormatter(_VisibleFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _shown(super().format(record))


def paint(text: str, color: str) -> str:
    """Color a text for standard output.

    Args:
        text: The text.
        color: "bold", "red", "green" or "yellow".

    Returns:
        The text itself if standard output is not a terminal, or `NO_COLOR` is set; colored wherever `FORCE_COLOR` is.
    """
    return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if _has_colors() else text


def _has_colors() -> bool:
    return bool(os.environ.get("FORCE_COLOR")) or not (
        os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not _is_terminal(sys.stdout)
    )


def without_credentials(text: str) -> str:
    """A text whose URLs show no user information: `http://host` instead of `http://user:password@host`."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", text) if "://" in text else text


def visible(text: str) -> str:
    """Return a text in which nothing is interpreted by a terminal: control characters are written out.

    Args:
        text: Any text, also of a hostile model.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character == " " or unicodedata.category(character)[0] not in "CZ"
        else _NAMES.get(character) or f"\\u{{{ord(character):x}}}"
        for character in text
    )


def _shown(text: str, kept: re.Pattern[str] = _PLAIN) -> str:
    return "".join(part if number % 2 else visible(part) for number, part in enumerate(kept.split(text)))


_NAMES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\N{NO-BREAK SPACE}": "\\u{a0}"}


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, which takes an "s" for all numbers but 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def fact_lines(facts: Iterable[tuple[str, object]], *, column: int) -> Iterator[str]:
    """Names and values in two columns; long values continue in the second one.

    Args:
        facts: The names and their values.
        column: Width of the first column.
    """
    for name, value in facts:
        lines = textwrap.wrap(
            str(value),
            WIDTH,
            initial_indent=f"{name:<{column}}",
            subsequent_indent=" " * column,
            break_long_words=False,  # paths and addresses stay whole
            break_on_hyphens=False,
        )
        yield from lines or [name]


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal what is being waited for, with the seconds, if it takes long.

    Args:
        what: What the program does, such as "loading the tokenizer".
    """
    if not _is_terminal(sys.stderr):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(visible(without_credentials(what)), done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(what: str, done: threading.Event) -> None:
    began = time.monotonic()
    pause = PROGRESS_AFTER
    while not done.wait(pause):
        _print(f"\r{what[: WIDTH - 20]} ... {time.monotonic() - began:.0f} s", sys.stderr)
        pause = 1.0
    if pause != PROGRESS_AFTER:
        _print(f"\r{' ' * (WIDTH - 1)}\r" if os.environ.get("TERM") == "dumb" else "\r\x1b[K", sys.stderr)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _print(text: str, stream: TextIO | None) -> OSError | None:
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        # What the stream still holds goes nowhere; else the interpreter writes it when it ends.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]
        return error
    return None
