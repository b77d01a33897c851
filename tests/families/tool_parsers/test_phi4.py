from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.phi4 import Phi4ToolParser
from support.parser_checks import Call, Format, ParserChecks, same, summary


def write(calls: Sequence[Call]) -> str:
    bodies = (json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls)
    return "".join(f"<|tool_call|>{body}<|/tool_call|>" for body in bodies)


class TestPhi4(ParserChecks):
    format = Format(
        parser=Phi4ToolParser(),
        write=write,
        tokens=("<|tool_call|>", "<|/tool_call|>", "<think>", "</think>"),
        tags=('{"name": ', "functools[", "["),
        malformed=("", "f", '{"name": "f"} x', "{}", "[]", '[{"name": "f"}', '{"type": "function"}', "1"),
        closer='"}}<|/tool_call|>',
        strict_json=True,
    )


CALLS = [("f", {"x": "1"}), ("g", {})]
PLAIN = '[{"name": "f", "arguments": {"x": "1"}}, {"name": "g", "arguments": {}}]'
WRAPPED = (
    '[{"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}, '
    '{"type": "function", "function": {"name": "g"}}]'
)


@pytest.mark.parametrize("body", [PLAIN, WRAPPED])
@pytest.mark.parametrize("around", ["<|tool_call|>{}<|/tool_call|>", "functools{}", "\nfunctools{}\n"])
def test_a_list_holds_several_calls(body: str, around: str) -> None:
    turn = Phi4ToolParser().parse_turn(around.replace("{}", body))
    assert summary(turn.tool_calls) == CALLS
    assert turn.text == ""


def test_functools_is_a_call_behind_reasoning_and_text_anywhere_else() -> None:
    parser = Phi4ToolParser()
    assert summary(parser.parse(f"Hm.</think>functools{PLAIN}", reasoning_open=True)) == CALLS
    turn = parser.parse_turn(f"Write functools{PLAIN}")
    assert (turn.text, turn.tool_calls) == (f"Write functools{PLAIN}", ())


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"functools{PLAIN} Done.", ToolCallStatus.MALFORMED),
        ("functools[]", ToolCallStatus.MALFORMED),
        ("functools[{name: 'f'}]", ToolCallStatus.MALFORMED),
        (f"functools{PLAIN[:-1]}", ToolCallStatus.UNTERMINATED),
        (f"functools{PLAIN[:30]}", ToolCallStatus.UNTERMINATED),
    ],
)
def test_a_list_that_no_mark_ends_is_all_or_nothing(text: str, status: ToolCallStatus) -> None:
    turn = Phi4ToolParser().parse_turn(text)
    assert [call.status for call in turn.tool_calls] == [status]
    assert turn.text == ""


OBJECTS = (
    '{"name": "f", "arguments": {"x": "1"}},\n{"name": "g", "arguments": {}}',
    """{"name": "f", "arguments": {'x': '1'}},{"name": "g", "arguments": {}}""",
)


@pytest.mark.parametrize("text", OBJECTS)
def test_a_turn_that_is_nothing_but_objects_is_calls(text: str) -> None:
    turn = Phi4ToolParser().parse_turn(f"\n{text}\n")
    assert summary(turn.tool_calls) == CALLS
    assert turn.text == ""


def test_the_arguments_of_an_object_may_be_written_as_python() -> None:
    values = {"s": 'it\'s "é"\n', "b": True, "n": None, "l": [1, -1.5e10, {"k": []}], "t": "true"}
    (call,) = Phi4ToolParser().parse(f'{{"name": "f", "arguments": {values}}}')
    assert same(call.input, values)


@pytest.mark.parametrize(
    "text", [f"See {OBJECTS[0]}", '{"name": "Ada", "born": 1815}', '{"answer": 4}', "{", "[1]", OBJECTS[0][1:]]
)
def test_other_objects_and_objects_behind_text_are_text(text: str) -> None:
    turn = Phi4ToolParser().parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"{OBJECTS[0]} Done.", ToolCallStatus.MALFORMED),
        (f"{OBJECTS[0]}, Done.", ToolCallStatus.MALFORMED),
        ('{"name": "f", "arguments": {x: 1}}', ToolCallStatus.MALFORMED),
        ('{"name": "f", "arguments": {"x": 1}', ToolCallStatus.UNTERMINATED),
        ("""{"name": "f", "arguments": {'x': 1""", ToolCallStatus.UNTERMINATED),
        ('{"name": "f", "arguments": [1]}', ToolCallStatus.NOT_AN_OBJECT),
    ],
)
def test_what_begins_as_an_object_of_a_call_and_is_none_is_an_error(text: str, status: ToolCallStatus) -> None:
    turn = Phi4ToolParser().parse_turn(text, truncated=status is ToolCallStatus.UNTERMINATED)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, "f")]
    assert turn.text == ""
