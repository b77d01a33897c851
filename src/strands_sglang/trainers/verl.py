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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson

from ..client.client import SGLangClient
from ..credit import Episode, TrainingRow, as_number, training_rows, version_number
from ..model.model import SGLangModel
from .records import newest_version, refuse_images

logger = logging.getLogger(__name__)

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
        output = await self._server_manager.generate(
            request_id=body.get("routing_key") or rid,
            prompt_ids=body["input_ids"],
            sampling_params={**body["sampling_params"], "logprobs": True},
        )
        ids, logprobs = list(output.token_ids), output.log_probs
        # verl names the end as its backend does: SGLang's reasons, or "completed" and "aborted".
        finish = {"completed": "stop", "aborted": "abort", None: "stop"}.get(output.stop_reason, output.stop_reason)
        limit = body["sampling_params"].get("max_new_tokens")
        if finish == "stop" and limit is not None and len(ids) >= limit:
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


@dataclass
class _Siblings:
    """The episodes of a prompt, which a worker of verl runs at once.

    verl trains the only episode that is left of a group with a baseline of 0, so it is held back until the last ends.
    """

    started: int = 0
    running: int = 0
    trained: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def outputs_of(self, episode: Awaitable[list[Any]], name: str) -> list[Any]:
        """Return what an episode trains, once its siblings have ended, too."""
        self.started += 1
        self.running += 1
        try:
            outputs = await episode
            self.trained += bool(outputs)
        finally:
            self.running -= 1
            if not self.running:
                self.ended.set()
        await self.ended.wait()
        if outputs and self.trained == 1 < self.started:
            logger.warning(
                "prompt=<%s> | left out of training: the only episode of its group that can be trained", name
            )
            return []
        return outputs


def agent_loop(name: str, *, max_staleness: int | None = None, **model_config: Any) -> Callable[[RunEpisode], type]:
    """Turn a function into an agent loop that verl finds by name.

    verl imports the decorated function by its module and name, in its workers.

    Args:
        name: Name of the loop: `agent_name` in the dataset, or `rollout.agent.default_agent_loop`.
        max_staleness: See `agent_loop_outputs`.
        **model_config: Arguments of the [`SGLangModel`][strands_sglang.SGLangModel], without its sampling parameters,
            which are verl's.

    Returns:
        A decorator of a function `run_episode(model, fields)`, which returns an `AgentLoopBase` subclass. An episode
            without a reward is scored by verl, unless its outcome says nothing about the policy. What cannot be trained
            is logged and returned as an empty list, which verl drops; so is an episode whose siblings all are.
    """

    def decorate(run_episode: RunEpisode) -> type:
        from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register

        prompts: dict[str, _Siblings] = {}

        class StrandsAgentLoop(AgentLoopBase):
            async def run(self, sampling_params: dict[str, Any], **fields: Any) -> list[Any]:
                # Sessions have numbers in verl's worker for TransferQueue, which runs all of a prompt at once. Its
                # other worker may get only some of them.
                uid = str(fields["uid"]) if "session_id" in fields else ""
                siblings = prompts.setdefault(uid, _Siblings()) if uid else _Siblings()
                try:
                    return await siblings.outputs_of(self._outputs(sampling_params, fields), uid)
                finally:
                    if prompts.get(uid) is siblings and not siblings.running:
                        del prompts[uid]

            async def _outputs(self, sampling_params: dict[str, Any], fields: Mapping[str, Any]) -> list[Any]:
                client = SGLangClient("http://verl", transport=ServerManagerTransport(self.server_manager))
                model = SGLangModel(
                    tokenizer=self.tokenizer,
                    client=client,
                    sampling_params={key: value for key, value in sampling_params.items() if key != "logprobs"},
                    **model_config,
                )
                episode = await run_episode(model, fields)
                rollout = self.config.actor_rollout_ref.rollout
                return agent_loop_outputs(
                    episode,
                    prompt_length=rollout.prompt_length,
                    response_length=rollout.response_length,
                    max_staleness=max_staleness,
                )

        StrandsAgentLoop.__module__ = run_episode.__module__
        StrandsAgentLoop.__qualname__ = StrandsAgentLoop.__name__ = run_episode.__name__
        StrandsAgentLoop.__doc__ = run_episode.__doc__
        registered: type = register(name)(StrandsAgentLoop)
        return registered

    return decorate


def agent_loop_outputs(
    episode: Episode,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    max_staleness: int | None = None,
) -> list[Any]:
    """Return the rows of an episode as verl's `AgentLoopOutput`s, for an agent loop of your own.

    The last one has a trained token, because verl reads the episode's reward there.

    Args:
        episode: The episode.
        prompt_length: Maximum number of tokens before the first trained one, verl's `rollout.prompt_length`.
        response_length: Maximum number of tokens from there on, verl's `rollout.response_length`.
        max_staleness: Largest difference between the versions of the weights that sampled the episode's tokens.

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
    scored = episode if episode.reward is not None else replace(episode, reward=0.0)
    rows = training_rows([scored], baseline=None, max_staleness=max_staleness, version=newest)
    refuse_images(rows, "verl's output")
    reason = next(iter(rows.left_out.values()), None) or _too_long(rows, prompt_length, response_length)
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


def _too_long(rows: Any, prompt_length: int | None, response_length: int | None) -> str | None:
    """Return which limit a row exceeds; None if all fit."""
    row: TrainingRow
    for row in rows:
        first = row.loss_mask.index(1)
        for what, length, limit in (
            ("prompt", first, prompt_length),
            ("response", len(row) - first, response_length),
        ):
            if length > (sys.maxsize if limit is None else limit):
                return f"a row's {what} has {length} tokens, and rollout.{what}_length is {limit}"
    return None
