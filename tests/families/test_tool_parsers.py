"""Every tool call format: the shared suite, and tests of its own.

In order: JSON between marks, plain text between tags, lists that end the turn, and other notations.
"""

import copy
import json
import re
from itertools import starmap

import pytest
from hypothesis import given, strategies as st

from strands_sglang.tool_parsers import (
    DeepSeekV3ToolParser,
    DeepSeekV4ToolParser,
    DeepSeekV31ToolParser,
    DeepSeekV32ToolParser,
    Gemma4ToolParser,
    GLMToolParser,
    GraniteToolParser,
    HarmonyToolParser,
    KimiK2ToolParser,
    KimiK3ToolParser,
    Llama3JSONToolParser,
    Llama4PythonicToolParser,
    MiniMaxM2ToolParser,
    MiniMaxM3ToolParser,
    MistralToolParser,
    Phi4ToolParser,
    SeedOSSToolParser,
    SmolLM3ToolParser,
    ToolCallStatus,
    ToolParseResult,
    get_tool_parser,
)
from support.families import load_template, load_tokenizer
from support.parser_checks import (
    JSON_TYPE,
    KEYS,
    Format,
    ListedChecks,
    ParserChecks,
    json_text,
    json_values,
    pairs,
    same,
    sampled,
    summary,
    tokenizer_with,
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


def test_a_fence_inside_a_string_does_not_end_the_arguments():
    calls = [("write", {"text": "```json\n{}\n```<｜tool▁call▁end｜>"})]
    assert summary(DeepSeekV3ToolParser().parse(deepseek_v3_written(calls))) == calls


def test_white_space_around_the_fence_is_ignored():
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


KIMI_K2_BEGIN, KIMI_K2_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


KIMI_K2_CALL = "<|tool_call_begin|>%s<|tool_call_argument_begin|>%s<|tool_call_end|>"


def kimi_k2_written(calls):
    """Write calls as the chat template does."""
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


def test_the_native_id_is_kept_next_to_the_id():
    calls = KimiK2ToolParser().parse(
        KIMI_K2_BEGIN + KIMI_K2_CALL % ("functions.f:3", "{}") + KIMI_K2_CALL % ("search:14", "{}") + KIMI_K2_END
    )
    assert [(found.name, found.native_id) for found in calls] == [("f", "functions.f:3"), ("search", "search:14")]
    assert all(found.id != found.native_id for found in calls)


@pytest.mark.parametrize("arguments", ["{", "[]", '{"a": 1, "a": 1}', "{} x"])
def test_a_failed_call_keeps_its_native_id(arguments):
    for after in (KIMI_K2_END, f" {KIMI_K2_END} and {KIMI_K2_END}", ""):
        (found,) = KimiK2ToolParser().parse(KIMI_K2_BEGIN + KIMI_K2_CALL % ("functions.f:3", arguments) + after)
        assert (found.is_error, found.native_id, found.attempted_name) == (True, "functions.f:3", "f")


def test_white_space_around_marks_and_arguments_is_ignored():
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


def test_smollm3_is_registered_and_reads_code_as_text():
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
    """Values that elements can represent: no null, and lists of one type, which a schema can describe."""
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
def test_nested_values_have_their_declared_types(value, schema):
    definitions = {"Words": {"type": "object", "additionalProperties": {"type": "string"}}}
    root = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    text = m3_written([("f", {"x": value})])
    (found,) = MiniMaxM3ToolParser().parse(text, tools=[{"name": "f", "inputSchema": {"json": root}}])
    assert found.status is ToolCallStatus.OK, found.error
    assert repr(found.input["x"]) == repr(value)


@pytest.mark.parametrize(
    ("value", "schema", "error"),
    [
        ("three", {"type": "integer"}, "'x' is invalid: it must be an integer"),
        ({"a": 1}, {"type": "string"}, "'x' is invalid: it contains elements, but must be string"),
        ({"a": 1}, {"type": "array"}, "'x' is invalid: it contains elements, but must be array"),
        ({"a": "b"}, {"properties": {"a": {"type": "number"}}}, "'x' is invalid: 'a' is invalid: it must be a number"),
    ],
)
def test_the_error_of_a_wrong_type_says_where(value, schema, error):
    tools = [{"name": "f", "inputSchema": {"json": {"properties": {"x": schema}}}}]
    (found,) = MiniMaxM3ToolParser().parse(m3_written([("f", {"x": value})]), tools=tools)
    assert (found.status, found.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert error in (found.error or "")


def test_white_space_between_elements_is_ignored():
    body = f"\n  {NS}<a>\n  {NS}<item>1{NS}</item>\n  {NS}</a>\n"
    assert summary(MiniMaxM3ToolParser().parse(f"{M3_BEGIN}{M3_CALL % ('f', body)}{M3_END}")) == [("f", {"a": [1]})]


DSML_BEGIN, DSML_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"


def parameter(key, value):
    is_string = isinstance(value, str)
    text = value if is_string else json.dumps(value, ensure_ascii=False)
    return f'<｜DSML｜parameter name="{key}" string="{"true" if is_string else "false"}">{text}</｜DSML｜parameter>'


DSML_CALL = '<｜DSML｜invoke name="%s">\n%s\n</｜DSML｜invoke>'

MALFORMED = (
    "",
    "text",
    '{"name": "f"}',
    '<｜DSML｜invoke name="f">',
    '<invoke name="f">\n</invoke>',
    "<｜DSML｜invoke>\n</｜DSML｜invoke>",
    DSML_CALL % ("f", "text"),
    DSML_CALL % ("f", '{"a": 1}'),
    DSML_CALL % ("f", '<｜DSML｜parameter name="a">1</｜DSML｜parameter>'),
    DSML_CALL % ("f", '<｜DSML｜parameter name="a" string="yes">1</｜DSML｜parameter>'),
    DSML_CALL % ("f", '<｜DSML｜parameter name="a" string="false">one</｜DSML｜parameter>'),
    DSML_CALL % ("f", '<｜DSML｜parameter name="a" string="false">True</｜DSML｜parameter>'),
    DSML_CALL % ("f", '<｜DSML｜parameter name="a" string="true">1'),
    DSML_CALL % ("f", '<｜DSML｜parameter name="a" string="true">1\n' + parameter("b", 2)),
    DSML_CALL % ("f", parameter("a", 1) + parameter("a", 1)),
    DSML_CALL % ("f", parameter("a", 1)) + "text",
)


dsml_written = writer(
    DSML_CALL,
    "\n",
    f"{DSML_BEGIN}\n",
    f"\n{DSML_END}",
    lambda values: "\n".join(starmap(parameter, values.items())),
)
# A tag of the format in a value, which the encoder writes as its token.
dsml_loses = re.compile("｜DSML｜(?:parameter|invoke)").search


class TestDeepSeekV32(ParserChecks):
    format = Format(
        parser=DeepSeekV32ToolParser(),
        write=dsml_written,
        tokens=("｜DSML｜",),
        tags=(
            DSML_BEGIN,
            DSML_END,
            '<｜DSML｜parameter name="a" string="true">',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
        ),
        malformed=MALFORMED,
        closer=f"</｜DSML｜parameter>\n</｜DSML｜invoke>\n{DSML_END}",
        loses_string=dsml_loses,
    )


class TestDeepSeekV4(ParserChecks):
    format = Format(
        parser=DeepSeekV4ToolParser(),
        write=lambda calls: dsml_written(calls).replace("function_calls>", "tool_calls>"),
        tokens=("｜DSML｜",),
        tags=('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>"),
        malformed=MALFORMED,
        closer="</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        loses_string=dsml_loses,
    )


def test_a_value_marked_as_a_string_ignores_the_schema():
    text = f"{DSML_BEGIN}\n{DSML_CALL % ('f', parameter('a', '3'))}\n{DSML_END}"
    tools = [{"name": "f", "inputSchema": {"json": {"properties": {"a": {"type": "integer"}}}}}]
    (found,) = DeepSeekV32ToolParser().parse(text, tools=tools)
    assert (found.status, found.input) == (ToolCallStatus.OK, {"a": "3"})


@pytest.mark.parametrize("value", ['"a"', "3", "[1]", "null"])
def test_a_value_not_marked_as_a_string_is_json(value):
    body = f'<｜DSML｜parameter name="a" string="false">{value}</｜DSML｜parameter>'
    (found,) = DeepSeekV32ToolParser().parse(f"{DSML_BEGIN}\n{DSML_CALL % ('f', body)}\n{DSML_END}")
    assert found.input == {"a": json.loads(value)}


_ARGUMENT = r"<arg_key>[^<\n]+</arg_key>\s*<arg_value>"
glm_written = writer(
    "<tool_call>%s\n%s</tool_call>",
    "\n",
    arguments=pairs("<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"),
)


class TestGLM(ParserChecks):
    format = Format(
        parser=GLMToolParser(),
        write=glm_written,
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
        # The end of a value, and text that could be the rest of a call whose value was never closed.
        loses_string=re.compile(rf"</arg_value>\s*(?:{_ARGUMENT}|</tool_call>)|{_ARGUMENT}").search,
    )


def test_line_breaks_between_glm_tags_are_optional():
    glm_4_7 = writer("<tool_call>%s%s</tool_call>", arguments=pairs("<arg_key>%s</arg_key><arg_value>%s</arg_value>"))
    calls = [("f", {"a": "  x\n", "b": [1, {"c": None}]}), ("g", {})]
    for write in (glm_written, glm_4_7):
        assert summary(GLMToolParser().parse(write(calls), tools=tools_for(calls))) == calls


def test_an_unclosed_value_does_not_swallow_the_next_call():
    broken, good = GLMToolParser().parse(
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>" + glm_written([("g", {"b": "2"})])
    )
    assert (broken.status, broken.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert (good.name, good.input) == ("g", {"b": 2})


def opened(tag, **attributes):
    escaped = (
        f' {key}="{str(value).replace("&", "&amp;").replace(chr(34), "&quot;")}"' for key, value in attributes.items()
    )
    return f"<|open|>{tag}{''.join(escaped)}<|sep|>"


def closed(tag):
    return f"<|close|>{tag}<|sep|>"


def argument(key, value):
    kind = "number" if isinstance(value, int) and not isinstance(value, bool) else JSON_TYPE[type(value)]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return opened("argument", key=key, type=kind) + text + closed("argument")


def kimi_k3_call(name, body, index=1):
    return opened("call", tool=name, index=index) + body + closed("call")


def kimi_k3_written(calls):
    """Write calls as the chat template does."""
    bodies = ("".join(argument(*item) for item in arguments.items()) for _, arguments in calls)
    texts = (kimi_k3_call(name, body, at) for at, ((name, _), body) in enumerate(zip(calls, bodies, strict=True), 1))
    return opened("tools") + "".join(texts) + closed("tools")


class TestKimiK3(ParserChecks):
    format = Format(
        parser=KimiK3ToolParser(),
        write=kimi_k3_written,
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        tags=(opened("tools"), closed("tools"), opened("argument", key="a", type="string"), closed("argument")),
        malformed=(
            "",
            "text",
            "{}",
            opened("call", tool="f", index=1),
            opened("call", tool="f") + closed("call"),
            kimi_k3_call("f", "text"),
            kimi_k3_call("f", opened("argument", key="a") + "1" + closed("argument")),
            kimi_k3_call("f", opened("argument", key="a", type="word") + "1" + closed("argument")),
            kimi_k3_call("f", opened("argument", key="a", type="number") + "one" + closed("argument")),
            kimi_k3_call("f", opened("argument", key="a", type="object") + "[]" + closed("argument")),
            kimi_k3_call("f", opened("argument", key="a", type="string") + "1"),
            kimi_k3_call("f", argument("a", 1) * 2),
            kimi_k3_call("f", argument("a", 1) + opened("json", type="object") + "{}" + closed("json")),
            kimi_k3_call("f", opened("json", type="object") + "{" + closed("json")),
            kimi_k3_call("f", opened("json", type="object") + "{}" + closed("json") + argument("a", 1)),
            kimi_k3_call("f", "") + "text",
        ),
        closer=closed("argument") + closed("call") + closed("tools"),
        # A tag of the format in a value, which the template writes as its tokens.
        loses_string=re.compile(r"<\|(?:open|close)\|>(?:argument|call)").search,
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    )


def test_the_response_tags_are_not_part_of_the_text():
    spoken = "I look it up." + closed("response")
    turn = KimiK3ToolParser().parse_turn(
        f"Hm.{closed('think')}{opened('response')}{spoken}{kimi_k3_written([('ls', {})])}{closed('message')}",
        reasoning_open=True,
    )
    assert (turn.reasoning, turn.text, summary(turn.tool_calls)) == ("Hm.", "I look it up.", [("ls", {})])
    assert KimiK3ToolParser().parse_turn(spoken + closed("message")).text == "I look it up."


def test_arguments_may_be_one_json_object():
    body = opened("json", type="object") + '{"a": "<|close|>json<|sep|>", "b": [1]}' + closed("json")
    text = opened("tools") + kimi_k3_call("f", body) + kimi_k3_call("g", argument("x", True), 2) + closed("tools")
    assert summary(KimiK3ToolParser().parse(text)) == [
        ("f", {"a": "<|close|>json<|sep|>", "b": [1]}),
        ("g", {"x": True}),
    ]


@pytest.mark.parametrize("key", ['a"b', "a&b", "&quot;", "&amp;quot;", "ä b"])
def test_names_of_arguments_are_unescaped(key):
    assert summary(KimiK3ToolParser().parse(kimi_k3_written([("f", {key: 1})]))) == [("f", {key: 1})]


MINIMAX_M2_BEGIN, MINIMAX_M2_END = "<minimax:tool_call>", "</minimax:tool_call>"


MINIMAX_M2_CALL = '<invoke name="%s">\n%s</invoke>\n'
minimax_m2_written = writer(
    MINIMAX_M2_CALL,
    begin=f"{MINIMAX_M2_BEGIN}\n",
    end=MINIMAX_M2_END,
    arguments=pairs('<parameter name="%s">%s</parameter>\n'),
)
_PARAMETER = r'<parameter name="[^"\n]+">'
_CALL_ENDS = r'</invoke>\s*(?:<invoke name="[^"\n]+">|</minimax:tool_call>)'


class TestMiniMaxM2(ParserChecks):
    format = Format(
        parser=MiniMaxM2ToolParser(),
        write=minimax_m2_written,
        tokens=(MINIMAX_M2_BEGIN, MINIMAX_M2_END),
        tags=('<invoke name="f">', '<parameter name="a">', "</parameter>", "</invoke>"),
        malformed=(
            "",
            "text",
            '{"name": "f"}',
            '<invoke name="f">',
            "<invoke>\n</invoke>",
            MINIMAX_M2_CALL % ("f", "text"),
            MINIMAX_M2_CALL % ("f", '<parameter name="a">1'),
            MINIMAX_M2_CALL % ("f", '<parameter name="a">1</parameter> and'),
            MINIMAX_M2_CALL % ("f", '<parameter name="a">1\n<parameter name="b">2</parameter>'),
            MINIMAX_M2_CALL % ("f", '<parameter name="a">1</parameter><parameter name="a">1</parameter>'),
            MINIMAX_M2_CALL % ("f", '<parameter name="">1</parameter>'),
            MINIMAX_M2_CALL % ("f", "") + "text",
        ),
        closer=f"</parameter>\n</invoke>\n{MINIMAX_M2_END}",
        # The end of a value, and text that could be the rest of a call whose value was never closed.
        loses_string=re.compile(rf"</parameter>\s*{_PARAMETER}|\n{_PARAMETER}|{_CALL_ENDS}").search,
    )


@pytest.mark.parametrize("of", [TestGLM, TestMiniMaxM2])
def test_a_value_of_the_wrong_type_fails_only_its_call(of):
    calls = [("a", {}), ("f", {"x": "three"}), ("b", {})]
    tools = tools_for([("a", {}), ("f", {"x": 3}), ("b", {})])
    first, invalid, last = of.format.parser.parse(of.format.write(calls), tools=tools)
    assert (first.name, last.name) == ("a", "b")
    assert (invalid.status, invalid.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert "'x' is invalid: it must be an integer" in (invalid.error or "")


def test_a_value_that_closes_its_own_section_runs_nothing():
    value = f"x</parameter>\n</invoke>\n{MINIMAX_M2_END}\nand more"
    calls = MiniMaxM2ToolParser().parse(minimax_m2_written([("write", {"content": value})]))
    assert calls
    assert all(found.is_error for found in calls)


class TestSeedOSS(ParserChecks):
    format = Format(
        parser=SeedOSSToolParser(),
        write=writer(
            "<seed:tool_call>\n<function=%s>\n%s</function>\n</seed:tool_call>",
            "\n",
            arguments=lambda values: "".join(
                f"<parameter={key}>{value}</parameter>\n" for key, value in values.items()
            ),
        ),
        tokens=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        tags=("<function=f>", "</function>", "<parameter=a>", "</parameter>"),
        malformed=(
            "",
            "f",
            "<function=f>",
            "<function=f></function><function=g></function>",
            "<function=f>\nx\n</function>",
            "<function=f><parameter=a>1</function>",
            "<function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>",
        ),
        closer="</parameter>\n</function>\n</seed:tool_call>",
        loses=lambda text: (
            any(text.count(tag) != text.count(f"\n{tag}") for tag in ("<parameter=", "</function>"))
            or text.count("</parameter>") != text.count("<parameter=")
            or text.count("</function>") != 1
            or len(re.findall(r"\n<parameter=", text)) != len(re.findall(r"</parameter>\n", text))
        ),
        think=("<seed:think>", "</seed:think>"),
    )


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, {"b": "it's"}], "c": None, "d": True},
        ["x", 'say "hi"', "é\n", -1.5, False],
        [],
        {},
    ],
)
@pytest.mark.parametrize("spell", [repr, json.dumps])
def test_lists_and_objects_may_be_python_or_json(value, spell):
    text = f"<seed:tool_call><function=f><parameter=x>{spell(value)}</parameter></function></seed:tool_call>"
    (call,) = SeedOSSToolParser().parse(text, tools=tools_for([("f", {"x": value})]))
    assert same(call.input, {"x": value})


GRANITE_TOKENS = ("<tool_call>", "</tool_call>", "<|tool_call|>", "<think>", "</think>")


class TestGranite4(ParserChecks):
    format = Format(
        parser=GraniteToolParser(),
        write=write_json_objects,
        tokens=GRANITE_TOKENS,
        tags=('{"name": ',),
        malformed=("", "f", '{"name": "f"} x', "{}", '{"arguments": {}}', '{"name": "f", "arguments": {}, "id": 1}'),
        closer='"}}</tool_call>',
        strict_json=True,
    )


def granite_3():
    """Return a parser whose start mark, which the suite writes, is that of Granite 3."""
    parser = GraniteToolParser()
    parser.tool_start_token, parser.tool_end_token = "<|tool_call|>", ""
    return parser


class TestGranite3(ListedChecks):
    format = Format(
        parser=granite_3(),
        write=writer('{"name": "%s", "arguments": %s}', ", ", "<|tool_call|>[", "]", json.dumps),
        tokens=GRANITE_TOKENS,
        tags=('{"name": ', "["),
        malformed=("[]", '[{"name": "f"}] x', "[{}]", '[{"name": "f"}, 1]'),
        closer='"}}]',
        strict_json=True,
    )


@pytest.mark.parametrize("text", ["<|tool_call|>", "<|tool_call|> ", "<tool_call>"])
@pytest.mark.parametrize("end", ["", "\n", "</tool_call>"])
def test_both_marks_open_a_list(text, end):
    turn = GraniteToolParser().parse_turn(f'Hm. {text}[{{"name": "f", "arguments": {{"x": 1}}}}, {{"name": "g"}}]{end}')
    assert summary(turn.tool_calls) == [("f", {"x": 1}), ("g", {})]
    assert turn.text == "Hm."


def test_each_call_of_a_list_has_its_own_status():
    calls = GraniteToolParser().parse('<|tool_call|>[{"name": "f"}, {"name": "g", "arguments": [1]}, {"name": "h"}]')
    assert [call.status.value for call in calls] == ["ok", "not_an_object", "ok"]
    assert calls[1].raw == '{"name": "g", "arguments": [1]}'


def test_a_list_of_more_than_a_thousand_calls_is_an_error():
    (call,) = GraniteToolParser().parse("<|tool_call|>[" + '{"name": "f"}, ' * 1000 + '{"name": "f"}]')
    assert call.status is ToolCallStatus.MALFORMED
    assert "at most 1000 calls" in (call.error or "")


LLAMA3_CALL = '{"name": "%s", "parameters": %s}'


def written(name, values):
    return LLAMA3_CALL % (name, json_text(values))


class TestLlama3JSON(ListedChecks):
    format = Format(
        parser=Llama3JSONToolParser(),
        write=writer(LLAMA3_CALL, "; ", begin="<|python_tag|>"),
        tokens=("<|python_tag|>", "<think>", "</think>"),
        tags=('{"name": ', ";", "f.call(", '"parameters": '),
        malformed=(
            "print(1)",
            '{"name": "f", "parameters": {}} x',
            '{"name": "f", "arguments": {}}',
            '{"parameters": {}}',
            "[]",
            "f.call(1)",
            'f.call(q="a"b")',
            'f.call(q="a") x',
        ),
        closer='"}}<|python_tag|>',
        strict_json=True,
    )


LLAMA3_JSON_PARSER = Llama3JSONToolParser()


@given(TestLlama3JSON.format.arguments, st.sampled_from(["", "\n", " "]))
def test_a_turn_that_is_only_a_call_needs_no_mark(arguments, space):
    turn = LLAMA3_JSON_PARSER.parse_turn(space + written("f", arguments) + space, tools=tools_for([("f", arguments)]))
    assert same(summary(turn.tool_calls), [("f", arguments)])
    assert (turn.text, turn.reasoning) == ("", None)


@pytest.mark.parametrize("between", ["; ", ";", "\n", ""])
def test_several_objects_are_several_calls(between):
    assert summary(LLAMA3_JSON_PARSER.parse(written("f", {"x": 1}) + between + written("g", {}))) == [
        ("f", {"x": 1}),
        ("g", {}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 4}',
        '{"name": "Ada", "born": 1815}',
        "{",
        '{"parameters": {}}',
        'Like {"name": "f", "parameters": {}}',
        '[{"name": "f", "parameters": {}}]',
        "",
    ],
)
def test_other_json_and_json_after_text_is_text(text):
    turn = LLAMA3_JSON_PARSER.parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


