from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.gemma4 import Gemma4ToolParser
from support.parser_checks import KEYS, SCALARS, Call, Format, ParserChecks, summary

QUOTE = '<|"|>'


def value(of: Any) -> str:
    if isinstance(of, str):
        return f"{QUOTE}{of}{QUOTE}"
    if of is None or isinstance(of, bool):
        return {None: "null", True: "true", False: "false"}[of]
    if isinstance(of, dict):
        return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in of.items()) + "}"
    return "[" + ",".join(map(value, of)) + "]" if isinstance(of, list) else str(of)


def write(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{value(values)}<tool_call|>" for name, values in calls)


def carried(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Values of the format: keys are bare words."""
    return st.recursive(
        st.none() | SCALARS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=6,
    )


class TestGemma4(ParserChecks):
    format = Format(
        parser=Gemma4ToolParser(),
        write=write,
        tokens=("<|tool_call>", "<tool_call|>", QUOTE, "<|channel>", "<channel|>"),
        tags=("call:f{", "thought\n", "{", "}", ":", ","),
        malformed=(
            "",
            "f{}",
            "call:f",
            "call:f{}}",
            "call:f{a}",
            'call:f{a:"x"}',
            "call:f{a:1,}",
            "call:f{,a:1}",
            "call:f{a:1 b:2}",
            "call:f{a:1,a:2}",
            "call:f{a:[1,]}",
            "call:f{a:[1 2]}",
            "call:f{a:nan}",
            "call:f{a:1e999}",
            "call:f{a:x}",
            "call:f{a:" + "[" * 65 + "]" * 65 + "}",
            "call:f{} x",
        ),
        delimits=False,
        closer=f"{QUOTE}}}<tool_call|>",
        think=("<|channel>", "<channel|>"),
        # A mark of strings in a string ends it, unless it is made of other tokens.
        values=lambda texts: carried(texts.filter(lambda text: QUOTE not in text)),
    )


PARSER = Gemma4ToolParser()


def test_the_name_of_the_channel_is_no_part_of_the_reasoning() -> None:
    turn = PARSER.parse_turn("<|channel>thought\nHm.\n<channel|>Yes.")
    assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    turn = PARSER.parse_turn("Hm.\n<channel|>Yes.", reasoning_open=True)
    assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    assert PARSER.parse_turn("<|channel>thought\n<channel|>Yes.").reasoning is None


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("None", None),
        ("1e-07", 1e-07),
        ("-2", -2),
        (f"{QUOTE}None{QUOTE}", "None"),
        ("[1,2.5,true,null]", [1, 2.5, True, None]),
        (f"{{a b:{QUOTE}c, d{QUOTE},e:[]}}", {"a b": "c, d", "e": []}),
    ],
)
def test_values_are_typed_as_they_are_written(written: str, found: Any) -> None:
    assert summary(PARSER.parse(f"<|tool_call>call:f{{x:{written}}}<tool_call|>")) == [("f", {"x": found})]


def test_a_string_that_does_not_end_is_unterminated_or_malformed() -> None:
    (call,) = PARSER.parse(f"<|tool_call>call:f{{x:{QUOTE}abc")
    assert (call.status, call.attempted_name) == (ToolCallStatus.UNTERMINATED, "f")
    (call,) = PARSER.parse(f"<|tool_call>call:f{{x:{QUOTE}abc}}<tool_call|>")
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")
