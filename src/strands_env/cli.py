"""The command `strands-env`.

Exit codes: 0 success, and every sample of an evaluation is finished; 1 samples were dropped, or the command could not
continue; 2 an option, or something it names, is wrong; 130 stopped with Ctrl-C or SIGTERM, finished samples are kept;
141 no one reads the output. Every error is one line on standard error. Each subcommand is one function, which imports
what it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import inspect
import json
import logging
import math
import re
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strands_sglang import __version__, shown, terminal
from strands_sglang.shown import counted
from strands_sglang.terminal import UsageError, json_object, meant, paint, tell, waiting

from .names import ENVIRONMENTS, REWARDS, load, load_benchmark_class, needs, registered_benchmarks, why_not
from .trackers import TRACKERS

if TYPE_CHECKING:
    from .core.types import Action
    from .eval import Evaluator
    from .eval.metrics import Prices

FAILED = terminal.FAILED
WRONG_USAGE = terminal.WRONG_USAGE
STOPPED = terminal.STOPPED

OWN_REWARD = "env"
"""The environment brings its own."""

DEFAULT_URL = "http://localhost:30000"

BACKENDS = {
    "sglang": {"base_url", "model", "tokenizer", "chat_template", "tool_parser", "client_args"},
    "openai": {"base_url", "model", "client_args"},
    "bedrock": {"model", "region"},
}
"""Which of the options that not every backend has apply to each."""

PACKAGES = {"openai": ("openai", "openai"), "bedrock": ("boto3", "bedrock")}
"""The package that a backend needs, and its extra."""

_EXAMPLE = """example:
  strands-env eval --dataset tasks.jsonl --env calculator --n-samples 8 \\
    --model Qwen/Qwen3-8B --output results/qwen3-8b"""
SEE_ALSO = """see also:
  strands-sglang view, doctor and show: every token of the recorded episodes"""

say = functools.partial(terminal.say, "strands-env")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if None.
    """
    if argv is None:  # in our own process; otherwise the collector keeps walking the same live episodes
        gc.set_threshold(10_000, 10, 10)
    terminal.set_up()
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
        if getattr(arguments, "config", None) is not None:
            command, *options = sys.argv[1:] if argv is None else argv
            arguments = parser.parse_args([command, *options_in_file(arguments.config), *options])
        code: int = arguments.run(arguments)
    except SystemExit as ended:  # the parser has printed its help, or an error
        raise SystemExit(say(code=ended.code)) from None
    except UsageError as error:
        tell(f"strands-env: {one_line(error)}")
        return WRONG_USAGE
    except ModuleNotFoundError as error:  # what subcommands import is in the extra
        hint = "run pip install -e '.[env]' in a clone of this project"
        tell(f"strands-env: this command needs the extra `env` ({one_line(error)}): {hint}")
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell("strands-env: stopped")
        return STOPPED
    return code


