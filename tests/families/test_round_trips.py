"""Tool calls round-trip through real templates and tokenizers, except for what a template itself loses.

A template writes an assistant message. Its text is encoded and parsed as if it had been sampled. The losses of
templates are listed by family, each with an example that proves it; everything else must round-trip. The response
parser of transformers is a second oracle for the families that it has a response template for.
"""

import copy
import functools
import json
import os
import re
import unicodedata
from collections import namedtuple

import jinja2
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from strands_sglang.tool_parsers import UnknownToolParserError, get_tool_parser
from support.families import FAMILIES, load_template, load_tokenizer
from support.parser_checks import JSON_TYPE, KEYS, PIECES, json_values, strings_in, tools_for

QUESTION = {"role": "user", "content": "What is it?"}

# No template uses these when it writes a call.
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
    }
]

# Templates that expect the arguments of a call as JSON text instead of an object.
WANTS_TEXT = frozenset({"deepseek_v3"})

# Templates that expect reasoning as a content block.
WANTS_BLOCKS = frozenset({"ministral_3"})


# An assistant message: name and arguments of each call, visible text, text of the reasoning.
Message = namedtuple("Message", ["calls", "text", "reasoning"], defaults=["", ""])

# The turn that a template writes for an assistant message, as if it had been sampled: its text without the token that
# ends it, the token ids of that text, and whether the prompt ended inside reasoning.
Sampled = namedtuple("Sampled", ["text", "token_ids", "reasoning_open"])


@functools.cache
def parser_for(family):
    """Return the parser of a family."""
    return get_tool_parser("auto", tokenizer=load_tokenizer(family))


def sample(family, message):
    """Render a message with a family's template, and cut out the assistant's turn.

    Raises:
        jinja2.TemplateError: The template rejects the message.
    """
    row, tokenizer = FAMILIES[family], load_tokenizer(family)
    thinking = {"thinking": True, "enable_thinking": True} if message.reasoning else {}

    def render(messages, **keywords):
        return tokenizer.apply_chat_template(
            copy.deepcopy(messages), tools=TOOLS, tokenize=False, **thinking, **keywords
        )

    prompt = render([QUESTION], add_generation_prompt=True)
    whole = render([QUESTION, _as_chat(family, message)])
    reasoning_open = False
    if row.reasoning is not None and prompt.rfind(row.reasoning[0]) > prompt.rfind(QUESTION["content"]):
        begin = prompt.rindex(row.reasoning[0])
        reasoning_open = whole.startswith(prompt) and row.reasoning[1] not in prompt[begin:]
        if not whole.startswith(prompt):  # the prompt opens reasoning, but the history of the turn has none
            prompt = prompt[:begin]
    assert whole.startswith(prompt), (prompt[-100:], whole[-300:])
    part = whole[len(prompt) :]
    ends = [part.rfind(stop) for stop in row.end_of_turn if stop in part]
    part = part[: max(ends)] if ends else part
    return Sampled(part, tuple(tokenizer.encode(part, add_special_tokens=False)), reasoning_open)


def parse(family, sampled, calls):
    """Parse a turn with its token ids, and with tools that declare the arguments of these calls."""
    tokenizer = load_tokenizer(family)
    return parser_for(family).parse_turn(
        tokenizer.decode(sampled.token_ids, skip_special_tokens=False),
        token_ids=sampled.token_ids,
        tokenizer=tokenizer,
        tools=[{"name": name, "inputSchema": {"json": _schema([arguments])}} for name, arguments in calls],
        reasoning_open=sampled.reasoning_open,
    )


def _schema(values):
    """Return the schema of all values in one place."""
    schema = {"type": sorted({JSON_TYPE[type(value)] for value in values})}
    objects = [value for value in values if isinstance(value, dict)]
    items = [inner for value in values if isinstance(value, list) for inner in value]
    if items:
        schema["items"] = _schema(items)
    if objects:
        keys = dict.fromkeys(key for value in objects for key in value)
        schema["properties"] = {key: _schema([value[key] for value in objects if key in value]) for key in keys}
    return schema


