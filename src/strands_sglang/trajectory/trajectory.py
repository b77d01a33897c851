"""The model calls of an episode as a forest of turns: recorded as they are asked and answered, then read and saved.

A *turn* is one model call: the prompt tokens that it added, and the tokens that it sampled. A call extends the recorded
turn whose conversation (what was asked, plus the answer) is an exact prefix of the new messages. Any other call opens a
new sequence, and its reason says why. Turns are found by the conversation itself, never by a cursor. So rewritten
histories, retries, several agents and several threads on one model cannot corrupt the record.

Invariants:

- A turn's token ids are fixed once it is answered; failed turns hold no sampled token.
- The ids sent for a turn are `parent.token_ids() + prompt_ids`.
- In `sequences()` every sampled token has loss mask 1 in exactly one sequence, the first that contains it. Turns
  sampled under a grammar are off-policy and have mask 0 everywhere.
"""

from __future__ import annotations

import logging
import threading
import uuid
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strands.types.content import Message, Messages

from ..drift import Drift, measure_drift
from ..exceptions import TokenizerMismatchError
from ..messages import Conversation, block_digests, chain_of, fingerprint, message_digest, next_link
from ..messages.said import said_in
from ..outcomes import TerminationReason
from ..protocol.generation import Generation
from ..reasons import Reason
from ..templates.encoder import Encoder
from ..templates.image_tokens import ImageInputs
from .discards import After, judge, judge_end, note_if_gone, settle
from .explain import explain, reason_to_extend, reason_to_open
from .export import export_sequences, helpers_tokens, sequence_of
from .journal import Entry, is_journal, read_entries, turns_of, versions
from .storage import TrajectoryFileError, decode_turns, encode_turns, read_fields, reading, write_file
from .tokens import TokenManager
from .turn import Turn, TurnStatus, ids_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .recording import Recording

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a call belongs in the forest.

    Attributes:
        turn: The turn that the call extends; None if it opens a sequence.
        new_messages: The messages since that turn's answer.
        why: Why it belongs there.
        kept: Number of that turn's sampled ids that precede the call's prompt; None for all.
    """

    turn: Turn | None
    new_messages: Messages
    why: Reason
    kept: int | None = None


@dataclass(frozen=True)
class Caller:
    """Who makes a call.

    Attributes:
        agent: Id of the agent; None for a call from outside an agent's loop. If two turns match equally, the agent's
            own turn is extended.
        cycle: Strands' id of the event-loop cycle that asks.
        auxiliary: Whether the call is not part of the rollout itself (a summary, a judge). None decides: a call from
            outside an agent's loop is auxiliary if an agent has asked before.
    """

    agent: str | None = None
    cycle: str | None = None
    auxiliary: bool | None = None


OUTSIDE = Caller()
"""The caller outside of any agent's loop."""


@dataclass(frozen=True)
class ParsedAnswer:
    """What the parser found in an answer.

    Attributes:
        tool_calls: Its tool calls in order, each as `{"toolUseId", "name", "id"}`.
        result_notices: Text that replaces the result of a call that did not parse, by toolUseId.
        parse_errors: The tool names that the calls that did not parse seemed to mean.
        ends_in_reasoning: Whether the answer ends inside unclosed reasoning.
        has_reasoning: Whether the answer holds reasoning, even if that is empty.
    """

    tool_calls: Sequence[Mapping[str, Any]] = ()
    result_notices: Mapping[str, str] = field(default_factory=dict)
    parse_errors: Sequence[str] = ()
    ends_in_reasoning: bool = False
    has_reasoning: bool = False


NOTHING_PARSED = ParsedAnswer()
"""The parsed form of an answer that is only text."""


@dataclass(frozen=True)
class EpisodeEnd:
    """How an episode ended.

    Attributes:
        outcome: A value of [`TerminationReason`][strands_sglang.TerminationReason]; None if unknown.
        reward: Reward of the whole episode; None if it has none.
        turn_rewards: Rewards of single turns by `Turn.index`, in addition.
        error: The error that ended it; None without one.
        reward_error: Why it has no reward although its outcome allows one; None otherwise.
    """

    outcome: str | None = None
    reward: float | None = None
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    error: str | None = None
    reward_error: str | None = None


