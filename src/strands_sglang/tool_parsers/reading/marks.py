"""The structure of a sampled turn: its marks, and its spans of reasoning, visible text and tool calls.

Marks: a mark (`<think>`, `</tool_call>`, ...) that is a single token of the vocabulary is recognized by its token id.
Ordinary tokens that decode to the same characters are text, and so is every longer mark that contains them. Without
ids, or for marks that the vocabulary spells with several tokens, the characters decide.

Reasoning: text inside reasoning is never a call, so spans are found before calls are read. Text after an opening mark,
or after a prompt that opened reasoning, is reasoning up to the next closing mark, or up to the end if there is none. A
closing mark that nothing opened closes reasoning that was opened out of sight: all text before it is reasoning, draft
calls included. Inside a call that parses, marks are part of its arguments.

The work is linear in the length of the turn, also for hostile text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..results import ToolParseResult


class MarkKind(str, Enum):
    """The role of a mark."""

    CALL_START = "call_start"
    CALL_END = "call_end"
    THINK_START = "think_start"
    THINK_END = "think_end"
    WRAPPER = "wrapper"
    """Encloses visible text without being part of it."""

    __hash__ = str.__hash__  # the hash of enums is Python code, too slow for a hundred thousand marks


class Mark(NamedTuple):
    """A mark in a turn and its half-open character range `[start, end)`.

    The kind of a mark inside calls is its spelling.
    """

    kind: str
    start: int
    end: int


_start_of_mark = itemgetter(1)
_start_of_match = re.Match.start


class MarkedText:
    """The text of a turn with its marks and the other information that formats need.

    Attributes:
        text: Whole turn, marks included.
        marks: Marks around reasoning, calls and visible text, in order of position.
        schemas: JSON schema of each tool's input by tool name; None if the tools are unknown.
        truncated: Whether the turn was cut off.
        call_end: Spelling of the mark after calls.
    """

    def __init__(
        self,
        text: str,
        marks: Iterable[Mark],
        look_alikes: Sequence[int],
        schemas: Mapping[str, Any] | None,
        truncated: bool,
        call_end: str,
    ) -> None:
        """Index the marks.

        Args:
            text: Whole turn, marks included.
            marks: All marks, in order of position.
            look_alikes: Positions where ordinary tokens only look like a token of the format, in order.
            schemas: JSON schema of each tool's input by tool name; None if the tools are unknown.
            truncated: Whether the turn was cut off.
            call_end: Spelling of the mark after calls.
        """
        self.text, self.schemas, self.truncated, self.call_end = text, schemas, truncated, call_end
        self.marks: list[Mark] = []
        self._of_kind: defaultdict[str, list[Mark]] = defaultdict(list)
        for mark in marks:
            self._of_kind[mark.kind].append(mark)
            if isinstance(mark.kind, MarkKind):
                self.marks.append(mark)
        self._look_alikes = look_alikes
        self._matches: dict[re.Pattern[str], list[re.Match[str]]] = {}

    def find(self, kind: str, position: int) -> Mark | None:
        """Return the first mark of `kind` that starts at or after `position`."""
        marks = self._of_kind[kind]
        index = bisect_left(marks, position, key=_start_of_mark)
        return marks[index] if index < len(marks) else None

    def find_last(self, kind: str, position: int) -> Mark | None:
        """Return the last mark of `kind` that starts before `position`."""
        marks = self._of_kind[kind]
        index = bisect_left(marks, position, key=_start_of_mark)
        return marks[index - 1] if index else None

    def mark_at(self, kind: str, position: int) -> Mark | None:
        """Return the mark of `kind` that starts exactly at `position`."""
        mark = self.find(kind, position)
        return mark if mark is not None and mark.start == position else None

    def is_real(self, start: int, end: int) -> bool:
        """Return whether no look-alike begins in `[start, end)`."""
        here = self._look_alikes
        return not here or bisect_left(here, start) == bisect_left(here, end)

    def match(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """Return the match of `pattern` at `position`; None if there is none or it contains a look-alike."""
        match = pattern.match(self.text, position)
        return match if match is not None and self.is_real(*match.span()) else None

    def find_match(
        self, pattern: re.Pattern[str], position: int, keep: Callable[[re.Match[str]], bool] | None = None
    ) -> re.Match[str] | None:
        """Return the first match of `pattern` that starts at or after `position` and that `keep` accepts.

        The text is searched once per pattern, so that one query per call stays linear. Always pass the same `keep` for
        a pattern. None rejects look-alikes.
        """
        if pattern not in self._matches:
            keep = keep or (lambda match: self.is_real(*match.span()))
            self._matches[pattern] = [match for match in pattern.finditer(self.text) if keep(match)]
        matches = self._matches[pattern]
        index = bisect_left(matches, position, key=_start_of_match)
        return matches[index] if index < len(matches) else None


def find_marks(
    text: str,
    kinds: Mapping[str, str],
    tokens: Sequence[str] = (),
    *,
    token_ids: Sequence[int] | None = None,
    tokenizer: Any = None,
) -> tuple[str, list[Mark], list[int]]:
    """Find the marks of a turn, by token id where possible.

    Args:
        text: Turn as the server decoded it, without its stop token.
        kinds: Kind of each mark by its spelling.
        tokens: Tokens that marks contain; such marks are judged by these tokens.
        token_ids: Sampled token ids, shape `(T,)`, without the stop token.
        tokenizer: Tokenizer with `convert_tokens_to_ids` and `decode`.

    Returns:
        The text, the marks and the positions of look-alikes. The text is `text` itself unless the ids show that some
        characters only look like a mark, or that `text` has lost marks; then it is decoded from the ids.
    """
    look_alikes: list[int] = []
    if token_ids is not None and tokenizer is not None:
        whole = [spelling for spelling in kinds if not any(token in spelling for token in tokens)]
        text, look_alikes = _find_look_alikes(text, [*tokens, *whole], token_ids, tokenizer)
    marks = [Mark(kinds[match[0]], match.start(), match.end()) for match in _find_any(kinds, text)]
    if look_alikes:
        marks = [mark for mark in marks if bisect_left(look_alikes, mark.start) == bisect_left(look_alikes, mark.end)]
    return text, marks, look_alikes


def _find_any(spellings: Iterable[str], text: str) -> Iterable[re.Match[str]]:
    pattern = _any_of(tuple(spellings))
    return () if pattern is None else pattern.finditer(text)


@lru_cache(maxsize=256)
def _any_of(spellings: tuple[str, ...]) -> re.Pattern[str] | None:
    # Longest first, so that no mark is taken for a shorter one that it begins with.
    pattern = "|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True))
    return re.compile(pattern) if pattern else None


def _find_look_alikes(
    text: str, spellings: Sequence[str], token_ids: Sequence[int], tokenizer: Any
) -> tuple[str, list[int]]:
    """Return the text, decoded again if necessary, and the positions where ordinary tokens spell a single token."""
    spelled = _single_tokens(tokenizer, spellings)
    sampled = [spelled[token_id] for token_id in token_ids if token_id in spelled]
    # The same marks by id as by characters: there are no look-alikes, and nothing needs decoding.
    if [match.group() for match in _find_any(spelled.values(), text)] == sampled:
        return text, []
    pieces: list[str] = []
    real: set[int] = set()
    length = 0
    mark_before: list[int] = []
    spelled_before = ""
    for spelling, run in groupby(token_ids, spelled.get):
        ids = list(run)
        if spelling is None:
            # Decode with the mark before, since some vocabularies drop a space at the start of a text.
            piece = tokenizer.decode([*mark_before, *ids], skip_special_tokens=False)
            after = piece.startswith(spelled_before)
            piece = piece[len(spelled_before) :] if after else tokenizer.decode(ids, skip_special_tokens=False)
        else:
            piece = spelling * len(ids)
            real.update(range(length, length + len(piece), len(spelling)))
            mark_before, spelled_before = ids[-1:], spelling
        pieces.append(piece)
        length += len(piece)
    joined = "".join(pieces)
    # Without a mark, what the ids have beyond the text is a stop string.
    ends_alike = joined.startswith(text) and max(real, default=-1) < len(text)
    text = text if ends_alike else joined
    return text, [match.start() for match in _find_any(spelled.values(), text) if match.start() not in real]


_SINGLE_TOKENS: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()


def _single_tokens(tokenizer: Any, spellings: Sequence[str]) -> dict[int, str]:
    """Return the spellings that are single tokens of the vocabulary, by id; cached per tokenizer."""
    try:
        known = _SINGLE_TOKENS.setdefault(tokenizer, {})
    except TypeError:  # not hashable, or without weak references
        known = {}
    for spelling in spellings:
        if spelling not in known:
            token_id = tokenizer.convert_tokens_to_ids(spelling)
            # A vocabulary without the mark returns its unknown token, which decodes to another text.
            is_token = isinstance(token_id, int) and (
                tokenizer.decode([token_id], skip_special_tokens=False).strip() == spelling
            )
            known[spelling] = token_id if is_token else None
    return {token_id: spelling for spelling in spellings if (token_id := known[spelling]) is not None}


class CallSpan(NamedTuple):
    """The calls that a format read after a start mark.

    Attributes:
        end: Position where reading continues: after the end mark, or at the end of the text.
        sound: Whether the span follows the format from start to end, so that marks inside it are arguments.
        calls: Calls of the span; None if the span is text.
    """

    end: int
    sound: bool
    calls: tuple[ToolParseResult, ...] | None


class SpanKind(str, Enum):
    """The kind of a span."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Span(NamedTuple):
    """A range `[start, end)` of a turn: reasoning without its marks, calls with their marks."""

    kind: SpanKind
    start: int
    end: int
    calls: tuple[ToolParseResult, ...] = ()


