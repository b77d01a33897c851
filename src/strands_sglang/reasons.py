"""Why something was recorded as it was: data in the record, a sentence where a person reads it.

A `Reason` says why a call extends, forks or opens a sequence, what became of an answer, or why an episode is not
trained. Code decides by its kind, and files hold it as a list of its fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from .shown import counted

_COMPARED = " (compared with call {turn})"

SENTENCES: Mapping[str, str] = {
    # where a call attaches
    "first": "opens the first sequence",
    "opens": "opens a sequence",
    "opens_because": "opens a sequence: {0}",
    "extends": "extends call {turn} with {0} new message(s)",
    "continues": "extends {0}",
    "forks": "forks after call {turn}: {0}",
    "forks_inside": "forks inside call {turn}: {0}",
    # how its conversation differs from the recorded one
    "part_changed": "the {0} changed" + _COMPARED,
    "message_changed": "message {position} ({0}) is not the recorded one ({1})" + _COMPARED,
    "answer_changed": "message {position} (assistant) is not the recorded one (assistant): {0}" + _COMPARED,
    "stops": "it stops after message {position}, before the recorded answer" + _COMPARED,
    "goes_on": "it continues after message {position}" + _COMPARED,
    # why the recorded tokens cannot be continued
    "unproven": "{0}",
    "policy": "the chat template rewrites earlier turns after a {0} message",
    "other_stop": "the model stopped with {0} where the chat template writes {1}",
    # what became of an answer
    "unknown": "it is not known whether the agent kept this answer: no later call shows it, but model.hooks would",
    "other_form": "kept in another form: message {position} (assistant) holds {0}",
    "ended_before": "the agent's messages end before it",
    "asked_again": "the agent asked the same again",
    "another_kept": "another answer was kept",
    "hook_retried": "a hook retried the call",
    "asked_without": "the agent asked again without it",
    "failed_after": "the call failed after it: {0}",
    "run_again": "the process died inside the tool call that asked, which ran again",
    "ended_without": "the agent's invocation ended without it",
    "replaced": "message {position} ({0}) replaced it",
    "replaced_with": "message {position} (assistant) replaced it, with {0}",
    # why an episode is not trained
    "outcome": "the outcome {0} has no reward",
    "only_turn_rewards": "turn_rewards need a reward of the episode, which may be 0.0",
    "no_reward": "no reward",
    "reward_not_a_number": "a reward is not a number",
    "reward_not_finite": "a reward is not finite",
    "rewards_too_large": "its rewards exceed {0}",
    "only_scored": "the only episode of its group with a reward",
    "only_trained": "the only episode of its group that can be trained",
    "flat_group": "its group has no variance",
    "no_token": "no trained token",
    "no_logprob": "a trained token has no logprob",
    "logprob_not_finite": "a logprob is not finite",
    "too_long": "longer than max_tokens={0}",
    "too_old": "older than max_staleness={0}",
    # by an earlier release, or by another library
    "in_words": "{0}",
}
"""The kinds of reasons, and the sentence of each."""

EARLIER: Mapping[str, str] = {
    "goes_on": "it goes on after message {position}" + _COMPARED,  # as released
    "policy": "the chat template writes earlier turns anew behind a {0} message",  # as released
    "other_stop": "the model stopped with {0} where the chat template puts {1}",
    "replaced": "message {position} ({0}) stands in its place",  # as released
    "replaced_with": "message {position} (assistant) stands in its place, with {0}",  # as released
}
"""Sentences of release 0.5.0, where they are others."""

_NESTING = ("opens_because", "forks", "forks_inside")
"""Kinds whose detail is a reason."""


class Reason(NamedTuple):
    """A reason; `str()` returns the sentence.

    Attributes:
        kind: A key of `SENTENCES`.
        turn: Number of the other call that it is about; None without one.
        position: Position of the message that it is about; None without one.
        detail: What the sentence names besides: words, or further reasons.
    """

    kind: str
    turn: int | None = None
    position: int | None = None
    detail: tuple[str | Reason, ...] = ()

    def __str__(self) -> str:
        """The reason as a sentence."""
        return SENTENCES[self.kind].format(*self.detail, turn=self.turn, position=self.position)


def of_turns(sentence: str) -> str:
    """Return a sentence with the words of those who look at a recorded episode: its calls are turns there."""
    sentence = re.sub(r"\bcall (?=\d)", "turn ", sentence)
    return re.sub(r"(\d+) new message\(s\)", lambda match: counted(int(match[1]), "new message"), sentence)


def read_reason(value: Any) -> Reason:
    """Return a reason from its form in a file; earlier releases wrote the sentence.

    Raises:
        ValueError: It is none, or of a kind that this release does not know.
    """
    match value:
        case str():
            return _of_sentence(value)
        case [str(kind), int() | None as turn, int() | None as position, list(detail)] if kind in SENTENCES:
            parts = tuple(part if isinstance(part, str) else read_reason(part) for part in detail)
            reason = Reason(kind, turn, position, parts)
            with suppress(IndexError):  # details are missing
                str(reason)
                return reason
    raise ValueError(f"{value!r:.80} is not a reason that this release knows")


def _of_sentence(sentence: str) -> Reason:
    for kind, pattern in _PATTERNS:
        if (found := pattern.fullmatch(sentence)) is not None:
            values = found.groupdict()
            numbers = {name: int(values.pop(name)) for name in ("turn", "position") if name in values}
            detail = values.values()
            parts = map(_of_sentence, detail) if kind in _NESTING else detail
            return Reason(kind, detail=tuple(parts), **numbers)
    return Reason("in_words", detail=(sentence,))


def _patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the kinds with what their sentences match, those with the most words of their own first."""
    sentences = [*SENTENCES.items(), *EARLIER.items()]
    for kind, sentence in sorted(sentences, key=lambda pair: -len(pair[1])):
        if sentence != "{0}":
            numbers = re.sub(r"\\{(turn|position)\\}", r"(?P<\1>\\d+)", re.escape(sentence))
            yield kind, re.compile(re.sub(r"\\{(\d)\\}", r"(?P<_\1>.+)", numbers), re.DOTALL)


_PATTERNS = [*_patterns()]
