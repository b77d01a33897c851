"""The base of the formats in which one mark, or none at all, opens a list of calls, and in which the turn may end it.

Where nothing marks the end of a call, two things keep text from running: a call that breaks off takes the rest of the
turn with it, and behind the last call there is nothing but white space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ..base import MAX_CALLS, ToolCallStatus, ToolParser, ToolParseResult
from .marked import MarkedToolParser, failed_call
from .marks import DetailedText, locate_details
from .structure import CallSpan, Mark, MarkKind
from .values import DecodedJSON, InvalidValueError, decode_json, skip_space


class ListedToolParser(MarkedToolParser):
    """A format in which one mark may open several calls; `read_call` returns all of them, as a sequence.

    Attributes:
        MORE_MARKS: The format's marks beside those of reasoning and calls.
        OPENER: What stands before a call that no mark announces (white space, and what is only looked at); None if
            there are no such calls.
    """

    MORE_MARKS: ClassVar[Mapping[str, MarkKind | None]] = {}
    OPENER: ClassVar[re.Pattern[str] | None] = None

    def __init__(
        self,
        tool_start_token: str = ToolParser.DEFAULT_TOOL_START_TOKEN,
        tool_end_token: str = "",
        think_start_token: str = ToolParser.DEFAULT_THINK_START_TOKEN,
        think_end_token: str = ToolParser.DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks; an empty one is never found."""
        ToolParser.__init__(self, tool_start_token, tool_end_token, think_start_token, think_end_token)

    def opens_call(self, text: str, position: int) -> bool:
        """Tell whether what begins at `position`, behind `OPENER`, is a call; nothing was said before it."""
        return True

    def locate_marks(self, text: str, token_ids: Sequence[int] | None, tokenizer: Any) -> DetailedText:
        """Find this parser's marks and the calls that begin without one; see `ToolParser.locate_marks`."""
        spellings: dict[str, MarkKind | None] = {
            self.tool_start_token: MarkKind.CALL_START,
            self.tool_end_token: MarkKind.CALL_END,
            self.think_start_token: MarkKind.THINK_START,
            self.think_end_token: MarkKind.THINK_END,
            **self.MORE_MARKS,
        }
        spellings.pop("", None)
        return locate_details(
            text, spellings, token_ids=token_ids, tokenizer=tokenizer, unmarked_calls=self._unmarked_calls
        )

    def _unmarked_calls(self, text: str, marks: list[tuple[str, int]]) -> Iterable[int]:
        """Return where calls without a start mark begin: where the turn does, or right behind reasoning."""
        opener, end = self.OPENER, self.think_end_token
        if opener is None:
            return []
        begins = {
            match.end()
            for position in (0, *(start + len(end) for spelling, start in marks if spelling == end))
            if (match := opener.match(text, position)) is not None
        }
        return [begin for begin in sorted(begins) if self.opens_call(text, begin)]

    def broken_list(
        self, text: str, start: Mark, error: str, *, cut: bool, truncated: bool = False, name: str | None = None
    ) -> CallSpan:
        """Return the span of calls that stop following their format: the rest of the turn, none of which runs.

        Args:
            text: The whole turn.
            start: The mark that opened the calls.
            error: What is wrong.
            cut: Something is missing at the end, rather than wrong.
            truncated: The turn was cut off.
            name: The name that seems to have been called.
        """
        if cut:
            error = f"the turn {'was cut off' if truncated else 'ended'} before the call did ({error})"
        status = ToolCallStatus.UNTERMINATED if cut else ToolCallStatus.MALFORMED
        return CallSpan(len(text), False, (failed_call(text[start.end :], error, status, name),))


def read_json_list(text: str, start: int) -> tuple[list[tuple[DecodedJSON, int]], int]:
    """Return the items of the JSON list at `start`, each with where it begins, and where the list ends.

    Raises:
        InvalidValueError: There is no JSON list, or it has more than `MAX_CALLS` items.
    """
    whole = decode_json(text, start)
    if not isinstance(whole.value, list):
        raise InvalidValueError("the calls must be a list", start)
    if len(whole.value) > MAX_CALLS:
        raise InvalidValueError(f"there are more than {MAX_CALLS} calls", start)
    items = []
    position = skip_space(text, start + 1)
    for _ in whole.value:
        item = decode_json(text, position)
        items.append((item, position))
        position = skip_space(text, skip_space(text, item.end) + 1)  # past the comma, or the bracket at the end
    return items, whole.end


def name_of(calls: Sequence[ToolParseResult]) -> str | None:
    """Return the name of the first of some calls that do not stand."""
    return (calls[0].attempted_name if calls[0].is_error else calls[0].name) if calls else None


def is_cut(text: str, error: InvalidValueError) -> bool:
    """Tell whether a value could not be read because its end is missing."""
    closing = (text.find(bracket, error.position) for bracket in "]})")
    return "nterminated" in str(error) or all(position < 0 for position in closing)
