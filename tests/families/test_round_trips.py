"""Tool calls come back from real templates and tokenizers as they went in, but for what the template itself loses."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from strands_sglang.tool_parsers import ParsedTurn
from support.families import FAMILIES, load_tokenizer
from support.parser_checks import KEYS, PIECES, SCALARS, Call
from support.round_trip_losses import (
    COMPOSING,
    LOSSES,
    NO_CALLS,
    NO_REASONING,
    NO_TEXT,
    ONE_CALL,
    Loss,
    is_lost,
)
from support.round_trips import Message, Sampled, TemplateRefusedError, parse, parser_for, pieces_of, sample

EXAMPLES = 40
TEXT, REASONING = "So, I look it up.", "Hm. Is it?\nLet me see."
CODE = 'def f(x):\n    if x:\n\treturn \'\\n\' + """é"""\n\n'
ARGUMENTS: dict[str, Any] = {
    "code": CODE,
    "text": "  é日本\U0001f642 \n",
    "digits": "123",
    "word": "true",
    "null": "null",
    "empty": "",
    "long": "x y\n" * 5000,
    "count": -3,
    "share": 0.1,
    "yes": True,
    "items": [1, 2],
    "more": {"a": {"b": [{"c": "1"}]}},
}
STRINGS = {key: value for key, value in ARGUMENTS.items() if key in ("digits", "word", "null", "empty")}

FAMILIES_WITH_CALLS = [family for family in FAMILIES if family not in NO_CALLS]
FAMILIES_THAT_REASON = [
    family for family in FAMILIES_WITH_CALLS if FAMILIES[family].reasoning and family not in NO_REASONING
]


def arguments_for(family: str) -> dict[str, Any]:
    """Arguments of every kind that the family's template can carry."""
    return STRINGS if family == "llama_4" else ARGUMENTS


def same(turn: ParsedTurn, calls: Iterable[Call]) -> bool:
    """Whether these are the turn's calls, with arguments of equal types on every level and in any order."""
    found = [(call.name, json.dumps(call.input, sort_keys=True)) for call in turn.tool_calls]
    return found == [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]


def arguments_with(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    values: st.SearchStrategy[Any] = st.recursive(
        st.none() | SCALARS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=5,
    )
    return st.dictionaries(KEYS, values | texts, max_size=3)


def texts_of(family: str) -> st.SearchStrategy[str]:
    """Strings, with all in them that the family's template writes around the values of calls."""
    pieces = st.sampled_from((*pieces_of(family), *PIECES, CODE))
    return st.lists(st.one_of(pieces, st.text(max_size=6)), max_size=5).map("".join)


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_calls_of_any_arguments_come_back_as_they_went_in(family: str) -> None:
    arguments = arguments_with(texts_of(family))
    if family == "llama_4":
        arguments = st.dictionaries(KEYS, texts_of(family), max_size=3)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize="CI" in os.environ)
    @given(st.lists(arguments, min_size=1, max_size=1 if family in ONE_CALL else 2), st.booleans(), st.booleans())
    def come_back(drawn: Sequence[dict[str, Any]], with_text: bool, with_reasoning: bool) -> None:
        calls = tuple((f"f{index}", arguments) for index, arguments in enumerate(drawn))
        assume(not is_lost(family, calls))
        text = TEXT if with_text and family not in NO_TEXT else ""
        reasoning = REASONING if with_reasoning and family in FAMILIES_THAT_REASON else ""
        sampled = sample(family, Message(calls, text, reasoning))
        assume(family not in COMPOSING or unicodedata.is_normalized("NFC", sampled.text))
        turn = parse(family, sampled, calls)
        assert [call.error for call in turn.tool_calls] == [None] * len(calls), sampled.text
        assert same(turn, calls), sampled.text
        assert (turn.text, turn.reasoning or "") == (text, reasoning)
        assert not turn.ends_in_reasoning

    come_back()


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_arguments_of_every_kind_come_back_with_the_text_and_the_reasoning_beside_them(family: str) -> None:
    one = (("f", arguments_for(family)),)
    several = (*one, ("g", {}), ("h", {"digits": "4"}))
    messages = [Message(one), Message((("g", {}),))]
    if family not in ONE_CALL:
        messages.append(Message(several))
    if family not in NO_TEXT:
        messages.append(Message(one, TEXT))
    if family in FAMILIES_THAT_REASON:
        messages.append(Message(one, reasoning=REASONING))
    if family in FAMILIES_THAT_REASON and family not in NO_TEXT:
        messages.append(Message(several, TEXT, REASONING))
    for message in messages:
        turn = parse(family, sample(family, message), message.calls)
        assert same(turn, message.calls), turn
        assert (turn.text, turn.reasoning or "") == (message.text, message.reasoning)


