"""verl: agent loops whose episodes are Strands agents, on verl's own inference servers.

    from strands_sglang.trainers.verl import agent_loop

    @agent_loop("calculator")
    async def calculator(model, fields): ...

verl owns the servers, so the model's requests go to verl's `server_manager` instead of an address. verl computes the
baselines itself, over episodes, from the reward on an episode's last row. verl is imported only when used;
docs/guides/verl.md shows a complete loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson

from ..client.client import SGLangClient
from ..credit import (
    Batch,
    Episode,
    Loss,
    PolicyLoss,
    Reduction,
    TrainingRows,
    as_number,
    per_batch,
    per_row,
    training_rows,
    version_number,
    whole,
)
from ..model.model import SGLangModel
from ..outcomes import OUTCOMES, RewardRule
from .records import check_settings, loss_columns, newest_version, refuse_images

logger = logging.getLogger(__name__)


def per_batch_row(batch: Batch, index: int) -> float:
    """Sum over the trained tokens of a row, then mean over the rows."""
    return 1 / batch.size


LOSSES: Mapping[str, Reduction] = {
    "verl:seq-mean-token-mean": per_row,
    "verl:token-mean": per_batch,
    "verl:token-sum": whole,
    "verl:seq-mean-token-sum": per_batch_row,
}
"""verl's losses."""


def clipped_loss(rows: TrainingRows, loss: Loss) -> float:
    """Return verl's `vanilla` loss, by its own functions."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    low, high = loss.clip
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high
    )
    value, _ = get_policy_loss_fn("vanilla")(*loss_columns(rows, loss), loss_agg_mode="token-mean", config=config)
    return float(value)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {"verl:token-mean": clipped_loss}
"""Losses that a replay computes again."""

RunEpisode = Callable[[SGLangModel, Mapping[str, Any]], Awaitable[Episode]]
"""Async function of a model and a row of verl's dataset that runs one episode. Its `group` and `id` do not matter."""


