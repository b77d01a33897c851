"""The sampling parameters that SGLang 0.5.23 takes: names, JSON types and ranges, with the server's own error texts.

Source: the server's answers to wrong parameters. Names and types are checked in the order in which they were sent,
ranges in the server's fixed order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

# In the order in which the server's error text lists them.
SAMPLING_KEY_TYPES = {
    "max_new_tokens": "i64",
    "stop": "a value or an array of values for StringOrList",
    "stop_token_ids": "a sequence",
    "stop_regex": "a value or an array of values for StringOrList",
    "temperature": "f64",
    "top_p": "f64",
    "top_k": "i64",
    "min_p": "f64",
    "frequency_penalty": "f64",
    "presence_penalty": "f64",
    "repetition_penalty": "f64",
    "min_new_tokens": "i64",
    "n": "i64",
    "json_schema": "a string",
    "regex": "a string",
    "ebnf": "a string",
    "structural_tag": "a string",
    "ignore_eos": "a boolean",
    "skip_special_tokens": "a boolean",
    "spaces_between_special_tokens": "a boolean",
    "no_stop_trim": "a boolean",
    "stream_interval": "i64",
    "logit_bias": "a map",
    "sampling_seed": "i64",
    "custom_params": "anything",
    "beam_width": "i64",
    "watermark": "anything",
    "choice": "anything",
}

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "i64": (int,),
    "f64": (int, float),
    "a string": (str,),
    "a boolean": (bool,),
    "a sequence": (list,),
    "a map": (dict,),
    "a value or an array of values for StringOrList": (str, list),
}
_ELEMENT_TYPES = {"stop": "a string", "stop_regex": "a string", "stop_token_ids": "i64", "logit_bias": "f64"}

_RANGES: tuple[tuple[str, float, Callable[[float], bool], str], ...] = (
    ("temperature", 1.0, lambda v: math.isfinite(v) and v >= 0, "temperature must be a non-negative finite number"),
    ("top_p", 1.0, lambda v: 0 < v <= 1, "top_p must be in (0, 1]"),
    ("min_p", 0.0, lambda v: 0 <= v <= 1, "min_p must be in [0, 1]"),
    ("top_k", -1, lambda v: v == -1 or v >= 1, "top_k must be -1 (disable) or at least 1"),
    ("frequency_penalty", 0.0, lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2]"),
    ("presence_penalty", 0.0, lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2]"),
    ("repetition_penalty", 1.0, lambda v: 0 < v <= 2, "repetition_penalty must be in (0, 2] (1.0 = no penalty)"),
    ("min_new_tokens", 0, lambda v: v >= 0, "min_new_tokens must be in [0, max_new_tokens]"),
    ("max_new_tokens", 0, lambda v: v >= 0, "max_new_tokens must be at least 0"),
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_sampling_types(params: Any) -> str | None:
    """The server's error text for the first unknown or mistyped parameter, None if there is none."""
    if not isinstance(params, dict):
        return None
    for key, value in params.items():
        expected = SAMPLING_KEY_TYPES.get(key)
        if expected is None:
            return f"unknown field `{key}`, expected one of " + ", ".join(f"`{name}`" for name in SAMPLING_KEY_TYPES)
        if value is None or expected == "anything":
            continue
        if type(value) not in _PYTHON_TYPES[expected]:
            return wrong_type(value, expected)
        if key in _ELEMENT_TYPES and not isinstance(value, str):
            for item in value.values() if isinstance(value, dict) else value:
                if type(item) not in _PYTHON_TYPES[_ELEMENT_TYPES[key]]:
                    return wrong_type(item, _ELEMENT_TYPES[key])
    return None


def check_sampling_values(params: dict[str, Any], vocab_size: int) -> str | None:
    """The server's error text for the first parameter out of its range, None if there is none."""
    for key, default, is_valid, message in _RANGES:
        value = params.get(key)
        if not is_valid(default if value is None else value):
            return f"{message}, got {value}."
    least, most = params.get("min_new_tokens") or 0, params.get("max_new_tokens", 128)
    if most is not None and least > most:
        return f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}."
    for token_id in params.get("logit_bias") or ():
        if not 0 <= int(token_id) < vocab_size:
            return f"logit_bias must has keys in [0, {vocab_size - 1}], got {token_id}."
    if sum(bool(params.get(grammar)) for grammar in _GRAMMARS) > 1:
        return "Only one of json_schema, regex, ebnf, or structural_tag can be set."
    if params.get("json_schema"):
        try:
            json.loads(params["json_schema"])
        except ValueError as error:
            return f"Failed to compile json grammar: {error}"
    return None


def wrong_type(value: Any, expected: str) -> str:
    """The server's error text for a JSON value of a type that it does not expect."""
    if isinstance(value, bool):
        found = f"boolean `{str(value).lower()}`"
    elif isinstance(value, int):
        found = f"integer `{value}`"
    elif isinstance(value, float):
        found = f"floating point `{value}`"
    elif isinstance(value, str):
        found = f"string {json.dumps(value, ensure_ascii=False)}"
    else:
        found = "map" if isinstance(value, dict) else "sequence" if isinstance(value, list) else "null"
    return f"invalid type: {found}, expected {expected}"