ReadCall = Callable[[Mark], CallSpan]
"""Reads the calls after a start mark; the `end` that it returns is after that mark."""


def take_apart(turn: MarkedText, read_call: ReadCall, reasoning_open: bool) -> tuple[list[Span], bool]:
    """Split a turn into reasoning, visible text and calls.

    Args:
        turn: Whole turn.
        read_call: Reads the calls after a start mark.
        reasoning_open: Whether the prompt ended inside reasoning.

    Returns:
        The spans in order, and whether the turn ends inside reasoning that nothing closed. Only reasoning may be empty.
        Marks around reasoning belong to no span; stray end marks of calls are text.
    """
    text = turn.text
    spans: list[Span] = []
    unclosed = False
    settled = 0  # spans before this index precede a closing mark and stay reasoning
    position = 0

    def add(kind: SpanKind, start: int, end: int) -> None:
        is_first_reasoning = kind is SpanKind.REASONING and (not spans or spans[-1].kind is not kind)
        if start < end or is_first_reasoning:
            spans.append(Span(kind, start, end))

    def reason(start: int) -> int:
        """Add the reasoning that begins at `start`, and return the position after it."""
        nonlocal unclosed
        close = turn.find(MarkKind.THINK_END, start)
        unclosed = close is None
        add(SpanKind.REASONING, start, len(text) if close is None else close.start)
        return len(text) if close is None else close.end

    if reasoning_open:
        opening = turn.find(MarkKind.THINK_START, 0)
        # Some models repeat the mark that the prompt ended with.
        position = reason(opening.end if opening is not None and not text[: opening.start].strip() else 0)

    for mark in turn.marks:
        if mark.start < position or mark.kind is MarkKind.CALL_END:  # inside a span already read, or stray
            continue
        add(SpanKind.TEXT, position, mark.start)
        if mark.kind is MarkKind.CALL_START:
            end, sound, calls = read_call(mark)
            closing = None if sound else turn.find(MarkKind.THINK_END, mark.end)
            opening = turn.find(MarkKind.THINK_START, mark.end)
            opened = closing is not None and opening is not None and opening.start < closing.start
            if closing is None or closing.start >= end or opened:
                spans.append(Span(SpanKind.TEXT if calls is None else SpanKind.CALL, mark.start, end, calls or ()))
                position = end
                continue
            # The "call" contains a closing mark that it did not open, so it is a draft in reasoning. Continue after the
            # last closing mark: to continue after the first could read the same text many times.
            start, mark = mark.start, turn.find_last(MarkKind.THINK_END, end) or closing
            add(SpanKind.TEXT, start, mark.start)
        if mark.kind is MarkKind.THINK_START:
            position = reason(mark.end)
            continue
        if mark.kind is MarkKind.THINK_END:
            drafts, spans[settled:] = spans[settled:], []
            if not drafts:
                add(SpanKind.REASONING, mark.start, mark.start)
            for span in drafts:  # they turn out to be reasoning; join adjacent ones
                touches = len(spans) > settled and spans[-1].end == span.start
                start = spans.pop().start if touches else span.start
                spans.append(Span(SpanKind.REASONING, start, span.end))
            settled = len(spans)
        position = mark.end
    add(SpanKind.TEXT, position, len(text))
    return spans, unclosed


