"""Forced tool calls: on a real server, and by the grammar engine of the supported SGLang.

What a grammar lets through is one call of the forced tool that fits its schema; or there is no grammar. That is so for
every format with the tokenizer of a real family, and over bytes for every schema that is easy to get wrong.
"""

import asyncio
import json
import os
import random
import time
from contextlib import suppress
from itertools import product

import pytest

from strands_sglang import SGLangClient, get_tokenizer
from strands_sglang.messages import to_chat_messages, to_chat_tools
from strands_sglang.templates.chat_template import ChatTemplate
from strands_sglang.tool_choice import CALL_FORMATS, forced_call
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY, get_tool_parser
from support.families import FAMILIES, load_tokenizer
from support.forced_calls import ARGUMENTS, TOOLS, run_grammars, wrong_with

# A family for every format.
NAMES = (
    *("qwen3", "qwen3_coder", "glm_4_5", "kimi_k2", "kimi_k3", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2"),
    *("deepseek_v4", "gpt_oss", "llama_3_1", "llama_4", "mistral_nemo", "minimax_m2", "minimax_m3", "gemma_4"),
    *("granite_3", "seed_oss", "phi_4_mini", "smollm3"),
)
_JSON = json.dumps(ARGUMENTS)
_NAMED = f'{{"name": "look_up", "arguments": {_JSON}}}'
_XML = (
    '<parameter=key>a "b"\nc</parameter>\n<parameter=n>3</parameter>\n'
    '<parameter=deep>{"l": [1, 2], "s": "x"}</parameter>\n<parameter=flag>True</parameter>\n'
)
# Where the template writes no such call, or writes values that cannot be read back.
WRITTEN = {
    "phi_4_mini": '<|tool_call|>[{"type": "function", "function": ' + _NAMED + "}]<|/tool_call|>",
    "llama_4": '[look_up(key="a \\"b\\"\\nc", n=3, deep={"l": [1, 2], "s": "x"}, flag=true)]',
    "smollm3": f"<tool_call>\n{_NAMED}\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
    f"{_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "seed_oss": f"<seed:tool_call>\n<function=look_up>\n{_XML}</function>\n</seed:tool_call>",
}
# Where a call does not begin with the parser's mark.
BEGINNINGS = {
    "gpt_oss": " to=functions.look_up",
    "llama_3_1": '{"name": "look_up", "parameters"',
    "granite_3": "<|tool_call|>",
}
THOUGHT = "Hmm. <b>So</b>.\n"


def parser_of(family):
    """The parser of a family."""
    return get_tool_parser(str(family.tool_format))


def stops_of(family):
    """What a server of the family stops at: in gpt-oss, `<|end|>` only ends a message."""
    return tuple(stop for stop in family.end_of_turn if (family.name, stop) != ("gpt_oss", "<|end|>"))


def written_call(family):
    """A call as the family's chat template writes it, without what stands before it and without the stop."""
    if family.name in WRITTEN:
        return WRITTEN[family.name]
    template = ChatTemplate(load_tokenizer(family.name))
    question = {"role": "user", "content": [{"text": "Q?"}]}
    use = {"toolUse": {"toolUseId": "call00001", "name": "look_up", "input": ARGUMENTS}}
    chat = to_chat_messages([question, {"role": "assistant", "content": [use]}])
    text = template.render(chat, to_chat_tools(TOOLS), add_generation_prompt=False)
    behind = text[text.rindex(BEGINNINGS.get(family.name, parser_of(family).tool_start_token)) :]
    stops = (behind.index(stop) for stop in family.end_of_turn if stop in behind)
    return behind[: min(stops, default=len(behind))]  # GLM's template ends a turn by the next one's token


def asked_of(family, folder):
    """What is forced: any tool, perhaps behind reasoning; one behind the prompt's reasoning; one without parameters."""
    parser, tokenizer, call = parser_of(family), load_tokenizer(family.name), written_call(family)
    tokenizer.save_pretrained(folder)
    stop_ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops_of(family)]
    thought = f"{THOUGHT}{parser.think_end_token}{'<|start|>assistant' if family.name == 'gpt_oss' else ''}{call}"
    opening = parser.think_start_token + ("thought\n" if family.name == "gemma_4" else "")
    jobs = []
    pieces = []
    for choice, calls, flags, names in (
        ({"any": {}}, [call, opening + thought], {"may_reason": True}, ("look_up", "now")),
        ({"tool": {"name": "look_up"}}, [thought], {"reasoning_open": True}, ("look_up",)),
        ({"tool": {"name": "now"}}, [], {}, ("now",)),
    ):
        texts = [[*tokenizer.encode(text, add_special_tokens=False), stop_ids[0]] for text in calls]
        pieces += [ids[begin : begin + 3] for ids in texts for begin in range(len(ids))]
        job = {"texts": texts, "walks": 1, "flags": flags, "names": names}
        jobs.append({**(forced_call(parser, TOOLS, choice, **flags) or {}), **job})
    return {"tokenizer": str(folder), "stop_ids": stop_ids, "seed": 0, "pieces": pieces, "ends": pieces, "jobs": jobs}


