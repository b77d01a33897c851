"""Where reasoning, visible text and tool calls lie in one sampled turn.

Parsers see a turn's structure before they see its calls, because what stands inside reasoning is never a call. Two
things are promised:

- A mark (`<think>`, `</tool_call>`, ...) that is a single token of the vocabulary is recognised by its token id alone;
  ordinary tokens that decode to the same characters are text. Without ids, or for marks that the vocabulary spells
  with several tokens, the characters decide.
- Everything is linear in the length of the turn, also for hostile text.

The reasoning rules: text after an opening mark (or after a prompt that opened reasoning) is reasoning up to the next
closing mark, or up to the end if there is none. A closing mark that nothing opened closes reasoning that must have
been opened out of sight: all that precedes it is reasoning, draft calls included. Inside a call that parses, marks
are part of its arguments.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary


class MarkKind(str, Enum):
    """What a mark opens or closes."""

    CALL_START = "call_start"
    CALL_END = "call_end"
    THINK_START = "think_start"
    THINK_END = "think_end"


class Mark(NamedTuple):
    """One mark in a turn, with the half-open character range `[start, end)` that it covers."""

    kind: MarkKind
    start: int
    end: int


class MarkedText:
    """A turn's text together with the marks in it.

    Marks are kept as plain numbers, for there can be a hundred thousand of them in hostile text.

    Attributes:
        text: The whole turn, marks included.
        kinds: The kind of every mark, in order of position.
        starts: Where every mark starts, in order of position.
    """

    def __init__(self, text: str, kinds: list[MarkKind], starts: list[int], spelled: Mapping[MarkKind, str]) -> None:
        """Keep the text and index the marks by kind.

        Args:
            text: The whole turn.
            kinds: The kind of every mark, in order of position.
            starts: Where every mark starts.
            spelled: How the marks are written.
        """
        self.text = text
        self.kinds = kinds
        self.starts = starts
        self._lengths = {kind: len(spelling) for kind, spelling in spelled.items()}
        self._starts: dict[MarkKind, list[int]] = {kind: [] for kind in MarkKind}
        for kind, start in zip(kinds, starts, strict=True):
            self._starts[kind].append(start)
        self._matches: dict[re.Pattern[str], tuple[list[int], list[re.Match[str]]]] = {}

    def mark(self, kind: MarkKind, start: int) -> Mark:
        """Return the mark of `kind` at `start`."""
        return Mark(kind, start, start + self._lengths[kind])

    def length(self, kind: MarkKind) -> int:
        """Return how many characters a mark of `kind` has; 0 if there is none."""
        return self._lengths.get(kind, 0)

    def find(self, kind: MarkKind, position: int) -> Mark | None:
        """Return the first mark of `kind` that starts at or after `position`."""
        starts = self._starts[kind]
        index = bisect_left(starts, position)
        return self.mark(kind, starts[index]) if index < len(starts) else None

    def find_last(self, kind: MarkKind, position: int) -> Mark | None:
        """Return the last mark of `kind` that starts before `position`."""
        starts = self._starts[kind]
        index = bisect_left(starts, position)
        return self.mark(kind, starts[index - 1]) if index > 0 else None

    def mark_at(self, kind: MarkKind, position: int) -> Mark | None:
        """Return the mark of `kind` that starts exactly at `position`."""
        mark = self.find(kind, position)
        return mark if mark is not None and mark.start == position else None

    def find_match(
        self, pattern: re.Pattern[str], position: int, keep: Callable[[MarkedText, re.Match[str]], bool]
    ) -> re.Match[str] | None:
        """Return the first match of `pattern` that starts at or after `position` and that `keep` accepts.

        The whole text is searched once per pattern and turn, so that asking again for every call stays linear; `keep`
        must be the same whenever `pattern` is.
        """
        if pattern not in self._matches:
            matches = [match for match in pattern.finditer(self.text) if keep(self, match)]
            self._matches[pattern] = [match.start() for match in matches], matches
        starts, matches = self._matches[pattern]
        index = bisect_left(starts, position)
        return matches[index] if index < len(matches) else None


def locate_marks(
    text: str,
    spellings: Mapping[MarkKind, str | None],
    *,
    token_ids: Sequence[int] | None = None,
    tokenizer: Any = None,
) -> MarkedText:
    """Find the marks of a turn, by token id where that is possible.

    Args:
        text: The turn as the server decoded it, without its stop token.
        spellings: How each kind of mark is written; kinds that are empty or absent are never found.
        token_ids: The sampled ids, shape `(T,)`, without the stop token.
        tokenizer: Its `convert_tokens_to_ids` and `decode` are used.

    Returns:
        The text with its marks. It is `text` itself unless the ids show that some characters only look like a mark
        (or that `text` has lost marks); then it is what the ids decode to.
    """
    spelled = {kind: spelling for kind, spelling in spellings.items() if spelling}
    kinds, starts = _marks_in_text(text, spelled)
    if token_ids is None or tokenizer is None:
        return MarkedText(text, kinds, starts, spelled)
    ids = _single_token_ids(tokenizer, spelled)
    kind_of = {token_id: kind for kind, token_id in ids.items()}
    # As many marks by id as by characters, in the same order: every look-alike is a mark, nothing needs decoding.
    if [kind for kind in kinds if kind in ids] == [kind_of[i] for i in token_ids if i in kind_of]:
        return MarkedText(text, kinds, starts, spelled)
    return _decode_around_marks(token_ids, tokenizer, kind_of, spelled)


def _marks_in_text(text: str, spelled: Mapping[MarkKind, str], offset: int = 0) -> tuple[list[MarkKind], list[int]]:
    """Find every mark by its characters; positions are shifted by `offset`."""
    kinds: list[MarkKind] = []
    starts: list[int] = []
    if spelled:
        kind_of = {spelling: kind for kind, spelling in spelled.items()}
        # Longest first, so that a mark that begins like another one is not cut short.
        pattern = "|".join(re.escape(spelling) for spelling in sorted(kind_of, key=len, reverse=True))
        for match in re.finditer(pattern, text):
            kinds.append(kind_of[match.group()])
            starts.append(match.start() + offset)
    return kinds, starts


_SINGLE_TOKENS: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()


def _single_token_ids(tokenizer: Any, spelled: Mapping[MarkKind, str]) -> dict[MarkKind, int]:
    """Return the id of every mark that is one token of the vocabulary; remembered per tokenizer."""
    try:
        known = _SINGLE_TOKENS.setdefault(tokenizer, {})
    except TypeError:  # not hashable, or without weak references
        known = {}
    for spelling in spelled.values():
        if spelling not in known:
            known[spelling] = _single_token_id(tokenizer, spelling)
    return {kind: token_id for kind, spelling in spelled.items() if (token_id := known[spelling]) is not None}


def _single_token_id(tokenizer: Any, spelling: str) -> int | None:
    """Return the id of `spelling` if it is one token of the vocabulary."""
    token_id = tokenizer.convert_tokens_to_ids(spelling)
    if not isinstance(token_id, int):
        return None
    # A vocabulary without the mark answers with its unknown token, which decodes to something else.
    decoded: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return token_id if decoded.strip() == spelling else None


def _decode_around_marks(
    token_ids: Sequence[int],
    tokenizer: Any,
    kind_of: Mapping[int, MarkKind],
    spelled: Mapping[MarkKind, str],
) -> MarkedText:
    """Decode the runs of ordinary tokens between the marks, so that the marks' positions are known."""
    without_id = {kind: spelling for kind, spelling in spelled.items() if kind not in kind_of.values()}
    pieces: list[str] = []
    kinds: list[MarkKind] = []
    starts: list[int] = []
    length = 0
    run: list[int] = []
    mark_before: int | None = None

    def close_run() -> None:
        nonlocal length
        if not run:
            return
        spelling = "" if mark_before is None else spelled[kind_of[mark_before]]
        piece = _decode_run(run, tokenizer, mark_before, spelling)
        found_kinds, found_starts = _marks_in_text(piece, without_id, length)
        kinds.extend(found_kinds)
        starts.extend(found_starts)
        pieces.append(piece)
        length += len(piece)
        run.clear()

    for token_id in token_ids:
        if token_id not in kind_of:
            run.append(token_id)
            continue
        close_run()
        spelling = spelled[kind_of[token_id]]
        kinds.append(kind_of[token_id])
        starts.append(length)
        pieces.append(spelling)
        length += len(spelling)
        mark_before = token_id
    close_run()
    return MarkedText("".join(pieces), kinds, starts, spelled)


