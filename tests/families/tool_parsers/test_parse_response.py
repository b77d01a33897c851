"""transformers' own reader of answers as a second oracle, for the families that it has a response template for."""

from __future__ import annotations

from typing import Any

import pytest

from support.families import FAMILIES, load_tokenizer
from support.parser_checks import tools_for
from support.round_trips import Message, Sampled, parse, sample

# Templates of families whose tokenizers have none; older versions of transformers have no such thing.
serving = pytest.importorskip("transformers.cli.serving.utils")

# The model type of a family, and how its prompts end.
HERMES, QWEN, GEMMA = (
    ("qwen3", "<|im_start|>assistant\n"),
    ("qwen3_5", "<|im_start|>assistant\n"),
    ("gemma4", "<|turn>model\n"),
)
FAMILY_TYPES = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_2507", "qwen3_vl"), HERMES),
    **dict.fromkeys(("qwen3_5", "qwen3_6", "qwen3_8"), QWEN),
    "gemma_4": GEMMA,
}
CALL = ("f", {"a": "x", "n": 3})
VALUES = {
    "code": 'def f(x):\n    if x:\n\treturn \'\\n\' + """é"""\n\n',
    "spaces": "  é日本\U0001f642 \n",
    "digits": "123",
    "word": "true",
    "null": "null",
    "empty": "",
    "count": -3,
    "share": 0.1,
    "yes": True,
    "items": [1, 2],
    "more": {"a": {"b": [{"c": "1"}]}},
    "end mark": "x</tool_call>y",
    "end tag": "x</parameter>y",
}
MESSAGES = {
    **{label: Message((("f", {"a": value}),)) for label, value in VALUES.items()},
    "no arguments": Message((("g", {}),)),
    "several": Message((CALL, ("g", {}), ("h", {"digits": "4"}))),
    "beside text": Message((CALL,), "So, I look it up."),
    "after reasoning": Message((CALL,), "", "Hm. Is it?\nLet me see."),
    "all": Message((CALL, ("g", {})), "So, I look it up.", "Hm."),
    "a draft in reasoning": Message((CALL,), "", "Maybe <tool_call>rm</tool_call>?"),
}
DIFFERENCES = {
    **dict.fromkeys([(QWEN, "code"), (QWEN, "spaces")], "it strips the white space of strings"),
    (HERMES, "end mark"): "it ends a call at the first end mark, also in a JSON string",
    (QWEN, "end tag"): "it ends a value at the first end tag",
}


def readings(family: str, sampled: Sampled, calls: Any) -> tuple[Any, Any]:
    """Our reading and the one of transformers: text, reasoning, calls; None where it raises."""
    ours = parse(family, sampled, calls)
    model_type, prefix = FAMILY_TYPES[family]
    template = next(found for types, found in serving._RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types)
    opened = FAMILIES[family].reasoning[0] if sampled.reasoning_open else ""
    tools = [
        {"function": {"name": tool["name"], "parameters": tool["inputSchema"]["json"]}} for tool in tools_for(calls)
    ]
    called = [(call.name, call.input) for call in ours.tool_calls if not call.is_error]
    try:
        read = load_tokenizer(family).parse_response(sampled.text, template, prefix=prefix + opened, tools=tools)
    except ValueError:
        return (ours.text, ours.reasoning or "", called), None
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in read.get("tool_calls", [])]
    texts = [(read.get(key) or "").strip() for key in ("content", "reasoning_content")]
    return (ours.text, ours.reasoning or "", called), (*texts, functions)


@pytest.mark.parametrize("label", MESSAGES)
@pytest.mark.parametrize("family", FAMILY_TYPES)
def test_transformers_reads_the_same_or_there_is_a_reason(family: str, label: str) -> None:
    message = MESSAGES[label]
    if message.reasoning and FAMILIES[family].reasoning is None:
        pytest.skip("the family does not reason")
    ours, theirs = readings(family, sample(family, message), message.calls)
    assert repr(ours) == repr((message.text, message.reasoning, list(message.calls)))
    differs = (FAMILY_TYPES[family], label) in DIFFERENCES
    assert (repr(ours) != repr(theirs)) is differs, theirs


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("qwen3", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "arguments that are no object are a call"),
        (
            "qwen3",
            '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>',
            "keys of no format are a call",
        ),
        ("qwen3_5", "<tool_call><function=f>text</function></tool_call>", "text among the tags is left out"),
        ("qwen3_5", "<tool_call><function=f><parameter=a>1</function></tool_call>", "what is not closed is left out"),
        ("qwen3_5", "<tool_call><function=f><parameter=n>x</parameter></function></tool_call>", "any type will do"),
        ("gemma_4", "<|tool_call>call:f{a:1,a:2}<tool_call|>", "the last one of two keys counts"),
        ("gemma_4", "<|tool_call>call:f{a:NaN}<tool_call|>", "NaN is taken for JSON"),
    ],
)
def test_what_transformers_repairs_is_refused_here(family: str, text: str, reason: str) -> None:
    ids = tuple(load_tokenizer(family).encode(text, add_special_tokens=False))
    ours, theirs = readings(family, Sampled(text, ids, False), [CALL])
    assert ours[2] == []
    assert theirs is not None and theirs[2], reason
