"""What a tool parser is, and what it returns.

Tool calls are parsed as they were generated: nothing is repaired and nothing is guessed. What does not parse becomes a
result that is an error: it has a name that no tool has, empty input, the text that was written and a sentence about
what was wrong with it, so that the model gets to see its mistake and nothing runs.

`ToolParser` is the interface; a subclass needs `parse(text)` and nothing else.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Any, ClassVar

from .reading.structure import (
    CallSpan,
    Mark,
    MarkedText,
    MarkKind,
    Span,
    SpanKind,
    locate_marks,
    take_apart,
)
from .reading.texts import reasoning_text, visible_text

MAX_CALLS = 1000
"""Calls of one turn that are read; each is a task for the agent. From the next one on, all is one malformed call."""

RAW_SHOWN = 2000
"""Characters of an unparsable call that the model gets to see again."""


class ToolCallStatus(str, Enum):
    """How a tool call came out of the parser."""

    OK = "ok"
    """The call is complete and well formed."""

    MALFORMED = "malformed"
    """The call does not follow its format, or a value is not of the type that the tool declares."""

    UNTERMINATED = "unterminated"
    """The call begins but its end never comes."""

    UNKNOWN_TOOL = "unknown_tool"
    """The call is well formed, and goes to something that no agent's tool can be, such as a built-in of the model."""

    NOT_AN_OBJECT = "not_an_object"
    """The arguments are JSON, but not an object of named arguments."""


# Apart from the `random` module's own generator, which training code seeds alike in all its processes.
_ids = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.seed)


def new_tool_call_id() -> str:
    """Return an id that no other tool call has, in this process or another one."""
    return f"call_{_ids.getrandbits(128):032x}"


@dataclass(frozen=True, slots=True)
class ToolParseResult:
    """One tool call that a model made, or tried to make.

    Attributes:
        id: Globally unique; agents run two calls of one id both, and confuse their results.
        name: The tool to run; `UNKNOWN_NAME` for errors, so that nothing can run.
        input: The arguments; empty for errors.
        raw: Exactly what did not parse; None for a good call.
        error: One sentence for the model about what was wrong; None for a good call.
        status: What kind of result this is; from `raw` if left out.
        native_id: The id that the model itself wrote, in formats that have one.
        attempted_name: For errors, the name that the model seems to have called, as far as it can be told.
    """

    UNKNOWN_NAME: ClassVar[str] = "unknown_tool"

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    error: str | None = None
    status: ToolCallStatus = None  # type: ignore[assignment]  # set below, from `raw`
    native_id: str | None = None
    attempted_name: str | None = None

    def __post_init__(self) -> None:
        """Derive the status.

        Raises:
            ValueError: There is no id or name, the input is no dict, another value is no string, or `status` and `raw`
                contradict each other.
        """
        if not (isinstance(self.id, str) and self.id and isinstance(self.name, str) and self.name):
            raise ValueError(f"a tool call needs an id and a name, but has id={self.id!r}, name={self.name!r}")
        if not isinstance(self.input, dict):
            raise ValueError(f"the input of a tool call is a dict of arguments, not {self.input!r}")
        for name in ("raw", "error", "native_id", "attempted_name"):  # they are saved with the call
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"the {name} of a tool call is a string or None, not {getattr(self, name)!r}")
        if self.status is None:
            object.__setattr__(self, "status", ToolCallStatus.MALFORMED if self.is_error else ToolCallStatus.OK)
        if (self.status is ToolCallStatus.OK) is (self.raw is not None):
            raise ValueError(f"status={self.status.value!r} contradicts raw={self.raw!r}: errors have raw text")

    @classmethod
    def from_parse_error(
        cls,
        id: str,
        raw: str,
        name: str | None = None,
        *,
        error: str | None = None,
        status: ToolCallStatus = ToolCallStatus.MALFORMED,
    ) -> ToolParseResult:
        """Return the result for a call that did not parse.

        Args:
            id: Id of the call.
            raw: Exactly what did not parse.
            name: Name that the result has; `UNKNOWN_NAME` if left out, which is what keeps tools from running.
            error: One sentence about what was wrong.
            status: Any status but `OK`.
        """
        return cls(
            id=id, name=name or cls.UNKNOWN_NAME, raw=raw, error=error, status=status, attempted_name=name or None
        )

    @property
    def is_error(self) -> bool:
        """Whether the call did not parse."""
        return self.raw is not None

    @property
    def payload(self) -> str:
        """The arguments as JSON text for a good call, what the model wrote for an error."""
        return json.dumps(self.input) if self.raw is None else self.raw


