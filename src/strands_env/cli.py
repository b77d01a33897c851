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
import importlib
import inspect
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from .core.types import Action

FAILED = 1
WRONG_USAGE = 2
STOPPED = 130
NO_READER = 141
"""What a shell reports for a command that SIGPIPE ended."""

BACKENDS = ("sglang", "openai", "bedrock")

ENVIRONMENTS = {
    "calculator": "strands_env.environments.CalculatorEnvironment",
    "python": "strands_env.environments.PythonEnvironment",
    "agentcore": "strands_env.environments.AgentCoreCodeEnvironment",
    "mcp": "strands_env.environments.MCPServersEnvironment",
}

REWARDS = {
    "math": "strands_env.rewards.MathReward",
    "exact": "strands_env.rewards.ExactMatchReward",
    "regex": "strands_env.rewards.RegexReward",
}

OWN_REWARD = "env"
"""The environment brings its own."""


class UsageError(ValueError):
    """The command line, or something named on it, is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if None.
    """
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
        if getattr(arguments, "config", None) is not None:
            command, *options = sys.argv[1:] if argv is None else argv
            arguments = parser.parse_args([command, *options_in_file(arguments.config), *options])
        code: int = arguments.run(arguments)
    except SystemExit as ended:  # the parser has printed its help, or what is wrong
        raise SystemExit(say(code=ended.code)) from None
    except UsageError as error:
        tell(f"strands-env: {one_line(error)}")
        return WRONG_USAGE
    except ModuleNotFoundError as error:  # what subcommands import is in the extra
        tell(f"strands-env: {one_line(error)}: pip install 'strands-sglang[env]'")
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell("strands-env: stopped")
        return STOPPED
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `run` of what it parses is the subcommand's function."""
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
        command.add_argument("--success-threshold", **_THRESHOLD)
    return parser


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


_THRESHOLD: dict[str, Any] = {
    "type": finite,
    "default": 1.0,
    "metavar": "X",
    "help": "least reward of a success (default: 1.0)",
}
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "tasks": {
        "--benchmark": {"metavar": "NAME", "help": "see `strands-env list`"},
        "--dataset": {
            "metavar": "FILE",
            "help": ".jsonl, .json, .csv, .tsv or .parquet; with --benchmark: a local copy",
        },
        "--question-field": {"metavar": "NAME", "help": "default: question, problem, prompt, ..."},
        "--answer-field": {"metavar": "NAME", "help": "default: answer, ground_truth, label, ..."},
        "--id-field": {"metavar": "NAME", "help": "default: id, unique_id, ...; else a task's content names it"},
        "--limit": {"type": at_least_one, "metavar": "N", "help": "the first N tasks only"},
    },
    "environment": {
        "--env": {
            "metavar": "DOTTED.PATH",
            "help": "a name of `strands-env list`, or what makes an environment: package.Class",
        },
        "--env-args": {"type": json_object, "default": {}, "metavar": "JSON", "help": "its further arguments"},
        "--system-prompt": {"metavar": "TEXT", "help": "in place of the environment's own"},
        "--reward": {
            "default": "math",
            "metavar": "NAME",
            "help": "a name of `strands-env list`, a dotted path, or env: its own (default: math)",
        },
        "--reward-args": {"type": json_object, "default": {}, "metavar": "JSON", "help": "the reward's"},
    },
    "model": {
        "--backend": {"choices": BACKENDS, "default": "sglang", "help": "default: %(default)s"},
        "--base-url": {"metavar": "URL", "help": "the server (default for sglang: http://localhost:30000)"},
        "--model": {"metavar": "NAME", "help": "the model's name"},
        "--tokenizer": {"metavar": "PATH", "help": "sglang: folder or name (default: that of --model)"},
        "--chat-template": {"metavar": "FILE", "help": "sglang: Jinja file in place of the model's"},
        "--tool-parser": {"metavar": "NAME", "help": "sglang: in place of the one that the template tells"},
        "--region": {"metavar": "NAME", "help": "bedrock: AWS region"},
        "--temperature": {"type": finite, "metavar": "X"},
        "--top-p": {"type": finite, "metavar": "X"},
        "--max-new-tokens": {"type": at_least_one, "metavar": "N", "help": "of one answer"},
        "--sampling-params": {"type": json_object, "default": {}, "metavar": "JSON", "help": "further ones"},
        "--model-args": {"type": json_object, "default": {}, "metavar": "JSON", "help": "the model's configuration"},
        "--client-args": {
            "type": json_object,
            "default": {},
            "metavar": "JSON",
            "help": "sglang, openai: the client's",
        },
    },
    "run": {
        "--output": {"metavar": "DIR", "help": "where results are kept (needed)"},
        "--n-samples": {"type": at_least_one, "default": 1, "metavar": "N", "help": "of each task (default: 1)"},
        "--concurrency": {
            "type": at_least_one,
            "default": 10,
            "metavar": "N",
            "help": "episodes at once (default: 10)",
        },
        "--keep-tokens": {"action": "store_true", "help": "keep token ids, loss masks and logprobs"},
        "--keep-trajectories": {"action": "store_true", "help": "keep all model calls, one file per sample"},
        "--stop-after-failures": {
            "type": at_least_one,
            "default": 20,
            "metavar": "N",
            "help": "in a row (default: %(default)s)",
        },
        "--retry-errors": {
            "action": "store_true",
            "help": "run samples again that count as wrong because something failed",
        },
        "--json": {"action": "store_true", "help": "print the metrics as JSON"},
        "--verbose": {"action": "store_true", "help": "log what happens"},
        "--success-threshold": _THRESHOLD,
    },
}
"""The options of `eval`, by their groups: arguments of `add_argument`."""


