"""What a call is once it is read, and the shapes that calls have in several formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..results import (
    MAX_CALLS,
    BrokenCallError,
    ToolCallStatus,
    ToolParseResult,
    failed_call,
    new_tool_call_id,
    too_many_calls,
)
from .marks import Mark, MarkedText, MarkKind
from .structure import CallSpan
from .values import DecodedJSON, InvalidValueError, decode_json, shorten, skip_space


class Call(NamedTuple):
    """A complete call.

    Attributes:
        name: Name of the tool as it was written; None if it has none.
        arguments: The arguments.
        error: What is wrong with it; None for a good call.
        status: Of a call that is wrong.
        native_id: The id that the model wrote.
    """

    name: str | None
    arguments: Any = None
    error: str | None = None
    status: ToolCallStatus = ToolCallStatus.MALFORMED
    native_id: str | None = None

    def result(self, raw: str) -> ToolParseResult:
        """Return the result; `raw` is the call as it was written."""
        if self.error is None and self.name is not None:
            return ToolParseResult(new_tool_call_id(), self.name, self.arguments, native_id=self.native_id)
        return failed_call(raw, self.error or "", self.status, self.name, self.native_id)


def json_call(name: str, arguments: DecodedJSON, native_id: str | None = None) -> Call:
    """Return a call whose arguments are JSON."""
    if arguments.problem is not None:
        return Call(name, error=f"the arguments are not valid JSON: {arguments.problem}", native_id=native_id)
    if not isinstance(arguments.value, dict):
        error = "the arguments must be a JSON object"
        return Call(name, error=error, status=ToolCallStatus.NOT_AN_OBJECT, native_id=native_id)
    return Call(name, arguments.value, native_id=native_id)


def call_from_json(
    call: Any,
    problem: str | None = None,
    *,
    arguments: str = "arguments",
    others: Mapping[str, Callable[[Any], bool]] = {},  # noqa: B006 - never changed
    native_id: str | None = None,
) -> Call:
    """Return a call that is a JSON object of a name and arguments.

    Args:
        call: The decoded object.
        problem: What is wrong with it although its syntax is right.
        arguments: The key of the arguments, which may be left out.
        others: Further keys that may be there, each with a test of its value.
        native_id: The id that the model wrote.
    """
    if not isinstance(call, dict):
        return Call(None, error="a call must be a JSON object")
    name = call.get("name")
    name = name if isinstance(name, str) and name else None
    if problem is not None:
        return Call(name, error=f"the call is not valid JSON: {problem}")
    if name is None:
        return Call(name, error='the call must have a "name" that is a string')
    for key, value in call.items():
        if key not in ("name", arguments) and not (key in others and others[key](value)):
            only = f'a call has only "name" and "{arguments}"'
            return Call(name, error=f"{only}, but this one has {shorten(key)}: {shorten(str(value))}")
    values = call.get(arguments, {})
    if not isinstance(values, dict):
        return Call(name, error=f'"{arguments}" must be a JSON object', status=ToolCallStatus.NOT_AN_OBJECT)
    return Call(name, values, native_id=native_id)


def read_one(turn: MarkedText, start: Mark, read: Callable[[MarkedText, int], tuple[Call, int]]) -> CallSpan:
    """Read the one call between a start mark and an end mark.

    Args:
        turn: The turn.
        start: The start mark.
        read: Reads the call at a position; returns it and where it ends.
    """
    call, end = read(turn, skip_space(turn.text, start.end))
    close = turn.mark_at(MarkKind.CALL_END, skip_space(turn.text, end))
    if close is None:
        raise BrokenCallError(end, f"{turn.call_end} must follow the call", call.name, call.native_id)
    return CallSpan(close.end, True, (call.result(turn.text[start.end : close.start]),))


def read_section(turn: MarkedText, start: Mark, read: Callable[[MarkedText, int], tuple[Call, int]]) -> CallSpan:
    """Read the calls of a section between a start mark and an end mark.

    Calls before one that is broken stand; that one and what follows it in the section are one error. In a section that
    is never closed the last call is unterminated.

    Args:
        turn: The turn.
        start: The start mark.
        read: Reads the call at a position; returns it and where it ends.
    """
    text, begin = turn.text, start.end
    calls: list[ToolParseResult] = []
    position = skip_space(text, begin)
    try:
        while (close := turn.mark_at(MarkKind.CALL_END, position)) is None:
            if len(calls) == MAX_CALLS:
                return CallSpan(len(text), False, (*calls, too_many_calls(text[position:])))
            if calls and turn.call_end.startswith(text[position : position + len(turn.call_end) + 1]):
                last = calls.pop()
                error, name = "the mark behind the last call is missing", last.attempted_name or last.name
                position, broken_at = begin, position
                raise BrokenCallError(broken_at, error, name, last.native_id)
            call, end = read(turn, position)
            calls.append(call.result(text[position:end]))
            begin, position = position, skip_space(text, end)
        if not calls:
            raise BrokenCallError(position, f"there is no call before {turn.call_end}")
    except BrokenCallError as broken:
        broken.begin, broken.before = position, tuple(calls)
        raise
    return CallSpan(close.end, True, tuple(calls))


@dataclass(frozen=True)
class JSONSection:
    """A section of calls that are a JSON object between a head that names the tool and a tail.

    The JSON is strict, and a mark inside a JSON string belongs to the string: a call ends where its JSON ends.

    Attributes:
        head: What stands before the JSON; its group `name` is the tool, its group `id` the model's own id.
        tail: What stands after the JSON.
        shape: The head in words, for errors.
        written_head: The head as the chat template writes it; `{name}` is the tool, `{number}` a number.
        written_tail: The tail as the chat template writes it.
    """

    head: re.Pattern[str]
    tail: re.Pattern[str]
    shape: str
    written_head: str
    written_tail: str

    def read(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read a section."""
        return read_section(turn, start, self._read_call)

    def _read_call(self, turn: MarkedText, position: int) -> tuple[Call, int]:
        head = turn.match(self.head, position)
        if head is None:
            raise BrokenCallError(position, f"a call begins with {self.shape}")
        name, native_id = head["name"], head.groupdict().get("id")
        try:
            decoded = decode_json(turn.text, head.end())
        except InvalidValueError as error:
            what = f"the arguments are not valid JSON: {error} (character {error.position - head.end()} of them)"
            raise BrokenCallError(error.position, what, name, native_id) from None
        tail = turn.match(self.tail, decoded.end)
        if tail is None:
            raise BrokenCallError(decoded.end, "the JSON of its arguments is not the end of the call", name, native_id)
        return json_call(name, decoded, native_id), tail.end()

    def write(self, call: Any) -> Any:
        """Write a section with one call."""
        before, number, behind = self.written_head.format(name=call.name, number="\0").partition("\0")
        head = (before, call.matching("0|[1-9][0-9]{0,3}"), behind) if number else (before,)
        return call.sequence(call.start, *head, call.json(), self.written_tail, call.end)


