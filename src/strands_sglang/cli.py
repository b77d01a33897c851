"""The command `strands-sglang`.

Exit codes: 0 success, or `serve` was stopped with Ctrl-C; 1 failure, `check` found something unproven, or `doctor`
something wrong, or no tokens; 2 an option, or what it names, is wrong; 3 this machine cannot run SGLang; 130 stopped
with Ctrl-C; 141 no one reads the output.
Each subcommand is one function, which imports what it needs.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__, terminal
from .shown import visible
from .terminal import UsageError, json_object, paint, tell, waiting, wrapped

if TYPE_CHECKING:
    from .inspection.records import Group

FAILED = terminal.FAILED
WRONG_USAGE = terminal.WRONG_USAGE
STOPPED = terminal.STOPPED
UNSUPPORTED = 3

DEFAULT_PORT = 30000
"""SGLang's own."""

SEE_ALSO = """see also:
  strands-env report, watch and compare: the metrics of a whole run"""

say = functools.partial(terminal.say, "strands-sglang")
say_page = functools.partial(terminal.say_page, "strands-sglang")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if None.
    """
    terminal.set_up()
    try:
        arguments = build_parser().parse_args(argv)
        return int(arguments.run(arguments))
    except SystemExit as ended:  # the parser has printed its help, or an error
        raise SystemExit(say(code=ended.code)) from None
    except UsageError as error:
        tell(visible(str(error)))
        return WRONG_USAGE
    except KeyboardInterrupt:
        tell("strands-sglang: stopped")
        return STOPPED


def build_parser() -> terminal.Parser:
    """Return the parser of the command line; `run` in its result is the subcommand's function."""
    parser, add = terminal.command_parser(
        "strands-sglang",
        __version__,
        "Check a model before you train it, look into recorded episodes token by token, and serve a model on your CPU.",
        f"example:\n  strands-sglang check Qwen/Qwen3-8B\n\n{SEE_ALSO}",
    )

    command = add(
        serve,
        "serve [OPTIONS]",
        "run an SGLang server on this machine's CPU",
        "Run an SGLang server on this machine's CPU until Ctrl-C. The first run installs SGLang in a separate "
        "environment. The server's address goes to standard output once the server is healthy, everything else to "
        "standard error.",
        "example:\n  strands-sglang serve --model models/Qwen3-0.6B --port 30000",
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
        help="port to listen on, 0 for a free one (default: %(default)s)",
    )

    command = add(
        check,
        "check MODEL [OPTIONS]",
        "show what is proven about a model's chat template",
        "Show a model's family, its tool parser and the tokens that end a turn, which prompts can be continued "
        "exactly, and a small conversation token by token. Exit with 1 if something is unproven, or if the model "
        "does not see its tools.",
        "example:\n  strands-sglang check Qwen/Qwen3-8B --server http://localhost:30000",
    )
    command.add_argument("model", metavar="MODEL", help="a Hugging Face model folder, or a name on the Hub")
    command.add_argument(
        "--server", metavar="URL", help="compare the vocabulary with this SGLang server's, and sample a round trip"
    )
    command.add_argument(
        "--headers",
        type=json_object,
        metavar="JSON",
        help='headers of its requests, such as \'{"Authorization": "Bearer KEY"}\'',
    )
    command.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja file to use as the chat template")
    command.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="arguments of the chat template, such as '{\"enable_thinking\": false}'",
    )
    command.add_argument("--family", metavar="NAME", help="the model family, if the template does not show it")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer")

    viewing = add(
        inspect,
        "view FILE... [OPTIONS]",
        "make an HTML page that explains every token of recorded episodes",
        "Make one HTML page from trajectories, the folder of an evaluation or of a training step, or the files of "
        "another library. It shows every token with its origin and its credit, sibling episodes side by side, and "
        "what the doctor finds. The page works offline and requests nothing. Its path goes to standard output.",
        f"example:\n  strands-sglang view runs/step-000003 --open\n\n{SEE_ALSO}",
    )
    terminal.add_page_options(viewing, "view.html")

    checking = add(
        inspect,
        "doctor FILE... [OPTIONS]",
        "find what is wrong with recorded episodes",
        "Compare recorded episodes with everything that can be derived from their own parts, and print a line per "
        "finding: its kind, where it is, and why. Files are trajectories, step folders of a training run, the folder "
        "of an evaluation, OpenEnv traces, verifiers records and rollout dumps of slime. Exit with 0 if nothing is "
        "wrong, 1 if something is or if no tokens are recorded, 2 if a file cannot be read.",
        f"example:\n  strands-sglang doctor runs/step-000003\n\n{SEE_ALSO}",
    )
    checking.add_argument("--json", action="store_true", help="print the findings as JSON")

    showing = add(
        inspect,
        "show FILE... [OPTIONS]",
        "show the turns and tokens of recorded episodes",
        "Show episodes as trees of turns, each with its reason, and the tokens of one turn with a color for what "
        "--color names.",
        f"example:\n  strands-sglang show episode.safetensors --turn 2 --color logprob\n\n{SEE_ALSO}",
    )
    showing.add_argument("--episode", metavar="NAME", help="show this episode only, such as 'task-00#0' (default: all)")
    showing.add_argument("--turn", type=int, metavar="N", help="the turn whose tokens are shown (default: the last)")
    showing.add_argument(
        "--color",
        choices=("writer", "mask", "logprob", "version", "advantage"),
        default="writer",
        help="what the color of a token tells (default: %(default)s)",
    )
    for look, command in ((view, viewing), (doctor, checking), (show, showing)):
        command.set_defaults(look=look)
        command.add_argument(
            "files",
            nargs="+",
            metavar="FILE",
            type=Path,
            help="a file or folder of recorded episodes, or a folder with one of them in it",
        )
        command.add_argument(
            "--tokenizer",
            metavar="FOLDER",
            help="folder of the model's tokenizer: measure drift, and show the text of tokens where files lack it",
        )
    return parser


