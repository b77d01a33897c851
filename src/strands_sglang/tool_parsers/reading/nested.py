"""The base of the formats that have marks inside calls too.

Some vocabularies have a token for every mark of a call (`<arg_key>`, `<|tool_call_argument_begin|>`), some have one
token that all marks share (the DSML token in `<｜DSML｜invoke name="f">`). What `structure` says of marks holds for
these too: where the ids are known, ordinary tokens that spell such a token are text, as is every mark made with them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .marked import MarkedToolParser
from .structure import MarkedText, MarkKind, locate_marks


class NestedText(MarkedText):
    """A turn that also knows where ordinary tokens only look like a token of the format."""

    def __init__(
        self,
        text: str,
        kinds: list[MarkKind],
        starts: list[int],
        spelled: Mapping[MarkKind, str],
        look_alikes: Sequence[int],
    ) -> None:
        """Keep the text, its marks and the sorted positions of look-alikes."""
        super().__init__(text, kinds, starts, spelled)
        self._look_alikes = look_alikes

    def is_real(self, start: int, end: int) -> bool:
        """Tell whether no look-alike begins in the stretch `[start, end)`."""
        return _is_real(self._look_alikes, start, end)

    def match(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """Return the match of `pattern` at `position` if there is one without look-alikes."""
        match = pattern.match(self.text, position)
        return match if match is not None and self.is_real(*match.span()) else None


class NestedToolParser(MarkedToolParser):
    """A format with marks inside calls.

    Attributes:
        FORMAT_TOKENS: The tokens that marks inside calls consist of, or that the marks around calls and reasoning
            contain. Those that the vocabulary lacks are recognised by their characters.
    """

    FORMAT_TOKENS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        tool_start_token: str | None = None,
        tool_end_token: str | None = None,
        think_start_token: str | None = None,
        think_end_token: str | None = None,
    ) -> None:
        """Name the marks; those of the format where None.

        Raises:
            ValueError: The mark before or behind calls is empty.
        """
        super().__init__(
            self.DEFAULT_TOOL_START_TOKEN if tool_start_token is None else tool_start_token,
            self.DEFAULT_TOOL_END_TOKEN if tool_end_token is None else tool_end_token,
            self.DEFAULT_THINK_START_TOKEN if think_start_token is None else think_start_token,
            self.DEFAULT_THINK_END_TOKEN if think_end_token is None else think_end_token,
        )

    def locate_marks(self, text: str, token_ids: Sequence[int] | None, tokenizer: Any) -> NestedText:
        """Find this parser's marks in a turn, and what only looks like one."""
        spelled = {
            kind: mark
            for kind, mark in {
                MarkKind.CALL_START: self.tool_start_token,
                MarkKind.CALL_END: self.tool_end_token,
                MarkKind.THINK_START: self.think_start_token,
                MarkKind.THINK_END: self.think_end_token,
            }.items()
            if mark
        }
        # A mark that contains a token of the format is judged by that token.
        whole = [mark for mark in spelled.values() if not any(token in mark for token in self.FORMAT_TOKENS)]
        text, look_alikes = find_look_alikes(text, [*self.FORMAT_TOKENS, *whole], token_ids, tokenizer)
        kind_of = {mark: kind for kind, mark in spelled.items()}
        pattern = "|".join(re.escape(mark) for mark in sorted(kind_of, key=len, reverse=True))
        kinds: list[MarkKind] = []
        starts: list[int] = []
        for match in re.finditer(pattern, text):
            if not look_alikes or _is_real(look_alikes, *match.span()):
                kinds.append(kind_of[match.group()])
                starts.append(match.start())
        return NestedText(text, kinds, starts, spelled, look_alikes)


def find_look_alikes(
    text: str, tokens: Sequence[str], token_ids: Sequence[int] | None, tokenizer: Any
) -> tuple[str, list[int]]:
    """Find where ordinary tokens spell one of `tokens`.

    Args:
        text: The turn as the server decoded it, without its stop token.
        tokens: Spellings, of which none contains another.
        token_ids: The sampled ids, shape `(T,)`, without the stop token.
        tokenizer: The model's tokenizer.

    Returns:
        The text, which is what the ids decode to where `text` has lost marks, and the sorted positions of look-alikes.
    """
    if token_ids is None or tokenizer is None:
        return text, []
    kinds = tuple(MarkKind)
    batches = [dict(zip(kinds, tokens[i : i + len(kinds)], strict=False)) for i in range(0, len(tokens), len(kinds))]
    settled = text
    for _ in range(3):
        before = settled
        turns = []
        for batch in batches:
            turns.append(locate_marks(settled, batch, token_ids=token_ids, tokenizer=tokenizer))
            settled = turns[-1].text
        if all(turn.text == before for turn in turns):
            real = {start for turn in turns for start in turn.starts}
            spelled = re.finditer("|".join(re.escape(token) for token in tokens), before)
            return before, [match.start() for match in spelled if match.start() not in real]
    # Decoding around different marks gives different texts (characters cut in half); the characters decide.
    return text, []


def _is_real(look_alikes: Sequence[int], start: int, end: int) -> bool:
    index = bisect_left(look_alikes, start)
    return index == len(look_alikes) or look_alikes[index] >= end