def test_a_call_may_follow_a_draft_in_reasoning():
    draft, call = written("rm", {}), written("ls", {})
    for text, reasoning_open in [(f"<think>{draft}</think>\n\n{call}", False), (f"{draft}</think>{call}", True)]:
        turn = LLAMA3_JSON_PARSER.parse_turn(text, reasoning_open=reasoning_open)
        assert [found.name for found in turn.tool_calls] == ["ls"]
        assert turn.reasoning == draft
    assert LLAMA3_JSON_PARSER.parse(f"<think>{draft}") == LLAMA3_JSON_PARSER.parse(draft, reasoning_open=True) == []


@pytest.mark.parametrize(
    ("text", "status", "name"),
    [
        ('{"name": "f", "parameters": {"x": 1}', ToolCallStatus.UNTERMINATED, "f"),
        ('{"name": "f", "para', ToolCallStatus.UNTERMINATED, "f"),
        ('{"name": "f", "parameters": {x: 1}}', ToolCallStatus.MALFORMED, "f"),
        ('{"name": "f", "parameters": {}} Done.', ToolCallStatus.MALFORMED, "f"),
        ('{"name": "f", "parameters": "x"}', ToolCallStatus.NOT_AN_OBJECT, "f"),
        ('{"name": "f", "arguments": {}}', ToolCallStatus.MALFORMED, "f"),
    ],
)
def test_a_turn_that_only_begins_as_a_call_is_an_error(text, status, name):
    turn = LLAMA3_JSON_PARSER.parse_turn(text)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, name)]
    assert turn.text == ""


