"""Marks of formats that have more of them than reasoning and calls: between name and arguments, or around strings.

What `structure` says of marks holds for these too: by token id where the vocabulary has them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .nested import find_look_alikes
from .structure import Mark, MarkedText, MarkKind

Spellings = Mapping[str, MarkKind | None]
"""Every mark of a format by its spelling; None where it opens or closes neither reasoning nor a call."""


class DetailedText(MarkedText):
    """A turn's text with its marks, several spellings of one kind and marks without a kind among them.

    Attributes:
        ends: Where the mark that starts at a position ends, where its spelling does not tell.
    """

    def __init__(self, text: str, marks: Iterable[tuple[str, int]], spellings: Spellings) -> None:
        """Keep the text and index its marks.

        Args:
            text: The whole turn.
            marks: Spelling and start of every mark, in order of position.
            spellings: What each spelling is; an empty one starts a call that no mark announces.
        """
        kinds, starts = [], []
        usual = {kind: spelling for spelling, kind in spellings.items() if kind is not None and spelling}
        self.ends: dict[int, int] = {}
        self._details: dict[str, list[int]] = {}
        for spelling, start in marks:
            kind = spellings[spelling]
            if kind is None:
                self._details.setdefault(spelling, []).append(start)
                continue
            kinds.append(kind)
            starts.append(start)
            if usual[kind] != spelling:
                self.ends[start] = start + len(spelling)
        super().__init__(text, kinds, starts, usual)

    def mark(self, kind: MarkKind, start: int) -> Mark:
        """Return the mark of `kind` at `start`."""
        end = self.ends.get(start)
        return super().mark(kind, start) if end is None else Mark(kind, start, end)

    def find_detail(self, spelling: str, position: int) -> int | None:
        """Return where the first mark of that spelling starts, at or after `position`."""
        starts = self._details.get(spelling, [])
        index = bisect_left(starts, position)
        return starts[index] if index < len(starts) else None

    def detail_at(self, spelling: str, position: int) -> bool:
        """Tell whether a mark of that spelling starts exactly at `position`."""
        return self.find_detail(spelling, position) == position


def locate_details(
    text: str,
    spellings: Spellings,
    *,
    token_ids: Sequence[int] | None = None,
    tokenizer: Any = None,
    unmarked_calls: Callable[[str, list[tuple[str, int]]], Iterable[int]] | None = None,
) -> DetailedText:
    """Find the marks of a turn, by token id where that is possible; see `structure.locate_marks`.

    Args:
        text: The turn as the server decoded it, without its stop token.
        spellings: The format's marks, of which none contains another.
        token_ids: The sampled ids, shape `(T,)`, without the stop token.
        tokenizer: The model's tokenizer.
        unmarked_calls: Says from the text and its marks where calls start that no mark announces.
    """
    text, look_alikes = find_look_alikes(text, list(spellings), token_ids, tokenizer)
    pattern = re.compile("|".join(re.escape(spelling) for spelling in spellings))
    marks = [(match.group(), match.start()) for match in pattern.finditer(text)]
    if look_alikes:
        unreal = set(look_alikes)
        marks = [mark for mark in marks if mark[1] not in unreal]
    unmarked = [("", start) for start in unmarked_calls(text, marks)] if unmarked_calls is not None else []
    if unmarked:
        spellings = {**spellings, "": MarkKind.CALL_START}
        marks = sorted([*marks, *unmarked], key=lambda mark: mark[1])
    return DetailedText(text, marks, spellings)
