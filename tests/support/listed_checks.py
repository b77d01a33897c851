"""The suite for formats whose calls end with the turn: what differs from calls that have an end mark."""

from __future__ import annotations

import pytest

from strands_sglang.tool_parsers import ToolCallStatus, ToolParseResult
from support.hostile import MEGABYTE, assert_cheap, hostile_texts
from support.parser_checks import (
    Call,
    ParserChecks,
    imitated,
    sampled,
    summary,
    tokenizer_with,
)


class ListedChecks(ParserChecks):
    """The suite where nothing may follow the calls, and where a broken call takes the rest of the turn along."""

    def test_several_calls_keep_their_order_and_the_text_around_them(self) -> None:
        calls: list[Call] = [("a", {"x": 1}), ("b", {}), ("a", {"x": 2})]
        turn = self.format.parser.parse_turn(f"First.\n{self.format.write(calls)}\n")
        assert summary(turn.tool_calls) == calls
        assert turn.text == "First."

    def test_a_turn_that_is_cut_off_anywhere_ends_in_an_unterminated_call(self) -> None:
        text = self.format.write([("f", {"a": 1, "b": "x"})])
        begin = text.index(self.format.start) + len(self.format.start)
        for end in range(begin, len(text) - len(self.format.end)):
            for result in self.format.parser.parse_turn(text[:end], truncated=True).tool_calls:
                if result.is_error:
                    assert (result.status, result.input) == (ToolCallStatus.UNTERMINATED, {}), text[:end]
                    assert "cut off" in (result.error or "")
                else:
                    assert summary([result]) == [("f", {"a": 1, "b": "x"})]

    def test_what_is_not_exactly_a_call_is_malformed_and_runs_nothing(self) -> None:
        for body in self.format.malformed:
            turn = self.format.parser.parse_turn(f"A\n{self.format.start}{body}\n")
            assert turn.tool_calls, body
            result = turn.tool_calls[-1]
            assert (result.status, result.name) == (ToolCallStatus.MALFORMED, ToolParseResult.UNKNOWN_NAME), body
            assert result.input == {}
            assert result.error
            assert (result.raw or "").strip() in body
            assert turn.text == "A"

    def test_a_broken_call_does_not_take_the_one_before_it_along(self) -> None:
        pytest.skip("the calls of such a format stand and fall together, or a file of its own says otherwise")

    def test_hostile_text_costs_no_more_than_its_length(self) -> None:
        for before, unit, behind in hostile_texts(self.format):
            if unit:
                assert_cheap(self.format.parser, unit, MEGABYTE // 8, before, behind)

    def test_text_behind_a_call_keeps_it_from_running(self) -> None:
        text = self.format.write([("f", {"a": 1})])
        turn = self.format.parser.parse_turn(f"{text} and that is it.")
        assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]
        assert turn.text == ""

    def test_an_end_of_ordinary_tokens_leaves_the_call_unterminated(self) -> None:
        if not self.format.end:
            pytest.skip("the format has no end mark")
        tokenizer, text = tokenizer_with(self.format.tokens), self.format.write([("f", {})]).rstrip()
        head = text.removesuffix(self.format.end)
        turn = self.format.parser.parse_turn(**sampled(tokenizer, head, *imitated(self.format.tokens, self.format.end)))
        assert all(call.is_error for call in turn.tool_calls)
