"""Tool calls come back from real templates and tokenizers as they went in, but for what the template itself loses.

transformers' own reader of answers is a second oracle, for the families that it has a response template for.
"""

import json
import os
import unicodedata

import jinja2
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from strands_sglang.tool_parsers import UnknownToolParserError, get_tool_parser
from support.families import FAMILIES, load_template, load_tokenizer
from support.parser_checks import KEYS, PIECES, json_values, tools_for
from support.round_trips import (
    COMPOSING,
    LOSSES,
    NO_CALLS,
    NO_REASONING,
    NO_TEXT,
    ONE_CALL,
    Message,
    Sampled,
    is_lost,
    parse,
    parser_for,
    pieces_of,
    sample,
)

EXAMPLES = 40
TEXT, REASONING = "So, I look it up.", "Hm. Is it?\nLet me see."
CODE = 'def f(x):\n    if x:\n\treturn \'\\n\' + """é"""\n\n'
ARGUMENTS = {
    "code": CODE,
    "text": "  é日本\U0001f642 \n",
    "digits": "123",
    "word": "true",
    "null": "null",
    "empty": "",
    "long": "x y\n" * 5000,
    "count": -3,
    "share": 0.1,
    "yes": True,
    "items": [1, 2],
    "more": {"a": {"b": [{"c": "1"}]}},
}
STRINGS = {key: value for key, value in ARGUMENTS.items() if key in ("digits", "word", "null", "empty")}

FAMILIES_WITH_CALLS = [family for family in FAMILIES if family not in NO_CALLS]
FAMILIES_THAT_REASON = [
    family for family in FAMILIES_WITH_CALLS if FAMILIES[family].reasoning and family not in NO_REASONING
]


def same(turn, calls):
    """Whether these are the turn's calls, with arguments of equal types on every level and in any order."""
    found = [(call.name, json.dumps(call.input, sort_keys=True)) for call in turn.tool_calls]
    return found == [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]


def texts_of(family):
    """Strings, with all in them that the family's template writes around the values of calls."""
    pieces = st.sampled_from((*pieces_of(family), *PIECES, CODE))
    return st.lists(st.one_of(pieces, st.text(max_size=6)), max_size=5).map("".join)


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_calls_of_any_arguments_come_back_as_they_went_in(family):
    arguments = st.dictionaries(KEYS, texts_of(family) | json_values(texts_of(family), texts_of(family)), max_size=3)
    if family == "llama_4":
        arguments = st.dictionaries(KEYS, texts_of(family), max_size=3)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize="CI" in os.environ)
    @given(st.lists(arguments, min_size=1, max_size=1 if family in ONE_CALL else 2), st.booleans(), st.booleans())
    def come_back(drawn, with_text, with_reasoning):
        calls = tuple((f"f{index}", arguments) for index, arguments in enumerate(drawn))
        assume(not is_lost(family, calls))
        text = TEXT if with_text and family not in NO_TEXT else ""
        reasoning = REASONING if with_reasoning and family in FAMILIES_THAT_REASON else ""
        sampled = sample(family, Message(calls, text, reasoning))
        assume(family not in COMPOSING or unicodedata.is_normalized("NFC", sampled.text))
        turn = parse(family, sampled, calls)
        assert [call.error for call in turn.tool_calls] == [None] * len(calls), sampled.text
        assert same(turn, calls), sampled.text
        assert (turn.text, turn.reasoning or "") == (text, reasoning)
        assert not turn.ends_in_reasoning

    come_back()


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_arguments_of_every_kind_come_back_with_the_text_and_the_reasoning_beside_them(family):
    one = (("f", STRINGS if family == "llama_4" else ARGUMENTS),)
    several = (*one, ("g", {}), ("h", {"digits": "4"}))
    messages = [Message(one), Message((("g", {}),))]
    if family not in ONE_CALL:
        messages.append(Message(several))
    if family not in NO_TEXT:
        messages.append(Message(one, TEXT))
    if family in FAMILIES_THAT_REASON:
        messages.append(Message(one, reasoning=REASONING))
    if family in FAMILIES_THAT_REASON and family not in NO_TEXT:
        messages.append(Message(several, TEXT, REASONING))
    for message in messages:
        turn = parse(family, sample(family, message), message.calls)
        assert same(turn, message.calls), turn
        assert (turn.text, turn.reasoning or "") == (message.text, message.reasoning)


@pytest.mark.parametrize(
    ("family", "loss"),
    [pytest.param(family, loss, id=f"{family}: {loss.why}") for loss in LOSSES for family in loss.families],
)
def test_what_is_listed_as_lost_is_lost_by_the_template_and_never_guessed(family, loss):
    calls = (("f", loss.example),)
    assert loss.lost(loss.example)
    written = sample(family, Message(calls))
    if loss.same_as:
        others = tuple(("f", arguments) for arguments in loss.same_as)
        assert sample(family, Message(others)).text == written.text
        return
    turn = parse(family, written, calls)
    if loss.reads_as is not None:
        assert same(turn, [("f", loss.reads_as)])
    else:
        assert turn.tool_calls
        assert all(call.is_error for call in turn.tool_calls)


