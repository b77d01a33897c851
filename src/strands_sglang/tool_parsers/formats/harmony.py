"""The Harmony format of gpt-oss: a turn is a series of messages on channels, and a call is a message to a recipient.

    <|channel|>analysis<|message|>Reasoning.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

The prompt ends with `<|start|>assistant`, so the turn begins inside the first header. Templates write the recipient
before the channel, models after it. Messages on `analysis` are reasoning; messages on other channels without a
recipient are text. `<|call|>` and `<|return|>` are stop tokens, so the last message of a turn has no end. A malformed
call takes the rest of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import (
    BrokenCallError,
    Call,
    CallSpan,
    Mark,
    MarkedText,
    MarkKind,
    ReadCall,
    Span,
    SpanKind,
    ToolCallStatus,
    decode_last_arguments,
    json_call,
    shorten,
    skip_space,
)

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s?to=(?P<before>[^\s<]+))?\s?<\|channel\|>(?P<channel>\w+)"
    r"(?:\s?to=(?P<after>[^\s<]+))?(?:\s?(?:<\|constrain\|>\s?)?(?P<type>\w+))?\s?"
)
_RECIPIENT = re.compile(r"\s?\bto=([^\s<]+)")
_LONGEST_HEADER = 1000  # characters
_FUNCTIONS = "functions."


@register_tool_parser("harmony")
class HarmonyToolParser(ToolParser):
    """Parser for gpt-oss, which writes the Harmony format.

    A turn is a series of messages on channels. `analysis` is reasoning; a message to `functions.NAME` is a call with
    JSON arguments; messages without a recipient are text:

    ```text
    <|channel|>analysis<|message|>I should search.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}<|call|>
    ```

    The marks are fixed.
    """

    BEFORE_CALL = ""
    AFTER_REASONING = "<|start|>assistant"

    def __init__(self) -> None:
        """Set Harmony's marks."""
        super().__init__(_CHANNEL, _CALL, _CHANNEL + "analysis" + _MESSAGE, _END)

    def kinds_of_marks(self) -> dict[str, str]:
        """Return the marks, which delimit messages rather than reasoning or calls."""
        return {mark: mark for mark in (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)}

    def take_apart(self, turn: MarkedText, read_call: ReadCall, reasoning_open: bool) -> tuple[list[Span], bool]:
        """Split a turn into its messages; see `ToolParser.take_apart`."""
        text, position = turn.text, 0
        spans: list[Span] = []
        unclosed = False

        def take(kind: SpanKind, begin: int, *ends: str) -> int:
            nonlocal unclosed
            found = [mark for end in ends if (mark := turn.find(end, begin)) is not None]
            stop = min(found, key=lambda mark: mark.start, default=Mark(_END, len(text), len(text)))
            spans.append(Span(kind, begin, stop.start))
            unclosed = kind is SpanKind.REASONING and not found
            return stop.end

        if reasoning_open:
            position = take(SpanKind.REASONING, 0, _END)
        while position < len(text):
            header = _read_header(turn, position)
            before = text[position : header.start]  # text outside messages
            begin = position + len(before) - len(before.lstrip())
            spans.append(Span(SpanKind.TEXT, begin, begin + len(before.strip())))
            if header.recipient is not None:
                position, _, calls = read_call(Mark(MarkKind.CALL_START, header.start, header.start))
                spans.append(Span(SpanKind.CALL, header.start, position, calls or ()))
            elif header.channel == "analysis":
                position = take(SpanKind.REASONING, header.end, _END)
            else:
                position = take(SpanKind.TEXT, header.end, _END, _RETURN, _CALL)
        return spans, unclosed

    def texts_of(self, turn: MarkedText, spans: Sequence[Span]) -> tuple[str, str]:
        """Return the reasoning and the visible text, with messages joined by newlines."""

        def joined(kind: SpanKind) -> str:
            parts = (turn.text[span.start : span.end] for span in spans if span.kind is kind)
            return "\n".join(part for part in parts if part.strip())

        return joined(SpanKind.REASONING), joined(SpanKind.TEXT)

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read a message with a recipient."""
        text, header = turn.text, _read_header(turn, start.start)
        recipient = header.recipient or ""
        name = recipient.removeprefix(_FUNCTIONS)
        if header.problem is not None:
            raise BrokenCallError(header.end, header.problem, name, cut=header.end == len(text))
        decoded = decode_last_arguments(text, header.end, name)
        end = skip_space(text, decoded.end)
        if (stop := turn.mark_at(_CALL, end)) is not None:
            end = skip_space(text, stop.end)
            if end != len(text) and turn.mark_at(_START, end) is None:
                raise BrokenCallError(end, f"only another message may follow {_CALL}", name, cut=False)
        elif end != len(text):
            raise BrokenCallError(end, f"expected {_CALL} after the arguments", name, cut=False)
        elif turn.truncated:
            raise BrokenCallError(end, f"{_CALL} is missing", name, cut=True)
        call = json_call(name, decoded)
        if not recipient.startswith(_FUNCTIONS) or not name:
            problem = f"there is no tool {shorten(recipient)}; call tools as {_FUNCTIONS}NAME"
            call = Call(recipient, error=problem, status=ToolCallStatus.UNKNOWN_TOOL)
        return CallSpan(end, True, (call.result(text[header.start : end]),))

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Write a message that calls a function."""
        recipient = f" to={_FUNCTIONS}{call.name}"
        return grammar.sequence(
            grammar.either([f"{_CHANNEL}commentary{recipient}", f"{recipient}{_CHANNEL}commentary"]),
            grammar.either([f" {_CONSTRAIN}json", " json"]),
            _MESSAGE,
            call.json(),
        )


class _Header(NamedTuple):
    """The header of a message; `problem` says why it is not the header of a call."""

    start: int
    end: int
    recipient: str | None
    channel: str | None
    problem: str | None


def _read_header(turn: MarkedText, position: int) -> _Header:
    """Return the header of the next message; it ends where the content begins."""
    text = turn.text
    message = turn.find(_MESSAGE, position)
    stop, end = (len(text), len(text)) if message is None else message[1:]
    marks = [mark.start for kind in (_START, _CHANNEL) if (mark := turn.find(kind, position)) is not None]
    start = position if position == 0 and _RECIPIENT.match(text) else min([*marks, stop])
    written = text[start:stop]
    match = _HEADER.fullmatch(written) if message is not None and len(written) <= _LONGEST_HEADER else None
    if match is not None and turn.mark_at(_CHANNEL, start + match.start("channel") - len(_CHANNEL)):
        before, after, content_type = match.group("before", "after", "type")
        problem = None
        if before and after:
            problem = "a call must have one recipient"
        elif match.group("channel") != "commentary":
            problem = "calls must be on the commentary channel"
        elif content_type not in (None, "json"):
            problem = f"the arguments of a call must be json, not {content_type}"
        return _Header(start, end, before or after, match.group("channel"), problem)
    recipient = _RECIPIENT.search(written)
    channel = "analysis" if f"{_CHANNEL}analysis" in written else None
    problem = "there is no message" if message is None else "the header is not valid"
    return _Header(start, end, recipient and recipient.group(1), channel, problem)