def _as_chat(family, message):
    """Return the message in the form that chat templates expect."""
    chat = {"role": "assistant", "content": message.text}
    if message.reasoning:
        if family in WANTS_BLOCKS:
            chat["content"] = [
                {"type": "thinking", "thinking": message.reasoning},
                {"type": "text", "text": message.text},
            ]
        else:
            chat["reasoning_content"] = message.reasoning
    chat["tool_calls"] = [
        {
            "id": f"functions.{name}:{index}" if family.startswith("kimi") else f"callid{index:03d}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False) if family in WANTS_TEXT else arguments,
            },
        }
        for index, (name, arguments) in enumerate(message.calls)
    ]
    return chat


class Loss(namedtuple("Loss", ["families", "why", "lost", "example", "same_as", "reads_as"], defaults=[(), None])):
    """Arguments that do not round-trip.

    Without `same_as` and `reads_as`, the call is rejected as malformed.

    Attributes:
        families: Families whose templates lose the arguments.
        why: Reason for the loss.
        lost: Returns whether the arguments of a call are lost.
        example: Arguments that are lost.
        same_as: Arguments of the calls for which the template writes the same text.
        reads_as: Other arguments that the text means in its format.
    """


# Templates that write no calls.
NO_CALLS = {
    "deepseek_v3_original": "drops calls",
    "gemma_3": "has no calls",
    "smollm3": "drops calls",
}

# Templates that do not write a second call in one turn.
ONE_CALL = {
    **dict.fromkeys(("llama_3_1", "llama_3_2", "llama_3_3"), "rejects a second call"),
    "gpt_oss": "writes the first call only",
}

# Templates that do not write text together with a call.
NO_TEXT = {
    **dict.fromkeys(("granite_3", "hermes_3", "llama_3_1", "llama_3_2", "llama_3_3"), "drops text before a call"),
    **dict.fromkeys(("mistral_nemo", "mistral_small_3_2"), "drops text before a call"),
    "gpt_oss": "writes text before a call as reasoning",
    "phi_4_mini": "drops calls after text",
    "llama_4": "writes a list without a mark, which is a call only at the start of the turn",
}

# Templates of reasoning models that do not write reasoning before a call.
NO_REASONING = {
    "qwq": "drops reasoning",
    "deepseek_v3": "drops reasoning",
    "deepseek_v3_1": "drops reasoning",
}

# Families whose tokenizer composes characters (Unicode NFC) when it encodes a text.
COMPOSING = frozenset(
    {"qwen2_5", "qwen3", "qwen3_2507", "qwen3_vl", "qwen3_coder", "qwen3_5", "qwen3_6", "qwen3_8", "qwq"}
)


def _strings(pattern, around=""):
    """Return a test for arguments with a string value that matches the pattern."""
    compiled = re.compile(pattern)
    return lambda arguments: any(
        isinstance(value, str) and compiled.search(f"{around}{value}{around}") for value in arguments.values()
    )


def _anywhere(pattern):
    """Return a test for arguments with a string on any level that matches the pattern."""
    compiled = re.compile(pattern)
    return lambda arguments: any(compiled.search(text) for text in strings_in(list(arguments.values())))


def _values(value):
    yield value
    if isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _values(inner)


def _keys(value):
    return (key for inner in _values(value) if isinstance(inner, dict) for key in inner)


def _is_mixed(values):
    """Return whether the values in one place of a schema mix strings, lists, objects and other values."""
    if len({type(value) if isinstance(value, (str, list, dict)) else None for value in values}) > 1:
        return True
    lists = [inner for value in values if isinstance(value, list) for inner in value]
    objects = [value for value in values if isinstance(value, dict)]
    keys = {key for value in objects for key in value}
    return bool(lists and _is_mixed(lists)) or any(
        _is_mixed([value[key] for value in objects if key in value]) for key in keys
    )


