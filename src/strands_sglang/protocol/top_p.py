"""The ids that truncated sampling kept for each token, whichever server told them.

Stock SGLang tells them for `return_sampling_mask` (`strands_sglang.sampling_masks`). slime's SGLang is asked with
`custom_params.return_top_p_token_ids`: `top_p_token_ids` of `meta_info` has the ids, one row after the other, and
`top_p_token_offsets` where the rows start (one more than there are sampled tokens); both int32, as a list or as base64
of the bytes. slime replays either in training.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .generation import Generation
from .sampling_masks import SamplingMask

_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")


def kept_ids(generation: Generation) -> SamplingMask | None:
    """The ids that were kept for each sampled token; None where the server told nothing.

    Raises:
        ValueError: What slime's SGLang told is not consistent.
    """
    if generation.sampling_mask is not None:
        return generation.sampling_mask
    meta = generation.meta_info
    ids = _int32_array(next((meta[key] for key in _IDS if key in meta), None))
    offsets = _int32_array(next((meta[key] for key in _OFFSETS if key in meta), None))
    if ids is None and offsets is None:
        return None
    count = generation.completion_tokens
    if ids is not None and offsets is not None and len(offsets) == count + 1:
        lengths = array("i", (stop - start for start, stop in pairwise(offsets)))
        if (offsets[0], offsets[-1]) == (0, len(ids)) and min(lengths, default=0) >= 0:
            return SamplingMask(ids, lengths)
    raise ValueError(f"the server's top-p ids and offsets are not those of {count} tokens")


def without_kept_ids(meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """A `meta_info` without the keys of slime's SGLang."""
    return {key: value for key, value in meta_info.items() if key not in (*_IDS, *_OFFSETS)}


def _int32_array(value: Any) -> array[int] | None:
    """An int32 array as SGLang puts it into JSON; None stays None.

    Raises:
        ValueError: It is neither base64 nor a list of such integers.
    """
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return array("i", base64.b64decode(value, validate=True))
        return array("i", value)
    except (binascii.Error, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"not an int32 array: {error}") from error
