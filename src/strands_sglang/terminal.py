"""What the commands `strands-sglang` and `strands-env` share: their parsers, and how they print.

Results go to standard output, everything else to standard error. Texts fit into the terminal, or into 80 columns.
Colors and progress appear on a terminal only; `NO_COLOR` switches colors off (no-color.org), `FORCE_COLOR` on
(force-color.org). Red is for failures.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from .shown import visible, without_credentials

FAILED = 1
WRONG_USAGE = 2
STOPPED = 130
NO_READER = 141
"""What a shell reports for a command that SIGPIPE ended."""

PROGRESS_AFTER = 2.0
"""Seconds of silence before a wait is shown."""

_CODES = {"bold": "1", "underline": "4", "red": "31", "green": "32", "yellow": "33"}

SHADES = (
    (-0.1, "166;219;160"),
    (-0.5, "217;240;211"),
    (-1.0, "247;247;200"),
    (-2.0, "253;200;120"),
    (-4.0, "225;160;230"),
    (float("-inf"), "190;130;215"),
)
"""Backgrounds of logprobs, by the least of each; the text on them is black."""

_CODES |= {shade: f"38;2;0;0;0;48;2;{shade}" for _, shade in SHADES}
_COLORED = re.compile(rf"(\n|\x1b\[(?:0|{'|'.join(_CODES.values())})m)")
_PLAIN = re.compile(r"(\n)")
"""What of a text a terminal interprets: ends of lines, and where there are colors, those of `paint`."""


COMMANDS = {
    "strands-sglang": ("serve", "check", "view", "doctor", "show"),
    "strands-env": ("list", "eval", "check", "report", "watch", "track", "score", "replay", "compare"),
}
"""The commands of each program."""


def command_parser(prog: str, version: str, about: str, end: str) -> tuple[Parser, Callable[..., Any]]:
    """Return the parser of a command, and the function that adds a subcommand to it.

    That function takes the one that runs the subcommand, its name and arguments, what it does in a few words and in
    full, and the text below its options; it returns the subcommand's parser. `run` in what is parsed is the function
    that runs it. Without a subcommand, that one prints the help.

    Args:
        prog: Name of the command.
        version: Its version.
        about: What it is for.
        end: The text below the subcommands.
    """
    end += f"\n\n`{prog} COMMAND --help` describes a command."
    parser = Parser(prog=prog, usage=f"{prog} COMMAND [OPTIONS]", description=about, epilog=end)
    parser.add_argument("--version", action="version", version=f"{prog} {version}")
    parser.set_defaults(run=lambda arguments: say(prog, *parser.format_help().splitlines(), code=WRONG_USAGE))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", prog=prog)

    def add(run: Callable[[argparse.Namespace], int], usage: str, summary: str, about: str, end: str) -> Parser:
        name = usage.split()[0]
        command: Parser = commands.add_parser(
            name, help=summary, usage=f"{prog} {usage}", description=about, epilog=end
        )
        command.set_defaults(run=run)
        return command

    return parser, add


class Parser(argparse.ArgumentParser):
    """Takes options by their full names only, and says which name may be meant by one that it does not know."""

    def __init__(self, **settings: Any) -> None:
        """Take the arguments of `ArgumentParser`."""
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and refuse those that are left."""
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            name = left[0].partition("=")[0]
            is_option = name.startswith("-")
            self.error(
                f"{name}: {'no such option' if is_option else 'unexpected'}{meant(name, self._option_string_actions)}"
            )
        return parsed, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices."""
        known = tuple(action.choices or (value,))
        if value in known:
            return
        problem = f"no such name{meant(value, known)} (known: {', '.join(known)})"
        if action.dest == "command":
            owner = next((program for program, names in COMMANDS.items() if value in names), None)
            self.error(
                f"{value}: {problem}" if owner is None else f"{value} is a command of {owner}, not of {self.prog}"
            )
        raise argparse.ArgumentError(action, f"{value}: {problem}")


def meant(name: str, known: Iterable[str]) -> str:
    """Which of the known names may be meant by one that is not known, to end a sentence; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps each line of a text of its own; indented ones stay whole, so that examples can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(
            line if line[:1] in ("", " ") else super(_HelpFormatter, self)._fill_text(line, width, indent)
            for line in lines
        )


class UsageError(Exception):
    """The command line, or something named on it, is wrong."""


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def add_page_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a command that writes a page."""
    command.add_argument(
        "-o", "--output", metavar="PAGE", type=Path, help=f"the page to write (default: {name} in this folder)"
    )
    command.add_argument("--open", action="store_true", help="open the page in the browser")


def say_page(command: str, page: Path, *, is_opened: bool, at: str = "") -> Any:
    """Print the path of a page, and open it in the browser if that is asked for; return the exit code.

    Args:
        command: Name of the command.
        page: The page.
        is_opened: Whether to open it.
        at: Where on the page, such as `#finding-1`.
    """
    import webbrowser

    if is_opened and not webbrowser.open(page.as_uri() + at):
        tell("no browser can be opened here")
    return say(command, str(page))


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


def set_up() -> None:
    """Let standard output write out what its encoding lacks, as standard error does, and transformers say no advice.

    It would report a missing PyTorch, which no command needs, whenever it is imported.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
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


def paint(text: str, *styles: str | None) -> str:
    """Color a text for standard output.

    Args:
        text: The text.
        *styles: "bold", "underline", "red", "green", "yellow", or one of `SHADES`; None for none.

    Returns:
        The text itself if standard output is not a terminal, or `NO_COLOR` is set; colored wherever `FORCE_COLOR` is.
    """
    codes = "".join(f"\x1b[{_CODES[style]}m" for style in styles if style)
    return f"{codes}{text}\x1b[0m" if codes and has_colors() else text


def width() -> int:
    """Return the columns of the terminal that standard output is, 40 at least; 80 if it is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns) if is_terminal(sys.stdout) else 80


def has_colors() -> bool:
    """Whether standard output is colored."""
    return bool(os.environ.get("FORCE_COLOR")) or not (
        os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal(sys.stdout)
    )


def _shown(text: str, kept: re.Pattern[str] = _PLAIN) -> str:
    return "".join(part if number % 2 else visible(part) for number, part in enumerate(kept.split(text)))


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


def token_lines(tokens: Iterable[tuple[str, str | None]], columns: int) -> Iterator[str]:
    """Lines of tokens, of which every other one is underlined; without colors, a dot separates them.

    Args:
        tokens: The text of each token and its style, as for `paint`.
        columns: Width of a line; a token that is wider is broken.
    """
    dot = "" if has_colors() else "\N{MIDDLE DOT}"
    line, used = "", 0
    for number, (text, color) in enumerate(tokens):
        styles = (color, "underline" if number % 2 else None)
        if used and used + len(dot) + _columns(text) > columns:
            yield line
            line, used = "", 0
        while _columns(text) > columns:
            cut = next(end for end in range(len(text), 0, -1) if _columns(text[:end]) <= columns)
            yield paint(text[:cut], *styles)
            text = text[cut:]
        before = dot if used else ""
        line += before + paint(text, *styles)
        used += len(before) + _columns(text)
    if used:
        yield line


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def wrapped(line: str) -> list[str]:
    """A line in parts that fit the terminal, with control characters written out; paths stay whole."""
    further = line[: len(line) - len(line.lstrip())] + "  "
    shown = visible(line)
    return textwrap.wrap(shown, width(), subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal what is being waited for, with the seconds, if it takes long.

    Args:
        what: What the program does, such as "loading the tokenizer".
    """
    if not is_terminal(sys.stderr):
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


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal."""
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
