from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.granite import GraniteToolParser
from support.listed_checks import ListedChecks
from support.parser_checks import Call, Format, ParserChecks, summary

TOKENS = ("<tool_call>", "</tool_call>", "<|tool_call|>", "<think>", "</think>")


def write_objects(calls: Sequence[Call]) -> str:
    bodies = (json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def write_list(calls: Sequence[Call]) -> str:
    return "<|tool_call|>" + json.dumps([{"name": name, "arguments": values} for name, values in calls])


class TestGranite4(ParserChecks):
    format = Format(
        parser=GraniteToolParser(),
        write=write_objects,
        tokens=TOKENS,
        tags=('{"name": ',),
        malformed=("", "f", '{"name": "f"} x', "{}", '{"arguments": {}}', '{"name": "f", "arguments": {}, "id": 1}'),
        closer='"}}</tool_call>',
        strict_json=True,
    )


def granite_3() -> GraniteToolParser:
    """With the mark of Granite 3 as the one that the suite puts before calls."""
    parser = GraniteToolParser()
    parser.tool_start_token, parser.tool_end_token = "<|tool_call|>", ""
    return parser


class TestGranite3(ListedChecks):
    format = Format(
        parser=granite_3(),
        write=write_list,
        tokens=TOKENS,
        tags=('{"name": ', "["),
        malformed=("[]", '[{"name": "f"}] x', "[{}]", '[{"name": "f"}, 1]'),
        closer='"}}]',
        strict_json=True,
    )


@pytest.mark.parametrize("text", ["<|tool_call|>", "<|tool_call|> ", "<tool_call>"])
@pytest.mark.parametrize("end", ["", "\n", "</tool_call>"])
def test_both_marks_open_a_list(text: str, end: str) -> None:
    turn = GraniteToolParser().parse_turn(f'Hm. {text}[{{"name": "f", "arguments": {{"x": 1}}}}, {{"name": "g"}}]{end}')
    assert summary(turn.tool_calls) == [("f", {"x": 1}), ("g", {})]
    assert turn.text == "Hm."


def test_each_call_of_a_list_is_judged_by_itself() -> None:
    calls = GraniteToolParser().parse('<|tool_call|>[{"name": "f"}, {"name": "g", "arguments": [1]}, {"name": "h"}]')
    assert [call.status.value for call in calls] == ["ok", "not_an_object", "ok"]
    assert calls[1].raw == '{"name": "g", "arguments": [1]}'


def test_more_calls_than_a_thousand_are_an_error() -> None:
    (call,) = GraniteToolParser().parse("<|tool_call|>[" + '{"name": "f"}, ' * 1000 + '{"name": "f"}]')
    assert call.status is ToolCallStatus.MALFORMED
    assert "more than 1000 calls" in (call.error or "")
