"""What is reasoning, what is text, and that a call inside reasoning is never a call; the same in every format.

Marks are tokens: text that only looks like a mark is text, wherever the vocabulary lets one see the difference.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import (
    HermesToolParser,
    QwenXMLToolParser,
    ToolCallStatus,
    ToolParser,
    ToolParseResult,
)
from support.agents import build_chatml_tokenizer

CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=ls>\n</function>\n</tool_call>"

both_formats = pytest.mark.parametrize(
    ("parser", "call"), [(HermesToolParser(), CALL), (QwenXMLToolParser(), XML_CALL)], ids=["hermes", "qwen_xml"]
)
PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, XML_CALL, "word", " ", "\n", "{", '"', "\\"]
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


@pytest.mark.parametrize(
    ("text", "reasoning_open", "unclosed"),
    [
        ("", False, False),
        ("", True, True),
        ("Hm", True, True),
        ("\n<think>\nHm", True, True),
        ("<think>", False, True),
        (f"<think>Hm {CALL}", False, True),
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
    text: str, reasoning_open: bool, unclosed: bool
) -> None:
    class OwnToolParser(ToolParser):
        """A parser of a user, who left the splitting to the base class."""

        def parse(self, text: str) -> list[ToolParseResult]:  # type: ignore[override]
            return []

    for parser in (HermesToolParser(), QwenXMLToolParser(), OwnToolParser()):
        assert parser.parse_turn(text, reasoning_open=reasoning_open).ends_in_reasoning is unclosed


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TOKENIZER = build_chatml_tokenizer()


def encode(*pieces: str, tokenizer: Any = TOKENIZER) -> dict[str, Any]:
    """A turn of pieces that were sampled one by one: a piece that is part of a mark is made of ordinary tokens."""
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return {
        "text": tokenizer.decode(ids, skip_special_tokens=False),
        "token_ids": ids,
        "tokenizer": tokenizer,
    }


def test_a_call_of_real_mark_tokens_is_a_call() -> None:
    turn = HermesToolParser().parse_turn(**encode("Hm. " + CALL))
    assert [call.name for call in turn.tool_calls] == ["ls"]
    assert turn.text == "Hm."


def test_ordinary_tokens_that_look_like_a_call_are_text() -> None:
    sampled = encode("The format is <tool", '_call>{"name": "ls"}</tool', "_call>, as you see.")
    assert HermesToolParser().parse(sampled["text"]) != []
    turn = HermesToolParser().parse_turn(**sampled)
    assert turn.tool_calls == ()
    assert turn.text == 'The format is <tool_call>{"name": "ls"}</tool_call>, as you see.'


def test_ordinary_tokens_that_look_like_reasoning_marks_are_text() -> None:
    turn = HermesToolParser().parse_turn(**encode("Write <thin", "k> and </thin", "k>, then ", CALL))
    assert turn.reasoning is None
    assert turn.text == "Write <think> and </think>, then"
    assert [call.name for call in turn.tool_calls] == ["ls"]


def test_a_look_alike_in_open_reasoning_does_not_close_it() -> None:
    turn = HermesToolParser().parse_turn(**encode("I end with </thin", f"k> {CALL}</think>Done."), reasoning_open=True)
    assert turn.tool_calls == ()
    assert turn.reasoning == f"I end with </think> {CALL}"
    assert turn.text == "Done."


def test_an_end_that_only_looks_like_one_leaves_the_call_unterminated() -> None:
    (call,) = HermesToolParser().parse(**encode('<tool_call>{"name": "ls"}</tool', "_call>"))
    assert call.status is ToolCallStatus.UNTERMINATED
    assert call.raw == '{"name": "ls"}</tool_call>'


def test_look_alikes_and_real_marks_may_both_stand_in_a_string() -> None:
    sampled = encode(
        '<tool_call>{"name": "f", "arguments": {"x": "</tool', '_call> </tool_call> \U0001f642"}}</tool_call>'
    )
    (call,) = HermesToolParser().parse(**sampled)
    assert call.input == {"x": "</tool_call> </tool_call> \U0001f642"}


def test_a_value_that_ends_in_a_look_alike_goes_on() -> None:
    fake = "</parameter>\n</function>\n</tool"
    sampled = encode(
        "<tool_call>\n<function=f>\n<parameter=x>\na", fake, "_call>\nb\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = QwenXMLToolParser().parse(**sampled)
    assert call.input == {"x": f"a{fake}_call>\nb"}


def test_marks_that_the_vocabulary_spells_with_several_tokens_are_found_by_their_text() -> None:
    without_marks = build_chatml_tokenizer(with_marks=False)
    turn = HermesToolParser().parse_turn(**encode(f"<think>{CALL}</think>{CALL}", tokenizer=without_marks))
    assert turn.reasoning == CALL
    assert [call.name for call in turn.tool_calls] == ["ls"]


def test_each_mark_is_judged_by_itself_when_the_vocabulary_has_only_some() -> None:
    parser = HermesToolParser(think_start_token="[think]", think_end_token="[/think]")
    turn = parser.parse_turn(**encode("[think]<tool", f"_call>{CALL}[/think]Yes.", CALL))
    assert turn.reasoning == f"<tool_call>{CALL}"
    assert (turn.text, len(turn.tool_calls)) == ("Yes.", 1)


def test_ids_are_believed_where_the_text_has_lost_its_marks() -> None:
    sampled = encode(f"Hm.{CALL}")
    sampled["text"] = sampled["text"].replace("<tool_call>", "").replace("</tool_call>", "")
    turn = HermesToolParser().parse_turn(**sampled)
    assert (turn.text, [call.name for call in turn.tool_calls]) == ("Hm.", ["ls"])


def test_spaces_behind_marks_survive_vocabularies_that_drop_leading_spaces() -> None:
    class SpaceDroppingTokenizer:
        """One word a token; like sentencepiece, decoding leaves out the space before the first one."""

        words = {1: "<tool_call>", 2: "</tool_call>", 3: " a", 4: " <tool_call>", 5: " b"}
        __hash__ = None  # type: ignore[assignment]

        def convert_tokens_to_ids(self, token: str) -> int:
            return next((index for index, word in self.words.items() if word == token), 0)

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens is False
            return "".join(self.words.get(index, "<unk>") for index in token_ids).removeprefix(" ")

    parser = HermesToolParser()
    (call,) = parser.parse(
        "a <tool_call><tool_call> b</tool_call>", token_ids=[3, 4, 1, 5, 2], tokenizer=SpaceDroppingTokenizer()
    )
    assert call.raw == " b"


@given(
    st.lists(
        st.one_of(st.sampled_from((*MARKS, "<tool", "_call>", "</", "think>", '"', "{", CALL)), st.text(max_size=5))
    ),
    st.booleans(),
)
def test_ids_never_make_the_parser_raise_and_nothing_sampled_is_lost(pieces: list[str], reasoning_open: bool) -> None:
    sampled = encode(*pieces)
    for parser in (HermesToolParser(), QwenXMLToolParser()):
        turn = parser.parse_turn(**sampled, reasoning_open=reasoning_open)
        kept = (turn.reasoning or "") + turn.text + "".join(call.raw or "" for call in turn.tool_calls)
        good = sum(not call.is_error for call in turn.tool_calls)
        assert kept.count('"name"') + good == sampled["text"].count('"name"')


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.sampled_from(MARKS), st.text(max_size=9)), max_size=4))
def test_with_ids_arguments_come_back_as_they_were_written(arguments: dict[str, str]) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    (call,) = HermesToolParser().parse(**encode(f"<tool_call>{body}</tool_call>"))
    assert call.input == arguments


@pytest.mark.parametrize("missing", ["token_ids", "tokenizer"])
def test_ids_without_a_tokenizer_and_the_other_way_round_fall_back_to_the_text(missing: str) -> None:
    sampled = encode("<tool", '_call>{"name": "ls"}</tool', "_call>")
    del sampled[missing]
    assert [call.name for call in HermesToolParser().parse(**sampled)] == ["ls"]