_UNREAD_END = ("seal", "turns")
"""Entries of an end that earlier releases wrote."""


class Trajectory:
    """The record of an episode: all its model calls, as a forest of turns. Thread-safe.

    [`SGLangModel`][strands_sglang.SGLangModel] fills it. Read it with `turns`, `sequences()` and `explain()`, and keep
    it with `save()` and `load()`.

    Attributes:
        tool_calls: The recorded tool calls by toolUseId. Their `id` and `name` are those that the model saw and wrote.
        result_notices: What the model reads as the result of a call that did not parse, by toolUseId.
        tool_parse_errors: Number of tool calls that did not parse, by the tool name that they seemed to mean.
        counted: The prompt that was counted last, with what it depends on, for the call that sends it.
        encoder: Encodes and decodes what is recorded; None before the first call, and once read from a file.
        end: How the episode ended, if that was noted.
        pieces: The bytes of ids inside a text, as read from a file; empty before.
        on_record: Called with each turn as soon as its answer, a part of one or its failure is recorded; may be None.
        is_changed: Whether it was read from a file that was changed since; see `from_bytes`.
        packages: Versions of the packages that recorded it, by name; empty in files of earlier releases.
        context_length: Maximum length of prompt and answer that its server reported last; None if unknown.
        tool_results: What tool calls returned, by toolUseId, where the messages do not hold it: a hook has changed or
            removed it.
        source: Answers its calls in place of a server; None for the server.
        id: What servers know the episode by. Copies for other continuations of the same prefix share it.
        lock: Held while a turn is recorded, `on_record` included; may be taken again by its holder.
    """

    def __init__(self) -> None:
        """Create an empty trajectory."""
        self.id = uuid.uuid4().hex
        self._turns: list[Turn] = []
        self._calls = 0
        self._by_answer: dict[bytes, Turn] = {}  # the latest one by the conversation that ends with its answer
        self._latest: dict[str, Turn] = {}  # answered ones, by agent
        self._unsettled: dict[str, list[Turn]] = {}  # those that no later call is known to have built on, by agent
        self._unanswered: dict[bytes, list[Turn]] = {}  # by what they asked: a retry replaces them
        self.tool_calls: dict[str, Mapping[str, Any]] = {}
        self.result_notices: dict[str, str] = {}
        self.tool_parse_errors: dict[str, int] = {}
        self.counted: tuple[Any, Any] | None = None
        self.encoder: Encoder | None = None
        self.end: EpisodeEnd | None = None
        self.is_changed = False
        self.pieces: dict[int, bytes] = {}
        self.on_record: Callable[[Turn], None] | None = None
        self.packages: Mapping[str, str] = {}
        self.context_length: int | None = None
        self.tool_results: dict[str, Any] = {}
        self.source: Recording | None = None
        self._asked: dict[str | None, Conversation] = {}  # the latest one of each agent
        self._has_agents = False  # whether an agent has asked, or is about to
        self.lock = threading.RLock()
        self._warned_of_several = False
        self._warned_of_rewriting = False

    def _encode_with(self, encoder: Encoder, prompt_ids: Iterable[int]) -> None:
        """Use an encoder from now on, unless a recorded id or one of the prompt is other text in its vocabulary."""
        if encoder is self.encoder:
            return
        earlier = dict(self.pieces)
        if self.encoder is not None:
            earlier.update(self.encoder.pieces(sorted(ids_in(self._turns).union(prompt_ids))))
        there = encoder.pieces(earlier)
        for token_id, piece in earlier.items():
            if piece and piece.strip() != there[token_id].strip():  # tokenizers may differ in the first space
                raise TokenizerMismatchError(
                    f"the trajectory was recorded with another vocabulary: its id {token_id} is {piece!r}, and "
                    f"{there[token_id]!r} in the model's; use the tokenizer it was recorded with"
                )
        self.encoder = encoder

    def fingerprint(self, parts: Mapping[str, Any], messages: Messages, agent: str | None = None) -> Conversation:
        """Fingerprint a conversation; what the agent asked before is not digested again.

        Args:
            parts: What precedes the messages, by name.
            messages: Strands messages.
            agent: Id of the agent that asks.
        """
        conversation = fingerprint(parts, messages, self._asked.get(agent) or self._asked.get(None))
        self._asked[agent] = conversation
        return conversation

    def attach(self, conversation: Conversation, messages: Messages, caller: Caller = OUTSIDE) -> Place:
        """Find the deepest recorded turn whose conversation and answer are an exact prefix of the messages.

        Args:
            conversation: Fingerprint of the messages and of what precedes them.
            messages: The messages.
            caller: Who asks.

        Returns:
            Where the call belongs.
        """
        with self.lock:
            retried = self._retried(conversation.key, caller.agent)
            if retried is not None and retried.waits_to_go_on:
                known = len(messages) - len(retried.digests)
                return Place(retried.parent, messages[known:], retried.why)
            found = self.recorded(conversation, agent=caller.agent)
            if found is not None:
                turn, known = found
                return Place(turn, messages[known:], reason_to_extend(self._turns, turn, known, conversation, messages))
            return Place(None, messages, reason_to_open(self._turns, conversation, messages))

    def ask(
        self,
        place: Place,
        conversation: Conversation,
        prompt_ids: Iterable[int],
        caller: Caller = OUTSIDE,
        *,
        reasoning_open: bool = False,
        constrained: bool = False,
        images: ImageInputs | None = None,
        encoder: Encoder | None = None,
    ) -> Turn:
        """Record a call that is about to be made, with its prompt.

        The call replaces an unanswered call of the same agent with the same conversation, so retries never duplicate
        anything. It replaces a cut turn only if it continues from its tokens.

        Args:
            place: Where the call belongs.
            conversation: What it asks.
            prompt_ids: Ids of the prompt tokens that it adds, shape `(P,)`.
            caller: Who asks.
            reasoning_open: Whether the prompt ends inside reasoning.
            constrained: Whether a grammar constrains the sampling.
            images: The images of the prompt.
            encoder: Encodes and decodes this call and the next ones; None if that is unknown.

        Returns:
            The new turn.

        Raises:
            TokenizerMismatchError: An id is other text in the vocabulary of the encoder than in that of earlier calls.
        """
        known = len(conversation.digests) - len(place.new_messages)
        agent = caller.agent
        ids = array("i", prompt_ids)
        with self.lock:
            if encoder is not None:
                self._encode_with(encoder, ids)
            if agent is not None:
                self._judge_by_call(place, conversation, agent, caller.cycle)
            retried = self._retried(conversation.key, agent, caller.cycle)
            resumed = None
            if retried is not None and retried.parent is place.turn:
                # Sampled tokens may only follow the exact prompt that they were sampled after.
                # A grammar begins at the first token, so it can only have sampled the whole answer.
                fits = retried.waits_to_go_on and (not constrained or retried.is_whole)
                if fits and retried.prompt_ids == ids:
                    resumed = retried
                if resumed is not None or not retried.waits_to_go_on:
                    self._turns.remove(retried)
                    self._unanswered[conversation.key].remove(retried)
            outside = agent is None and self._has_agents
            turn = Turn(
                index=self._calls,
                parent=place.turn,
                why=place.why,
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
            if resumed is not None:  # a whole answer is not asked for again
                turn.sampling_params, turn.request_fields = resumed.sampling_params, resumed.request_fields
                turn.clamped = resumed.clamped
            if agent is not None and not caller.auxiliary:
                self.expect_agent()
            self._calls += 1
            self._turns.append(turn)
            return turn

    def expect_agent(self) -> None:
        """Note that an agent asks, or is about to; later calls from outside its loop are auxiliary."""
        with self.lock:
            if self._has_agents:
                return
            self._has_agents = True
            unassigned = [turn for turn in self._turns if turn.agent is None and not turn.is_auxiliary]
            if unassigned:  # recorded turns never change their kind
                logger.warning(
                    "call=<%d>, calls=<%d> | calls from outside an agent's loop before the first agent asked are "
                    "trained, and later ones are auxiliary; decide it with stream(auxiliary=...) or model.auxiliary",
                    unassigned[0].index,
                    len(unassigned),
                )

    def answer(
        self, turn: Turn, generation: Generation, message: Message, parsed: ParsedAnswer = NOTHING_PARSED
    ) -> None:
        """Record a turn's answer.

        Args:
            turn: The turn that was asked.
            generation: The server's answer.
            message: The answer as the agent will hand it back.
            parsed: What the parser found in it.
        """
        with self.lock:
            turn.tool_calls = tuple(parsed.tool_calls)
            turn.ends_in_reasoning = parsed.ends_in_reasoning
            turn.has_reasoning = parsed.has_reasoning
            self.result_notices.update(parsed.result_notices)
            for name in parsed.parse_errors:
                self.tool_parse_errors[name] = self.tool_parse_errors.get(name, 0) + 1
            turn.answer_digest = message_digest(message)
            turn.answer_blocks = block_digests(message)
            turn.answered = said_in([message])
            turn.answer_key = next_link(turn.key, turn.answer_digest)
            self._record(turn, generation, TurnStatus.ANSWERED)

    def cut(self, turn: Turn, generation: Generation, cause: BaseException) -> None:
        """Record what a turn had sampled when it was aborted or could not be parsed. No call extends a cut turn.

        Args:
            turn: The turn that was asked.
            generation: What was sampled.
            cause: The error that ended the call.
        """
        with self.lock:
            turn.cause = cause
            if generation.output_ids:
                self._record(turn, generation, TurnStatus.CUT)
            else:
                self.fail(turn, cause)

    def keep_part(self, turn: Turn, generation: Generation) -> None:
        """Record what a turn has sampled so far, in case that its process dies before it ends.

        Args:
            turn: The turn that was asked.
            generation: What was sampled.
        """
        with self.lock:
            if self.on_record is not None and generation.output_ids:
                part = replace(turn, generation=generation, resumes=generation, status=TurnStatus.CUT)
                self.on_record(part)

    def resume(self, turn: Turn) -> None:
        """Let the next call that asks the same as a cut turn continue from its tokens instead of starting over.

        This is a partial rollout, perhaps after `save` and `load`. The call that continues replaces the turn, so its
        tokens are recorded once; until then they remain those of a cut turn. If several agents were cut at the same
        question, each continues from its own turn. An agent without an earlier answer (its first call was cut, or the
        agent was created again) continues from the earliest turn that is left.

        Args:
            turn: A cut turn of this trajectory. Resuming it twice has no further effect.

        Raises:
            ValueError: It is not a cut turn, or a grammar constrained it: a grammar begins at the first token.
        """
        with self.lock:
            if turn.status is not TurnStatus.CUT or (turn.constrained and not turn.is_whole):
                raise ValueError(f"only a cut turn without a grammar can be resumed, not {turn!r}")
            if not turn.waits_to_go_on:
                turn.resumes = turn.generation
                self._index(turn)

    def fail(self, turn: Turn, cause: BaseException) -> None:
        """Record that a turn got no answer. If it continued a cut turn, those tokens stay and wait to be resumed.

        Args:
            turn: The turn that was asked.
            cause: The error that ended the call.
        """
        with self.lock:
            turn.cause = cause
            turn.generation = turn.resumes
            turn.status = TurnStatus.FAILED if turn.resumes is None else TurnStatus.CUT
            self._index(turn)

    def _index(self, turn: Turn) -> None:
        """Make a turn that has ended findable by its question and its answer."""
        if self.on_record is not None:
            self.on_record(turn)
        if turn.status is TurnStatus.FAILED or turn.waits_to_go_on:
            self._unanswered.setdefault(turn.key, []).append(turn)
        if turn.answer_key is None:
            return
        self._by_answer[turn.answer_key] = turn
        self.tool_calls.update((call["toolUseId"], call) for call in turn.tool_calls)
        if turn.agent is not None:
            self._latest[turn.agent] = turn
            self._unsettled.setdefault(turn.agent, []).append(turn)

    def _retried(self, key: bytes, agent: str | None, cycle: str | None = None) -> Turn | None:
        """Find the turn that a call with this conversation replaces: an unanswered call of the same agent.

        Strands forgets the id of an agent whose first call fails, and a restarted rollout has new agents. So an agent
        without an earlier answer may be any of those that wait for one.

        Args:
            key: Digest of the conversation.
            agent: Id of the agent that asks.
            cycle: Strands' id of the event-loop cycle that asks.
        """
        turns = self._unanswered.get(key, ())
        retried = [turn for turn in turns if turn.agent == agent or (cycle is not None and turn.cycle == cycle)]
        if retried or agent in self._latest:
            return min(retried, key=lambda turn: (not turn.waits_to_go_on, turn.index), default=None)
        waiting = [turn for turn in turns if turn.waits_to_go_on]
        # Turns whose agents may still ask again come last.
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

    # --- which answers the agents kept ---

    def _judge_by_call(self, place: Place, conversation: Conversation, agent: str, cycle: str | None) -> None:
        """Settle which answers an agent threw away, from a call that it makes now."""
        settled = (TurnStatus.COMMITTED, TurnStatus.FINAL)
        unsettled = [turn for turn in self._unsettled.get(agent, ()) if turn.status not in settled]
        self._unsettled[agent] = unsettled
        undecided = [
            turn
            for turn in unsettled
            # Hooks report on an answer once its call is over.
            if turn.status is TurnStatus.ANSWERED and turn is not place.turn and turn.was_added is not False
        ]
        questions = {turn.key for turn in undecided}
        for known, link in enumerate(conversation.chain if questions else ()):
            if link in questions:
                after = After(conversation.digests[known:], place.new_messages, known, TurnStatus.COMMITTED, cycle)
                asked = [turn for turn in undecided if turn.key == link]
                same = (turn for turn in self._turns if turn.key == link and turn.agent == agent)
                answered = [turn for turn in same if turn.answer_key is not None]
                self._warn_of_rewriting(judge(answered, asked, after))
        latest = self._latest.get(agent)
        if latest is not None and latest is not place.turn and latest.key not in conversation.chain:
            note_if_gone(latest, conversation.digests)

    def _warn_of_rewriting(self, replaced: Iterable[Turn]) -> None:
        """Warn once about replaced answers: they cost training data, and may be an oversight."""
        for turn in replaced:
            if not self._warned_of_rewriting:
                self._warned_of_rewriting = True
                logger.warning(
                    "call=<%d>, note=<%s> | a hook, a cancel or a guardrail replaced a sampled answer in the agent's "
                    "history: it is discarded and not trained; logged once, see trajectory.explain() for others",
                    turn.index,
                    turn.note,
                )

    def put_in_history(self, turns: Sequence[Turn], message: Message, *, position: int) -> None:
        """Settle which answer to one model call an agent kept, from the message that entered its history.

        Args:
            turns: The turns with the answers.
            message: The message.
            position: Position of the message in the agent's history.
        """
        with self.lock:
            undecided = [turn for turn in turns if turn.status is TurnStatus.ANSWERED]
            after = After((message_digest(message),), [message], position, TurnStatus.ANSWERED)
            self._warn_of_rewriting(judge(undecided, undecided, after))

    def throw_away(self, turns: Iterable[Turn], why: Reason) -> None:
        """Record that no answer to a model call entered the agent's history.

        Args:
            turns: The turns with the answers.
            why: Why not, for `Turn.fate`.
        """
        with self.lock:
            for turn in turns:
                if turn.status is TurnStatus.ANSWERED:
                    turn.status, turn.fate = TurnStatus.DISCARDED, why

    def settle(self, messages: Messages) -> None:
        """Settle which answers an agent kept, from the messages that it ended with.

        The last answer in them becomes final. If the same agent has other answers to a question in the messages, those
        were thrown away. Answers that the messages say nothing about (they were shortened, or belong to another agent)
        keep their status. Call it once per agent when its episode is over.

        Args:
            messages: The agent's messages.
        """
        with self.lock:
            self._warn_of_rewriting(judge_end(self._turns, messages))
            self._forget_for_requests()

    def note_end(
        self,
        *,
        outcome: str | None = None,
        reward: float | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        error: str | None = None,
        reward_error: str | None = None,
    ) -> None:
        """Note how the episode ended and which reward it has, so that its file tells.

        `Environment.step` of strands-env calls it. `strands-sglang doctor` compares the note with what is trained.

        Args:
            outcome: A value of [`TerminationReason`][strands_sglang.TerminationReason].
            reward: Reward of the whole episode.
            turn_rewards: Rewards of single turns by `Turn.index`, in addition.
            error: The error that ended it.
            reward_error: Why it has no reward although its outcome allows one.

        Raises:
            ValueError: No episode ends this way.
        """
        named = None if outcome is None else TerminationReason(outcome).value
        rewards = {int(turn): float(value) for turn, value in (turn_rewards or {}).items()}  # NumPy's are not JSON's
        with self.lock:
            self.end = EpisodeEnd(named, None if reward is None else float(reward), rewards, error, reward_error)

    # --- for calls ---

    def recorded(
        self, conversation: Conversation, *, agent: str | None = None, whatever_before: bool = False
    ) -> tuple[Turn, int] | None:
        """Find the deepest turn whose conversation and answer are an exact prefix of some messages.

        Args:
            conversation: Fingerprint of the messages and of what precedes them.
            agent: Id of the agent whose turn is preferred.
            whatever_before: Whether the system prompt and the tools are unknown, so that any match.

        Returns:
            The turn and the number of messages that it covers; None if there is none.
        """
        with self.lock:
            chains = [conversation.chain]
            if whatever_before:
                before = {tuple(turn.parts.values()): turn.parts for turn in self._turns}
                chains += [chain_of(parts, conversation.digests) for parts in before.values()]
            for known in range(len(conversation.digests), 0, -1):
                for chain in chains:
                    latest = self._by_answer.get(chain[known])
                    if latest is None:
                        continue
                    same = (turn for turn in reversed(self._turns) if turn.answer_key == latest.answer_key)
                    of_agent = (turn for turn in same if turn.agent == agent)
                    return latest if latest.agent == agent else next(of_agent, latest), known
            return None

    def latest_answered(self, tool_use_ids: Collection[str] = ()) -> Turn | None:
        """Return the latest turn with an answer; None if there is none.

        Args:
            tool_use_ids: Only consider answers that made all these tool calls.
        """
        with self.lock:
            ids = set(tool_use_ids)
            answered = (turn for turn in reversed(self._turns) if turn.answer_key is not None)
            return next((turn for turn in answered if ids <= {call["toolUseId"] for call in turn.tool_calls}), None)

    def routing_key(self, turn: Turn) -> str:
        """Return the key that keeps a root conversation, with its forks and retries, on one server.

        Other episodes have other keys even for the same conversation, so that samples of one prompt are spread.

        Args:
            turn: A turn of the conversation.
        """
        return f"{self.id}-{turn.root.key.hex()[:16]}"

    # --- reading ---

    @property
    def turns(self) -> list[Turn]:
        """All turns in the order of their calls."""
        with self.lock:
            return list(self._turns)

    def __len__(self) -> int:
        """Number of turns."""
        return len(self._turns)

    def sequences(self, *, discarded: bool = False, auxiliary: bool = False) -> list[TokenManager]:
        """Return the token sequences from each root to each leaf.

        They are ordered by their last call, with cut ones last. Turns without an answer are left out. Every sampled
        token has loss mask 1 in exactly one sequence, the first that contains it, unless a grammar constrained it.

        Args:
            discarded: Whether to include answers that the agent threw away.
            auxiliary: Whether to include calls from outside the agents' loops and of `model.auxiliary`.
        """
        return [sequence for _, sequence in self.branches(discarded=discarded, auxiliary=auxiliary)]

    def branches(
        self, *, discarded: bool = False, auxiliary: bool = False, trained: Mapping[int, int] | None = None
    ) -> list[tuple[Turn, TokenManager]]:
        """Return the same as `sequences`, as pairs of the last turn and the sequence. `turn.path()` has all its turns.

        Args:
            discarded: As for `sequences`.
            auxiliary: As for `sequences`.
            trained: Number of sampled ids that get loss mask 0 because another trajectory with a copy of the turn
                trains them, by `Turn.index`.
        """
        with self.lock:
            return export_sequences(self._turns, discarded=discarded, auxiliary=auxiliary, trained=trained or {})

    def latest_main_sequence(self, *, warn: bool = False) -> TokenManager:
        """Return the latest sequence of the main conversation, with its own full mask.

        The main conversation is the first one that was answered, including every attempt at its first call but no
        auxiliary calls. Before any answer it is the latest one that was asked, so that its opening prompt can be read.
        The sequence ends with the latest answer that was not thrown away. If all were, it ends with the latest one,
        whose tokens then have mask 0.

        Args:
            warn: Whether to log a warning, once, if other sequences hold tokens to train too.
        """
        with self.lock:
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
            if leaf.status is TurnStatus.DISCARDED:
                return sequence_of(leaf, {**helpers_tokens(leaf.path()), id(leaf): len(leaf.output_ids)})
            return sequence_of(leaf)

    def main_leaf(self) -> Turn | None:
        """Return the turn that `latest_main_sequence` ends with; None before any call."""
        with self.lock:
            turns = [turn for turn in self._turns if not turn.is_auxiliary]
            first = next((turn for turn in turns if turn.is_answered), None)
            if first is None:
                return next((turn for turn in reversed(turns) if turn.parent is None), None)
            ends = [turn for turn in turns if turn.is_answered and turn.root.key == first.root.key]
            kept = [turn for turn in ends if turn.status is not TurnStatus.DISCARDED]
            return kept[-1] if kept else ends[-1]

    def drift(self, tokenizer: PreTrainedTokenizerBase) -> Drift:
        """Compare the sequences with what decoding them and encoding the text again gives.

        Args:
            tokenizer: The tokenizer of the served model.

        Returns:
            The drift: its `share_affected` is the share of affected sequences, `drifted` the number of tokens by cause.
        """
        return measure_drift(self.sequences(), tokenizer)

    def explain(self) -> str:
        """Describe every call in words: what it extends, where it forks and why, and how it ended."""
        with self.lock:
            return explain(self._turns)

    # --- files ---

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trajectory to one safetensors file, bit-exact.

        Args:
            path: Path of the file. A previous file is replaced atomically.

        Raises:
            OSError: The file cannot be written; a previous file stays unchanged.
            TrajectoryFileError: It was read from bytes that were changed.
        """
        write_file(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the bytes that `save` writes.

        Raises:
            TrajectoryFileError: It was read from bytes that were changed: a new checksum would make them valid.
        """
        if self.is_changed:
            raise TrajectoryFileError(
                "the trajectory was read from bytes that were changed since they were written, so it can be neither "
                "saved nor copied: keep the bytes"
            )
        with self.lock:
            asked = [(turn.agent, turn.is_auxiliary) for turn in self._turns if turn.agent is not None]
            facts = {
                "result_notices": self.result_notices,
                "call_ids": {use_id: call["id"] for use_id, call in self.tool_calls.items()},
                "tool_parse_errors": self.tool_parse_errors,
                "agents": sorted({agent for agent, is_auxiliary in asked if not is_auxiliary}),
                "helpers": sorted({agent for agent, is_auxiliary in asked if is_auxiliary}),
                "end": None if self.end is None else asdict(self.end),
                "id": self.id,
                "packages": self.packages or versions(),
                "context_length": self.context_length,
                **({"tool_results": self.tool_results} if self.tool_results else {}),
            }
            self._forget_for_requests()
            return encode_turns(self._turns, facts, self.encoder, self.pieces)

    def _forget_for_requests(self) -> None:
        """Free memory that only a next request would need; it takes little time to make it again."""
        self._asked.clear()
        self.counted = None
        for turn in self._turns:
            turn.forget_encoded_ids()

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trajectory:
        """Read a saved trajectory. It can be extended like any other.

        Args:
            path: Path of the file.

        Raises:
            OSError: The file cannot be read.
            TrajectoryFileError: The file is not a trajectory, is damaged or was changed since it was written, or has an
                unknown version.
        """
        return cls.from_bytes(Path(path).read_bytes(), name=str(path))

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str = "the bytes", changed_too: bool = False) -> Trajectory:
        """Read a trajectory from the bytes that `to_bytes` returned.

        Args:
            content: The bytes.
            name: What errors call them.
            changed_too: Whether to read bytes that were changed since. `is_changed` then tells. For looking at the
                record; do not train on it or continue it.

        Raises:
            TrajectoryFileError: The bytes are not a trajectory, are damaged or were changed, or have an unknown
                version.
        """
        with reading(name):
            if is_journal(content):
                return cls.of_entries([*read_entries(content)])
            return cls._read(*decode_turns(content, changed_too=changed_too))

    @classmethod
    def of_entries(cls, entries: Sequence[Entry]) -> Trajectory:
        """Return the trajectory of a journal.

        Args:
            entries: Its entries, or the first ones of them for the trajectory as it was then.

        Raises:
            TrajectoryFileError: They hold what no trajectory can.
        """
        with reading("the journal"):
            return cls._read(*turns_of(entries))

    @classmethod
    def _read(cls, turns: Sequence[Turn], facts: Mapping[str, Any], pieces: dict[int, bytes]) -> Trajectory:
        """Return a trajectory of turns, facts about it and the text of ids, as files have them."""
        trajectory = cls.of_turns(turns)
        trajectory.id = facts.get("id", trajectory.id)
        trajectory.pieces = pieces
        trajectory.is_changed = facts["is_changed"]
        if (end := facts.get("end")) is not None:  # earlier files lack it
            known = {name: value for name, value in end.items() if name not in _UNREAD_END}
            trajectory.note_end(**read_fields(EpisodeEnd, known))
        trajectory.result_notices = dict(facts["result_notices"])
        trajectory.tool_parse_errors = dict(facts["tool_parse_errors"])
        trajectory.packages = dict(facts.get("packages") or {})
        trajectory.context_length = facts.get("context_length")
        trajectory.tool_results = dict(facts.get("tool_results") or {})
        return trajectory

    @classmethod
    def of_turns(cls, turns: Iterable[Turn]) -> Trajectory:
        """Return a trajectory of turns that were recorded elsewhere.

        Args:
            turns: Turns of no other trajectory, in the order of their calls.
        """
        trajectory = cls()
        trajectory._turns = list(turns)
        trajectory._has_agents = any(turn.agent is not None and not turn.is_auxiliary for turn in trajectory._turns)
        for turn in trajectory._turns:
            trajectory._calls = turn.index + 1
            turn.trajectory = trajectory
            trajectory._index(turn)
        return trajectory

    def take_over(self, earlier: Trajectory) -> None:
        """Continue a trajectory that was just read and that no one else has; this one must be empty.

        Args:
            earlier: The trajectory.
        """
        with self.lock:
            kept = {"lock": self.lock, "_has_agents": self._has_agents or earlier._has_agents}
            self.__dict__.update({**vars(earlier), **kept})
            for turn in self._turns:
                turn.trajectory = self

    def __reduce__(self) -> Any:
        """Pickle and copy the trajectory as `save` writes it: flat, linear in the tokens, without its lock.

        Errors of failed turns become `RecordedError`s, as in a file.
        """
        return type(self).from_bytes, (self.to_bytes(),)