@pytest.fixture(scope="module")
def walked(sglang_python, tmp_path_factory):
    """By family, the jobs with what the grammar engine made of them; one process for all of them."""
    asked = [asked_of(FAMILIES[name], tmp_path_factory.mktemp(name)) for name in NAMES]
    return dict(zip(NAMES, run_grammars(sglang_python, asked), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_grammar_accepts_a_call_as_the_template_writes_it(name, walked):
    tokenizer = load_tokenizer(name)
    for job in walked[name]:
        for ids, refused in zip(job["texts"], job["refused"], strict=True):
            assert refused is None, f"{refused}: {tokenizer.decode(ids[: refused[0] + 1])}"


@pytest.mark.parametrize("name", NAMES)
def test_grammar_samples_one_call_that_fits_the_schema(name, walked):
    tokenizer, parser = load_tokenizer(name), parser_of(FAMILIES[name])
    stops = {tokenizer.convert_tokens_to_ids(stop) for stop in stops_of(FAMILIES[name])}
    for job in walked[name]:
        ended = [ids for ids in job["walks"] if ids[-1] in stops]  # random reasoning may never end
        assert ended or job["flags"]
        for ids in ended:
            text = tokenizer.decode(ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            reasoning_open = job["flags"].get("reasoning_open", False)
            assert not wrong_with(parser.parse_turn(text, tools=TOOLS, reasoning_open=reasoning_open), job["names"])


def test_every_registered_format_can_be_forced():
    assert set(TOOL_PARSER_REGISTRY.values()) == set(CALL_FORMATS)
    assert {type(parser_of(FAMILIES[name])) for name in NAMES} == set(CALL_FORMATS)


SHORT_TOOLS = [
    {
        "name": "convert",
        "description": "Converts a length.",
        "inputSchema": {
            "json": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 999},
                    "unit": {"enum": ["km", "mile"]},
                    "note": {"type": "string", "maxLength": 8},
                },
                "required": ["value", "unit", "note"],
            }
        },
    },
    TOOLS[1],
]


async def sample(server, choice, format_name, *, count=4, bias=0, **flags):
    """Force calls on a server that knows nothing of the format; `bias` makes the end of reasoning likelier."""
    template = ChatTemplate(get_tokenizer(str(server.model_path)), chat_template=server.chat_template)
    parser = get_tool_parser(format_name)
    prompt = template.opening([{"role": "user", "content": "How far is it?"}], to_chat_tools(SHORT_TOOLS)).token_ids
    if flags.get("reasoning_open"):
        prompt = prompt + template.encode(parser.think_start_token)
    params = {
        **(forced_call(parser, SHORT_TOOLS, choice, **flags) or {}),
        "max_new_tokens": 1500,
        "skip_special_tokens": False,
    }
    if bias:
        end_id = template.tokenizer.convert_tokens_to_ids(parser.think_end_token)
        params["logit_bias"] = {str(end_id): bias}
    async with SGLangClient(server.base_url) as client:
        answers = await asyncio.gather(*(client.generate(prompt, params, return_logprob=True) for _ in range(count)))
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"stop"}, answers[0]["text"][-200:]
    texts = [template.decode(answer["output_ids"][:-1]) for answer in answers]
    return [parser.parse_turn(text, tools=SHORT_TOOLS, **flags) for text in texts]


@pytest.mark.parametrize("format_name", sorted(TOOL_PARSER_REGISTRY))
async def test_random_model_can_be_forced_to_call_in_any_format(tiny_server, own_server, format_name):
    for turn in await sample(tiny_server, {"any": {}}, format_name):
        assert not wrong_with(turn, ("convert", "now"), SHORT_TOOLS)


@pytest.mark.parametrize("choice", [{"any": {}}, {"tool": {"name": "now"}}, {"tool": {"name": "convert"}}])
async def test_a_language_model_calls_the_tool_that_it_has_to(smollm_server, own_server, choice):
    names = (choice["tool"]["name"],) if "tool" in choice else ("convert", "now")
    for turn in await sample(smollm_server, choice, "hermes"):
        assert not wrong_with(turn, names, SHORT_TOOLS)


async def test_opened_reasoning_is_finished_before_the_call(tiny_server, own_server):
    choice = {"tool": {"name": "convert"}}
    turns = await sample(tiny_server, choice, "hermes", count=10, bias=4, reasoning_open=True)
    for turn in turns:
        assert not wrong_with(turn, ("convert",), SHORT_TOOLS)
    assert any(turn.reasoning for turn in turns)  # with this bias, one in ten ends its reasoning with the first token