def build_parser() -> terminal.Parser:
    """Return the parser of the command line; `run` in its result is the subcommand's function."""
    parser, add = terminal.command_parser(
        "strands-env",
        __version__,
        "Evaluate agents in environments, and see how evaluations and training runs do.",
        f"{_EXAMPLE}\n\n{SEE_ALSO}",
    )
    add(
        list_names,
        "list",
        "list benchmarks, environments, rewards and backends",
        "List the names that `strands-env eval` knows.",
        "example:\n  strands-env list",
    )
    evaluation = add(
        evaluate,
        "eval (--dataset PATH | --benchmark NAME)\n                        --env NAME --output DIR [OPTIONS]",
        "run tasks in an environment and print the metrics",
        "Run every task several times and print the metrics. Each result is added to DIR/results.jsonl as it "
        "finishes. Run the same command again to continue, no matter how the last run ended.",
        _EXAMPLE,
    )
    _add_evaluation_options(evaluation)
    checking = add(
        check_env,
        "check ENV --dataset PATH [OPTIONS]",
        "play agents in an environment, and see whether it rewards what it should",
        "Play agents that do nothing, do the solution, hang, or write a reward themselves, on each task, without a "
        "model. Exit with 1 if something does not hold.",
        "example:\n  strands-env check harbor --dataset tasks",
    )
    checking.add_argument("env", metavar="ENV", help=_NAMED)
    for title in ("tasks", "environment"):
        for name, option in _OPTIONS[title].items():
            if name != "--env":
                _add(checking, name, *option)
    checking.set_defaults(reward=OWN_REWARD)
    report = add(
        report_metrics,
        "report DIR [OPTIONS]",
        "print the metrics of an evaluation",
        "Print the metrics of an evaluation, also while it runs.",
        f"example:\n  strands-env report results/qwen3-8b --html --open\n\n{SEE_ALSO}",
    )
    watching = add(
        watch_run,
        "watch DIR [OPTIONS]",
        "show an evaluation or a training run while it is written",
        "Show how fast an evaluation runs, when it will be done, its metrics, failures and slowest episodes, until it "
        "is done, or q or Ctrl-C is pressed. DIR may also be a training run with a metrics.csv. The files are only "
        "read. Where standard output is not a terminal, print the state once. The exit code is 1 if it ended with "
        "dropped samples, or nothing runs it any more.",
        f"example:\n  strands-env watch results/qwen3-8b\n\n{SEE_ALSO}",
    )
    track = add(
        track_run,
        "track DIR --to NAME [OPTIONS]",
        "send the metrics of an evaluation or a training run to a tracker",
        "Log the metrics of an evaluation, or of every step of a training run with a metrics.csv, as a new run of "
        "TensorBoard (files in DIR/tensorboard), wandb, mlflow or trackio.",
        "example:\n  strands-env track results/qwen3-8b --to wandb --project math",
    )
    score = add(
        score_results,
        "score DIR --reward NAME --output OTHER [OPTIONS]",
        "score the saved episodes of an evaluation with another reward",
        "Score the saved episodes of an evaluation with another reward, without running them again. OTHER becomes the "
        "folder of an evaluation with that reward. Run the same command again to continue.",
        "example:\n  strands-env score results/qwen3-8b --reward exact --output results/exact",
    )
    again = add(
        replay_episodes,
        "replay FILE... [OPTIONS]",
        "run recorded episodes again without a server, and show where they differ",
        "Run recorded episodes again without a server: what was sampled is fixed, the rest is code. Compare each stage "
        "with the record, up to the first difference. Options replace what an evaluation was run with. Exit with 1 if "
        "an episode differs.",
        "example:\n  strands-env replay results/qwen3-8b --reward exact",
    )
    compare = add(
        compare_results,
        "compare A B [OPTIONS]",
        "compare two evaluations prompt by prompt",
        "Compare two evaluations by the prompts that both have.",
        f"example:\n  strands-env compare results/before results/after\n\n{SEE_ALSO}",
    )
    for command in (report, score):
        command.add_argument(
            "folder", type=evaluation_in, metavar="DIR", help="the evaluation's --output, or its results file"
        )
    for command in (watching, track):
        command.add_argument(
            "folder", type=run_in, metavar="DIR", help="the evaluation's --output, or the folder of a training run"
        )
    track.add_argument(
        "--to", required=True, choices=TRACKERS, metavar="NAME", help=f"the tracker: {', '.join(TRACKERS)}"
    )
    track.add_argument("--project", default="strands-env", metavar="NAME", help="the project (default: %(default)s)")
    track.add_argument("--name", metavar="NAME", help="name of the run (default: the folder's)")
    track.add_argument(
        "--step",
        type=int,
        default=0,
        metavar="N",
        help="step of an evaluation, as of its weights (default: %(default)s)",
    )
    score.add_argument("--reward", required=True, metavar="NAME", help=_NAMED)
    _add(score, "--reward-args", *_OPTIONS["environment"]["--reward-args"])
    score.add_argument("--output", required=True, metavar="OTHER", help="folder for the scored samples")
    score.add_argument(
        "--concurrency",
        type=at_least_one,
        default=10,
        metavar="N",
        help="samples at the same time (default: %(default)s)",
    )
    again.add_argument(
        "files", nargs="+", metavar="FILE", help="evaluations with --keep-trajectories, journals, training steps"
    )
    again.add_argument(
        "--tools",
        choices=("recorded", "live"),
        default="recorded",
        help="recorded: tools return what they returned then; live: they run (default: %(default)s)",
    )
    model_options = {name: _OPTIONS["model"][name] for name in _REPLAYED}
    for name, option in {**_OPTIONS["environment"], **model_options}.items():
        shown_value, help_text, settings = (*option, {})[:3]
        _add(again, name, shown_value, help_text.split(" (default:")[0], {**settings, "default": None})
    again.add_argument(
        "--html", action="store_true", help="write a page with the record and the run next to each other"
    )
    terminal.add_page_options(again, "replay.html")
    compare.add_argument("first", type=evaluation_in, metavar="A", help="--output of the first evaluation")
    compare.add_argument(
        "second", type=evaluation_in, metavar="B", help="--output of the second one; the difference is B - A"
    )
    for command, page in ((report, "report.html"), (compare, "compare.html")):
        command.add_argument("--html", action="store_true", help="write an HTML page with plots and all samples")
        terminal.add_page_options(command, page)
    report.add_argument(
        "--prices",
        type=prices,
        metavar="P,C,S",
        help="price of a million prompt, cached and sampled tokens, as in 0.15,0.02,0.6; adds costs",
    )
    for command in (score, report, compare, again):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (watching, track, score, report, compare):
        _add(command, "--success-threshold", *_THRESHOLD)
    return parser


def at_least_one(text: str) -> int:
    """Parse a positive whole number."""
    if not re.fullmatch(r"\+?0*[1-9][0-9]*", text.strip()):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def at_least_one_or_auto(text: str) -> int | str:
    """Parse a positive whole number, or `auto`."""
    return text if text == "auto" else at_least_one(text)