def losses() -> list[Any]:
    return [pytest.param(family, loss, id=f"{family}: {loss.why}") for loss in LOSSES for family in loss.families]


@pytest.mark.parametrize(("family", "loss"), losses())
def test_what_is_listed_as_lost_is_lost_by_the_template_and_never_guessed(family: str, loss: Loss) -> None:
    calls = (("f", loss.example),)
    assert loss.lost(loss.example)
    written = sample(family, Message(calls))
    if loss.same_as:
        others = tuple(("f", arguments) for arguments in loss.same_as)
        assert sample(family, Message(others)).text == written.text
        return
    turn = parse(family, written, calls)
    if loss.reads_as is not None:
        assert same(turn, [("f", loss.reads_as)])
    else:
        assert turn.tool_calls
        assert all(call.is_error for call in turn.tool_calls)


@pytest.mark.parametrize("family", NO_CALLS)
def test_templates_that_are_listed_to_write_no_call_write_none(family: str) -> None:
    assert "key" not in sample(family, Message((("f", {"key": "value"}),))).text


@pytest.mark.parametrize("family", ONE_CALL)
def test_templates_that_are_listed_to_write_one_call_write_no_second_one(family: str) -> None:
    calls = (("f", {"key": "first"}), ("g", {"key": "second"}))
    try:
        assert "second" not in sample(family, Message(calls)).text
    except TemplateRefusedError:
        pass


@pytest.mark.parametrize("family", NO_TEXT)
def test_templates_that_are_listed_to_write_no_text_beside_a_call_write_none(family: str) -> None:
    calls = (("f", {"key": "value"}),)
    sampled = sample(family, Message(calls, TEXT))
    turn = parse(family, sampled, calls)
    assert (turn.text, same(turn, calls)) != (TEXT, True)
    if turn.tool_calls:
        assert same(turn, calls)
        assert TEXT not in sampled.text or turn.reasoning == TEXT


@pytest.mark.parametrize("family", NO_REASONING)
def test_templates_that_are_listed_to_write_no_reasoning_write_none(family: str) -> None:
    assert REASONING not in sample(family, Message((("f", {"key": "value"}),), "", REASONING)).text


@pytest.mark.parametrize("family", FAMILIES)
def test_only_tokenizers_that_are_listed_to_compose_characters_do(family: str) -> None:
    tokenizer, text = load_tokenizer(family), "e\u0301"
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    assert decoded == (unicodedata.normalize("NFC", text) if family in COMPOSING else text)


def marks_of(family: str) -> tuple[str, str]:
    """The marks around reasoning."""
    parser = parser_for(family)
    return FAMILIES[family].reasoning or (parser.think_start_token, parser.think_end_token)


def call_text(family: str, name: str) -> str:
    """A call as the family's template writes it, without the reasoning that it may write before."""
    written = sample(family, Message(((name, {"key": "value"}),))).text
    return written.rpartition(marks_of(family)[1])[2].strip()


def encoded(family: str, text: str, *, reasoning_open: bool) -> Sampled:
    return Sampled(text, tuple(load_tokenizer(family).encode(text, add_special_tokens=False)), reasoning_open)


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_a_draft_in_reasoning_is_no_call_whoever_opened_it(family: str) -> None:
    opened, closed = marks_of(family)
    draft, call = call_text(family, "draft"), call_text(family, "run")
    glue = "<|start|>assistant" if family == "gpt_oss" else "\n\n"
    written = (("run", {"key": "value"}),)
    for text, reasoning_open in [
        (f"{opened}Maybe {draft}?{closed}{glue}{call}", False),
        (f"Maybe {draft}?{closed}{glue}{call}", True),
    ]:
        turn = parse(family, encoded(family, text, reasoning_open=reasoning_open), written)
        assert same(turn, written), text
        assert turn.reasoning == f"Maybe {draft}?"
    for text, reasoning_open in [(f"{opened}Maybe {draft}", False), (f"Maybe {draft}", True)]:
        turn = parse(family, encoded(family, text, reasoning_open=reasoning_open), written)
        assert (turn.tool_calls, turn.text, turn.ends_in_reasoning) == ((), "", True)


@pytest.mark.parametrize("family", FAMILIES_THAT_REASON)
def test_a_draft_in_reasoning_that_the_template_writes_is_no_call(family: str) -> None:
    draft = f"Maybe {call_text(family, 'draft')}?"
    calls = (("run", {"key": "value"}),)
    turn = parse(family, sample(family, Message(calls, reasoning=draft)), calls)
    assert same(turn, calls)
    assert turn.reasoning == draft