def doubtful_calls(turn: MarkedText, spans: Sequence[Span]) -> set[int]:
    """Return the indices of the calls that an unmatched end mark follows.

    An unmatched end mark shows that a call ended too early, at an end mark inside one of its strings, so a later "call"
    may be part of that string. Which call it was is ambiguous, so all of them are doubtful. Reasoning between a call
    and the mark separates them.

    Args:
        turn: Whole turn.
        spans: All spans of the turn.
    """
    doubtful = set()
    doubt = False
    for index, span in reversed([*enumerate(spans)]):
        if span.kind is SpanKind.REASONING:
            doubt = False
        elif span.kind is SpanKind.CALL and doubt:
            doubtful.add(index)
        elif span.kind is SpanKind.TEXT and not doubt:
            stray = turn.find(MarkKind.CALL_END, span.start)
            doubt = stray is not None and stray.start < span.end
    return doubtful


def reasoning_text(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the reasoning of a turn.

    Several spans are joined by a newline; white space next to the marks is removed.
    """
    parts = [_trim(turn.text[s.start : s.end], True, True)[1] for s in spans if s.kind is SpanKind.REASONING]
    return "\n".join(part for part in parts if part)


def visible_text(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the visible text of a turn.

    White space that only separated the text from removed markup is removed too; the indentation of the next line stays.
    Two spans of text are joined by the white space on one side of the markup between them: the side with more line
    breaks, or else the first.
    """
    pieces: list[str] = []
    gap = ""
    for span in spans:
        if span.kind is not SpanKind.TEXT:
            continue
        before, piece, after = _trim(turn.text[span.start : span.end], span.start > 0, span.end < len(turn.text))
        if not piece:
            gap = _wider(gap, before)
            continue
        if pieces:
            pieces.append(_wider(gap, before))
        pieces.append(piece)
        gap = after
    return "".join(pieces)


def _wider(first: str, second: str) -> str:
    return second if not first or second.count("\n") > first.count("\n") else first


def _trim(text: str, at_start: bool, at_end: bool) -> tuple[str, str, str]:
    """Split off white space next to a mark, as `(leading, rest, trailing)`; the first line keeps its indentation."""
    leading = ""
    if at_start:
        blank = text[: len(text) - len(text.lstrip())]
        leading = blank if len(blank) == len(text) else blank[: blank.rfind("\n") + 1] or blank
    rest = text[len(leading) :]
    kept = rest.rstrip() if at_end else rest
    return leading, kept, rest[len(kept) :]


def without_reasoning(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the turn with reasoning replaced by a newline, so that the text around it cannot form a mark."""
    runs = groupby(spans, lambda span: span.kind is SpanKind.REASONING)
    return "\n".join(
        "".join(turn.text[span.start : span.end] for span in run) for is_reasoning, run in runs if not is_reasoning
    )