def end_of_turn(turn: MarkedText, position: int, what: str, calls: tuple[ToolParseResult, ...]) -> int:
    """Return where calls that the turn ends, or an end mark at its end, end.

    Args:
        turn: The turn.
        position: Behind the calls.
        what: What nothing may follow.
        calls: The calls.

    Raises:
        BrokenCallError: Something else follows.
    """
    close = turn.mark_at(MarkKind.CALL_END, skip_space(turn.text, position))
    end = skip_space(turn.text, position if close is None else close.end)
    if end != len(turn.text):
        raise BrokenCallError(end, f"nothing may follow {what}", name_of(calls), cut=False)
    return end


def read_json_list(
    text: str, start: int, read: Callable[[DecodedJSON], Call]
) -> tuple[tuple[ToolParseResult, ...], int]:
    """Return the calls of the JSON list at `start`, and where it ends.

    Raises:
        InvalidValueError: There is no JSON list, or it has more than `MAX_CALLS` items.
    """
    whole = decode_json(text, start)
    if not isinstance(whole.value, list):
        raise InvalidValueError("the calls must be a list", start)
    if len(whole.value) > MAX_CALLS:
        raise InvalidValueError(f"there are more than {MAX_CALLS} calls", start)
    calls = []
    position = skip_space(text, start + 1)
    for _ in whole.value:
        item = decode_json(text, position)
        calls.append(read(item).result(text[position : item.end]))
        position = skip_space(text, skip_space(text, item.end) + 1)  # past the comma, or the bracket at the end
    return tuple(calls), whole.end


def read_list_to_end(
    turn: MarkedText, start: int, read: Callable[[DecodedJSON], Call], wrong: str = "not a JSON list"
) -> CallSpan:
    """Read a JSON list of calls that ends the turn."""
    try:
        calls, end = read_json_list(turn.text, start, read)
    except InvalidValueError as error:
        raise BrokenCallError(error.position, f"{wrong}: {error}", cut=is_cut(turn.text, error)) from None
    end = end_of_turn(turn, end, "the list of calls", calls)
    if not calls:
        raise BrokenCallError(end, "the list of calls is empty", cut=False)
    return CallSpan(end, True, calls)


def name_of(calls: tuple[ToolParseResult, ...] | list[ToolParseResult]) -> str | None:
    """Return the name of the first of some calls that do not stand."""
    return (calls[0].attempted_name if calls[0].is_error else calls[0].name) if calls else None


def is_cut(text: str, error: InvalidValueError) -> bool:
    """Tell whether a value could not be read because its end is missing."""
    return "nterminated" in str(error) or all(text.find(bracket, error.position) < 0 for bracket in "]})")