def finite(text: str) -> float:
    """Parse a finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number


def prices(text: str) -> Prices:
    """Parse three prices."""
    from .eval.metrics import Prices

    parts = [finite(part) for part in text.split(",")]
    if len(parts) != 3 or min(parts) < 0:
        raise argparse.ArgumentTypeError(f"{text} is not three prices such as 0.15,0.02,0.6")
    return Prices(*parts)


_NAMED = "a name from `strands-env list`, or your package.Class"
_JSON: dict[str, Any] = {"type": json_object, "default": {}}
_FLAG: dict[str, Any] = {"action": "store_true"}
_THRESHOLD = (
    "X",
    "a sample with at least this reward is a success (default: %(default)s)",
    {"type": finite, "default": 1.0},
)
_REPLAYED = ("--model", "--tokenizer", "--chat-template", "--tool-parser", "--sampling-params", "--model-args")
"""Options of the model that a replay may change."""

_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "tasks": {
        "--dataset": (
            "PATH",
            ".jsonl, .json, .csv, .tsv or .parquet, or a folder with such files as on the Hugging Face Hub; "
            "with --benchmark, a local copy of it",
        ),
        "--split": ("NAME", "the files of a folder to use, such as test"),
        "--benchmark": ("NAME", f"{_NAMED}, or reasoning_gym:FAMILY"),
        "--question-field": ("NAME", "the field with the question (default: question, problem, prompt, ...)"),
        "--answer-field": ("NAME", "the field with the right answer (default: answer, ground_truth, label, ...)"),
        "--id-field": ("NAME", "the field with the task's id (default: id, unique_id, ...)"),
        "--limit": ("N", "run the first N tasks only", {"type": at_least_one}),
    },
    "environment": {
        "--env": ("NAME", _NAMED),
        "--env-args": ("JSON", "further arguments of the environment", _JSON),
        "--system-prompt": ("TEXT", "replaces the environment's system prompt"),
        "--reward": (
            "NAME",
            "a name from `strands-env list`, your package.Class, or env for the environment's own "
            "(default: %(default)s)",
            {"default": "math"},
        ),
        "--reward-args": ("JSON", "arguments of the reward", _JSON),
    },
    "model": {
        "--backend": (
            "NAME",
            f"{', '.join(BACKENDS)} (default: %(default)s)",
            {"choices": tuple(BACKENDS), "default": "sglang"},
        ),
        "--base-url": ("URL", f"sglang, openai: the server's address (default for sglang: {DEFAULT_URL})"),
        "--model": (
            "NAME",
            "the model's name, or for sglang its folder (default for sglang: what the server has, if that is "
            "on this machine)",
        ),
        "--tokenizer": ("PATH", "sglang: the tokenizer's folder or name (default: --model)"),
        "--chat-template": ("FILE", "sglang: Jinja file to use as the chat template"),
        "--tool-parser": ("NAME", "sglang: the tool parser (default: the model family's)"),
        "--region": ("NAME", "bedrock: the AWS region"),
        "--temperature": ("X", "sampling temperature", {"type": finite}),
        "--top-p": ("X", "sample from this share of the probability", {"type": finite}),
        "--max-new-tokens": ("N", "tokens of one answer; by default up to the context", {"type": at_least_one}),
        "--sampling-params": ("JSON", "further sampling parameters", _JSON),
        "--model-args": ("JSON", "further configuration of the model", _JSON),
        "--client-args": ("JSON", "sglang, openai: arguments of the client", _JSON),
    },
    "run": {
        "--output": ("DIR", "folder for the results"),
        "--n-samples": ("N", "samples of each task (default: %(default)s)", {"type": at_least_one, "default": 1}),
        "--concurrency": (
            "N",
            "episodes at the same time; auto: as many as the servers have room for (default: %(default)s)",
            {"type": at_least_one_or_auto, "default": 10},
        ),
        "--ray": (
            "ADDRESS",
            "run the episodes on the Ray cluster at host:port (default: that of RAY_ADDRESS or this machine)",
            {"nargs": "?", "const": "auto"},
        ),
        "--ray-args": ("JSON", "further arguments of RayExecutor", _JSON),
        "--keep-tokens": (None, "keep token ids, loss masks and logprobs", _FLAG),
        "--keep-trajectories": (None, "keep every model call, one file per sample", _FLAG),
        "--journal": (None, "write episodes as they happen, so that a later run continues them", _FLAG),
        "--stop-after-failures": (
            "N",
            "stop after N failed samples in a row (default: %(default)s)",
            {"type": at_least_one, "default": 20},
        ),
        "--retry-errors": (None, "run samples again that counted as wrong after an error", _FLAG),
        "--json": (None, "print the metrics as JSON", _FLAG),
        "--verbose": (None, "log what happens", _FLAG),
        "--success-threshold": _THRESHOLD,
    },
}
"""The options of `eval` by group: what a value is, the help, and further arguments of `add_argument`."""


def _add(command: Any, name: str, shown: str | None, help_text: str, settings: dict[str, Any] | None = None) -> None:
    value = {"metavar": shown} if shown else {}
    command.add_argument(name, help=help_text, **value, **(settings or {}))


def _add_evaluation_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="JSON file with options; the command line overrides it"
    )
    for title, options in _OPTIONS.items():
        group = command.add_argument_group(title)
        for name, option in options.items():
            _add(group, name, *option)


def options_in_file(path: Path) -> list[str]:
    """The options in a JSON file, as arguments of a command line.

    Raises:
        UsageError: The file cannot be read, or has unknown options or wrong values.
    """
    try:
        content = json_object(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    parser = terminal.Parser(exit_on_error=False)
    _add_evaluation_options(parser)
    known = vars(parser.parse_args([]))
    options: list[str] = []
    for name, value in content.items():
        option = name.replace("-", "_")
        if option not in known or option == "config":
            raise UsageError(f"--config {path}: there is no option {name!r}{meant(option, known)}")
        argument = f"--{option.replace('_', '-')}"
        if not isinstance(value, bool):
            argument += f"={value if isinstance(value, str) else json.dumps(value)}"
        given = [] if value is False else [argument]
        try:
            parsed = vars(parser.parse_args(given))[option]
        except argparse.ArgumentError:
            parsed = None
        if parsed is None or parsed != value:
            raise UsageError(f"--config {path}: {name} cannot be {json.dumps(value)}")
        options += given
    return options


# --- subcommands ---


def list_names(arguments: argparse.Namespace) -> int:
    """Print the names of benchmarks, environments, rewards and backends; return the exit code."""
    from .eval.benchmarks import BENCHMARKS

    lines = [paint("benchmarks", "bold")]
    lines += (
        f"{benchmark.name:<10}  {benchmark.size:>4} tasks  {benchmark.repository} ({benchmark.split})"
        for benchmark in BENCHMARKS.values()
    )
    lines += _unusable(needs("datasets", "datasets")(), "without --dataset")
    registered, failures = registered_benchmarks()
    lines += (f"{name:<10}  {evaluator.__module__}.{evaluator.__qualname__}" for name, evaluator in registered.items())
    for module, reason in failures.items():
        lines += [module, *_unusable(reason)]
    for title, kind in (("environments", ENVIRONMENTS), ("rewards", REWARDS)):
        lines += ["", paint(title, "bold")]
        for name, path in kind.paths().items():
            lines += [f"{name:<10}  {path}", *_unusable(why_not(kind, name))]
    lines += ["", paint("backends", "bold")]
    for name in BACKENDS:
        lines += [name, *_unusable(needs(*PACKAGES[name])() if name in PACKAGES else None)]
    return say(*lines)


def _unusable(reason: str | None, what: str = "cannot run") -> list[str]:
    """Why something cannot be used, in lines below its name."""
    if reason is None:
        return []
    return [paint(line, "yellow") for line in terminal.wrapped(f"    {what}: {reason}")]


def evaluate(arguments: argparse.Namespace) -> int:
    """Run an evaluation; return the exit code."""
    from strands_sglang import SGLangClientError

    from .core import RewardError
    from .eval import DuplicateTaskError

    terminal.log(logging.INFO if arguments.verbose else logging.ERROR)
    if not arguments.verbose:  # unknown tools and cut-off answers are ordinary, and the results have them
        logging.getLogger("strands").setLevel(logging.CRITICAL)
        # Nothing else shows tools that the model does not see, or that `--concurrency auto` has nothing to follow.
        for name in ("strands_sglang.templates", "strands_env.eval.concurrency"):
            logging.getLogger(name).setLevel(logging.WARNING)
    missing = [f"--{name}" for name in ("env", "output") if getattr(arguments, name) is None]
    if arguments.benchmark is None and arguments.dataset is None:
        missing.insert(0, "--dataset PATH or --benchmark NAME")
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given")
    try:
        check_names(arguments)
        model = model_config(arguments)
        with waiting("loading the model's tokenizer" if arguments.backend == "sglang" else "preparing the model"):
            model_factory: Any = model_factory_of(arguments, model)
        with waiting(f"preparing {arguments.env}"):
            env_factory, reward = named_environment(arguments, model_factory)
        evaluator = named_evaluator(arguments, env_factory, run_config(arguments, model))
        with waiting(f"loading and checking the tasks of {arguments.benchmark or arguments.dataset}"):
            actions = load_actions(arguments, evaluator, reward)
        with waiting("connecting to the Ray cluster") if arguments.ray else contextlib.nullcontext():
            evaluator.executor = named_executor(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UsageError(error) from error
    except (RewardError, SGLangClientError) as error:  # the machine starts no worker that could read a ground truth
        tell(f"strands-env: {unreached(error, arguments)}")
        return FAILED
    except Exception as error:  # code that is named on the command line may raise anything
        raise UsageError(raised_by_named_code(error)) from error

    async def run() -> Any:
        if model["backend"] == "sglang":  # results depend on the served weights; other backends name theirs
            with waiting("asking the server which weights it serves"):
                served = await model_factory.served()
            if not terminal.is_terminal(sys.stderr):  # there is no bar that shows a server that does not answer
                logging.getLogger("strands_sglang.client.balancer").setLevel(logging.WARNING)
            evaluator.config.update({f"served_{name}": value for name, value in served.items()})
        return await evaluator.run(actions)

    try:
        return finish(arguments, run(), evaluator.compute_metrics, "report", arguments.output, "--html", "--open")
    except SGLangClientError as error:
        tell(f"strands-env: {unreached(error, arguments)}")
        return FAILED
    except DuplicateTaskError as error:
        raise UsageError(error) from error


def check_env(arguments: argparse.Namespace) -> int:
    """Check an environment with each task; return the exit code."""
    from .check import check_environment

    if arguments.dataset is None and arguments.benchmark is None:
        raise UsageError("--dataset PATH or --benchmark NAME must be given")
    logging.getLogger("strands_env.core").setLevel(logging.CRITICAL)  # the findings say it
    try:
        with named_code():
            env_factory, _ = named_environment(arguments, None)
            benchmark = named_benchmark(arguments)
            evaluator = None if benchmark is None else benchmark(env_factory)
            actions = load_actions(arguments, evaluator, None)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UsageError(error) from error

    def make(model_factory: Any, action: Any) -> Any:
        with named_code():
            return named_environment(arguments, model_factory)[0](action)

    colors = {"ok": "green", "failed": "red", "not tried": "yellow"}
    code = 0
    for number, action in enumerate(actions, 1):
        say(paint(f"{action.task_context.id or f'task {number}'}", "bold"))
        try:
            findings = asyncio.run(check_environment(make, action))
        except ValueError as error:
            raise UsageError(error) from error
        for finding in findings:
            detail = f" ({finding.detail})" if finding.detail else ""
            say(f"  {paint(f'{finding.verdict:<9}', colors[finding.verdict])}  {finding.name}{detail}")
            if finding.verdict == "failed":
                code = FAILED
    return code


def finish(
    arguments: argparse.Namespace,
    work: Coroutine[Any, Any, Any],
    metrics_of: Callable[[Any], dict[str, float]],
    *following: str,
) -> int:
    """Run an evaluation to its end, print its metrics and where its results are; return the exit code.

    Args:
        arguments: The command line.
        work: Returns the samples.
        metrics_of: Returns their metrics.
        *following: The command that shows more.
    """
    from .core import RewardError
    from .eval import CheckpointError, EvaluationStoppedError, ExecutorError
    from .eval.checkpoint import encode, replace_file, results_file, side_file
    from .eval.metrics import end_lines, metric_lines

    try:
        results = asyncio.run(until_stopped(work))
        with waiting("computing the metrics"):
            metrics = metrics_of(results)
        replace_file(side_file(results_file(arguments.output), ".metrics.json"), encode(metrics))
    except (CheckpointError, EvaluationStoppedError, ExecutorError, RewardError, OSError) as error:
        tell(f"strands-env: {in_options(one_line(error))}")
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell(f"strands-env: stopped; {arguments.output} has what is finished, run the same command to continue")
        return STOPPED
    code = FAILED if metrics["dropped_samples"] or metrics["waiting_samples"] else 0
    if arguments.json:
        return say(as_json(metrics), code=code)
    shown = _painted([*metric_lines(metrics), *map(in_options, end_lines(results))])
    if arguments.success_threshold != 1.0:  # it is not in the files
        following = (*following, "--success-threshold", f"{arguments.success_threshold:g}")
    hint = [f"results in {arguments.output}; see them:", f"  {shlex.join(['strands-env', *following])}"]
    if dropped := metrics["dropped_samples"]:
        hint.insert(0, f"the same command runs {counted(int(dropped), 'dropped sample')} again")
    return say(*shown, "", *hint, code=code)


def report_metrics(arguments: argparse.Namespace) -> int:
    """Print the metrics of an evaluation; return the exit code."""
    from .eval import read_results, standard_metrics
    from .eval.metrics import costs, end_lines, metric_lines

    if writes_page(arguments):
        from .report import report_page

        page = functools.partial(report_page, prices=arguments.prices)
        return write_page(arguments, page, "report.html", arguments.folder)
    threshold = arguments.success_threshold
    with reading(arguments.folder):
        run, results = read_results(arguments.folder)
        n = run.n_samples_per_prompt
        metrics = standard_metrics(results, n_samples_per_prompt=n, success_threshold=threshold)
    if arguments.prices is not None:
        metrics |= costs(results, arguments.prices, success_threshold=threshold)
    if arguments.json:
        return say(as_json(metrics))
    title = f"{run.benchmark or 'evaluation'}: {len(run.prompts)} prompts x {n} samples"
    return say(title, "", *_painted([*metric_lines(metrics), *end_lines(results)]))


def watch_run(arguments: argparse.Namespace) -> int:
    """Show a run until it is over; return the exit code."""
    from .eval import CheckpointError
    from .watch import watch

    try:
        view = watch(arguments.folder, success_threshold=arguments.success_threshold)
    except CheckpointError as error:
        raise UsageError(error) from error
    except OSError as error:  # standard output cannot be written
        return terminal.NO_READER if isinstance(error, BrokenPipeError) else say(code=FAILED)
    if view is None:
        if not Path(arguments.folder).exists():
            raise UsageError(f"{arguments.folder} does not exist")
        raise UsageError(f"{arguments.folder}: neither results of an evaluation nor metrics.csv of a training run")
    return FAILED if view.has_stopped else 0


def track_run(arguments: argparse.Namespace) -> int:
    """Send metrics to a tracker; return the exit code."""
    from .eval import read_results, standard_metrics
    from .eval.checkpoint import flat
    from .trackers import open_tracker
    from .watch import EvaluationView, open_run, read_steps

    folder = Path(arguments.folder)
    with reading(arguments.folder):
        opened = open_run(folder)
        if opened is None:
            raise ValueError(f"{folder}: neither results of an evaluation nor metrics.csv of a training run")
        config: dict[str, Any] = {}
        if isinstance(opened, EvaluationView):
            run, results = read_results(folder)
            config = flat(run.facts)
            metrics = standard_metrics(
                results,
                n_samples_per_prompt=run.n_samples_per_prompt,
                success_threshold=arguments.success_threshold,
            )
            steps = [(arguments.step, metrics)]
        else:
            _, rows = read_steps(folder / "metrics.csv")
            numbers = [row.pop("step", math.nan) for row in rows]
            steps = [
                (int(at) if abs(at) < 2**63 else n, row)
                for n, (at, row) in enumerate(zip(numbers, rows, strict=True), 1)
            ]
    place = (folder if folder.is_dir() else folder.parent) / "tensorboard"
    name = arguments.name or folder.resolve().stem
    try:
        with open_tracker(arguments.to, project=arguments.project, run=name, folder=place, config=config) as tracker:
            for step, metrics in steps:
                tracker.log(metrics, step)
    except ImportError as error:
        raise UsageError(error) from error
    except Exception as error:  # whatever the tracker raises: no account, or no server
        tell(f"strands-env: --to {arguments.to}: {one_line(error)}")
        return FAILED
    return say(f"{counted(len(steps), 'step')} logged to {arguments.to} as {name}")


def score_results(arguments: argparse.Namespace) -> int:
    """Score the saved episodes of an evaluation with another reward; return the exit code."""
    from .eval import score, standard_metrics
    from .eval.checkpoint import read_run

    terminal.log(logging.ERROR)
    if arguments.reward == OWN_REWARD:
        raise UsageError("--reward env: there is no environment; name a reward")
    with reading(arguments.folder):
        run = read_run(arguments.folder)
    metrics_of = functools.partial(
        standard_metrics,
        n_samples_per_prompt=run.n_samples_per_prompt,
        success_threshold=arguments.success_threshold,
    )
    try:
        with named_code():
            reward = named_reward(arguments)
        work = score(
            arguments.folder,
            reward,
            arguments.output,
            config=with_reward(dict(run.config), arguments),
            max_concurrency=arguments.concurrency,
        )
        return finish(arguments, work, metrics_of, "compare", arguments.folder, arguments.output)
    except (ValueError, ImportError) as error:
        raise UsageError(error) from error


def replay_episodes(arguments: argparse.Namespace) -> int:
    """Run recorded episodes again; return the exit code."""
    from .replay import Replayed, as_data, is_evaluation, is_step, recorded_in, replay, replay_page, summary

    makes_page = writes_page(arguments)
    for file in arguments.files:
        with _looking():
            if not Path(file).exists():
                raise UsageError(f"{file}: no such file or folder")
    logging.getLogger("strands").setLevel(logging.CRITICAL)
    logging.getLogger("strands_env.core").setLevel(logging.CRITICAL)  # the report says it
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    done: list[Replayed] = []

    async def run() -> None:
        parts = [*chain.from_iterable(recorded_in(Path(file)) or [Path(file)] for file in arguments.files)]
        made: dict[str, Any] = {}  # of the last evaluation, or by the options alone
        for part in parts:
            key = str(part) if is_evaluation(part) else ""
            try:
                if key not in made and not is_step(part):  # a step has no tasks
                    made = {key: environment_of_run(arguments, str(part))}
            except (ValueError, TypeError, OSError, ImportError) as error:
                if len(parts) == 1:
                    raise
                done.append(Replayed(str(part), {"agent": f"the environment cannot be made: {one_line(error)}"}))
                tell(paint(str(done[-1]), "yellow"))
                continue
            async for episode in replay([part], made.get(key), tools=arguments.tools):
                done.append(episode)
                if not episode.is_same and not arguments.json:
                    say(paint(str(episode), "yellow" if episode.difference is None else "red"))
                if not makes_page or episode.difference is None:
                    episode.recorded = episode.now = None  # thousands of episodes need no memory

    code = 0
    try:
        asyncio.run(until_stopped(run()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = STOPPED
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UsageError(error) from error
    code = code or (0 if done and all(episode.is_same for episode in done) else FAILED)
    if arguments.json:
        return say(as_json([*map(as_data, done)]), code=code)
    say(*summary(done))
    if makes_page and any(episode.difference is not None for episode in done):
        with reading(*arguments.files):
            page = replay_page(done)
        save_page(arguments, page, "replay.html", at="#finding-1")
    return code


def environment_of_run(arguments: argparse.Namespace, file: str) -> Any:
    """A function that makes the environment of recorded episodes: that of their evaluation, with the options' changes.

    None if neither names one.

    Raises:
        ValueError: An option is wrong or missing, or the evaluation's environment cannot be made here.
    """
    from .eval import CheckpointError
    from .eval.checkpoint import read_run

    try:
        config: dict[str, Any] = dict(read_run(file).config)
    except CheckpointError:
        config = {}
    known = vars(build_parser().parse_args(["eval"]))
    given = {name: value for name, value in vars(arguments).items() if value is not None and name in known}
    names = ("env", "env_args", "system_prompt", "reward", "reward_args", "tokenizer", "tool_parser", "sampling_params")
    recorded: dict[str, Any] = {name: config[name] for name in names if name in config}
    recorded |= {"model": config.get("model_id"), "model_args": config.get("config", {})}
    merged = argparse.Namespace(**{**known, **recorded, **given, "base_url": "http://127.0.0.1:9"})
    if merged.env is None:
        return None
    if merged.backend == "sglang" and not (merged.model or merged.tokenizer):
        raise ValueError(f"{file}: no model is recorded with it: name --model or --tokenizer")
    model_factory = model_factory_of(merged, model_config(merged))
    with named_code():
        return named_environment(merged, model_factory)[0]


def compare_results(arguments: argparse.Namespace) -> int:
    """Print the difference between two evaluations; return the exit code."""
    import dataclasses

    from .eval import read_results
    from .eval.metrics import compare, comparison_lines

    folders = (arguments.first, arguments.second)
    if writes_page(arguments):
        from .report import comparison_page

        return write_page(arguments, comparison_page, "compare.html", *folders)
    with reading(*folders):
        first, second = map(read_results, folders)
        comparison = compare(first, second, success_threshold=arguments.success_threshold)
    if arguments.json:
        return say(as_json(dataclasses.asdict(comparison)))
    return say(*_painted(comparison_lines(comparison)))


@contextlib.contextmanager
def reading(*folders: str) -> Iterator[None]:
    """Show what is read.

    Raises:
        UsageError: It cannot be read, or used.
    """
    from .eval import CheckpointError

    try:
        with waiting(f"reading {' and '.join(folders)}"):
            yield
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        raise UsageError(error) from error


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """Report a path that cannot be looked at: in a folder that may not be entered, or with too long a name."""
    try:
        yield
    except OSError as error:
        raise UsageError(error) from error


@_looking()
def evaluation_in(folder: str) -> str:
    """Return a folder, or the only results file in it and the folders in it, if it is not that of an evaluation.

    Raises:
        UsageError: There are several, which the message names; or it cannot be looked at.
    """
    from .eval.checkpoint import results_file, side_file

    ending = ".run.json"
    if side_file(results_file(folder), ending).exists() or not Path(folder).is_dir():
        return folder
    plans = [*Path(folder).glob(f"*{ending}"), *Path(folder).glob(f"*/*{ending}")]
    found = sorted(f"{plan}".removesuffix(ending) + ".jsonl" for plan in plans)
    if len(found) > 1:
        for file in found:
            tell(file)
        raise UsageError(f"{folder}: there are several evaluations: name one of these")
    if found:
        tell(f"reading {found[0]}")
    return found[0] if found else folder


@_looking()
def run_in(folder: str) -> str:
    """Return a folder if it is that of a training run; else what `evaluation_in` returns."""
    from .watch import open_run

    return evaluation_in(folder) if open_run(folder) is None else folder


def writes_page(arguments: argparse.Namespace) -> bool:
    """Whether a command writes a page instead of text.

    Raises:
        UsageError: Options contradict each other.
    """
    if (arguments.output is not None or arguments.open) and not arguments.html:
        raise UsageError("--output and --open need --html")
    if arguments.html and arguments.json:
        raise UsageError("--html and --json cannot be used together")
    return bool(arguments.html)


def write_page(arguments: argparse.Namespace, made: Callable[..., str], name: str, *folders: str) -> int:
    """Write the page of evaluations, say where, and return the exit code.

    Args:
        arguments: The command line.
        made: Returns the page of the folders.
        name: The file's default name.
        folders: The evaluations.
    """
    with reading(*folders):
        page = made(*folders, success_threshold=arguments.success_threshold)
    return save_page(arguments, page, name)


def save_page(arguments: argparse.Namespace, page: str, name: str, at: str = "") -> int:
    """Write a page, say where, and return the exit code.

    Args:
        arguments: The command line.
        page: The page.
        name: The file's default name.
        at: Where on the page it is opened.
    """
    from .eval import CheckpointError
    from .eval.checkpoint import replace_file

    output = (arguments.output or Path(name)).absolute()
    try:
        replace_file(output, page.encode("utf-8", "replace"))
    except CheckpointError as error:
        raise UsageError(f"--output {error}") from error
    return terminal.say_page("strands-env", output, is_opened=arguments.open, at=at)


async def until_stopped(work: Coroutine[Any, Any, Any]) -> Any:
    """Await work that Ctrl-C and SIGTERM cancel; a second signal ends the process without waiting for episodes."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        tell("\nstrands-env: stopping the episodes")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await task


