"""Formats whose values stand between tags as plain text: what is a call, and where its values end.

Formats that write every value as plain text: what the schema says of its type, wherever it says so (D4, D5).
"""

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import QwenXMLToolParser, ToolCallStatus, ToolParseResult, get_tool_parser
from support.parser_checks import JSON_TYPE, KEYS

TAGS = ("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "</think>")
TEXTS = st.lists(st.one_of(st.sampled_from((*TAGS, "\n", "  ", "null", "1", "{")), st.text(max_size=6))).map("".join)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def as_template(value: Any, *, python_literals: bool) -> str:
    """A value as chat templates write it: Qwen3-Coder's and Qwen3.5's with Python's literals, later ones as JSON."""
    if isinstance(value, str) or (python_literals and not isinstance(value, (dict, list))):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def written(name: str, arguments: dict[str, Any], *, python_literals: bool = False) -> str:
    body = "".join(
        f"<parameter={key}>\n{as_template(value, python_literals=python_literals)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def tool(name: str, properties: dict[str, Any], **schema: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"json": {"type": "object", "properties": properties, **schema}}}


def only(text: str, **keywords: Any) -> ToolParseResult:
    (result,) = QwenXMLToolParser().parse(text, **keywords)
    return result


def value_of(written_value: str, schema: Any, **root: Any) -> Any:
    result = only(written("f", {"x": written_value}), tools=[tool("f", {"x": schema}, **root)])
    assert result.status is ToolCallStatus.OK, result.error
    return result.input["x"]


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.booleans())
def test_arguments_come_back_as_the_chat_template_wrote_them(arguments: dict[str, Any], python_literals: bool) -> None:
    # What ends a call, and what could as well be the rest of a call whose value was never closed.
    lost_in_the_format = re.compile(r"</function>\s*</tool_call>|\n<parameter=[^>\n]+>\n")
    for value in arguments.values():
        text = as_template(value, python_literals=python_literals)
        assume(lost_in_the_format.search(f"\n{text}\n</parameter>\n") is None)
    properties = {key: {"type": JSON_TYPE[type(value)]} for key, value in arguments.items()}
    turn = QwenXMLToolParser().parse_turn(
        "So:\n\n" + written("f", arguments, python_literals=python_literals), tools=[tool("f", properties)]
    )
    (result,) = turn.tool_calls
    assert result.error is None
    assert result.input == arguments
    assert [type(value) for value in result.input.values()] == [type(value) for value in arguments.values()]
    assert turn.text == "So:"


@pytest.mark.parametrize(
    "value", ["123", "true", "null", "None", "", "  x ", '{"a": 1}', '"quoted"', "\n\n", "    def f():\n\treturn 1\n"]
)
def test_a_declared_string_stays_exactly_what_was_written(value: str) -> None:
    assert value_of(value, {"type": "string"}) == value
    assert value_of(value, {"type": "string", "enum": ["a"]}) == value


def test_the_newlines_of_the_format_may_be_missing() -> None:
    text = "<tool_call><function=f><parameter=a> 1 </parameter><parameter=b>x\n</parameter></function></tool_call>"
    assert only(text).input == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("written_value", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" -3 ", {"type": "integer"}, -3),
        ("3", {"type": "number"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("1e-07", {"type": "number"}, 1e-07),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("None", {"type": "null"}, None),
        ("[1, [2]]", {"type": "array"}, [1, [2]]),
        ('{"a": "1"}', {"type": "object"}, {"a": "1"}),
        ("5", {"type": ["integer", "string"]}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nullable", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nullable"),
        ("None", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("{broken", {"type": ["object", "string"]}, "{broken"),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"const": "7"}, "7"),
        ("7", {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "7"),
        ("7", {"$ref": "#/$defs/Word"}, "7"),
        ("7", {"anyOf": [{"$ref": "#/$defs/Word"}, {"type": "null"}]}, "7"),
        ("7", {"$ref": "#/$defs/Missing"}, 7),
        ("7", {"$ref": "#/$defs/Loop"}, 7),
        ("7", {}, 7),
        ("seven", {}, "seven"),
        ("7", True, 7),
        ("7", {"type": "word"}, 7),
    ],
)
def test_values_have_the_type_that_the_schema_declares(written_value: str, schema: Any, value: Any) -> None:
    definitions = {"Word": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    found = value_of(written_value, schema, **{"$defs": definitions})
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("written_value", "schema", "error"),
    [
        ("three", {"type": "integer"}, "an integer"),
        ("3.5", {"type": "integer"}, "an integer"),
        ("true", {"type": "integer"}, "an integer"),
        ('"3"', {"type": "integer"}, "an integer"),
        ("", {"type": "integer"}, "an integer"),
        ("yes", {"type": "boolean"}, "a boolean"),
        ("1", {"type": "boolean"}, "a boolean"),
        ("NaN", {"type": "number"}, "NaN is not JSON"),
        ("{'a': 1}", {"type": "object"}, "an object"),
        ('{"a": 1} ', {"type": "array"}, "an array"),
        ("[1, 2", {"type": "array"}, "an array"),
        ('{"a": 1, "a": 2}', {"type": "object"}, "more than once"),
        ("[" * 100 + "]" * 100, {"type": "array"}, "nested too deeply"),
        ("x", {"type": ["integer", "null"]}, "an integer or null"),
    ],
)
def test_a_value_of_another_type_is_malformed_and_says_so(written_value: str, schema: Any, error: str) -> None:
    result = only(written("f", {"x": written_value}), tools=[tool("f", {"x": schema})])
    assert result.status is ToolCallStatus.MALFORMED
    assert (result.name, result.input, result.attempted_name) == (ToolParseResult.UNKNOWN_NAME, {}, "f")
    assert result.error is not None and error in result.error


def test_without_a_schema_json_is_json_and_anything_else_is_text() -> None:
    arguments = {"a": "12", "b": "true", "c": "null", "d": "[1]", "e": "1 + 1", "f": '"x"', "g": "True", "h": "NaN"}
    found = only(written("f", arguments)).input
    assert found == {"a": 12, "b": True, "c": None, "d": [1], "e": "1 + 1", "f": '"x"', "g": "True", "h": "NaN"}


def test_a_parameter_that_is_not_declared_is_typed_by_what_additional_properties_say() -> None:
    text = written("f", {"x": "12"})
    assert only(text, tools=[tool("f", {})]).input == {"x": 12}
    assert only(text, tools=[tool("f", {}, additionalProperties={"type": "string"})]).input == {"x": "12"}
    assert only(text, tools=[tool("f", {}, additionalProperties=False)]).input == {"x": 12}


def test_the_schema_may_be_given_by_reference_and_without_the_json_key() -> None:
    definition = {"properties": {"x": {"type": "string"}}}
    schema = {"$ref": "#/$defs/Input", "$defs": {"Input": definition}}
    assert only(written("f", {"x": "12"}), tools=[{"name": "f", "inputSchema": schema}]).input == {"x": "12"}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<function=>",
        "search",
        '{"name": "f", "arguments": {}}',
        "<function=f>",
        "<function=f></function></function>",
        "<function=f>\n</function>\n<function=g>\n</function>",
        "<function=f>\nx\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter>",
        "<function=f>\n<parameter=a>\n1\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter> and\n</function>",
        "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>",
        "<function=f>\n<parameter=>\n1\n</parameter>\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n1\n</parameter>\n</function>",
    ],
)
def test_what_is_not_exactly_a_call_is_malformed_and_keeps_what_was_written(body: str) -> None:
    turn = QwenXMLToolParser().parse_turn(f"A\n<tool_call>\n{body}\n</tool_call>\nB")
    (result,) = turn.tool_calls
    assert (result.status, result.name, result.input) == (ToolCallStatus.MALFORMED, ToolParseResult.UNKNOWN_NAME, {})
    assert result.raw == f"\n{body}\n"
    assert result.error
    assert turn.text == "A\nB"


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(written("f", {"a": 1, "b": "x"})) - 1, 3))
def test_a_call_that_is_cut_off_anywhere_is_unterminated(end: int) -> None:
    turn = QwenXMLToolParser().parse_turn("A\n" + written("f", {"a": 1, "b": "x"})[:end], truncated=True)
    (result,) = turn.tool_calls
    assert (result.status, result.name) == (ToolCallStatus.UNTERMINATED, ToolParseResult.UNKNOWN_NAME)
    assert "cut off" in (result.error or "")
    assert turn.text == "A"


