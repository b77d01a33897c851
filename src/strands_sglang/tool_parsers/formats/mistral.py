"""The formats of Mistral: `[TOOL_CALLS]` opens the calls, and the end of the turn closes them.

Up to Mistral Nemo and Small 3.1, a JSON list follows: `[{"name": "f", "arguments": {...}, "id": "abcDEF123"}, ...]`.
Later models write `[TOOL_CALLS]f[ARGS]{...}` per call; Small 3.2 adds `[CALL_ID]abcDEF123` before `[ARGS]`. Ids are
nine letters and digits. Reasoning is between `[THINK]` and `[/THINK]`.
"""

from __future__ import annotations

import re

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    BrokenCallError,
    Call,
    CallSpan,
    DecodedJSON,
    Mark,
    MarkedText,
    MarkKind,
    call_from_json,
    decode_last_arguments,
    json_call,
    read_list_to_end,
    skip_space,
)

_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[^\[\]{}\s]{1,256}")
_NATIVE_ID = re.compile(r"[a-zA-Z0-9]{9}")


@register_tool_parser("mistral")
class MistralToolParser(ToolParser):
    """Parser for Mistral: a JSON list, or a name before the arguments.

    ```text
    [TOOL_CALLS][{"name": "search", "arguments": {"query": "x"}, "id": "abcDEF123"}]
    [TOOL_CALLS]search[ARGS]{"query": "x"}
    [TOOL_CALLS]search[CALL_ID]abcDEF123[ARGS]{"query": "x"}
    ```

    The calls end the turn. An id becomes the `native_id` of the result.
    """

    DEFAULT_TOOL_START_TOKEN = "[TOOL_CALLS]"
    DEFAULT_TOOL_END_TOKEN = ""
    DEFAULT_THINK_START_TOKEN = "[THINK]"
    DEFAULT_THINK_END_TOKEN = "[/THINK]"
    MORE_MARKS = {_ARGUMENTS: _ARGUMENTS, _CALL_ID: _CALL_ID}
    BEFORE_CALL = ""

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the list or the named call after a start mark."""
        text, begin = turn.text, skip_space(turn.text, start.end)
        if text.startswith("[", begin) and not turn.mark_at(_ARGUMENTS, begin):
            return read_list_to_end(turn, begin, _listed_call)
        found = _NAME.match(text, begin)
        name, at = (None, begin) if found is None else (found.group(), found.end())
        native_id = None
        if turn.mark_at(_CALL_ID, at):
            written_id = _NATIVE_ID.match(text, at + len(_CALL_ID))
            if written_id is None:
                cut = len(text) - at < len(_CALL_ID) + 9
                raise BrokenCallError(at, "the id of a call must be nine letters and digits", name, cut=cut)
            native_id, at = written_id.group(), written_id.end()
        if name is None or not turn.mark_at(_ARGUMENTS, at):
            problem = f"expected a list, or a name and {_ARGUMENTS}, after {self.tool_start_token}"
            raise BrokenCallError(at, problem, name, cut=any(mark.startswith(text[at:]) for mark in self.MORE_MARKS))
        decoded = decode_last_arguments(text, at + len(_ARGUMENTS), name)
        end = skip_space(text, decoded.end)
        if end != len(text) and turn.mark_at(MarkKind.CALL_START, end) is None:
            cut = any(mark.startswith(text[end:]) for mark in self.MORE_MARKS)
            raise BrokenCallError(end, f"only {self.tool_start_token} may follow a call", name, cut=cut)
        return CallSpan(end, True, (json_call(name, decoded, native_id).result(text[start.end : decoded.end]),))

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call in either format."""
        native_id = grammar.matching("[a-zA-Z0-9]{9}")
        listed = grammar.sequence(
            grammar.matching(" ?"),
            f'[{{"name": {grammar.constant_text(call.name)}, "arguments": ',
            call.json(),
            grammar.optional(grammar.sequence(', "id": "', native_id, '"')),
            "}]",
        )
        with_id = grammar.optional(grammar.sequence(_CALL_ID, native_id))
        named = grammar.sequence(call.name, with_id, _ARGUMENTS, call.json())
        return grammar.sequence(call.start, grammar.either([listed, named]))


def _listed_call(item: DecodedJSON) -> Call:
    native_id = item.value.get("id") if isinstance(item.value, dict) else None
    extra = {"id": lambda value: isinstance(value, str) and _NATIVE_ID.fullmatch(value) is not None}
    return call_from_json(item, extra=extra, native_id=native_id)