def test_built_in_tools_are_called_with_keyword_arguments():
    text = "<|python_tag|>brave_search.call(query=\"weather in 'Paris'\", count=3)"
    assert summary(LLAMA3_JSON_PARSER.parse(text)) == [("brave_search", {"query": "weather in 'Paris'", "count": 3})]


def test_a_call_may_contain_its_type():
    assert summary(LLAMA3_JSON_PARSER.parse('{"type": "function", "name": "f", "parameters": {}}')) == [("f", {})]


@pytest.mark.parametrize("around", ["<|python_start|>{}<|python_end|>", "<|python_start|>{}", "{}\n", "{}"])
def test_llama_4_marks_may_enclose_the_calls(around):
    calls = written("f", {"x": "<|python_end|>"}) + written("g", {})
    turn = LLAMA3_JSON_PARSER.parse_turn(around.replace("{}", calls))
    assert summary(turn.tool_calls) == [("f", {"x": "<|python_end|>"}), ("g", {})]
    assert turn.text == ""


def test_text_after_llama_4_marks_keeps_the_call_from_running():
    turn = LLAMA3_JSON_PARSER.parse_turn(f"<|python_start|>{written('f', {})}<|python_end|> Done.")
    assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]


def test_calls_round_trip_through_the_llama_4_json_template():
    tokenizer = copy.copy(load_tokenizer("llama_4"))
    tokenizer.chat_template = load_template("vllm/tool_chat_template_llama4_json")
    calls = [("f", {"x": 'a"b\n', "n": None, "l": [1, {"k": "<|eot|>é"}]}), ("g", {})]
    uses = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": uses}]
    prompt, whole = (
        tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=count == 1)
        for count in (1, 2)
    )
    ids = tokenizer.encode(whole.removeprefix(prompt).removesuffix("<|eot|>"), add_special_tokens=False)
    parser = get_tool_parser("auto", tokenizer=tokenizer)
    turn = parser.parse_turn(tokenizer.decode(ids), token_ids=ids, tokenizer=tokenizer, tools=tools_for(calls))
    assert same(summary(turn.tool_calls), calls)


