"""What is reasoning, what is text, and that a call inside reasoning is never a call; the same in every format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import HermesToolParser, QwenXMLToolParser, ToolParser, ToolParseResult

HERMES_CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=ls>\n</function>\n</tool_call>"

both_formats = pytest.mark.parametrize(
    ("parser", "call"), [(HermesToolParser(), HERMES_CALL), (QwenXMLToolParser(), XML_CALL)], ids=["hermes", "qwen_xml"]
)
PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", HERMES_CALL, XML_CALL, "word", " ", "\n", "{", '"', "\\"]
    ),
    max_size=12,
).map("".join)


@both_formats
def test_a_draft_in_reasoning_is_not_a_call(parser: ToolParser, call: str) -> None:
    turn = parser.parse_turn(f"<think>\nMaybe {call}?\n</think>\n\nThe answer is 4.")
    assert turn.tool_calls == ()
    assert turn.reasoning == f"Maybe {call}?"
    assert turn.text == "The answer is 4."


@both_formats
def test_a_draft_in_reasoning_that_the_prompt_opened_is_not_a_call(parser: ToolParser, call: str) -> None:
    turn = parser.parse_turn(f"Maybe {call}?\n</think>\n\n{call}", reasoning_open=True)
    assert [found.name for found in turn.tool_calls] == ["ls"]
    assert turn.reasoning == f"Maybe {call}?"
    assert turn.text == ""


@both_formats
@pytest.mark.parametrize("opened_by_prompt", [True, False])
def test_reasoning_that_never_closes_has_no_calls(parser: ToolParser, call: str, opened_by_prompt: bool) -> None:
    mark = "" if opened_by_prompt else "\n<think>"
    turn = parser.parse_turn(f"{mark}I will {call}", reasoning_open=opened_by_prompt, truncated=True)
    assert turn.tool_calls == ()
    assert turn.reasoning == f"I will {call}"
    assert turn.text == ""


@both_formats
def test_a_model_that_repeats_the_mark_of_the_prompt_still_reasons(parser: ToolParser, call: str) -> None:
    turn = parser.parse_turn(f"\n<think>\nHm {call}\n</think>\nYes.", reasoning_open=True)
    assert (turn.reasoning, turn.text, turn.tool_calls) == (f"Hm {call}", "Yes.", ())


@both_formats
def test_what_precedes_a_closing_mark_that_nothing_opened_is_reasoning(parser: ToolParser, call: str) -> None:
    turn = parser.parse_turn(f"Perhaps {call}\nNo.\n</think>\n\n{call}")
    assert len(turn.tool_calls) == 1
    assert turn.reasoning == f"Perhaps {call}\nNo."


@both_formats
def test_talking_about_a_mark_in_reasoning_does_not_hide_the_call_behind_it(parser: ToolParser, call: str) -> None:
    turn = parser.parse_turn(f"I should use <tool_call> now.</think>{call}")
    assert [found.name for found in turn.tool_calls] == ["ls"]
    assert turn.reasoning == "I should use <tool_call> now."


@both_formats
def test_reasoning_between_text_and_calls_is_reasoning_too(parser: ToolParser, call: str) -> None:
    turn = parser.parse_turn(f"First.\n{call}\n<think>Then {call}</think>\nLast.\n{call}")
    assert [found.name for found in turn.tool_calls] == ["ls", "ls"]
    assert turn.reasoning == f"Then {call}"
    assert turn.text == "First.\nLast."


@both_formats
def test_closing_reasoning_twice_moves_all_before_the_second_mark_into_reasoning(parser: ToolParser, call: str) -> None:
    turn = parser.parse_turn(f"a</think>b {call} c</think>d", reasoning_open=True)
    assert (turn.reasoning, turn.text, turn.tool_calls) == (f"a\nb {call} c", "d", ())


@both_formats
@pytest.mark.parametrize("empty", ["<think>\n\n</think>\n\n", "<think></think>"])
def test_empty_reasoning_is_no_reasoning(parser: ToolParser, call: str, empty: str) -> None:
    turn = parser.parse_turn(f"{empty}Hello.")
    assert (turn.reasoning, turn.text) == (None, "Hello.")


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        ("", ""),
        ("  Hello. \n", "  Hello. \n"),
        ("\n", "\n"),
        ("Hello.\n\nCALL", "Hello."),
        ("\n\nCALL\n", ""),
        ("CALL\nCALL", ""),
        ("Hello.\nCALL\n\nBye. ", "Hello.\n\nBye. "),
        ("Hello.CALL Bye.", "Hello. Bye."),
        ("Hello. CALL\nBye.", "Hello.\nBye."),
        ("Hello.CALLBye.", "Hello.Bye."),
        ("A\n\nCALL\nCALL\n\nB CALL C", "A\n\nB C"),
        ("<think>x</think>\n\n    indented\ncode", "    indented\ncode"),
        ("<think>x</think> \n \t\n  - item\n", "  - item\n"),
    ],
)
@both_formats
def test_only_white_space_that_separated_markup_goes_with_it(
    parser: ToolParser, call: str, sampled: str, text: str
) -> None:
    assert parser.parse_turn(sampled.replace("CALL", call)).text == text


@both_formats
@given(before=PIECES, inside=PIECES.filter(lambda text: "</think>" not in text), after=PIECES)
def test_no_call_between_reasoning_marks_is_ever_returned(
    parser: ToolParser, call: str, before: str, inside: str, after: str
) -> None:
    marked = call.replace("ls", "draft")
    opened = parser.parse(f"<think>{inside}{marked}{inside}")
    prompted = parser.parse(f"{inside}{marked}{inside}</think>{after}", reasoning_open=True)
    closed_only = parser.parse(f"{before}{marked}{inside.replace('<think>', '')}</think>{after}")
    assert "draft" not in {found.name for found in (*opened, *prompted, *closed_only)}


@both_formats
@given(text=PIECES, reasoning_open=st.booleans())
def test_every_word_of_a_turn_ends_up_in_exactly_one_place(
    parser: ToolParser, call: str, text: str, reasoning_open: bool
) -> None:
    turn = parser.parse_turn(text, reasoning_open=reasoning_open)
    places = (turn.reasoning or "", turn.text, *(found.raw or "" for found in turn.tool_calls))
    assert sum(place.count("word") for place in places) == text.count("word")
    good = sum(not found.is_error for found in turn.tool_calls)
    assert sum(place.count("ls") for place in places) + good == text.count("ls")


class OwnToolParser(ToolParser):
    """A parser of a user, who left the splitting to the base class."""

    def parse(self, text: str) -> list[ToolParseResult]:  # type: ignore[override]
        return []


@pytest.mark.parametrize("parser", [HermesToolParser(), QwenXMLToolParser(), OwnToolParser()])
@pytest.mark.parametrize(
    ("text", "reasoning_open", "unclosed"),
    [
        ("", False, False),
        ("", True, True),
        ("Hm", True, True),
        ("\n<think>\nHm", True, True),
        ("<think>", False, True),
        (f"<think>Hm {HERMES_CALL}", False, True),
        ("<think>Hm</think>", False, False),
        ("Hm</think>", True, False),
        ("Hm</think>", False, False),
        ("Hm</think>\n\nYes.", True, False),
        ("<think>Hm</think>\n\nYes.\n<think>No, ", False, True),
        ("Yes.", False, False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "<think>"}}\n</tool_call>', False, False),
    ],
)
def test_a_turn_says_whether_it_ends_in_reasoning_that_nothing_closed(
    parser: ToolParser, text: str, reasoning_open: bool, unclosed: bool
) -> None:
    assert parser.parse_turn(text, reasoning_open=reasoning_open).ends_in_reasoning is unclosed