def _decode_run(run: list[int], tokenizer: Any, mark_before: int | None, spelling: str) -> str:
    """Decode ordinary tokens as they read behind a mark (some vocabularies drop a space at the start of a text)."""
    if mark_before is not None:
        decoded: str = tokenizer.decode([mark_before, *run], skip_special_tokens=False)
        if decoded.startswith(spelling):
            return decoded[len(spelling) :]
    alone: str = tokenizer.decode(run, skip_special_tokens=False)
    return alone


class CallSpan(NamedTuple):
    """What a parser read behind a call's start mark.

    Attributes:
        end: Where reading goes on: behind the call's end mark, or at the end of the text.
        sound: The call has the shape of a call from its start mark to its end mark, so that marks inside it are
            arguments.
        call: The parser's own result.
    """

    end: int
    sound: bool
    call: Any


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
    call: Any = None


class Structure(NamedTuple):
    """Where everything in a turn lies.

    Attributes:
        spans: The spans that are not empty, in order of position. Marks around reasoning belong to no span; stray end
            marks of calls are text.
        ends_in_reasoning: The turn ends inside reasoning that nothing closed, be it empty.
    """

    spans: list[Span]
    ends_in_reasoning: bool


def take_apart(turn: MarkedText, read_call: Callable[[Mark], CallSpan], *, reasoning_open: bool = False) -> Structure:
    """Cut a turn into reasoning, visible text and calls.

    Args:
        turn: The turn with its marks.
        read_call: Reads one call from its start mark on; must return an `end` behind that mark.
        reasoning_open: The prompt ended inside reasoning.
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

    for index, (kind, start) in enumerate(zip(turn.kinds, turn.starts, strict=True)):
        if start < position or kind is MarkKind.CALL_END:  # inside what was read already, or stray
            continue
        add(SpanKind.TEXT, position, start)
        mark = turn.mark(kind, start)
        if kind is MarkKind.CALL_START:
            call = read_call(mark)
            broken_off = None if call.sound else _closing_mark_inside(turn, index, call.end)
            if broken_off is None:
                spans.append(Span(SpanKind.CALL, start, call.end, call.call))
                position = call.end
                continue
            add(SpanKind.TEXT, start, broken_off.start)
            mark = broken_off
        if mark.kind is MarkKind.THINK_START:
            position = reason(mark.end)
            continue
        if settled < len(spans):
            spans[settled:] = _as_reasoning(spans[settled:])
            settled = len(spans)
        position = mark.end
    add(SpanKind.TEXT, position, len(text))
    return Structure(spans, unclosed)


def doubtful_calls(turn: MarkedText, spans: Sequence[Span]) -> set[int]:
    """Return the indices of the calls behind which an end mark follows that closes nothing.

    Such a mark says that a call was taken to end too early, at an end mark inside one of its strings, so that what was
    taken for a call of its own behind it may be part of that string. Which one it was cannot be told. Reasoning between
    a call and the mark separates them.

    Args:
        turn: The turn.
        spans: All of its spans.
    """
    doubtful = set()
    doubt = False
    shortest = turn.length(MarkKind.CALL_END)
    for index in range(len(spans) - 1, -1, -1):
        span = spans[index]
        if span.kind is SpanKind.REASONING:
            doubt = False
        elif span.kind is SpanKind.TEXT:
            if not doubt and span.end - span.start >= shortest:  # what only separates two calls holds no mark
                stray = turn.find(MarkKind.CALL_END, span.start)
                doubt = stray is not None and stray.start < span.end
        elif doubt:
            doubtful.add(index)
    return doubtful


def _closing_mark_inside(turn: MarkedText, index: int, end: int) -> Mark | None:
    """Return the mark that shows the "call" up to `end` to be a draft (or only talk of one) in reasoning, if any.

    That is a closing mark that nothing in the call opened. All up to the last closing mark is reasoning then; going on
    behind the first one would read the same stretch again and again.

    Args:
        turn: The turn.
        index: Which of the turn's marks starts the call.
        end: Where the call ends.
    """
    for later in range(index + 1, len(turn.starts)):
        if turn.starts[later] >= end or turn.kinds[later] is MarkKind.THINK_START:
            return None
        if turn.kinds[later] is MarkKind.THINK_END:
            return turn.find_last(MarkKind.THINK_END, end)
    return None


def _as_reasoning(spans: Iterable[Span]) -> list[Span]:
    """Turn all spans into reasoning, joining those that touch."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].end == span.start:
            joined[-1] = Span(SpanKind.REASONING, joined[-1].start, span.end)
        else:
            joined.append(Span(SpanKind.REASONING, span.start, span.end))
    return joined