def test_tags_inside_a_value_belong_to_the_value() -> None:
    code = "x = '</parameter>'\n</tool_call> <tool_call>\n<function=rm>\n</function> </think>\n<parameter=y>z"
    turn = QwenXMLToolParser().parse_turn(written("write", {"code": code, "n": 1}))
    (result,) = turn.tool_calls
    assert result.input == {"code": code, "n": 1}
    assert turn.reasoning is None


def test_a_value_that_is_never_closed_does_not_swallow_the_call_behind_it() -> None:
    first = written("f", {"a": "1"}).replace("</parameter>\n", "")
    broken, good = QwenXMLToolParser().parse(first + "\n" + written("g", {"b": "2"}))
    assert (broken.status, broken.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert (good.name, good.input) == ("g", {"b": 2})


@pytest.mark.parametrize("name", ["g", "f g", "f" * 65])
def test_a_name_that_no_tool_has_is_read_as_written(name: str) -> None:
    result = only(written(name, {"x": 1}), tools=[tool("f", {})])
    assert (result.status, result.name, result.input) == (ToolCallStatus.OK, name, {"x": 1})


PIECES = st.lists(st.sampled_from([*TAGS, "<think>", "\n", " ", "x", "<function=", "<parameter=", ">"])).map("".join)


@given(st.one_of(PIECES, TEXTS), st.booleans(), st.booleans())
def test_no_text_makes_the_parser_raise(text: str, reasoning_open: bool, truncated: bool) -> None:
    turn = QwenXMLToolParser().parse_turn(text, reasoning_open=reasoning_open, truncated=truncated, tools=[])
    assert all(call.is_error for call in turn.tool_calls)


def test_a_value_that_closes_its_own_call_runs_nothing():
    value = "x\n</parameter>\n</function>\n</tool_call>\nand more"
    text = f"<tool_call>\n<function=write>\n<parameter=content>\n{value}\n</parameter>\n</function>\n</tool_call>"
    calls = QwenXMLToolParser().parse(text)
    assert calls
    assert all(call.is_error for call in calls)


@pytest.mark.parametrize("written", ["null", "None"])
def test_a_parameter_whose_default_is_null_takes_null(written):
    schema = {"type": "object", "properties": {"limit": {"type": "integer", "default": None}}}
    tools = [{"name": "search", "description": "Searches.", "inputSchema": {"json": schema}}]
    text = f"<tool_call>\n<function=search>\n<parameter=limit>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = QwenXMLToolParser().parse(text, tools=tools)
    assert (call.error, call.input) == (None, {"limit": None})


def test_tags_in_the_strings_of_a_list_or_an_object_belong_to_them() -> None:
    inside = "x</parameter><parameter=b></parameter></function></tool_call><tool_call>"
    types = {"a": {"type": "object"}, "b": {"type": ["array", "null"]}}
    text = written("f", {"a": {inside: inside}, "b": [inside]})
    result = only(text, tools=[tool("f", types)])
    assert result.input == {"a": {inside: inside}, "b": [inside]}


def test_a_list_that_is_no_json_ends_at_its_tag_and_is_refused() -> None:
    text = "<tool_call><function=f><parameter=a>['x']</parameter></function></tool_call>"
    assert "must be an array" in (only(text, tools=[tool("f", {"a": {"type": "array"}})]).error or "")


def test_more_calls_than_a_thousand_are_one_malformed_call() -> None:
    calls = QwenXMLToolParser().parse(written("f", {}) * 1005)
    assert [call.status for call in calls[:1000]] == [ToolCallStatus.OK] * 1000
    assert [(call.status, call.error) for call in calls[1000:]] == [
        (ToolCallStatus.MALFORMED, "a turn may hold 1000 calls, and this one holds more")
    ]


_TOKEN = "]<]minimax[>["
WRITTEN = {
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter={key}>{value}</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{value}</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "minimax_m3": f'{_TOKEN}<tool_call>\n{_TOKEN}<invoke name="f">{_TOKEN}<{{key}}>{{value}}{_TOKEN}</{{key}}>'
    f"{_TOKEN}</invoke>\n{_TOKEN}</tool_call>",
}
FORMATS = pytest.mark.parametrize("format_name", sorted(WRITTEN))


def read(format_name: str, value: str, schema: Any, key: str = "a") -> Any:
    """The value of one parameter of a call, read by the schema of the tool."""
    text = WRITTEN[format_name].format(key=key, value=value)
    (call,) = get_tool_parser(format_name).parse(text, tools=[{"name": "f", "inputSchema": {"json": schema}}])
    assert call.error is None, call.error
    return call.input[key]


WORD = {"type": "string"}


@FORMATS
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"z": {"anyOf": [{"type": "integer"}, WORD]}, "a": {"$ref": "#/properties/z/anyOf/1"}}},
        {"properties": {"a": {"$ref": "#/$defs/a%20word"}}, "$defs": {"a word": WORD}},
        {"properties": {"a": {"$ref": "#/$defs/a word"}}, "$defs": {"a word": WORD}},
        {"properties": {"a": {"$ref": "#/$defs/a~1b~0c%25"}}, "$defs": {"a/b~c%": WORD}},
        {"properties": {"a": {"$ref": "#word"}}, "$defs": {"w": {"$anchor": "word", **WORD}}},
        {"properties": {"a": {"$ref": "word.json"}}, "$defs": {"w": {"$id": "https://e.org/word.json", **WORD}}},
        {
            "properties": {"a": {"$ref": "#/$defs/W0"}},
            "$defs": {**{f"W{i}": {"$ref": f"#/$defs/W{i + 1}"} for i in range(20)}, "W20": WORD},
        },
        {"properties": {"a": {"$ref": "#/$defs/W"}}, "$defs": {"W": {"anyOf": [WORD, {"$ref": "#/$defs/W"}]}}},
        {"properties": {"a": {"pattern": "^[0-9]+$"}}},
        {"properties": {"a": {"minLength": 1}}},
        {"allOf": [{"properties": {"a": WORD}}, {"properties": {"b": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"a": WORD}}, {"properties": {"b": {"type": "integer"}}}]},
        {"oneOf": [{"properties": {"a": WORD}}, {"properties": {"a": {"const": "x"}}}]},
        {"patternProperties": {"^a$": WORD}},
        {"patternProperties": {r"^\p{L}+$": WORD}},
        {
            "properties": {"a": {"description": "x"}},
            "allOf": [{"$ref": "#/$defs/O"}],
            "$defs": {"O": {"properties": {"a": WORD}}},
        },
        {"$ref": "#/$defs/O", "$defs": {"O": {"allOf": [{"anyOf": [{"properties": {"a": WORD}}]}]}}},
        {"if": {"required": ["b"]}, "then": {"properties": {"a": WORD}}},
        {"dependentSchemas": {"b": {"properties": {"a": WORD}}}},
        {"additionalProperties": {"$ref": "#/$defs/W"}, "$defs": {"W": WORD}},
    ],
    ids=str,
)
@pytest.mark.parametrize("value", ["1", "true", "null", "[1]"])
def test_a_string_stays_text_wherever_the_schema_declares_it(format_name, schema, value) -> None:
    """D4: such strings became numbers."""
    assert read(format_name, value, {"type": "object", **schema}) == value


