"""Every grammar of a forced call, compiled and walked with the grammar engine of the supported SGLang (D1 to D5, D7).

What a grammar lets through is one call of the forced tool that validates against its schema; or there is no grammar.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from itertools import product

import pytest

from strands_sglang.tool_choice import forced_call
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY, get_tool_parser
from support.forced_calls import run_grammars, wrong_with
from support.tricky_schemas import SCHEMAS, random_schema

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
