"""The model calls of an episode as a forest of turns: recorded as they are asked and answered, then read and saved.

A *turn* is one model call: the prompt tokens that it added, and the tokens that it sampled. A call extends the recorded
turn whose conversation (what it was asked, plus its own answer) is an exact prefix of what arrived; anything else opens
a new sequence, with the reason why. The key is the conversation itself, never a cursor, so rewritten histories,
retries, several agents and several threads on one model object cannot corrupt what is recorded.

Invariants:
- A turn's token ids are fixed once it is answered; failed turns hold no sampled token.
- The ids sent for a turn are `parent.token_ids() + prompt_ids`.
- In `sequences()` every sampled token has loss mask 1 in exactly one sequence, the first that contains it, unless its
  turn was sampled under a grammar (off-policy), which has mask 0 everywhere.
"""

from __future__ import annotations

import logging
import threading
import uuid
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strands.types.content import Message, Messages

from ..drift import Drift, measure_drift
from ..messages import Conversation, block_digests, chain_of, message_digest, next_link
from ..protocol.generation import Generation
from ..templates.image_tokens import ImageInputs
from .discards import After, judge, judge_end, note_if_gone, settle
from .explain import explain, why_here, why_new
from .export import export_sequences, sequence_of
from .storage import decode_turns, encode_turns, write_file
from .tokens import TokenManager
from .turn import Turn, TurnStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a call belongs.

    Attributes:
        turn: The turn that it extends; None if it opens a sequence.
        new_messages: The messages that came since.
        reason: Why, for people.
        kept: How many of that turn's sampled ids stay before the call's prompt; None for all of them.
    """

    turn: Turn | None
    new_messages: Messages
    reason: str
    kept: int | None = None


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        agent: The agent; None for a call from outside an agent's loop. Of two turns that said the same after the same,
            its own one is extended.
        cycle: The turn of the agent's loop that it asks in.
        auxiliary: Whether the call is none of a rollout's own (a summary, a judge). Left out, one from outside an
            agent's loop is, if an agent has asked before.
    """

    agent: str | None = None
    cycle: str | None = None
    auxiliary: bool | None = None


NOBODY = Caller()
"""Who asks from outside of any agent's loop."""


@dataclass(frozen=True)
class ParsedAnswer:
    """What was read in an answer.

    Attributes:
        tool_calls: Its tool uses, `{"toolUseId", "name", "id"}` in order.
        result_notices: By toolUseId, the text that replaces the result of a call that did not parse.
        parse_errors: The names that the calls which did not parse seemed to mean.
        ends_in_reasoning: Whether the answer ends inside reasoning that nothing closed.
        has_reasoning: Whether it holds reasoning.
    """

    tool_calls: Sequence[Mapping[str, Any]] = ()
    result_notices: Mapping[str, str] = field(default_factory=dict)
    parse_errors: Sequence[str] = ()
    ends_in_reasoning: bool = False
    has_reasoning: bool = False


NOTHING_PARSED = ParsedAnswer()
"""What was read in an answer that is text alone."""