@FORMATS
@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("1", {"type": "number", "enum": [0.5, 1.0, 2.0]}, 1),
        ("1", {"enum": [0.5, 1.0]}, 1),
        ("1.0", {"type": "number", "enum": [1, 2]}, 1.0),
        ("1.0", {"const": 1}, 1.0),
        ("1", {"const": 1.0}, 1),
        ("3.0", {"type": "integer"}, 3.0),
        ("1e2", {"type": "integer"}, 100.0),
        ("[1.0]", {"const": [1]}, [1.0]),
    ],
)
def test_numbers_are_equal_as_json_schema_has_it(format_name, value, schema, expected) -> None:
    """D5: valid numbers were refused."""
    found = read(format_name, value, {"type": "object", "properties": {"a": schema}})
    assert (found, type(found)) == (expected, type(expected))


@FORMATS
@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("1", {"enum": ["1", 2]}, "1"),
        ("2", {"enum": ["1", 2]}, 2),
        ("1", {"enum": ["1", 1]}, 1),
        ("true", {"anyOf": [{"const": "true"}, {"const": False}]}, "true"),
        ("null", {"enum": ["null", "x", 3]}, "null"),
        ("1", {"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}, "1"),
        ("1", {"allOf": [{"enum": ["1", "x", 5]}]}, "1"),
        ("7", {"enum": ["1", 2]}, 7),
    ],
)
def test_text_that_the_schema_lists_as_text_is_that_text(format_name, value, schema, expected) -> None:
    """D5: `"1"` beside `2` became the number 1, which the schema does not allow."""
    whole = {"type": "object", "properties": {"a": schema}, "$defs": {"E": {"enum": ["1", 2]}}}
    found = read(format_name, value, whole)
    assert (found, type(found)) == (expected, type(expected))


