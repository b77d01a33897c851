"""Marks are tokens: text that only looks like a mark is text, wherever the vocabulary lets one see the difference."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import HermesToolParser, QwenXMLToolParser, ToolCallStatus
from support.agents import build_chatml_tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOKENIZER = build_chatml_tokenizer()
WITHOUT_MARKS = build_chatml_tokenizer(with_marks=False)


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
    turn = HermesToolParser().parse_turn(**encode(f"<think>{CALL}</think>{CALL}", tokenizer=WITHOUT_MARKS))
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


class SpaceDroppingTokenizer:
    """One word a token; like sentencepiece, decoding leaves out the space before the first one."""

    words = {1: "<tool_call>", 2: "</tool_call>", 3: " a", 4: " <tool_call>", 5: " b"}
    __hash__ = None  # type: ignore[assignment]

    def convert_tokens_to_ids(self, token: str) -> int:
        return next((index for index, word in self.words.items() if word == token), 0)

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens is False
        return "".join(self.words.get(index, "<unk>") for index in token_ids).removeprefix(" ")


def test_spaces_behind_marks_survive_vocabularies_that_drop_leading_spaces() -> None:
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
