from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.minimax_m3 import MiniMaxM3ToolParser
from support.parser_checks import KEYS, Call, Format, ParserChecks, summary, tools_for

NS = "]<]minimax[>["
BEGIN, END = f"{NS}<tool_call>", f"{NS}</tool_call>"


def element(key: str, value: Any) -> str:
    if isinstance(value, dict):
        text = "".join(element(*item) for item in value.items())
    elif isinstance(value, list):
        text = "".join(element("item", inner) for inner in value)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return f"{NS}<{key}>{text}{NS}</{key}>"


def call(name: str, body: str) -> str:
    return f'{NS}<invoke name="{name}">{body}{NS}</invoke>\n'


def written(calls: Sequence[Call]) -> str:
    """Calls as the chat template writes them."""
    bodies = ("".join(element(*item) for item in arguments.items()) for _, arguments in calls)
    return f"{BEGIN}\n{''.join(call(name, body) for (name, _), body in zip(calls, bodies, strict=True))}{END}"


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Values that elements can carry: no null, and lists of one type, which is what a schema can say of them."""
    texts = texts.map(lambda text: text.replace(NS, "[>["))
    scalars = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
    lists = st.lists(texts, max_size=3) | st.lists(st.integers(), max_size=3)
    nested = st.dictionaries(KEYS.filter(lambda key: key != "item"), scalars | lists, max_size=3)
    return scalars | lists | nested | st.lists(nested, max_size=1) | st.lists(lists, max_size=1)


class TestMiniMaxM3(ParserChecks):
    format = Format(
        parser=MiniMaxM3ToolParser(),
        write=written,
        tokens=(NS, "<mm:think>", "</mm:think>"),
        tags=(BEGIN, END, f'{NS}<invoke name="f">', f"{NS}<a>", f"{NS}</a>", f"{NS}</invoke>", f"{NS}<item>"),
        malformed=(
            "",
            "text",
            f'{NS}<invoke name="f">',
            '<invoke name="f"></invoke>',
            call("f", "text"),
            call("f", f"{NS}<a>1"),
            call("f", f"{NS}<a>1</a>"),
            call("f", f"{NS}<a>1{NS}</b>"),
            call("f", f"{NS}<a>1{NS}<b>2{NS}</b>{NS}</a>"),
            call("f", f"{NS}<a>{NS}<b>2{NS}</b>1{NS}</a>"),
            call("f", element("a", 1) * 2),
            call("f", element("a", {"b": 1}).replace(f"{NS}</b>", f"{NS}</b>{NS}<b>1{NS}</b>")),
            call("f", f"{NS}<a>" * 65 + f"{NS}</a>" * 65),
            call("f", "") + "text",
        ),
        delimits=False,
        closer=f"{NS}</a>{NS}</invoke>\n{END}",
        think=("<mm:think>", "</mm:think>"),
        values=values,
    )


def value_of(body: str, schema: Any, **root: Any) -> Any:
    tools = [{"name": "f", "inputSchema": {"json": {"type": "object", "properties": {"x": schema}, **root}}}]
    (found,) = MiniMaxM3ToolParser().parse(f"{BEGIN}\n{call('f', f'{NS}<x>{body}{NS}</x>')}{END}", tools=tools)
    assert found.status is ToolCallStatus.OK, found.error
    return found.input["x"]


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("", {"type": "string"}),
        ([], {"type": "array"}),
        ({}, {"type": "object"}),
        ([""], {"type": "array", "items": {"type": "string"}}),
        ([[], ["1"]], {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
        (["1", "true"], {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
        ({"item": "1"}, {"type": "object", "properties": {"item": {"type": "string"}}}),
        ({"item": 1}, {"type": "object"}),
        ({"a": "1"}, {"$ref": "#/$defs/Words"}),
        ({"a": {"a": "1"}}, {"type": "object", "additionalProperties": {"$ref": "#/$defs/Words"}}),
        ([1, {"a": None}], {}),
        ({"a": [1, "x"], "b": {"c": True}}, None),
    ],
)
def test_values_have_the_type_that_the_schema_declares_on_every_level(value: Any, schema: Any) -> None:
    definitions = {"Words": {"type": "object", "additionalProperties": {"type": "string"}}}
    text = element("x", value).removeprefix(f"{NS}<x>").removesuffix(f"{NS}</x>")
    assert repr(value_of(text, schema, **{"$defs": definitions})) == repr(value)


@pytest.mark.parametrize(
    ("value", "schema", "error"),
    [
        ("three", {"type": "integer"}, "'x' is wrong: it must be an integer"),
        ({"a": 1}, {"type": "string"}, "'x' is wrong: it holds elements, but must be string"),
        ({"a": 1}, {"type": "array"}, "'x' is wrong: it holds elements, but must be array"),
        ({"a": "b"}, {"properties": {"a": {"type": "number"}}}, "'x' is wrong: 'a' is wrong: it must be a number"),
    ],
)
def test_a_value_of_another_type_than_declared_is_malformed_and_says_where(value: Any, schema: Any, error: str) -> None:
    tools = [{"name": "f", "inputSchema": {"json": {"properties": {"x": schema}}}}]
    (found,) = MiniMaxM3ToolParser().parse(written([("f", {"x": value})]), tools=tools)
    assert (found.status, found.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert error in (found.error or "")


def test_a_token_without_a_tag_behind_it_is_text() -> None:
    calls: list[Call] = [("f", {"a": f"{NS} is a token"})]
    assert summary(MiniMaxM3ToolParser().parse(written(calls), tools=tools_for(calls))) == calls


def test_white_space_between_elements_does_not_matter() -> None:
    body = f"\n  {NS}<a>\n  {NS}<item>1{NS}</item>\n  {NS}</a>\n"
    assert summary(MiniMaxM3ToolParser().parse(f"{BEGIN}{call('f', body)}{END}")) == [("f", {"a": [1]})]
