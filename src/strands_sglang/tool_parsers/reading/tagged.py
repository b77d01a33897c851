"""Calls whose arguments stand between tags as plain text.

Nothing is escaped in such a format. A list or an object, where no string is allowed, ends where its JSON does, whatever
stands in its strings. Any other value ends at the first end tag after which the call continues as one does: with the
next parameter, or with the end of the call and then the next call or the end mark. All other text may stand in a value,
except what could as well be the rest of a call whose value was never closed: the end of a call with what follows there,
and the opening tag of a parameter where the format puts one. Such a call is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..results import BrokenCallError
from .calls import Call, read_one, read_section
from .marks import Mark, MarkedText, MarkKind
from .schemas import allowed_types, property_schema
from .structure import CallSpan
from .values import InvalidValueError, decode_json, shorten, skip_space, typed_value

_SPACE = r"[ \t\n\r]*"


def nested_value_end(text: str, position: int, schema: Any, root: Any = None) -> int | None:
    """Return where a list or an object ends, for a parameter that can be no string; None for any other value.

    Its JSON says where it ends, so that tags inside its strings belong to them. However many values are asked for, the
    work is linear in the length of the text: a value inside the strings of two others would have to begin in a string
    of both, and of two values one of which begins in a string of the other, one is outside its strings anywhere.

    Args:
        text: The turn.
        position: Where the value begins, perhaps with white space.
        schema: Schema of the parameter; None if it is not known.
        root: The schema that `$ref`s point into.
    """
    begin = skip_space(text, position)
    if text[begin : begin + 1] not in ("[", "{") or "string" in allowed_types(schema, root):
        return None
    try:
        return skip_space(text, decode_json(text, begin).end)
    except InvalidValueError:
        return None


class TaggedCalls:
    """The tags of a format, from which its calls are read and written. Types come from the tool's JSON schema.

    A declared string is kept as it is, white space included. Without a schema, a value that is JSON (other than a JSON
    string) is that value; any other is its text.
    """

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
        r"""Make the patterns of the tags from their spellings.

        Args:
            call: Opens a call: `{name}` is the tool, `{index}` a number.
            call_end: Closes a call; empty if the end mark does.
            parameter: Opens a parameter: `{key}` is its name, `{type}` its type, a line break any white space.
            parameter_end: Closes a parameter.
            name: Pattern of names of tools.
            key: Pattern of names of parameters; empty for any.
            types: Pattern of types.
            several: All calls stand between two marks, rather than each.
            line: What ends the line of a tag; None where some chat templates write a line break and others do not.
            tag_before: What the format puts before a parameter's opening tag, so that the tag is text elsewhere. Then
                a value whose end tag could be that before this, or a later one, is refused.
            tag_after: What the format puts after it. A value that begins with this ends at an end tag on a line of its
                own if there is one, and does not include these lines.
            python_spellings: Chat templates write `True`, `False` and `None`.
        """
        self.call, self.call_end, self.parameter, self.parameter_end = call, call_end, parameter, parameter_end
        self.key, self.several, self.line, self.tag_after = key, several, line, tag_after
        self.python_spellings = python_spellings
        opening_begins = re.split(r" |\{", parameter)[0]
        self.excludes = tuple(filter(None, (parameter_end, opening_begins, call_end)))
        """What no string of a call that is written may hold."""
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
        """Return the schema of a parameter from its opening tag and the schema of the tool's input."""
        return property_schema(schema, parameter["key"], schema)

    def nested_end(self, text: str, position: int, schema: Any, root: Any) -> int | None:
        """Return where a list or an object at `position` ends; None for any other value."""
        return nested_value_end(text, position, schema, root)

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value that a text means.

        Raises:
            InvalidValueError: It is none of the parameter's type.
        """
        return typed_value(text, schema, root)

    def unescape(self, attribute: str) -> str:
        """Return what a name in a tag means."""
        return attribute

    def escape(self, attribute: str) -> str:
        """Return how a name is written in a tag."""
        return attribute

    def read(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read calls."""
        return (read_section if self.several else read_one)(turn, start, self.read_call)

    def read_call(self, turn: MarkedText, position: int) -> tuple[Call, int]:
        """Return the call at `position`, and where it ends.

        Raises:
            BrokenCallError: There is none, or it is not complete.
        """
        text, call = turn.text, turn.match(self._call, position)
        if call is None:
            raise BrokenCallError(position, f"a call begins with {self.call.format(name='NAME', index=1)}")
        name = self.unescape(call["name"])
        root = None if turn.schemas is None else turn.schemas.get(name)
        values: dict[str, tuple[str, re.Match[str], Any]] = {}
        repeated: str | None = None
        at = skip_space(text, call.end())
        while (parameter := turn.match(self._parameter, at)) is not None:
            key, begin = self.unescape(parameter["key"]), parameter.end()
            schema, nested = None, None
            if key in values:  # refused anyway
                repeated = repeated or key
            else:
                schema = self.schema_of(parameter, root)
                nested = self.nested_end(text, begin, schema, root)
            value_end = self._find_value_end(turn, begin, nested)
            if value_end is None:
                error = f"the value of parameter {shorten(key)} is not closed by {self.parameter_end}"
                shown = self._find(turn, self._unclosed, begin) if self.tag_after else None
                raise BrokenCallError(begin if shown is None else shown.start(), error, name)
            if self._is_doubtful(turn, begin, nested, value_end):
                error = f"it cannot be told which {self.parameter_end} ends parameter {shorten(key)}"
                raise BrokenCallError(value_end.start(), error, name)
            values[key] = text[begin : value_end.start()], parameter, schema
            at = value_end.end()
        end = turn.match(self._call_end, at)
        if end is None:
            raise BrokenCallError(at, f"only a parameter or {self.call_end} may stand here", name)
        if repeated is not None:
            return Call(name, error=f"parameter {shorten(repeated)} is there twice"), end.end()
        arguments = {}
        for key, (value, parameter, schema) in values.items():
            try:
                arguments[key] = self.value(value, parameter, schema, root)
            except InvalidValueError as invalid:
                return Call(name, error=f"parameter {shorten(key)} is wrong: {invalid}"), end.end()
        return Call(name, arguments), end.end()

    def _find(self, turn: MarkedText, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        return turn.find_match(pattern, position, partial(self._continues, turn))

    def _continues(self, turn: MarkedText, match: re.Match[str]) -> bool:
        """Tell whether a tag is one: it is real, and what must follow the end of a call follows it."""
        groups = match.groupdict()
        if groups.get("space") is None:
            return turn.is_real(match.start(), match.end("next") if groups.get("next") else match.end())
        after = match.end("space")
        if not turn.is_real(match.start(), after):
            return False
        return turn.mark_at(MarkKind.CALL_END, after) is not None or (
            self.several and turn.match(self._call, after) is not None
        )

    def _find_value_end(self, turn: MarkedText, begin: int, nested: int | None) -> re.Match[str] | None:
        """Return the end tag of the value at `begin`; `nested` is where it ends by itself, if that is known."""
        if nested is not None:
            end = self._find(turn, self._value_end, nested)
            if end is not None and end.start() == nested:
                return end
        unclosed = self._find(turn, self._unclosed, begin)
        patterns = [self._value_end]
        if self._value_end_on_line is not None and self.tag_after and turn.text.startswith(self.tag_after, begin):
            patterns.insert(0, self._value_end_on_line)
        for pattern in patterns:
            end = self._find(turn, pattern, begin)
            if end is not None and (unclosed is None or end.start() <= unclosed.start()):
                return end
        return None

    def _is_doubtful(self, turn: MarkedText, begin: int, nested: int | None, end: re.Match[str]) -> bool:
        """Tell whether a value could as well end at a later tag, as the format writes it."""
        if self._value_end_on_line is None or self.tag_after or end.start() == nested:
            return False
        later = self._find(turn, self._value_end_on_line, end.start())
        unclosed = self._find(turn, self._unclosed, begin)
        if later is None or later.start() == end.start():
            return False
        return unclosed is None or later.start() <= unclosed.start()

    def write(self, call: Any) -> Any:
        """Write a call."""
        line = call.optional("\n") if self.line is None else self.line
        parameters = []
        for found in call.properties(self.key or None):
            opening, _, after_type = self.parameter.partition("{type}")
            around = self.tag_after and "\n"
            values = [
                call.sequence(f"{kind}{after_type}{around}", value, around)
                for kind, value in self.written_values(call, found.schema).items()
            ]
            pieces = [piece.format(key=self.escape(found.name)) for piece in opening.split("\n")]
            head = [part for piece in pieces for part in (line, piece)][1:]
            parameters.append((call.sequence(*head, call.either(values), self.parameter_end, line), found.required))
        opened = f"{call.start}{self.line or ''}{self.call.format(name=call.name, index=1)}"
        closed = f"{self.call_end}{self.line or ''}{call.end}"
        return call.sequence(opened, line, call.members(parameters), closed)

    def written_values(self, call: Any, schema: Any) -> Mapping[str, Any]:
        """Return what matches the values of a parameter, by their types as the format writes them."""
        return {"": call.plain_value(schema, self.excludes, python_spellings=self.python_spellings)}