# --- what the command line names ---


@contextlib.contextmanager
def named_code() -> Iterator[None]:
    """Run code that is named on the command line, which may raise anything.

    Raises:
        ValueError: It raises what no command expects.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(raised_by_named_code(error)) from error


def raised_by_named_code(error: Exception) -> str:
    """Name an error that no command expects, and the options whose code may have raised it."""
    return f"--env, --reward or --benchmark: {type(error).__name__}: {error}"


def check_names(arguments: argparse.Namespace) -> None:
    """Check that names and files exist, which takes no server and no tokenizer.

    Raises:
        ValueError: One of them does not.
    """
    load(ENVIRONMENTS, arguments.env)
    if arguments.reward != OWN_REWARD:
        load(REWARDS, arguments.reward)
    is_file = named_benchmark(arguments) is None and arguments.dataset is not None
    if is_file and not Path(arguments.dataset).exists():
        raise ValueError(f"--dataset {arguments.dataset}: no such file or folder")
    if arguments.benchmark is None:
        load_dataset(arguments, limit=1)


def model_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's configuration for `build_model_factory`.

    Raises:
        OSError: The chat template's file cannot be read.
        ValueError: An option does not apply to the backend, or one is missing.
    """
    backend = arguments.backend
    for name in sorted(set.union(*BACKENDS.values()) - BACKENDS[backend]):
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')} does not apply to --backend {backend}")
    config = dict(arguments.model_args)
    if arguments.chat_template is not None:
        config["chat_template"] = Path(arguments.chat_template).read_text(encoding="utf-8")
    tokenizer = arguments.tokenizer
    if arguments.model is None and tokenizer is None:
        if backend != "sglang":
            raise ValueError("--model must be given")
        tokenizer = served_tokenizer(arguments)
    given = {
        "base_url": arguments.base_url,
        "model_id": arguments.model,
        "tokenizer": tokenizer,
        "tool_parser": arguments.tool_parser,
        "region_name": arguments.region,
        "client": arguments.client_args or None,
    }
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_new_tokens")}
    return {
        "backend": backend,
        **{name: value for name, value in given.items() if value is not None},
        "sampling_params": {
            **arguments.sampling_params,
            **{name: value for name, value in sampling.items() if value is not None},
        },
        "config": config,
    }


