"""Every grammar of a forced call, compiled and walked with the grammar engine of the supported SGLang (D1 to D5, D7).

What a grammar lets through is one call of the forced tool that validates against its schema; or there is no grammar.
"""

import json
import os
import random
from contextlib import suppress
from itertools import product

import pytest

from strands_sglang.tool_choice import forced_call
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY, get_tool_parser
from support.forced_calls import run_grammars, wrong_with

PATTERNS = (
    *(
        "^[a-z]+$",
        r"^\d{4}-\d{2}-\d{2}$",
        r"^[A-Z]{2}\.[0-9]?$",
        r"^\w+@\w+\.\w{2,3}$",
        "^#[0-9a-f]{6}$",
        "^a b$",
        "^$",
    ),
    *("", ".*", "^.+$", "[0-9]+", "a|b", "^a|b$", "^(a|b)$", "^[^,]+$", r"^\S+$", "^(?!admin)[a-z]+$", "^(?=a)a$"),
    *(r"\bfoo\b", r"^\p{L}+$", r"^(a)\1$", "^[a-z]{1,2000}$", "^([a-z]{1,90}){1,90}$", '^a"b$', r"^[A-Z]:\\[a-z]+$"),
    *(r"^\s*x\s*$", "^a+?b$", r"^(?<y>\d)$", "^<b>$", "^[<>]+$", "^é+$", "^[z-a]$", "^[A-z]+$", r"^[\w.-]+$", "^[a-]$"),
    *("^]<]minimax$", "^[]]$", r"^\u0041$", "^a{2}{3}$", "^*$", "^a{,3}$", "^a{3,1}$", "^[0-9,.]{1,3}$", "^'+/=%&;!~$"),
    *(r"^\/\(\)\$\|\^\*\+\?\.\-$", r"^[\d\.\-]{2}$", r"^[\w-]?x$", "^ +$", "^[ ]{2}$", "^-a-$", "^[.+*?]+$"),
)
NAMES = (
    *("item", "a b", "type", "name", "</parameter>", "<parameter=b>", "</invoke>", "x</arg_key>", '"', "q'", "\\", "ä"),
    *(
        "<|close|>",
        "&quot;",
        "&",
        "}",
        "a:b",
        "",
        " ",
        "true",
        "0",
        "$ref",
        "</tool_call>",
        "<think>",
        "</think>",
        "\n",
    ),
    *("]<]minimax[>[", "[ARGS]", "```", "<｜DSML｜parameter", "x" * 300, "\ud800", "\x00"),
)
CONSTANTS = (
    *(
        "",
        "1",
        "true",
        "null",
        "None",
        " 1 ",
        "[1]",
        '{"a": 1}',
        "a\nb",
        "\n",
        "\\",
        '"',
        "</parameter>",
        "<|",
        "'",
        "é",
    ),
    *(
        "</tool_call>",
        "<|call|>",
        "\x00",
        "\x07",
        "\u2028",
        "\ud800",
        "]<]minimax[>[",
        "1e5",
        "NaN",
        "\n</parameter>\n",
    ),
    *(0, 1, -3, 10**30, 0.5, 1.0, 1e16, 1e-7, True, False, None, [], [1, "a"], {}, {"a": None}, [[["</arg_value>"]]]),
)


