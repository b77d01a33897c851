"""What a tool parser is, and where one is found: by name, or by the model family of a chat template.

`ToolParser` finds what is reasoning, what is text and where calls are, in the same way for every format. A format says
what its marks are, how calls are read after their start mark, and how one is written where a grammar forces it. A
parser of one's own needs `parse(text)` and nothing else.
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
    doubtful_calls,
    find_marks,
    reasoning_text,
    take_apart,
    visible_text,
    without_reasoning,
)
from .reading.values import tool_schemas
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
"""Characters of an unparsable call that the model gets to see again."""

# The call that is written (`tool_choice.choice.CallWriter`), what makes parts of a grammar (the module
# `tool_choice.grammar`), and such a part.
Writer = Any
Grammar = Any
Element = Any


class CallFormat(Protocol):
    """How the calls of a format are read and written, where several formats have that in common."""

    def read(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read calls; see `ToolParser.read_call`."""

    def write(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call; see `ToolParser.write_call`."""


class ToolParser:
    """Finds the tool calls in what a model sampled.

    A parser of one's own needs `parse(self, text)` alone; `parse_turn` passes on those of the other arguments that it
    accepts.

    Attributes:
        tool_start_token: The mark before every call.
        tool_end_token: The mark after every call.
        think_start_token: The mark before reasoning.
        think_end_token: The mark after reasoning.
        CALLS: Reads and writes the calls of a format that has no `read_call` and `write_call` of its own.
        FORMAT_TOKENS: The tokens that marks inside calls consist of, or that the marks around calls and reasoning
            contain. Those that the vocabulary lacks are recognised by their characters.
        MORE_MARKS: The kind of every other mark by its spelling; that of a mark inside calls is its spelling.
        OPENER: What stands before a call that no mark announces (white space, and what is only looked at), where the
            turn or the text after reasoning begins; None if there are no such calls.
        BEFORE_CALL: Pattern of the white space that a model may write before a call.
        THOUGHT: What belongs to the mark that opens reasoning.
        AFTER_REASONING: What stands between reasoning and a call beside that.
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
        """Refuse a class that has neither `parse` nor a format.

        Raises:
            TypeError: It has none.
        """
        parser = super().__new__(cls)
        if not parser._has_format and cls.parse is ToolParser.parse:
            raise TypeError(f"{cls.__name__} has no parse(text), so it is no tool parser")
        return parser

    def __init__(
        self,
        tool_start_token: str | None = None,
        tool_end_token: str | None = None,
        think_start_token: str | None = None,
        think_end_token: str | None = None,
    ) -> None:
        """Name the marks; those of the format where None. An empty one is never found.

        Raises:
            ValueError: A mark around calls is empty, and the format cannot do without it.
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
                raise ValueError(f"{type(self).__name__} needs a mark before and a mark behind every call")

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
        """Take a sampled turn apart into reasoning, text and tool calls.

        In a parser that only has `parse`, that gets the turn without its reasoning, and the text is what stands outside
        of reasoning and of the marks of calls.

        Args:
            text: As for `parse`.
            token_ids: As for `parse`.
            tokenizer: As for `parse`.
            tools: As for `parse`.
            reasoning_open: As for `parse`.
            truncated: The turn was cut off (length, abort) rather than ended by the model.
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
                return _broken_off(turn, start, broken)

        spans, unclosed = self.take_apart(turn, read_call, reasoning_open)
        reasoning, visible = self.texts_of(turn, spans)
        if self._has_format:
            doubtful = doubtful_calls(turn, spans)
            calls = [
                self._refused(turn.text[span.start : span.end], call) if index in doubtful else call
                for index, span in enumerate(spans)
                for call in span.calls
            ]
        else:
            spoken = without_reasoning(turn, spans)
            # Ids belong to the whole turn; they say nothing about a part of it.
            of_turn = {"token_ids": token_ids, "tokenizer": tokenizer} if spoken == text else {}
            accepted = _accepted_keywords(type(self).parse)
            given = {name: value for name, value in {"tools": tools, **of_turn}.items() if name in accepted}
            calls = self.parse(spoken, **given)
        return ParsedTurn(reasoning or None, visible, tuple(calls), unclosed)

    def kinds_of_marks(self) -> dict[str, str]:
        """Return the kind of every mark of the format by its spelling."""
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
        """Tell whether what begins at `position`, after `OPENER`, is a call; nothing was said before it."""
        return True

    def take_apart(self, turn: MarkedText, read_call: ReadCall, reasoning_open: bool) -> tuple[list[Span], bool]:
        """Cut a turn into reasoning, text and calls; see `reading.marks.take_apart`."""
        return take_apart(turn, read_call, reasoning_open)

    def texts_of(self, turn: MarkedText, spans: Sequence[Span]) -> tuple[str, str]:
        """Return the reasoning and the visible text."""
        return reasoning_text(turn, spans), visible_text(turn, spans)

    def read_call(self, turn: MarkedText, start: Mark) -> CallSpan:
        """Read the calls after a start mark.

        Args:
            turn: The whole turn.
            start: The start mark.

        Raises:
            BrokenCallError: A call stops following the format.
        """
        if self.CALLS is not None:
            return self.CALLS.read(turn, start)
        # A parser that has `parse` reads them there; what never ends is text unless it says something else.
        end = turn.find(MarkKind.CALL_END, start.end)
        return CallSpan(len(turn.text), False, None) if end is None else CallSpan(end.end, True, ())

    def write_call(self, call: Writer, grammar: Grammar) -> Element:
        """Return the element of a grammar that matches one call, with everything around it.

        Args:
            call: The call.
            grammar: Makes elements.

        Raises:
            NotImplementedError: There is no grammar for the schema of the tool.
        """
        if self.CALLS is None:
            raise NotImplementedError
        return self.CALLS.write(call, grammar)

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

    def _refused(self, raw: str, call: ToolParseResult) -> ToolParseResult:
        """Return a call as an error because its end cannot be told."""
        if call.is_error:
            return call
        error = f"a {self.tool_end_token} behind this call closes nothing, so it cannot be told where the call ends"
        return failed_call(raw, error, ToolCallStatus.MALFORMED, call.name, call.native_id)


def _broken_off(turn: MarkedText, start: Mark, broken: BrokenCallError) -> CallSpan:
    """Return the span of a call that stops following its format, with the calls before it."""
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
    """Return which of `parse`'s optional arguments an implementation takes."""
    parameters = inspect.signature(parse).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    return frozenset(name for name in ("token_ids", "tokenizer", "tools") if takes_any or name in named)


AUTO = "auto"
"""In place of a name: the parser of the model family."""

TOOL_PARSER_REGISTRY: dict[str, type[ToolParser]] = {}
"""The parser classes by name."""

ParserT = TypeVar("ParserT", bound=ToolParser)


class UnknownToolParserError(KeyError, ValueError):
    """No tool parser is registered under that name, or none is known for a model family."""

    def __str__(self) -> str:
        """Return the message (a `KeyError` would put it in quotes)."""
        return str(self.args[0])


def register_tool_parser(name: str) -> Callable[[type[ParserT]], type[ParserT]]:
    """Return a decorator that registers a parser class under `name`, in place of an earlier one."""

    def register(parser: type[ParserT]) -> type[ParserT]:
        TOOL_PARSER_REGISTRY[name] = parser
        return parser

    return register


def get_tool_parser(name: str, *, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any) -> ToolParser:
    """Return a new parser by name.

    Args:
        name: A registered name, such as `hermes` or `qwen_xml`, or `auto` for the parser of the model family that the
            chat template belongs to.
        tokenizer: For `auto`: the model's tokenizer, whose chat template is looked at. Of several named templates that
            is `tool_use`, or else `default`.
        chat_template: For `auto`: the text of the chat template (or its name, if the tokenizer has several) in place of
            the tokenizer's own.
        **kwargs: Arguments of the parser class.

    Raises:
        UnknownToolParserError: No parser has that name, or `auto` finds none (it is a `ValueError` and a `KeyError`).
    """
    if isinstance(name, type):
        raise TypeError(
            f"a tool parser is an object or a name, and {name.__name__} is a class: make one, {name.__name__}()"
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
            given = "one without a chat template" if tokenizer is not None else "none"
            problem = (
                f"the tool parser {AUTO!r} needs a tokenizer with a chat template, and was given {given}: "
                "pass tokenizer= or chat_template=, or name the tool parser"
            )
        elif family is None:
            problem = f"the chat template belongs to no known model family: name the tool parser in place of {AUTO!r}"
        elif family.tool_parser is None:
            problem = (
                f"no tool parser is known for the model family {family.name!r}: "
                f"name one in place of {AUTO!r}, or register one of your own"
            )
        else:
            return get_tool_parser(family.tool_parser, **kwargs)
    elif name in TOOL_PARSER_REGISTRY:
        return TOOL_PARSER_REGISTRY[name](**kwargs)
    else:
        problem = f"there is no tool parser named {name!r}"
    raise UnknownToolParserError(f"{problem}; the tool parsers are: {', '.join(sorted(TOOL_PARSER_REGISTRY))}")
