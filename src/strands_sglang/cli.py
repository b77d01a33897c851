"""The command `strands-sglang`.

Exit codes: 0 it did what was asked, being stopped with Ctrl-C or SIGTERM included; 1 it failed, or `check` found
something unproven; 2 the command line or something named on it is wrong; 3 this machine cannot do it; 141 nobody reads
its output any more. One function per subcommand, each importing what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

FAILED = 1
WRONG_USAGE = 2
UNSUPPORTED = 3
NO_READER = 141
"""What a shell tells of a command that was ended by SIGPIPE."""

DEFAULT_PORT = 30000
"""SGLang's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if None.
    """
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as ended:  # the parser has printed its help, or what is wrong
        raise SystemExit(say(code=ended.code)) from None
    return int(arguments.run(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `run` of what it parses is the subcommand's function."""
    parser = argparse.ArgumentParser(
        prog="strands-sglang", description="Tools around the SGLang provider for Strands Agents."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "serve",
        help="run a real SGLang server on this machine's CPU",
        description="Run a real SGLang server on this machine's CPU in the foreground, until Ctrl-C. The first run "
        "installs SGLang in an environment of its own. Prints the server's address on standard output once it is "
        "healthy, everything else on standard error.",
    )
    command.add_argument(
        "--model", type=Path, metavar="PATH", help="a Hugging Face model folder (default: SmolLM2-135M-Instruct)"
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port",
        type=port_number,
        default=DEFAULT_PORT,
        metavar="N",
        help="port, 0 for a free one (default: %(default)s)",
    )
    command.set_defaults(run=serve)

    command = commands.add_parser(
        "check",
        help="what is known and proven of a model's chat template",
        description="Say which family a model's chat template belongs to, which tool parser and which ends of a turn "
        "it has, what can be proven of its continuations, and show a small conversation token by token. Exits with 1 "
        "if something is unproven.",
    )
    command.add_argument("model", metavar="MODEL_OR_PATH", help="a Hugging Face model folder, or a name on the Hub")
    command.add_argument("--server", metavar="URL", help="compare with this SGLang server, and sample a round trip")
    command.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja file in place of the model's own")
    command.add_argument(
        "--chat-template-kwargs", type=json_object, metavar="JSON", help="such as '{\"enable_thinking\": false}'"
    )
    command.add_argument("--family", metavar="NAME", help="the model family, where the chat template does not tell it")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer")
    command.set_defaults(run=check)
    return parser


def port_number(text: str) -> int:
    """Parse a TCP port."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is not between 0 and 65535")
    return number


def check(arguments: argparse.Namespace) -> int:
    """Print what is proven of a model; return the exit code."""
    import asyncio

    from .check import check_model, report_lines
    from .client.cache import get_tokenizer

    try:
        tokenizer = get_tokenizer(arguments.model, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        told = str(error)
        where = "" if told.startswith(f"{arguments.model}: ") else f"{arguments.model}: no tokenizer could be loaded: "
        tell(where + told)
        return WRONG_USAGE
    try:
        template = None if arguments.chat_template is None else arguments.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        tell(f"--chat-template {arguments.chat_template}: {error}")
        return WRONG_USAGE
    try:
        report = asyncio.run(
            check_model(
                tokenizer,
                arguments.model,
                server=arguments.server,
                chat_template=template,
                template_arguments=arguments.chat_template_kwargs,
                family=arguments.family,
            )
        )
    except ValueError as error:  # ChatTemplateError is one
        tell(f"{arguments.model}: {error}")
        return WRONG_USAGE
    shown = [json.dumps(report.as_dict(), ensure_ascii=False, indent=2)] if arguments.json else report_lines(report)
    return say(*shown, code=0 if report.is_proven else FAILED)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def serve(arguments: argparse.Namespace) -> int:
    """Run the local SGLang server in the foreground; return the exit code."""
    try:
        from . import local
    except ModuleNotFoundError as error:
        tell(f"{error}: install the extra, pip install -e '.[local]' in a clone of this project")
        return FAILED
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        tell(f"--model {arguments.model}: not a Hugging Face model folder, it has no config.json")
        return WRONG_USAGE

    # Each is treated like Ctrl-C, so that everything on the way out is stopped in order. SIGINT, too: a shell starts
    # background commands with it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        python = local.ensure_sglang(tell)
        model = arguments.model.absolute() if arguments.model else local.ensure_smollm2(python, tell)
        with local.start_server(
            python, model, host=arguments.host, port=arguments.port or None, progress=tell
        ) as server:
            tell("Ctrl-C stops it")
            unread = say(server.base_url)
            if unread:
                return unread
            code = server.wait()
            tell(f"the SGLang server ended by itself with exit code {code}; its log: {server.log_path}")
            return FAILED
    except KeyboardInterrupt:
        tell("stopped")
        return 0
    except local.LocalServerError as error:
        tell(str(error))
        return UNSUPPORTED if isinstance(error, local.UnsupportedPlatformError) else FAILED


def say(*lines: str, code: Any = 0) -> Any:
    """Print lines of the command's result, and whatever is still to be printed; return the exit code."""
    error = _print("".join(f"{line}\n" for line in lines), sys.stdout)
    if error is None:
        return code
    if isinstance(error, BrokenPipeError):
        return NO_READER
    tell(f"strands-sglang: standard output: {error.strerror or error}")
    return FAILED


def tell(line: str) -> None:
    """Print a line for the person at the terminal, apart from the command's result; if nobody is there, to nobody."""
    _print(f"{line}\n", sys.stderr)


def _print(text: str, stream: TextIO | None) -> OSError | None:
    try:
        print(text, end="", file=stream, flush=True)
    except OSError as error:
        # What the stream still holds goes nowhere; else the interpreter writes it when it ends.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
