"""The trainer's process: TRL's AsyncGRPOTrainer and the rollouts, in the environment of TRL.

    python training.py RUN_FOLDER SERVER_URL

Continues after the last step of the run's ledger. `__main__.py` starts it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any

import cpu
import torch
from datasets import Dataset
from record import EPISODE, Run
from tasks import WAYS, Settings, task_of
from threads import use_all_cores
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TreeRow

from strands_env.core import Action, StepResult
from strands_sglang.credit import Episode, Loss, TrainingRow, TrainingRows, version_number
from strands_sglang.drift import measure_drift
from strands_sglang.mismatch import masked_logprobs, under_sampling_mask
from strands_sglang.trainers.trl import AsyncGRPORollouts, SGLangWeights
from strands_sglang.trees import sample_of

CLIP = 0.2
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""Weights that SGLang keeps end to end in one tensor, in this order."""
PROBE = "What is 98 + 47 - 60? I call the calculator with the expression 98 + 47 - 60. The answer is 85. " * 3
"""Text that is scored after each push, by the server and by the trainer."""


def is_clipped(gap, advantage):
    """Return whether a token has no gradient: its probability has changed enough in the advantage's direction."""
    change = math.expm1(gap)
    return change > CLIP if advantage > 0 else change < -CLIP and advantage < 0


