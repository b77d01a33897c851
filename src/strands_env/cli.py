"""The command `strands-env`.

Exit codes: 0 it did what was asked, and every sample of an evaluation is finished; 1 samples were dropped, or it could
not go on; 2 the command line or something named on it is wrong; 130 it was stopped with Ctrl-C or SIGTERM, what is
finished is kept; 141 nobody reads its output any more. Whatever is wrong is one line on standard error. One function
per subcommand, each importing what it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from .core.types import Action

FAILED = 1
WRONG_USAGE = 2
STOPPED = 130
NO_READER = 141
"""What a shell tells of a command that was ended by SIGPIPE."""

BACKENDS = ("sglang", "openai", "bedrock")


class OutputError(Exception):
    """Standard output cannot be written; its argument is the reason."""


class UsageError(Exception):
    """The command line, or something named on it, is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if None.
    """
    parser, commands = build_parsers()
    try:
        try:
            arguments = parser.parse_args(argv)
        finally:
            say()  # what the parser printed, such as its help
        if getattr(arguments, "config", None) is not None:
            take_config_file(commands["eval"], arguments.config)
            arguments = parser.parse_args(argv)
        code: int = arguments.run(arguments)
    except OutputError as error:
        return give_up_output(error.args[0])
    except UsageError as error:
        tell(f"strands-env: {error}")
        return WRONG_USAGE
    except ModuleNotFoundError as error:  # what subcommands import is in the extra
        tell(f"strands-env: {one_line(error)}: pip install 'strands-sglang[env]'")
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell("strands-env: stopped")
        return STOPPED
    return code


def build_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and those of the subcommands by name.

    `run` of what the first one parses is the subcommand's function.
    """
    parser = argparse.ArgumentParser(prog="strands-env", description="Evaluate agents in environments.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="benchmarks, environments, rewards and backends by name")
    listing.set_defaults(run=list_names)

    evaluation = commands.add_parser(
        "eval",
        help="run tasks in an environment, keep every result, compute metrics",
        description="Run every task several times, append each result to DIR/results.jsonl as it finishes, and print "
        "the metrics. The same command again goes on where it ended, however it ended.",
    )
    evaluation.set_defaults(run=evaluate)
    _add_evaluation_options(evaluation)

    report = commands.add_parser("report", help="the metrics of an evaluation, also while it runs")
    report.add_argument("folder", metavar="DIR", help="what --output was, or a results file")
    compare = commands.add_parser("compare", help="the difference of two evaluations, prompt by prompt")
    compare.add_argument("first", metavar="A", help="what --output of the one was")
    compare.add_argument("second", metavar="B", help="and of the other; the difference is B - A")
    for command, function in ((report, report_metrics), (compare, compare_results)):
        command.set_defaults(run=function)
        command.add_argument("--json", action="store_true", help="print JSON")
        _add_threshold(command)
    return parser, {"list": listing, "eval": evaluation, "report": report, "compare": compare}


def _add_evaluation_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--config", type=Path, metavar="FILE", help="JSON object with these options; the command line goes first")
    tasks = command.add_argument_group("tasks")
    tasks.add_argument("--benchmark", metavar="NAME", help="see `strands-env list`")
    tasks.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help=".jsonl, .json, .csv, .tsv or .parquet; with --benchmark: a local copy",
    )
    tasks.add_argument("--question-field", metavar="NAME", help="default: question, problem, prompt, ...")
    tasks.add_argument("--answer-field", metavar="NAME", help="default: answer, ground_truth, label, ...")
    tasks.add_argument("--id-field", metavar="NAME", help="default: id, unique_id, ...; else a task's content names it")
    tasks.add_argument("--limit", type=at_least_one, metavar="N", help="the first N tasks only")
    environment = command.add_argument_group("environment")
    environment.add_argument(
        "--env", metavar="DOTTED.PATH", help="a name of `strands-env list`, or what makes an environment: package.Class"
    )
    environment.add_argument("--env-args", type=json_object, default={}, metavar="JSON", help="its further arguments")
    environment.add_argument("--system-prompt", metavar="TEXT", help="in place of the environment's own")
    environment.add_argument(
        "--reward",
        default="math",
        metavar="NAME",
        help="a name of `strands-env list`, a dotted path, or env: its own (default: math)",
    )
    environment.add_argument("--reward-args", type=json_object, default={}, metavar="JSON", help="the reward's")
    model = command.add_argument_group("model")
    model.add_argument("--backend", choices=BACKENDS, default="sglang", help="default: %(default)s")
    model.add_argument("--base-url", metavar="URL", help="the server (default for sglang: http://localhost:30000)")
    model.add_argument("--model", metavar="NAME", help="the model's name")
    model.add_argument("--tokenizer", metavar="PATH", help="sglang: folder or name (default: that of --model)")
    model.add_argument("--chat-template", type=Path, metavar="FILE", help="sglang: Jinja file in place of the model's")
    model.add_argument("--tool-parser", metavar="NAME", help="sglang: in place of the one that the template tells")
    model.add_argument("--region", metavar="NAME", help="bedrock: AWS region")
    model.add_argument("--temperature", type=finite, metavar="X")
    model.add_argument("--top-p", type=finite, metavar="X")
    model.add_argument("--max-new-tokens", type=at_least_one, metavar="N", help="of one answer")
    model.add_argument("--sampling-params", type=json_object, default={}, metavar="JSON", help="further ones")
    model.add_argument("--model-args", type=json_object, default={}, metavar="JSON", help="the model's configuration")
    model.add_argument(
        "--client-args", type=json_object, default={}, metavar="JSON", help="sglang, openai: the client's"
    )
    run = command.add_argument_group("run")
    run.add_argument("--output", type=Path, metavar="DIR", help="where results are kept (needed)")
    run.add_argument("--n-samples", type=at_least_one, default=1, metavar="N", help="of each task (default: 1)")
    run.add_argument("--concurrency", type=at_least_one, default=10, metavar="N", help="episodes at once (default: 10)")
    run.add_argument("--keep-tokens", action="store_true", help="keep token ids, loss masks and logprobs")
    run.add_argument("--keep-trajectories", action="store_true", help="keep all model calls, one file per sample")
    run.add_argument(
        "--stop-after-failures", type=at_least_one, default=20, metavar="N", help="in a row (default: %(default)s)"
    )
    run.add_argument(
        "--retry-errors", action="store_true", help="run samples again that count as wrong because something failed"
    )
    run.add_argument("--json", action="store_true", help="print the metrics as JSON")
    run.add_argument("--verbose", action="store_true", help="log what happens")
    _add_threshold(run)


