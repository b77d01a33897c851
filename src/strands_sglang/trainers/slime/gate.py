"""Between a model and its client, for one episode: may this request be made, and for how many tokens.

slime gives an episode one budget of response tokens, and stops rollouts by a flag. Both concern every request of an
episode, whoever makes it (the agent, one that is a tool, a summary), so they are kept where all requests pass.

- No request goes out once slime aborts: `SGLangAbortedError`.
- `max_new_tokens` is what the budget has left, with everything behind the opening prompt counted, tool results too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...client.client import SGLangClient
from ...exceptions import SGLangAbortedError
from ...tool_limiter import LoopLimitReachedError
from ...trajectory.trajectory import Trajectory
from ...trajectory.turn import Turn, TurnStatus


class ResponseBudgetReachedError(LoopLimitReachedError):
    """The response is as long as it may be."""

    outcome = "token_budget_reached"


@dataclass(eq=False)
class EpisodeGate:
    """What holds for all requests of an episode.

    Attributes:
        trajectory: The episode's calls.
        aborted: Whether slime stops rollouts.
        budget: Most tokens of a response; None for any number.
        generating_s: Seconds that requests took so far, parallel ones counted once each.
    """

    trajectory: Trajectory
    aborted: Callable[[], bool]
    budget: int | None = None
    generating_s: float = field(default=0.0)

    def check_abort(self) -> None:
        """Stop what would ask the server for more.

        Raises:
            SGLangAbortedError: slime stops rollouts.
        """
        if self.aborted():
            raise SGLangAbortedError("slime aborts its rollouts, so no request was made")

    def clamp(self, turn: Turn, more: int, asked: int | None, least: int = 1) -> int | None:
        """How many tokens may be sampled for a turn, as is noted in it; None for any number.

        Args:
            turn: The turn.
            more: How many it has already.
            asked: How many are asked for; None for any number.
            least: How many a new answer has at least.

        Raises:
            ResponseBudgetReachedError: Too few.
        """
        length = len(turn.token_ids()) + more
        sampled = sum(len(other.output_ids) for other in self.trajectory.turns) + more
        limits = [] if asked is None else [(asked, turn.clamped)]
        if self.budget is not None:
            limits.append((self.budget - max(length - len(turn.root.prompt_ids), sampled), False))
            if limits[-1][0] < least and not more:
                used = self.budget - max(limits[-1][0], 0)
                raise ResponseBudgetReachedError(
                    f"the response has {used} of its {self.budget} tokens{_with_least(least)}"
                )
        if not limits:
            return None
        room, turn.clamped = min(limits, key=lambda limit: limit[0])
        turn.sampling_params = {**turn.sampling_params, "max_new_tokens": max(room, 0) + more}
        return room


class GatedClient:
    """An `SGLangClient` whose generations pass a gate."""

    def __init__(self, client: SGLangClient, gate: EpisodeGate) -> None:
        """Put a gate before a client."""
        self._client = client
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        """Everything else is the client's, `origin` too, so that what is known of its servers holds here."""
        return getattr(self._client, name)

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """As `SGLangClient.generate`.

        Raises:
            SGLangAbortedError: slime stops rollouts.
            ResponseBudgetReachedError: The response is as long as it may be.
            SGLangClientError: As for the client.
        """
        gate, params, ids = self._gate, dict(sampling_params or {}), list(input_ids)
        gate.check_abort()
        turn = _turn_of(gate.trajectory, ids)
        if turn is not None:
            least = params.get("min_new_tokens") or 0
            room = gate.clamp(turn, len(ids) - len(turn.sent_ids()), params.get("max_new_tokens"), max(least, 1))
            if room is not None:
                params["max_new_tokens"] = room
                if least > room:  # the rest of a cut answer
                    params["min_new_tokens"] = max(room, 0)
        if params.get("max_new_tokens", 1) <= 0:
            return _no_room(ids)
        return await self._timed(ids, params, fields)

    async def _timed(self, ids: list[int], params: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return await self._client.generate(ids, params, **fields)
        finally:
            self._gate.generating_s += time.monotonic() - began


def _with_least(least: int) -> str:
    return f", and an answer has at least {least} (min_new_tokens)" if least > 1 else ""


def _turn_of(trajectory: Trajectory, ids: list[int]) -> Turn | None:
    """The call that a request is made for: one on its way whose prompt the request begins with."""
    waiting = [turn for turn in trajectory.turns if turn.status is TurnStatus.ASKED]
    if len(waiting) == 1:
        return waiting[0]
    prompts = [(turn, turn.sent_ids()) for turn in waiting]
    fitting = [(turn, prompt) for turn, prompt in prompts if ids[: len(prompt)] == prompt]
    return max(fitting, key=lambda pair: len(pair[1]))[0] if fitting else None


def _no_room(ids: list[int]) -> dict[str, Any]:
    """The response to a request that goes on from tokens which have used up the budget: nothing more."""
    meta = {
        "id": "",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
    }
    return {"text": "", "output_ids": [], "meta_info": meta}
