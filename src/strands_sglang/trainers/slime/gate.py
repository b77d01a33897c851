"""Between a model and its client, for one episode: may this request be made, for how many tokens, and from where.

slime gives an episode one budget of response tokens, stops rollouts by a flag, and hands partial rollouts in again. All
three concern every request of an episode, whoever makes it (the agent, one that is a tool, a summary), so they are kept
where all requests pass.

- No request goes out once slime aborts: `SGLangAbortedError`.
- `max_new_tokens` is what the budget has left, with everything behind the opening prompt counted, tool results too.
- A call that an abort had cut in an earlier part of the rollout goes on from its tokens; what comes back looks like
  one answer to it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException

from ...client import SGLangClient
from ...exceptions import SGLangAbortedError
from ...generation import Generation
from ...tool_limiter import LoopLimitReachedError
from ...trajectory import Trajectory
from ...turns import Turn, TurnStatus
from .rows import int32_array, top_p_arrays


class ResponseBudgetReachedError(LoopLimitReachedError):
    """The response is as long as it may be."""

    outcome = "token_budget_reached"


@dataclass(frozen=True, eq=False)
class Cut:
    """What an abort left of a call.

    Attributes:
        prompt_ids: The request's ids, shape (T,).
        generation: What it had sampled.
    """

    prompt_ids: list[int]
    generation: Generation


@dataclass(eq=False)
class EpisodeGate:
    """What holds for all requests of an episode.

    Attributes:
        trajectory: The episode's calls.
        aborted: Whether slime stops rollouts.
        budget: Most tokens of a response; None for any number.
        context_limit: Most tokens of prompt and response; None for what the server takes.
        cut: The call to go on from, until it was made again.
        continued: `Turn.index` of the call that went on from it.
        generating_s: Seconds that requests took so far, parallel ones counted once each.
    """

    trajectory: Trajectory
    aborted: Callable[[], bool]
    budget: int | None = None
    context_limit: int | None = None
    cut: Cut | None = None
    continued: int | None = None
    generating_s: float = field(default=0.0)

    def check_abort(self) -> None:
        """Stop what would ask the server for more.

        Raises:
            SGLangAbortedError: slime stops rollouts.
        """
        if self.aborted():
            raise SGLangAbortedError("slime aborts its rollouts, so no request was made")

    def room(self, turn: Turn, more: int) -> int | None:
        """How many tokens may be sampled for a turn; None for any number.

        Args:
            turn: The turn.
            more: How many it has already.

        Raises:
            ResponseBudgetReachedError: None.
            ContextWindowOverflowException: None, since prompt and response would be too long.
        """
        length = len(turn.token_ids()) + more
        sampled = sum(len(other.output_ids) for other in self.trajectory.turns) + more
        rooms = []
        if self.context_limit is not None:
            rooms.append(self.context_limit - length)
            if rooms[0] <= 0 and not more:
                raise ContextWindowOverflowException(
                    f"the prompt has {length} tokens, and a sample may have {self.context_limit}"
                )
        if self.budget is not None:
            rooms.append(self.budget - max(length - len(turn.root.prompt_ids), sampled))
            if rooms[-1] <= 0 and not more:
                raise ResponseBudgetReachedError(f"the response has all of its {self.budget} tokens")
        return min(rooms, default=None)


class GatedClient:
    """An `SGLangClient` whose generations pass a gate. Equal to the client, so what is known of that holds for it."""

    def __init__(self, client: SGLangClient, gate: EpisodeGate) -> None:
        """Put a gate before a client."""
        self._client = client
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        """Everything else is the client's."""
        return getattr(self._client, name)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same client."""
        return self._client is (other._client if isinstance(other, GatedClient) else other)

    def __hash__(self) -> int:
        """The client's."""
        return hash(self._client)

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """As `SGLangClient.generate`.

        Raises:
            SGLangAbortedError: slime stops rollouts.
            ResponseBudgetReachedError: The response is as long as it may be.
            ContextWindowOverflowException: Prompt and response would be too long.
            SGLangClientError: As for the client.
        """
        gate, params, ids = self._gate, dict(sampling_params or {}), list(input_ids)
        gate.check_abort()
        turn = _turn_of(gate.trajectory, ids)
        cut = None
        if turn is not None:
            if gate.cut is not None and gate.cut.prompt_ids == ids:
                cut, gate.cut, gate.continued = gate.cut, None, turn.index
            done = cut.generation.completion_tokens if cut is not None else 0
            room = gate.room(turn, done)
            asked = params.get("max_new_tokens")
            rooms = [value for value in (room, None if asked is None else asked - done) if value is not None]
            if rooms:
                params["max_new_tokens"] = min(rooms)
        if cut is None:
            return await self._timed(ids, params, fields)
        if params.get("max_new_tokens", 1) <= 0:
            return ended_by_length(cut.generation)
        known = cut.generation.output_ids.tolist()
        if fields.get("vocab_size") is not None:
            fields = {**fields, "vocab_size": max(fields["vocab_size"], max(known) + 1)}
        try:
            return joined(cut, await self._timed([*ids, *known], params, fields))
        except BaseException:
            gate.cut = cut  # nothing was recorded, so a later attempt may go on from there
            raise

    async def _timed(self, ids: list[int], params: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return await self._client.generate(ids, params, **fields)
        finally:
            self._gate.generating_s += time.monotonic() - began


def _turn_of(trajectory: Trajectory, ids: list[int]) -> Turn | None:
    """The call that a request is made for: one on its way whose prompt the request begins with."""
    waiting = [turn for turn in trajectory.turns if turn.status is TurnStatus.ASKED]
    if len(waiting) == 1:
        return waiting[0]
    prompts = [(turn, turn.sent_ids()) for turn in waiting]
    fitting = [(turn, prompt) for turn, prompt in prompts if ids[: len(prompt)] == prompt]
    return max(fitting, key=lambda pair: len(pair[1]))[0] if fitting else None


# --- two answers as one ---


def ended_by_length(generation: Generation) -> dict[str, Any]:
    """The response that a server would have given if it had stopped where a generation was cut, for want of room."""
    meta = _meta_of(generation)
    meta["finish_reason"] = {"type": "length", "length": generation.completion_tokens}
    return {"text": "", "output_ids": generation.output_ids.tolist(), "meta_info": meta}


def joined(cut: Cut, response: Mapping[str, Any]) -> dict[str, Any]:
    """One response to a request that was answered in two parts.

    Args:
        cut: The first part.
        response: The server's response to the same prompt with the first part's tokens behind it.
    """
    first, rest = cut.generation, dict(response["meta_info"])
    count = first.completion_tokens
    before, meta = _meta_of(first), dict(rest)
    meta["prompt_tokens"] = len(cut.prompt_ids) if rest.get("prompt_tokens") else 0
    meta["cached_tokens"] = min(int(rest.get("cached_tokens") or 0), len(cut.prompt_ids))
    meta["completion_tokens"] = count + len(response["output_ids"])
    if "output_token_logprobs" in before or rest.get("output_token_logprobs"):
        meta["output_token_logprobs"] = [
            *before.get("output_token_logprobs", ()),
            *(rest.get("output_token_logprobs") or ()),
        ]
    if rest.get("input_token_logprobs"):
        meta["input_token_logprobs"] = rest["input_token_logprobs"][:-count]
    earlier, later = (
        _versions(first.meta_info, first.weight_version, count),
        _versions(rest, rest.get("weight_version"), len(response["output_ids"])),
    )
    if earlier and later:
        moved = [{**span, "start": span["start"] + count, "end": span["end"] + count} for span in later]
        meta["weight_versions"] = [*earlier, *moved]
    finish = rest["finish_reason"]
    meta["finish_reason"] = {**finish, "length": finish["length"] + count} if "length" in finish else finish
    if rest.get("prompt_tokens"):
        _join_experts(first, meta)
    else:
        # Aborted in the queue: what is known is the first part.
        meta["prompt_tokens"], meta["routed_experts"] = first.prompt_tokens, first.routed_experts
    _join_top_p(first, rest, meta)
    return {**response, "output_ids": [*first.output_ids, *response["output_ids"]], "meta_info": meta}


def _meta_of(generation: Generation) -> dict[str, Any]:
    """A generation's `meta_info` with the lists that are kept apart from it."""
    meta = dict(generation.meta_info)
    if generation.logprobs is not None:
        pairs = zip(generation.logprobs, generation.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in pairs]
    if generation.routed_experts is not None:
        meta["routed_experts"] = generation.routed_experts
    meta["prompt_tokens"] = generation.prompt_tokens
    return meta


def _versions(meta: Mapping[str, Any], version: str | None, count: int) -> list[dict[str, Any]]:
    """Which weights sampled which tokens, as SGLang tells it; from the one version where it does not."""
    told = meta.get("weight_versions")
    if told or version is None:
        return list(told or ())
    return [{"version": version, "start": 0, "end": count}]


def _join_experts(first: Generation, meta: dict[str, Any]) -> None:
    """The first part's rows, then those that the rest has beyond them."""
    if first.routed_experts is None or not meta.get("routed_experts"):
        return
    before, after = base64.b64decode(first.routed_experts), base64.b64decode(meta["routed_experts"])
    meta["routed_experts"] = base64.b64encode(before + after[len(before) :]).decode()


def _join_top_p(first: Generation, rest: Mapping[str, Any], meta: dict[str, Any]) -> None:
    names = [name for name in meta if name.startswith("top_p_") and name.endswith(("token_ids", "token_offsets"))]
    for name in names:
        del meta[name]
    try:
        ids, starts = top_p_arrays(first)
        later_ids = int32_array(next((rest[name] for name in names if name.endswith("ids")), None))
        later_starts = int32_array(next((rest[name] for name in names if name.endswith("offsets")), None))
    except ValueError:
        return
    if ids is None or starts is None or later_ids is None or later_starts is None:
        return
    meta["top_p_token_ids"] = [*ids.tolist(), *later_ids.tolist()]
    meta["top_p_token_offsets"] = [*starts.tolist(), *(later_starts[1:] + starts[-1]).tolist()]
