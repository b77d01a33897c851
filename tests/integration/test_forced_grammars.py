"""Every grammar of a forced call, compiled and walked with the grammar engine of the supported SGLang (D1 to D5, D7).

What a grammar lets through is one call of the forced tool that validates against its schema; or there is no grammar.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import support
from strands_sglang.tool_choice import forced_call
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY, get_tool_parser
from support.tricky_schemas import SCHEMAS, random_schema

ATTACKS = Path(support.__path__[0]) / "grammar_attacks.py"
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
REASONING: tuple[dict[str, bool], ...] = ({}, {}, {}, {"may_reason": True}, {"reasoning_open": True})


def grammars() -> list[dict[str, Any]]:
    """A grammar for every format and schema that has one."""
    found = []
    schemas = [*SCHEMAS, *(random_schema(SEED * RANDOM_SCHEMAS + number) for number in range(RANDOM_SCHEMAS))]
    for number, schema in enumerate(schemas):
        tools = [{"name": "fx", "inputSchema": {"json": schema}}, OTHER]
        for index, name in enumerate(FORMATS):
            flags = REASONING[(number + index) % len(REASONING)]
            try:
                params = forced_call(get_tool_parser(name), tools, {"tool": {"name": "fx"}}, **flags)
            except NotImplementedError:
                continue
            assert params is not None
            found.append({"format": name, "tools": tools, "flags": flags, "tag": params["structural_tag"]})
    return found


def wrong_with(text: str, asked: dict[str, Any]) -> str | None:
    """What keeps a text from being exactly one call of the forced tool that fits the schema."""
    try:
        turn = get_tool_parser(asked["format"]).parse_turn(
            text, tools=asked["tools"], reasoning_open=asked["flags"].get("reasoning_open", False)
        )
    except Exception as error:
        return f"the parser raises {error!r}"
    if [(call.name, call.error) for call in turn.tool_calls] != [("fx", None)]:
        return f"it is read as {[(call.attempted_name or call.name, call.error) for call in turn.tool_calls]}"
    if turn.text:
        return f"there is text beside the call: {turn.text!r}"
    schema = asked["tools"][0]["inputSchema"]["json"] or {}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(turn.tool_calls[0].input)
    undeclared = turn.tool_calls[0].input.keys() - set(declared_names(schema))
    wrong = next((error.message for error in errors), None)
    return wrong or (f"nobody declared {undeclared}" if undeclared else None)


def declared_names(schema: Any) -> list[str]:
    """The names of the properties that any part of a schema declares."""
    if isinstance(schema, dict):
        own = list(schema["properties"]) if isinstance(schema.get("properties"), dict) else []
        return own + [name for inner in schema.values() for name in declared_names(inner)]
    return [name for inner in schema for name in declared_names(inner)] if isinstance(schema, list) else []


@pytest.fixture(scope="module")
def walked(sglang_python: Path) -> list[dict[str, Any]]:
    """Every grammar with what the engine made of it."""
    asked = grammars()
    job = {"seed": SEED, "walks": WALKS, "pieces": PIECES, "ends": ENDS, "grammars": [each["tag"] for each in asked]}
    done = subprocess.run(
        [sglang_python, "-P", ATTACKS],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [{**each, **answer} for each, answer in zip(asked, json.loads(done.stdout), strict=True)]


def test_the_server_compiles_every_grammar_at_once(walked) -> None:
    """D3: some were refused by the server, after the request."""
    refused = [(each["format"], each["tools"][0]["inputSchema"], each["error"]) for each in walked if "error" in each]
    assert not refused, refused[:3]
    assert max(each["compile_s"] for each in walked) < 10


def test_whatever_a_grammar_lets_through_is_one_call_of_the_forced_tool_that_fits_its_schema(walked) -> None:
    """D1, D2, D4, D5, D7: 20,000 texts, sampled with choices that a hostile model would make."""
    sampled = [(text, each) for each in walked for text in each.get("texts", ())]
    assert len(sampled) >= 20_000 * min(1, WALKS / 5)
    wrong = [
        (each["format"], json.dumps(each["tools"][0]["inputSchema"]["json"])[:300], text, problem)
        for text, each in sampled
        if (problem := wrong_with(text, each)) is not None
    ]
    assert not wrong, f"{len(wrong)} of {len(sampled)}, e.g. {wrong[:3]}"
    assert {each["format"] for each in walked} == set(FORMATS)
