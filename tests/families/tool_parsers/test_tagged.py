"""Formats whose arguments stand between tags as plain text."""

import json
import re
from itertools import starmap

import pytest

from strands_sglang.tool_parsers import (
    DeepSeekV4ToolParser,
    DeepSeekV32ToolParser,
    GLMToolParser,
    KimiK3ToolParser,
    MiniMaxM2ToolParser,
    SeedOSSToolParser,
    ToolCallStatus,
)
from support.parser_checks import (
    JSON_TYPE,
    Format,
    ParserChecks,
    pairs,
    same,
    summary,
    tools_for,
    writer,
)

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
# A tag of the format in a value; the encoder writes it as the token that it is.
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


def test_a_value_that_says_it_is_a_string_is_one_whatever_the_schema_says():
    text = f"{DSML_BEGIN}\n{DSML_CALL % ('f', parameter('a', '3'))}\n{DSML_END}"
    tools = [{"name": "f", "inputSchema": {"json": {"properties": {"a": {"type": "integer"}}}}}]
    (found,) = DeepSeekV32ToolParser().parse(text, tools=tools)
    assert (found.status, found.input) == (ToolCallStatus.OK, {"a": "3"})


@pytest.mark.parametrize("value", ['"a"', "3", "[1]", "null"])
def test_a_value_that_says_it_is_no_string_is_json(value):
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
        # What closes a value, and what could as well be the rest of a call whose value was never closed.
        loses_string=re.compile(rf"</arg_value>\s*(?:{_ARGUMENT}|</tool_call>)|{_ARGUMENT}").search,
    )


def test_calls_with_and_without_line_breaks_are_read():
    glm_4_7 = writer("<tool_call>%s%s</tool_call>", arguments=pairs("<arg_key>%s</arg_key><arg_value>%s</arg_value>"))
    calls = [("f", {"a": "  x\n", "b": [1, {"c": None}]}), ("g", {})]
    for write in (glm_written, glm_4_7):
        assert summary(GLMToolParser().parse(write(calls), tools=tools_for(calls))) == calls


def test_glm_without_a_schema_json_is_json_and_anything_else_is_text():
    (call,) = GLMToolParser().parse(glm_written([("f", {"a": "12", "b": "true", "c": "1 + 1", "d": '"x"'})]))
    assert call.input == {"a": 12, "b": True, "c": "1 + 1", "d": '"x"'}


def test_a_value_of_another_type_than_declared_is_malformed_and_says_so():
    (call,) = GLMToolParser().parse(glm_written([("f", {"a": "three"})]), tools=tools_for([("f", {"a": 3})]))
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert "'a' is wrong: it must be an integer" in (call.error or "")


def test_a_value_that_is_never_closed_does_not_swallow_the_call_behind_it():
    broken, good = GLMToolParser().parse(
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>" + glm_written([("g", {"b": "2"})])
    )
    assert (broken.status, broken.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert (good.name, good.input) == ("g", {"b": 2})


def test_glm_tags_that_end_nothing_belong_to_the_value():
    code = "</arg_value> <arg_key>b</arg_key> </tool_call> <tool_call>rm</tool_call> </think>"
    calls = [("write", {"code": code})]
    turn = GLMToolParser().parse_turn(glm_written(calls))
    assert summary(turn.tool_calls) == calls
    assert turn.reasoning is None


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
    """Calls as the chat template writes them."""
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
        # A tag of the format in a value; the template writes it as the tokens that it is.
        loses_string=re.compile(r"<\|(?:open|close)\|>(?:argument|call)").search,
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    )


def test_the_tags_around_the_visible_text_are_no_part_of_it():
    said = "I look it up." + closed("response")
    turn = KimiK3ToolParser().parse_turn(
        f"Hm.{closed('think')}{opened('response')}{said}{kimi_k3_written([('ls', {})])}{closed('message')}",
        reasoning_open=True,
    )
    assert (turn.reasoning, turn.text, summary(turn.tool_calls)) == ("Hm.", "I look it up.", [("ls", {})])
    assert KimiK3ToolParser().parse_turn(said + closed("message")).text == "I look it up."


def test_arguments_may_be_one_json_object():
    body = opened("json", type="object") + '{"a": "<|close|>json<|sep|>", "b": [1]}' + closed("json")
    text = opened("tools") + kimi_k3_call("f", body) + kimi_k3_call("g", argument("x", True), 2) + closed("tools")
    assert summary(KimiK3ToolParser().parse(text)) == [
        ("f", {"a": "<|close|>json<|sep|>", "b": [1]}),
        ("g", {"x": True}),
    ]


def test_one_json_value_that_is_no_object_is_said_to_be_none():
    body = opened("json", type="object") + "[]" + closed("json")
    (found,) = KimiK3ToolParser().parse(opened("tools") + kimi_k3_call("f", body) + closed("tools"))
    assert (found.status, found.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


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
        # What closes a value, and what could as well be the rest of a call whose value was never closed.
        loses_string=re.compile(rf"</parameter>\s*{_PARAMETER}|\n{_PARAMETER}|{_CALL_ENDS}").search,
    )


def test_minimax_m2_without_a_schema_json_is_json_and_anything_else_is_text():
    (found,) = MiniMaxM2ToolParser().parse(
        minimax_m2_written([("f", {"a": "12", "b": "true", "c": "1 + 1", "d": '"x"'})])
    )
    assert found.input == {"a": 12, "b": True, "c": "1 + 1", "d": '"x"'}


def test_a_value_of_another_type_than_declared_is_malformed_and_the_calls_around_it_stand():
    calls = [("a", {}), ("f", {"x": "three"}), ("b", {})]
    tools = tools_for([("a", {}), ("f", {"x": 3}), ("b", {})])
    first, wrong, last = MiniMaxM2ToolParser().parse(minimax_m2_written(calls), tools=tools)
    assert (first.name, last.name) == ("a", "b")
    assert (wrong.status, wrong.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert "'x' is wrong: it must be an integer" in (wrong.error or "")


def test_minimax_m2_tags_that_end_nothing_belong_to_the_value():
    code = 'x = "</parameter>" </invoke> <parameter name="a"> </minimax:tool_call> </think>'
    calls = [("write", {"code": code, "n": 1}), ("g", {})]
    assert summary(MiniMaxM2ToolParser().parse(minimax_m2_written(calls))) == calls


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
def test_lists_and_objects_may_be_written_as_python_or_as_json(value, spell):
    text = f"<seed:tool_call><function=f><parameter=x>{spell(value)}</parameter></function></seed:tool_call>"
    (call,) = SeedOSSToolParser().parse(text, tools=tools_for([("f", {"x": value})]))
    assert same(call.input, {"x": value})


def test_a_string_that_looks_like_a_python_list_stays_a_string():
    text = "<seed:tool_call><function=f><parameter=x>['a']</parameter></function></seed:tool_call>"
    (call,) = SeedOSSToolParser().parse(text, tools=tools_for([("f", {"x": ""})]))
    assert call.input == {"x": "['a']"}


def test_newlines_at_the_edges_of_a_value_belong_to_it():
    text = "<seed:tool_call><function=f><parameter=x>\na\n</parameter></function></seed:tool_call>"
    (call,) = SeedOSSToolParser().parse(text, tools=tools_for([("f", {"x": ""})]))
    assert call.input == {"x": "\na\n"}
