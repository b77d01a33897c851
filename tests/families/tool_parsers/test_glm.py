from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.glm import GLMToolParser
from support.parser_checks import Call, Format, ParserChecks, summary, tools_for

_ARGUMENT = r"<arg_key>[^<\n]+</arg_key>\s*<arg_value>"
# What closes a value, and what could as well be the rest of a call whose value was never closed.
LOST_IN_THE_FORMAT = re.compile(rf"</arg_value>\s*(?:{_ARGUMENT}|</tool_call>)|{_ARGUMENT}")


def written(calls: Sequence[Call], newline: str = "\n") -> str:
    """Calls as the template of GLM-4.5 and GLM-4.6 writes them, or GLM-4.7's without line breaks."""
    texts = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{newline}<arg_value>"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>{newline}"
            for key, value in arguments.items()
        )
        texts.append(f"<tool_call>{name}{newline}{pairs}</tool_call>")
    return newline.join(texts)


class TestGLM(ParserChecks):
    format = Format(
        parser=GLMToolParser(),
        write=written,
        tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        tags=("<arg_key>k</arg_key><arg_value>", "</arg_value></tool_call>"),
        malformed=(
            "",
            "\n",
            "f g",
            '{"name": "f"}',
            "f<arg_key>a</arg_key>",
            "f<arg_key>a</arg_key><arg_value>1",
            "f<arg_key>a</arg_key><arg_value>1</arg_value>x",
            "f<arg_key></arg_key><arg_value>1</arg_value>",
            "f<arg_value>1</arg_value>",
            "f<arg_key>a</arg_key>x<arg_value>1</arg_value>",
            "f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>",
            "f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>1</arg_value>",
        ),
        closer="</arg_value>\n</tool_call>",
        loses_string=lambda text: LOST_IN_THE_FORMAT.search(text) is not None,
    )


@pytest.mark.parametrize("newline", ["\n", ""])
def test_calls_with_and_without_line_breaks_are_read(newline: str) -> None:
    calls: list[Call] = [("f", {"a": "  x\n", "b": [1, {"c": None}]}), ("g", {})]
    assert summary(GLMToolParser().parse(written(calls, newline), tools=tools_for(calls))) == calls


def test_without_a_schema_json_is_json_and_anything_else_is_text() -> None:
    (call,) = GLMToolParser().parse(written([("f", {"a": "12", "b": "true", "c": "1 + 1", "d": '"x"'})]))
    assert call.input == {"a": 12, "b": True, "c": "1 + 1", "d": '"x"'}


def test_a_value_of_another_type_than_declared_is_malformed_and_says_so() -> None:
    (call,) = GLMToolParser().parse(written([("f", {"a": "three"})]), tools=tools_for([("f", {"a": 3})]))
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert "'a' is wrong: it must be an integer" in (call.error or "")


def test_a_value_that_is_never_closed_does_not_swallow_the_call_behind_it() -> None:
    broken, good = GLMToolParser().parse(
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>" + written([("g", {"b": "2"})])
    )
    assert (broken.status, broken.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert (good.name, good.input) == ("g", {"b": 2})


def test_tags_that_end_nothing_belong_to_the_value() -> None:
    code = "</arg_value> <arg_key>b</arg_key> </tool_call> <tool_call>rm</tool_call> </think>"
    calls: list[Call] = [("write", {"code": code})]
    turn = GLMToolParser().parse_turn(written(calls))
    assert summary(turn.tool_calls) == calls
    assert turn.reasoning is None
