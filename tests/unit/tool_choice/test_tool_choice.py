import json

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from strands_sglang.tool_choice import CALL_FORMATS, forced_call
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY, HermesToolParser, get_tool_parser
from support.forced_calls import ARGUMENTS, TOOLS, texts_of, wrong_with

FORMATS = sorted(TOOL_PARSER_REGISTRY)
ANY = {"any": {}}


def element(parser, tools, choice=ANY, **flags):
    """Return the grammar of a forced call."""
    params = forced_call(get_tool_parser(parser) if isinstance(parser, str) else parser, tools, choice, **flags)
    assert params is not None and list(params) == ["structural_tag"]
    return json.loads(params["structural_tag"])["format"]


def tool(schema, name="f"):
    return {"name": name, "description": "d", "inputSchema": {"json": schema}}


def parameter(schema, required=True, **others):
    """Return a tool with one parameter."""
    return tool({"type": "object", "properties": {"a": schema}, "required": ["a"] if required else [], **others})


def drawn_call(data, format_name, tools, choice=ANY):
    """Return the one call of a text that the grammar matches."""
    text = data.draw(texts_of(element(format_name, tools, choice)))
    turn = get_tool_parser(format_name).parse_turn(text, tools=tools)
    assert not wrong_with(turn, tuple(found["name"] for found in tools), tools)
    return turn.tool_calls[0]


@pytest.mark.parametrize("format_name", FORMATS)
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_grammar_matches_one_call_that_fits_the_schema(format_name, data):
    drawn_call(data, format_name, TOOLS)


@pytest.mark.parametrize("format_name", FORMATS)
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_only_the_named_tool_can_be_called(format_name, data):
    parser = get_tool_parser(format_name)
    grammar = element(parser, TOOLS, {"tool": {"name": "now"}})
    assert "look_up" not in json.dumps(grammar)
    assert not wrong_with(parser.parse_turn(data.draw(texts_of(grammar)), tools=TOOLS), ("now",))


@pytest.mark.parametrize("format_name", FORMATS)
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_reasoning_that_the_prompt_opened_ends_before_the_call(format_name, data):
    parser = get_tool_parser(format_name)
    text = data.draw(texts_of(element(parser, TOOLS, reasoning_open=True)))
    assert parser.think_end_token in text
    assert not wrong_with(parser.parse_turn(text, tools=TOOLS, reasoning_open=True), ("look_up", "now"))


@pytest.mark.parametrize("format_name", FORMATS)
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_model_may_reason_before_the_call(format_name, data):
    parser = get_tool_parser(format_name)
    text = data.draw(texts_of(element(parser, TOOLS, may_reason=True)))
    assert not wrong_with(parser.parse_turn(text, tools=TOOLS), ("look_up", "now"))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"enum": ["x", 'a "b"', 3, None, True]},
        {"const": "only"},
        {"type": ["string", "null"]},
        {"type": ["integer", "null"], "maximum": 9},
        {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 2},
        {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 1},
        {"type": "object", "properties": {"b": {"type": "string", "maxLength": 2}, "c": {"type": "boolean"}}},
        {"allOf": [{"type": "integer"}, {"maximum": 9}]},
        {},
    ],
    ids=str,
)
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_kind_of_parameter_fits_its_schema(format_name, schema, data):
    call = drawn_call(data, format_name, [parameter(schema)])
    jsonschema.validate(call.input["a"], schema)


@pytest.mark.parametrize("format_name", sorted({*FORMATS} - {"gemma4", "minimax_m3"}))
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        {"anyOf": [{"type": "object", "additionalProperties": True}, {"type": "null"}]},
    ],
    ids=str,
)
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mapping_has_any_keys(format_name, schema, data):
    tools = [parameter(schema)]
    text = data.draw(texts_of(element(format_name, tools)))
    turn = get_tool_parser(format_name).parse_turn(text, tools=tools)
    assume("appears more than once" not in str(turn.tool_calls[0].error))  # no grammar keeps keys apart
    assert not wrong_with(turn, ("f",), tools)


@pytest.mark.parametrize("format_name", FORMATS)
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_recursive_value_ends(format_name, data):
    """As deep as its schema unrolls: optional properties, lists and alternatives are where it ends."""
    reference = {"$ref": "#/$defs/T"}
    tree = {
        "type": "object",
        "properties": {
            "left": reference,
            "items": {"type": "array", "items": reference, "maxItems": 1},
            "next": {"anyOf": [reference, {"type": "null"}]},
        },
        "required": ["items", "next"],
    }
    drawn_call(data, format_name, [parameter(reference, **{"$defs": {"T": tree}})])


