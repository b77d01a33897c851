"""Formats that write every value as plain text: what the schema says of its type, wherever it says so (D4, D5)."""

from typing import Any

import pytest

from strands_sglang.tool_parsers import get_tool_parser

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