def _of_untagged_strings(
    *families,
    next_value,
    next_call,
    opening,
    ending,
    around="",
):
    """Return the losses of a format that writes strings between tags without escapes.

    Each of the four texts is a pattern and an example of it.

    Args:
        families: Families of the format.
        next_value: End of a value, and the opening of the next value, named b.
        next_call: End of a value and of its call, and the end of the calls or the opening of the next call; the example
            opens a call of f with a value b.
        opening: Opening of a value.
        ending: End of a call, and the end of the calls or the opening of the next call.
        around: Text before and after a value.
    """
    return (
        Loss(
            families,
            "the string contains the end of a value and the next value: it could be two arguments",
            _strings(next_value[0], around),
            {"a": f"x{next_value[1]}y"},
            same_as=({"a": "x", "b": "y"},),
        ),
        Loss(
            families,
            "the string contains the end of a value and of its call: it could be two calls",
            _strings(next_call[0], around),
            {"a": f"x{next_call[1]}y"},
            same_as=({"a": "x"}, {"b": "y"}),
        ),
        Loss(
            families,
            "the string contains the opening of a value: it could follow an unclosed value",
            _strings(opening[0], around),
            {"a": f"x{opening[1]}y"},
        ),
        Loss(
            families,
            "the string contains the end of a call: it could follow an unclosed value",
            _strings(ending[0], around),
            {"a": f"x{ending[1]}y"},
        ),
    )


_QWEN_END = r"</function>\s*</tool_call>"
_GLM_OPENING = r"<arg_key>[^<\n]+</arg_key>\s*<arg_value>"
_M2_OPENING = r'<parameter name="[^"\n]+">'
_M2_END = r'</invoke>\s*(?:<invoke name="[^"\n]+">|</minimax:tool_call>)'
_SEED_OPENING = r"<parameter=[^<>\n]+>"
_SEED_END = r"</function>\s*(?:<function=[^<>\n]+>|</seed:tool_call>)"
_DSML_OPENING = r'<｜DSML｜parameter name="[^"\n]+" string="(?:true|false)">'
_K3_OPENING = r'<\|open\|>argument key="[^"]*" type="[a-z]+"<\|sep\|>'
_K3_CALL = r'<\|open\|>call tool="[^"\n]+" index="[0-9]+"<\|sep\|>'
_K3_END = rf"<\|close\|>call<\|sep\|>\s*(?:{_K3_CALL}|<\|close\|>tools<\|sep\|>)"


def _of_dsml(family, section):
    end = rf'</｜DSML｜invoke>\s*(?:<｜DSML｜invoke name="[^"\n]+">|</｜DSML｜{section}>)'
    opening = '<｜DSML｜parameter name="b" string="true">'
    return _of_untagged_strings(
        family,
        next_value=(rf"</｜DSML｜parameter>\s*{_DSML_OPENING}", f"</｜DSML｜parameter>\n{opening}"),
        next_call=(
            rf"</｜DSML｜parameter>\s*{end}",
            f'</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="f">\n{opening}',
        ),
        opening=(_DSML_OPENING, opening),
        ending=(end, f"</｜DSML｜invoke>\n</｜DSML｜{section}>"),
    )