@pytest.mark.parametrize("format_name", FORMATS)
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_optional_parameters_may_be_missing(format_name, data):
    names = ("a", "b", "c")
    properties = {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in names}
    for required in ([], ["b"], ["a", "c"]):
        drawn_call(data, format_name, [tool({"type": "object", "properties": properties, "required": required})])


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_server_only_reads_the_bounds_of_numbers(format_name):
    def handed_over(found):
        if isinstance(found, dict):
            yield from [found["json_schema"]] if found.get("type") == "json_schema" else []
        inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        for inner in inside:
            yield from handed_over(inner)

    for schema in handed_over(element(format_name, TOOLS)):
        assert schema["type"] in ("integer", "number")
        assert schema.keys() == {"type", "minimum", "maximum"}


def words(pattern, **others):
    return {"type": "string", "pattern": pattern, **others}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        *map(words, ("^.+$", ".*", "[0-9]+", "^[^,]+$", "^(?!admin)[a-z]+$", r"\bfoo\b", r"^\p{L}+$", r"^(a)\1$", "")),
        *map(
            words, ("^[a-z]{1,2000}$", '^a"b$', r"^\S+$", "^a|b$", "^<b>$", "^[A-z]$", "^[z-a]$", "^a{3,1}$", "^a+?$")
        ),
        *map(words, ("^(a|b)+$", "^(a|)$", "^((a|b)c)$", "^(?=a)$", "^([a-z]{1,90}){1,90}$", "^(a)b)$")),
        {"enum": []},
        {"anyOf": []},
        {"type": []},
        False,
        {"type": "string", "enum": [1]},
        {"type": "object", "patternProperties": {"^x": {"type": "string"}}},
        {"type": "object", "properties": {"x": {}}, "minProperties": 1},
        {"allOf": [{"properties": {"x": {}}}, {"additionalProperties": False}]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "minLength": 20000},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "maxLength": -1},
        {"type": "integer", "minimum": 10**40},
        {"type": "array", "minItems": 1000},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "array", "items": [{"type": "integer"}]},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "number", "minimum": 0, "maximum": 1e-7},
        {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        {"const": "\ud800"},
        {"$ref": "#/$defs/T"},
        {"anyOf": [{"type": "integer"}] * 300},
    ],
    ids=str,
)
def test_a_schema_without_an_exact_grammar_is_rejected(format_name, schema):
    """Patterns were dropped, applied in part, matched text that needs an escape, or failed on the server."""
    tree = {"T": {"type": "object", "properties": {"x": {"$ref": "#/$defs/T"}}, "required": ["x"]}}
    with pytest.raises(NotImplementedError, match="cannot be forced with .* the schema of the tool 'f'/properties/a"):
        forced_call(get_tool_parser(format_name), [parameter(schema, **{"$defs": tree})], ANY)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{4}-\d{2}$",
        "^[a-f0-9_]{2,3}$",
        r"^\w+@[a-z.-]+\.de$",
        "^a?b*$",
        "^(positive|negative|neutral)$",
        r"^(?:v\d+\.)?(a|b{2})-c$",
    ],
)
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_plain_pattern_is_matched_exactly(format_name, pattern, data):
    schema = words(pattern)
    jsonschema.validate(drawn_call(data, format_name, [parameter(schema)]).input["a"], schema)


@pytest.mark.parametrize("format_name", ["glm", "minimax_m2", "minimax_m3", "qwen_xml", "seed_oss"])
@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["null", None]},
        {"enum": ["[1]", [1]]},
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 9}]},
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        {"properties": {"x": {"type": "string"}}},
    ],
    ids=str,
)
def test_values_that_text_cannot_distinguish_are_rejected(format_name, schema):
    """A forced constant changed its type."""
    with pytest.raises(NotImplementedError, match="the format does not distinguish|cannot contain a list"):
        forced_call(get_tool_parser(format_name), [parameter(schema)], ANY)
    assert forced_call(HermesToolParser(), [parameter(schema)], ANY)


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": ["object", "null"]}], ids=str)
def test_arguments_must_be_an_object(schema):
    with pytest.raises(NotImplementedError, match="the arguments of a tool must be an object"):
        forced_call(HermesToolParser(), [tool(schema)], ANY)


def test_a_grammar_too_large_for_a_request_is_rejected():
    inner = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(40)}}
    schema = {"type": "object", "properties": {f"q{number}": inner for number in range(20)}}
    with pytest.raises(NotImplementedError, match="too large for a grammar|characters, and the limit is"):
        forced_call(HermesToolParser(), [tool(schema)], ANY)


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_same_choice_has_the_same_grammar(format_name):
    parser = get_tool_parser(format_name)
    assert forced_call(parser, TOOLS, ANY) == forced_call(get_tool_parser(format_name), TOOLS, ANY)


@pytest.mark.parametrize("choice", [None, {"auto": {}}])
def test_without_a_choice_nothing_is_forced(choice):
    assert forced_call(HermesToolParser(), TOOLS, choice) is None
    assert forced_call(HermesToolParser(), None, choice, sampling_params={"regex": "a"}) is None


