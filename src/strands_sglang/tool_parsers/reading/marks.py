"""A sampled turn: its marks, and where reasoning, visible text and tool calls lie.

Where the marks of a format stand in the text of a turn.

A mark (`<think>`, `</tool_call>`, ...) that is a single token of the vocabulary is recognised by its token id alone;
ordinary tokens that decode to the same characters are text, and so is every longer mark that is made with them. Without
ids, or for marks that the vocabulary spells with several tokens, the characters decide. The work is linear in the
length of the turn.

Where reasoning, visible text and tool calls lie in one sampled turn.

Parsers see a turn's structure before they see its calls, because what stands inside reasoning is never a call. The
work is linear in the length of the turn, also for hostile text.

The reasoning rules: text after an opening mark (or after a prompt that opened reasoning) is reasoning up to the next
closing mark, or up to the end if there is none. A closing mark that nothing opened closes reasoning that must have
been opened out of sight: all that precedes it is reasoning, draft calls included. Inside a call that parses, marks
are part of its arguments.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..results import ToolParseResult


class MarkKind(str, Enum):
    """What a mark opens or closes."""

    CALL_START = "call_start"
    CALL_END = "call_end"
    THINK_START = "think_start"
    THINK_END = "think_end"
    WRAPPER = "wrapper"
    """Stands around visible text and is no part of it."""

    __hash__ = str.__hash__  # that of enums is Python code, and hostile text holds a hundred thousand marks


class Mark(NamedTuple):
    """One mark in a turn, with the half-open character range `[start, end)` that it covers.

    The kind of a mark that stands inside calls is its spelling.
    """

    kind: str
    start: int
    end: int


_start_of_mark = itemgetter(1)
_start_of_match = re.Match.start


class MarkedText:
    """The text of a turn with its marks, and what else a format needs to read it.

    Attributes:
        text: The whole turn, marks included.
        marks: The marks around reasoning, calls and visible text, in order of position.
        schemas: The JSON schema of every tool's input by name; None if the tools are not known.
        truncated: The turn was cut off.
        call_end: How the mark after calls is written.
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
            text: The whole turn.
            marks: All marks, in order of position.
            look_alikes: Where ordinary tokens only look like a token of the format, in order.
            schemas: The JSON schema of every tool's input.
            truncated: The turn was cut off.
            call_end: The mark after calls.
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
        """Tell whether no look-alike begins in the stretch `[start, end)`."""
        here = self._look_alikes
        return not here or bisect_left(here, start) == bisect_left(here, end)

    def match(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """Return the match of `pattern` at `position` if there is one without look-alikes."""
        match = pattern.match(self.text, position)
        return match if match is not None and self.is_real(*match.span()) else None

    def find_match(
        self, pattern: re.Pattern[str], position: int, keep: Callable[[re.Match[str]], bool] | None = None
    ) -> re.Match[str] | None:
        """Return the first match of `pattern` that starts at or after `position` and that `keep` accepts.

        The whole text is searched once per pattern and turn, so that asking again for every call stays linear; `keep`
        must be the same whenever `pattern` is. By default it refuses look-alikes.
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
    """Find the marks of a turn, by token id where that is possible.

    Args:
        text: The turn as the server decoded it, without its stop token.
        kinds: The kind of every mark by its spelling.
        tokens: Tokens that several marks contain, which are judged by those.
        token_ids: The sampled ids, shape `(T,)`, without the stop token.
        tokenizer: Its `convert_tokens_to_ids` and `decode` are used.

    Returns:
        The text, the marks and the positions of look-alikes. The text is `text` itself unless the ids show that some
        characters only look like a mark (or that `text` has lost marks); then it is what the ids decode to.
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
    # Longest first, so that a mark that begins like another one is not cut short.
    pattern = "|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True))
    return re.finditer(pattern, text) if pattern else ()


def _find_look_alikes(
    text: str, spellings: Sequence[str], token_ids: Sequence[int], tokenizer: Any
) -> tuple[str, list[int]]:
    """Return the text, decoded where it has to be, and where ordinary tokens spell a token of the vocabulary."""
    spelled = _single_tokens(tokenizer, spellings)
    sampled = [spelled[token_id] for token_id in token_ids if token_id in spelled]
    # As many marks by id as by characters, in the same order: every look-alike is a mark, nothing needs decoding.
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
            # As they read after the mark: some vocabularies drop a space at the start of a text.
            piece = tokenizer.decode([*mark_before, *ids], skip_special_tokens=False)
            after = piece.startswith(spelled_before)
            piece = piece[len(spelled_before) :] if after else tokenizer.decode(ids, skip_special_tokens=False)
        else:
            piece = spelling * len(ids)
            real.update(range(length, length + len(piece), len(spelling)))
            mark_before, spelled_before = ids[-1:], spelling
        pieces.append(piece)
        length += len(piece)
    text = "".join(pieces)
    return text, [match.start() for match in _find_any(spelled.values(), text) if match.start() not in real]


_SINGLE_TOKENS: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()


def _single_tokens(tokenizer: Any, spellings: Sequence[str]) -> dict[int, str]:
    """Return the spellings that are one token of the vocabulary, by its id; remembered per tokenizer."""
    try:
        known = _SINGLE_TOKENS.setdefault(tokenizer, {})
    except TypeError:  # not hashable, or without weak references
        known = {}
    for spelling in spellings:
        if spelling not in known:
            token_id = tokenizer.convert_tokens_to_ids(spelling)
            # A vocabulary without the mark answers with its unknown token, which decodes to something else.
            is_token = isinstance(token_id, int) and (
                tokenizer.decode([token_id], skip_special_tokens=False).strip() == spelling
            )
            known[spelling] = token_id if is_token else None
    return {token_id: spelling for spelling in spellings if (token_id := known[spelling]) is not None}


class CallSpan(NamedTuple):
    """What a format read after the start mark of calls.

    Attributes:
        end: Where reading continues: after the end mark, or at the end of the text.
        sound: It has the shape of calls from its start mark to its end, so that marks inside it are arguments.
        calls: The calls; None if it is text after all.
    """

    end: int
    sound: bool
    calls: tuple[ToolParseResult, ...] | None


class SpanKind(str, Enum):
    """What a stretch of a turn is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Span(NamedTuple):
    """A stretch `[start, end)` of a turn's text: reasoning without the marks around it, calls with theirs."""

    kind: SpanKind
    start: int
    end: int
    calls: tuple[ToolParseResult, ...] = ()


ReadCall = Callable[[Mark], CallSpan]
"""Reads calls from their start mark on; returns an `end` after that mark."""


def take_apart(turn: MarkedText, read_call: ReadCall, reasoning_open: bool) -> tuple[list[Span], bool]:
    """Cut a turn into reasoning, visible text and calls.

    Args:
        turn: The turn with its marks.
        read_call: Reads calls.
        reasoning_open: The prompt ended inside reasoning.

    Returns:
        The spans that are not empty, in order of position (marks around reasoning belong to none, stray end marks of
        calls are text), and whether the turn ends inside reasoning that nothing closed, be it empty.
    """
    text = turn.text
    spans: list[Span] = []
    unclosed = False
    settled = 0  # spans before this index stand before a closing mark and are reasoning for good
    position = 0

    def add(kind: SpanKind, start: int, end: int) -> None:
        if start < end:
            spans.append(Span(kind, start, end))

    def reason(start: int) -> int:
        """Add the reasoning that begins at `start`; return where it stops."""
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
        if mark.start < position or mark.kind is MarkKind.CALL_END:  # inside what was read already, or stray
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
            # Nothing in the "call" opened that mark: it is a draft (or only talk of one) in reasoning, up to its last
            # closing mark; continuing after the first one would read the same stretch again and again.
            start, mark = mark.start, turn.find_last(MarkKind.THINK_END, end) or closing
            add(SpanKind.TEXT, start, mark.start)
        if mark.kind is MarkKind.THINK_START:
            position = reason(mark.end)
            continue
        if mark.kind is MarkKind.THINK_END:
            drafts, spans[settled:] = spans[settled:], []
            for span in drafts:  # reasoning after all; those that touch are joined
                touches = len(spans) > settled and spans[-1].end == span.start
                start = spans.pop().start if touches else span.start
                spans.append(Span(SpanKind.REASONING, start, span.end))
            settled = len(spans)
        position = mark.end
    add(SpanKind.TEXT, position, len(text))
    return spans, unclosed


def doubtful_calls(turn: MarkedText, spans: Sequence[Span]) -> set[int]:
    """Return the indices of the calls after which an end mark follows that closes nothing.

    Such a mark says that a call was taken to end too early, at an end mark inside one of its strings, so that what was
    taken for a call of its own after it may be part of that string. Which one it was cannot be told. Reasoning between
    a call and the mark separates them.

    Args:
        turn: The turn.
        spans: All of its spans.
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

    Several stretches are joined by a newline; the white space at the marks is left out.
    """
    parts = [_trim(turn.text[s.start : s.end], True, True)[1] for s in spans if s.kind is SpanKind.REASONING]
    return "\n".join(part for part in parts if part)


def visible_text(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the text of a turn that a user sees.

    White space that only separated the text from removed markup goes with the markup; indentation of the line after it
    stays. Two stretches of text are joined by the white space that stood on one side of the markup between them: that
    with more line breaks, or else the first.
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
    """Split off white space next to a mark: (leading, rest, trailing). Indentation of the first line stays."""
    if text and not (text[0].isspace() or text[-1].isspace()):
        return "", text, ""
    leading = ""
    if at_start:
        blank = text[: len(text) - len(text.lstrip())]
        leading = blank if len(blank) == len(text) else blank[: blank.rfind("\n") + 1] or blank
    rest = text[len(leading) :]
    kept = rest.rstrip() if at_end else rest
    return leading, kept, rest[len(kept) :]


def without_reasoning(turn: MarkedText, spans: Iterable[Span]) -> str:
    """Return the turn without reasoning, a newline in its place so that what was around it cannot grow into a mark."""
    stretches = groupby(spans, lambda span: span.kind is SpanKind.REASONING)
    return "\n".join(
        "".join(turn.text[span.start : span.end] for span in stretch)
        for is_reasoning, stretch in stretches
        if not is_reasoning
    )