def _add_evaluation_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="JSON object with these options; the command line goes first"
    )
    for title, options in _OPTIONS.items():
        group = command.add_argument_group(title)
        for name, settings in options.items():
            group.add_argument(name, **settings)


def options_in_file(path: Path) -> list[str]:
    """The options in a JSON file, as on a command line.

    Raises:
        UsageError: It cannot be read, or has options or values that the command line does not have.
    """
    try:
        content = json_object(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    parser = argparse.ArgumentParser(exit_on_error=False)
    _add_evaluation_options(parser)
    known = vars(parser.parse_args([]))
    options: list[str] = []
    for name, value in content.items():
        option = name.replace("-", "_")
        if option not in known or option == "config":
            raise UsageError(f"--config {path}: there is no option {name!r}")
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
    """Print what has a name; return the exit code."""
    from .eval.benchmarks import BENCHMARKS
    from .eval.metrics import table_lines

    rows = ([one.name, str(one.size), f"{one.repository} ({one.split})"] for one in BENCHMARKS.values())
    lines = table_lines([["benchmark", "tasks", "from"], *rows])
    for title, names in (("environment", ENVIRONMENTS), ("reward", REWARDS)):
        lines += ["", *table_lines([[title, "is"], *([name, path] for name, path in names.items())])]
    return say(*lines, "", f"backends: {', '.join(BACKENDS)}")


def evaluate(arguments: argparse.Namespace) -> int:
    """Run an evaluation; return the exit code."""
    from strands_sglang import SGLangClientError

    from .core import RewardError
    from .core.models import build_model_factory
    from .eval import CheckpointError, DuplicateTaskError, EvaluationStoppedError, Evaluator
    from .eval.checkpoint import encode, replace_file, results_file, side_file
    from .eval.metrics import end_lines, metric_lines

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
        model_factory: Any = build_model_factory(model)
        env_factory, reward = named_environment(arguments, model_factory)
        actions = load_actions(arguments, reward)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UsageError(error) from error
    except RewardError as error:  # the machine starts no worker that could read a ground truth
        tell(f"strands-env: {one_line(error)}")
        return FAILED
    except Exception as error:  # code that is named on the command line raises what it likes
        raise UsageError(f"--env or --reward: {type(error).__name__}: {error}") from error
    evaluator = Evaluator(
        env_factory,
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
    evaluator.benchmark_name = arguments.benchmark or Path(arguments.dataset).stem

    async def run() -> Any:
        if model["backend"] == "sglang":  # results depend on the weights that it serves; others have them by name
            served = await model_factory.served()
            evaluator.config.update({f"served_{name}": value for name, value in served.items()})
        return await evaluator.run(actions)

    try:
        results = asyncio.run(until_stopped(run()))
        metrics = evaluator.compute_metrics(results)
        replace_file(side_file(results_file(arguments.output), ".metrics.json"), encode(metrics))
    except (CheckpointError, EvaluationStoppedError, SGLangClientError) as error:
        tell(f"strands-env: {one_line(error)}")
        return FAILED
    except DuplicateTaskError as error:
        raise UsageError(error) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        tell(f"strands-env: stopped; what is finished is kept in {arguments.output}, the same command goes on with it")
        return STOPPED
    lines = [json.dumps(metrics, indent=2)] if arguments.json else [*metric_lines(metrics), *end_lines(results)]
    return say(*lines, code=FAILED if metrics["dropped_samples"] else 0)


def report_metrics(arguments: argparse.Namespace) -> int:
    """Print the metrics of an evaluation; return the exit code."""
    from .eval import CheckpointError, read_results, standard_metrics
    from .eval.metrics import end_lines, metric_lines

    try:
        run, results = read_results(arguments.folder)
    except CheckpointError as error:
        raise UsageError(error) from error
    metrics = standard_metrics(
        results, n_samples_per_prompt=run.n_samples_per_prompt, success_threshold=arguments.success_threshold
    )
    if arguments.json:
        return say(json.dumps(metrics, indent=2))
    title = f"{run.benchmark}: {len(run.prompts)} prompts x {run.n_samples_per_prompt} samples"
    return say(title, *metric_lines(metrics), *end_lines(results))


def compare_results(arguments: argparse.Namespace) -> int:
    """Print the difference of two evaluations; return the exit code."""
    import dataclasses

    from .eval import CheckpointError, read_results
    from .eval.metrics import compare, comparison_lines

    try:
        first, second = (read_results(folder) for folder in (arguments.first, arguments.second))
        comparison = compare(first, second, success_threshold=arguments.success_threshold)
    except (CheckpointError, ValueError) as error:
        raise UsageError(error) from error
    if arguments.json:
        return say(json.dumps(dataclasses.asdict(comparison), indent=2))
    return say(*comparison_lines(comparison))


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


# --- what the command line names ---


def model_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's configuration, as `build_model_factory` takes it.

    Raises:
        OSError: The chat template's file cannot be read.
        ValueError: An option is another backend's.
    """
    given = {
        "base_url": arguments.base_url,
        "model_id": arguments.model,
        "tokenizer": arguments.tokenizer,
        "tool_parser": arguments.tool_parser,
        "region_name": arguments.region,
        "client": arguments.client_args or None,
    }
    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_new_tokens")}
    config = dict(arguments.model_args)
    if arguments.chat_template is not None:
        if arguments.backend != "sglang":
            raise ValueError("--chat-template goes with --backend sglang")
        config["chat_template"] = Path(arguments.chat_template).read_text(encoding="utf-8")
    return {
        "backend": arguments.backend,
        **{name: value for name, value in given.items() if value is not None},
        "sampling_params": {
            **arguments.sampling_params,
            **{name: value for name, value in sampling.items() if value is not None},
        },
        "config": config,
    }


def run_config(arguments: argparse.Namespace, model: dict[str, Any]) -> dict[str, Any]:
    """What the results depend on: all of it but where the server is and how it is talked to."""
    return {
        "env": arguments.env,
        "env_args": arguments.env_args,
        "system_prompt": arguments.system_prompt,
        "reward": arguments.reward,
        # Left out where there are none, as in the files of releases that knew none.
        **({"reward_args": arguments.reward_args} if arguments.reward_args else {}),
        **{name: value for name, value in model.items() if name not in ("base_url", "client", "region_name")},
    }


def named_environment(arguments: argparse.Namespace, model_factory: Any) -> tuple[Any, Any]:
    """What makes the environment of a sample, and its reward function, if that is known before there is one.

    The environment is made with `model_factory`, `reward_fn` (unless it takes none, or `--reward env`),
    `system_prompt` if one is given, and `--env-args`.

    Raises:
        ValueError: It does not exist, or it or its reward refuses its arguments.
    """
    target = load_object(arguments.env, ENVIRONMENTS)
    if not callable(target):
        raise ValueError(f"--env {arguments.env} is nothing that makes an environment")
    parameters = inspect.signature(target).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    given: dict[str, Any] = {"model_factory": model_factory, **arguments.env_args}
    if arguments.system_prompt is not None:
        given["system_prompt"] = arguments.system_prompt
    reward = named_reward(arguments)
    if reward is not None and (takes_any or "reward_fn" in parameters):
        given["reward_fn"] = reward
    try:
        inspect.signature(target).bind(**given)
    except TypeError as error:
        raise ValueError(f"--env {arguments.env}: {error}") from error
    if inspect.isclass(target):
        reward = getattr(target(**given), "reward_fn", None)  # what it refuses is told now, and once
    return lambda action: target(**given), reward


def named_reward(arguments: argparse.Namespace) -> Any:
    """The reward that `--reward` names; None where the environment brings its own."""
    if arguments.reward == OWN_REWARD:
        if arguments.reward_args:
            raise ValueError("--reward-args goes with a --reward that is made here; an environment's own: --env-args")
        return None
    target = load_object(arguments.reward, REWARDS)
    try:
        return target(**arguments.reward_args)
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(f"--reward {arguments.reward}: {error}") from error


def load_object(path: str, names: dict[str, str]) -> Any:
    """What a name or a dotted path (`package.module.Name`, or with `:` before the last part) stands for.

    Modules are also looked for in the current folder.

    Raises:
        ValueError: There is no such thing.
    """
    module_name, _, name = names.get(path, path).replace(":", ".").rpartition(".")
    if not module_name:
        raise ValueError(f"{path} is neither one of {', '.join(names)} nor a dotted path")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{module_name} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"{module_name} has no {name}")
    return getattr(module, name)


def load_actions(arguments: argparse.Namespace, reward: Any) -> list[Action]:
    """The tasks that the command line names, with ground truths that the reward can compare with.

    Raises:
        ValueError: There are none, or they cannot be loaded.
    """
    from .eval.benchmarks import load_benchmark, load_tasks

    fields = {name: getattr(arguments, name) for name in ("question_field", "answer_field", "id_field")}
    further = {"limit": arguments.limit, "check_truth": getattr(reward, "check_truth", None)}
    if arguments.benchmark is None:
        return load_tasks(arguments.dataset, **fields, needs_answer=arguments.reward != OWN_REWARD, **further)
    if any(fields.values()):
        raise ValueError("--question-field, --answer-field and --id-field go with --dataset alone")
    return load_benchmark(arguments.benchmark, arguments.dataset, **further)


# --- what it prints ---


def one_line(error: BaseException) -> str:
    """An error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def say(*lines: str, code: Any = 0) -> Any:
    """Print lines of the command's result, and whatever is still to be printed; return the exit code."""
    error = _print("".join(f"{line}\n" for line in lines), sys.stdout)
    if error is None:
        return code
    if isinstance(error, BrokenPipeError):
        return NO_READER
    tell(f"strands-env: standard output: {error.strerror or error}")
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
