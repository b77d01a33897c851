"""Checks of values that no server reports and of facts that exclude each other, from the file alone.

A program that records wrongly also writes a checksum that fits, so these faults are in the record from the start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import takewhile
from typing import Any

import numpy as np

from ...credit import version_number
from ...shown import counted
from ...trajectory.turn import Turn
from ...trees import sample_of
from ..records import Finding, Group, Inspected, spans_of, stretch, turns_of, within
from .turns import trained_tokens

ENOUGH = 8
"""Number of sampled tokens whose logprobs do not agree by chance."""
CHANCE = -20.0
"""Logarithm of a probability that no run of ours meets, 2e-9."""
CERTAIN = -1e-6
"""Logprobs above this are those of tokens that a policy without entropy samples."""

Certain = tuple[int, int]
"""Number of sampled tokens that were certain, and of all with a logprob."""


def check_values(group: Group, episode: Inspected, certain: Certain) -> Iterator[Finding]:
    """Check every turn of an episode, and how it ended."""
    has_logprobs = any(_logprobs_of(turn) is not None for turn in turns_of([group]))
    trained = trained_tokens(episode)
    for turn in episode.turns:
        mask = trained[id(turn)]
        yield from within((*_logprobs(turn, mask, has_logprobs, certain), *_prompt(turn)), turn=turn.index)
    yield from _end(episode)


def _logprobs_of(turn: Turn) -> Any:
    known = None if turn.generation is None else turn.generation.logprobs
    return None if known is None else np.asarray(known)


def count_certain(groups: Iterable[Group]) -> Certain:
    """Return how many tokens were certain."""
    columns = [_logprobs_of(turn) for turn in turns_of(groups)]
    known = [column for column in columns if column is not None]
    return sum(int((column > CERTAIN).sum()) for column in known), sum(map(len, known))


def check_repeated(group: Group) -> Iterator[Finding]:
    """Find answers and logprobs that are in a group twice, and versions that cannot be compared.

    Every request has its own id, and no two answers get the same logprobs, or the same unlikely tokens, by chance.
    """
    requests: dict[str, tuple[Inspected, Turn]] = {}
    columns: dict[bytes, tuple[Inspected, Turn]] = {}
    answers: dict[tuple[bytes, bytes], Inspected] = {}
    names = Counter(episode.id for episode in group.episodes if group.kind in ("openenv", "verifiers"))
    for name, count in names.items():
        if count > 1:
            yield Finding("trained-twice", f"the file has {count} episodes of this id", episode=name)
    samples: set[Hashable] = set()
    trajectories: set[str] = set()
    for episode in group.episodes:
        episode_samples = [*map(sample_of, episode.turns)]
        copies = len([*takewhile(samples.__contains__, episode_samples)])
        samples.update(episode_samples)
        # `training_rows` trains a fork's first turns once; the masks of its rows tell where.
        is_fork = copies < len(episode_samples) and (group.batch is not None or episode.trajectory.id in trajectories)
        trajectories.add(episode.trajectory.id)
        for turn in episode.turns[copies if is_fork else 0 :]:
            here: dict[str, Any] = {"episode": episode.id, "turn": turn.index}
            request = "" if turn.generation is None else turn.generation.request_id
            before, earlier = requests.setdefault(request, (episode, turn)) if request else (episode, turn)
            if earlier is not turn:
                why = f"its answer is that of {_named(before, earlier, episode)}: both are request {request}"
                yield Finding("trained-twice", why, **here)
                continue
            known = _logprobs_of(turn)
            start = b"" if known is None or len(set(known[:ENOUGH])) < ENOUGH else known[:ENOUGH].tobytes()
            before, earlier = columns.setdefault(start, (episode, turn)) if start else (episode, turn)
            if turn.output_ids[:ENOUGH] != earlier.output_ids[:ENOUGH]:
                why = f"its logprobs are those of {_named(before, earlier, episode)}, which sampled other tokens"
                yield Finding("logprobs", why, token=0, count=len(turn.output_ids), **here)
            if turn is not episode.turns[0] or _log_chance(turn) > CHANCE:
                continue
            tokens = (turn.prompt_ids.tobytes(), turn.output_ids.tobytes())
            if (sibling := answers.setdefault(tokens, episode)) is not episode:
                why = (
                    f"its {len(turn.output_ids)} sampled tokens are those of episode {sibling.id}: the server samples "
                    "equal prompts with one seed; see random_seeds of SGLangModel"
                )
                yield Finding("repeated", why, **here)
    yield from _names(group)


def _log_chance(turn: Turn) -> float:
    """Return the logarithm of the probability to sample an answer again, at most; 0 if it is unknown."""
    given, logprobs = turn.sampling_params, _logprobs_of(turn)
    if not given or logprobs is None or turn.constrained:
        return 0.0
    top_p, is_cut = float(given.get("top_p") or 1.0), 0 < (given.get("top_k") or 0) < 20 or given.get("min_p")
    if given.get("temperature") == 0 or is_cut:
        return 0.0
    return float(logprobs.sum()) - len(logprobs) * math.log(top_p)


def _named(episode: Inspected, turn: Turn, current: Inspected) -> str:
    return f"call {turn.index}" + ("" if episode is current else f" of episode {episode.id}")


# --- logprobs and versions ---


def _logprobs(turn: Turn, trained: Any, has_logprobs: bool, certain: Certain) -> Iterator[Finding]:
    values = _logprobs_of(turn)
    if values is None:
        if has_logprobs and trained.any():
            why = f"{counted(int(trained.sum()), 'trained token')} without logprobs, although other turns have them"
            yield Finding("logprobs", why, token=0, count=len(trained))
        return
    bad = np.flatnonzero((values > 1e-3) | np.isposinf(values) | (trained & ~np.isfinite(values)))
    if len(bad):
        why = f"the logprob {values[bad[0]]:g} is not the logarithm of a probability"
        yield Finding("logprobs", why, **stretch(bad[:1]))
    known = values[trained]
    if len(known) < ENOUGH or (known != known[0]).any():
        return
    # Near temperature 0 every sampled token has probability 1.
    temperature = turn.sampling_params.get("temperature")
    is_cold = temperature is not None and float(temperature) < 0.5
    # The tokens of all other turns tell how often this policy is certain.
    share = (certain[0] - (values > CERTAIN).sum() + 1) / (certain[1] - len(values) + 1)
    if known[0] < CERTAIN or (not is_cold and share ** len(known) < math.exp(CHANCE)):
        why = f"all {len(known)} trained tokens have the logprob {known[0]:g}: no model gave it"
        yield Finding("logprobs", why, **stretch(np.flatnonzero(trained)))


def _names(group: Group) -> Iterator[Finding]:
    spans = []
    for episode in group.episodes:
        for turn in episode.turns:
            for span in spans_of(turn):
                spans.append((version_number(span.version) is not None, span, episode, turn))
    numbers = Counter(is_number for is_number, *_ in spans)
    if len(numbers) < 2:
        return
    odd = numbers[True] < numbers[False]
    usual = next(span.version for is_number, span, *_ in spans if is_number != odd)
    for is_number, (version, start, stop), episode, turn in spans:
        if is_number == odd:
            why = f"version {version!r} cannot be compared with versions such as {usual!r}"
            yield Finding("version", why, episode=episode.id, turn=turn.index, token=start, count=stop - start)


# --- the server's report ---


def _prompt(turn: Turn) -> Iterator[Finding]:
    answer = turn.generation
    # The server counts images by its own tokens.
    is_counted = answer is not None and answer.prompt_tokens and not turn.image_inputs()
    if answer is not None and is_counted and turn.prompt_tokens != answer.prompt_tokens:
        sent = f"its prompt has {turn.prompt_tokens} tokens, but the server counted {answer.prompt_tokens}"
        yield Finding("re-rendered", f"{sent}: others were sent")


# --- the end ---


def _end(episode: Inspected) -> Iterator[Finding]:
    end = episode.trajectory.end
    if end is None:
        return
    if end.reward is not None and end.reward_error:
        why = f"it has the reward {end.reward:g}, but could not be scored: {end.reward_error}"
        yield Finding("reward-failure", why)
    unknown = sorted(set(end.turn_rewards) - {turn.index for turn in episode.turns})
    if unknown:
        yield Finding("reward", f"it has a reward for turn {unknown[0]}, which is none of its turns")