class ServerManagerTransport(httpx.AsyncBaseTransport):
    """An httpx transport that hands `/generate` to verl's server manager, for `SGLangClient(transport=...)`.

    verl keeps an episode on one server by its request id, for which the routing key is used.
    """

    def __init__(self, server_manager: Any) -> None:
        """Set up.

        Args:
            server_manager: The `server_manager` of verl's `AgentLoopBase`.
        """
        self._server_manager = server_manager

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response of verl's servers, in the form of SGLang's."""
        if request.url.path != "/generate":  # verl's server manager only generates
            return httpx.Response(200 if request.url.path == "/abort_request" else 404, request=request)
        body = orjson.loads(await request.aread())
        rid = str(body.get("rid", ""))
        refused = {"image_data", "return_routed_experts", "return_sampling_mask"} & body.keys()
        if refused:
            return _response(request, 400, {"error": {"message": f"verl's server manager has no {min(refused)}"}})
        params = body["sampling_params"]
        output = await self._server_manager.generate(
            request_id=body.get("routing_key") or rid,
            prompt_ids=body["input_ids"],
            sampling_params={**params, "logprobs": True},
        )
        ids, logprobs = list(output.token_ids), output.log_probs
        # verl names the end as its backend does: SGLang's reasons, or "completed" and "aborted".
        finish = {"completed": "stop", "aborted": "abort", None: "stop"}.get(output.stop_reason, output.stop_reason)
        limit = params.get("max_new_tokens")
        # verl's vLLM server names an answer that was cut at the limit "completed", too.
        if output.stop_reason in ("completed", None) and limit and len(ids) >= limit:
            finish = "length"
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": output.extra_fields.get("num_cached_tokens") or 0,
        }
        if logprobs is not None:
            entries = zip(logprobs, ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in entries]
        first, last = (output.extra_fields.get(f"{name}_global_steps") for name in ("min", "max"))
        if first is not None and first == last:
            meta["weight_version"] = str(first)
        elif first is not None:  # verl does not tell which tokens each version sampled: all count as the older one's
            meta |= {
                "weight_version": str(last),
                "weight_versions": [{"version": str(first), "start": 0, "end": len(ids)}],
            }
        return _response(request, 200, {"text": "", "output_ids": ids, "meta_info": meta})


def _response(request: httpx.Request, status: int, content: dict[str, Any]) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.Response(status, content=orjson.dumps(content), headers=headers, request=request)


class UntrainablePromptError(RuntimeError):
    """No episode of a prompt can be trained; the log says why. verl counts the prompt as failed, and continues."""


@dataclass
class _Siblings:
    """The episodes of a prompt, which a worker of verl runs at once: what one returns depends on the others."""

    started: int = 0
    running: int = 0
    rewards: list[float | None] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def outputs_of(self, episode: Awaitable[list[Any]]) -> list[Any]:
        """Return what an episode trains, once its siblings have ended, too."""
        self.started += 1
        self.running += 1
        try:
            await asyncio.sleep(0)  # its siblings start before it can end
            outputs = await episode
            if outputs:
                self.rewards.append(outputs[-1].reward_score)
        finally:
            self.running -= 1
            if not self.running:
                self.ended.set()
        await self.ended.wait()
        return outputs


def _worker_call() -> Mapping[str, Any]:
    """Return the variables of verl's `_run_agent_loop`, if it called the caller; else none.

    verl tells an agent loop neither whether it validates nor which of its workers asks. Both decide what to return.
    """
    frame = sys._getframe(2)
    return frame.f_locals if frame.f_code.co_name == "_run_agent_loop" else {}


SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "algorithm.adv_estimator": ("grpo",),
    "algorithm.use_kl_in_reward": (False,),
    "actor_rollout_ref.actor.loss_agg_mode": ("token-mean",),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("vanilla", "gpg"),
    "algorithm.rollout_correction.rollout_is": (None, "token"),
    "algorithm.rollout_correction.rollout_rs": (None,),
}
"""Settings of verl that change what a row of an episode counts, with the values that are right for several rows."""


def check_config(config: Any) -> None:
    """Check verl's settings that change what a row of an episode counts.

    Args:
        config: verl's whole configuration. Settings that it lacks are not checked.

    Raises:
        ValueError: A setting has another value than those in `SETTINGS`.
    """
    check_settings(config, SETTINGS, "verl")


def agent_loop(
    name: str, *, max_staleness: int | None = None, scored_by_verl: bool = False, **model_config: Any
) -> Callable[[RunEpisode], type]:
    """Turn a function into an agent loop that verl finds by name.

    verl imports the decorated function by its module and name, in its workers.

    Args:
        name: Name of the loop: `agent_name` in the dataset, or `rollout.agent.default_agent_loop`.
        max_staleness: See `agent_loop_outputs`.
        scored_by_verl: See `agent_loop_outputs`.
        **model_config: Arguments of the [`SGLangModel`][strands_sglang.SGLangModel], without its sampling parameters,
            which are verl's.

    Returns:
        A decorator of a function `run_episode(model, fields)`, which returns an `AgentLoopBase` subclass. What cannot
            be trained is logged. verl's worker for TransferQueue gets an empty list for it, which it drops, and so it
            does for an episode whose siblings are all left out; a prompt without any raises `UntrainablePromptError`.
            verl's other worker needs one row per episode: it gets a row without a trained token, whose reward is the
            mean of its siblings'. Validation counts every episode with a reward.
    """

    def decorate(run_episode: RunEpisode) -> type:
        from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register

        prompts: dict[str, _Siblings] = {}

        class StrandsAgentLoop(AgentLoopBase):
            async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
                check_config(self.config)
                call = _worker_call()
                takes_lists = not call or "session_id" in fields  # only verl's worker for TransferQueue has sessions
                validates = bool(call) and call["trajectory"]["validate"]
                uid = str(fields.get("uid", ""))
                siblings = prompts.setdefault(uid, _Siblings()) if uid else _Siblings()
                try:
                    outputs = await siblings.outputs_of(self._outputs(sampling_params, fields, takes_lists, validates))
                finally:
                    if prompts.get(uid) is siblings and not siblings.running:
                        del prompts[uid]
                if not takes_lists:
                    if uid and not validates and siblings.started < self.config.actor_rollout_ref.rollout.n:
                        raise ValueError(
                            "verl gave a group to several workers, where no baseline can be kept: set "
                            "rollout.agent.num_workers to a divisor of data.train_batch_size, or of gen_batch_size"
                        )
                    return outputs[0] if outputs else _filler(siblings.rewards, self.tokenizer)
                trained = len(siblings.rewards)
                if trained > 1 or trained == siblings.started or not call or validates:
                    return outputs
                if not trained:
                    raise UntrainablePromptError(f"no episode of prompt {uid!r} can be trained")
                if outputs:
                    logger.warning(
                        "prompt=<%s> | left out of training: the only episode of its group that can be trained", uid
                    )
                return []

            async def _outputs(
                self, sampling_params: dict[str, Any], fields: Mapping[str, Any], takes_lists: bool, validates: bool
            ) -> list[Any]:
                rollout = self.config.actor_rollout_ref.rollout
                client = SGLangClient("http://verl", transport=ServerManagerTransport(self.server_manager))
                given = {key: value for key, value in sampling_params.items() if key != "logprobs"}
                model = SGLangModel(
                    tokenizer=self.tokenizer,
                    client=client,
                    sampling_params={"max_new_tokens": rollout.response_length, **given},
                    **model_config,
                )
                # What verl's servers do not report. Their limits are those of `vllm_async_server.py` and
                # `async_sglang_server.py` in verl 0.9.1, and the tokenizer is that of the model that they serve.
                (server,) = client.servers
                lengths = (rollout.prompt_length + rollout.response_length, getattr(rollout, "max_model_len", None))
                server.context_length = min(filter(None, lengths))
                server.tokenizers[model.chat_template.tokenizer] = True
                episode = await run_episode(model, fields)
                outputs = agent_loop_outputs(
                    episode,
                    prompt_length=rollout.prompt_length,
                    response_length=rollout.response_length,
                    max_staleness=max_staleness,
                    scored_by_verl=scored_by_verl,
                )
                has_too_many = len(outputs) > 1 and not takes_lists
                if validates and (has_too_many or not outputs):  # its score needs no row that can be trained
                    rewards = training_rows([episode], baseline=None).rewards
                    return [_filler(rewards.values(), self.tokenizer)] if rewards else []
                if has_too_many:
                    rows = f"it has {len(outputs)} rows, and verl's AgentLoopWorker takes one"
                    logger.warning("episode=<%s> | left out of training: %s", episode.id, rows)
                    return []
                return outputs

        StrandsAgentLoop.__module__ = run_episode.__module__
        StrandsAgentLoop.__qualname__ = StrandsAgentLoop.__name__ = run_episode.__name__
        StrandsAgentLoop.__doc__ = run_episode.__doc__
        registered: type = register(name)(StrandsAgentLoop)
        return registered

    return decorate


def _filler(rewards: Iterable[float | None], tokenizer: Any) -> Any:
    """Return a row that trains no token, with the mean of some rewards.

    `AgentLoopWorker` needs a row of each episode. The mean of its siblings' rewards leaves the baseline of their
    group as it is, and gives the only one that is left the advantage 0.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    known = [reward for reward in rewards if reward is not None]
    end = tokenizer.eos_token_id or 0
    return AgentLoopOutput(
        prompt_ids=[end],
        response_ids=[end],
        response_mask=[0],
        response_logprobs=[0.0],
        reward_score=sum(known) / len(known) if known else 0.0,
        num_turns=0,
        metrics=AgentLoopMetrics(),
        extra_fields={"reward_extra_info": {}},
    )