def keywords(values):
    spell = json.dumps if values.get("a") == "x@@" else repr
    return ", ".join(f"{key}={spell(value)}" for key, value in values.items())


bare = writer("%s(%s)", ", ", "[", "]", keywords)


class TestLlama4Pythonic(ListedChecks):
    format = Format(
        parser=Llama4PythonicToolParser(),
        write=lambda calls: f"<|python_start|>{bare(calls)}<|python_end|>",
        tokens=("<|python_start|>", "<|python_end|>", "<think>", "</think>"),
        tags=("[f(", ")]", "'", '"""', "=", ", "),
        malformed=(
            "f(a=1)",
            "[]",
            "[f]",
            "[f(1)]",
            "[f(a=1, a=2)]",
            "[f(**{})]",
            "[f(a=g())]",
            "[f(a=1 + 1)]",
            "[f(a=b)]",
            "[f(a={1: 2})]",
            "[f(a={'b': 1, 'b': 2})]",
            "[f(a=1e999)]",
            "[f(a='\\ud83d')]",
            "[f(a=(1, 2))]",
            "[f(a=01)]",
            "[f(a=" + "[" * 65 + "]" * 65 + ")]",
        ),
        closer="')]<|python_end|>",
        strict_json=True,
    )


LLAMA4_PYTHONIC_PARSER = Llama4PythonicToolParser()


