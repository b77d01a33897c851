"""The command `strands-sglang`.

Exit codes: 0 success, or stopped with Ctrl-C; 1 failure, `check` found something unproven, or `doctor` something wrong;
2 an option, or what it names, is wrong; 3 this machine cannot run SGLang; 141 no one reads the output. Each subcommand
is one function, which imports what it needs.
"""

from __future__ import annotations

import argparse
import functools
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import terminal
from .terminal import json_object, tell, visible, waiting

FAILED = terminal.FAILED
WRONG_USAGE = terminal.WRONG_USAGE
UNSUPPORTED = 3

DEFAULT_PORT = 30000
"""SGLang's own."""

say = functools.partial(terminal.say, "strands-sglang")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if None.
    """
    terminal.accept_any_text()
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as ended:  # the parser has printed its help, or an error
        raise SystemExit(say(code=ended.code)) from None
    return int(arguments.run(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; `run` in its result is the subcommand's function."""
    parser, add = terminal.command_parser(
        "strands-sglang",
        "Check a model before you train it, serve one on your CPU, and look into recorded\nepisodes.",
        "example:\n  strands-sglang check Qwen/Qwen3-8B\n\n"
        "`strands-env` runs evaluations, and shows them: report, watch, compare.",
    )

    command = add(
        "serve",
        serve,
        "[OPTIONS]",
        help="run an SGLang server on this machine's CPU",
        description="Run an SGLang server on this machine's CPU until Ctrl-C. The first run installs\n"
        "SGLang in a separate environment. The server's address goes to standard\n"
        "output once the server is healthy, everything else to standard error.",
        epilog="example:\n  strands-sglang serve --model models/Qwen3-0.6B --port 30000",
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
        "check",
        check,
        "MODEL [OPTIONS]",
        help="show what is proven about a model's chat template",
        description="Show a model's family, its tool parser and the tokens that end a turn, which\n"
        "prompts can be continued exactly, and a small conversation token by token. Exit\n"
        "with 1 if something is unproven.",
        epilog="example:\n  strands-sglang check Qwen/Qwen3-8B --server http://localhost:30000",
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

    command = add(
        "view",
        view,
        "FILE... [OPTIONS]",
        help="make an HTML page that explains every token of recorded episodes",
        description="Make one HTML page from trajectories, the folder of an evaluation or of a\n"
        "training step, or the files of another library. It shows every token with its\n"
        "origin and its credit, sibling episodes side by side, and what the doctor finds.\n"
        "The page works offline and requests nothing. Its path goes to standard output.",
        epilog="example:\n  strands-sglang view runs/step-000003 --open",
    )
    command.add_argument("files", metavar="FILE", nargs="+", type=Path, help="a file or folder of recorded episodes")
    command.add_argument(
        "-o", "--output", metavar="PAGE", type=Path, help="the page to write (default: view.html in this folder)"
    )
    command.add_argument("--open", action="store_true", help="open the page in the browser")
    add_tokenizer(command)

    command = add(
        "doctor",
        doctor,
        "FILE... [OPTIONS]",
        help="find what is wrong with recorded episodes",
        description="Compare recorded episodes with everything that can be derived from their own\n"
        "parts, and print a line per finding: its kind, where it is, and why. Files are\n"
        "trajectories, step folders of a training run, the folder of an evaluation,\n"
        "OpenEnv traces, verifiers records and rollout dumps of slime. Exit with 0 if\n"
        "nothing is wrong, 1 if something is, 2 if a file cannot be read.",
        epilog="example:\n  strands-sglang doctor runs/step-000003",
    )
    command.add_argument("files", nargs="+", metavar="FILE", help="files and folders")
    add_tokenizer(command)
    command.add_argument("--json", action="store_true", help="print the findings as JSON")

    command = add(
        "show",
        show,
        "FILE [OPTIONS]",
        help="show the turns and tokens of recorded episodes",
        description="Show a file's episodes as trees of turns, each with its reason, and the tokens\n"
        "of one turn with a color for what --color names.",
        epilog="example:\n  strands-sglang show episode.safetensors --turn 2 --color logprob",
    )
    command.add_argument("file", metavar="FILE", help="a file or folder, as for `doctor`")
    command.add_argument("--episode", metavar="ID", help="show this episode only (default: all)")
    command.add_argument("--turn", type=int, metavar="N", help="the turn whose tokens are shown (default: the last)")
    command.add_argument(
        "--color",
        choices=("writer", "mask", "logprob", "version", "advantage"),
        default="writer",
        help="what the color of a token tells (default: %(default)s)",
    )
    add_tokenizer(command)
    return parser


def add_tokenizer(command: argparse.ArgumentParser) -> None:
    """Add the option that names the tokenizer of recorded episodes."""
    command.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="folder of the model's tokenizer: measure drift, and show the text of tokens where files lack it",
    )