# All losses of arguments.
LOSSES = (
    *_of_untagged_strings(
        *("qwen3_coder", "qwen3_5", "qwen3_6", "qwen3_8", "nemotron_3"),
        next_value=(r"</parameter>\s*<parameter=[^>\n]+>", "\n</parameter>\n<parameter=b>\n"),
        next_call=(
            rf"</parameter>\s*{_QWEN_END}",
            "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=b>\n",
        ),
        opening=(r"\n<parameter=[^>\n]+>\n", "\n<parameter=b>\n"),
        ending=(_QWEN_END, "</function></tool_call>"),
        around="\n",
    ),
    *(
        loss
        for families, newline in ((("glm_4_5", "glm_4_6"), "\n"), (("glm_4_7",), ""))
        for loss in _of_untagged_strings(
            *families,
            next_value=(
                rf"</arg_value>\s*{_GLM_OPENING}",
                f"</arg_value>{newline}<arg_key>b</arg_key>{newline}<arg_value>",
            ),
            next_call=(
                r"</arg_value>\s*</tool_call>",
                f"</arg_value>{newline}</tool_call>{newline}<tool_call>f{newline}"
                f"<arg_key>b</arg_key>{newline}<arg_value>",
            ),
            opening=(_GLM_OPENING, "<arg_key>b</arg_key><arg_value>"),
            ending=(r"</arg_value>\s*</tool_call>", "</arg_value></tool_call>"),
        )
    ),
    *_of_untagged_strings(
        "minimax_m2",
        next_value=(rf"</parameter>\s*{_M2_OPENING}", '</parameter>\n<parameter name="b">'),
        next_call=(
            rf"</parameter>\s*{_M2_END}",
            '</parameter>\n</invoke>\n<invoke name="f">\n<parameter name="b">',
        ),
        opening=(rf"\n{_M2_OPENING}", '\n<parameter name="b">'),
        ending=(_M2_END, "</invoke></minimax:tool_call>"),
    ),
    *_of_untagged_strings(
        "seed_oss",
        next_value=(rf"</parameter>\s*{_SEED_OPENING}", "</parameter>\n<parameter=b>"),
        next_call=(
            rf"</parameter>\s*{_SEED_END}",
            "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=f>\n<parameter=b>",
        ),
        opening=(rf"\n{_SEED_OPENING}", "\n<parameter=b>"),
        ending=(_SEED_END, "</function></seed:tool_call>"),
    ),
    *_of_dsml("deepseek_v3_2", "function_calls"),
    *_of_dsml("deepseek_v4", "tool_calls"),
    *_of_untagged_strings(
        "kimi_k3",
        next_value=(
            rf"<\|close\|>argument<\|sep\|>\s*{_K3_OPENING}",
            '<|close|>argument<|sep|><|open|>argument key="b" type="string"<|sep|>',
        ),
        next_call=(
            rf"<\|close\|>argument<\|sep\|>\s*{_K3_END}",
            '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="f" index="2"<|sep|>'
            '<|open|>argument key="b" type="string"<|sep|>',
        ),
        opening=(_K3_OPENING, '<|open|>argument key="b" type="string"<|sep|>'),
        ending=(_K3_END, "<|close|>call<|sep|><|close|>tools<|sep|>"),
    ),
    Loss(
        ("minimax_m3",),
        "null is omitted",
        lambda arguments: any(value is None for value in _values(arguments)),
        {"a": None},
        same_as=({},),
    ),
    Loss(
        ("minimax_m3",),
        "a list contains values of several types, which the schema cannot distinguish",
        lambda arguments: _is_mixed([arguments]),
        {"a": ["1", 2]},
        same_as=({"a": [1, "2"]},),
    ),
    Loss(
        ("minimax_m3",),
        "a string contains a tag with its token",
        _anywhere(r"\]<\]minimax\[>\[</?[^<>\n]+>"),
        {"a": ["x]<]minimax[>[</item>]<]minimax[>[<item>y"]},
        same_as=({"a": ["x", "y"]},),
    ),
    Loss(
        ("minimax_m3",),
        "a key is not a valid tag",
        lambda arguments: any(re.fullmatch(r"[^/<>\n][^<>\n]*", key) is None for key in _keys(arguments)),
        {"a": {"<": 1}},
    ),
    Loss(
        ("gemma_4",),
        "a string contains the quote mark",
        _anywhere(r'<\|"\|>'),
        {"a": 'x<|"|>,b:<|"|>y'},
        same_as=({"a": "x", "b": "y"},),
    ),
    Loss(
        ("gemma_4",),
        "a key contains a separator; keys are written bare",
        lambda arguments: any(re.fullmatch(r"[^:,{}\[\]<>\n]{0,256}", key) is None for key in _keys(arguments)),
        {"a": {"b:1,c": 2}},
        same_as=({"a": {"b": 1, "c": 2}},),
    ),
    Loss(
        ("llama_4",),
        "every value is written as a string",
        lambda arguments: any(not isinstance(value, str) for value in arguments.values()),
        {"a": 1, "b": None, "c": True},
        same_as=({"a": "1", "b": "None", "c": "True"},),
    ),
    Loss(
        ("llama_4",),
        "quotes in a string are not escaped",
        _strings('"'),
        {"a": 'x", b="y'},
        same_as=({"a": "x", "b": "y"},),
    ),
    Loss(
        ("llama_4",),
        "backslashes in a string are not escaped",
        _strings(r"\\"),
        {"a": r"x\ny"},
        reads_as={"a": "x\ny"},
    ),
    Loss(
        ("llama_4",),
        "line breaks in a string are not escaped",
        _strings("\n"),
        {"a": "x\ny"},
    ),
)


TEXT, REASONING = "So, I look it up.", "Hm. Is it?\nLet me see."
CODE = 'def f(x):\n    if x:\n\treturn \'\\n\' + """é"""\n\n'