def served_tokenizer(arguments: argparse.Namespace) -> str:
    """The path or name of the tokenizer that the server has, which loads on this machine.

    Raises:
        SGLangClientError: The server does not say what it serves.
        ValueError: Its tokenizer is not on this machine.
    """
    from strands_sglang import SGLangClient, get_tokenizer

    url = arguments.base_url or DEFAULT_URL

    async def ask() -> dict[str, Any]:
        async with SGLangClient(url, **{"max_retries": 3, **arguments.client_args}) as client:
            return await client.model_info()

    try:
        info = asyncio.run(ask())
    except (ValueError, TypeError) as error:
        option = "--client-args" if arguments.client_args else "--base-url"
        raise ValueError(f"{option}: {in_options(str(error))}") from error
    path = str(info.get("tokenizer_path") or info.get("model_path"))
    try:
        get_tokenizer(path)
    except Exception as error:  # whatever transformers, the Hub or the network raises
        raise ValueError(
            f"the server's tokenizer {path} cannot be loaded on this machine ({type(error).__name__}): "
            "give --model or --tokenizer"
        ) from error
    return path


def unreached(error: Exception, arguments: argparse.Namespace) -> str:
    """What to do if the evaluation cannot begin, in a line."""
    from strands_sglang import SGLangConnectionError

    if not isinstance(error, SGLangConnectionError):
        return in_options(one_line(error))
    return (
        f"no server answers at {arguments.base_url or DEFAULT_URL}: "
        "start one (`strands-sglang serve`), or correct --base-url"
    )