@dataclass(frozen=True)
class ParsedTurn:
    """One sampled turn, taken apart.

    Attributes:
        reasoning: The text inside reasoning marks, also if the prompt opened it or nothing closed it; None if there was
            none but white space.
        text: What a user sees: no reasoning, no markup of tool calls. White space that only separated it from removed
            markup is gone, everything else is untouched.
        tool_calls: The calls in the order in which they were made. All that is behind the first `MAX_CALLS` is one
            malformed call.
        ends_in_reasoning: The turn ends inside reasoning that nothing closed, be it empty.
    """

    reasoning: str | None
    text: str
    tool_calls: tuple[ToolParseResult, ...]
    ends_in_reasoning: bool = False


class ToolParser(ABC):
    """Finds the tool calls in what a model sampled.

    A subclass needs `parse(self, text)` alone; `parse_turn` passes on those of the other arguments that it accepts.

    Attributes:
        tool_start_token: The mark before every call.
        tool_end_token: The mark behind every call.
        think_start_token: The mark before reasoning.
        think_end_token: The mark behind reasoning.
    """

    DEFAULT_TOOL_START_TOKEN: ClassVar[str] = "<tool_call>"
    DEFAULT_TOOL_END_TOKEN: ClassVar[str] = "</tool_call>"
    DEFAULT_THINK_START_TOKEN: ClassVar[str] = "<think>"
    DEFAULT_THINK_END_TOKEN: ClassVar[str] = "</think>"

    # On the class as well, for subclasses that do not call `__init__`.
    tool_start_token: str = DEFAULT_TOOL_START_TOKEN
    tool_end_token: str = DEFAULT_TOOL_END_TOKEN
    think_start_token: str = DEFAULT_THINK_START_TOKEN
    think_end_token: str = DEFAULT_THINK_END_TOKEN

    def __init__(
        self,
        tool_start_token: str = DEFAULT_TOOL_START_TOKEN,
        tool_end_token: str = DEFAULT_TOOL_END_TOKEN,
        think_start_token: str = DEFAULT_THINK_START_TOKEN,
        think_end_token: str = DEFAULT_THINK_END_TOKEN,
    ) -> None:
        """Name the marks; an empty one is never found."""
        self.tool_start_token = tool_start_token
        self.tool_end_token = tool_end_token
        self.think_start_token = think_start_token
        self.think_end_token = think_end_token

    @abstractmethod
    def parse(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
    ) -> list[ToolParseResult]:
        """Return the tool calls of a turn.

        Args:
            text: The turn as the server decoded it, without its stop token.
            token_ids: The sampled ids, shape `(T,)`, without the stop token. With them and `tokenizer`, marks that are
                single tokens are recognised by id.
            tokenizer: The model's tokenizer.
            tools: Strands tool specs (`name`, `inputSchema`), from which formats without types take those of values.
                Whether a tool of the call's name is among them is the agent's to find out.
            reasoning_open: The prompt ended inside reasoning.
        """

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
        """Take a sampled turn apart into reasoning, text and tool calls.

        This default serves subclasses that only have `parse`: reasoning is split off by its marks, `parse` gets the
        rest, and the text is the rest without what stands between the marks of calls.

        Args:
            text: As for `parse`.
            token_ids: As for `parse`.
            tokenizer: As for `parse`.
            tools: As for `parse`.
            reasoning_open: As for `parse`.
            truncated: The turn was cut off (length, abort) rather than ended by the model.
        """
        turn = self.locate_marks(text, token_ids, tokenizer)
        spans, unclosed = take_apart(turn, partial(_skip_call, turn), reasoning_open=reasoning_open)
        # A call that never ends is text unless `parse` says something else about it.
        spans = [
            Span(SpanKind.TEXT, span.start, span.end) if span.kind is SpanKind.CALL and not span.call else span
            for span in spans
        ]
        reasoning = reasoning_text(turn, spans)
        spoken = _without_reasoning(turn, spans)
        # Ids belong to the whole turn; they say nothing about a part of it.
        optional: dict[str, Any] = {"tools": tools}
        if spoken == text:
            optional.update(token_ids=token_ids, tokenizer=tokenizer)
        accepted = _accepted_keywords(type(self).parse)
        calls = self.parse(spoken, **{name: value for name, value in optional.items() if name in accepted})
        return ParsedTurn(reasoning, visible_text(turn, spans), tuple(calls), unclosed)

    @property
    def tool_pattern(self) -> re.Pattern[str]:
        """What stands between the marks of a call, in its first group; for subclasses with a simple format."""
        return re.compile(rf"{re.escape(self.tool_start_token)}\s*(.*?)\s*{re.escape(self.tool_end_token)}", re.DOTALL)

    @property
    def think_pattern(self) -> re.Pattern[str]:
        """A stretch of closed reasoning with its marks; for subclasses that are given whole turns."""
        return re.compile(rf"{re.escape(self.think_start_token)}.*?{re.escape(self.think_end_token)}", re.DOTALL)

    def render_error(self, result: ToolParseResult) -> str:
        """Return what the model gets to see as the result of a call that did not parse.

        Args:
            result: A result with `is_error`.
        """
        raw = result.raw or ""
        if len(raw) > RAW_SHOWN:
            head, tail = raw[: RAW_SHOWN * 3 // 4], raw[-RAW_SHOWN // 4 :]
            raw = f"{head}\n[... {len(raw) - len(head) - len(tail)} characters left out ...]\n{tail}"
        error = result.error or "the call could not be parsed"
        shown = f"The tool call was not run: {error}. What was written:\n{raw}"
        # Half a surrogate pair could not be encoded into the next prompt.
        return shown.encode("utf-8", "replace").decode("utf-8")

    def locate_marks(self, text: str, token_ids: Sequence[int] | None, tokenizer: Any) -> MarkedText:
        """Find this parser's marks in a turn, by token id where that is possible."""
        spellings = {
            MarkKind.CALL_START: self.tool_start_token,
            MarkKind.CALL_END: self.tool_end_token,
            MarkKind.THINK_START: self.think_start_token,
            MarkKind.THINK_END: self.think_end_token,
        }
        return locate_marks(text, spellings, token_ids=token_ids, tokenizer=tokenizer)


def _skip_call(turn: MarkedText, start: Mark) -> CallSpan:
    """Pass over a call up to its end mark, without reading it; the result tells whether there is one."""
    end = turn.find(MarkKind.CALL_END, start.end)
    return CallSpan(len(turn.text), False, False) if end is None else CallSpan(end.end, True, True)


def _without_reasoning(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the turn without reasoning, a newline in its place so that what was around it cannot grow into a mark."""
    stretches: list[list[str]] = [[]]
    for span in spans:
        if span.kind is SpanKind.REASONING:
            stretches.append([])
        else:
            stretches[-1].append(turn.text[span.start : span.end])
    return "\n".join(stretch for pieces in stretches if (stretch := "".join(pieces)))


@lru_cache(maxsize=256)
def _accepted_keywords(parse: Callable[..., Any]) -> frozenset[str]:
    """Return which of `parse`'s optional arguments an implementation takes."""
    optional = frozenset({"token_ids", "tokenizer", "tools"})
    parameters = inspect.signature(parse).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return optional
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return optional & {parameter.name for parameter in parameters if parameter.kind in named}