def agent_loop_outputs(
    episode: Episode,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    max_staleness: int | None = None,
    scored_by_verl: bool = False,
) -> list[Any]:
    """Return the rows of an episode as verl's `AgentLoopOutput`s, for an agent loop of your own.

    The last one has a trained token, because verl reads the episode's reward there.

    Args:
        episode: The episode.
        prompt_length: Maximum number of tokens before the first trained one, verl's `rollout.prompt_length`.
        response_length: Maximum number of tokens from there on, verl's `rollout.response_length`.
        max_staleness: Largest difference between the versions of the weights that sampled the episode's tokens.
        scored_by_verl: Whether verl's reward function scores an episode without a reward. One that failed or ran out of
            time is left out nevertheless.

    Returns:
        The outputs; none if the episode cannot be trained. The log says why.

    Raises:
        ValueError: The episode has rewards of single turns, or images: verl takes one reward per episode, and this
            adapter has token ids only.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    if episode.turn_rewards:
        raise ValueError("verl takes one reward per episode, at its end: leave out turn_rewards")
    newest = None if max_staleness is None else newest_version([episode])
    rule = RewardRule.COMPUTED if episode.outcome is None else OUTCOMES[episode.outcome].reward
    by_verl = scored_by_verl and episode.reward is None and rule is RewardRule.COMPUTED
    scored = replace(episode, reward=0.0) if by_verl else episode
    rows = training_rows([scored], baseline=None, max_staleness=max_staleness, version=newest)
    refuse_images(rows, "verl's output")
    reason = next(map(str, rows.left_out.values()), None) or _too_long(rows, prompt_length, response_length)
    if reason is not None:
        logger.warning("episode=<%s> | left out of training: %s", episode.id, reason)
        return []
    turns = [turn for turn in episode.trajectory.turns if turn.is_answered]
    outputs = []
    for row in rows:
        first = row.loss_mask.index(1)
        known = [number for number in map(version_number, row.versions) if number is not None]
        steps = {"min_global_steps": min(known), "max_global_steps": max(known)} if known else {}
        outputs.append(
            AgentLoopOutput(
                prompt_ids=row.token_ids[:first],
                response_ids=row.token_ids[first:],
                response_mask=row.loss_mask[first:],
                response_logprobs=row.logprobs[first:],
                num_turns=2 * len(turns),
                metrics=AgentLoopMetrics(generate_sequences=sum(turn.requests_s for turn in turns)),
                extra_fields=steps,
            )
        )
    if episode.reward is not None:
        outputs[-1].reward_score = as_number(episode.reward)
        outputs[-1].extra_fields["reward_extra_info"] = {}  # verl copies it to the other rows
    return outputs


def _too_long(rows: TrainingRows, prompt_length: int | None, response_length: int | None) -> str | None:
    """Return which limit a row exceeds; None if all fit."""
    for row in rows:
        first = row.loss_mask.index(1)
        for what, length, limit in (
            ("prompt", first, prompt_length),
            ("response", len(row) - first, response_length),
        ):
            if limit is not None and length > limit:
                return f"a row's {what} has {length} tokens, and rollout.{what}_length is {limit}"
    return None