FAMILIES_WITH_CALLS = [family for family in FAMILIES if family not in NO_CALLS]
FAMILIES_THAT_REASON = [
    family for family in FAMILIES_WITH_CALLS if FAMILIES[family].reasoning and family not in NO_REASONING
]


def same(turn, calls):
    """Return whether these are the turn's calls, with equal types on every level and arguments in any order."""
    found = [(call.name, json.dumps(call.input, sort_keys=True)) for call in turn.tool_calls]
    return found == [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_calls_with_any_arguments_round_trip(family):
    def pieces():
        """Return the pieces that the family's template writes around the names and values of calls."""
        message = Message((("f0", {"k0": "v0", "k1": "v1"}), ("f1", {"k2": "v2"})), "t0", "r0")
        for attempt in (message, Message(message.calls), Message(message.calls[:1])):
            try:
                written = sample(family, attempt).text
            except jinja2.TemplateError:
                continue
            if "k0" in written:
                break
        parser = parser_for(family)
        found = {parser.tool_start_token, parser.tool_end_token, parser.think_start_token, parser.think_end_token}
        found |= {*FAMILIES[family].marks, *(FAMILIES[family].reasoning or ())}
        found |= {piece for piece in re.split(r"[fktrv][0-2]", written) if piece.strip()}
        found |= set(re.findall(r"</?[^<>\s]*[^<>]*>", written))
        stops = FAMILIES[family].end_of_turn
        return sorted(piece for piece in found - {""} if not any(stop in piece for stop in stops))

    def is_lost(calls):
        """Return whether the family's template loses the arguments of one of these calls."""
        return any(loss.lost(arguments) for loss in LOSSES if family in loss.families for _, arguments in calls)

    # Strings that contain the pieces that the template writes around the values of calls.
    texts = st.lists(st.sampled_from((*pieces(), *PIECES, CODE)) | st.text(max_size=6), max_size=5).map("".join)
    values = texts if family == "llama_4" else texts | json_values(texts, texts)
    arguments = st.dictionaries(KEYS, values, max_size=3)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize="CI" in os.environ)
    @given(st.lists(arguments, min_size=1, max_size=1 if family in ONE_CALL else 2), st.booleans(), st.booleans())
    def round_trips(drawn, with_text, with_reasoning):
        calls = tuple((f"f{index}", arguments) for index, arguments in enumerate(drawn))
        assume(not is_lost(calls))
        text = TEXT if with_text and family not in NO_TEXT else ""
        reasoning = REASONING if with_reasoning and family in FAMILIES_THAT_REASON else ""
        sampled = sample(family, Message(calls, text, reasoning))
        assume(family not in COMPOSING or unicodedata.is_normalized("NFC", sampled.text))
        turn = parse(family, sampled, calls)
        assert [call.error for call in turn.tool_calls] == [None] * len(calls), sampled.text
        assert same(turn, calls), sampled.text
        assert (turn.text, turn.reasoning or "") == (text, reasoning)
        assert not turn.ends_in_reasoning

    round_trips()


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_calls_round_trip_with_text_and_reasoning(family):
    arguments = {
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
    strings = {key: value for key, value in arguments.items() if key in ("digits", "word", "null", "empty")}
    one = (("f", strings if family == "llama_4" else arguments),)
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
def test_a_listed_loss_is_the_templates_and_never_guessed(family, loss):
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
def test_templates_listed_without_calls_write_none(family):
    assert "key" not in sample(family, Message((("f", {"key": "value"}),))).text


@pytest.mark.parametrize("family", ONE_CALL)
def test_templates_listed_with_one_call_write_no_second(family):
    calls = (("f", {"key": "first"}), ("g", {"key": "second"}))
    try:
        assert "second" not in sample(family, Message(calls)).text
    except jinja2.TemplateError:
        pass


@pytest.mark.parametrize("family", NO_TEXT)
def test_templates_listed_without_text_write_none_with_a_call(family):
    calls = (("f", {"key": "value"}),)
    sampled = sample(family, Message(calls, TEXT))
    turn = parse(family, sampled, calls)
    assert (turn.text, same(turn, calls)) != (TEXT, True)
    if turn.tool_calls:
        assert same(turn, calls)
        assert TEXT not in sampled.text or turn.reasoning == TEXT


@pytest.mark.parametrize("family", NO_REASONING)
def test_templates_listed_without_reasoning_write_none(family):
    assert REASONING not in sample(family, Message((("f", {"key": "value"}),), "", REASONING)).text


@pytest.mark.parametrize("family", FAMILIES)
def test_only_listed_tokenizers_compose_characters(family):
    tokenizer, text = load_tokenizer(family), "e\u0301"
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    assert decoded == (unicodedata.normalize("NFC", text) if family in COMPOSING else text)


def marks_of(family):
    """Return the marks around reasoning."""
    parser = parser_for(family)
    return FAMILIES[family].reasoning or (parser.think_start_token, parser.think_end_token)


def call_text(family, name):
    """Return a call as the family's template writes it, without reasoning before it."""
    written = sample(family, Message(((name, {"key": "value"}),))).text
    return written.rpartition(marks_of(family)[1])[2].strip()


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_a_draft_in_reasoning_is_not_a_call(family):
    def encoded(family, text, *, reasoning_open):
        return Sampled(text, tuple(load_tokenizer(family).encode(text, add_special_tokens=False)), reasoning_open)

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
def test_a_draft_in_reasoning_of_a_template_is_not_a_call(family):
    draft = f"Maybe {call_text(family, 'draft')}?"
    calls = (("run", {"key": "value"}),)
    turn = parse(family, sample(family, Message(calls, reasoning=draft)), calls)
    assert same(turn, calls)
    assert turn.reasoning == draft


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_template_determines_the_parser(family):
    expected = FAMILIES[family].tool_format
    if expected is None:
        with pytest.raises(UnknownToolParserError, match="name one instead of 'auto'"):
            get_tool_parser("auto", chat_template=load_template(family))
    else:
        found = get_tool_parser("auto", chat_template=load_template(family))
        assert type(found) is type(get_tool_parser(expected))


# The model type of a family, and the end of its prompts.
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
    "after text": Message((CALL,), "So, I look it up."),
    "after reasoning": Message((CALL,), "", "Hm. Is it?\nLet me see."),
    "all": Message((CALL, ("g", {})), "So, I look it up.", "Hm."),
    "a draft in reasoning": Message((CALL,), "", "Maybe <tool_call>rm</tool_call>?"),
}


