"""The base class of tool parsers, and their registry.

`ToolParser` splits a turn into reasoning, text and calls in the same way for every format. A format defines its marks,
how calls are read after their start mark, and how a grammar writes a call to force one. A custom parser only needs
`parse(text)`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ..families import find_family
from .reading.marks import (
    CallSpan,
    Mark,
    MarkedText,
    MarkKind,
    ReadCall,
    Span,
    SpanKind,
    doubtful_calls,
    find_marks,
    reasoning_text,
    take_apart,
    visible_text,
    without_reasoning,
)
from .reading.schemas import tool_schemas
from .results import (
    MAX_CALLS,
    BrokenCallError,
    ParsedTurn,
    ToolCallStatus,
    ToolParseResult,
    failed_call,
    too_many_calls,
)

if TYPE_CHECKING:
    from typing_extensions import Self

RAW_SHOWN = 2000
"""Characters of a failed call that the error message to the model repeats."""

WRITTEN_AS = "It was written as:\n"
"""What comes before them."""

# A `tool_choice.choice.CallWriter`, the module `tool_choice.grammar`, and an element of a grammar.
Writer = Any
Grammar = Any
Element = Any


class CallFormat(Protocol):
    """Reads and writes the calls of one or more formats."""

    def read(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read calls; see `ToolParser.read_call`."""

    def write(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call; see `ToolParser.write_call`."""


class ToolParser:
    """Base class of tool parsers, which read the tool calls in sampled text.

    Calls are parsed as the model wrote them. Nothing is repaired or guessed: a call that does not follow its format
    becomes a [`ToolParseResult`][strands_sglang.ToolParseResult] with `is_error`, which runs no tool. Text inside
    reasoning is never a call.

    A custom parser only needs `parse(self, text)`. It may also accept `token_ids`, `tokenizer` and `tools` as keyword
    arguments; `parse_turn` passes those that the signature accepts. A parser that defines `read_call` or `CALLS`
    inherits `parse` from this class.

    A mark is a delimiter such as `<tool_call>` or `</think>`. The arguments of the constructor are also attributes.

    Attributes:
        CALLS: Reader and writer of the format's calls, unless the class overrides `read_call` and `write_call`.
        FORMAT_TOKENS: Tokens that marks are made of, both inside calls and around calls and reasoning. A token that is
            not in the vocabulary is recognized by its characters.
        MORE_MARKS: Further marks, as a mapping from spelling to kind. The kind of a mark inside calls is its spelling.
        OPENER: Pattern of what precedes a call that has no start mark, matched at the start of the turn and after
            reasoning. None if every call has a start mark.
        BEFORE_CALL: Pattern of the white space that a model may write before a call.
        THOUGHT: Text that belongs to the mark that opens reasoning.
        AFTER_REASONING: Text between reasoning and a call, besides white space.
    """

    DEFAULT_TOOL_START_TOKEN: ClassVar[str] = "<tool_call>"
    DEFAULT_TOOL_END_TOKEN: ClassVar[str] = "</tool_call>"
    DEFAULT_THINK_START_TOKEN: ClassVar[str] = "<think>"
    DEFAULT_THINK_END_TOKEN: ClassVar[str] = "</think>"

    CALLS: ClassVar[CallFormat | None] = None
    FORMAT_TOKENS: ClassVar[tuple[str, ...]] = ()
    MORE_MARKS: ClassVar[Mapping[str, str]] = {}
    OPENER: ClassVar[re.Pattern[str] | None] = None
    BEFORE_CALL: ClassVar[str] = r"\n{0,3}"
    THOUGHT: ClassVar[str] = ""
    AFTER_REASONING: ClassVar[str] = ""

    # On the class as well, for subclasses that do not call `__init__`.
    tool_start_token: str = DEFAULT_TOOL_START_TOKEN
    tool_end_token: str = DEFAULT_TOOL_END_TOKEN
    think_start_token: str = DEFAULT_THINK_START_TOKEN
    think_end_token: str = DEFAULT_THINK_END_TOKEN

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Reject a class that defines neither `parse` nor a format."""
        parser = super().__new__(cls)
        if not parser._has_format and cls.parse is ToolParser.parse:
            raise TypeError(f"{cls.__name__} must define parse(text) to be a tool parser")
        return parser

    def __init__(
        self,
        tool_start_token: str | None = None,
        tool_end_token: str | None = None,
        think_start_token: str | None = None,
        think_end_token: str | None = None,
    ) -> None:
        """Set the marks; None uses the format's own.

        Args:
            tool_start_token: Mark before a call.
            tool_end_token: Mark after a call.
            think_start_token: Mark before reasoning; if empty, it is never found.
            think_end_token: Mark after reasoning; if empty, it is never found.

        Raises:
            TypeError: The class defines neither `parse` nor a format.
            ValueError: A mark around calls is empty although the format needs it.
        """
        marks = {
            "tool_start_token": (self.DEFAULT_TOOL_START_TOKEN, tool_start_token),
            "tool_end_token": (self.DEFAULT_TOOL_END_TOKEN, tool_end_token),
            "think_start_token": (self.DEFAULT_THINK_START_TOKEN, think_start_token),
            "think_end_token": (self.DEFAULT_THINK_END_TOKEN, think_end_token),
        }
        for name, (default, given) in marks.items():
            setattr(self, name, default if given is None else given)
            if name.startswith("tool") and default and given == "" and self._has_format and self.OPENER is None:
                raise ValueError(f"{type(self).__name__} needs a tool_start_token and a tool_end_token")

    @property
    def _has_format(self) -> bool:
        return self.CALLS is not None or type(self).read_call is not ToolParser.read_call

    def parse(
        self,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning_open: bool = False,
    ) -> list[ToolParseResult]:
        """Return the tool calls of a turn, in order.

        Args:
            text: Turn as the server decoded it, without its stop token.
            token_ids: Sampled token ids, shape `(T,)`, without the stop token. With `tokenizer`, marks that are single
                tokens are recognized by id, so ordinary tokens that decode to the same characters are text.
            tokenizer: Tokenizer of the model.
            tools: Strands tool specs (`name`, `inputSchema`). Formats that write values as plain text take the types
                from them. Calls to tools that are not listed are returned too; the agent rejects them.
            reasoning_open: Whether the prompt ended inside reasoning.
        """
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
        """Split a sampled turn into reasoning, text and tool calls.

        If the class only defines `parse`, that method receives the turn without its reasoning, and the visible text is
        everything outside reasoning and outside the marks of calls.

        Args:
            text: Turn as the server decoded it, without its stop token.
            token_ids: Sampled token ids, shape `(T,)`, without the stop token; see `parse`.
            tokenizer: Tokenizer of the model.
            tools: Strands tool specs; see `parse`.
            reasoning_open: Whether the prompt ended inside reasoning.
            truncated: Whether the turn was cut off (length limit, abort) rather than ended by the model.
        """
        shown, marks, look_alikes = find_marks(
            text, self.kinds_of_marks(), self.FORMAT_TOKENS, token_ids=token_ids, tokenizer=tokenizer
        )
        if self.OPENER is not None:
            begins = [0, *(mark.end for mark in marks if mark.kind is MarkKind.THINK_END)]
            opened = {match.end() for begin in begins if (match := self.OPENER.match(shown, begin)) is not None}
            unmarked = [Mark(MarkKind.CALL_START, at, at) for at in sorted(opened) if self.opens_call(shown, at)]
            marks = sorted([*marks, *unmarked], key=lambda mark: mark.start)
        schemas = None if tools is None else tool_schemas(tools)
        turn = MarkedText(shown, marks, look_alikes, schemas, truncated, self.tool_end_token)
        calls_read = 0

        def read_call(start: Mark) -> CallSpan:
            nonlocal calls_read
            calls_read += 1
            if calls_read > MAX_CALLS and self._has_format:
                return CallSpan(len(turn.text), False, (too_many_calls(turn.text[start.start :]),))
            try:
                return self.read_call(turn, start)
            except BrokenCallError as broken:
                return _broken_span(turn, start, broken)

        spans, unclosed = self.take_apart(turn, read_call, reasoning_open)
        reasoning, visible = self.texts_of(turn, spans)
        if self._has_format:
            doubtful = doubtful_calls(turn, spans)
            calls = []
            for index, span in enumerate(spans):
                if index in doubtful:
                    calls += [self._ambiguous(turn.text[span.start : span.end], call) for call in span.calls]
                else:
                    calls += span.calls
        else:
            remaining = without_reasoning(turn, spans)
            # The ids are those of the whole turn, so they do not fit a part of it.
            ids = {"token_ids": token_ids, "tokenizer": tokenizer} if remaining == text else {}
            accepted = _accepted_keywords(type(self).parse)
            keywords = {name: value for name, value in {"tools": tools, **ids}.items() if name in accepted}
            calls = self.parse(remaining, **keywords)
        has_reasoning = any(span.kind is SpanKind.REASONING for span in spans)
        return ParsedTurn(reasoning or None, visible, tuple(calls), unclosed, has_reasoning)

    def kinds_of_marks(self) -> dict[str, str]:
        """Return the marks of the format, as a mapping from spelling to kind."""
        kinds: dict[str, str] = {
            self.tool_start_token: MarkKind.CALL_START,
            self.tool_end_token: MarkKind.CALL_END,
            self.think_start_token: MarkKind.THINK_START,
            self.think_end_token: MarkKind.THINK_END,
            **self.MORE_MARKS,
        }
        kinds.pop("", None)
        return kinds

    def opens_call(self, text: str, position: int) -> bool:
        """Return whether a call without a start mark begins at a position.

        Args:
            text: Whole turn.
            position: End of a match of `OPENER`.
        """
        return True

    def take_apart(self, turn: MarkedText, read_call: ReadCall, reasoning_open: bool) -> tuple[list[Span], bool]:
        """Split a turn into spans of reasoning, text and calls.

        Args:
            turn: Whole turn.
            read_call: Reads the calls after a start mark.
            reasoning_open: Whether the prompt ended inside reasoning.

        Returns:
            The spans in order, and whether the turn ends inside reasoning that nothing closed.
        """
        return take_apart(turn, read_call, reasoning_open)

    def texts_of(self, turn: MarkedText, spans: Sequence[Span]) -> tuple[str, str]:
        """Return the reasoning and the visible text of a turn.

        Args:
            turn: Whole turn.
            spans: Spans from `take_apart`.
        """
        return reasoning_text(turn, spans), visible_text(turn, spans)

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the calls after a start mark.

        Args:
            turn: Whole turn.
            start: Start mark.

        Returns:
            The calls, and where reading continues.

        Raises:
            BrokenCallError: A call does not follow the format.
        """
        if self.CALLS is not None:
            return self.CALLS.read(turn, start)
        # The class reads calls in `parse`. A call without an end mark is text unless `parse` returns it.
        end = turn.find(MarkKind.CALL_END, start.end)
        return CallSpan(len(turn.text), False, None) if end is None else CallSpan(end.end, True, ())

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Return the grammar element that matches one complete call, marks included.

        Args:
            call: Call to match: the tool's name, its schema and the marks.
            grammar: Module whose functions make grammar elements.

        Raises:
            NotImplementedError: No grammar can express the call or the schema of its tool.
        """
        if self.CALLS is None:
            raise NotImplementedError
        return self.CALLS.write(call, grammar)

    @property
    def tool_pattern(self) -> re.Pattern[str]:
        """Pattern of a call with its marks; the first group is the text between them. For a custom `parse`."""
        return re.compile(rf"{re.escape(self.tool_start_token)}\s*(.*?)\s*{re.escape(self.tool_end_token)}", re.DOTALL)

    @property
    def think_pattern(self) -> re.Pattern[str]:
        """Pattern of closed reasoning with its marks. For a custom `parse`."""
        return re.compile(rf"{re.escape(self.think_start_token)}.*?{re.escape(self.think_end_token)}", re.DOTALL)

    def render_error(self, result: ToolParseResult) -> str:
        """Return the tool result that the model receives for a call that did not parse.

        Args:
            result: Failed call. Long calls are shortened in the middle.
        """
        raw = result.raw or ""
        if len(raw) > RAW_SHOWN:
            head, tail = raw[: RAW_SHOWN * 3 // 4], raw[-RAW_SHOWN // 4 :]
            raw = f"{head}\n[... {len(raw) - len(head) - len(tail)} characters omitted ...]\n{tail}"
        error = result.error or "the call could not be parsed"
        shown = f"The tool call was not run: {error}. {WRITTEN_AS}{raw}"
        # A lone surrogate could not be encoded into the next prompt.
        return shown.encode("utf-8", "replace").decode("utf-8")

    def _ambiguous(self, raw: str, call: ToolParseResult) -> ToolParseResult:
        """Return an error for a call whose end is ambiguous; leave errors unchanged."""
        if call.is_error:
            return call
        error = f"an unmatched {self.tool_end_token} follows this call, so the end of the call is ambiguous"
        return failed_call(raw, error, ToolCallStatus.MALFORMED, call.name, call.native_id)


def _broken_span(turn: MarkedText, start: Mark, broken: BrokenCallError) -> CallSpan:
    """Return the span of a call that does not follow its format, with the valid calls before it."""
    error, status = str(broken), ToolCallStatus.MALFORMED
    end = turn.find(MarkKind.CALL_END, broken.position) if broken.cut is None else None
    if broken.cut or (broken.cut is None and end is None):
        missing = turn.call_end if broken.cut is None else "the call did"
        error = f"the turn {'was cut off' if turn.truncated else 'ended'} before {missing} ({error})"
        status = ToolCallStatus.UNTERMINATED
    begin = start.end if broken.begin is None else broken.begin
    stop, resume = (len(turn.text), len(turn.text)) if end is None else (end.start, end.end)
    failed = failed_call(turn.text[begin:stop], error, status, broken.name, broken.native_id)
    return CallSpan(resume, False, (*broken.before, failed))


@lru_cache(maxsize=256)
def _accepted_keywords(parse: Callable[..., Any]) -> frozenset[str]:
    """Return the optional arguments that an implementation of `parse` accepts."""
    parameters = inspect.signature(parse).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    return frozenset(name for name in ("token_ids", "tokenizer", "tools") if takes_any or name in named)


AUTO = "auto"
"""Name that selects the parser of the model family; see [`get_tool_parser`][strands_sglang.get_tool_parser]."""

TOOL_PARSER_REGISTRY: dict[str, type[ToolParser]] = {}
"""Registered parser classes by name."""

ParserT = TypeVar("ParserT", bound=ToolParser)


class UnknownToolParserError(KeyError, ValueError):
    """No tool parser is registered under a name, or none is known for a model family."""

    def __str__(self) -> str:
        """Return the message, which `KeyError` would put in quotes."""
        return str(self.args[0])


def register_tool_parser(name: str) -> Callable[[type[ParserT]], type[ParserT]]:
    """Register a parser class; use as a class decorator.

    Args:
        name: Name under which [`get_tool_parser`][strands_sglang.get_tool_parser] finds the class. An earlier class of
            that name is replaced.

    Examples:
        ```python
        @register_tool_parser("lines")
        class LinesToolParser(ToolParser):
            def parse(self, text): ...
        ```
    """

    def register(parser: type[ParserT]) -> type[ParserT]:
        TOOL_PARSER_REGISTRY[name] = parser
        return parser

    return register


def get_tool_parser(name: str, *, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any) -> ToolParser:
    """Return a new parser by name.

    Args:
        name: Registered name, such as `hermes` or `qwen_xml`. `auto` selects the parser of the model family that the
            chat template belongs to.
        tokenizer: Tokenizer of the model; only used by `auto`. If it has several chat templates, `auto` looks at
            `tool_use`, or else at `default`.
        chat_template: Text of the chat template, or its name if the tokenizer has several; only used by `auto`. None
            uses the tokenizer's own.
        **kwargs: Arguments of the parser class.

    Raises:
        UnknownToolParserError: No parser has that name, or `auto` finds none. The error is a `ValueError` and a
            `KeyError`.
        TypeError: `name` is a class.
    """
    if isinstance(name, type):
        raise TypeError(
            f"a tool parser is a name or an instance, but {name.__name__} is a class: pass {name.__name__}()"
        )
    if name == AUTO:
        templates = getattr(tokenizer, "chat_template", None)
        if not isinstance(templates, Mapping):
            template = templates if chat_template is None else chat_template
        elif chat_template is None:
            template = templates.get("tool_use", templates.get("default"))
        else:
            template = templates.get(chat_template, chat_template)
        family = None if template is None else find_family(template)
        if template is None:
            given = "a tokenizer without one" if tokenizer is not None else "no tokenizer"
            problem = (
                f"the tool parser {AUTO!r} needs a chat template, but got {given}: "
                "pass tokenizer= or chat_template=, or name a tool parser"
            )
        elif family is None:
            problem = f"the chat template belongs to no known model family: name a tool parser instead of {AUTO!r}"
        elif family.tool_parser is None:
            problem = (
                f"no tool parser is known for the model family {family.name!r}: "
                f"name one instead of {AUTO!r}, or register your own"
            )
        else:
            return get_tool_parser(family.tool_parser, **kwargs)
    elif name in TOOL_PARSER_REGISTRY:
        return TOOL_PARSER_REGISTRY[name](**kwargs)
    else:
        problem = f"there is no tool parser named {name!r}"
    raise UnknownToolParserError(f"{problem}; the tool parsers are: {', '.join(sorted(TOOL_PARSER_REGISTRY))}")