def test_the_grammar_uses_the_marks_of_the_parser():
    grammar = json.dumps(element(HermesToolParser("<call>", "</call>"), TOOLS))
    assert "<call>" in grammar and "</call>" in grammar and "tool_call" not in grammar


def test_an_unknown_tool_is_an_error_that_lists_the_tools():
    with pytest.raises(ValueError, match="asks for 'rm', but the tools are: look_up, now"):
        forced_call(HermesToolParser(), TOOLS, {"tool": {"name": "rm"}})


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [ANY, {"tool": {"name": "now"}}])
def test_a_choice_without_tools_is_an_error(tools, choice):
    with pytest.raises(ValueError, match="needs tools, but there are none"):
        forced_call(HermesToolParser(), tools, choice)


def test_an_invalid_choice_is_an_error():
    with pytest.raises(ValueError, match="one of 'auto', 'any' and 'tool', not {'none': {}}"):
        forced_call(HermesToolParser(), TOOLS, {"none": {}})


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_a_second_grammar_is_an_error(name):
    with pytest.raises(ValueError, match=f"already has one, '{name}'"):
        forced_call(HermesToolParser(), TOOLS, ANY, sampling_params={name: "x", "temperature": 1.0})
    assert forced_call(HermesToolParser(), TOOLS, ANY, sampling_params={name: None, "temperature": 1.0})


def test_a_format_without_a_grammar_is_an_error():
    class Custom(HermesToolParser):
        pass

    with pytest.raises(NotImplementedError, match="Custom has no grammar; .* hermes"):
        forced_call(Custom(), TOOLS, ANY)
    assert Custom not in CALL_FORMATS


def test_an_impossible_tool_name_is_an_error():
    with pytest.raises(ValueError, match=r"the tool name 'f\.g' cannot be written in a call"):
        forced_call(HermesToolParser(), [tool({"type": "object"}, "f.g")], ANY)


def test_open_reasoning_needs_a_mark_that_ends_it():
    with pytest.raises(ValueError, match="no mark that ends reasoning"):
        forced_call(HermesToolParser(think_end_token=""), TOOLS, ANY, reasoning_open=True)


@pytest.mark.parametrize("keyword", ["uniqueItems", "multipleOf", "not", "if", "contains", "dependentRequired"])
def test_an_unsupported_keyword_is_an_error_with_its_path(keyword):
    schema = {"type": "array", "items": {keyword: True}}
    with pytest.raises(NotImplementedError, match=f"'f'/properties/a/items: .* keyword '{keyword}'"):
        forced_call(HermesToolParser(), [parameter(schema)], ANY)


@pytest.mark.parametrize(
    ("format_name", "schema", "message"),
    [
        ("gemma4", {"$ref": "#/$defs/T"}, "a value of the recursive schema has no end"),
        ("minimax_m3", {"type": "array", "items": {"$ref": "#/$defs/T"}, "minItems": 1}, "has no end"),
        ("minimax_m3", {"type": "object"}, "needs the properties of an object"),
        ("gemma4", {"type": "object", "additionalProperties": True}, "needs the properties of an object"),
        ("qwen_xml", {"enum": ["</parameter>"]}, "cannot write the value '</parameter>'"),
        ("glm", {"$ref": "#/properties/b"}, "leads nowhere"),
        ("llama4_pythonic", {"type": "string", "pattern": "a+"}, "express the pattern 'a\\+'"),
        ("hermes", {"type": "string", "pattern": "^a+$", "maxLength": 3}, "by a pattern and a length"),
    ],
)
def test_an_unsupported_schema_is_an_error_with_the_parser(format_name, schema, message):
    tree = {"T": {"type": "object", "properties": {"x": {"$ref": "#/$defs/T"}}, "required": ["x"]}}
    with pytest.raises(NotImplementedError, match=f"{type(get_tool_parser(format_name)).__name__}.*{message}"):
        forced_call(get_tool_parser(format_name), [parameter(schema, **{"$defs": tree})], ANY)


@pytest.mark.parametrize("format_name", ["qwen_xml", "seed_oss", "minimax_m3", "gemma4"])
def test_an_impossible_parameter_name_is_an_error(format_name):
    with pytest.raises(NotImplementedError, match="cannot write the"):
        forced_call(get_tool_parser(format_name), [tool({"type": "object", "properties": {"a>b": {}}})], ANY)


def test_a_line_break_in_a_parameter_name_is_kept():
    grammar = json.dumps(element("kimi_k3", [tool({"type": "object", "properties": {"a\nb": {"type": "null"}}})]))
    assert json.dumps('key="a\nb"')[1:-1] in grammar


def test_the_arguments_of_these_tests_fit_their_schemas():
    jsonschema.validate(ARGUMENTS, TOOLS[0]["inputSchema"]["json"])