def test_types_of_a_property_that_no_part_speaks_of_are_left_to_the_text() -> None:
    schema = {"type": "object", "anyOf": [{"properties": {"b": WORD}}], "additionalProperties": False}
    assert read("qwen_xml", "1", schema) == 1
    assert read("qwen_xml", "one", schema) == "one"


def test_items_and_properties_inside_of_elements_are_typed_wherever_the_schema_declares_them() -> None:
    """D4, in the one format whose lists and objects are elements too."""
    token = _TOKEN
    inner = f"{token}<item>1{token}</item>{token}<item>2{token}</item>"
    tuples = {"type": "array", "prefixItems": [{"type": "integer"}, WORD]}
    for schema in (
        tuples,
        {"allOf": [{"$ref": "#/$defs/T%31"}]},
        {"type": "array", "items": [{"type": "integer"}, WORD]},
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": WORD},
    ):
        whole = {"type": "object", "properties": {"a": schema}, "$defs": {"T1": tuples}}
        assert read("minimax_m3", inner, whole) == [1, "2"]
    nested = {"type": "object", "patternProperties": {"^x": WORD}}
    assert read("minimax_m3", f"{token}<x1>1{token}</x1>", {"properties": {"a": nested}}) == {"x1": "1"}


STRING_AND_MORE = {"type": "object", "properties": {"a": WORD, "b": WORD}}


