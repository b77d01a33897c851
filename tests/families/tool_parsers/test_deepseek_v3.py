from __future__ import annotations

import json
from collections.abc import Sequence

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.deepseek_v3 import DeepSeekV3ToolParser
from support.parser_checks import Call, Format, ParserChecks, summary

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def call(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def written(calls: Sequence[Call]) -> str:
    """Calls as the chat template writes them."""
    return BEGIN + "\n".join(call(name, json.dumps(given, ensure_ascii=False)) for name, given in calls) + END


class TestDeepSeekV3(ParserChecks):
    format = Format(
        parser=DeepSeekV3ToolParser(),
        write=written,
        tokens=(BEGIN, END, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        tags=("function", "\n```json\n", "\n```"),
        malformed=(
            "",
            "text",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>",
            call("", "{}"),
            call("f g", "{}"),
            call("f", ""),
            call("f", "{"),
            call("f", '{"a": 1} // first'),
            call("f", '{"a": 1, "a": 2}'),
            call("f", "{}").replace("\n```<", "<"),
        ),
        closer="\n```<｜tool▁call▁end｜>" + END,
        strict_json=True,
    )


def test_arguments_that_are_no_object_are_said_to_be_none() -> None:
    (found,) = DeepSeekV3ToolParser().parse(BEGIN + call("f", "[]") + END)
    assert (found.status, found.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


def test_a_fence_inside_a_string_does_not_end_the_arguments() -> None:
    calls: list[Call] = [("write", {"text": "```json\n{}\n```<｜tool▁call▁end｜>"})]
    assert summary(DeepSeekV3ToolParser().parse(written(calls))) == calls


def test_white_space_around_the_fence_does_not_matter() -> None:
    found = DeepSeekV3ToolParser().parse(written([("f", {"a": 1})]).replace("\n```<", "\n```\n<"))
    assert summary(found) == [("f", {"a": 1})]
