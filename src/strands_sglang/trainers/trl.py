"""TRL: the rollouts of `AsyncGRPOTrainer` and `GRPOTrainer`, and their weights on SGLang.

Both trainers get the rows of `training_rows`: each sampled token once, the episode's advantage undivided. TRL takes one
advantage per row, so turns of an episode cannot have different ones. TRL is imported only when used; docs/guides/trl.md
shows both trainers.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import math
import pickle
import queue
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..client.client import SGLangClient
from ..client.shared import run_apart
from ..credit import (
    Episode,
    Loss,
    Normalizer,
    PolicyLoss,
    Reduction,
    TrainingRow,
    TrainingRows,
    per_batch,
    per_length_limit,
    per_micro_batch,
    per_row,
    training_rows,
)
from ..exceptions import SGLangClientError, SGLangHTTPError
from ..reasons import Reason
from ..trajectory.journal import Journal
from .records import log_left_out, loss_columns, newest_version, refuse_images, run_together

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOSSES: Mapping[str, Reduction] = {
    "trl:async_grpo": per_micro_batch,
    "trl:bnpo": per_micro_batch,
    "trl:dapo": per_batch,
    "trl:dr_grpo": per_length_limit,
    "trl:grpo": per_row,
}
"""TRL's losses."""


def async_grpo_loss(rows: TrainingRows, loss: Loss) -> float:
    """Return the loss of `AsyncGRPOTrainer`, by its own `compute_loss` on the rows' logprobs instead of a model's."""
    import torch
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    *columns, mask = loss_columns(rows, loss)
    old, new, advantages = (column[mask.bool()][None] for column in columns)
    count, empty = new.numel(), torch.empty(1, 0)
    inputs = {
        **dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), empty),
        **dict.fromkeys(("attention_mask", "input_ids", "position_ids", "shift_labels"), torch.ones(1, count)),
        **{"token_index": torch.arange(count)[None], "segment_id": torch.zeros(1, count, dtype=torch.long)},
        **{"old_log_probs": old, "advantages": advantages, "tree_max_seqlens": torch.zeros(1, 2)},
        **dict.fromkeys(("global_n_tokens", "global_n_forward_tokens", "mean_seq_len"), torch.tensor([count])),
    }
    whole = SimpleNamespace(num_processes=1, reduce=lambda values, **_: values, gather=lambda values: values)
    trainer = SimpleNamespace(
        epsilon_low=loss.clip[0],
        epsilon_high=loss.clip[1],
        accelerator=whole,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0.0,
        _step_trained_tokens=0.0,
        _step_seq_len_weighted=0.0,
        _step_samples=0.0,
        _step_forward_s=0.0,
    )
    answers = SimpleNamespace(log_probs=new, entropy=torch.zeros_like(new))
    return float(AsyncGRPOTrainer.compute_loss(trainer, lambda **_: answers, inputs))


POLICY_LOSSES: Mapping[str, PolicyLoss] = {"trl:async_grpo": async_grpo_loss}
"""Losses that a replay computes again."""

RunEpisode = Callable[[Any], Awaitable[Episode | Sequence[Episode]]]
"""Async function that runs one episode of a prompt, or returns one and its forks. Their `group` is replaced."""

OnGroup = Callable[[TrainingRows, Sequence[Episode]], None]
"""Function that receives the rows of a group, and all of its episodes."""

OnTaken = Callable[[Any, TrainingRow], None]
"""Function that receives TRL's `RolloutSample` and the row that it is made of."""


