"""Train SmolLM2-135M-Instruct to use a calculator, or on a task of yours, on two cores; `make rl-demo` runs this.

    python examples/grpo_cpu [--output FOLDER] [--task NAME] [--steps N] [--seed N] [--tree] [--fast] ...

Serves the model with SGLang, evaluates it on held-out tasks, trains it with TRL's AsyncGRPOTrainer on episodes of a
Strands agent, and evaluates it again. The same command continues a run that was stopped or killed.

Exit codes: 0 success; 1 failure, with the reason in the last line; 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from plot import save_plot
from record import Run, RunError, write
from tasks import POLICIES, WAYS, Settings, environment_factory, model_factory, task_of

from strands_env.eval import Evaluator
from strands_sglang import SGLangClientError, local
from strands_sglang.local.process import GuardedProcess, clean_environment, tail

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAST = {"steps": 3, "tasks": 2, "samples": 4, "held_out": 4, "held_out_samples": 1, "max_new_tokens": 12}
FAST |= {"learning_rate": 1e-3}
"""Settings of `--fast`, unless they are given."""


def main() -> int:
    """Run the demo and return its exit code."""
    options = read_options()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("strands").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        run_demo(options)
    except KeyboardInterrupt:
        print("stopped; the same command continues the run", file=sys.stderr)
        return 130
    except (local.LocalServerError, SGLangClientError, httpx.HTTPError, RunError) as error:
        print(f"the demo failed: {error}\nthe same command continues the run", file=sys.stderr)
        return 1
    print(f"in all {(time.monotonic() - started) / 60:.1f} minutes")
    return 0


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Treat a signal like Ctrl-C."""
    raise KeyboardInterrupt


def read_options() -> argparse.Namespace:
    """Read the command line; each setting of a run is an option."""
    parser = argparse.ArgumentParser(prog=f"python {sys.argv[0]}", description=__doc__.splitlines()[0])
    told = dict(re.findall(r"^ +(\w+): (.+)$", Settings.__doc__ or "", re.M))
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder of the run; by default in out/")
    parser.add_argument("--fast", action="store_true", help="a tiny random model, and three short steps")
    parser.add_argument("--rollouts", choices=sorted(WAYS), default="exact", help="how episodes are recorded")
    parser.add_argument(
        "--tree", type=int, nargs="?", const=3, metavar="N", help="fork each episode N times, by default 3"
    )
    parser.add_argument("--fork-at", choices=sorted(POLICIES), help="how the turn is chosen, by default evenly")
    for setting in fields(Settings):
        if setting.name not in ("model_path", "rollouts", "is_fast", "tree", "fork_at"):
            kind = type(setting.default)
            fast = f"; with --fast {FAST[setting.name]}" if setting.name in FAST else ""
            parser.add_argument(
                f"--{setting.name.replace('_', '-')}",
                type=kind,
                metavar="N" if kind is int else "X",
                help=f"{told[setting.name].replace('%', '%%')} By default {setting.default}{fast}.",
            )
    options = parser.parse_args()
    least = {"tree": 0, "steps": 1, "tasks": 1, "samples": 2, "held_out": 1, "held_out_samples": 1, "max_new_tokens": 1}
    for name, number in least.items():
        value = getattr(options, name)
        if value is not None and value < number:
            parser.error(f"--{name.replace('_', '-')} must be at least {number}")
    return options


def settings_of(options: argparse.Namespace, model_path: Path) -> Settings:
    """Return the settings that the options ask for."""
    given: dict[str, Any] = {**(FAST if options.fast else {})}
    for setting in fields(Settings):
        value = getattr(options, setting.name, None)
        if value is not None:
            given[setting.name] = value
    return Settings(**{**given, "model_path": str(model_path), "is_fast": options.fast})


def run_demo(options: argparse.Namespace) -> None:
    """Evaluate, train, and evaluate again; what is done already is not repeated."""
    try:
        task_of(settings_of(options, Path()))
    except (ImportError, ValueError) as error:
        raise RunError(f"--task {options.task}: {error}") from error
    trainer_python = trainer_environment()
    python = local.ensure_sglang()
    settings = settings_of(options, local.ensure_tiny_qwen3(python) if options.fast else local.ensure_smollm2(python))
    task = "" if settings.task == "calculator" else f"_{settings.task.replace(':', '_')}"
    tree = f"_tree_{settings.fork_at}" if settings.tree else ""
    name = f"grpo_cpu{'_fast' if options.fast else ''}{task}{tree}_{settings.seed}"
    run = Run(options.output or ROOT / "out" / name)
    run.open(asdict(settings))
    if run.steps:
        print(f"continuing after step {len(run.steps)} of {run.folder}")
    # On two cores, one thread samples as fast as two. Room for the prompts of all episodes in the cache.
    server_settings = local.ServerSettings(threads=1, max_total_tokens=32768)
    with local.start_server(
        python, Path(settings.model_path), settings=server_settings, log_path=run.folder / "server.log"
    ) as server:
        before = evaluate(run, settings, server.base_url, "before")
        print(f"held-out tasks before: mean reward {before:.3f}")
        if len(run.steps) < settings.steps:
            train(run, server, trainer_python)
            run.read_ledger()
        serve_weights(server.base_url, run)
        after = evaluate(run, settings, server.base_url, "after")
    save_plot(run.folder / "reward.svg", run.steps, before, after)
    summarize(run, before, after)


