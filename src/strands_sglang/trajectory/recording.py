"""A recorded trajectory that answers model calls in place of a server, up to the first call that asks something else.

What was sampled is fixed, and everything else runs again: the agent, its hooks, the chat template and the parser. Calls
find their recorded turn by the tokens that they ask, so agents may ask in another order than they did.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from strands.types.exceptions import ContextWindowOverflowException

from ..outcomes import TerminationReason
from ..shown import first_difference
from .trajectory import Trajectory
from .turn import RecordedError, Turn, TurnStatus

_SHOWN = 12
"""Tokens that a difference shows."""


@dataclass(frozen=True)
class Difference:
    """Where a record and a run of it part.

    Attributes:
        what: What differs.
        turn: The `Turn.index` in the record; None if it is no turn.
        token: Position in the turn's sequence from which tokens differ; None if it is not tokens that differ.
        recorded: What the record has; None for nothing.
        now: What the run has; None for nothing.
        stage: Where in the way from the record to the loss it is.
    """

    what: str
    turn: int | None = None
    token: int | None = None
    recorded: Any = None
    now: Any = None
    stage: str = "agent"


class ReplayDifferenceError(Exception):
    """The run of a recorded episode differs from its record, and ends here."""


class Recording:
    """Answers the calls of a new trajectory with what another one has recorded. Thread-safe.

    Attributes:
        recorded: The recorded trajectory.
        trajectory: The new one.
        difference: Where they part; None as long as they do not.
        is_cut_off: Whether a clock or a machine ended the record, so that a run may end there, too.
        has_ended: Whether the run has come to such an end.
    """

    def __init__(self, recorded: Trajectory, *, is_cut_off: bool = False) -> None:
        """Begin at the first turn.

        Args:
            recorded: The recorded trajectory. It is not changed.
            is_cut_off: Whether a clock or a machine ended the record.
        """
        self.recorded = recorded
        self.is_cut_off = is_cut_off
        self.difference: Difference | None = None
        self.has_ended = False
        self.trajectory = Trajectory()
        self.trajectory.source = self
        # Calls in a tool that ran again after a kill were made again, and a replay makes them once.
        self._waiting = [turn for turn in recorded.turns if turn.fate is None or turn.fate.kind != "run_again"]
        self._main = next((turn.agent for turn in recorded.turns if not turn.is_auxiliary), None)
        self._twins: dict[int, Turn] = {}  # the recorded turns, by the index of the new ones
        self._agents: dict[str | None, str | None] = {}  # the recorded ones, by the new ones
        self._lock = threading.Lock()

    def note(self, difference: Difference) -> None:
        """Note a difference, unless there is an earlier one; the next model call ends the run."""
        self.difference = self.difference or difference

    def differ(self, difference: Difference) -> NoReturn:
        """Note a difference and end the run.

        Raises:
            ReplayDifferenceError: Always.
        """
        self.note(difference)
        raise ReplayDifferenceError(difference.what)

    def turn_of(self, turn: Turn) -> Turn:
        """Return the recorded turn that asked what a new one asks.

        Raises:
            ReplayDifferenceError: None did.
        """
        with self._lock:
            if self.difference is not None or self.has_ended:
                raise ReplayDifferenceError("the run has ended")
            found = next((candidate for candidate in self._waiting if self._asks_the_same(turn, candidate)), None)
            if found is not None:
                self._waiting.remove(found)
                self._twins[turn.index] = found
                self._agents.setdefault(turn.agent, found.agent)
                return found
            waiting = self._next_of(turn.agent)
            if not waiting and self.is_cut_off:
                self.has_ended = True
                raise ReplayDifferenceError("the record ends here")
            if not waiting:
                last = max((twin.index for twin in self._twins.values()), default=None)
                self.differ(Difference("a model call that is not recorded follows", last, now=turn.reason))
            ids = turn.token_ids()
            starts = [
                (first_difference(ids, candidate.token_ids()[: candidate.prompt_tokens]), candidate)
                for candidate in waiting
            ]
            token, nearest = max(starts, key=lambda start: (start[0], -start[1].index))
            if ids == nearest.token_ids()[: nearest.prompt_tokens]:
                what = Difference("where the call attaches", nearest.index, None, nearest.reason, turn.reason)
            else:
                changed = [name for name in turn.parts if turn.parts[name] != nearest.parts.get(name)]
                what_differs = f"the prompt ({', '.join(changed)} changed)" if changed else "the prompt"
                then, now = (
                    self._text(prompt_ids, token) for prompt_ids in (nearest.token_ids()[: nearest.prompt_tokens], ids)
                )
                what = Difference(what_differs, nearest.index, token, then, now)
            self.differ(what)

    def _next_of(self, agent: str | None) -> list[Turn]:
        """Return the recorded turns that an agent may ask next.

        A known agent asks its own next turn; a new one may ask the first turn of any recorded agent that has not asked.
        """
        known = self._agents
        may_be = {known[agent]} if agent in known else {waiting.agent for waiting in self._waiting} - {*known.values()}
        candidates = [turn for turn in self._waiting if turn.agent in may_be]
        first = {turn.agent: turn for turn in reversed(candidates)}
        # Calls from outside run at once.
        found = [turn for turn in candidates if turn.agent is None or turn is first[turn.agent]]
        return found if self._twins else found[:1]

    def answers(self) -> list[Turn]:
        """Return the recorded turns whose answers the main agent's messages hold."""
        return [turn for turn in self.recorded.turns if turn.was_added and turn.agent == self._main]

    def is_over(self, agent: str | None = None) -> bool:
        """Whether all recorded turns of an agent were asked; by default, of the main agent."""
        agent = self._main if agent is None else agent
        return all(turn.agent != agent for turn in self._waiting)

    def _asks_the_same(self, turn: Turn, recorded: Turn) -> bool:
        parent = None if turn.parent is None else self._twins.get(turn.parent.index)
        return (
            parent is recorded.parent
            and turn.prompt_ids == recorded.prompt_ids
            and turn.parent_kept == recorded.parent_kept
            and turn.is_auxiliary == recorded.is_auxiliary
            and _pictures(turn) == _pictures(recorded)
        )

    def _text(self, ids: Sequence[int], token: int) -> str:
        encoder = self.trajectory.encoder
        return "" if encoder is None else encoder.decode(ids[token : token + _SHOWN])

    def check_request(self, turn: Turn, recorded: Turn, *, random_seeds: bool) -> None:
        """Compare how two turns are sampled.

        Args:
            turn: The new turn.
            recorded: The recorded one.
            random_seeds: Whether their seeds are random, so that they are not compared.

        Raises:
            ReplayDifferenceError: They differ.
        """
        left_out = {"sampling_seed"} if random_seeds else set()
        if recorded.clamped and self.recorded.context_length is None:
            left_out.add("max_new_tokens")
        then, now = ({**sent.sampling_params, **sent.request_fields} for sent in (recorded, turn))
        for name in {**then, **now}:
            if name not in left_out and then.get(name) != now.get(name):
                self.differ(Difference(f"the request's {name}", recorded.index, None, then.get(name), now.get(name)))
        if turn.constrained != recorded.constrained:
            self.differ(Difference("grammar", recorded.index, None, recorded.constrained, turn.constrained))

    def check_answer(self, turn: Turn, recorded: Turn) -> None:
        """Compare what the parser found in the same tokens.

        Raises:
            ReplayDifferenceError: They differ.
        """
        for name in ("answered", "tool_calls", "has_reasoning", "ends_in_reasoning"):
            then, now = getattr(recorded, name), getattr(turn, name)
            if then != now and recorded.answer_key is not None:
                self.differ(Difference("the parsed answer", recorded.index, recorded.prompt_tokens, then, now))
        if recorded.answer_key is None:
            then = recorded.failure
            self.differ(Difference("the parsed answer", recorded.index, recorded.prompt_tokens, then, "it is parsed"))

    def failure_of(self, recorded: Turn) -> BaseException:
        """Return an error that ends a call as the recorded one ended."""
        if recorded.failure_outcome is TerminationReason.CONTEXT_WINDOW_OVERFLOW:
            return ContextWindowOverflowException(recorded.failure)
        return RecordedError(recorded.failure or "the call did not end", recorded.failure_outcome)

    def check_end(self, *, of_all: bool = False) -> None:
        """Note a difference in what became of the answers, or a turn that was not asked.

        Args:
            of_all: Whether all agents ask again, and not only the main one.
        """
        twins = ((turn, self._twins[turn.index]) for turn in self.trajectory.turns if turn.index in self._twins)
        changed = [(turn, recorded) for turn, recorded in twins if turn.status is not recorded.status]
        # No call follows an answer that is lost; one that no call follows is kept, but not built on.
        lost = [change for change in changed if change[0].status not in (TurnStatus.COMMITTED, TurnStatus.FINAL)]
        missing = next((turn for turn in self._waiting if of_all or turn.agent == self._main), None)
        if missing is not None and not lost:
            self.note(Difference("a model call that is not made any more", missing.index, None, missing.reason))
        for turn, recorded in lost or changed:
            then, now = (f"{side.status.value} {side.failure or side.note}".strip() for side in (recorded, turn))
            self.note(Difference("what became of the answer", recorded.index, None, then, now))


def _pictures(turn: Turn) -> Any:
    return None if turn.images is None else [picture.data for picture in turn.images.pictures]
