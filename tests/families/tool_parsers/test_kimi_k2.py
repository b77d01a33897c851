from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.kimi_k2 import KimiK2ToolParser
from support.parser_checks import Call, Format, ParserChecks

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call(native_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{native_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def written(calls: Sequence[Call]) -> str:
    """Calls as the chat template writes them."""
    texts = [
        call(f"functions.{name}:{index}", json.dumps(arguments, ensure_ascii=False))
        for index, (name, arguments) in enumerate(calls)
    ]
    return BEGIN + "".join(texts) + END


class TestKimiK2(ParserChecks):
    format = Format(
        parser=KimiK2ToolParser(),
        write=written,
        tokens=(BEGIN, END, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        tags=("functions.f:0", '{"a": "'),
        malformed=(
            "",
            "text",
            "{}",
            call("0", "{}"),
            call("f", "{}"),
            call("functions.f:x", "{}"),
            call("functions.f:0", ""),
            call("functions.f:0", "{"),
            call("functions.f:0", "{} x"),
            call("functions.f:0", "{'a': 1}"),
            call("functions.f:0", '{"a": 1, "a": 2}'),
            call("functions.f:0", '{"a": NaN}'),
            "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
        ),
        closer="}<|tool_call_end|>" + END,
        strict_json=True,
    )


def test_the_models_own_id_is_kept_and_is_not_the_calls_id() -> None:
    calls = KimiK2ToolParser().parse(BEGIN + call("functions.f:3", "{}") + call("search:14", "{}") + END)
    assert [(found.name, found.native_id) for found in calls] == [("f", "functions.f:3"), ("search", "search:14")]
    assert all(found.id != found.native_id for found in calls)


@pytest.mark.parametrize("arguments", ["{", "[]", '{"a": 1, "a": 1}', "{} x"])
def test_a_call_that_failed_keeps_the_models_own_id(arguments: str) -> None:
    for behind in (END, f" {END} and {END}", ""):
        (found,) = KimiK2ToolParser().parse(BEGIN + call("functions.f:3", arguments) + behind)
        assert (found.is_error, found.native_id, found.attempted_name) == (True, "functions.f:3", "f")


@pytest.mark.parametrize("arguments", ["[]", '"x"', "1", "null"])
def test_arguments_that_are_no_object_are_said_to_be_none(arguments: str) -> None:
    (found,) = KimiK2ToolParser().parse(BEGIN + call("functions.f:0", arguments) + END)
    assert found.status is ToolCallStatus.NOT_AN_OBJECT


def test_white_space_between_marks_and_around_arguments_does_not_matter() -> None:
    body = "\n<|tool_call_begin|> functions.f:0 <|tool_call_argument_begin|>\n{\n}\n <|tool_call_end|>\n"
    (found,) = KimiK2ToolParser().parse(BEGIN + body + END)
    assert (found.name, found.input) == ("f", {})


def test_a_call_without_a_section_is_text() -> None:
    turn = KimiK2ToolParser().parse_turn(call("functions.f:0", "{}"))
    assert (turn.tool_calls, turn.text) == ((), call("functions.f:0", "{}"))