@given(TestLlama4Pythonic.format.arguments)
def test_a_turn_that_is_only_a_list_of_calls_needs_no_mark(arguments):
    calls = [("f", arguments), ("g", {})]
    turn = LLAMA4_PYTHONIC_PARSER.parse_turn(f"\n{bare(calls)}\n")
    assert same(summary(turn.tool_calls), calls)
    assert turn.text == ""


@given(st.text(), st.sampled_from(["'", '"', "'''", '"""']))
def test_strings_are_read_as_in_python(text, quote):
    escaped = text.encode("unicode_escape").decode().replace("'", "\\'").replace('"', '\\"')
    assert summary(LLAMA4_PYTHONIC_PARSER.parse(f"[f(a={quote}{escaped}{quote})]")) == [("f", {"a": text})]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1", 1),
        ("-1.5", -1.5),
        ("1e3", 1000.0),
        ("True", True),
        ("null", None),
        ("'\\q\\x41\\101\\u00e9'", "\\qAAé"),
        ("'''two\nlines'''", "two\nlines"),
        ("[1, 'a', [], {},]", [1, "a", [], {}]),
        ("{'a': 'b',}", {"a": "b"}),
        ("[1, 2, 'x', \"y\", 3.0, None]", [1, 2, "x", "y", 3.0, None]),
    ],
)
def test_literals_may_be_python_or_json(literal, value):
    (call,) = LLAMA4_PYTHONIC_PARSER.parse(f"[f(a={literal})]")
    assert same(call.input, {"a": value})