_OPTION_OF = {
    r"\bbase_url\b=?": "--base-url",
    r"\btool_parser\b=?": "--tool-parser",
    r"\bsampling_params\b=?": "--sampling-params",
    r"\bregion_name\b=?": "--region",
    r"\bmodel_id\b=?": "--model",
    r"\bchat_template=(<jinja text>)?": "--chat-template",
    r"\btokenizer=": "--tokenizer",  # without the sign it is a word
    r"; use another file( for this one)?$": "; use another --output",
}


_DATASET_OPTION_OF = {r"\b(question|answer|id)_field$": r"--\1-field", r"\bpass split=": "give --split "}


def in_options(text: str, options: Mapping[str, str] = _OPTION_OF) -> str:
    """A message with the options instead of the arguments that they set."""
    for argument, option in options.items():
        text = re.sub(argument, option, text)
    return text


def model_factory_of(arguments: argparse.Namespace, model: dict[str, Any]) -> Any:
    """Build the model factory; errors name options.

    Raises:
        ValueError: A value is wrong, or there is no such tokenizer.
        ImportError: The backend's package is not installed.
    """
    from .core.models import ModelArgumentError, build_model_factory

    try:
        return build_model_factory(model)
    except OSError as error:
        option = "--model" if arguments.tokenizer is None else "--tokenizer"
        name = arguments.tokenizer or arguments.model
        raise ValueError(f"{option} {name}: {str(error).removeprefix(f'{name}: ')}") from error
    except ModelArgumentError as error:
        option = {"client": "--client-args", "config": "--model-args"}[error.field]
        raise ValueError(f"{option}: {in_options(str(error))}") from error
    except ValueError as error:
        raise ValueError(in_options(str(error))) from error


