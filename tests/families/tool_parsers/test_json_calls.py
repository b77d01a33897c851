"""Formats whose calls are JSON between marks, or elements."""

import json
from itertools import starmap

import pytest
from hypothesis import strategies as st

from strands_sglang.tool_parsers import (
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    KimiK2ToolParser,
    MiniMaxM3ToolParser,
    SmolLM3ToolParser,
    ToolCallStatus,
    get_tool_parser,
)
from support.parser_checks import (
    KEYS,
    Format,
    ParserChecks,
    json_text,
    summary,
    tools_for,
    write_json_objects,
    writer,
)

DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


DEEPSEEK_V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
deepseek_v3_written = writer(DEEPSEEK_V3_CALL, "\n", DEEPSEEK_BEGIN, DEEPSEEK_END)


class TestDeepSeekV3(ParserChecks):
    format = Format(
        parser=DeepSeekV3ToolParser(),
        write=deepseek_v3_written,
        tokens=(DEEPSEEK_BEGIN, DEEPSEEK_END, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        tags=("function", "\n```json\n", "\n```"),
        malformed=(
            "",
            "text",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>",
            DEEPSEEK_V3_CALL % ("", "{}"),
            DEEPSEEK_V3_CALL % ("f g", "{}"),
            DEEPSEEK_V3_CALL % ("f", ""),
            DEEPSEEK_V3_CALL % ("f", "{"),
            DEEPSEEK_V3_CALL % ("f", '{"a": 1} // first'),
            DEEPSEEK_V3_CALL % ("f", '{"a": 1, "a": 2}'),
            (DEEPSEEK_V3_CALL % ("f", "{}")).replace("\n```<", "<"),
        ),
        closer="\n```<｜tool▁call▁end｜>" + DEEPSEEK_END,
        strict_json=True,
    )


def test_deepseek_v3_arguments_that_are_no_object_are_said_to_be_none():
    (found,) = DeepSeekV3ToolParser().parse(DEEPSEEK_BEGIN + DEEPSEEK_V3_CALL % ("f", "[]") + DEEPSEEK_END)
    assert (found.status, found.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


def test_a_fence_inside_a_string_does_not_end_the_arguments():
    calls = [("write", {"text": "```json\n{}\n```<｜tool▁call▁end｜>"})]
    assert summary(DeepSeekV3ToolParser().parse(deepseek_v3_written(calls))) == calls


def test_white_space_around_the_fence_does_not_matter():
    found = DeepSeekV3ToolParser().parse(deepseek_v3_written([("f", {"a": 1})]).replace("\n```<", "\n```\n<"))
    assert summary(found) == [("f", {"a": 1})]


DEEPSEEK_V3_1_CALL = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"


class TestDeepSeekV31(ParserChecks):
    format = Format(
        parser=DeepSeekV31ToolParser(),
        write=writer(DEEPSEEK_V3_1_CALL, begin=DEEPSEEK_BEGIN, end=DEEPSEEK_END),
        tokens=(
            DEEPSEEK_BEGIN,
            DEEPSEEK_END,
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ),
        tags=('f<｜tool▁sep｜>{"a": "',),
        malformed=(
            "",
            "text",
            "f<｜tool▁sep｜>{}",
            DEEPSEEK_V3_1_CALL % ("", "{}"),
            DEEPSEEK_V3_1_CALL % ("f g", "{}"),
            DEEPSEEK_V3_1_CALL % ("f", ""),
            DEEPSEEK_V3_1_CALL % ("f", "```json\n{}\n```"),
            DEEPSEEK_V3_1_CALL % ("f", '{"a": 1,}'),
            DEEPSEEK_V3_1_CALL % ("f", '{"a": 1, "a": 2}'),
            DEEPSEEK_V3_1_CALL % ("f", "{}{}"),
        ),
        closer="}<｜tool▁call▁end｜>" + DEEPSEEK_END,
        strict_json=True,
    )


def test_deepseek_v3_1_arguments_that_are_no_object_are_said_to_be_none():
    (found,) = DeepSeekV31ToolParser().parse(DEEPSEEK_BEGIN + DEEPSEEK_V3_1_CALL % ("f", '"{}"') + DEEPSEEK_END)
    assert (found.status, found.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


KIMI_K2_BEGIN, KIMI_K2_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


KIMI_K2_CALL = "<|tool_call_begin|>%s<|tool_call_argument_begin|>%s<|tool_call_end|>"


def kimi_k2_written(calls):
    """Calls as the chat template writes them."""
    texts = [
        KIMI_K2_CALL % (f"functions.{name}:{index}", json_text(arguments))
        for index, (name, arguments) in enumerate(calls)
    ]
    return KIMI_K2_BEGIN + "".join(texts) + KIMI_K2_END


class TestKimiK2(ParserChecks):
    format = Format(
        parser=KimiK2ToolParser(),
        write=kimi_k2_written,
        tokens=(KIMI_K2_BEGIN, KIMI_K2_END, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        tags=("functions.f:0", '{"a": "'),
        malformed=(
            "",
            "text",
            "{}",
            KIMI_K2_CALL % ("0", "{}"),
            KIMI_K2_CALL % ("f", "{}"),
            KIMI_K2_CALL % ("functions.f:x", "{}"),
            KIMI_K2_CALL % ("functions.f:0", ""),
            KIMI_K2_CALL % ("functions.f:0", "{"),
            KIMI_K2_CALL % ("functions.f:0", "{} x"),
            KIMI_K2_CALL % ("functions.f:0", "{'a': 1}"),
            KIMI_K2_CALL % ("functions.f:0", '{"a": 1, "a": 2}'),
            KIMI_K2_CALL % ("functions.f:0", '{"a": NaN}'),
            "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
        ),
        closer="}<|tool_call_end|>" + KIMI_K2_END,
        strict_json=True,
    )


def test_the_models_own_id_is_kept_and_is_not_the_calls_id():
    calls = KimiK2ToolParser().parse(
        KIMI_K2_BEGIN + KIMI_K2_CALL % ("functions.f:3", "{}") + KIMI_K2_CALL % ("search:14", "{}") + KIMI_K2_END
    )
    assert [(found.name, found.native_id) for found in calls] == [("f", "functions.f:3"), ("search", "search:14")]
    assert all(found.id != found.native_id for found in calls)


@pytest.mark.parametrize("arguments", ["{", "[]", '{"a": 1, "a": 1}', "{} x"])
def test_a_call_that_failed_keeps_the_models_own_id(arguments):
    for behind in (KIMI_K2_END, f" {KIMI_K2_END} and {KIMI_K2_END}", ""):
        (found,) = KimiK2ToolParser().parse(KIMI_K2_BEGIN + KIMI_K2_CALL % ("functions.f:3", arguments) + behind)
        assert (found.is_error, found.native_id, found.attempted_name) == (True, "functions.f:3", "f")


@pytest.mark.parametrize("arguments", ["[]", '"x"', "1", "null"])
def test_kimi_k2_arguments_that_are_no_object_are_said_to_be_none(arguments):
    (found,) = KimiK2ToolParser().parse(KIMI_K2_BEGIN + KIMI_K2_CALL % ("functions.f:0", arguments) + KIMI_K2_END)
    assert found.status is ToolCallStatus.NOT_AN_OBJECT


def test_white_space_between_marks_and_around_arguments_does_not_matter():
    body = "\n<|tool_call_begin|> functions.f:0 <|tool_call_argument_begin|>\n{\n}\n <|tool_call_end|>\n"
    (found,) = KimiK2ToolParser().parse(KIMI_K2_BEGIN + body + KIMI_K2_END)
    assert (found.name, found.input) == ("f", {})


def test_a_call_without_a_section_is_text():
    turn = KimiK2ToolParser().parse_turn(KIMI_K2_CALL % ("functions.f:0", "{}"))
    assert (turn.tool_calls, turn.text) == ((), KIMI_K2_CALL % ("functions.f:0", "{}"))


class TestSmolLM3(ParserChecks):
    format = Format(
        parser=SmolLM3ToolParser(),
        write=write_json_objects,
        tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        tags=("<code>", "</code>", '{"name": '),
        malformed=("", "f", '{"name": "f"} x', "[]", '{"arguments": {}}'),
        closer='"}}</tool_call>',
        strict_json=True,
    )


def test_the_parser_is_found_by_name_and_code_is_text():
    turn = get_tool_parser("smollm3").parse_turn("<code>print(1)</code>")
    assert (turn.text, turn.tool_calls) == ("<code>print(1)</code>", ())


NS = "]<]minimax[>["
M3_BEGIN, M3_END = f"{NS}<tool_call>", f"{NS}</tool_call>"


def element(key, value):
    if isinstance(value, dict):
        text = "".join(element(*item) for item in value.items())
    elif isinstance(value, list):
        text = "".join(element("item", inner) for inner in value)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return f"{NS}<{key}>{text}{NS}</{key}>"


M3_CALL = f'{NS}<invoke name="%s">%s{NS}</invoke>\n'
m3_written = writer(M3_CALL, "", f"{M3_BEGIN}\n", M3_END, lambda values: "".join(starmap(element, values.items())))


def values(texts):
    """Values that elements can carry: no null, and lists of one type, which is what a schema can say of them."""
    texts = texts.map(lambda text: text.replace(NS, "[>["))
    scalars = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
    lists = st.lists(texts, max_size=3) | st.lists(st.integers(), max_size=3)
    nested = st.dictionaries(KEYS.filter(lambda key: key != "item"), scalars | lists, max_size=3)
    return scalars | lists | nested | st.lists(nested, max_size=1) | st.lists(lists, max_size=1)


class TestMiniMaxM3(ParserChecks):
    format = Format(
        parser=MiniMaxM3ToolParser(),
        write=m3_written,
        tokens=(NS, "<mm:think>", "</mm:think>"),
        tags=(
            M3_BEGIN,
            M3_END,
            f'{NS}<invoke name="f">',
            f"{NS}<a>",
            f"{NS}</a>",
            f"{NS}</invoke>",
            f"{NS}<item>",
        ),
        malformed=(
            "",
            "text",
            f'{NS}<invoke name="f">',
            '<invoke name="f"></invoke>',
            M3_CALL % ("f", "text"),
            M3_CALL % ("f", f"{NS}<a>1"),
            M3_CALL % ("f", f"{NS}<a>1</a>"),
            M3_CALL % ("f", f"{NS}<a>1{NS}</b>"),
            M3_CALL % ("f", f"{NS}<a>1{NS}<b>2{NS}</b>{NS}</a>"),
            M3_CALL % ("f", f"{NS}<a>{NS}<b>2{NS}</b>1{NS}</a>"),
            M3_CALL % ("f", element("a", 1) * 2),
            M3_CALL % ("f", element("a", {"b": 1}).replace(f"{NS}</b>", f"{NS}</b>{NS}<b>1{NS}</b>")),
            M3_CALL % ("f", f"{NS}<a>" * 65 + f"{NS}</a>" * 65),
            M3_CALL % ("f", "") + "text",
        ),
        delimits=False,
        closer=f"{NS}</a>{NS}</invoke>\n{M3_END}",
        think=("<mm:think>", "</mm:think>"),
        values=values,
    )


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
def test_values_have_the_type_that_the_schema_declares_on_every_level(value, schema):
    definitions = {"Words": {"type": "object", "additionalProperties": {"type": "string"}}}
    root = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    text = m3_written([("f", {"x": value})])
    (found,) = MiniMaxM3ToolParser().parse(text, tools=[{"name": "f", "inputSchema": {"json": root}}])
    assert found.status is ToolCallStatus.OK, found.error
    assert repr(found.input["x"]) == repr(value)


@pytest.mark.parametrize(
    ("value", "schema", "error"),
    [
        ("three", {"type": "integer"}, "'x' is wrong: it must be an integer"),
        ({"a": 1}, {"type": "string"}, "'x' is wrong: it holds elements, but must be string"),
        ({"a": 1}, {"type": "array"}, "'x' is wrong: it holds elements, but must be array"),
        ({"a": "b"}, {"properties": {"a": {"type": "number"}}}, "'x' is wrong: 'a' is wrong: it must be a number"),
    ],
)
def test_a_value_of_another_type_than_declared_is_malformed_and_says_where(value, schema, error):
    tools = [{"name": "f", "inputSchema": {"json": {"properties": {"x": schema}}}}]
    (found,) = MiniMaxM3ToolParser().parse(m3_written([("f", {"x": value})]), tools=tools)
    assert (found.status, found.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert error in (found.error or "")


def test_a_token_without_a_tag_behind_it_is_text():
    calls = [("f", {"a": f"{NS} is a token"})]
    assert summary(MiniMaxM3ToolParser().parse(m3_written(calls), tools=tools_for(calls))) == calls


def test_white_space_between_elements_does_not_matter():
    body = f"\n  {NS}<a>\n  {NS}<item>1{NS}</item>\n  {NS}</a>\n"
    assert summary(MiniMaxM3ToolParser().parse(f"{M3_BEGIN}{M3_CALL % ('f', body)}{M3_END}")) == [("f", {"a": [1]})]