class Watched(AsyncGRPOTrainer):
    """The trainer, with an eye on what it trains.

    Its data loader does not read ahead, and its logprobs before an update are kept with the rows. Under top-k, with or
    without top-p, its logprobs are over the ids that each token was sampled from, as the sampler's are: TRL's own, over
    the whole vocabulary, would belong to another distribution.

    Attributes:
        batch: The rows of the micro-batch under way, with the trainer's logprobs once it has them.
        loss: TRL's loss on it.
        gap_without_masks: Largest difference of TRL's own logprobs from the sampler's, under top-k; else NaN.
    """

    def __init__(self, *, rollouts: AsyncGRPORollouts, taken: list[tuple[Any, TrainingRow]], **options: Any) -> None:
        """Set up as AsyncGRPOTrainer does; `taken` gets the rows that the loader takes, and their samples."""
        super().__init__(rollout_worker=rollouts, weight_transfer=rollouts, **options)
        self.rollouts = rollouts
        self._taken = taken
        self.batch: list[TrainingRow] = []
        self._samples: list[dict[str, Any]] = []
        self.loss: Loss | None = None
        self.gap_without_masks = math.nan
        self._terms = torch.zeros(0, dtype=torch.long)  # the packed position that predicts each trained token
        self._log_probs = torch.zeros(0)
        self._hidden = torch.zeros(0)
        self.model.model.register_forward_hook(self._keep_hidden)
        self.model.register_forward_hook(self._replace_log_probs)
        # Shortly before the gradient is there, the next step's first task is asked: the push interrupts its episodes.
        layers = self.model.model.layers
        layers[len(layers) // 4].register_full_backward_hook(lambda *_: rollouts.next_step(groups=1))

    def _keep_hidden(self, module: Any, arguments: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def _replace_log_probs(self, module: Any, arguments: Any, output: Any) -> None:
        """Give TRL's loss one logprob for each trained token, in order, under its sampling mask if it has one."""
        if getattr(output, "log_probs", None) is None:
            return
        own = output.log_probs.flatten()[self._terms]
        trained = [(row, at) for row in self.batch for at, mask in enumerate(row.loss_mask) if mask]
        masks = {id(row): list(row.tokens.sampling_mask.rows()) for row in self.batch if row.tokens.sampling_mask}
        if masks:
            sampled = torch.tensor([row.logprobs[at] for row, at in trained])
            self.gap_without_masks = float((own.detach() - sampled).abs().max())
            own = masked_logprobs(
                module.lm_head(self._hidden[0, self._terms]).float(),
                torch.tensor([row.token_ids[at] for row, at in trained]),
                [masks[id(row)][at] for row, at in trained],
                temperature=self.temperature,
            )
        output.log_probs = own[None]
        output.entropy = output.entropy.flatten()[self._terms][None]
        self._log_probs = own.detach()

    def get_train_dataloader(self) -> DataLoader:
        """Return TRL's own loader, without the reading ahead of accelerate's.

        That one takes the next step's rows before this step's update: they would always be older than the weights.
        """
        loader = super().get_train_dataloader()

        def collate(examples: Any) -> Any:
            [[row]] = examples  # one micro-batch, in one process
            self._samples = row.samples
            return loader.collate_fn(examples)

        return DataLoader(loader.dataset, batch_size=1, collate_fn=collate)

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        """Return the loss; note the logprob of each trained token."""
        taken = {id(sample.input_ids): row for sample, row in self._taken}
        self._taken.clear()
        rows = [taken[id(sample["input_ids"])] for sample in self._samples]
        self.batch = [row if row.tokens.sampling_mask is None else under_sampling_mask(row) for row in rows]
        is_term = inputs["token_index"] >= 0
        self._terms = inputs["token_index"][is_term]
        sampled, advantages = (
            torch.tensor([*chain.from_iterable(compress(getattr(row, name), row.loss_mask) for row in self.batch)])
            for name in ("logprobs", "advantages")
        )
        loss = super().compute_loss(
            model,
            {
                **inputs,
                "token_index": inputs["token_index"].masked_scatter(is_term, torch.arange(len(self._terms))),
                "old_log_probs": inputs["old_log_probs"].masked_scatter(is_term, sampled),
                "advantages": inputs["advantages"].masked_scatter(is_term, advantages),
            },
            **options,
        )
        self.loss = Loss("trl:async_grpo", float(loss), (self.epsilon_low, self.epsilon_high))
        known = iter(self._log_probs.tolist())
        self.batch = [
            replace(row, trainer_logprobs=[next(known) if mask else 0.0 for mask in row.loss_mask], loss_weight=1.0)
            for row in self.batch
        ]
        return loss

    def score(self, ids: list[int]) -> torch.Tensor:
        """Return the logprobs of ids after the first, by the trainer's weights; the last layer in float64.

        In float32 its rounding is larger than the server's, and of one sign.
        """
        import numpy as np

        row = TreeRow()
        mask = np.array([0, *[1] * (len(ids) - 1)])
        row.add(
            {"input_ids": np.array(ids), "completion_mask": mask, "old_log_probs": mask * 0.0, "advantage": 0.0}
            | {"group_id": 0}
        )
        packed = row.pack()
        longest = packed["tree_max_seqlens"].tolist()
        with torch.no_grad():
            self.model(
                input_ids=packed["input_ids"][None],
                position_ids=packed["position_ids"][None],
                **{name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
                tree_max_seqlen_q=longest[0],
                tree_max_seqlen_k=longest[1],
            )
            logits = self._hidden[0, :-1].double() @ self.model.lm_head.weight.double().T
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


class ProbedWeights(SGLangWeights):
    """Pushes weights, and then checks what the server has: bit for bit, and by logprobs that the trainer knows, too.

    Attributes:
        trainer: The trainer; set it before training.
        difference: Largest difference of a logprob after the last push.
        mean_difference: Mean difference.
    """

    trainer: Watched
    difference = mean_difference = 0.0
    pushed = ""

    def push(self, named_tensors: Any, version: int) -> None:
        """Push, and compare checksums of all tensors before anything is sampled from them.

        Raises:
            RuntimeError: A tensor that the server has is not the one that was sent.
        """
        weights = [(name, tensor.detach()) for name, tensor in named_tensors]
        super().push(weights, version)
        [answer] = self._post("/weights_checker", {"action": "checksum"})
        (served,) = (rank["checksums"] for rank in answer["ranks"])
        sent = checksums(weights)
        if stale := [name for name, checksum in served.items() if sent.get(name) != checksum]:
            raise RuntimeError(
                f"version {version} was pushed, but {len(stale)} of the server's {len(served)} tensors are others: "
                f"{', '.join(stale[:3])}"
            )
        self.pushed = str(version)

    def resume(self) -> None:
        """Continue generation, and score a prompt on both sides.

        Raises:
            RuntimeError: The server computes other logprobs than the trainer.
        """
        super().resume()
        if not self.pushed:
            return
        ids = self.trainer.processing_class(PROBE)["input_ids"]
        request = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        [answer] = self._post("/generate", {**request, "logprob_start_len": 0})
        meta = answer["meta_info"]
        served = torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]])
        differences = (served - self.trainer.score(ids)).abs()
        self.difference, self.mean_difference = float(differences.max()), float(differences.mean())
        # A unit in the last place of SmolLM2's logits, 32 to 41 in float32, is 3.8e-6: single tokens differ by several.
        if meta["weight_version"] != self.pushed or not (self.mean_difference < 1e-5 and self.difference < 1e-4):
            raise RuntimeError(
                f"version {self.pushed} was pushed, but the server has {meta['weight_version']}, whose logprobs differ "
                f"by {self.mean_difference:.1e} on average and {self.difference:.1e} at most"
            )


