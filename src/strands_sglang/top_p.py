"""The ids that top-p sampling kept for each token, as slime's SGLang tells them in `meta_info`.

slime asks for them with `custom_params.return_top_p_token_ids` and replays them in training. `top_p_token_ids` has the
ids, one span after the other, and `top_p_token_offsets` where the spans start (one more than there are sampled tokens);
both int32, as a list or as base64 of the bytes. Stock SGLang has no such keys.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .generation import Generation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")


def top_p_arrays(generation: Generation) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """The ids that top-p kept for the sampled tokens, one span after the other, and where the spans start.

    Returns:
        Two arrays, the second of shape (sampled tokens + 1,); None where the server told nothing.

    Raises:
        ValueError: They are not consistent.
    """
    meta = generation.meta_info
    ids = _int32_array(next((meta[key] for key in _IDS if key in meta), None))
    starts = _int32_array(next((meta[key] for key in _OFFSETS if key in meta), None))
    if ids is None and starts is None:
        return None
    count = generation.completion_tokens
    if (
        ids is None
        or starts is None
        or len(starts) != count + 1
        or (starts[0], starts[-1]) != (0, len(ids))
        or (starts[1:] < starts[:-1]).any()
    ):
        raise ValueError(f"the server's top-p ids and offsets are not those of {count} tokens")
    return ids, starts


def joined_top_p(parts: Sequence[Generation]) -> dict[str, Any]:
    """What `meta_info` has for an answer in several parts; empty where one of them lacks it, or has it wrongly."""
    if not any(key in part.meta_info for part in parts for key in (*_IDS, *_OFFSETS)):
        return {}
    ids: list[int] = []
    starts = [0]
    for part in parts:
        if not part.output_ids:
            continue
        try:
            arrays = top_p_arrays(part)
        except ValueError:
            arrays = None
        if arrays is None:
            return {}
        starts += (arrays[1][1:] + len(ids)).tolist()
        ids += arrays[0].tolist()
    return {_IDS[0]: ids, _OFFSETS[0]: starts}


def is_top_p_key(key: str) -> bool:
    """Whether a key of `meta_info` belongs to the ids that top-p kept."""
    return key in (*_IDS, *_OFFSETS)


def _int32_array(value: Any) -> NDArray[np.int32] | None:
    """An int32 array as SGLang puts it into JSON; None stays None.

    Raises:
        ValueError: It is neither base64 nor a list of such integers.
    """
    import numpy as np  # there wherever transformers is, and not cheap

    if value is None:
        return None
    try:
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4")
        return np.asarray(value, dtype=np.int32).reshape(-1)
    except (binascii.Error, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"not an int32 array: {error}") from error