class SGLangWeights:
    """Pushes a trainer's weights to SGLang servers, over HTTP.

    Requests in flight are aborted while the weights change; a model with `on_abort="resume"` continues them.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        model_path: str | PathLike[str] | None = None,
        folder: str | PathLike[str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Choose the servers and the way. Nothing is sent yet.

        Args:
            base_url: Address of the server, or of several.
            model_path: Folder with the model's configuration and tokenizer, which is copied to `folder`.
            folder: Folder that the weights are written to and that the servers read them from, on a shared disk. By
                default weights travel in the request's body: no shared disk, but 1.3 times their size as text.
            headers: Headers of every request, such as `{"Authorization": "Bearer ..."}` for servers that were started
                with `--api-key`.
            timeout: Seconds for one request.

        Raises:
            ValueError: Only one of `model_path` and `folder` is given.
        """
        if (model_path is None) != (folder is None):
            raise ValueError("model_path and folder belong together: pass both or neither")
        self._client = SGLangClient(base_url, headers=headers)
        self.base_urls = list(self._client.base_urls)
        self.model_path = None if model_path is None else Path(model_path)
        self.folder = None if folder is None else Path(folder)
        self._timeout = timeout
        self._is_paused = False

    def pause(self) -> None:
        """Stop generation, and wait until the servers are idle; requests in flight return what they have sampled."""
        self._is_paused = True
        self._post("/pause_generation", {})
        # A server answers that it pauses before its scheduler is done with the aborted requests, and refuses weights
        # until then.
        self._post(f"/flush_cache?timeout={self._timeout}", {})

    def resume(self) -> None:
        """Continue generation."""
        self._post("/continue_generation", {})
        self._is_paused = False

    def push(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the servers' weights, and empty their prefix caches.

        Args:
            named_tensors: All weights, by their names in the checkpoint.
            version: Version that responses will name, as in `TrainingRow.versions`.

        Raises:
            SGLangHTTPError: A server refused the weights.
            ValueError: They are those of a PEFT model whose adapter is not merged: SGLang dies of their names.
        """
        named_tensors = list(named_tensors)
        for name, _ in named_tensors:
            if name.startswith("base_model.") or ".base_layer." in name or ".lora_" in name:
                raise ValueError(
                    f"{name!r} is a weight of a PEFT model, which the served model does not have: push the merged "
                    "weights, as from model.merge_and_unload().state_dict()"
                )
        weights = [(name, tensor.detach().to("cpu").contiguous()) for name, tensor in named_tensors]
        if self.folder is None:
            # A plain pickle: SGLang's own serializer passes handles of shared memory, which only the server's child
            # processes can open.
            payload = base64.b64encode(pickle.dumps(weights)).decode()
            tensors = {"serialized_named_tensors": [payload], "flush_cache": True, "weight_version": str(version)}
            with _at_last(partial(self._post, "/end_weight_update", {}, missing_is_fine=True)):
                self._post("/begin_weight_update", {}, missing_is_fine=True)
                self._post("/update_weights_from_tensor", tensors)
            return
        from safetensors.torch import save_file

        assert self.model_path is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.model_path.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".safetensors.index.json")):
                shutil.copy(path, self.folder)
        # Written under another name and renamed: a server that reads meanwhile never sees half a file.
        # Tied weights are copied, because the format has no shared memory.
        memory = Counter(tensor.untyped_storage().data_ptr() for _, tensor in weights)
        alone = {
            name: tensor.clone() if memory[tensor.untyped_storage().data_ptr()] > 1 else tensor
            for name, tensor in weights
        }
        save_file(alone, self.folder / "model.tmp", {"format": "pt"})
        (self.folder / "model.tmp").replace(self.folder / "model.safetensors")
        content = {"model_path": str(self.folder.absolute()), "flush_cache": True, "weight_version": str(version)}
        self._post("/update_weights_from_disk", content)

    def close(self) -> None:
        """Let servers that are still paused, because training failed, continue."""
        try:
            if self._is_paused:
                self.resume()
        except SGLangClientError as error:
            logger.warning("error=<%s> | a server may still be paused", error)

    def _post(self, path: str, content: dict[str, Any], *, missing_is_fine: bool = False) -> list[dict[str, Any]]:
        """Ask all servers, also after one has failed; its error is raised then. Return their answers."""
        answers: list[dict[str, Any]] = []
        failures: list[SGLangClientError] = []
        for url in self.base_urls:
            try:
                answer = run_apart(self._client.post(path, content, base_url=url, timeout=self._timeout))
            except SGLangClientError as error:
                if not (missing_is_fine and getattr(error, "status", None) == 404):  # servers before 0.5.23
                    failures.append(error)
                continue
            answers.append(answer)
            if answer.get("success") is False:
                text = json.dumps(answer)
                failures.append(SGLangHTTPError(f"POST {url}{path}: {text}", status=200, body=text))
        if failures:
            raise failures[0]
        return answers


@contextmanager
def _at_last(step: Callable[[], object]) -> Iterator[None]:
    """Take a last step, also after an error, which an error of that step does not replace."""
    try:
        yield
    except BaseException:
        try:
            step()
        except SGLangClientError as error:
            logger.warning("error=<%s> | a server may still be paused or updating", error)
        raise
    step()


class AsyncGRPORollouts:
    """Rollout worker and weight transfer of TRL's `AsyncGRPOTrainer`.

    Pass the same object as `rollout_worker=` and `weight_transfer=`. Episodes run in a thread of their own while the
    trainer trains. A row carries the lowest version of its episode, so a stale episode is dropped as a whole.

    The trainer's loss is the token mean of a micro-batch. It is exact if one micro-batch holds the whole step.

    Attributes:
        version: Version of the weights that the servers have; 0 before the first push.
        left_out: Number of episodes kept out of the update so far, by reason.
    """

    def __init__(
        self,
        run_episode: RunEpisode,
        prompts: Iterable[Any],
        weights: SGLangWeights,
        *,
        group_size: int = 8,
        groups_in_flight: int = 2,
        max_rows_waiting: int = 64,
        rows_per_step: int | None = None,
        max_staleness: int | None = None,
        version: int = 0,
        on_group: OnGroup | None = None,
        on_taken: OnTaken | None = None,
        rows_per_episode: int = 1,
        takes_turns: bool = False,
        **credit: Any,
    ) -> None:
        """Set up. Episodes start when the trainer calls `start`.

        Args:
            run_episode: Runs one episode of a prompt. An exception that it raises ends training.
            prompts: The prompts, in order; endless or as many as training needs.
            weights: Where the servers get the trainer's weights from.
            group_size: Episodes per prompt.
            groups_in_flight: Prompts at a time.
            max_rows_waiting: Rows that may wait for the trainer before the next prompt starts.
            rows_per_step: Rows that the trainer takes per step, if it takes the same number each time. Then no more
                prompts start than the step needs. Those of the next step start after the push, when `next_step` is
                called, or when the trainer waits for rows: TRL's own loader reads one step ahead.
            max_staleness: Largest number of updates between an episode's oldest token and the trainer, when it takes
                the episode; None for no limit but the trainer's own, which drops single rows.
            version: Version of the weights that training starts with, if it continues a run. Set the trainer's
                `model_version` to the same.
            on_group: Function that receives the rows and the episodes of each group, in the rollouts' thread, before
                the trainer gets the rows.
            on_taken: Function that receives each row that the trainer takes, in the trainer's thread.
            rows_per_episode: Rows that a call of `run_episode` makes, to plan `rows_per_step` with.
            takes_turns: Whether the trainer takes `TrainingRow.advantages` from the rows of `on_taken`. TRL's own takes
                one advantage per row, and rows whose turns differ are an error.
            **credit: Arguments of [`training_rows`][strands_sglang.credit.training_rows], such as `baseline` and
                `max_tokens`, the trainer's `token_budget`.

        Raises:
            ValueError: No group of this size would ever train.
        """
        _check_group_size(group_size, credit)
        self.rollout_buffer = _RowBuffer(self._takes, on_taken)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.version = version
        self.left_out: dict[str, int] = {}
        self._run_episode, self._prompts, self._weights = run_episode, iter(prompts), weights
        self._group_size, self._groups_in_flight = group_size, groups_in_flight
        self._rows_per_group, self._takes_turns = group_size * rows_per_episode, takes_turns
        self._max_rows_waiting, self._rows_per_step = max_rows_waiting, rows_per_step
        self._max_staleness, self._credit = max_staleness, credit
        self._on_group = on_group
        self._numbers = itertools.count()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._progress_at = time.monotonic()

    # RolloutWorkerProtocol

    def start(self) -> None:
        """Start running episodes, also again after `stop`: prompts whose episodes were canceled run again."""
        self.stop()
        self._progress_at = time.monotonic()
        self._error = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(self._stopped,), name="rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the episodes in flight, and wait for their cleanup. Rows that are waiting stay."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def next_step(self, groups: int | None = None) -> None:
        """With `rows_per_step`, let episodes of the next step start before the push, which then interrupts them.

        Args:
            groups: Maximum number of prompts that start before the push; None for as many as the step needs.
        """
        taken = 0
        if groups is not None and self._rows_per_step is not None:
            taken = max(0, self._rows_per_step - groups * self._rows_per_group)
        self.rollout_buffer.taken = taken

    def update_model_version(self, model_version: int) -> None:
        """Note the version that the servers have now."""
        self.version = model_version
        self.next_step()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the rollouts failed, ran out of prompts, or made no row for this many seconds of waiting.

        Raises:
            RuntimeError: Says which of them.
        """
        if self._error is not None:
            raise RuntimeError(f"the rollouts failed: {self._error!r}") from self._error
        if self._thread is not None and not self._thread.is_alive() and self.rollout_buffer.empty():
            if self._stopped.is_set():
                raise RuntimeError("the rollouts are stopped: call start")
            raise RuntimeError(f"there are no prompts left, and all rows have been trained; left out: {self.left_out}")
        # What waited while the trainer computed could not make progress: it counts from when the trainer waits again.
        if time.monotonic() - max(self._progress_at, self.rollout_buffer.waited_from) > stale_after_s:
            raise RuntimeError(f"no row to train for {stale_after_s:.0f} s; episodes were left out: {self.left_out}")

    # WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        """Do nothing: HTTP needs no setup."""

    def pause(self) -> None:
        """Stop generation on the servers."""
        self._weights.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push the trainer's weights as the next version."""
        self._weights.push(iterator, self.version + 1)

    def resume(self) -> None:
        """Continue generation on the servers."""
        self._weights.resume()

    def destroy(self) -> None:
        """Close the connections to the servers; those that are paused continue."""
        self._weights.close()

    def _produce(self, stopped: threading.Event) -> None:
        try:
            asyncio.run(self._run_until(stopped))
        except BaseException as error:
            self._error = error

    async def _run_until(self, stopped: threading.Event) -> None:
        groups: dict[asyncio.Task[None], Any] = {}
        try:
            prompts_left = True
            while not stopped.is_set() and (prompts_left or groups):
                while prompts_left and self._has_room(len(groups)):
                    try:
                        prompt = next(self._prompts)
                    except StopIteration:
                        prompts_left = False
                        break
                    groups[asyncio.create_task(self._add_group(next(self._numbers), prompt))] = prompt
                if groups:
                    done, _ = await asyncio.wait(groups, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                        del groups[task]
                else:
                    await asyncio.sleep(0.05)  # the trainer's queue is of threads: nothing to await
        finally:
            for task in groups:
                task.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            unfinished = [prompt for task, prompt in groups.items() if task.cancelled() or task.exception()]
            self._prompts = itertools.chain(unfinished, self._prompts)

    def _has_room(self, groups: int) -> bool:
        """Whether another prompt may start while so many groups are in flight."""
        waiting, taken, is_starved = self.rollout_buffer.state()
        if groups >= self._groups_in_flight or waiting >= self._max_rows_waiting:
            return False
        if self._rows_per_step is None:
            return True
        if taken + waiting + groups * self._rows_per_group < self._rows_per_step:
            return True
        if groups or not is_starved:
            return False
        # The trainer wants more than a step: its loader reads ahead, it drops stale rows, or it pushes less often.
        # No push can come before it has them.
        self.rollout_buffer.taken = 0
        return True

    def _takes(self, sample: Any) -> bool:
        """Whether the trainer gets the rows of an episode; asked for the first of them, when it takes it."""
        staleness = self.version - sample.model_version
        if self._max_staleness is None or staleness <= self._max_staleness:
            return True
        self._count({str(Reason("too_old", detail=(str(self._max_staleness),))): 1})
        return False

    def _count(self, left_out: Mapping[str, int]) -> None:
        with self._counting:  # the trainer's thread counts as well
            for reason, count in left_out.items():
                self.left_out[reason] = self.left_out.get(reason, 0) + count

    async def _add_group(self, number: int, prompt: Any) -> None:
        import numpy as np
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        version = self.version  # the oldest that can sample a token of the group
        episodes = await _run_episodes(self._run_episode, prompt, number, self._group_size)
        rows = training_rows(episodes, **self._credit)
        refuse_images(rows, "TRL's sample")  # fails before the trainer gets any of the rows, as the next line does
        advantages = [math.nan if self._takes_turns else row.advantage for row in rows]
        if self._on_group is not None:
            self._on_group(rows, episodes)
        self._count(rows.counts)
        self.metrics_queue.put(
            {"rollout/left_out": float(len(rows.left_out)), "rollout/flat_groups": float(len(rows.flat_groups))}
        )
        for row, advantage in zip(rows, advantages, strict=True):
            self._progress_at = time.monotonic()
            sample = RolloutSample(
                prompt=[{"role": "user", "content": str(prompt)}],
                completion=[{"role": "assistant", "content": f"({row.trained} trained tokens)"}],
                input_ids=np.array(row.token_ids),
                completion_mask=np.array(row.loss_mask),
                old_log_probs=np.array(row.logprobs, dtype=np.float32),
                advantage=advantage,
                model_version=version if row.episode_version is None else row.episode_version,
                group_id=number,
                metrics={"reward": rows.rewards[row.episode]},
            )
            self.rollout_buffer.put((sample, row))


class _RowBuffer(queue.Queue[Any]):
    """Rows that wait for the trainer; an episode's are taken all, or none."""

    def __init__(self, takes: Callable[[Any], bool], on_taken: Callable[[Any, TrainingRow], None] | None) -> None:
        super().__init__()
        self._takes, self._on_taken = takes, on_taken
        self.taken = 0  # rows that the trainer has of this step
        self._episode: tuple[int, str] | None = None
        self._is_taken = False
        self.waited_from, self._is_waiting = 0.0, False  # when the trainer asked for the row that it waits for

    def state(self) -> tuple[int, int, bool]:
        """Return how many rows wait, how many are taken, and whether the trainer waits and there is no row."""
        with self.mutex:
            return self._qsize(), self.taken, self._is_waiting and not self._qsize()

    def _get(self) -> Any:  # the queue calls it with its mutex held: a row is either waiting or taken
        self._is_waiting = False
        sample, row = super()._get()
        episode = (sample.group_id, row.episode)  # ids are unique in a group only
        if episode != self._episode:
            self._episode, self._is_taken = episode, self._takes(sample)
        self.taken += self._is_taken
        return sample, row

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row that is trained."""
        if not self._is_waiting:  # no earlier call for the same row ended without one
            self.waited_from = time.monotonic()
        while True:
            self._is_waiting = True
            sample, row = super().get(block, timeout)
            if self._is_taken:
                if self._on_taken is not None:
                    self._on_taken(sample, row)
                return sample


_KNOWN = frozenset(
    # What the adapter checks, or reckons with.
    ("scale_rewards", "num_iterations", "num_generations", "num_generations_eval", "steps_per_generation", "beta")
    + ("mask_truncated_completions", "loss_type", "max_completion_length", "generation_batch_size")
    # How a ratio is clipped, the temperature of the rollouts, and the reference of `beta`.
    + ("epsilon", "epsilon_high", "delta", "temperature", "sync_ref_model", "ref_model_mixup_alpha")
    + ("ref_model_sync_steps", "model_init_kwargs", "trust_remote_code", "disable_dropout", "shuffle_dataset")
    + ("remove_unused_columns", "pad_to_multiple_of", "cast_lm_head_to_fp32")
    # A loss of its own, of models with experts.
    + ("router_aux_loss_coef",)
    # What is logged.
    + ("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts")
    + ("log_completions_hub_repo",)
)
"""Settings of `GRPOConfig` that are checked, or leave the weights of rows and tokens as they are."""

_HARMLESS = {"reward_weights": [1.0]}
"""Values other than the default that change nothing."""


class GRPORollouts:
    """`rollout_func` of TRL's `GRPOTrainer`; `row_advantages` is its reward function.

    TRL wants the same number of rows for each prompt. Those that are missing are fillers with loss mask 0, and one of
    them brings the mean reward of its group to 0, so that TRL's own baseline changes nothing. The trainer's reward
    metrics mean nothing then.
    """

    def __init__(
        self,
        run_episode: RunEpisode,
        *,
        group_size: int,
        normalizer: Normalizer = "token_mean",
        constant: float | None = None,
        weights: SGLangWeights | None = None,
        **credit: Any,
    ) -> None:
        """Set up.

        Args:
            run_episode: Runs one episode of a prompt. An exception that it raises ends training.
            group_size: Episodes per prompt. The trainer's `num_generations` must be larger than their rows together.
            normalizer: The loss, see [`TrainingRows.weights`][strands_sglang.credit.TrainingRows.weights].
            constant: The divisor of the normalizer `"constant"`.
            weights: Where the servers get the trainer's weights from, before each batch of rollouts. None if something
                else pushes them.
            **credit: Arguments of [`training_rows`][strands_sglang.credit.training_rows], such as `baseline`,
                `max_tokens` and `max_staleness`; the version is the newest in the batch.

        Raises:
            ValueError: No group of this size would ever train.
        """
        _check_group_size(group_size, credit)
        self.left_out: Counter[str] = Counter()
        self._run_episode, self._group_size, self._weights, self._credit = run_episode, group_size, weights, credit
        self._normalizer, self._constant = normalizer, constant
        self._pushed: int | None = None
        self._sampled_at: int | None = None
        self._untrained: list[Journal] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Run a group of episodes for each prompt.

        Args:
            prompts: Prompts, each repeated `num_generations` times.
            trainer: The trainer.

        Raises:
            ValueError: A setting of the trainer would change the loss, or a group has too many rows. The message says
                what to set.
        """
        arguments = trainer.args
        self._check(arguments, trainer.accelerator.num_processes)
        if list(trainer.reward_funcs) != [row_advantages]:
            raise ValueError("set reward_funcs=row_advantages, alone: what others return would change the advantages")
        step = trainer.state.global_step
        if self._weights is not None and step != self._pushed:
            model = trainer.accelerator.unwrap_model(trainer.model)
            with _at_last(self._weights.resume):
                self._weights.pause()
                with _served_weights(model) as named_tensors:
                    self._weights.push(named_tensors, step)
            self._pushed = step
        if step != self._sampled_at:  # the rows of before are trained
            for journal in self._untrained:
                journal.acknowledge()
            self._untrained, self._sampled_at = [], step
        size = arguments.num_generations
        groups = run_apart(self._run_groups(prompts[::size]))  # a notebook has a running loop
        rows = TrainingRows.joined(groups)
        self._untrained += rows.journals
        most = max(map(len, groups), default=0)
        if most >= size:
            raise ValueError(
                f"{self._group_size} episodes made {most} rows, but num_generations={size} has room for {size - 1} and "
                f"a filler: set num_generations to at least {most + 1}"
            )
        scales = iter(
            rows.weights(
                self._normalizer,
                f"trl:{arguments.loss_type}",
                constant=self._constant,
                fillers=len(prompts) - len(rows),
                micro_batches=[range(len(rows))],  # `_check` refuses more where they matter
                max_length=arguments.max_completion_length,
            )
        )
        processing = trainer.processing_class  # a processor, for a model with images
        end = [getattr(processing, "tokenizer", processing).eos_token_id]
        trained: list[tuple[Any, ...]] = []
        for group in groups:
            balance = 0.0
            for row in group:
                first, advantage = row.loss_mask.index(1), row.advantage * next(scales)
                balance -= advantage
                trained.append(
                    (
                        row.token_ids[:first],
                        row.token_ids[first:],
                        row.loss_mask[first:],
                        row.logprobs[first:],
                        advantage,
                    )
                )
            for _ in range(size - len(group)):
                trained.append((end, end, [0], [0.0], balance))
                balance = 0.0
        names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "row_advantage")
        return {name: [row[place] for row in trained] for place, name in enumerate(names)}

    def _check(self, arguments: Any, processes: int) -> None:
        from transformers import TrainingArguments

        if processes > 1:
            raise ValueError(
                f"{processes} processes would each weight only their own rows: use one process, or AsyncGRPOTrainer"
            )
        for name, value in (("scale_rewards", "none"), ("num_iterations", 1)):
            if getattr(arguments, name) != value:
                raise ValueError(f"set {name}={value!r} in GRPOConfig: advantages come from strands_sglang.credit")
        if arguments.num_generations_eval not in (None, arguments.num_generations):
            raise ValueError("leave num_generations_eval out: a group has num_generations rows, in evaluations too")
        if arguments.steps_per_generation != arguments.gradient_accumulation_steps:
            raise ValueError("set steps_per_generation to gradient_accumulation_steps: a batch is one optimizer step")
        if arguments.mask_truncated_completions:
            raise ValueError("set mask_truncated_completions=False: what is trained is decided by the rows' masks")
        if arguments.beta and (self._normalizer, arguments.loss_type) != ("token_mean", "dapo"):
            raise ValueError(
                "beta weights all tokens equally, but this loss weights rows: set beta=0.0, or loss_type='dapo' with "
                "normalizer='token_mean'"
            )
        known = _KNOWN.union(field.name for field in fields(TrainingArguments))
        for field in fields(arguments):
            value = getattr(arguments, field.name)
            if field.name in known or value in (field.default, _HARMLESS.get(field.name, field.default)):
                continue
            raise ValueError(f"leave {field.name}={value!r} out of GRPOConfig: it may change the loss")
        if arguments.loss_type == "bnpo" and arguments.gradient_accumulation_steps > 1:
            raise ValueError("loss_type='bnpo' weights a token by its micro-batch; use 'dapo', or one micro-batch")

    async def _run_groups(self, prompts: Sequence[Any]) -> list[TrainingRows]:
        groups = await run_together(
            _run_episodes(self._run_episode, prompt, number, self._group_size) for number, prompt in enumerate(prompts)
        )
        credit = self._credit
        if credit.get("max_staleness") is not None:
            credit = {"version": newest_version(itertools.chain(*groups)), **credit}
        batches = [training_rows(episodes, **credit) for episodes in groups]
        for batch in batches:
            refuse_images(batch, "TRL's sample")
            self.left_out += batch.counts
            log_left_out(batch)
        return batches


@contextmanager
def _served_weights(model: torch.nn.Module) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
    """Yield a model's weights by their names in the checkpoint; adapters of PEFT are merged meanwhile."""
    if getattr(model, "peft_config", None) is None:
        yield model.state_dict().items()
        return
    merge, unmerge = getattr(model, "merge_adapter", None), getattr(model, "unmerge_adapter", None)
    if merge is None or unmerge is None:
        raise ValueError("this kind of adapter cannot be merged into the weights that SGLang serves: use LoRA")
    merge()
    try:
        weights = {}
        for name, tensor in model.state_dict().items():
            if model.prefix in name or ".original_module." in name:
                continue
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            weights[name.replace(".modules_to_save.default.", ".")] = tensor
        yield weights.items()
    finally:
        unmerge()


def _check_group_size(group_size: int, credit: Mapping[str, Any]) -> None:
    if group_size < 2 and credit.get("baseline", "mean") is not None:
        raise ValueError("a group of one episode has no baseline: set group_size to at least 2, or baseline=None")


def row_advantages(completions: Sequence[Any], row_advantage: Sequence[float], **_: Any) -> list[float]:
    """Return the rows' advantages: the reward function for `GRPORollouts`."""
    return list(row_advantage)


async def _run_episodes(run_episode: RunEpisode, prompt: Any, number: int, size: int) -> list[Episode]:
    """Run the episodes of a prompt at once; the first exception cancels the others."""
    runs = await run_together(run_episode(prompt) for _ in range(size))
    episodes = itertools.chain.from_iterable([run] if isinstance(run, Episode) else run for run in runs)
    return [replace(episode, group=number) for episode in episodes]