def run_config(arguments: argparse.Namespace, model: dict[str, Any]) -> dict[str, Any]:
    """What the results depend on: everything but the server's address and the client's settings."""
    from .core.identity import describe

    return {
        "env": arguments.env,
        "env_args": describe(arguments.env_args),  # without credentials
        "system_prompt": arguments.system_prompt,
        **with_reward({}, arguments),
        **{name: value for name, value in model.items() if name not in ("base_url", "client", "region_name")},
    }


def with_reward(config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """A configuration with the reward of the command line."""
    from .core.identity import describe

    others = {name: value for name, value in config.items() if name != "reward_args"}
    # Left out if empty, as in the files of releases without it.
    given = {"reward_args": describe(arguments.reward_args)} if arguments.reward_args else {}
    return {**others, "reward": arguments.reward, **given}


def named_environment(arguments: argparse.Namespace, model_factory: Any) -> tuple[Any, Any]:
    """A function that makes the environment of a sample, and its reward function if it is known in advance.

    The environment is made with `model_factory`, `reward_fn` (unless it takes none, or `--reward env`),
    `system_prompt` if one is given, and `--env-args`.

    Raises:
        ValueError: It does not exist, or it or its reward refuses its arguments.
    """
    target = load(ENVIRONMENTS, arguments.env)
    if not callable(target):
        raise ValueError(f"--env {arguments.env} cannot be called to make an environment")
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    given: dict[str, Any] = {"model_factory": model_factory, **arguments.env_args}
    if arguments.system_prompt is not None:
        given["system_prompt"] = arguments.system_prompt
    reward = named_reward(arguments)
    if reward is not None and (takes_any or "reward_fn" in parameters):
        given["reward_fn"] = reward
    try:
        inspect.signature(target).bind(**given)
        # A class is made once in advance: it raises now what it would raise for every sample.
        environment = target(**given) if inspect.isclass(target) else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"--env {arguments.env} with --env-args: {error}") from error
    if environment is not None:
        reward = getattr(environment, "reward_fn", None)
    return lambda action: target(**given), reward