def port_number(text: str) -> int:
    """Parse a TCP port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 0 to 65535")
    return int(text)


def check(arguments: argparse.Namespace) -> int:
    """Print what is proven of a model; return the exit code."""
    import asyncio

    from .families import get_family

    model = arguments.model
    try:
        if arguments.family is not None:
            get_family(arguments.family)
    except ValueError as error:
        tell(f"--family: {error}")
        return WRONG_USAGE
    try:
        with waiting(f"loading the tokenizer of {model}"):  # imports transformers
            from .check import check_model, report_lines
            from .client.shared import get_tokenizer

            tokenizer = get_tokenizer(model, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        told = str(error)
        where = "" if told.startswith(f"{model}: ") else f"{model}: the tokenizer cannot be loaded: "
        tell(where + told)
        return WRONG_USAGE
    try:
        template = None if arguments.chat_template is None else arguments.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        tell(f"--chat-template {arguments.chat_template}: {error}")
        return WRONG_USAGE
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
        told = str(error)
        if told.startswith("base_url"):
            where = told.replace("base_url", "--server", 1)
        else:
            where = f"{model if template is None else f'--chat-template {arguments.chat_template}'}: {told}"
        tell(where)
        return WRONG_USAGE
    code = 0 if report.is_proven else FAILED
    if arguments.json:
        return say(json.dumps(report.as_dict(), indent=2), code=code)
    return say(*report_lines(report), code=code)


def view(arguments: argparse.Namespace) -> int:
    """Write the page of recorded episodes; return the exit code."""
    from .inspection.doctor import findings
    from .inspection.reading import UnreadableError, read
    from .trajectory.storage import write_file

    names = ", ".join(map(str, arguments.files[:3])) + (", ..." if len(arguments.files) > 3 else "")
    try:
        with waiting(f"reading {names}"):
            from .viewer import PageTooLargeError, check_size, render

            groups = read(arguments.files, tokenizer=arguments.tokenizer)
            check_size(groups)
            page = render(groups, findings(groups))
    except (UnreadableError, PageTooLargeError) as error:
        tell(visible(str(error)))
        return WRONG_USAGE
    output = (arguments.output or Path("view.html")).absolute()
    try:
        write_file(output, page.encode("utf-8", "replace"))
    except OSError as error:
        tell(f"--output {output}: {error.strerror or error}")
        return FAILED
    if arguments.open:
        terminal.open_page(output)
    return say(str(output))


def doctor(arguments: argparse.Namespace) -> int:
    """Print what is wrong with recorded episodes; return the exit code."""
    from dataclasses import asdict

    from .inspection.doctor import findings, lines, summary
    from .inspection.reading import UnreadableError, read

    try:
        with waiting("reading"):
            groups = read(arguments.files, tokenizer=arguments.tokenizer)
    except UnreadableError as error:
        tell(visible(str(error)))
        return WRONG_USAGE
    with waiting("checking"):
        found = findings(groups)
    code = FAILED if found else 0
    if arguments.json:
        shown = [{**asdict(finding), "where": finding.where} for finding in found]
        return say(json.dumps(shown, ensure_ascii=True, indent=2), code=code)
    return say(*lines(found), summary(groups, found), code=code)


def show(arguments: argparse.Namespace) -> int:
    """Print the turns and tokens of recorded episodes; return the exit code."""
    from .inspection.reading import UnreadableError, read
    from .inspection.show import episode_lines

    try:
        with waiting("reading"):
            groups = read([arguments.file], tokenizer=arguments.tokenizer)
        shown = list(episode_lines(groups, arguments.episode, arguments.turn, arguments.color))
    except UnreadableError as error:
        tell(visible(str(error)))
        return WRONG_USAGE
    return say(*shown)


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
            tell("press Ctrl-C to stop it")
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
