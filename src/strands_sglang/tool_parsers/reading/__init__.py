"""How turns are read, whatever the format: marks, structure, values, and calls of the usual shapes."""

from ..results import BrokenCallError
from .calls import (
    Call,
    JSONSection,
    call_from_json,
    end_of_turn,
    is_cut,
    json_call,
    name_of,
    read_json_list,
    read_list_to_end,
    read_one,
    read_section,
)
from .literals import read_arguments, read_literal
from .marks import Mark, MarkedText, MarkKind
from .schemas import JSON_TYPES, allowed_types, item_schema, property_schema
from .structure import CallSpan, ReadCall, Span, SpanKind
from .tagged import TaggedCalls, nested_value_end
from .values import (
    MAX_JSON_DEPTH,
    DecodedJSON,
    InvalidValueError,
    decode_json,
    shorten,
    skip_space,
    strict_json,
    typed_value,
)

__all__ = [
    "JSON_TYPES",
    "MAX_JSON_DEPTH",
    "BrokenCallError",
    "Call",
    "CallSpan",
    "DecodedJSON",
    "InvalidValueError",
    "JSONSection",
    "Mark",
    "MarkKind",
    "MarkedText",
    "ReadCall",
    "Span",
    "SpanKind",
    "TaggedCalls",
    "allowed_types",
    "call_from_json",
    "decode_json",
    "end_of_turn",
    "is_cut",
    "item_schema",
    "json_call",
    "name_of",
    "nested_value_end",
    "property_schema",
    "read_arguments",
    "read_json_list",
    "read_list_to_end",
    "read_literal",
    "read_one",
    "read_section",
    "shorten",
    "skip_space",
    "strict_json",
    "typed_value",
]