def argument(schema, **others):
    """The schema of a tool with one argument, which is required."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **others}


def obj(required=True, **properties):
    """The schema of an object."""
    return {"type": "object", "properties": properties, "required": [*properties] if required else []}


STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
TREE = {"type": "object", "properties": {"v": INTEGER, "l": {"$ref": "#/$defs/T"}, "r": {"$ref": "#/$defs/T"}}}

ARGUMENTS = (
    *(
        True,
        False,
        {},
        [],
        5,
        None,
        {"type": "word"},
        {"type": []},
        {"type": 3},
        {"enum": []},
        {"anyOf": []},
        {"not": {}},
    ),
    *({"type": ["object", "null"]}, {"type": "object"}, {"type": "array"}, {"type": ["string", "null"]}, obj()),
    *(
        {"type": ["string", "integer", "array"]},
        {"type": ["number", "integer", "boolean", "null"]},
        obj(False, x=INTEGER),
    ),
    *({"type": "object", "additionalProperties": extra} for extra in (True, False, STRING, {})),
    *({**obj(x=STRING), "additionalProperties": extra} for extra in (True, False, STRING)),
    *({"type": "object", "patternProperties": {"^x": INTEGER}}, {**obj(x=INTEGER), "patternProperties": {"x": STRING}}),
    *(
        {**obj(x=INTEGER), "minProperties": 2},
        {**obj(x=INTEGER), "maxProperties": 0},
        {**obj(x=INTEGER), "required": "x"},
    ),
    *({**obj(x=INTEGER), "required": ["y"]}, obj(x=False), obj(False, x=False, y=True), {"properties": {"x": INTEGER}}),
    *(
        {"type": "string", "minLength": low, "maxLength": high}
        for low, high in ((0, 0), (1, 1), (2, 5), (5, 2), (3, 40))
    ),
    *(
        {"type": "string", "minLength": 1},
        {"type": "string", "minLength": 20000},
        {"type": "string", "maxLength": 100000},
    ),
    *({"type": "string", "maxLength": wrong} for wrong in (-1, 1.5, 2.0, "3", True)),
    *({"type": ["string", "null"], "maxLength": 4}, {"type": ["string", "integer"], "maxLength": 3, "minimum": 7}),
    *({"type": "string", "pattern": "^a+$", "maxLength": 3}, {"anyOf": [{"pattern": "^[0-9]+$"}, NULL]}),
    *({"type": "string", "format": name} for name in ("date", "email", "uri", "uuid", "ipv4", "regex")),
    *({"type": kind, "minimum": 3, "maximum": 17} for kind in ("integer", "number")),
    *({"type": kind, "exclusiveMinimum": -1, "exclusiveMaximum": 1} for kind in ("integer", "number")),
    *({"type": kind, "minimum": -0.5, "exclusiveMaximum": 0.5} for kind in ("integer", "number")),
    *({"type": kind, "minimum": 0} for kind in ("integer", "number")),
    *({"type": kind, "maximum": 10**17} for kind in ("integer", "number")),
    *({"type": kind, "minimum": 10**30} for kind in ("integer", "number")),
    *({"type": "integer", "minimum": 2, "maximum": 1}, {"type": "number", "exclusiveMinimum": 1, "maximum": 1}),
    *({"type": "number", "minimum": 0, "maximum": 1e-7}, {"type": "number", "minimum": 0, "exclusiveMinimum": True}),
    *(
        {"type": "number", "multipleOf": 0.1},
        {"type": "integer", "minimum": "1"},
        {"minimum": 5},
        {"minimum": 5, "minLength": 1},
    ),
    *(
        {"type": "array", "items": items}
        for items in (True, False, INTEGER, STRING, [INTEGER], {"enum": ["a", 1, None]})
    ),
    *({"type": "array", "items": False, "minItems": 1}, {"type": "array", "items": {"type": "array", "items": STRING}}),
    *(
        {"type": "array", "items": INTEGER, "minItems": low, "maxItems": high}
        for low, high in ((1, 3), (2, 2), (0, 0), (3, 1))
    ),
    *({"type": "array", "items": STRING, "minItems": 1000}, {"type": "array", "items": INTEGER, "maxItems": 5000}),
    *(
        {"type": "array", "prefixItems": [INTEGER, STRING], **more}
        for more in ({}, {"items": False}, {"minItems": 1}, {"minItems": 3})
    ),
    *({"type": "array", "items": INTEGER, key: True} for key in ("uniqueItems", "contains")),
    *({"type": "array", "items": INTEGER, "uniqueItems": False}, {"type": "array", "items": obj(item=STRING)}),
    *(
        {"anyOf": [one, other]}
        for one in (STRING, {"const": "5"})
        for other in (NULL, INTEGER, {"type": "integer", "minimum": 9})
    ),
    *(
        {"anyOf": [STRING, {"type": "array", "items": STRING}]},
        {"anyOf": [obj(x=STRING), {"type": "array", "items": STRING}]},
    ),
    *(
        {"anyOf": [obj(kind={"const": "a"}, v=STRING), obj(kind={"const": "b"}, v=INTEGER)]},
        {"anyOf": [obj(x=STRING), NULL]},
    ),
    *(
        {"oneOf": [obj(kind={"const": "a"}, v=STRING), obj(kind={"const": "b"}, v=INTEGER)]},
        {"oneOf": [INTEGER, {"type": "number"}]},
    ),
    *(
        {"oneOf": [STRING, INTEGER]},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [obj(x=STRING), obj(False, x=STRING)]},
    ),
    *({"oneOf": [{"const": "a"}, {"enum": ["b", 2]}]}, {"oneOf": [{}, STRING]}, {"oneOf": [{"enum": [2.0]}, INTEGER]}),
    *(
        {"allOf": [INTEGER, {"maximum": 9}]},
        {"allOf": [STRING, INTEGER]},
        {"allOf": [{}, True, {"title": "x"}]},
        {"allOf": [False]},
    ),
    *({"allOf": [obj(x=STRING), {"additionalProperties": False}]}, {"allOf": [obj(x=STRING), obj(y=STRING)]}),
    *(
        {"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 100}]},
        {"type": "integer", "enum": [1, "1", 2.0, None]},
    ),
    *(
        {"enum": ["1", 2]},
        {"enum": ["null", None]},
        {"enum": [0.5, 1.0]},
        {"enum": [1, True, 1.0]},
        {"enum": ["a", "b"], "maxLength": 1},
    ),
    *(
        {"const": 1, "enum": [1.0, 2]},
        {"const": 1, "enum": [2]},
        {"enum": list(range(300))},
        {"type": "string", "enum": ["x", 1]},
    ),
    *(
        {"if": INTEGER, "then": {"minimum": 3}},
        {"contains": False},
        {"not": False},
        {"dependentRequired": {}},
        {"unevaluatedProperties": False, **obj(x=STRING)},
    ),
    *(
        {"$dynamicRef": "#x"},
        {"$id": "https://e.org/x", "type": "string"},
        {"type": "string", "nullable": True, "x-more": [1]},
    ),
    *(
        {"type": "integer", "default": None},
        {"type": "string", "contentEncoding": "base64"},
        {"propertyNames": {"maxLength": 1}, **obj(x=INTEGER)},
    ),
)

WHOLE = (
    *(
        None,
        {},
        {"type": "object"},
        {"type": "array"},
        {"type": ["object", "null"]},
        {"const": {}},
        {"additionalProperties": True},
    ),
    *({"properties": {}}, {"additionalProperties": STRING}, {**obj(a=STRING), "additionalProperties": True}),
    {"type": "object", "allOf": [obj(a=STRING)]},
    {"type": "object", "allOf": [{"properties": {"a": STRING}}, {"required": ["a"]}]},
    {"anyOf": [obj(a=STRING), obj(b=INTEGER)]},
    {"type": "object", "properties": {"a": STRING, "b": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [obj(a={"const": 1}), obj(a={"const": 2})]},
    {"$ref": "#/$defs/I", "$defs": {"I": obj(a=STRING, b=INTEGER)}},
    {"$id": "https://e.org/tool", "allOf": [{"$ref": "#/$defs/I"}], "$defs": {"I": obj(a=STRING)}},
    {
        "properties": {"z": {"anyOf": [INTEGER, STRING]}, "a": {"$ref": "#/properties/z/anyOf/1"}},
        "required": ["a", "z"],
    },
    {"properties": {"a": {"$ref": "#/$defs/x%20~1~0"}}, "required": ["a"], "$defs": {"x /~": STRING}},
    {"properties": {"a": {"$ref": "#/$defs/missing"}}},
    {"properties": {"a": {"$ref": "https://e.org/else.json"}}},
    {"properties": {"a": {"$ref": "#/$defs/L"}}, "$defs": {"L": {"$ref": "#/$defs/L"}}},
    {"properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": {"T": TREE}},
    {
        "properties": {"a": {"$ref": "#/$defs/T0"}},
        "$defs": {f"T{i}": obj(l={"$ref": f"#/$defs/T{i + 1}"}, r={"$ref": f"#/$defs/T{i + 1}"}) for i in range(30)}
        | {"T30": INTEGER},
    },
    {
        "properties": {"a": {"$ref": "#/$defs/T0"}},
        "$defs": {f"T{i}": {"anyOf": [{"$ref": f"#/$defs/T{i + 1}"}] * 2} for i in range(30)} | {"T30": INTEGER},
    },
    {"properties": {f"p{i}": STRING for i in range(40)}},
    {"properties": {f"p{i}": obj(False, x=INTEGER, y=STRING) for i in range(12)}, "required": ["p3"]},
    {"properties": {"a": obj(b={"type": "array", "items": obj(c={"type": "array", "items": obj(False, d=STRING)})})}},
)

SCHEMAS = (
    *WHOLE,
    *(argument(schema) for schema in ARGUMENTS),
    *(argument({"type": "string", "pattern": pattern}) for pattern in PATTERNS),
    *({"properties": {name: STRING, "b": INTEGER}, "required": [name]} for name in NAMES),
    *(obj(a=obj(False, **{name: INTEGER})) for name in NAMES),
    *(argument({"const": constant}) for constant in CONSTANTS),
)


def random_schema(seed):
    """A schema of a tool, of the keywords that tools have; many can be forced, some allow nothing at all."""
    chance = random.Random(seed)

    def some(level):
        texts = [
            lambda: {"type": "string", **sizes("minLength", "maxLength", 6)},
            lambda: {"type": "string", "pattern": chance.choice(PATTERNS)},
        ]
        values = [
            lambda: {"enum": chance.choices(CONSTANTS, k=chance.randint(1, 4))},
            lambda: {"$ref": f"#/$defs/{chance.choice('DE')}"},
            lambda: {"type": chance.choice(["integer", "number"]), **chance.choice([{}, bounds()])},
            lambda: chance.choice([{}, True, {"type": "boolean"}, {"type": "null"}]),
            lambda: {"type": chance.sample(["string", "integer", "null", "boolean"], 2)},
        ]
        nested = [
            lambda: {"type": "array", "items": some(level - 1), **sizes("minItems", "maxItems", 3)},
            lambda: some_object(level - 1),
            lambda: {chance.choice(["anyOf", "oneOf"]): [some(level - 1) for _ in range(chance.randint(1, 3))]},
            lambda: {"allOf": [some(level - 1), chance.choice([{}, {"title": "x"}, True])]},
            lambda: {"type": "array", "prefixItems": [some(level - 1) for _ in range(chance.randint(1, 2))]},
        ]
        return chance.choice([*texts, *values, *(nested if level else ())])()

    def some_object(level):
        names = chance.sample(["a", "b", "c", "item", *NAMES[:12]], chance.randint(0, 4))
        found = {"type": "object", "properties": {name: some(level) for name in names}}
        return {**found, "required": [name for name in names if chance.random() < 0.5]}

    def bounds():
        low = round(chance.uniform(-99, 99), chance.randint(0, 3))
        least, most = chance.choice(["minimum", "exclusiveMinimum"]), chance.choice(["maximum", "exclusiveMaximum"])
        return {least: low, most: low + chance.choice([0, 1, 2.5, 1000])}

    def sizes(least, most, largest):
        low, high = sorted(chance.choices(range(largest + 1), k=2))
        return chance.choice([{}, {least: low}, {most: high}, {least: low, most: high}])

    return {**some_object(3), "$defs": {"D": some(1), "E": some(0)}}


STOP = 256  # of a vocabulary of bytes
FORMATS = sorted(TOOL_PARSER_REGISTRY)
SEED = int(os.environ.get("FORCED_CALLS_SEED", "0"))
WALKS = int(os.environ.get("FORCED_CALLS_WALKS", "5"))  # of one grammar; there are about 4,500 grammars
RANDOM_SCHEMAS = 60

OTHER = {"name": "rm", "inputSchema": {"json": {"type": "object", "properties": {"a": {"type": "string"}}}}}
# What a hostile model would write: the ends of values and calls, calls of another tool, and what needs an escape.
PIECES = [
    *(
        '"',
        "\\",
        "\\n",
        "\\\\",
        '\\"',
        "\\u0041",
        "\\ud83d",
        "\\/",
        "\n",
        "\r",
        "\t",
        "\x7f",
        "\u2028",
        "é",
        "日",
        "🙂",
        " ",
    ),
    *("{", "}", "[", "]", ",", ", ", ":", ": ", "(", ")", "=", "'", "```", ";", "<", ">", "</", "|", "&quot;", "%"),
    *(
        "null",
        "true",
        "false",
        "None",
        "True",
        "NaN",
        "0",
        "1",
        "-3",
        "0.5",
        "1e511",
        "1e5",
        "3.0",
        "00",
        "1.",
        "E",
        "a",
        "xyz",
    ),
    *(
        "</parameter>",
        "\n</parameter>\n",
        "<parameter=b>\n",
        "<parameter=a>",
        "</function>",
        "<function=rm>",
        "</tool_call>",
    ),
    *(
        "</tool_call>\n<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        "<tool_call>rm</tool_call>",
        "<think>",
        "</think>",
    ),
    *(
        '{"name": "rm", "arguments": {}}',
        '{"name": "rm", "parameters": {}}',
        "[rm()]",
        "<|tool_call|>",
        "<|python_start|>",
    ),
    *(
        "</arg_value>",
        "<arg_key>b</arg_key><arg_value>",
        "</arg_value></tool_call>",
        '</invoke>\n<invoke name="rm">',
        "</invoke>",
    ),
    *(
        '<parameter name="b">',
        '</parameter>\n<parameter name="b">',
        "</minimax:tool_call>",
        "]<]minimax[>[",
        "]<]minimax[>[</a>",
    ),
    *(
        '<|"|>',
        '<|"|>,b:<|"|>',
        "<tool_call|>",
        "<|tool_call>call:rm{}",
        "<|channel>",
        "<channel|>",
        "[TOOL_CALLS]rm[ARGS]{}",
    ),
    *(
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "</｜DSML｜parameter>",
        '<｜DSML｜invoke name="rm">',
        "</｜DSML｜invoke>",
    ),
    *(
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        '<|open|>call tool="rm" index="2"<|sep|>',
        "<|tool_call_end|>",
    ),
    *(
        "<|call|>",
        "<|end|>",
        "<|start|>assistant to=functions.rm<|channel|>commentary<|message|>{}",
        "<item>",
        "</item>",
    ),
]
ENDS = [
    *(
        '"',
        "]",
        "}",
        ")",
        "\n</parameter>",
        "</parameter>",
        "</arg_value>",
        "</｜DSML｜parameter>",
        "<|close|>",
        '<|"|>',
    ),
    *(
        "]<]minimax[>[",
        "</think>",
        "[/THINK]",
        "<channel|>",
        "<|end|>",
        "</seed:think>",
        "</mm:think>",
        "<|close|>think<|sep|>",
    ),
    "<|close|>argument<|sep|>",
]
REASONING = ({}, {}, {}, {"may_reason": True}, {"reasoning_open": True})


@pytest.fixture(scope="module")
def walked(sglang_python):
    """A grammar for every format and schema that has one, with what the engine made of it."""
    asked = {"tokenizer": None, "stop_ids": [STOP], "seed": SEED, "jobs": []}
    asked |= {key: [[*text.encode()] for text in texts] for key, texts in (("pieces", PIECES), ("ends", ENDS))}
    schemas = [*SCHEMAS, *(random_schema(SEED * RANDOM_SCHEMAS + number) for number in range(RANDOM_SCHEMAS))]
    for (number, schema), (index, name) in product(enumerate(schemas), enumerate(FORMATS)):
        tools = [{"name": "fx", "inputSchema": {"json": schema}}, OTHER]
        flags = REASONING[(number + index) % len(REASONING)]
        with suppress(NotImplementedError):
            forced = forced_call(get_tool_parser(name), tools, {"tool": {"name": "fx"}}, **flags) or {}
            job = {"texts": [], "walks": WALKS, "format": name, "tools": tools, "flags": flags}
            asked["jobs"].append({**forced, **job})
    (answers,) = run_grammars(sglang_python, [asked])
    return answers


def test_the_server_compiles_every_grammar_at_once(walked):
    """D3: some were refused by the server, after the request."""
    refused = [(each["format"], each["tools"][0]["inputSchema"], each["error"]) for each in walked if "error" in each]
    assert not refused, refused[:3]
    assert max(each["compile_s"] for each in walked) < 10


def test_whatever_a_grammar_lets_through_is_one_call_of_the_forced_tool_that_fits_its_schema(walked):
    """D1, D2, D4, D5, D7: 20,000 texts, sampled with choices that a hostile model would make."""
    ended = [(ids, each) for each in walked for ids in each.get("walks", ()) if ids[-1] == STOP]
    assert len(ended) >= 20_000 * min(1, WALKS / 5)  # random reasoning may go on and on
    wrong = []
    for ids, each in ended:
        text = bytes(ids[:-1]).decode(errors="replace")
        reasoning_open = each["flags"].get("reasoning_open", False)
        turn = get_tool_parser(each["format"]).parse_turn(text, tools=each["tools"], reasoning_open=reasoning_open)
        if problem := wrong_with(turn, ("fx",), each["tools"]):
            wrong.append((each["format"], json.dumps(each["tools"][0]["inputSchema"]["json"])[:300], text, problem))
    assert not wrong, f"{len(wrong)} of {len(ended)}, e.g. {wrong[:3]}"
    assert {each["format"] for each in walked} == set(FORMATS)