@pytest.mark.parametrize("text", ["[1, 2]", "[x]", "f(a=1)", "See [f(a=1)]", "[link](f)", ""])
def test_other_lists_and_lists_after_text_are_text(text):
    turn = LLAMA4_PYTHONIC_PARSER.parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[f(a=1)", ToolCallStatus.UNTERMINATED),
        ("[f(a='x", ToolCallStatus.UNTERMINATED),
        ("[f(a='x\n')]", ToolCallStatus.MALFORMED),
        ("[f(a=1)] Done.", ToolCallStatus.MALFORMED),
        ('[f(a=say "hi")]', ToolCallStatus.MALFORMED),
    ],
)
def test_a_turn_that_only_begins_as_a_list_is_an_error(text, status):
    turn = LLAMA4_PYTHONIC_PARSER.parse_turn(text)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, "f")]
    assert turn.text == ""


MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


def mistral_write_list(calls):
    listed = [{"name": name, "arguments": values, "id": f"abcDE{i:04d}"} for i, (name, values) in enumerate(calls)]
    return "[TOOL_CALLS]" + json_text(listed)


class TestMistralNamed(ListedChecks):
    format = Format(
        parser=MistralToolParser(),
        write=writer("[TOOL_CALLS]%s[ARGS]%s"),
        tokens=MISTRAL_TOKENS,
        tags=('{"name": ', "[", "[INST]", "[TOOL_RESULTS]"),
        malformed=('f{"a": 1}', "f[ARGS]{a: 1}", 'f[ARGS]{"a": 1}}', "[ARGS]{}", "f g[ARGS]{}", "f[CALL_ID]ab[ARGS]{}"),
        closer='"}[TOOL_CALLS]rm[ARGS]{}',
        think=("[THINK]", "[/THINK]"),
        strict_json=True,
    )

    def test_a_broken_call_keeps_the_calls_before_it(self):
        good, broken = self.format.parser.parse("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{a}[TOOL_CALLS]rm[ARGS]{}")
        assert (good.name, broken.attempted_name, broken.status) == ("f", "g", ToolCallStatus.MALFORMED)


class TestMistralList(ListedChecks):
    format = Format(
        parser=MistralToolParser(),
        write=mistral_write_list,
        tokens=MISTRAL_TOKENS,
        tags=('{"name": ', "[", "[INST]", "[TOOL_RESULTS]"),
        malformed=("[]", '[{"name": "f"}] x', "[{}]", '[{"name": "f", "id": "short"}]', '[{"name": "f", "x": 1}]'),
        closer='"}}]',
        think=("[THINK]", "[/THINK]"),
        strict_json=True,
    )


@pytest.mark.parametrize(
    ("text", "native_ids"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcDEF123"}, {"name": "g"}]', ["abcDEF123", None]),
        ('[TOOL_CALLS] [{"name": "f"}, {"name": "g", "id": "000000000"}]', [None, "000000000"]),
        ("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]g[ARGS]{}", ["abcDEF123", None]),
        ("[TOOL_CALLS]f[ARGS]{}\n[TOOL_CALLS]g[CALL_ID]000000000[ARGS] {}", [None, "000000000"]),
    ],
)
def test_mistral_native_ids_are_kept(text, native_ids):
    calls = MistralToolParser().parse(text)
    assert summary(calls) == [("f", {}), ("g", {})]
    assert [call.native_id for call in calls] == native_ids


def test_a_call_quoted_in_a_broken_call_does_not_run():
    (call,) = MistralToolParser().parse('[TOOL_CALLS]f[ARGS]{"a": "x" [TOOL_CALLS]rm[ARGS]{}"}')
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")


QUOTE = '<|"|>'


def value(of):
    if isinstance(of, str):
        return f"{QUOTE}{of}{QUOTE}"
    if of is None or isinstance(of, bool):
        return {None: "null", True: "true", False: "false"}[of]
    if isinstance(of, dict):
        return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in of.items()) + "}"
    return "[" + ",".join(map(value, of)) + "]" if isinstance(of, list) else str(of)


class TestGemma4(ParserChecks):
    format = Format(
        parser=Gemma4ToolParser(),
        write=writer("<|tool_call>call:%s%s<tool_call|>", arguments=value),
        tokens=("<|tool_call>", "<tool_call|>", QUOTE, "<|channel>", "<channel|>"),
        tags=("call:f{", "thought\n", "{", "}", ":", ","),
        malformed=(
            "",
            "f{}",
            "call:f",
            "call:f{}}",
            "call:f{a}",
            'call:f{a:"x"}',
            "call:f{a:1,}",
            "call:f{,a:1}",
            "call:f{a:1 b:2}",
            "call:f{a:1,a:2}",
            "call:f{a:[1,]}",
            "call:f{a:[1 2]}",
            "call:f{a:nan}",
            "call:f{a:1e999}",
            "call:f{a:x}",
            "call:f{a:" + "[" * 65 + "]" * 65 + "}",
            "call:f{} x",
        ),
        delimits=False,
        closer=f"{QUOTE}}}<tool_call|>",
        think=("<|channel>", "<channel|>"),
        # A quote mark in a string ends it, unless it consists of ordinary tokens. Keys are bare words.
        values=lambda texts: json_values(texts.filter(lambda text: QUOTE not in text), KEYS),
    )