class Trajectory:
    """The recorded turns of an episode. Safe to use from several threads.

    Attributes:
        tool_calls: The recorded tool calls by toolUseId: under `id` and `name`, as the model knows them and wrote them.
        result_notices: By toolUseId, what the model is told instead of the result of a call that did not parse.
        tool_parse_errors: How many tool calls did not parse, by the name that they seemed to mean.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._id = uuid.uuid4().hex
        self._turns: list[Turn] = []
        self._calls = 0
        self._by_answer: dict[bytes, list[Turn]] = {}  # by the conversation that ends with their answer
        self._by_question: dict[tuple[str, bytes], list[Turn]] = {}  # answered ones, by who asked what
        self._latest: dict[str, Turn] = {}  # answered ones, by agent
        self._unanswered: dict[bytes, list[Turn]] = {}  # by what they asked: what a retry takes the place of
        self.tool_calls: dict[str, Mapping[str, Any]] = {}
        self.result_notices: dict[str, str] = {}
        self.tool_parse_errors: dict[str, int] = {}
        self._has_agents = False  # one has asked, or is about to
        self._lock = threading.RLock()
        self._warned_of_several = False
        self._warned_of_rewriting = False

    def attach(self, conversation: Conversation, messages: Messages, caller: Caller = NOBODY) -> Place:
        """Find the deepest recorded turn whose conversation and answer are an exact prefix of what arrived.

        Args:
            conversation: What arrived, as fingerprints.
            messages: The same as messages.
            caller: Who asks.
        """
        with self._lock:
            retried = self._retried(conversation.key, caller.agent)
            if retried is not None and retried.waits_to_go_on:
                known = len(messages) - len(retried.digests)
                return Place(retried.parent, messages[known:], retried.reason)
            found = self.recorded(conversation, agent=caller.agent)
            if found is not None:
                turn, known = found
                return Place(turn, messages[known:], why_here(self._turns, turn, known, conversation, messages))
            return Place(None, messages, why_new(self._turns, conversation, messages))

    def ask(
        self,
        place: Place,
        conversation: Conversation,
        prompt_ids: Iterable[int],
        caller: Caller = NOBODY,
        *,
        reasoning_open: bool = False,
        constrained: bool = False,
        images: ImageInputs | None = None,
    ) -> Turn:
        """Record that a call is about to be made: its prompt is known from here on.

        What the same agent asked in vain is replaced, so that retrying never duplicates anything; a cut turn only by a
        call that goes on from its tokens.

        Args:
            place: Where the call belongs.
            conversation: What it asks.
            prompt_ids: The prompt tokens that it adds, shape (P,).
            caller: Who asks.
            reasoning_open: Whether the prompt ends inside reasoning.
            constrained: Whether a grammar constrains the sampling.
            images: The images of the prompt.
        """
        known = len(conversation.digests) - len(place.new_messages)
        agent = caller.agent
        with self._lock:
            if agent is not None:
                self._judge_by_call(place, conversation, agent, caller.cycle)
            ids = array("i", prompt_ids)
            retried = self._retried(conversation.key, agent, caller.cycle)
            resumed = None
            if retried is not None and retried.parent is place.turn:
                # What was sampled goes on behind exactly the tokens that it was sampled behind.
                if retried.waits_to_go_on and not constrained and retried.prompt_ids == ids:
                    resumed = retried
                if resumed is not None or not retried.waits_to_go_on:
                    self._turns.remove(retried)
                    self._unanswered[conversation.key].remove(retried)
            outside = agent is None and self._has_agents
            turn = Turn(
                index=self._calls,
                parent=place.turn,
                reason=place.reason,
                key=conversation.key,
                parts=conversation.parts,
                digests=conversation.digests[known:],
                roles=conversation.roles[known:],
                prompt_ids=ids,
                prompt_logprobs=None if resumed is None else resumed.prompt_logprobs,
                reasoning_open=reasoning_open,
                constrained=constrained,
                agent=agent,
                cycle=caller.cycle,
                is_auxiliary=outside if caller.auxiliary is None else caller.auxiliary,
                parent_kept=place.kept,
                images=images,
                resumes=None if resumed is None else resumed.resumes,
                trajectory=self,
            )
            if agent is not None and not caller.auxiliary:
                self.expect_agent()
            self._calls += 1
            self._turns.append(turn)
            return turn

    def expect_agent(self) -> None:
        """Note that an agent asks, or is about to: a call from outside its loop is auxiliary from here on."""
        with self._lock:
            if self._has_agents:
                return
            self._has_agents = True
            own = [turn for turn in self._turns if turn.agent is None and not turn.is_auxiliary]
            if own:  # what is recorded stays what it is
                logger.warning(
                    "call=<%d>, calls=<%d> | what was asked from outside an agent's loop before the first agent asked "
                    "is trained, and later calls of that kind are auxiliary; stream(auxiliary=...) and model.auxiliary "
                    "say which they are",
                    own[0].index,
                    len(own),
                )

    def answer(
        self, turn: Turn, generation: Generation, message: Message, parsed: ParsedAnswer = NOTHING_PARSED
    ) -> None:
        """Record a turn's answer.

        Args:
            turn: The turn that was asked.
            generation: What the server returned.
            message: The answer as the agent will hand it back.
            parsed: What was read in it.
        """
        with self._lock:
            turn.tool_calls = tuple(parsed.tool_calls)
            turn.ends_in_reasoning = parsed.ends_in_reasoning
            turn.has_reasoning = parsed.has_reasoning
            self.result_notices.update(parsed.result_notices)
            for name in parsed.parse_errors:
                self.tool_parse_errors[name] = self.tool_parse_errors.get(name, 0) + 1
            turn.answer_digest = message_digest(message)
            turn.answer_blocks = block_digests(message)
            turn.answer_key = next_link(turn.key, turn.answer_digest)
            self._record(turn, generation, TurnStatus.ANSWERED)

    def cut(self, turn: Turn, generation: Generation, cause: BaseException) -> None:
        """Record what a turn had sampled when it was aborted or found unreadable. Nothing extends a cut turn."""
        with self._lock:
            turn.cause = cause
            if generation.output_ids:
                self._record(turn, generation, TurnStatus.CUT)
            else:
                self.fail(turn, cause)

    def resume(self, turn: Turn) -> None:
        """Let the call that asks the same as a cut turn go on from its tokens, in place of asking anew.

        That is what a partial rollout does, perhaps after `save` and `load`. The call that goes on replaces the turn,
        so its tokens are recorded once; until then, and if none comes, they stay those of a cut turn. Of several agents
        that were cut at the same question, each goes on from its own turn, and one that had no answer before (its first
        call was cut, or it was made anew) from the earliest that is left.

        Args:
            turn: A cut turn of this trajectory. One that waits to go on already does so still.

        Raises:
            ValueError: It is no cut turn, or a grammar constrained it: a grammar begins at the first token.
        """
        with self._lock:
            if turn.status is not TurnStatus.CUT or turn.constrained:
                raise ValueError(f"only a cut turn without a grammar can be resumed, not {turn!r}")
            if not turn.waits_to_go_on:
                turn.resumes = turn.generation
                self._index(turn)

    def fail(self, turn: Turn, cause: BaseException) -> None:
        """Record that a turn got no answer. What an earlier attempt had sampled stays, and waits to go on."""
        with self._lock:
            turn.cause = cause
            turn.generation = turn.resumes
            turn.status = TurnStatus.FAILED if turn.resumes is None else TurnStatus.CUT
            self._index(turn)

    def _index(self, turn: Turn) -> None:
        """Make a turn that has ended findable by what it was asked and what it answered."""
        if turn.status is TurnStatus.FAILED or turn.waits_to_go_on:
            self._unanswered.setdefault(turn.key, []).append(turn)
        if turn.answer_key is None:
            return
        self._by_answer.setdefault(turn.answer_key, []).append(turn)
        self.tool_calls.update((call["toolUseId"], call) for call in turn.tool_calls)
        if turn.agent is not None:
            self._by_question.setdefault((turn.agent, turn.key), []).append(turn)
            self._latest[turn.agent] = turn

    def _retried(self, key: bytes, agent: str | None, cycle: str | None = None) -> Turn | None:
        """What a call with this conversation takes the place of: what the same agent asked in vain, if anything.

        Strands forgets the id of an agent whose first call fails, and a restarted rollout has new agents. So an agent
        that never had an answer here may be any of those that wait for one.

        Args:
            key: Identifies the conversation.
            agent: Who asks.
            cycle: The turn of its loop that it asks in.
        """
        turns = self._unanswered.get(key, ())
        own = [turn for turn in turns if turn.agent == agent or (cycle is not None and turn.cycle == cycle)]
        if own or agent in self._latest:
            return min(own, key=lambda turn: (not turn.waits_to_go_on, turn.index), default=None)
        waiting = [turn for turn in turns if turn.waits_to_go_on]
        # Those whose agents may still come for them are last.
        return min(waiting, key=lambda turn: (turn.agent in self._latest, turn.index), default=None)

    def _record(self, turn: Turn, generation: Generation, status: TurnStatus) -> None:
        turn.generation = generation
        turn.status = status
        logprobs = generation.prompt_logprobs[-len(turn.prompt_ids) :]
        if len(logprobs) == len(turn.prompt_ids):
            turn.prompt_logprobs = logprobs
        parent = turn.parent
        if parent is not None and (parent.is_auxiliary or not turn.is_auxiliary):
            settle(parent, TurnStatus.COMMITTED)
        self._index(turn)

    # --- what became of the answers ---

    def _judge_by_call(self, place: Place, conversation: Conversation, agent: str, cycle: str | None) -> None:
        """Settle which answers an agent threw away, from a call that it makes now."""
        for known, link in enumerate(conversation.chain):
            attempts = self._by_question.get((agent, link), ())
            undecided = [
                turn
                for turn in attempts
                # Of an answer that hooks tell of, they tell once its call is over.
                if turn.status is TurnStatus.ANSWERED and turn is not place.turn and turn.was_added is not False
            ]
            if undecided:
                after = After(conversation.digests[known:], place.new_messages, known, TurnStatus.COMMITTED, cycle)
                self._warn_of_rewriting(judge(attempts, undecided, after))
        latest = self._latest.get(agent)
        if latest is not None and latest is not place.turn and latest.key not in conversation.chain:
            note_if_gone(latest, conversation.digests)

    def _warn_of_rewriting(self, replaced: Iterable[Turn]) -> None:
        """Warn once that sampled answers were replaced, which costs training data and may well be an oversight."""
        for turn in replaced:
            if not self._warned_of_rewriting:
                self._warned_of_rewriting = True
                logger.warning(
                    "call=<%d>, note=<%s> | a sampled answer was replaced in the agent's history, by a hook, a cancel "
                    "or a guardrail: it is discarded and not trained, as are others like it; see trajectory.explain()",
                    turn.index,
                    turn.note,
                )

    def put_in_history(self, turns: Sequence[Turn], message: Message, *, position: int) -> None:
        """Settle which of the answers to one model call an agent took, from the message that came into its history.

        Args:
            turns: The turns with these answers.
            message: The message.
            position: Of the message in the agent's history.
        """
        with self._lock:
            undecided = [turn for turn in turns if turn.status is TurnStatus.ANSWERED]
            after = After((message_digest(message),), [message], position, TurnStatus.ANSWERED)
            self._warn_of_rewriting(judge(undecided, undecided, after))

    def throw_away(self, turns: Iterable[Turn], why: str) -> None:
        """Record that no answer to a model call came into the agent's history.

        Args:
            turns: The turns with these answers.
            why: For people.
        """
        with self._lock:
            for turn in turns:
                if turn.status is TurnStatus.ANSWERED:
                    turn.status, turn.note = TurnStatus.DISCARDED, why

    def settle(self, messages: Messages) -> None:
        """Fix the status of what no later call can tell, from the messages that an agent ended with.

        The latest answer in them is final. Answers of the same agent to a question that stands in them, which are not
        the answer that stands there, were thrown away. Call it once per agent, when its episode is over; what the
        messages do not tell (they were shortened, or are another agent's) stays as it is.

        Args:
            messages: The agent's messages.
        """
        with self._lock:
            self._warn_of_rewriting(judge_end(self._turns, messages))

    # --- what calls ask of it ---

    def recorded(
        self, conversation: Conversation, *, agent: str | None = None, whatever_before: bool = False
    ) -> tuple[Turn, int] | None:
        """The deepest turn whose conversation and answer are an exact prefix of some messages, and how many that are.

        Args:
            conversation: The messages, and what stands before them.
            agent: Whose turn is preferred.
            whatever_before: Whether what stands before them (system prompt, tools) is not known, and may be any.
        """
        with self._lock:
            chains = [conversation.chain]
            if whatever_before:
                before = {tuple(turn.parts.values()): turn.parts for turn in self._turns}
                chains += [chain_of(parts, conversation.digests) for parts in before.values()]
            for known in range(len(conversation.digests), 0, -1):
                for chain in chains:
                    same = self._by_answer.get(chain[known])
                    if same:
                        own = (turn for turn in reversed(same) if turn.agent == agent)
                        return next(own, same[-1]), known
            return None

    def latest_answered(self, tool_use_ids: Collection[str] = ()) -> Turn | None:
        """The latest turn with an answer, one that made some tool calls if ids of such are given."""
        with self._lock:
            ids = set(tool_use_ids)
            answered = (turn for turn in reversed(self._turns) if turn.answer_key is not None)
            return next((turn for turn in answered if ids <= {call["toolUseId"] for call in turn.tool_calls}), None)

    def routing_key(self, turn: Turn) -> str:
        """What keeps the calls of one root conversation, its forks and retries included, on one server.

        Other episodes have other keys, also for the same conversation: samples of one prompt are spread.

        Args:
            turn: A turn of that conversation.
        """
        return f"{self._id}-{turn.root.key.hex()[:16]}"

    # --- reading ---

    @property
    def turns(self) -> list[Turn]:
        """All turns in the order of their calls."""
        with self._lock:
            return list(self._turns)

    def __len__(self) -> int:
        """Number of turns."""
        return len(self._turns)

    def sequences(self, *, discarded: bool = False, auxiliary: bool = False) -> list[TokenManager]:
        """The sequences from each root to each leaf, in the order of their last call, cut ones last.

        Turns without an answer are left out. Every sampled token has loss mask 1 in exactly one of the sequences, the
        first that contains it, unless a grammar constrained it.

        Args:
            discarded: Whether answers that the agent threw away are given out, too.
            auxiliary: Whether calls from outside the agents' loops are given out, too.
        """
        return [sequence for _, sequence in self.branches(discarded=discarded, auxiliary=auxiliary)]

    def branches(self, *, discarded: bool = False, auxiliary: bool = False) -> list[tuple[Turn, TokenManager]]:
        """The same as `sequences`, each behind the turn that it ends with, whose `path()` has all its turns."""
        with self._lock:
            return export_sequences(self._turns, discarded=discarded, auxiliary=auxiliary)

    def latest_main_sequence(self, *, warn: bool = False) -> TokenManager:
        """The latest sequence of the main conversation, with its own full mask.

        The main conversation is the first one since the start that was answered, every attempt at its first call
        included, calls from outside the agents' loops left aside; before any answer it is the latest one that was
        asked, so that its opening prompt can be seen. It ends with the latest answer that was not thrown away; where
        all were, with the latest one, whose tokens are not trained then.

        Args:
            warn: Whether to log, once, that other sequences hold tokens to train, too.
        """
        with self._lock:
            if (
                warn
                and not self._warned_of_several
                and sum(any(sequence.loss_mask) for sequence in self.sequences()) > 1
            ):
                self._warned_of_several = True
                logger.warning(
                    "turns=<%d> | token_manager is one of several sequences of this episode: train on "
                    "trajectory.sequences(), or see trajectory.explain()",
                    len(self._turns),
                )
            leaf = self.main_leaf()
            if leaf is None:
                return TokenManager()
            return sequence_of(leaf, {id(leaf): len(leaf.output_ids)} if leaf.status is TurnStatus.DISCARDED else {})

    def main_leaf(self) -> Turn | None:
        """The turn that `latest_main_sequence` ends with; None before any call."""
        with self._lock:
            roots = [turn for turn in self._turns if turn.parent is None and not turn.is_auxiliary]
            first = next((turn for turn in roots if turn.is_answered), None)
            if first is None:
                return roots[-1] if roots else None
            ends = [
                turn
                for turn in self._turns
                if turn.is_answered and not turn.is_auxiliary and turn.root.key == first.key
            ]
            kept = [turn for turn in ends if turn.status is not TurnStatus.DISCARDED]
            return kept[-1] if kept else ends[-1]

    def drift(self, tokenizer: PreTrainedTokenizerBase) -> Drift:
        """How far the sequences are from what decoding and encoding them again would give.

        Args:
            tokenizer: The tokenizer of the served model.
        """
        return measure_drift(self.sequences(), tokenizer)

    def explain(self) -> str:
        """What became of every call, for people: what it extends, where it forked and why, how it ended."""
        with self._lock:
            return explain(self._turns)

    # --- files ---

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to one safetensors file; see `storage` for its layout. `load` gives it back bit by bit.

        Raises:
            OSError: The file cannot be written; what was there stays as it was.
        """
        write_file(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        with self._lock:
            asked = [(turn.agent, turn.is_auxiliary) for turn in self._turns if turn.agent is not None]
            facts = {
                "result_notices": self.result_notices,
                "call_ids": {use_id: call["id"] for use_id, call in self.tool_calls.items()},
                "tool_parse_errors": self.tool_parse_errors,
                "agents": sorted({agent for agent, is_auxiliary in asked if not is_auxiliary}),
                "helpers": sorted({agent for agent, is_auxiliary in asked if is_auxiliary}),
            }
            return encode_turns(self._turns, facts)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trajectory:
        """Read a trajectory that was saved. It can be extended like any other.

        Raises:
            OSError: The file cannot be read.
            TrajectoryFileError: It is no trajectory, or one of another version.
        """
        return cls.from_bytes(Path(path).read_bytes(), name=str(path))

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str = "the bytes") -> Trajectory:
        """Read what `to_bytes` returned.

        Args:
            content: It.
            name: What an error calls it.

        Raises:
            TrajectoryFileError: It is no trajectory, or one of another version.
        """
        trajectory = cls()
        trajectory._turns, facts = decode_turns(content, name)
        trajectory.result_notices, trajectory.tool_parse_errors = facts["result_notices"], facts["tool_parse_errors"]
        trajectory._has_agents = bool(facts["agents"])
        for turn in trajectory._turns:
            trajectory._calls = turn.index + 1
            turn.trajectory = trajectory
            trajectory._index(turn)
        return trajectory

    def __reduce__(self) -> Any:
        """Pickle and copy it as `save` writes it: flat, in size linear in the tokens, without its lock.

        Errors of failed turns become `RecordedError`s, as in a file.
        """
        return type(self).from_bytes, (self.to_bytes(),)