def checksums(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return what SGLang's `/weights_checker` tells of these weights: a part of the SHA-256 of each tensor's bytes."""
    hashes: dict[str, Any] = {}
    for name, tensor in weights:
        served = ".".join(FUSED.get(part, part) for part in name.split("."))
        hashes.setdefault(served, hashlib.sha256()).update(tensor.cpu().contiguous().numpy())
    return {name: one.hexdigest()[:16] for name, one in hashes.items()}


@dataclass(eq=False)
class Group:
    """The episodes of one task; `is_known` once a step has counted them."""

    rows: TrainingRows
    episodes: list[Episode]
    is_known: bool = False


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan


class Recorder(TrainerCallback):
    """Collects what was sampled, and writes down each step."""

    def __init__(self, run: Run, weights: ProbedWeights, settings: Settings) -> None:
        """Start with nothing."""
        self.run, self.weights, self.settings = run, weights, settings
        self.trainer: Watched
        self.step: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._results: dict[str, StepResult] = {}
        self._groups: list[Group] = []
        self._began = time.monotonic()
        self._cpu = time.process_time()

    def keep(self, result: StepResult, episode: Episode) -> None:
        """Keep how an episode ended."""
        with self._lock:
            self._results[episode.id] = result

    def on_group(self, rows: TrainingRows, episodes: Any) -> None:
        """Keep a group's rows and episodes; called by the rollouts."""
        with self._lock:
            self._groups.append(Group(rows, list(episodes)))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the folder of the step, before the weights are pushed."""
        batch = self.trainer.batch
        trained = {row.episode for row in batch}
        with self._lock:
            touched = [group for group in self._groups if not len(group.rows) or trained & group.rows.rewards.keys()]
            new = [group for group in touched if not group.is_known]
            for group in touched:
                group.is_known = True
            # Rows are taken in order: only of the last group some may still wait for the next step.
            last = max(self._groups.index(group) for group in touched if len(group.rows))
            self._groups = [
                group for at, group in enumerate(self._groups) if at >= last and (at == last or group not in touched)
            ]
        rows = TrainingRows.joined([group.rows for group in touched])
        episodes = {episode.id: episode for group in touched for episode in group.episodes}
        version, step = self.trainer.model_version, state.global_step
        metrics = {**self._of_tokens(batch, version), **self._of_episodes(new)}
        metrics = {name: None if math.isnan(value) else value for name, value in metrics.items()}  # JSON has no NaN
        facts = {"step": step, "version": version, "metrics": metrics}
        by_turn = {name: own for name, own in rows.advantages.items() if name in trained}
        saved = TrainingRows(
            *(batch, rows.left_out, rows.flat_groups, by_turn, rows.rewards),
            settings=touched[0].rows.settings,
            episodes=rows.episodes,
            loss=self.trainer.loss,
        )
        self.run.save_step(step, facts, saved, {name: episode.trajectory for name, episode in episodes.items()})
        tasks = sorted(int(group.episodes[0].id.removeprefix("task-").split()[0]) for group in new)
        self.step = {**facts, "tasks": tasks, "episodes": sorted(trained)}

    def _of_episodes(self, groups: list[Group]) -> dict[str, float]:
        """Return the figures of all episodes that were sampled for a step, trained or not."""
        episodes = [episode for group in groups for episode in group.episodes]
        with self._lock:
            results = [self._results.pop(episode.id) for episode in episodes]
        rewards = [reward for group in groups for reward in group.rows.rewards.values()]
        reasons = [reason for group in groups for reason in group.rows.left_out.values()]
        sequences = [tokens for episode in episodes for tokens in episode.trajectory.sequences()]
        turns = chain.from_iterable(episode.trajectory.turns for episode in episodes)
        sampled = {sample_of(turn): len(turn.output_ids) for turn in turns}
        now, used = time.monotonic(), time.process_time()
        seconds, cpu_seconds = now - self._began, used - self._cpu
        self._began, self._cpu = now, used
        return {
            "reward": mean(rewards),
            "tool_use": mean(result.observation.metrics.get("tool_calls", 0) > 0 for result in results),
            "sampled_tokens": mean(result.observation.metrics.get("sampled_tokens", 0) for result in results),
            "step_tokens": sum(sampled.values()),
            "episodes": len(episodes),
            "flat_groups": sum(len(group.rows.flat_groups) for group in groups),
            "left_out": sum(reason.kind != "flat_group" for reason in reasons),
            "drift": measure_drift(sequences, self.trainer.processing_class).share_affected,
            "seconds": round(seconds, 1),
            "trainer_cpu_seconds": round(cpu_seconds, 1),
        }

    def _of_tokens(self, batch: list[TrainingRow], version: int) -> dict[str, float]:
        """Return the figures of the tokens that were trained.

        The gap is that of tokens sampled by the very weights that the update starts from. What a push interrupted has
        older tokens, whose logprobs differ because the policy does.
        """
        tokens = [
            (own - logprob, version - (version_number(name) or 0), advantage)
            for row in batch
            for logprob, own, name, advantage, mask in zip(
                row.logprobs, row.trainer_logprobs or (), row.versions, row.advantages, row.loss_mask, strict=True
            )
            if mask
        ]
        fresh = [abs(gap) for gap, age, _ in tokens if age == 0]
        return {
            "trained_rows": len(batch),
            "trained_tokens": len(tokens),
            "fresh_tokens": len(fresh),
            "staleness_mean": mean(age for _, age, _ in tokens),
            "staleness_max": max(age for _, age, _ in tokens),
            "gap_max": max(fresh, default=math.nan),
            "gap_mean": mean(fresh),
            "gap_stale_max": max((abs(gap) for gap, age, _ in tokens if age), default=0.0),
            "kl": mean(math.expm1(gap) - gap for gap, _, _ in tokens),
            "gap_without_masks": self.trainer.gap_without_masks,
            "clipped": mean(is_clipped(gap, advantage) for gap, _, advantage in tokens),
            "push_difference": self.weights.difference,
            "push_difference_mean": self.weights.mean_difference,
        }

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The checkpoint is complete: the step counts."""
        self.run.add(self.step)
        metrics = self.step["metrics"]
        gap = "unknown" if metrics["gap_max"] is None else f"{metrics['gap_max']:.1e}"
        print(
            f"step {state.global_step:3}/{state.max_steps}  reward {metrics['reward']:.3f}  "
            f"tool use {metrics['tool_use']:.2f}  {metrics['sampled_tokens']:.0f} tokens  "
            f"gap {gap}  push {self.weights.difference:.1e}  "
            f"staleness {metrics['staleness_mean']:.2f}  {metrics['flat_groups']} flat groups  "
            f"{metrics['seconds']:.0f} s",
            flush=True,
        )


def main(folder: Path, base_url: str) -> None:
    """Train to the last step."""
    use_all_cores()
    cpu.enable()
    run = Run(folder)
    settings = Settings(**json.loads((folder / "settings.json").read_text()))
    weights = ProbedWeights(base_url, model_path=settings.model_path, folder=folder / "pushed", timeout=120)
    recorder = Recorder(run, weights, settings)
    run_task = WAYS[settings.rollouts](settings, base_url)

    asked: Counter[int] = Counter()

    async def run_episodes(task: tuple[int, Action]) -> list[Episode]:
        number, action = task
        first = asked[number]
        asked[number] += 1 + settings.tree
        episodes = []
        for sample, (result, episode) in enumerate(await run_task(action), first):
            episodes.append(replace(episode, id=EPISODE.format(number, sample), group=number))
            recorder.keep(result, episodes[-1])
        return episodes

    done = {number for step in run.steps for number in step["tasks"]}
    samples = settings.samples // 2 if settings.tree else settings.samples
    rows = settings.tasks * samples * (1 + settings.tree)
    taken: list[tuple[Any, TrainingRow]] = []
    rollouts = AsyncGRPORollouts(
        run_episodes,
        (task for task in enumerate(task_of(settings).training(settings)) if task[0] not in done),
        weights,
        group_size=samples,
        groups_in_flight=settings.tasks,
        rows_per_step=rows,
        version=len(run.steps),
        max_staleness=2,
        on_group=recorder.on_group,
        on_taken=lambda sample, row: taken.append((sample, row)),
        rows_per_episode=1 + settings.tree,
        takes_turns=True,
        normalize_std=True,
        skip_flat_groups=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(settings.model_path)
    config = AsyncGRPOConfig(
        output_dir=str(run.checkpoints),
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        temperature=settings.temperature,
        # The loss is the token mean of a micro-batch: one holds the whole step.
        token_budget=0,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=settings.samples,
        max_staleness=3,
        gradient_checkpointing=True,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,  # the older one counts until the ledger has the newer one
        seed=settings.seed,
        disable_tqdm=True,
        logging_steps=1,
        heartbeat_stale_after_s=900,
    )
    trainer = Watched(
        rollouts=rollouts,
        taken=taken,
        model=settings.model_path,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "unused"}]] * 8}),
        reward_funcs=None,
        callbacks=[recorder],
    )
    weights.trainer = recorder.trainer = trainer
    trainer.model_version = len(run.steps)
    checkpoint = run.last_checkpoint
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
