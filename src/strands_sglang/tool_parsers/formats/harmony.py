"""The Harmony format of gpt-oss: a turn is a row of messages on channels, and a call is one that has a recipient.

    <|channel|>analysis<|message|>Reasoning.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

The prompt ends with `<|start|>assistant`, so that the turn begins inside the first header; templates write the
recipient before the channel, models behind it. `analysis` is reasoning, what is said on the other channels to nobody in
particular is text. `<|call|>` and `<|return|>` are stop tokens: the last message of a turn is seen without its end.
A call that is not exactly one takes the rest of the turn with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base import MAX_CALLS, ParsedTurn, ToolCallStatus, ToolParser, ToolParseResult
from ..reading.json_calls import json_call
from ..reading.listed import is_cut
from ..reading.marked import failed_call, too_many_calls
from ..reading.marks import DetailedText, locate_details
from ..reading.values import InvalidValueError, decode_json, shorten, skip_space
from ..registry import register_tool_parser

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKS = dict.fromkeys((_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN))
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s?to=(?P<before>[^\s<]+))?\s?<\|channel\|>(?P<channel>\w+)"
    r"(?:\s?to=(?P<behind>[^\s<]+))?(?:\s?(?:<\|constrain\|>\s?)?(?P<type>\w+))?\s?"
)
_RECIPIENT = re.compile(r"\s?\bto=([^\s<]+)")
_LONGEST_HEADER = 1000  # characters
_FUNCTIONS = "functions."


@register_tool_parser("harmony")
class HarmonyToolParser(ToolParser):
    """Reads gpt-oss' turns: messages on channels, calls to `functions.NAME` with JSON arguments."""

    def __init__(self) -> None:
        """Take no marks: Harmony's are fixed."""
        super().__init__(_CHANNEL, _CALL, _CHANNEL + "analysis" + _MESSAGE, _END)

    def parse(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
    ) -> list[ToolParseResult]:
        """Return the tool calls of a turn; see `ToolParser.parse`."""
        turn = self.parse_turn(
            text, token_ids=token_ids, tokenizer=tokenizer, tools=tools, reasoning_open=reasoning_open
        )
        return list(turn.tool_calls)

    def parse_turn(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
        truncated: bool = False,
    ) -> ParsedTurn:
        """Take a sampled turn apart; see `ToolParser.parse_turn`. Texts of several messages are joined by newlines."""
        turn = locate_details(text, _MARKS, token_ids=token_ids, tokenizer=tokenizer)
        text, position = turn.text, 0
        reasoning: list[str] = []
        spoken: list[str] = []
        calls: list[ToolParseResult] = []
        unclosed = False

        def take(into: list[str], begin: int, *ends: str) -> int:
            nonlocal unclosed
            stops = [stop for end in ends if (stop := turn.find_detail(end, begin)) is not None]
            stop = min(stops, default=len(text))
            into.append(text[begin:stop])
            unclosed = into is reasoning and not stops
            return stop + len(next((end for end in ends if turn.detail_at(end, stop)), ""))

        if reasoning_open:
            position = take(reasoning, 0, _END)
        while position < len(text):
            header = _read_header(turn, position)
            spoken.append(text[position : header.start].strip())  # what stands before a header belongs to no message
            if header.recipient is not None and len(calls) == MAX_CALLS:
                calls.append(too_many_calls(text[header.start :]))
                position = len(text)
            elif header.recipient is not None:
                call, position = _read_call(turn, header, truncated)
                calls.append(call)
            elif header.channel == "analysis":
                position = take(reasoning, header.end, _END)
            else:
                position = take(spoken, header.end, _END, _RETURN, _CALL)
        thoughts = "\n".join(part for part in reasoning if part.strip())
        shown = "\n".join(part for part in spoken if part.strip())
        return ParsedTurn(thoughts or None, shown, tuple(calls), unclosed)


class _Header(NamedTuple):
    """What stands before a message's content; `problem` if it is no header of a call."""

    start: int
    end: int
    recipient: str | None
    channel: str | None
    problem: str | None


def _read_header(turn: DetailedText, position: int) -> _Header:
    """Return the header of the next message: what it is about, and where the message's content begins."""
    text = turn.text
    message = turn.find_detail(_MESSAGE, position)
    stop = len(text) if message is None else message
    marks = [at for mark in (_START, _CHANNEL) if (at := turn.find_detail(mark, position)) is not None and at < stop]
    start = position if position == 0 and _RECIPIENT.match(text) else min(marks, default=stop)
    written = text[start:stop]
    match = _HEADER.fullmatch(written) if message is not None and len(written) <= _LONGEST_HEADER else None
    if match is not None and turn.detail_at(_CHANNEL, start + match.start("channel") - len(_CHANNEL)):
        before, behind, content_type = match.group("before", "behind", "type")
        problem = None
        if before and behind:
            problem = "a call has one recipient"
        elif match.group("channel") != "commentary":
            problem = "calls go to the commentary channel"
        elif content_type not in (None, "json"):
            problem = f"the arguments of a call are json, not {content_type}"
        return _Header(start, stop + len(_MESSAGE), before or behind, match.group("channel"), problem)
    recipient = _RECIPIENT.search(written)
    channel = "analysis" if f"{_CHANNEL}analysis" in written else None
    begin = stop if message is None else stop + len(_MESSAGE)
    problem = "there is no message" if message is None else "its header is not one"
    return _Header(start, begin, recipient and recipient.group(1), channel, problem)


def _read_call(turn: DetailedText, header: _Header, truncated: bool) -> tuple[ToolParseResult, int]:
    """Return the call behind a header that has a recipient, and where the next message begins."""
    text = turn.text
    recipient = header.recipient or ""
    name = recipient.removeprefix(_FUNCTIONS)

    def broken(error: str, cut: bool = False) -> tuple[ToolParseResult, int]:
        if cut:
            error = f"the turn {'was cut off' if truncated else 'ended'} before the call did ({error})"
        status = ToolCallStatus.UNTERMINATED if cut else ToolCallStatus.MALFORMED
        return failed_call(text[header.start :], error, status, name), len(text)

    if header.problem is not None:
        return broken(header.problem, header.end == len(text))
    try:
        decoded = decode_json(text, skip_space(text, header.end))
    except InvalidValueError as error:
        return broken(f"the arguments are not valid JSON: {error}", is_cut(text, error))
    end = skip_space(text, decoded.end)
    if turn.detail_at(_CALL, end):
        end = skip_space(text, end + len(_CALL))
        if end != len(text) and not turn.detail_at(_START, end):
            return broken(f"only another message may follow {_CALL}")
    elif end != len(text):
        return broken(f"{_CALL} must follow the arguments")
    elif truncated:
        return broken(f"{_CALL} is missing", True)
    raw = text[header.start : end]
    if not recipient.startswith(_FUNCTIONS) or not name:
        wrong = f"there is no tool {shorten(recipient)}; tools are called as {_FUNCTIONS}NAME"
        return failed_call(raw, wrong, ToolCallStatus.UNKNOWN_TOOL, recipient), end
    return json_call(name, decoded, raw), end
