"""The base of the formats in which arguments stand between tags as plain text, and calls in a section.

Nothing is escaped in such a format. A list or an object, where no string is allowed, ends where its JSON does, whatever
stands in its strings. Any other value ends at the first end tag behind which the section goes on as one does:
with the next parameter, or with the end of the call and then the next call or the end of the section. All other text
may stand in a value, except what could as well be the rest of a call whose value was never closed: the end of a call
with what follows there, and the opening tag of a parameter where the format puts one. Such a call is refused, as is one
with an end tag on its line behind which the call goes on, and another one, as the format writes it, further on.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from ..base import ToolCallStatus, ToolParseResult
from .arguments import find_value_end, nested_value_end
from .marked import ToolSchemas, failed_call
from .nested import NestedText
from .schemas import property_schema
from .sections import BrokenCallError, SectionCall, SectionToolParser
from .structure import MarkedText, MarkKind
from .values import shorten, skip_space

_SPACE = r"[ \t\n\r]*"


class Tags(NamedTuple):
    """The tags of a format, as patterns.

    Attributes:
        call: Opens a call; its group `name` is the tool.
        call_end: Closes a call.
        parameter: Opens a parameter; its group `key` is its name, its group `type` its type if the format has types.
        parameter_end: Closes a parameter.
        unclosed: An opening tag of a parameter that cannot be part of a value.
        value_end: The end of a value, with what follows.
        end_line: The same with a line break behind the tag, where the format has one.
    """

    call: re.Pattern[str]
    call_end: re.Pattern[str]
    parameter: re.Pattern[str]
    parameter_end: str
    unclosed: re.Pattern[str]
    value_end: re.Pattern[str]
    end_line: re.Pattern[str] | None

    @classmethod
    def of(cls, call: str, call_end: str, parameter: str, parameter_end: str, *, before_parameter: str = "") -> Tags:
        """Return the tags from their patterns and the spellings of the end tags.

        Args:
            call: Pattern with the group `name`.
            call_end: Spelling.
            parameter: Pattern with the groups `key` and perhaps `type`.
            parameter_end: Spelling.
            before_parameter: What the format puts before a parameter's opening tag, so that the tag is text elsewhere.
        """
        call_ends = rf"{re.escape(call_end)}(?P<space>{_SPACE})"
        follows = rf"(?P<next>{parameter})|{call_ends}"
        return cls(
            re.compile(call),
            re.compile(re.escape(call_end)),
            re.compile(parameter),
            parameter_end,
            re.compile(rf"{before_parameter}{parameter}|{call_ends}"),
            re.compile(rf"{re.escape(parameter_end)}{_SPACE}(?={follows})"),
            re.compile(rf"{re.escape(parameter_end)}\n(?={follows})") if before_parameter == "\n" else None,
        )


class TaggedToolParser(SectionToolParser):
    """A format with parameters between tags; a subclass gives the tags and says what the values are."""

    TAGS: ClassVar[Tags]

    @abstractmethod
    def make_result(
        self, name: str, values: Mapping[str, tuple[str | None, str]], raw: str, tools: ToolSchemas | None
    ) -> ToolParseResult:
        """Return the result for a call that is complete.

        Args:
            name: Name of the tool as it was written.
            values: Type (None in formats without) and text of every argument.
            raw: The call as it was written.
            tools: Schema of every tool by name; None if the tools are not known.
        """

    def nested_end(self, text: str, parameter: re.Match[str], schema: Any) -> int | None:
        """Return where a value ends that is a list or an object; None for any other.

        Args:
            text: The turn.
            parameter: The opening tag of the parameter.
            schema: Schema of the tool's input; None if it is not known.
        """
        return nested_value_end(text, parameter.end(), property_schema(schema, parameter["key"], schema), schema)

    def read_inner_call(self, turn: NestedText, position: int, tools: ToolSchemas | None) -> SectionCall:
        """Read one call; see `SectionToolParser.read_inner_call`."""
        tags, text = self.TAGS, turn.text
        call = turn.match(tags.call, position)
        if call is None:
            raise BrokenCallError(position, "the opening tag of a call belongs here")
        name = call["name"]
        schema = None if tools is None else tools.get(name)
        values: dict[str, tuple[str | None, str]] = {}
        repeated: str | None = None
        at = skip_space(text, call.end())
        while (parameter := turn.match(tags.parameter, at)) is not None:
            key = parameter["key"]
            # A call with a key twice is refused anyway.
            nested = None if key in values else self.nested_end(text, parameter, schema)
            unclosed = (tags.unclosed, self._goes_on)
            end, _ = find_value_end(turn, parameter.end(), nested, [(tags.value_end, self._goes_on)], unclosed)
            if end is not None and end.start() != nested and tags.end_line is not None:
                ended, _ = find_value_end(turn, end.start(), None, [(tags.end_line, self._goes_on)], unclosed)
                if ended is not None and ended.start() != end.start():
                    error = f"it cannot be told which {tags.parameter_end} ends parameter {shorten(key)}"
                    raise BrokenCallError(ended.start(), error, name)
            if end is None:
                error = f"the value of parameter {shorten(key)} is not closed by {tags.parameter_end}"
                raise BrokenCallError(parameter.end(), error, name)
            repeated = key if key in values and repeated is None else repeated
            values[key] = (parameter.groupdict().get("type"), text[parameter.end() : end.start()])
            at = end.end()
        end = turn.match(tags.call_end, at)
        if end is None:
            raise BrokenCallError(at, "only a parameter or the end of the call may stand here", name)
        raw = text[position : end.end()]
        if repeated is None:
            result = self.make_result(name, values, raw, tools)
        else:
            result = failed_call(raw, f"parameter {shorten(repeated)} is there twice", ToolCallStatus.MALFORMED, name)
        return SectionCall(position, end.end(), result)

    def _goes_on(self, turn: MarkedText, match: re.Match[str]) -> bool:
        """Tell whether a tag is one: it is real, and what must follow the end of a call follows it."""
        assert isinstance(turn, NestedText)
        if match["space"] is None:
            follows = match.groupdict().get("next")
            return turn.is_real(match.start(), match.end() if follows is None else match.end("next"))
        behind = match.end("space")
        if not turn.is_real(match.start(), behind):
            return False
        return turn.mark_at(MarkKind.CALL_END, behind) is not None or turn.match(self.TAGS.call, behind) is not None
