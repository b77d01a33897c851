from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.phi4 import Phi4ToolParser
from support.parser_checks import Call, Format, ParserChecks, summary


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
