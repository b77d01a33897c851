"""What the commands `strands-sglang` and `strands-env` print: results, messages, tables of facts, progress.

Results go to standard output, everything else to standard error. Texts fit the terminal, and into 80 columns elsewhere.
Colors and progress appear on a terminal only; `NO_COLOR` switches colors off (no-color.org), `FORCE_COLOR` on
(force-color.org).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

FAILED = 1
WRONG_USAGE = 2
NO_READER = 141
"""What a shell reports for a command that SIGPIPE ended."""

PROGRESS_AFTER = 2.0
"""Seconds of silence before a wait is shown."""

_CODES = {"bold": "1", "underline": "4", "red": "31", "green": "32", "yellow": "33"}
_CODES |= {f"shade {number}": f"97;48;5;{code}" for number, code in enumerate((22, 58, 94, 130, 124))}
_COLORED = re.compile(r"(\n|\x1b\[(?:0|1|4|3[123]|97;48;5;[0-9]+)m)")
_PLAIN = re.compile(r"(\n)")
"""What of a text a terminal interprets: ends of lines, and where there are colors, those of `paint`."""


def command_parser(
    prog: str, description: str, epilog: str
) -> tuple[argparse.ArgumentParser, Callable[..., argparse.ArgumentParser]]:
    """Return the parser of a command, and the function that adds a subcommand to it.

    The function takes the subcommand's name, the function that runs it, the usage after the name, and the further
    arguments of `add_parser`. `run` in what is parsed is that function; the bare command prints its help.

    Args:
        prog: Name of the command.
        description: What it is for.
        epilog: An example, and where else to look.
    """
    from . import __version__

    raw = argparse.RawDescriptionHelpFormatter
    epilog += f"\n\n`{prog} COMMAND --help` describes a command."
    usage = f"{prog} COMMAND [OPTIONS]"
    parser = argparse.ArgumentParser(prog, usage, description, epilog, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    parser.set_defaults(run=lambda arguments: say(prog, *parser.format_help().splitlines(), code=WRONG_USAGE))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog=prog)

    def add(name: str, run: Callable[..., int], usage: str = "", **described: Any) -> argparse.ArgumentParser:
        usage = f"{prog} {name} {usage}".rstrip()
        command = commands.add_parser(name, usage=usage, formatter_class=raw, **described)
        command.set_defaults(run=run)
        return command

    return parser, add


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, as a `type` of `add_argument`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def say(command: str, *lines: str, code: Any = 0) -> Any:
    """Print lines of a command's result and flush; return the exit code.

    Of the lines, a terminal interprets the colors of `paint` only.

    Args:
        command: Name of the command, for an error.
        *lines: The lines, without their newlines.
        code: Exit code if everything could be written.
    """
    kept = _COLORED if has_colors() else _PLAIN
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


def open_page(path: Path) -> None:
    """Open a page in the browser; say so if there is none."""
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        tell("no browser can be opened here")


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


def paint(text: str, *styles: str) -> str:
    """Style a text for standard output.

    Args:
        text: The text.
        *styles: "bold", "underline", "red", "green", "yellow", or a background: "shade 0" (green) to "shade 4" (red).

    Returns:
        The text itself if standard output is not a terminal, or `NO_COLOR` is set; colored wherever `FORCE_COLOR` is.
    """
    if not styles or not has_colors():
        return text
    return "".join(f"\x1b[{_CODES[style]}m" for style in styles) + f"{text}\x1b[0m"


def token_lines(tokens: Iterable[tuple[str, Sequence[str]]], columns: int) -> Iterator[str]:
    """Yield lines of tokens: every second one is underlined; without colors, there is a middle dot between them.

    Args:
        tokens: The text of each token, and its styles.
        columns: Most columns of a line; a longer token continues in the next line.
    """
    mark = "" if has_colors() else "·"
    line, used = "", 0
    for number, (text, styles) in enumerate(tokens):
        styles = (*styles, "underline") if number % 2 else styles
        if line and used + len(mark) + columns_of(text) > columns:
            yield line
            line, used = "", 0
        if line:
            line, used = line + mark, used + len(mark)
        while columns_of(text) > columns:
            cut = next(end for end in range(len(text), 0, -1) if columns_of(text[:end]) <= columns)
            yield paint(text[:cut], *styles)
            text = text[cut:]
        line, used = line + paint(text, *styles), used + columns_of(text)
    if line:
        yield line


def columns_of(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def width() -> int:
    """Return the columns of the terminal that standard output is, 40 at least; 80 if it is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns) if _is_terminal(sys.stdout) else 80


def has_colors() -> bool:
    """Whether standard output takes colors."""
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
            width(),
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
        _print(f"\r{what[: width() - 20]} ... {time.monotonic() - began:.0f} s", sys.stderr)
        pause = 1.0
    if pause != PROGRESS_AFTER:
        _print(f"\r{' ' * (width() - 1)}\r" if os.environ.get("TERM") == "dumb" else "\r\x1b[K", sys.stderr)


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