def calls(format_name: str, text: str) -> list[Any]:
    parser = get_tool_parser(format_name)
    return parser.parse(text, tools=[{"name": "f", "inputSchema": {"json": STRING_AND_MORE}}])


@pytest.mark.parametrize(
    "value",
    [
        "x</function></parameter><parameter=b>y",
        "</parameter><parameter=b>",
        "x\n</parameter><parameter=b>y",
        "x</parameter>\n  <parameter=b>\ny",
        "</parameter></function></tool",
    ],
)
def test_tags_that_are_no_lines_of_their_own_are_text(value) -> None:
    """D5: a string was split into two parameters."""
    (call,) = calls("qwen_xml", WRITTEN["qwen_xml"].format(key="a", value=value))
    assert call.input == {"a": value}


def test_a_value_without_line_breaks_still_ends_at_its_tag() -> None:
    body = "<parameter=a>x</parameter><parameter=b>\ny</parameter></function>"
    (call,) = calls("qwen_xml", f"<tool_call><function=f>{body}</tool_call>")
    assert call.input == {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    ("format_name", "value"),
    [
        ("seed_oss", "x</parameter><parameter=b>y"),
        ("seed_oss", "</function></parameter> <parameter=b>"),
        ("minimax_m2", 'x</parameter><parameter name="b">y'),
    ],
)
def test_a_value_whose_end_cannot_be_told_is_an_error_and_never_split(format_name, value) -> None:
    """D5, in the formats that write a value on the line of its tags."""
    (call,) = calls(format_name, WRITTEN[format_name].format(key="a", value=value))
    assert call.is_error
    assert "it cannot be told which </parameter> ends parameter 'a'" in call.error


def test_parameters_on_one_line_are_read_where_there_is_one_reading() -> None:
    text = (
        "<seed:tool_call><function=f><parameter=a>x</parameter><parameter=b>y</parameter></function></seed:tool_call>"
    )
    (call,) = calls("seed_oss", text)
    assert call.input == {"a": "x", "b": "y"}