GEMMA4_PARSER = Gemma4ToolParser()


def test_the_channel_name_is_not_part_of_the_reasoning():
    turn = GEMMA4_PARSER.parse_turn("<|channel>thought\nHm.\n<channel|>Yes.")
    assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    turn = GEMMA4_PARSER.parse_turn("Hm.\n<channel|>Yes.", reasoning_open=True)
    assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    assert GEMMA4_PARSER.parse_turn("<|channel>thought\n<channel|>Yes.").reasoning is None


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("None", None),
        ("1e-07", 1e-07),
        ("-2", -2),
        (f"{QUOTE}None{QUOTE}", "None"),
        ("[1,2.5,true,null]", [1, 2.5, True, None]),
        (f"{{a b:{QUOTE}c, d{QUOTE},e:[]}}", {"a b": "c, d", "e": []}),
    ],
)
def test_gemma4_values_have_the_type_of_their_notation(written, found):
    assert summary(GEMMA4_PARSER.parse(f"<|tool_call>call:f{{x:{written}}}<tool_call|>")) == [("f", {"x": found})]


def test_an_unclosed_string_is_unterminated_or_malformed():
    (call,) = GEMMA4_PARSER.parse(f"<|tool_call>call:f{{x:{QUOTE}abc")
    assert (call.status, call.attempted_name) == (ToolCallStatus.UNTERMINATED, "f")
    (call,) = GEMMA4_PARSER.parse(f"<|tool_call>call:f{{x:{QUOTE}abc}}<tool_call|>")
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")


TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_PARSER = HarmonyToolParser()


harmony_write = writer("<|start|>assistant<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>")


class TestHarmony(ListedChecks):
    format = Format(
        parser=HARMONY_PARSER,
        write=harmony_write,
        tokens=TOKENS,
        tags=("assistant", " to=functions.f", "analysis", "commentary", "final", "json"),
        malformed=(),
        closer='"}<|call|><|start|>assistant<|channel|>',
        think=("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
        strict_json=True,
    )

    def test_a_draft_in_reasoning_is_not_a_call(self):
        draft, call = harmony_write([("rm", {})]), harmony_write([("ls", {})])
        for text, reasoning_open in [
            (f"<|channel|>analysis<|message|>Maybe {draft}?<|end|>{call}", False),
            (f"Maybe {draft}?<|end|>{call}", True),
        ]:
            turn = HARMONY_PARSER.parse_turn(text, reasoning_open=reasoning_open)
            assert [found.name for found in turn.tool_calls] == ["ls"]
            assert (turn.reasoning, turn.text) == (f"Maybe {draft}?", "")

    def test_a_turn_cut_off_anywhere_has_an_unterminated_call(self):
        text = harmony_write([("f", {"a": 1, "b": "x"})]).removeprefix("<|start|>assistant")
        for end in range(text.index("functions") + 1, len(text) - len("<|call|>") + 1):
            (call,) = HARMONY_PARSER.parse_turn(text[:end], truncated=True).tool_calls
            assert (call.status, call.name) == (ToolCallStatus.UNTERMINATED, ToolParseResult.UNKNOWN_NAME), text[:end]
            assert "cut off" in (call.error or "")

    @pytest.mark.parametrize(
        "text",
        [
            '<|channel|>commentary to=functions.f<|message|>{"a": 1} x<|call|>',
            "<|channel|>commentary to=functions.f<|message|>{a}<|call|>",
            "<|channel|>commentary to=functions.f<|message|>{}<|end|>",
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>}",
            "<|channel|>commentary to=functions.f code<|message|>{}",
            "<|channel|>analysis to=functions.f<|message|>{}",
            " to=functions.f<|channel|>commentary to=functions.f json<|message|>{}",
            " to=functions.f<|message|>{}",
            "<|channel|>commentary to=functions.f json please<|message|>{}",
            '<|channel|>commentary to=functions.f<|message|>{"a": 1, "a": 2}',
        ],
    )
    def test_an_inexact_call_is_malformed(self, text):
        (call,) = HARMONY_PARSER.parse(text)
        assert (call.status, call.attempted_name, call.input) == (ToolCallStatus.MALFORMED, "f", {})
        assert call.raw is not None and call.raw in text

    def test_text_after_a_call_keeps_it_from_running(self):
        turn = HARMONY_PARSER.parse_turn(f"{harmony_write([('f', {})])} and that is it.")
        assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]
        assert turn.text == ""

    def test_a_look_alike_end_mark_leaves_the_call_unterminated(self):
        head = harmony_write([("f", {})]).removesuffix("<|call|>")
        (call,) = HARMONY_PARSER.parse(**sampled(tokenizer_with(TOKENS), head, "<|ca", "ll|>"))
        assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")


HEADERS = (
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.f<|message|>",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
    "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>",
)


@given(st.sampled_from(HEADERS), TestHarmony.format.arguments)
def test_every_form_of_a_header_is_read(header, arguments):
    turn = HARMONY_PARSER.parse_turn(header + json_text(arguments), tools=tools_for([("f", arguments)]))
    assert same(summary(turn.tool_calls), [("f", arguments)])
    assert (turn.text, turn.reasoning) == ("", None)


def test_channels_are_reasoning_or_text():
    turn = HARMONY_PARSER.parse_turn(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Ah.<|end|><|start|>assistant<|channel|>final<|message|>  Yes."
    )
    assert (turn.reasoning, turn.text, turn.tool_calls) == ("Hm.\nAh.", "I look.\n  Yes.", ())


@pytest.mark.parametrize("text", ["Hello.", "", "a\n b ", "to be <|end|> or not"])
def test_a_turn_without_headers_is_text(text):
    assert HARMONY_PARSER.parse_turn(text).text == text.strip()


