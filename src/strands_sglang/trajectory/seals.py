"""Seals: digests that are made when a trajectory is first saved, and stay with it through every copy and file.

What a trajectory holds is compared with its seals by `strands-sglang doctor`. They tell where a token, a logprob or a
fact is no longer the recorded one, by whatever code or disk it was changed. A live episode pays nothing for them.

- `seal_tokens`: one number of 32 bits per sampled token. The upper half depends on its position and its id, the lower
  half on its position and its logprob. So a column that was shifted by one fits the seals of the neighbors.
- `seal_turn`: a digest of everything else that never changes after a turn is recorded.

A digest begins with the number of the scheme that made it. A change of what is sealed, or how, takes the next
number: seals of other schemes are not compared.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .trajectory import EpisodeEnd
    from .turn import Turn

_FACTS = (
    *("index", "parent_kept", "is_auxiliary", "constrained", "clamped", "agent", "cycle", "reasoning_open", "roles"),
    *("sampling_params", "request_fields", "said", "answered"),
)
_ANSWER_FACTS = (
    *("finish_type", "stop_token_id", "stop_string", "prompt_tokens", "cached_tokens", "weight_version"),
    *("weight_versions", "request_id", "resumed_ids"),
)


_SCHEME = "1:"


def is_comparable(seal: str | None) -> bool:
    """Return whether a seal of a turn or an end was made as this module makes seals."""
    return seal is not None and seal.startswith(_SCHEME)


def seal_ids(ids: Any, start: int = 0) -> NDArray[np.uint32]:
    """Return the upper half of the seals of token ids at the positions from `start`, shape `(T,)`."""
    import numpy as np

    return _mixed(np.asarray(ids, np.int64).view(np.uint64), start) & np.uint32(0xFFFF0000)


def seal_logprobs(logprobs: Any, start: int = 0) -> NDArray[np.uint32]:
    """Return the lower half of the seals of logprobs at the positions from `start`, shape `(T,)`."""
    import numpy as np

    return _mixed(np.ascontiguousarray(logprobs, np.float64).view(np.uint64), start) & np.uint32(0xFFFF)


def _mixed(bits: NDArray[np.uint64], start: int) -> NDArray[np.uint32]:
    """Mix 64-bit values with their positions (the finalizer of MurmurHash3)."""
    import numpy as np

    mixed = bits + np.arange(start, start + len(bits), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(33))).astype(np.uint32)


def seal_tokens(ids: Sequence[int], logprobs: Sequence[float] | None) -> array[int]:
    """Return the seals of sampled tokens, shape `(T,)`; their lower half is 0 without logprobs."""
    seals = seal_ids(ids)
    if logprobs is not None:
        seals = seals | seal_logprobs(logprobs)
    return array("I", seals.tobytes())


def seal_prompt(turn: Turn) -> str:
    """Return the digest of a turn's prompt ids, with their logprobs and images if there are any."""
    parts = [turn.prompt_ids.tobytes()]
    if turn.prompt_logprobs is not None:
        parts.append(turn.prompt_logprobs.tobytes())
    if turn.images is not None:
        parts += [turn.images.sent_ids.tobytes(), *(picture.data for picture in turn.images.pictures)]
    digest = 0
    for part in parts:
        digest = zlib.crc32(part, digest)
    return f"{digest:08x}"


def seal_turn(turn: Turn, **changed: Any) -> str:
    """Return the digest of what never changes once a turn is recorded, without its tokens and texts.

    Args:
        turn: The turn.
        **changed: Facts to use instead of the turn's own, by name, such as `clamped=False`.
    """
    facts: dict[str, Any] = {name: getattr(turn, name) for name in _FACTS}
    facts |= {
        "parent": None if turn.parent is None else turn.parent.index,
        "key": turn.key.hex(),
        "digests": [digest.hex() for digest in turn.digests],
    }
    answer = turn.generation
    if answer is not None:
        facts |= {name: getattr(answer, name) for name in _ANSWER_FACTS}
        facts["has_experts"] = answer.routed_experts is not None
    facts |= changed
    for name in ("weight_versions", "said", "answered"):  # orjson writes no named tuples
        facts[name] = [list(entry) for entry in facts.get(name, ())]
    return _digest(facts)


def seal_end(end: EpisodeEnd, turns: Sequence[Turn], **changed: Any) -> str:
    """Return the digest of an episode's end and of the turns that it was noted for.

    Args:
        end: The end.
        turns: The turns of the episode.
        **changed: Values of the end to use instead, such as the reward of a sibling.
    """
    values = {"outcome": end.outcome, "reward": end.reward, "turn_rewards": dict(end.turn_rewards), **changed}
    values["turns"] = sealed_answers(turns)[: end.turns]
    return _digest(values)


def sealed_answers(turns: Sequence[Turn]) -> list[str]:
    """Return the seals of answered turns, which no later call replaces."""
    return [turn.seal for turn in turns if turn.seal is not None and turn.is_answered and not turn.waits_to_go_on]


def _digest(value: Any) -> str:
    """Return a digest of what a file gives back as JSON, the same before and after."""
    try:
        data = orjson.dumps(value, default=_as_number, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # integers beyond 64 bits, lone surrogates
        data = json.dumps(json.loads(json.dumps(value, default=_as_number)), sort_keys=True).encode()
    return _SCHEME + hashlib.blake2b(data, digest_size=8).hexdigest()


def _as_number(value: Any) -> Any:
    return float(value) if hasattr(value, "__float__") else str(value)
