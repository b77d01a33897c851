"""Checks of values that no server reports and of facts that exclude each other, from the file alone.

A program that records wrongly also writes a checksum that fits, so these faults are in the record from the start.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...credit import version_number
from ...terminal import counted
from ...tool_choice import GRAMMAR_PARAMETERS
from ..records import Episode, Group, TurnRecord
from ..texts import joined
from .turns import Facts

ENOUGH = 8
"""Number of sampled tokens whose logprobs do not agree by chance."""
CHANCE = -20.0
"""Logarithm of a probability that no run of ours meets, 2e-9."""
CERTAIN = -1e-6
"""Logprobs above this are those of tokens that a policy without entropy samples."""


def check_values(group: Group, episode: Episode) -> Iterator[Facts]:
    """Check every turn of an episode, and how it ended."""
    has_logprobs = any(turn.sampled.logprobs is not None for one in group.episodes for turn in one.turns)
    pieces = episode.facts.get("pieces") or group.vocabulary
    largest = max((token_id for token_id, piece in pieces.items() if piece), default=None)
    for turn, mask in zip(episode.turns, _trained(episode), strict=True):
        checks = [_logprobs(turn, mask, has_logprobs, group), _spans(turn), _vocabulary(turn, largest)]
        if "turn" in turn.facts:
            checks += [_counts(turn), _stop(turn), _grammar(turn, mask), _said(turn, pieces)]
        for check in checks:
            for facts in check:
                yield {"turn": turn.number, **facts}
    yield from _end(episode)


def count_certain(groups: Iterable[Group]) -> tuple[int, int]:
    """Return the number of sampled tokens that were certain, and of all with a logprob."""
    columns = [turn.sampled.logprobs for group in groups for episode in group.episodes for turn in episode.turns]
    known = [column for column in columns if column is not None]
    return sum(int((column > CERTAIN).sum()) for column in known), sum(map(len, known))


def check_repeated(group: Group) -> Iterator[Facts]:
    """Find answers and logprobs that are in a group twice, and versions that cannot be compared.

    Every request has its own id, and no two answers get the same logprobs, or the same unlikely tokens, by chance.
    """
    requests: dict[str, tuple[Episode, TurnRecord]] = {}
    columns: dict[bytes, tuple[Episode, TurnRecord]] = {}
    answers: dict[tuple[bytes, bytes], Episode] = {}
    names = Counter(episode.id for episode in group.episodes if group.kind in ("openenv", "verifiers"))
    for name, count in names.items():
        if count > 1:
            yield {"kind": "trained-twice", "why": f"the file has {count} episodes of this id", "episode": name}
    for episode in group.episodes:
        for turn in episode.turns:
            recorded, logprobs = turn.facts.get("turn"), turn.sampled.logprobs
            at: Facts = {"episode": episode.id, "turn": turn.number}
            request = recorded.generation.request_id if recorded is not None and recorded.is_answered else ""
            before, earlier = requests.setdefault(request, (episode, turn)) if request else (episode, turn)
            if earlier is not turn:
                why = f"its answer is that of {_named(before, earlier, episode)}: both are request {request}"
                yield {"kind": "trained-twice", "why": why, **at}
                continue
            start = b"" if logprobs is None or len(set(logprobs[:ENOUGH])) < ENOUGH else logprobs[:ENOUGH].tobytes()
            before, earlier = columns.setdefault(start, (episode, turn)) if start else (episode, turn)
            if (turn.sampled.ids[:ENOUGH] != earlier.sampled.ids[:ENOUGH]).any():
                why = f"its logprobs are those of {_named(before, earlier, episode)}, which sampled other tokens"
                yield {"kind": "logprobs", "why": why, "token": 0, "count": len(turn.sampled), **at}
            if turn is not episode.turns[0] or _log_chance(turn) > CHANCE:
                continue
            tokens = (turn.prompt.ids.tobytes(), turn.sampled.ids.tobytes())
            if (sibling := answers.setdefault(tokens, episode)) is not episode:
                why = (
                    f"its {len(turn.sampled)} sampled tokens are those of episode {sibling.id}: the server samples "
                    "equal prompts with one seed; see random_seeds of SGLangModel"
                )
                yield {"kind": "repeated", "why": why, **at}
    yield from _names(group)


def _log_chance(turn: TurnRecord) -> float:
    """Return the logarithm of the probability to sample an answer again, at most; 0 if it is unknown."""
    given, logprobs = turn.facts.get("sampling_params"), turn.sampled.logprobs
    if given is None or logprobs is None or turn.is_constrained:
        return 0.0
    top_p, is_cut = float(given.get("top_p") or 1.0), 0 < (given.get("top_k") or 0) < 20 or given.get("min_p")
    if given.get("temperature") == 0 or is_cut:
        return 0.0
    return float(logprobs.sum()) - len(logprobs) * math.log(top_p)


def _named(episode: Episode, turn: TurnRecord, own: Episode) -> str:
    return f"call {turn.number}" + ("" if episode is own else f" of episode {episode.id}")


def _trained(episode: Episode) -> list[Any]:
    """Return which sampled tokens of each turn a sequence trains."""
    trained = [np.zeros(len(turn.sampled), bool) for turn in episode.turns]
    for sequence in episode.sequences:
        for step in sequence.steps:
            mask = sequence.mask[step.sampled : step.stop] > 0
            trained[step.turn][: len(mask)] |= mask
    return trained


# --- logprobs and versions ---


def _logprobs(turn: TurnRecord, trained: Any, has_logprobs: bool, group: Group) -> Iterator[Facts]:
    values = turn.sampled.logprobs
    if values is None:
        if has_logprobs and trained.any():
            why = f"{counted(int(trained.sum()), 'trained token')} without logprobs, although other turns have them"
            yield {"kind": "logprobs", "why": why, "token": 0, "count": len(trained)}
        return
    bad = np.flatnonzero((values > 1e-3) | np.isposinf(values) | (trained & ~np.isfinite(values)))
    if len(bad):
        why = f"the logprob {values[bad[0]]:g} is not the logarithm of a probability"
        yield {"kind": "logprobs", "why": why, "token": int(bad[0]), "count": 1}
    known = values[trained]
    if len(known) < ENOUGH or (known != known[0]).any():
        return
    # Near temperature 0 every sampled token has probability 1.
    temperature = turn.facts.get("sampling_params", {}).get("temperature")
    is_cold = temperature is not None and float(temperature) < 0.5
    # The tokens of all other turns tell how often this policy is certain.
    certain, count = group.facts["certain"]
    share = (certain - (values > CERTAIN).sum() + 1) / (count - len(values) + 1)
    if known[0] < CERTAIN or (not is_cold and share ** len(known) < math.exp(CHANCE)):
        why = f"all {len(known)} trained tokens have the logprob {known[0]:g}: no model gave it"
        yield {"kind": "logprobs", "why": why, "token": int(np.flatnonzero(trained)[0]), "count": len(known)}


def _spans(turn: TurnRecord) -> Iterator[Facts]:
    bounds = [0, *(bound for span in turn.sampled.versions for bound in span[1:]), len(turn.sampled)]
    if bounds != sorted(bounds):
        spans = ", ".join(
            f"{version} for tokens {start} to {stop - 1}" for version, start, stop in turn.sampled.versions
        )
        why = f"its versions of the weights overlap or go beyond its {len(turn.sampled)} sampled tokens: {spans}"
        yield {"kind": "version", "why": why}


def _names(group: Group) -> Iterator[Facts]:
    spans = [
        (version_number(span.version) is not None, span, episode, turn)
        for episode in group.episodes
        for turn in episode.turns
        for span in turn.sampled.versions
    ]
    numbers = Counter(is_number for is_number, *_ in spans)
    if len(numbers) < 2:
        return
    odd = numbers[True] < numbers[False]
    usual = next(span.version for is_number, span, *_ in spans if is_number != odd)
    for is_number, (version, start, stop), episode, turn in spans:
        if is_number == odd:
            why = f"version {version!r} cannot be compared with versions such as {usual!r}"
            at = {"episode": episode.id, "turn": turn.number, "token": start, "count": stop - start}
            yield {"kind": "version", "why": why, **at}


# --- the server's report ---


def _counts(turn: TurnRecord) -> Iterator[Facts]:
    recorded = turn.facts["turn"]
    answer = recorded.generation
    if answer is None:
        return
    if answer.cached_tokens > answer.prompt_tokens > 0:
        why = f"{answer.cached_tokens} of its {answer.prompt_tokens} prompt tokens are said to come from the cache"
        yield {"kind": "structure", "why": why}
    if answer.prompt_tokens and not recorded.image_inputs():  # the server counts images by its own tokens
        sent = len(recorded.token_ids()) - len(recorded.output_ids)
        if sent != answer.prompt_tokens:
            why = f"its prompt has {sent} tokens, but the server counted {answer.prompt_tokens}: others were sent"
            yield {"kind": "re-rendered", "why": why}
    most = turn.facts["sampling_params"].get("max_new_tokens")
    if isinstance(most, int) and len(turn.sampled) > most:
        why = f"it has {len(turn.sampled)} sampled tokens, more than its max_new_tokens={most}"
        yield {"kind": "structure", "why": why}
    if not 0 <= answer.latency_s < math.inf:
        yield {"kind": "structure", "why": f"its request took {answer.latency_s:g} seconds"}


def _stop(turn: TurnRecord) -> Iterator[Facts]:
    recorded = turn.facts["turn"]
    answer, given = recorded.generation, turn.facts["sampling_params"]
    if answer is None or answer.stop_token_id is None or given.get("ignore_eos") or given.get("min_new_tokens"):
        return
    places = np.flatnonzero(turn.sampled.ids == answer.stop_token_id)
    last = len(turn.sampled) - 1
    if len(places) and places[0] < last and not turn.is_resumed:
        why = f"{counted(last - int(places[0]), 'token')} after the stop token {answer.stop_token_id}: it ended there"
        yield {"kind": "mask-not-sampled", "why": why, "token": int(places[0]) + 1, "count": last - int(places[0])}
    elif not len(places):
        yield {"kind": "cut-complete", "why": f"its stop token {answer.stop_token_id} is not among its tokens"}


def _grammar(turn: TurnRecord, trained: Any) -> Iterator[Facts]:
    names = [name for name in GRAMMAR_PARAMETERS if turn.facts["sampling_params"].get(name) is not None]
    if names and trained.any() and not turn.is_constrained:
        why = f"its tokens were sampled under a grammar ({names[0]}), and are trained"
        yield {"kind": "mask-off-policy", "why": why, "token": 0, "count": len(turn.sampled)}


# --- the conversation ---


def _vocabulary(turn: TurnRecord, largest: int | None) -> Iterator[Facts]:
    """Find ids above the largest that has a text: the tokenizer lacks them."""
    if largest is None:
        return
    for part, ids in (("sampled", turn.sampled.ids), ("prompt", turn.prompt.ids)):
        beyond = np.flatnonzero(ids > largest)
        if len(beyond):
            why = f"the {part} id {ids[beyond[0]]} is beyond the tokenizer's vocabulary"
            at = {"token": int(beyond[0]), "count": 1} if part == "sampled" else {}
            yield {"kind": "ids", "why": why, **at}


def _said(turn: TurnRecord, pieces: Any) -> Iterator[Facts]:
    """Compare what was said with the tokens, and the tool calls with the answer."""
    calls = [(part.name, part.id) for part in turn.answered if part.kind == "call"]
    noted = [(call["name"], call["toolUseId"]) for call in turn.tool_calls]
    if turn.answered and sorted(noted) != sorted(calls):
        shown = [", ".join(name for name, _ in some) or "none" for some in (noted, calls)]
        why = f"its tool calls are noted as {shown[0]}, but its answer has {shown[1]}"
        yield {"kind": "changed", "why": why}
    if any(part.kind == "image" for part in turn.said) and not turn.images:
        yield {"kind": "structure", "why": "its prompt shows an image, which is not recorded"}
    recorded = turn.facts["turn"]
    notices = recorded.trajectory.result_notices if recorded.trajectory is not None else {}
    for name, parts, tokens in (("answer", turn.answered, turn.sampled), ("prompt", turn.said, turn.prompt)):
        text = joined(tokens.ids.tolist(), pieces) if parts else None
        for part in parts if text is not None else ():
            # The model reads another text in place of the result of a call that it wrote wrongly.
            is_shown = part.kind == "text" or (part.kind == "result" and part.id not in notices)
            words = _WORD.findall(part.text) if is_shown else []
            gone = [word for word in words if word not in text]  # type: ignore[operator]
            if 2 * len(gone) > len(words):  # templates escape, trim and leave out
                why = f"its {name} as people read it says {part.text[:60]!r}, which is not in its tokens"
                yield {"kind": "id-text", "why": why}
                break


_WORD = re.compile("[A-Za-z0-9]{4,}")


# --- the end ---


def _end(episode: Episode) -> Iterator[Facts]:
    if episode.seconds is not None and not 0 <= episode.seconds < math.inf:
        yield {"kind": "structure", "why": f"it took {episode.seconds:g} seconds"}
    end = episode.facts.get("end")
    if end is None:
        return
    if end.reward is not None and end.reward_error:
        why = f"it has the reward {end.reward:g}, but could not be scored: {end.reward_error}"
        yield {"kind": "reward-failure", "why": why}
    unknown = sorted(set(end.turn_rewards) - {turn.number for turn in episode.turns})
    if unknown:
        yield {"kind": "reward", "why": f"it has a reward for turn {unknown[0]}, which is none of its turns"}
