"""Calls, and readers for the shapes of calls that several formats share.

`TaggedCalls` reads calls whose arguments are plain text between tags. These formats escape nothing. Where the schema
allows no string, a list or an object ends where its JSON ends, whatever its strings contain. Any other value ends at
the first end tag after which the call continues in a valid way: with the next parameter, or with the end of the call
followed by the next call or the end mark. A value may contain any text except text that could also be the rest of a
call whose value was never closed: the end of a call with a valid continuation, or the opening tag of a parameter in its
usual place. Such calls are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
from .marks import CallSpan, Mark, MarkedText, MarkKind
from .schemas import allowed_types, property_schema
from .values import DecodedJSON, InvalidValueError, decode_json, shorten, skip_space, typed_value


class Call(NamedTuple):
    """A complete call.

    Attributes:
        name: Name of the tool as written; None if the call has none.
        arguments: Arguments of the call.
        error: What is wrong with the call; None for a valid call.
        status: Status of an invalid call.
        native_id: Id that the model wrote.
    """

    name: str | None
    arguments: Any = None
    error: str | None = None
    status: ToolCallStatus = ToolCallStatus.MALFORMED
    native_id: str | None = None

    def result(self, raw: str) -> ToolParseResult:
        """Return the result for this call; `raw` is its text."""
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
    decoded: DecodedJSON,
    *,
    arguments: str = "arguments",
    extra: Mapping[str, Callable[[Any], bool]] = {},  # noqa: B006 - never changed
    native_id: str | None = None,
) -> Call:
    """Return a call that is a JSON object with a name and arguments.

    Args:
        decoded: JSON object.
        arguments: Key of the arguments, which the call may omit.
        extra: Further allowed keys, each with a test of its value.
        native_id: Id that the model wrote.
    """
    call = decoded.value
    if not isinstance(call, dict):
        return Call(None, error="a call must be a JSON object")
    name = call.get("name")
    name = name if isinstance(name, str) and name else None
    if decoded.problem is not None:
        return Call(name, error=f"the call is not valid JSON: {decoded.problem}")
    if name is None:
        return Call(name, error='a call must have a string "name"')
    for key, value in call.items():
        if key not in ("name", arguments) and not (key in extra and extra[key](value)):
            allowed = f'a call may only have "name" and "{arguments}"'
            return Call(name, error=f"{allowed}, not {shorten(key)}: {shorten(str(value))}")
    values = call.get(arguments, {})
    if not isinstance(values, dict):
        return Call(name, error=f'"{arguments}" must be a JSON object', status=ToolCallStatus.NOT_AN_OBJECT)
    return Call(name, values, native_id=native_id)


def read_one(turn: MarkedText, start: Mark, read: Callable[[MarkedText, int], tuple[Call, int]]) -> CallSpan:
    """Read the one call between a start mark and an end mark.

    Args:
        turn: Whole turn.
        start: Start mark.
        read: Reads the call at a position and returns it with its end.
    """
    call, end = read(turn, skip_space(turn.text, start.end))
    close = turn.mark_at(MarkKind.CALL_END, skip_space(turn.text, end))
    if close is None:
        raise BrokenCallError(end, f"expected {turn.call_end} after the call", call.name, call.native_id)
    return CallSpan(close.end, True, (call.result(turn.text[start.end : close.start]),))


def read_section(turn: MarkedText, start: Mark, read: Callable[[MarkedText, int], tuple[Call, int]]) -> CallSpan:
    """Read the calls of a section between a start mark and an end mark.

    Calls before a broken call are valid; the broken call and the rest of the section are one error. If the section is
    never closed, its last call is unterminated.

    Args:
        turn: Whole turn.
        start: Start mark.
        read: Reads the call at a position and returns it with its end.
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
                error, name = "the section of calls is not closed", last.attempted_name or last.name
                position, broken_at = begin, position
                raise BrokenCallError(broken_at, error, name, last.native_id)
            call, end = read(turn, position)
            calls.append(call.result(text[position:end]))
            begin, position = position, skip_space(text, end)
        if not calls:
            raise BrokenCallError(position, f"expected a call before {turn.call_end}")
    except BrokenCallError as broken:
        broken.begin, broken.before = position, tuple(calls)
        raise
    return CallSpan(close.end, True, tuple(calls))