def port_number(text: str) -> int:
    """Parse a TCP port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 0 to 65535")
    return int(text)


def check(arguments: argparse.Namespace) -> int:
    """Print what is proven of a model; return the exit code."""
    import asyncio

    from .families import get_family

    model, file = arguments.model, arguments.chat_template
    where = "--family"
    try:
        if arguments.family is not None:
            get_family(arguments.family)
        where = f"--chat-template {file}"
        template = None if file is None else file.read_text(encoding="utf-8")
        where = model
        with waiting(f"loading the tokenizer of {model}"):  # imports transformers
            from .check import check_model, report_lines
            from .client.shared import get_tokenizer

            tokenizer = get_tokenizer(model, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: {str(error).removeprefix(f'{model}: ')}") from error
    try:
        with waiting(f"checking {model}" + (f" with {arguments.server}" if arguments.server else "")):
            report = asyncio.run(
                check_model(
                    tokenizer,
                    model,
                    server=arguments.server,
                    headers=arguments.headers,
                    chat_template=template,
                    template_arguments=arguments.chat_template_kwargs,
                    family=arguments.family,
                )
            )
    except ValueError as error:  # ChatTemplateError is one
        message = str(error)
        if not message.startswith("base_url"):
            raise UsageError(f"{model if file is None else f'--chat-template {file}'}: {message}") from error
        raise UsageError(message.replace("base_url", "--server", 1)) from error
    code = 0 if report.is_proven else FAILED
    if arguments.json:
        return say(json.dumps(report.as_dict(), indent=2), code=code)
    return say(*report_lines(report), code=code)


def inspect(arguments: argparse.Namespace) -> int:
    """Read recorded episodes and do with them what the subcommand is for; return the exit code."""
    from .inspection.reading import held_in, read
    from .inspection.records import UnreadableError

    try:
        with waiting(f"reading {', '.join(map(str, arguments.files))}"):
            paths = [held_in(file) for file in arguments.files]
            groups = read(paths, tokenizer=arguments.tokenizer)
        for path in paths:
            if path not in arguments.files:
                tell(f"reading {path}")
        return int(arguments.look(arguments, groups))
    except (OSError, UnreadableError) as error:  # in a folder that may not be entered, or with too long a name
        raise UsageError(error) from error


def view(arguments: argparse.Namespace, groups: list[Group]) -> int:
    """Write the page of recorded episodes; return the exit code."""
    from .inspection.doctor import findings
    from .trajectory.storage import write_file
    from .viewer import PageTooLargeError, check_size, render

    try:
        with waiting("making the page"):
            check_size(groups)
            page = render(groups, findings(groups))
    except PageTooLargeError as error:
        raise UsageError(error) from error
    output = (arguments.output or Path("view.html")).absolute()
    try:
        write_file(output, page.encode("utf-8", "replace"))
    except OSError as error:
        tell(f"--output {output}: {error.strerror or error}")
        return FAILED
    return say_page(output, is_opened=arguments.open)


def doctor(arguments: argparse.Namespace, groups: list[Group]) -> int:
    """Print what is wrong with recorded episodes; return the exit code."""
    from dataclasses import asdict

    from .inspection.doctor import FLAT, findings, has_tokens, lines, summary

    with waiting("checking"):
        found = findings(groups)
    is_sound = all(finding.kind == FLAT for finding in found)  # any run has flat groups
    code = 0 if has_tokens(groups) and is_sound else FAILED
    if arguments.json:
        listed = [{**asdict(finding), "where": finding.where} for finding in found]
        return say(json.dumps(listed, ensure_ascii=True, indent=2), code=code)
    shown: list[str] = []
    for line in lines(found):
        kind = line.partition(":")[0]
        first, *others = wrapped(line) if terminal.is_terminal(sys.stdout) else [line]  # a line each
        shown += [first.replace(kind, paint(kind, "yellow" if kind == FLAT else "red"), 1), *others]
    code = say(*shown, paint(summary(groups, found), "red" if code else "green"), code=code)
    if found and code == FAILED:  # not if no one reads the output
        tell(f"next: {shlex.join(['strands-sglang', 'view', *map(str, arguments.files), '--open'])}")
    return code


def show(arguments: argparse.Namespace, groups: list[Group]) -> int:
    """Print the turns and tokens of recorded episodes; return the exit code."""
    from .inspection.show import episode_lines

    return say(*episode_lines(groups, arguments.episode, arguments.turn, arguments.color))


def serve(arguments: argparse.Namespace) -> int:
    """Run the local SGLang server in the foreground; return the exit code."""
    try:
        from . import local
    except ModuleNotFoundError as error:
        tell(f"{error}: run pip install -e '.[local]' in a clone of this project")
        return FAILED
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        tell(f"--model {arguments.model}: not a Hugging Face model folder: it has no config.json")
        return WRONG_USAGE

    # Each acts like Ctrl-C, so that everything is stopped in order. SIGINT too: a shell starts background commands
    # with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        python = local.ensure_sglang(tell)
        model = arguments.model.absolute() if arguments.model else local.ensure_smollm2(python, tell)
        with local.start_server(
            python, model, host=arguments.host, port=arguments.port or None, progress=tell
        ) as server:
            tell(f"model and tokenizer: {model}")
            command = ["strands-sglang", "check", str(model), "--server", server.base_url]
            if arguments.model is None:  # its own template has no place for tools
                command += ["--chat-template", str(local.CHATML_TOOLS_TEMPLATE)]
            tell(f"press Ctrl-C to stop it; try it: {shlex.join(command)}")
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


if __name__ == "__main__":
    sys.exit(main())