def _add_threshold(command: Any) -> None:
    command.add_argument(
        "--success-threshold", type=finite, default=1.0, metavar="X", help="least reward of a success (default: 1.0)"
    )


def at_least_one(text: str) -> int:
    """Parse a positive whole number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def finite(text: str) -> float:
    """Parse a number that is one: neither infinite nor NaN."""
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def take_config_file(command: argparse.ArgumentParser, path: Path) -> None:
    """Make a file's options the defaults of a command.

    Raises:
        UsageError: It cannot be read, or has options or values that the command line has not.
    """
    try:
        content = json_object(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    options = {action.dest: action for action in command._actions if action.dest not in ("help", "config")}
    defaults: dict[str, Any] = {}
    for name, value in content.items():
        action = options.get(name.replace("-", "_"))
        if action is None:
            raise UsageError(f"--config {path}: there is no option {name!r}")
        if isinstance(value, bool) or action.nargs == 0:
            is_right = isinstance(value, bool) and action.nargs == 0
        elif action.type is json_object:
            is_right = isinstance(value, dict)
        elif action.type in (at_least_one, finite):
            is_right = isinstance(value, int | float)
            value = str(value)  # parsed like on the command line, where a default is text
        else:
            is_right = isinstance(value, str)
        if not is_right or (action.choices is not None and value not in action.choices):
            raise UsageError(f"--config {path}: {name} cannot be {json.dumps(content[name])}")
        defaults[action.dest] = value
    command.set_defaults(**defaults)


# --- subcommands ---


def list_names(arguments: argparse.Namespace) -> int:
    """Print what has a name; return the exit code."""
    from .eval.benchmarks import BENCHMARKS
    from .eval.comparison import table_lines
    from .eval.setup import ENVIRONMENTS, REWARDS

    rows = [["benchmark", "tasks", "from"]]
    rows += [[one.name, str(one.size), f"{one.repository} ({one.split})"] for one in BENCHMARKS.values()]
    told = table_lines(rows, texts=True)
    for title, names in (("environment", ENVIRONMENTS), ("reward", REWARDS)):
        rows = [[title, "is"], *([name, path] for name, path in names.items())]
        told += ["", *table_lines(rows, texts=True)]
    say(*told, "", f"backends: {', '.join(BACKENDS)}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Run an evaluation; return the exit code."""
    from strands_sglang import SGLangClientError

    from .core import RewardError
    from .eval import CheckpointError, DuplicateTaskError, EvaluationStoppedError, Evaluator
    from .eval.checkpoint import replace_file
    from .eval.comparison import end_lines, metric_lines
    from .eval.json_lines import encode
    from .eval.setup import model_config, named_environment, run_config, served_model
    from .eval.storage import results_file, side_file

    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.ERROR)
    if not arguments.verbose:  # unknown tools and cut-off answers are a model's everyday life, and in the results
        logging.getLogger("strands").setLevel(logging.CRITICAL)
    for name in ("env", "output"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is needed")
    if arguments.benchmark is None and arguments.dataset is None:
        raise UsageError("--benchmark NAME or --dataset FILE is needed")
    try:
        model = model_config(arguments)
        named = named_environment(arguments, model)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UsageError(one_line(error)) from error
    except Exception as error:  # code that is named on the command line raises what it likes
        raise UsageError(f"--env or --reward: {type(error).__name__}: {one_line(error)}") from error
    try:
        actions = load_actions(arguments, check_truth=getattr(named.reward, "check_truth", None))
    except RewardError as error:  # the machine starts no worker that could read a ground truth
        tell(f"strands-env: {one_line(error)}")
        return FAILED
    evaluator = Evaluator(
        named.factory,
        n_samples_per_prompt=arguments.n_samples,
        max_concurrency=arguments.concurrency,
        keep_tokens=arguments.keep_tokens,
        keep_trajectories=arguments.keep_trajectories,
        output_path=arguments.output,
        config=run_config(arguments, model),
        success_threshold=arguments.success_threshold,
        stop_after_failures=arguments.stop_after_failures,
        retry_errors=arguments.retry_errors,
    )
    evaluator.benchmark_name = arguments.benchmark or arguments.dataset.stem

    async def run() -> Any:
        evaluator.config.update(await served_model(model))
        return await evaluator.run(actions)

    try:
        results = asyncio.run(until_stopped(run()))
        metrics = evaluator.compute_metrics(results)
        replace_file(side_file(results_file(arguments.output), ".metrics.json"), encode(metrics))
    except (CheckpointError, EvaluationStoppedError, SGLangClientError) as error:
        tell(f"strands-env: {one_line(error)}")
        return FAILED
    except DuplicateTaskError as error:
        raise UsageError(one_line(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell(f"strands-env: stopped; what is finished is kept in {arguments.output}, the same command goes on with it")
        return STOPPED
    if arguments.json:
        say(json.dumps(metrics, indent=2))
    else:
        say(*metric_lines(metrics), *end_lines(results))
    return FAILED if metrics["dropped_samples"] else 0


def report_metrics(arguments: argparse.Namespace) -> int:
    """Print the metrics of an evaluation; return the exit code."""
    from .eval import CheckpointError, read_results, standard_metrics
    from .eval.comparison import end_lines, metric_lines

    try:
        run, results = read_results(arguments.folder)
    except CheckpointError as error:
        raise UsageError(one_line(error)) from error
    metrics = standard_metrics(
        results, n_samples_per_prompt=run.n_samples_per_prompt, success_threshold=arguments.success_threshold
    )
    if arguments.json:
        say(json.dumps(metrics, indent=2))
    else:
        title = f"{run.benchmark}: {len(run.prompts)} prompts x {run.n_samples_per_prompt} samples"
        say(title, *metric_lines(metrics), *end_lines(results))
    return 0


def compare_results(arguments: argparse.Namespace) -> int:
    """Print the difference of two evaluations; return the exit code."""
    import dataclasses

    from .eval import CheckpointError, read_results
    from .eval.comparison import compare, comparison_lines

    try:
        first, second = (read_results(folder) for folder in (arguments.first, arguments.second))
        comparison = compare(first, second, success_threshold=arguments.success_threshold)
    except (CheckpointError, ValueError) as error:
        raise UsageError(one_line(error)) from error
    if arguments.json:
        say(json.dumps(dataclasses.asdict(comparison), indent=2))
    else:
        say(*comparison_lines(comparison))
    return 0


def load_actions(arguments: argparse.Namespace, check_truth: Callable[[Any], None] | None = None) -> list[Action]:
    """The tasks that the command line names.

    Args:
        arguments: The command line's.
        check_truth: What refuses a ground truth that the reward cannot compare with.

    Raises:
        UsageError: It names none, or they cannot be loaded.
    """
    from .eval.benchmarks import load_benchmark
    from .eval.tasks import TaskError, load_tasks

    fields = {name: getattr(arguments, name) for name in ("question_field", "answer_field", "id_field")}
    try:
        if arguments.benchmark is not None:
            if any(fields.values()):
                raise UsageError("--question-field, --answer-field and --id-field go with --dataset alone")
            actions = load_benchmark(
                arguments.benchmark, arguments.dataset, limit=arguments.limit, check_truth=check_truth
            )
        else:
            actions = load_tasks(
                arguments.dataset,
                **fields,
                needs_answer=arguments.reward != "env",
                limit=arguments.limit,
                check_truth=check_truth,
            )
    except TaskError as error:
        raise UsageError(one_line(error)) from error
    return actions


async def until_stopped(work: Coroutine[Any, Any, Any]) -> Any:
    """Do it; Ctrl-C and SIGTERM cancel it, and a second one no longer waits for what it is ending."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        tell("\nstrands-env: stopping")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await task


def one_line(error: BaseException) -> str:
    """An error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def say(*lines: str) -> None:
    """Print lines of the command's result, and whatever is still to be printed.

    Raises:
        OutputError: Nobody reads them, or they cannot be written.
    """
    try:
        if lines:
            print(*lines, sep="\n")
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise OutputError(error) from error


def give_up_output(error: OSError) -> int:
    """Say what is wrong with standard output, if it is not that its reader has enough; return the exit code."""
    discard(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return NO_READER
    tell(f"strands-env: standard output: {error.strerror or error}")
    return FAILED


def tell(line: str) -> None:
    """Print a line for the person at the terminal, apart from the command's result; if nobody is there, to nobody."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO | None) -> None:
    """Have what a broken stream still holds go nowhere, for the interpreter writes it when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