@dataclass(frozen=True)
class JSONSection:
    """A section of calls, each a JSON object between a head that names the tool and a tail.

    The JSON is strict. A call ends where its JSON ends, so a mark inside a JSON string belongs to the string.

    Attributes:
        head: Pattern of the text before the JSON. Its group `name` is the tool, its group `id` the model's id.
        tail: Pattern of the text after the JSON.
        shape: Description of the head for error messages.
        written_head: Head as the chat template writes it; `{name}` is the tool, `{number}` a number.
        written_tail: Tail as the chat template writes it.
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
            raise BrokenCallError(position, f"a call must begin with {self.shape}")
        return read_json_call(turn, head.end(), self.tail, head["name"], head.groupdict().get("id"))

    def write(self, call: Any, grammar: Any) -> Any:
        """Write a section with one call."""
        before, number, after = self.written_head.format(name=call.name, number="\0").partition("\0")
        head = (before, grammar.matching("0|[1-9][0-9]{0,3}"), after) if number else (before,)
        return grammar.sequence(call.start, *head, call.json(), self.written_tail, call.end)


def read_json_call(
    turn: MarkedText, begin: int, tail: re.Pattern[str], name: str, native_id: str | None = None
) -> tuple[Call, int]:
    """Return the call whose JSON arguments begin at a position, and the end of the tail after them."""
    try:
        decoded = decode_json(turn.text, begin)
    except InvalidValueError as error:
        problem = f"the arguments are not valid JSON: {error} (character {error.position - begin})"
        raise BrokenCallError(error.position, problem, name, native_id) from None
    end = turn.match(tail, decoded.end)
    if end is None:
        raise BrokenCallError(decoded.end, "expected the end of the call after its arguments", name, native_id)
    return json_call(name, decoded, native_id), end.end()


def decode_last_arguments(text: str, position: int, name: str) -> DecodedJSON:
    """Return the JSON arguments, after white space, of a call that takes the rest of the turn if they are invalid.

    Raises:
        BrokenCallError: The arguments are not valid JSON.
    """
    try:
        return decode_json(text, skip_space(text, position))
    except InvalidValueError as error:
        problem = f"the arguments are not valid JSON: {error}"
        raise BrokenCallError(error.position, problem, name, cut=is_cut(text, error)) from None


def end_of_turn(turn: MarkedText, position: int, what: str, calls: tuple[ToolParseResult, ...]) -> int:
    """Return the end of calls that must be the last text of the turn, an end mark aside.

    Args:
        turn: Whole turn.
        position: Position after the calls.
        what: Description of the calls for the error message.
        calls: Calls that were read.

    Raises:
        BrokenCallError: Other text follows.
    """
    close = turn.mark_at(MarkKind.CALL_END, skip_space(turn.text, position))
    end = skip_space(turn.text, position if close is None else close.end)
    if end != len(turn.text):
        raise BrokenCallError(end, f"nothing may follow {what}", name_of(calls), cut=False)
    return end


def check_count(calls: int, position: int) -> None:
    """Check the number of calls that are read together.

    Raises:
        InvalidValueError: There are more than `MAX_CALLS`.
    """
    if calls > MAX_CALLS:
        raise InvalidValueError(f"a turn may contain at most {MAX_CALLS} calls", position)


def read_json_list(
    text: str, start: int, read: Callable[[DecodedJSON], Call]
) -> tuple[tuple[ToolParseResult, ...], int]:
    """Return the calls of the JSON list at `start`, and the end of the list.

    Raises:
        InvalidValueError: The text at `start` is not a JSON list, or it has more than `MAX_CALLS` items.
    """
    whole = decode_json(text, start)
    if not isinstance(whole.value, list):
        raise InvalidValueError("the calls must be a list", start)
    check_count(len(whole.value), start)
    calls = []
    position = skip_space(text, start + 1)
    for _ in whole.value:
        item = decode_json(text, position)
        calls.append(read(item).result(text[position : item.end]))
        position = skip_space(text, skip_space(text, item.end) + 1)  # past the comma, or the bracket at the end
    return tuple(calls), whole.end


def read_list_to_end(
    turn: MarkedText, start: int, read: Callable[[DecodedJSON], Call], problem: str = "not a JSON list"
) -> CallSpan:
    """Read a JSON list of calls that ends the turn."""
    try:
        calls, end = read_json_list(turn.text, start, read)
    except InvalidValueError as error:
        raise BrokenCallError(error.position, f"{problem}: {error}", cut=is_cut(turn.text, error)) from None
    end = end_of_turn(turn, end, "the list of calls", calls)
    if not calls:
        raise BrokenCallError(end, "the list of calls is empty", cut=False)
    return CallSpan(end, True, calls)


def name_of(calls: tuple[ToolParseResult, ...] | list[ToolParseResult]) -> str | None:
    """Return the tool that the first of some discarded calls names."""
    if not calls:
        return None
    return calls[0].attempted_name if calls[0].is_error else calls[0].name


def is_cut(text: str, error: InvalidValueError) -> bool:
    """Return whether a value could not be read because its end is missing."""
    return error.is_open or all(text.find(bracket, error.position) < 0 for bracket in "]})")


_SPACE = r"[ \t\n\r]*"


class TaggedCalls:
    """Reads and writes calls made of tags. Types come from the tool's JSON schema.

    A declared string is kept unchanged, white space included. Without a schema, a value that is JSON (other than a JSON
    string) is decoded; any other value is its text.

    Attributes:
        literal: Reads a list or an object.
    """

    literal = staticmethod(decode_json)

    def __init__(
        self,
        call: str,
        call_end: str,
        parameter: str,
        parameter_end: str,
        *,
        name: str,
        key: str,
        types: str = "",
        several: bool = True,
        line: str | None = "\n",
        tag_before: str = "",
        tag_after: str = "",
        python_spellings: bool = False,
    ) -> None:
        r"""Compile the patterns of the tags from their spellings.

        Args:
            call: Opening tag of a call; `{name}` is the tool, `{index}` a number.
            call_end: Closing tag of a call; empty if the end mark closes it.
            parameter: Opening tag of a parameter; `{key}` is its name, `{type}` its type, and a line break matches any
                white space.
            parameter_end: Closing tag of a parameter.
            name: Pattern of tool names.
            key: Pattern of parameter names; empty for any name.
            types: Pattern of types.
            several: Whether one pair of marks encloses all calls, rather than each call.
            line: End of the line of a tag; None if some chat templates write a line break and others do not.
            tag_before: Text that the format writes before the opening tag of a parameter; without it, the tag is text.
                A value is then rejected if a later end tag could also be its end.
            tag_after: Text that the format writes after that tag. A value that begins with it ends at an end tag on a
                line of its own if there is one, and does not include these line breaks.
            python_spellings: Whether chat templates write `True`, `False` and `None`.
        """
        self.call, self.call_end, self.parameter, self.parameter_end = call, call_end, parameter, parameter_end
        self.key, self.several, self.line, self.tag_after = key, several, line, tag_after
        self.python_spellings = python_spellings
        opening_begins = re.split(r" |\{", parameter)[0]
        self.excludes = tuple(filter(None, (parameter_end, opening_begins, call_end)))
        """Texts that no string of a written call may contain."""
        groups = {"{name}": f"(?P<name>{name})", "{index}": "[0-9]+", "\n": _SPACE}
        any_name = '[^"]*'
        groups |= {"{key}": f"(?P<key>{key or any_name})", "{type}": f"(?P<type>{types})"}

        def pattern(spelling: str) -> str:
            return "".join(groups.get(part, re.escape(part)) for part in re.split(r"(\{\w+\}|\n)", spelling))

        opening, closing = pattern(parameter), re.escape(parameter_end)
        ends_call = rf"{re.escape(call_end)}(?P<space>{_SPACE})"
        self._call, self._call_end, self._parameter = map(re.compile, (pattern(call), re.escape(call_end), opening))
        self._value_end = re.compile(rf"{closing}{_SPACE}(?=(?P<next>{opening})|{ends_call})")
        line_before = f"(?<={tag_after})" if tag_after else ""
        ends_line = rf"{line_before}{closing}\n(?=(?P<next>{opening}){tag_after}|{ends_call})"
        self._value_end_on_line = re.compile(ends_line) if tag_before or tag_after else None
        unclosed = f"{tag_before}{opening}" + (f"(?={tag_after})" if tag_after else "")
        self._unclosed = re.compile(f"{unclosed}|{ends_call}" if call_end else unclosed)

    def schema_of(self, parameter: re.Match[str], schema: Any) -> Any:
        """Return the schema of a parameter, by its opening tag and the schema of the tool's input."""
        return property_schema(schema, parameter["key"], schema)

    def nested_end(self, text: str, position: int, schema: Any, root: Any) -> int | None:
        """Return the end of a list or an object, for a parameter that cannot be a string; None for any other value.

        Its JSON determines the end, so tags inside its strings belong to them. The work is linear in the length of the
        text for any number of values: a value inside the strings of two others would have to begin in a string of
        both, and if one of two values begins in a string of the other, one is outside its strings everywhere.

        Args:
            text: Whole turn.
            position: Start of the value, perhaps with white space.
            schema: Schema of the parameter; None if unknown.
            root: Schema that `$ref`s point into.
        """
        begin = skip_space(text, position)
        if text[begin : begin + 1] not in ("[", "{") or "string" in allowed_types(schema, root):
            return None
        try:
            return skip_space(text, self.literal(text, begin).end)
        except InvalidValueError:
            return None

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value of a parameter's text.

        Raises:
            InvalidValueError: The text is not a value of the parameter's type.
        """
        return typed_value(text, schema, root)

    def unescape(self, attribute: str) -> str:
        """Return the name that a tag spells."""
        return attribute

    def escape(self, attribute: str) -> str:
        """Return the spelling of a name in a tag."""
        return attribute

    def read(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read calls."""
        return (read_section if self.several else read_one)(turn, start, self.read_call)

    def read_call(self, turn: MarkedText, position: int) -> tuple[Call, int]:
        """Return the call at `position`, and its end.

        Raises:
            BrokenCallError: There is no complete call at `position`.
        """
        text, call = turn.text, turn.match(self._call, position)
        if call is None:
            raise BrokenCallError(position, f"a call must begin with {self.call.format(name='NAME', index=1)}")
        name = self.unescape(call["name"])
        root = None if turn.schemas is None else turn.schemas.get(name)
        values: dict[str, tuple[str, re.Match[str], Any]] = {}
        repeated: str | None = None
        at = skip_space(text, call.end())
        while (parameter := turn.match(self._parameter, at)) is not None:
            key, begin = self.unescape(parameter["key"]), parameter.end()
            schema, nested = None, None
            if key in values:  # rejected below
                repeated = repeated or key
            else:
                schema = self.schema_of(parameter, root)
                nested = self.nested_end(text, begin, schema, root)
            value_end, is_doubtful = self._find_value_end(turn, begin, nested)
            if value_end is None:
                error = f"the value of parameter {shorten(key)} is not closed by {self.parameter_end}"
                shown = self._find(turn, self._unclosed, begin) if self.tag_after else None
                raise BrokenCallError(begin if shown is None else shown.start(), error, name)
            if is_doubtful:
                error = f"it is ambiguous which {self.parameter_end} ends parameter {shorten(key)}"
                raise BrokenCallError(value_end.start(), error, name)
            values[key] = text[begin : value_end.start()], parameter, schema
            at = value_end.end()
        end = turn.match(self._call_end, at)
        if end is None:
            raise BrokenCallError(at, f"expected a parameter or {self.call_end}", name)
        if repeated is not None:
            return Call(name, error=f"parameter {shorten(repeated)} appears more than once"), end.end()
        arguments = {}
        for key, (value, parameter, schema) in values.items():
            try:
                arguments[key] = self.value(value, parameter, schema, root)
            except InvalidValueError as invalid:
                return Call(name, error=f"parameter {shorten(key)} is invalid: {invalid}"), end.end()
        return Call(name, arguments), end.end()

    def _find(self, turn: MarkedText, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        return turn.find_match(pattern, position, partial(self._continues, turn))

    def _continues(self, turn: MarkedText, match: re.Match[str]) -> bool:
        """Return whether a tag is real, and whether the end of a call has a valid continuation."""
        groups = match.groupdict()
        if groups.get("space") is None:
            return turn.is_real(match.start(), match.end("next") if groups.get("next") else match.end())
        after = match.end("space")
        if not turn.is_real(match.start(), after):
            return False
        return turn.mark_at(MarkKind.CALL_END, after) is not None or (
            self.several and turn.match(self._call, after) is not None
        )

    def _find_value_end(self, turn: MarkedText, begin: int, nested: int | None) -> tuple[re.Match[str] | None, bool]:
        """Return the end tag of the value at `begin`, and whether a later tag could be its end too.

        Args:
            turn: Whole turn.
            begin: Start of the value.
            nested: End of the value from `nested_end`.
        """
        if nested is not None:
            end = self._find(turn, self._value_end, nested)
            if end is not None and end.start() == nested:
                return end, False
        unclosed = self._find(turn, self._unclosed, begin)
        last = len(turn.text) if unclosed is None else unclosed.start()
        on_line = self._value_end_on_line
        end = None
        if on_line is not None and self.tag_after and turn.text.startswith(self.tag_after, begin):
            end = self._find(turn, on_line, begin)
        if end is None or end.start() > last:
            end = self._find(turn, self._value_end, begin)
        if end is None or end.start() > last:
            return None, False
        later = None if on_line is None or self.tag_after else self._find(turn, on_line, end.start())
        return end, later is not None and end.start() < later.start() <= last

    def write(self, call: Any, grammar: Any) -> Any:
        """Write a call."""
        line = grammar.optional("\n") if self.line is None else self.line
        parameters = []
        for found in call.properties(self.key or None):
            opening, _, after_type = self.parameter.partition("{type}")
            around = self.tag_after and "\n"
            values = [
                grammar.sequence(f"{kind}{after_type}{around}", value, around)
                for kind, value in self.written_values(call, grammar, found.schema).items()
            ]
            pieces = [piece.format(key=self.escape(found.name)) for piece in opening.split("\n")]
            head = list(chain.from_iterable((line, piece) for piece in pieces))[1:]
            parameters.append(
                (grammar.sequence(*head, grammar.either(values), self.parameter_end, line), found.required)
            )
        opened = f"{call.start}{self.line or ''}{self.call.format(name=call.name, index=1)}"
        closed = f"{self.call_end}{self.line or ''}{call.end}"
        return grammar.sequence(opened, line, grammar.members(parameters), closed)

    def written_values(self, call: Any, grammar: Any, schema: Any) -> Mapping[str, Any]:
        """Return the grammar elements of a parameter's values by type, as the format names types."""
        return {"": grammar.plain_value(schema, self.excludes, python_spellings=self.python_spellings)}
