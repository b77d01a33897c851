"""The formats of Mistral: `[TOOL_CALLS]` opens the calls, and the turn ends them.

Up to Mistral Nemo and Small 3.1 a JSON list follows, `[{"name": "f", "arguments": {...}, "id": "abcDEF123"}, ...]`;
later models write `[TOOL_CALLS]f[ARGS]{...}` per call, Small 3.2 with `[CALL_ID]abcDEF123` before `[ARGS]`. Ids are
nine letters and digits. Reasoning stands between `[THINK]` and `[/THINK]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from ..reading.json_calls import call_from_json, json_call
from ..reading.listed import ListedToolParser, is_cut, name_of, read_json_list
from ..reading.marked import ToolSchemas
from ..reading.marks import DetailedText
from ..reading.structure import CallSpan, Mark, MarkedText, MarkKind
from ..reading.values import InvalidValueError, decode_json, skip_space
from ..registry import register_tool_parser

_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[^\[\]{}\s]{1,256}")
_NATIVE_ID = re.compile(r"[a-zA-Z0-9]{9}")


@register_tool_parser("mistral")
class MistralToolParser(ListedToolParser):
    """Reads Mistral's calls, those of a JSON list and those that are named before their arguments."""

    MORE_MARKS: ClassVar[Mapping[str, MarkKind | None]] = {_ARGUMENTS: None, _CALL_ID: None}

    def __init__(
        self,
        tool_start_token: str = "[TOOL_CALLS]",
        tool_end_token: str = "",
        think_start_token: str = "[THINK]",
        think_end_token: str = "[/THINK]",
    ) -> None:
        """Name the marks; an empty one is never found."""
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)

    def read_call(self, turn: MarkedText, start: Mark, tools: ToolSchemas | None, truncated: bool) -> CallSpan:
        """Read the list or the named call behind a start mark; see `ListedToolParser`."""
        text = turn.text
        begin = skip_space(text, start.end)
        if text.startswith("[", begin) and not cast(DetailedText, turn).detail_at(_ARGUMENTS, begin):
            return self._list(turn, start, begin, truncated)
        return self._named(cast(DetailedText, turn), start, begin, truncated)

    def _list(self, turn: MarkedText, start: Mark, begin: int, truncated: bool) -> CallSpan:
        text = turn.text
        try:
            items, end = read_json_list(text, begin)
        except InvalidValueError as error:
            cut = is_cut(text, error)
            return self.broken_list(text, start, f"not a JSON list: {error}", cut=cut, truncated=truncated)
        calls = []
        for item, at in items:
            native_id = item.value.get("id") if isinstance(item.value, dict) else None
            raw, others = text[at : item.end], {"id": _is_native_id}
            calls.append(call_from_json(item.value, item.problem, raw, others=others, native_id=native_id))
        if (end := skip_space(text, end)) != len(text):
            wrong = "nothing may follow the list of calls"
            return self.broken_list(text, start, wrong, cut=False, name=name_of(calls))
        if not calls:
            return self.broken_list(text, start, "the list of calls is empty", cut=False)
        return CallSpan(end, True, tuple(calls))

    def _named(self, turn: DetailedText, start: Mark, begin: int, truncated: bool) -> CallSpan:
        text = turn.text
        name = _NAME.match(text, begin)
        at = begin if name is None else name.end()
        native_id = None

        def broken(position: int, error: str, cut: bool | None = None) -> CallSpan:
            ended = any(mark.startswith(text[position:]) for mark in (_ARGUMENTS, _CALL_ID)) if cut is None else cut
            attempted = name.group() if name is not None else None
            return self.broken_list(text, start, error, cut=ended, truncated=truncated, name=attempted)

        if turn.detail_at(_CALL_ID, at):
            found = _NATIVE_ID.match(text, at + len(_CALL_ID))
            if found is None:
                return broken(at, "the id of a call is nine letters and digits", len(text) - at < len(_CALL_ID) + 9)
            native_id, at = found.group(), found.end()
        if name is None or not turn.detail_at(_ARGUMENTS, at):
            return broken(at, f"a list, or a name and {_ARGUMENTS}, must follow {self.tool_start_token}")
        try:
            decoded = decode_json(text, skip_space(text, at + len(_ARGUMENTS)))
        except InvalidValueError as error:
            return broken(error.position, f"the arguments are not valid JSON: {error}", is_cut(text, error))
        end = skip_space(text, decoded.end)
        if end != len(text) and turn.mark_at(MarkKind.CALL_START, end) is None:
            return broken(end, f"only {self.tool_start_token} may follow a call")
        result = json_call(name.group(), decoded, text[start.end : decoded.end])
        return CallSpan(end, True, (result if native_id is None else replace(result, native_id=native_id),))


def _is_native_id(value: Any) -> bool:
    return isinstance(value, str) and _NATIVE_ID.fullmatch(value) is not None
