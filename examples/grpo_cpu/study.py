"""Does exactness matter? The same training three ways, and what drifts in settings where drift is frequent.

    python examples/grpo_cpu/study.py OUT [--seeds 0 1 2] [--steps 2] [--ways exact openai rerendered]
    python examples/grpo_cpu/study_report.py OUT --page docs/understand/exactness.md

Trains SmolLM2-135M-Instruct as a calculator agent on this machine's CPU, once for each way and seed, one run after the
other on one server, into `OUT/train-WAY-SEED.csv`. Measures the settings in which drift is frequent, without training,
into `OUT/drift-SETTING-WAY-SEED.csv`, and what sampling masks remove under top-p and top-k, into `OUT/masks.csv`. A run
whose file is there is not run again, so that an interrupted study continues.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from study_rollouts import BASE, SETTINGS, TRUNCATED, WAYS, Attempt, Rollouts, Setting, advantages, tasks
from study_training import step
from threads import use_all_cores
from transformers import AutoModelForCausalLM

from strands_sglang import SGLangClient, get_tokenizer, local
from strands_sglang.trainers.trl import SGLangWeights

TASKS, SAMPLES = 3, 8
MEASURED_TASKS = 2
HELD_OUT_SEED = 1_000_000


@dataclass
class Options:
    """Sizes of a study."""

    out: Path
    seeds: list[int]
    steps: int
    ways: list[str]
    held_out: int
    learning_rate: float
    concurrent: int = 40


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--held-out", type=int, default=32, help="episodes of the evaluation after training")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    options = Options(**vars(parser.parse_args()))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("strands").setLevel(logging.CRITICAL)
    use_all_cores()
    options.out.mkdir(parents=True, exist_ok=True)
    python = local.ensure_sglang()
    model_path = local.ensure_smollm2(python)
    arguments = ("--chat-template", str(local.CHATML_TOOLS_TEMPLATE), "--tool-call-parser", "qwen25")
    settings = local.ServerSettings(extra_arguments=arguments)
    with local.start_server(python, model_path, settings=settings) as server:
        study = Study(options, server.base_url, model_path)
        study.run()
    return 0


class Study:
    """All runs, on one server."""

    def __init__(self, options: Options, base_url: str, model_path: Path) -> None:
        """Load the tokenizer."""
        self.options, self.base_url, self.model_path = options, base_url, model_path
        self.tokenizer = get_tokenizer(str(model_path))
        self.template = local.CHATML_TOOLS_TEMPLATE.read_text(encoding="utf-8")
        self.weights = SGLangWeights(base_url, model_path=model_path, folder=options.out / "weights")

    def run(self) -> None:
        """Do what has no file yet: one seed of everything, and then the other seeds."""
        first, *others = self.options.seeds
        self._once("masks", self.masks)
        self.train_all(first)
        self.measure_all(first)
        for seed in others:
            self.train_all(seed)
        for seed in others:
            self.measure_all(seed)

    def train_all(self, seed: int) -> None:
        """Train each way."""
        for way in self.options.ways:
            self._once(f"train-{way}-{seed}", partial(self.train, way, seed))

    def measure_all(self, seed: int) -> None:
        """Measure each way in each setting."""
        for name, setting in SETTINGS.items():
            for way in self.options.ways:
                self._once(f"drift-{name}-{way}-{seed}", partial(self.measure, way, seed, setting))

    def _once(self, name: str, work: Any) -> None:
        path = self.options.out / f"{name}.csv"
        if path.exists():
            return
        started = time.monotonic()
        rows = work()
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[-1]))
            writer.writeheader()
            writer.writerows(rows)
        unfinished.replace(path)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)

    def load(self) -> Any:
        """Return the original model in float32, and serve its weights."""
        model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        self.push(model, 0)
        return model

    def push(self, model: Any, version: int) -> None:
        """Serve the model's weights."""
        self.weights.push(model.state_dict().items(), version)

    def train(self, way: str, seed: int) -> list[dict[str, Any]]:
        """Train one way; return a row of figures per step, the last of them with the held-out rate."""
        setting = BASE
        model = self.load()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.options.learning_rate, weight_decay=0.0)
        rows = []
        for number in range(self.options.steps):
            started = time.monotonic()
            groups = self.rollouts(way, tasks(seed * 1000 + number, TASKS, setting), SAMPLES, setting)
            rolled_out = time.monotonic() - started
            row = figures_of(groups, number)
            row |= asdict(step(model, rows_of(groups), setting.temperature, optimizer))
            row |= {"rollout_seconds": rolled_out, "step_seconds": time.monotonic() - started, "held_out": ""}
            self.push(model, number + 1)
            rows.append(row)
            print(way, seed, {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        held_out = tasks(HELD_OUT_SEED, self.options.held_out, setting)
        attempts = [group[0] for group in self.rollouts("exact", held_out, 1, setting)]
        rows[-1]["held_out"] = sum(attempt.reward for attempt in attempts) / len(attempts)
        print(way, seed, "held out", rows[-1]["held_out"], flush=True)
        return rows

    def measure(self, way: str, seed: int, setting: Setting) -> list[dict[str, Any]]:
        """Return the figures of one batch with the original weights, without an update."""
        model = self.load()
        groups = self.rollouts(way, tasks(seed * 1000, MEASURED_TASKS, setting), SAMPLES, setting)
        return [figures_of(groups, 0) | asdict(step(model, rows_of(groups), setting.temperature))]

    def masks(self) -> list[dict[str, Any]]:
        """Return the figures of one batch under top-p and top-k, without and with the sampling masks."""
        model = self.load()
        groups = self.rollouts("exact", tasks(0, MEASURED_TASKS, TRUNCATED), SAMPLES, TRUNCATED)
        figures = []
        for under_mask in (False, True):
            found = step(model, rows_of(groups), TRUNCATED.temperature, under_mask=under_mask)
            figures.append({"under_mask": under_mask, **asdict(found)})
        return figures

    def rollouts(
        self, way: str, questions: list[tuple[str, ...]], samples: int, setting: Setting
    ) -> list[list[Attempt]]:
        """Run a group of episodes for each task, and set the advantages of their rows."""

        async def run() -> list[list[Attempt]]:
            async with SGLangClient(self.base_url, max_retries=3) as client:
                rollouts = Rollouts(self.base_url, self.tokenizer, self.template, setting, client)
                slots = asyncio.Semaphore(self.options.concurrent)

                async def one(task: tuple[str, ...]) -> Attempt:
                    async with slots:
                        return await rollouts.run(way, task)

                first, *others = [task for task in questions for _ in range(samples)]
                # The first prompt is then in the prefix cache.
                everything = [await one(first), *await asyncio.gather(*map(one, others))]
                return [everything[at : at + samples] for at in range(0, len(everything), samples)]

        groups = asyncio.run(run())
        for group in groups:
            values = advantages([attempt.reward for attempt in group]) if samples > 1 else [0.0]
            for attempt, advantage in zip(group, values, strict=True):
                for row in attempt.rows:
                    row.advantage = advantage
        return groups


def rows_of(groups: list[list[Attempt]]) -> list[list[Any]]:
    """Return the rows of each group that train a token."""
    return [[row for attempt in group for row in attempt.rows if any(row.loss_mask)] for group in groups]


def figures_of(groups: list[list[Attempt]], number: int) -> dict[str, Any]:
    """Return what the episodes show by themselves."""
    attempts = [attempt for group in groups for attempt in group]
    return {
        "step": number,
        "episodes": len(attempts),
        "reward": sum(attempt.reward for attempt in attempts) / len(attempts),
        "drifted": sum(attempt.has_drifted for attempt in attempts) / len(attempts),
        "other_answers": sum(attempt.has_other_answers for attempt in attempts) / len(attempts),
        "sampled": sum(len(call.sampled_ids) for attempt in attempts for call in attempt.calls),
        "calls": sum(len(attempt.calls) for attempt in attempts) / len(attempts),
        "flat_groups": sum(len({attempt.reward for attempt in group}) == 1 for group in groups),
    }


if __name__ == "__main__":
    sys.exit(main())
