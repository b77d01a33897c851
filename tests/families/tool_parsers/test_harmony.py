from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import ToolCallStatus, ToolParseResult
from strands_sglang.tool_parsers.formats.harmony import HarmonyToolParser
from support.listed_checks import ListedChecks
from support.parser_checks import Call, Format, same, sampled, summary, tokenizer_with, tools_for

TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
PARSER = HarmonyToolParser()


def body(values: dict) -> str:
    return json.dumps(values, ensure_ascii=False)


def write(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{body(values)}<|call|>"
        for name, values in calls
    )


class TestHarmony(ListedChecks):
    format = Format(
        parser=PARSER,
        write=write,
        tokens=TOKENS,
        tags=("assistant", " to=functions.f", "analysis", "commentary", "final", "json"),
        malformed=(),
        closer='"}<|call|><|start|>assistant<|channel|>',
        think=("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
        strict_json=True,
    )

    def test_a_draft_in_reasoning_is_not_a_call(self) -> None:
        draft, call = write([("rm", {})]), write([("ls", {})])
        for text, reasoning_open in [
            (f"<|channel|>analysis<|message|>Maybe {draft}?<|end|>{call}", False),
            (f"Maybe {draft}?<|end|>{call}", True),
        ]:
            turn = PARSER.parse_turn(text, reasoning_open=reasoning_open)
            assert [found.name for found in turn.tool_calls] == ["ls"]
            assert (turn.reasoning, turn.text) == (f"Maybe {draft}?", "")

    def test_a_turn_that_is_cut_off_anywhere_ends_in_an_unterminated_call(self) -> None:
        text = write([("f", {"a": 1, "b": "x"})]).removeprefix("<|start|>assistant")
        for end in range(text.index("functions") + 1, len(text) - len("<|call|>") + 1):
            (call,) = PARSER.parse_turn(text[:end], truncated=True).tool_calls
            assert (call.status, call.name) == (ToolCallStatus.UNTERMINATED, ToolParseResult.UNKNOWN_NAME), text[:end]
            assert "cut off" in (call.error or "")

    @pytest.mark.parametrize(
        "text",
        [
            '<|channel|>commentary to=functions.f<|message|>{"a": 1} x<|call|>',
            "<|channel|>commentary to=functions.f<|message|>{a}<|call|>",
            "<|channel|>commentary to=functions.f<|message|>{}<|end|>",
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>}",
            "<|channel|>commentary to=functions.f code<|message|>{}",
            "<|channel|>analysis to=functions.f<|message|>{}",
            " to=functions.f<|channel|>commentary to=functions.f json<|message|>{}",
            " to=functions.f<|message|>{}",
            "<|channel|>commentary to=functions.f json please<|message|>{}",
            '<|channel|>commentary to=functions.f<|message|>{"a": 1, "a": 2}',
        ],
    )
    def test_what_is_not_exactly_a_call_is_malformed_and_runs_nothing(self, text: str) -> None:
        (call,) = PARSER.parse(text)
        assert (call.status, call.attempted_name, call.input) == (ToolCallStatus.MALFORMED, "f", {})
        assert call.raw is not None and call.raw in text

    def test_text_behind_a_call_keeps_it_from_running(self) -> None:
        turn = PARSER.parse_turn(f"{write([('f', {})])} and that is it.")
        assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]
        assert turn.text == ""

    def test_an_end_of_ordinary_tokens_leaves_the_call_unterminated(self) -> None:
        head = write([("f", {})]).removesuffix("<|call|>")
        (call,) = PARSER.parse(**sampled(tokenizer_with(TOKENS), head, "<|ca", "ll|>"))
        assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")


HEADERS = (
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.f<|message|>",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
    "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>",
)


@given(st.sampled_from(HEADERS), TestHarmony.format.arguments)
def test_every_way_to_write_a_header_is_read_and_the_stop_token_may_be_gone(header: str, arguments: dict) -> None:
    turn = PARSER.parse_turn(header + body(arguments), tools=tools_for([("f", arguments)]))
    assert same(summary(turn.tool_calls), [("f", arguments)])
    assert (turn.text, turn.reasoning) == ("", None)


def test_each_channel_goes_where_it_belongs() -> None:
    turn = PARSER.parse_turn(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Ah.<|end|><|start|>assistant<|channel|>final<|message|>  Yes."
    )
    assert (turn.reasoning, turn.text, turn.tool_calls) == ("Hm.\nAh.", "I look.\n  Yes.", ())


@pytest.mark.parametrize("text", ["Hello.", "", "a\n b ", "to be <|end|> or not"])
def test_a_turn_without_headers_is_text(text: str) -> None:
    assert PARSER.parse_turn(text).text == text.strip()


def test_a_call_to_anything_but_a_function_names_no_tool() -> None:
    (call,) = PARSER.parse('<|channel|>commentary to=browser.search<|message|>{"query": "x"}')
    assert (call.status, call.attempted_name) == (ToolCallStatus.UNKNOWN_TOOL, "browser.search")


def test_arguments_that_are_no_object_are_told_apart() -> None:
    (call,) = PARSER.parse("<|channel|>commentary to=functions.f<|message|>[1]")
    assert (call.status, call.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


def test_a_call_quoted_in_a_final_answer_is_text() -> None:
    turn = PARSER.parse_turn("<|channel|>final<|message|>Like " + write([("rm", {})]).removesuffix("<|call|>"))
    assert turn.tool_calls == ()
    assert turn.text.startswith("Like <|start|>")


@pytest.mark.parametrize(
    ("text", "unclosed"),
    [
        ("<|channel|>analysis", True),
        ("<|channel|>analysis<|message|>", True),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>analysis<|message|>Well", True),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", False),
        ("<|channel|>final<|message|>Yes", False),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", False),
    ],
)
def test_a_turn_ends_in_reasoning_where_its_last_message_is_an_unended_analysis(text: str, unclosed: bool) -> None:
    assert PARSER.parse_turn(text, truncated=True).ends_in_reasoning is unclosed
