from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.llama4_pythonic import Llama4PythonicToolParser
from support.listed_checks import ListedChecks
from support.parser_checks import Call, Format, same, summary


def keywords(values: dict[str, Any]) -> str:
    spell = json.dumps if values.get("a") == "x@@" else repr
    return ", ".join(f"{key}={spell(value)}" for key, value in values.items())


def bare(calls: Sequence[Call]) -> str:
    return f"[{', '.join(f'{name}({keywords(values)})' for name, values in calls)}]"


def write(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{bare(calls)}<|python_end|>"


class TestLlama4Pythonic(ListedChecks):
    format = Format(
        parser=Llama4PythonicToolParser(),
        write=write,
        tokens=("<|python_start|>", "<|python_end|>", "<think>", "</think>"),
        tags=("[f(", ")]", "'", '"""', "=", ", "),
        malformed=(
            "f(a=1)",
            "[]",
            "[f]",
            "[f(1)]",
            "[f(a=1, a=2)]",
            "[f(**{})]",
            "[f(a=g())]",
            "[f(a=1 + 1)]",
            "[f(a=b)]",
            "[f(a={1: 2})]",
            "[f(a={'b': 1, 'b': 2})]",
            "[f(a=1e999)]",
            "[f(a='\\ud83d')]",
            "[f(a=(1, 2))]",
            "[f(a=01)]",
            "[f(a=" + "[" * 65 + "]" * 65 + ")]",
        ),
        closer="')]<|python_end|>",
        strict_json=True,
    )


PARSER = Llama4PythonicToolParser()


@given(TestLlama4Pythonic.format.arguments)
def test_a_turn_that_is_nothing_but_a_list_of_calls_needs_no_mark(arguments: dict[str, Any]) -> None:
    calls = [("f", arguments), ("g", {})]
    turn = PARSER.parse_turn(f"\n{bare(calls)}\n")
    assert same(summary(turn.tool_calls), calls)
    assert turn.text == ""


@given(st.text(), st.sampled_from(["'", '"', "'''", '"""']))
def test_every_kind_of_string_reads_as_python_reads_it(text: str, quote: str) -> None:
    escaped = text.encode("unicode_escape").decode().replace("'", "\\'").replace('"', '\\"')
    assert summary(PARSER.parse(f"[f(a={quote}{escaped}{quote})]")) == [("f", {"a": text})]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1", 1),
        ("-1.5", -1.5),
        ("1e3", 1000.0),
        ("True", True),
        ("null", None),
        ("'\\q\\x41\\101\\u00e9'", "\\qAAé"),
        ("'''two\nlines'''", "two\nlines"),
        ("[1, 'a', [], {},]", [1, "a", [], {}]),
        ("{'a': 'b',}", {"a": "b"}),
        ("[1, 2, 'x', \"y\", 3.0, None]", [1, 2, "x", "y", 3.0, None]),
    ],
)
def test_literals_are_pythons_and_json_s(literal: str, value: Any) -> None:
    (call,) = PARSER.parse(f"[f(a={literal})]")
    assert same(call.input, {"a": value})


@pytest.mark.parametrize("text", ["[1, 2]", "[x]", "f(a=1)", "See [f(a=1)]", "[link](f)", ""])
def test_other_lists_and_lists_behind_text_are_text(text: str) -> None:
    turn = PARSER.parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[f(a=1)", ToolCallStatus.UNTERMINATED),
        ("[f(a='x", ToolCallStatus.UNTERMINATED),
        ("[f(a='x\n')]", ToolCallStatus.MALFORMED),
        ("[f(a=1)] Done.", ToolCallStatus.MALFORMED),
        ('[f(a=say "hi")]', ToolCallStatus.MALFORMED),
    ],
)
def test_what_begins_as_a_list_of_calls_and_is_none_is_an_error(text: str, status: ToolCallStatus) -> None:
    turn = PARSER.parse_turn(text)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, "f")]
    assert turn.text == ""