def trainer_environment() -> Path:
    """Return the Python of an environment with TRL, which the tests of trainers use too; make it if necessary."""
    spec = importlib.util.spec_from_file_location("trainer_environments", ROOT / "tests" / "trainers" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.environment("trl"))


def train(run: Run, server: local.LocalServer, python: Path) -> None:
    """Run the trainer's process to its end, and print its progress.

    Raises:
        RunError: The trainer or the server ended.
    """
    log = run.folder / "trainer.log"
    env = clean_environment(
        PYTHONPATH=os.pathsep.join(map(str, (ROOT / "src", HERE))),
        PYTHONUNBUFFERED="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        GOMP_SPINCOUNT="3000",
    )
    command = [python, HERE / "training.py", run.folder, server.base_url]
    trainer = GuardedProcess(command, env=env, log_path=log)
    write(run.folder / "processes.json", json.dumps({"server": server.pid, "trainer": trainer.pid}))
    print(f"training (log: {log})", flush=True)
    shown = 0
    try:
        while trainer.exit_code is None and server.exit_code is None:
            time.sleep(0.5)
            shown = show_progress(log, shown)
        if server.exit_code is not None:
            raise RunError(f"the server ended with exit code {server.exit_code}; see {server.log_path}")
        show_progress(log, shown)
        if trainer.exit_code != 0:
            raise RunError(f"the trainer ended with exit code {trainer.exit_code}:\n{tail(log, 12)}")
    finally:
        trainer.stop()


def show_progress(log: Path, shown: int) -> int:
    """Print the progress lines of a log after a position; return the new one."""
    with log.open("rb") as file:
        file.seek(shown)
        lines = file.read().split(b"\n")
    for line in lines[:-1]:
        if line.startswith(b"step "):
            print(line.decode(), flush=True)
    return shown + sum(len(line) + 1 for line in lines[:-1])


def serve_weights(base_url: str, run: Run) -> None:
    """Let the server serve the last checkpoint, whatever was pushed before."""
    content = {"model_path": str(run.last_checkpoint), "flush_cache": True, "weight_version": str(len(run.steps) + 1)}
    # Training ends while episodes of a next step still run, and a busy server refuses weights.
    for path, body in (("/abort_request", {"rid": "", "abort_all": True}), ("/flush_cache?timeout=60", {})):
        httpx.post(f"{base_url}{path}", json=body, timeout=90, trust_env=False)
    response = httpx.post(f"{base_url}/update_weights_from_disk", json=content, timeout=300, trust_env=False)
    if response.is_error or not response.json().get("success"):
        raise RunError(f"the server refused the weights of {run.last_checkpoint}: {response.text}")


def evaluate(run: Run, settings: Settings, base_url: str, name: str) -> float:
    """Return the mean reward of the held-out tasks."""
    evaluator = Evaluator(
        environment_factory(settings, model_factory(settings, base_url)),
        n_samples_per_prompt=settings.held_out_samples,
        max_concurrency=24,
        output_path=run.folder / "evaluation" / f"{name}.jsonl",
    )
    results = asyncio.run(evaluator.run(task_of(settings).held_out(settings)))
    metrics = evaluator.compute_metrics(results)
    write(run.folder / "evaluation" / f"{name}.json", json.dumps(metrics, indent=1))
    return metrics.get(f"avg@{settings.held_out_samples}", metrics["pass@1"])  # equal if all rewards are 0 or 1


def summarize(run: Run, before: float, after: float) -> None:
    """Print what the run shows."""
    gaps = [gap for step in run.steps if (gap := step["metrics"]["gap_max"]) is not None]
    push = max(step["metrics"]["push_difference"] for step in run.steps)
    episodes = sum(step["metrics"]["episodes"] for step in run.steps)
    trained = sum(len(step["episodes"]) for step in run.steps)
    print(f"held-out tasks: mean reward {before:.3f} before, {after:.3f} after ({after - before:+.3f})")
    tokens = sum(step["metrics"]["step_tokens"] for step in run.steps)
    print(f"{len(run.steps)} steps, {episodes} episodes, {trained} of them trained, each once")
    print(f"{tokens} tokens sampled for the steps; what forks share counts once")
    print(f"largest gap between sampler and trainer before an update: {max(gaps, default=math.nan):.1e}")
    print(f"served and sent weights after each push: equal bit by bit; their logprobs differ by at most {push:.1e}")
    results = [str(run.folder / "evaluation" / f"{name}.jsonl") for name in ("before", "after")]
    print(f"{run.folder} has metrics.csv and reward.svg; look at its episodes, and compare before with after:")
    print(f"  {shlex.join(['strands-sglang', 'view', str(run.folder), '--open'])}")
    print(f"  {shlex.join(['strands-env', 'compare', *results, '--html', '--open'])}")


if __name__ == "__main__":
    sys.exit(main())