def test_a_call_to_something_else_is_an_unknown_tool():
    (call,) = HARMONY_PARSER.parse('<|channel|>commentary to=browser.search<|message|>{"query": "x"}')
    assert (call.status, call.attempted_name) == (ToolCallStatus.UNKNOWN_TOOL, "browser.search")


def test_a_call_quoted_in_a_final_answer_is_text():
    turn = HARMONY_PARSER.parse_turn(
        "<|channel|>final<|message|>Like " + harmony_write([("rm", {})]).removesuffix("<|call|>")
    )
    assert turn.tool_calls == ()
    assert turn.text.startswith("Like <|start|>")


@pytest.mark.parametrize(
    ("text", "unclosed"),
    [
        ("<|channel|>analysis", True),
        ("<|channel|>analysis<|message|>", True),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>analysis<|message|>Well", True),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", False),
        ("<|channel|>final<|message|>Yes", False),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", False),
    ],
)
def test_an_open_analysis_message_ends_in_reasoning(text, unclosed):
    assert HARMONY_PARSER.parse_turn(text, truncated=True).ends_in_reasoning is unclosed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>Yes", True),
        ("<|channel|>commentary<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes", False),
    ],
)
def test_only_analysis_is_reasoning(text, expected):
    assert HARMONY_PARSER.parse_turn(text).has_reasoning is expected


class TestPhi4(ParserChecks):
    format = Format(
        parser=Phi4ToolParser(),
        write=writer('<|tool_call|>{"name": "%s", "arguments": %s}<|/tool_call|>'),
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
def test_a_list_may_contain_several_calls(body, around):
    turn = Phi4ToolParser().parse_turn(around.replace("{}", body))
    assert summary(turn.tool_calls) == CALLS
    assert turn.text == ""


def test_functools_is_a_call_only_at_the_start():
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
def test_a_list_without_an_end_mark_is_all_or_nothing(text, status):
    turn = Phi4ToolParser().parse_turn(text)
    assert [call.status for call in turn.tool_calls] == [status]
    assert turn.text == ""


OBJECTS = (
    '{"name": "f", "arguments": {"x": "1"}},\n{"name": "g", "arguments": {}}',
    """{"name": "f", "arguments": {'x': '1'}},{"name": "g", "arguments": {}}""",
)


@pytest.mark.parametrize("text", OBJECTS)
def test_a_turn_of_only_objects_is_calls(text):
    turn = Phi4ToolParser().parse_turn(f"\n{text}\n")
    assert summary(turn.tool_calls) == CALLS
    assert turn.text == ""


def test_the_arguments_of_an_object_may_be_python():
    values = {"s": 'it\'s "é"\n', "b": True, "n": None, "l": [1, -1.5e10, {"k": []}], "t": "true"}
    (call,) = Phi4ToolParser().parse(f'{{"name": "f", "arguments": {values}}}')
    assert same(call.input, values)


@pytest.mark.parametrize(
    "text", [f"See {OBJECTS[0]}", '{"name": "Ada", "born": 1815}', '{"answer": 4}', "{", "[1]", OBJECTS[0][1:]]
)
def test_other_objects_and_objects_after_text_are_text(text):
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
def test_a_turn_that_only_begins_as_an_object_is_an_error(text, status):
    turn = Phi4ToolParser().parse_turn(text, truncated=status is ToolCallStatus.UNTERMINATED)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, "f")]
    assert turn.text == ""


# === what several formats have in common ===


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (DeepSeekV3ToolParser(), DEEPSEEK_BEGIN + DEEPSEEK_V3_CALL % ("f", "[]") + DEEPSEEK_END),
        (DeepSeekV31ToolParser(), DEEPSEEK_BEGIN + DEEPSEEK_V3_1_CALL % ("f", '"{}"') + DEEPSEEK_END),
        *(
            (KimiK2ToolParser(), KIMI_K2_BEGIN + KIMI_K2_CALL % ("functions.f:0", arguments) + KIMI_K2_END)
            for arguments in ("[]", '"x"', "1", "null")
        ),
        (
            KimiK3ToolParser(),
            opened("tools")
            + kimi_k3_call("f", opened("json", type="object") + "[]" + closed("json"))
            + closed("tools"),
        ),
        (MistralToolParser(), "[TOOL_CALLS]f[ARGS][1]"),
        (HarmonyToolParser(), "<|channel|>commentary to=functions.f<|message|>[1]"),
    ],
)
def test_arguments_must_be_an_object(parser, text):
    (found,) = parser.parse(text)
    assert (found.status, found.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


@pytest.mark.parametrize("of", [TestGLM, TestMiniMaxM2])
def test_json_between_tags_is_decoded_without_a_schema(of):
    (found,) = of.format.parser.parse(of.format.write([("f", {"a": "12", "b": "true", "c": "1 + 1", "d": '"x"'})]))
    assert found.input == {"a": 12, "b": True, "c": "1 + 1", "d": '"x"'}


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (TestGLM, "</arg_value> <arg_key>b</arg_key> </tool_call> <tool_call>rm</tool_call> </think>"),
        (TestMiniMaxM2, 'x = "</parameter>" </invoke> <parameter name="a"> </minimax:tool_call> </think>'),
        (TestMiniMaxM3, f"{NS} is a token"),
        (TestSeedOSS, "['a']"),
        (TestSeedOSS, "\na\n"),
    ],
)
def test_a_string_with_unmatched_marks_is_kept(of, text):
    calls = [("write", {"code": text, "n": 1}), ("g", {})]
    turn = of.format.parser.parse_turn(of.format.write(calls), tools=tools_for(calls))
    assert (summary(turn.tool_calls), turn.reasoning) == (calls, None)