def named_reward(arguments: argparse.Namespace) -> Any:
    """The reward that `--reward` names; None for the environment's own."""
    if arguments.reward == OWN_REWARD:
        if arguments.reward_args:
            raise ValueError("--reward-args does not apply to --reward env: use --env-args")
        return None
    target = load(REWARDS, arguments.reward)
    if not callable(target):
        raise ValueError(f"--reward {arguments.reward} cannot be called to make a reward")
    try:
        inspect.signature(target).bind(**arguments.reward_args)
        return target(**arguments.reward_args)
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(f"--reward {arguments.reward} with --reward-args: {error}") from error


def named_benchmark(arguments: argparse.Namespace) -> Any:
    """The `Evaluator` subclass of `--benchmark`; None without one, and for the benchmarks of this package.

    Raises:
        ValueError: There is no such benchmark.
    """
    from .eval.benchmarks import BENCHMARKS

    if arguments.benchmark is None or arguments.benchmark in BENCHMARKS:
        return None
    return load_benchmark_class(arguments.benchmark, BENCHMARKS)


def named_evaluator(arguments: argparse.Namespace, env_factory: Any, config: dict[str, Any]) -> Evaluator:
    """The evaluator of the command line: that of a registered benchmark, or one for the tasks of a file.

    Raises:
        ValueError: There is no such benchmark, or its class does not take an evaluator's arguments.
    """
    from .eval import Evaluator

    name, benchmark = arguments.benchmark, named_benchmark(arguments)
    try:
        evaluator: Evaluator = (benchmark or Evaluator)(
            env_factory,
            n_samples_per_prompt=arguments.n_samples,
            max_concurrency=arguments.concurrency,
            keep_tokens=arguments.keep_tokens,
            keep_trajectories=arguments.keep_trajectories,
            journal=arguments.journal,
            output_path=arguments.output,
            config=config,
            success_threshold=arguments.success_threshold,
            stop_after_failures=arguments.stop_after_failures,
            retry_errors=arguments.retry_errors,
        )
    except TypeError as error:
        raise ValueError(f"--benchmark {name}: {error}") from error
    if benchmark is None or not evaluator.benchmark_name:
        evaluator.benchmark_name = name or Path(arguments.dataset).stem
    return evaluator


def named_executor(arguments: argparse.Namespace) -> Any:
    """The executor that `--ray` and `--ray-args` describe; None to run the episodes in this process.

    Raises:
        ImportError: Ray is not installed.
        OSError: There is no cluster at the address.
        ValueError: An argument is wrong.
    """
    if arguments.ray is None:
        if arguments.ray_args:
            raise ValueError("--ray-args needs --ray")
        return None
    try:
        from .ray import RayExecutor

        return RayExecutor(arguments.ray, **arguments.ray_args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--ray-args: {error}") from error
    except ImportError as error:
        raise ImportError(f"--ray: {error}") from error
    except OSError as error:
        raise OSError(f"--ray: {error}") from error


def load_dataset(arguments: argparse.Namespace, **further: Any) -> list[Action]:
    """The tasks of `--dataset`; further arguments are those of `load_tasks`.

    Raises:
        ValueError: There are none, or they cannot be loaded.
    """
    from .eval.benchmarks import TaskError, load_tasks

    fields = {name: getattr(arguments, name) for name in ("question_field", "answer_field", "id_field", "split")}
    try:
        return load_tasks(arguments.dataset, **fields, needs_answer=arguments.reward != OWN_REWARD, **further)
    except TaskError as error:
        raise ValueError(in_options(str(error), _DATASET_OPTION_OF)) from error


def load_actions(arguments: argparse.Namespace, evaluator: Evaluator | None, reward: Any) -> list[Action]:
    """The tasks that the command line names, with ground truths that the reward can compare with.

    Raises:
        ValueError: There are none, or they cannot be loaded.
    """
    from .eval.benchmarks import BENCHMARKS, TaskError, checked, load_benchmark

    further = {"limit": arguments.limit, "check_truth": getattr(reward, "check_truth", None)}
    if arguments.benchmark is None:
        return load_dataset(arguments, **further)
    if arguments.question_field or arguments.answer_field or arguments.id_field or arguments.split:
        raise ValueError("--question-field, --answer-field, --id-field and --split do not apply to --benchmark")
    if arguments.benchmark in BENCHMARKS:
        try:
            return load_benchmark(arguments.benchmark, arguments.dataset, **further)
        except TaskError as error:
            message = str(error).replace("or pass a local file", "or pass a local copy as --dataset")
            raise ValueError(message) from error
    if arguments.dataset is not None:
        raise ValueError(f"--dataset does not apply to --benchmark {arguments.benchmark}, which loads its own tasks")
    assert evaluator is not None, "a benchmark that is a class has one"
    return checked(evaluator.load_dataset(), f"--benchmark {arguments.benchmark}", **further)


# --- what it prints ---


def as_json(value: Any) -> str:
    """A value as JSON, with null instead of numbers that are not finite."""
    from .eval.checkpoint import decode, encode

    return json.dumps(decode(encode(value)), indent=2)


def one_line(error: BaseException) -> str:
    """An error as one line."""
    return shown.one_line(error) or type(error).__name__


def _painted(lines: Sequence[str]) -> Iterator[str]:
    """Lines of a report: the first one bold, failed samples red."""
    for number, line in enumerate(lines):
        if number == 0:
            yield paint(line, "bold")
        elif line.startswith(("dropped", "errored")):
            yield paint(line, "red")
        else:
            yield line


if __name__ == "__main__":
    sys.exit(main())