async def test_different_grammars_can_share_one_server(tiny_server, own_server):
    for format_name in ("hermes", "qwen_xml", "glm", "hermes", "gemma4", "qwen_xml"):
        begin = time.perf_counter()
        for turn in await sample(tiny_server, {"tool": {"name": "convert"}}, format_name, count=2):
            assert not wrong_with(turn, ("convert",), SHORT_TOOLS)
        assert time.perf_counter() - begin < 60


# --- every grammar, over bytes ---

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
    *(
        "",
        ".*",
        "^.+$",
        "[0-9]+",
        "a|b",
        "^a|b$",
        "^(a|b)$",
        "^(positive|negative|neutral)$",
        "^[^,]+$",
        r"^\S+$",
        "^(?!admin)[a-z]+$",
        "^(?=a)a$",
    ),
    *(r"\bfoo\b", r"^\p{L}+$", r"^(a)\1$", "^[a-z]{1,2000}$", "^([a-z]{1,90}){1,90}$", '^a"b$', r"^[A-Z]:\\[a-z]+$"),
    *(r"^\s*x\s*$", "^a+?b$", r"^(?<y>\d)$", "^<b>$", "^[<>]+$", "^é+$", "^[z-a]$", "^[A-z]+$", r"^[\w.-]+$", "^[a-]$"),
    *("^]<]minimax$", "^[]]$", r"^\u0041$", "^a{2}{3}$", "^*$", "^a{,3}$", "^a{3,1}$", "^[0-9,.]{1,3}$", "^'+/=%&;!~$"),
    *(r"^\/\(\)\$\|\^\*\+\?\.\-$", r"^[\d\.\-]{2}$", r"^[\w-]?x$", "^ +$", "^[ ]{2}$", "^-a-$", "^[.+*?]+$"),
)
PROPERTY_NAMES = (
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

ARGUMENT_SCHEMAS = (
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
    {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}, "b": {"anyOf": [{"$ref": "#"}, NULL]}}},
    {"properties": {"a": {"$ref": "#/$defs/M"}}, "$defs": {"M": {"additionalProperties": {"$ref": "#/$defs/M"}}}},
    {"properties": {f"p{i}": STRING for i in range(40)}},
    {"properties": {f"p{i}": obj(False, x=INTEGER, y=STRING) for i in range(12)}, "required": ["p3"]},
    {"properties": {"a": obj(b={"type": "array", "items": obj(c={"type": "array", "items": obj(False, d=STRING)})})}},
)

SCHEMAS = (
    *WHOLE,
    *(argument(schema) for schema in ARGUMENT_SCHEMAS),
    *(argument({"type": "string", "pattern": pattern}) for pattern in PATTERNS),
    *({"properties": {name: STRING, "b": INTEGER}, "required": [name]} for name in PROPERTY_NAMES),
    *(obj(a=obj(False, **{name: INTEGER})) for name in PROPERTY_NAMES),
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
        names = chance.sample(["a", "b", "c", "item", *PROPERTY_NAMES[:12]], chance.randint(0, 4))
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
def byte_walks(sglang_python):
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


def test_the_server_compiles_every_grammar_at_once(byte_walks):
    """The server rejected some of them, after the request."""
    refused = [
        (each["format"], each["tools"][0]["inputSchema"], each["error"]) for each in byte_walks if "error" in each
    ]
    assert not refused, refused[:3]
    assert max(each["compile_s"] for each in byte_walks) < 10


def test_grammar_accepts_only_a_call_of_the_forced_tool(byte_walks):
    """20,000 texts, sampled with choices that a hostile model would make."""
    ended = [(ids, each) for each in byte_walks for ids in each.get("walks", ()) if ids[-1] == STOP]
    assert len(ended) >= 20_000 * min(1, WALKS / 5)  # random reasoning may never end
    wrong = []
    for ids, each in ended:
        text = bytes(ids[:-1]).decode(errors="replace")
        reasoning_open = each["flags"].get("reasoning_open", False)
        turn = get_tool_parser(each["format"]).parse_turn(text, tools=each["tools"], reasoning_open=reasoning_open)
        if any("appears more than once" in str(call.error) for call in turn.tool_calls):
            continue  # a key of a mapping, which no grammar can keep from being written twice
        if problem := wrong_with(turn, ("fx",), each["tools"]):
            wrong.append((each["format"], json.dumps(each["tools"][0]["inputSchema"]["json"])[:300], text, problem))
    assert not wrong, f"{len(wrong)} of {len(ended)}, e.g. {wrong[:3]}"
    assert {each["format"] for each in byte_walks} == set(FORMATS)
