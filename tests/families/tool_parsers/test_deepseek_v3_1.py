from __future__ import annotations

import json
from collections.abc import Sequence

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.deepseek_v3_1 import DeepSeekV31ToolParser
from support.parser_checks import Call, Format, ParserChecks

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def call(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def written(calls: Sequence[Call]) -> str:
    """Calls as the chat template writes them."""
    return BEGIN + "".join(call(name, json.dumps(given, ensure_ascii=False)) for name, given in calls) + END


class TestDeepSeekV31(ParserChecks):
    format = Format(
        parser=DeepSeekV31ToolParser(),
        write=written,
        tokens=(BEGIN, END, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        tags=('f<｜tool▁sep｜>{"a": "',),
        malformed=(
            "",
            "text",
            "f<｜tool▁sep｜>{}",
            call("", "{}"),
            call("f g", "{}"),
            call("f", ""),
            call("f", "```json\n{}\n```"),
            call("f", '{"a": 1,}'),
            call("f", '{"a": 1, "a": 2}'),
            call("f", "{}{}"),
        ),
        closer="}<｜tool▁call▁end｜>" + END,
        strict_json=True,
    )


def test_arguments_that_are_no_object_are_said_to_be_none() -> None:
    (found,) = DeepSeekV31ToolParser().parse(BEGIN + call("f", '"{}"') + END)
    assert (found.status, found.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")