@pytest.mark.parametrize("family", NO_CALLS)
def test_templates_that_are_listed_to_write_no_call_write_none(family):
    assert "key" not in sample(family, Message((("f", {"key": "value"}),))).text


@pytest.mark.parametrize("family", ONE_CALL)
def test_templates_that_are_listed_to_write_one_call_write_no_second_one(family):
    calls = (("f", {"key": "first"}), ("g", {"key": "second"}))
    try:
        assert "second" not in sample(family, Message(calls)).text
    except jinja2.TemplateError:
        pass


@pytest.mark.parametrize("family", NO_TEXT)
def test_templates_that_are_listed_to_write_no_text_beside_a_call_write_none(family):
    calls = (("f", {"key": "value"}),)
    sampled = sample(family, Message(calls, TEXT))
    turn = parse(family, sampled, calls)
    assert (turn.text, same(turn, calls)) != (TEXT, True)
    if turn.tool_calls:
        assert same(turn, calls)
        assert TEXT not in sampled.text or turn.reasoning == TEXT


@pytest.mark.parametrize("family", NO_REASONING)
def test_templates_that_are_listed_to_write_no_reasoning_write_none(family):
    assert REASONING not in sample(family, Message((("f", {"key": "value"}),), "", REASONING)).text


@pytest.mark.parametrize("family", FAMILIES)
def test_only_tokenizers_that_are_listed_to_compose_characters_do(family):
    tokenizer, text = load_tokenizer(family), "e\u0301"
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    assert decoded == (unicodedata.normalize("NFC", text) if family in COMPOSING else text)


def marks_of(family):
    """The marks around reasoning."""
    parser = parser_for(family)
    return FAMILIES[family].reasoning or (parser.think_start_token, parser.think_end_token)


def call_text(family, name):
    """A call as the family's template writes it, without the reasoning that it may write before."""
    written = sample(family, Message(((name, {"key": "value"}),))).text
    return written.rpartition(marks_of(family)[1])[2].strip()


def encoded(family, text, *, reasoning_open):
    return Sampled(text, tuple(load_tokenizer(family).encode(text, add_special_tokens=False)), reasoning_open)


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_a_draft_in_reasoning_is_no_call_whoever_opened_it(family):
    opened, closed = marks_of(family)
    draft, call = call_text(family, "draft"), call_text(family, "run")
    glue = "<|start|>assistant" if family == "gpt_oss" else "\n\n"
    written = (("run", {"key": "value"}),)
    for text, reasoning_open in [
        (f"{opened}Maybe {draft}?{closed}{glue}{call}", False),
        (f"Maybe {draft}?{closed}{glue}{call}", True),
    ]:
        turn = parse(family, encoded(family, text, reasoning_open=reasoning_open), written)
        assert same(turn, written), text
        assert turn.reasoning == f"Maybe {draft}?"
    for text, reasoning_open in [(f"{opened}Maybe {draft}", False), (f"Maybe {draft}", True)]:
        turn = parse(family, encoded(family, text, reasoning_open=reasoning_open), written)
        assert (turn.tool_calls, turn.text, turn.ends_in_reasoning) == ((), "", True)


@pytest.mark.parametrize("family", FAMILIES_THAT_REASON)
def test_a_draft_in_reasoning_that_the_template_writes_is_no_call(family):
    draft = f"Maybe {call_text(family, 'draft')}?"
    calls = (("run", {"key": "value"}),)
    turn = parse(family, sample(family, Message(calls, reasoning=draft)), calls)
    assert same(turn, calls)
    assert turn.reasoning == draft


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parser_of_a_family_is_found_by_its_chat_template(family):
    expected = FAMILIES[family].tool_format
    if expected is None:
        with pytest.raises(UnknownToolParserError, match="name one in place of 'auto'"):
            get_tool_parser("auto", chat_template=load_template(family))
    else:
        found = get_tool_parser("auto", chat_template=load_template(family))
        assert type(found) is type(get_tool_parser(expected))


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
    "code": CODE,
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


def readings(family, sampled, calls):
    """Our reading and the one of transformers: text, reasoning, calls; None where it raises."""
    # Templates of families whose tokenizers have none; older versions of transformers have no such thing.
    serving = pytest.importorskip("transformers.cli.serving.utils")
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
def test_transformers_reads_the_same_or_there_is_a_reason(family, label):
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
def test_what_transformers_repairs_is_refused_here(family, text, reason):
    ids = tuple(load_tokenizer(family).encode(text, add_special_tokens=False))
    ours, theirs = readings(family, Sampled(text, ids, False), [CALL])
    assert ours[2] == []
    assert theirs is not None and theirs[2], reason