def readings(family, sampled, calls):
    """Return text, reasoning and calls as parsed here and by transformers; None if transformers raises."""
    # Response templates for tokenizers without one; older versions of transformers have none.
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
def test_transformers_agrees_or_there_is_a_reason(family, label):
    differences = {
        **dict.fromkeys([(QWEN, "code"), (QWEN, "spaces")], "it strips white space from strings"),
        (HERMES, "end mark"): "it ends a call at the first end mark, also in a JSON string",
        (QWEN, "end tag"): "it ends a value at the first end tag",
    }
    message = MESSAGES[label]
    if message.reasoning and FAMILIES[family].reasoning is None:
        pytest.skip("the family does not reason")
    ours, theirs = readings(family, sample(family, message), message.calls)
    assert repr(ours) == repr((message.text, message.reasoning, list(message.calls)))
    differs = (FAMILY_TYPES[family], label) in differences
    assert (repr(ours) != repr(theirs)) is differs, theirs


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        (
            "qwen3",
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            "arguments may be any JSON",
        ),
        (
            "qwen3",
            '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>',
            "unknown keys are accepted",
        ),
        ("qwen3_5", "<tool_call><function=f>text</function></tool_call>", "text among the tags is dropped"),
        ("qwen3_5", "<tool_call><function=f><parameter=a>1</function></tool_call>", "an unclosed value is dropped"),
        ("qwen3_5", "<tool_call><function=f><parameter=n>x</parameter></function></tool_call>", "any type is accepted"),
        ("gemma_4", "<|tool_call>call:f{a:1,a:2}<tool_call|>", "the last of two equal keys wins"),
        ("gemma_4", "<|tool_call>call:f{a:NaN}<tool_call|>", "NaN is accepted as JSON"),
    ],
)
def test_calls_that_transformers_repairs_are_rejected(family, text, reason):
    ids = tuple(load_tokenizer(family).encode(text, add_special_tokens=False))
    ours, theirs = readings(family, Sampled(text, ids, False), [CALL])
    assert ours[2] == []
    assert theirs is not None and theirs[2], reason
