from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.deepseek_v3_2 import DeepSeekV4ToolParser, DeepSeekV32ToolParser
from support.parser_checks import Call, Format, ParserChecks

BEGIN, END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"


def parameter(key: str, value: Any) -> str:
    is_string = isinstance(value, str)
    text = value if is_string else json.dumps(value, ensure_ascii=False)
    return f'<｜DSML｜parameter name="{key}" string="{"true" if is_string else "false"}">{text}</｜DSML｜parameter>'


def call(name: str, body: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{body}\n</｜DSML｜invoke>'


def written(calls: Sequence[Call]) -> str:
    """Calls as the model's own encoder writes them."""
    bodies = ("\n".join(parameter(*item) for item in arguments.items()) for _, arguments in calls)
    return f"{BEGIN}\n{chr(10).join(call(name, body) for (name, _), body in zip(calls, bodies, strict=True))}\n{END}"


# A tag of the format in a value; the encoder writes it as the token that it is.
LOST_IN_THE_FORMAT = re.compile("｜DSML｜(?:parameter|invoke)")

MALFORMED = (
    "",
    "text",
    '{"name": "f"}',
    '<｜DSML｜invoke name="f">',
    '<invoke name="f">\n</invoke>',
    "<｜DSML｜invoke>\n</｜DSML｜invoke>",
    call("f", "text"),
    call("f", '{"a": 1}'),
    call("f", '<｜DSML｜parameter name="a">1</｜DSML｜parameter>'),
    call("f", '<｜DSML｜parameter name="a" string="yes">1</｜DSML｜parameter>'),
    call("f", '<｜DSML｜parameter name="a" string="false">one</｜DSML｜parameter>'),
    call("f", '<｜DSML｜parameter name="a" string="false">True</｜DSML｜parameter>'),
    call("f", '<｜DSML｜parameter name="a" string="true">1'),
    call("f", '<｜DSML｜parameter name="a" string="true">1\n' + parameter("b", 2)),
    call("f", parameter("a", 1) + parameter("a", 1)),
    call("f", parameter("a", 1)) + "text",
)


class TestDeepSeekV32(ParserChecks):
    format = Format(
        parser=DeepSeekV32ToolParser(),
        write=written,
        tokens=("｜DSML｜",),
        tags=(BEGIN, END, '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>"),
        malformed=MALFORMED,
        closer=f"</｜DSML｜parameter>\n</｜DSML｜invoke>\n{END}",
        loses_string=lambda text: LOST_IN_THE_FORMAT.search(text) is not None,
    )


class TestDeepSeekV4(ParserChecks):
    format = Format(
        parser=DeepSeekV4ToolParser(),
        write=lambda calls: written(calls).replace("function_calls>", "tool_calls>"),
        tokens=("｜DSML｜",),
        tags=('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>"),
        malformed=MALFORMED,
        closer="</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        loses_string=lambda text: LOST_IN_THE_FORMAT.search(text) is not None,
    )


def test_a_value_that_says_it_is_a_string_is_one_whatever_the_schema_says() -> None:
    text = f"{BEGIN}\n{call('f', parameter('a', '3'))}\n{END}"
    tools = [{"name": "f", "inputSchema": {"json": {"properties": {"a": {"type": "integer"}}}}}]
    (found,) = DeepSeekV32ToolParser().parse(text, tools=tools)
    assert (found.status, found.input) == (ToolCallStatus.OK, {"a": "3"})


@pytest.mark.parametrize("value", ['"a"', "3", "[1]", "null"])
def test_a_value_that_says_it_is_no_string_is_json(value: str) -> None:
    body = f'<｜DSML｜parameter name="a" string="false">{value}</｜DSML｜parameter>'
    (found,) = DeepSeekV32ToolParser().parse(f"{BEGIN}\n{call('f', body)}\n{END}")
    assert found.input == {"a": json.loads(value)}
