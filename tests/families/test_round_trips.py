"""Tool calls come back from real templates and tokenizers as they went in, but for what the template itself loses.

The template writes an assistant's message; what it writes for the assistant is encoded and parsed as if it had been
sampled. What templates lose of a call is listed, family by family; everything else must come back from them unchanged.
Every loss has an example that proves it, so that the list cannot outlive its reasons. transformers' own reader of
answers is a second oracle, for the families that it has a response template for.
"""

import copy
import functools
import json
import os
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import jinja2
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from strands_sglang.tool_parsers import UnknownToolParserError, get_tool_parser
from support.families import FAMILIES, load_template, load_tokenizer
from support.parser_checks import JSON_TYPE, KEYS, PIECES, json_values, strings_in, tools_for

QUESTION = {"role": "user", "content": "What is it?"}

# No template looks at these when it writes a call.
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "It.", "parameters": {"type": "object", "properties": {}}},
    }
]

# Templates that take a call's arguments as JSON text, rather than as an object.
WANTS_TEXT = frozenset({"deepseek_v3"})

# Templates that take reasoning as a block of the content.
WANTS_BLOCKS = frozenset({"ministral_3"})


@dataclass(frozen=True)
class Message:
    """What an assistant says.

    Attributes:
        calls: Name and arguments of every call.
        text: The visible text.
        reasoning: The reasoning.
    """

    calls: tuple
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Sampled:
    """What a template writes for an assistant's message, as if it had been sampled.

    Attributes:
        text: It, without the token that ends the turn.
        token_ids: It, encoded.
        reasoning_open: The prompt ended inside reasoning.
    """

    text: str
    token_ids: tuple[int, ...]
    reasoning_open: bool


@functools.cache
def parser_for(family):
    """The parser that is chosen for a family."""
    return get_tool_parser("auto", tokenizer=load_tokenizer(family))


def sample(family, message):
    """Have a family's template write a message, and cut out what stands there for the assistant.

    Raises:
        jinja2.TemplateError: The template raised.
    """
    row, tokenizer = FAMILIES[family], load_tokenizer(family)
    thinking = {"thinking": True, "enable_thinking": True} if message.reasoning else {}

    def render(messages, **keywords):
        rendered = tokenizer.apply_chat_template(
            copy.deepcopy(messages), tools=TOOLS, tokenize=False, **thinking, **keywords
        )
        return rendered

    prompt = render([QUESTION], add_generation_prompt=True)
    whole = render([QUESTION, _as_chat(family, message)])
    reasoning_open = False
    if row.reasoning is not None and prompt.rfind(row.reasoning[0]) > prompt.rfind(QUESTION["content"]):
        begin = prompt.rindex(row.reasoning[0])
        reasoning_open = whole.startswith(prompt) and row.reasoning[1] not in prompt[begin:]
        if not whole.startswith(prompt):  # the prompt reasons, the history of such a turn does not
            prompt = prompt[:begin]
    assert whole.startswith(prompt), (prompt[-100:], whole[-300:])
    part = whole[len(prompt) :]
    ends = [part.rfind(stop) for stop in row.end_of_turn if stop in part]
    part = part[: max(ends)] if ends else part
    return Sampled(part, tuple(tokenizer.encode(part, add_special_tokens=False)), reasoning_open)


def parse(family, sampled, calls):
    """Parse a turn, with its token ids and the tools that these calls are made of."""
    tokenizer = load_tokenizer(family)
    return parser_for(family).parse_turn(
        tokenizer.decode(sampled.token_ids, skip_special_tokens=False),
        token_ids=sampled.token_ids,
        tokenizer=tokenizer,
        tools=[{"name": name, "inputSchema": {"json": _schema([arguments])}} for name, arguments in calls],
        reasoning_open=sampled.reasoning_open,
    )


def _schema(values):
    """The schema of all values that stand in one place."""
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
    """The message in the form of chat templates."""
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


@dataclass(frozen=True)
class Loss:
    """Arguments that do not come back.

    Attributes:
        families: Whose templates.
        why: What happens to the arguments.
        lost: Tells whether that happens to these arguments of one call.
        example: Arguments to which it happens.
        same_as: The arguments of the calls for which the template writes exactly the same.
        reads_as: Other arguments that the written text means by the rules of its format.

    Without `same_as` and `reads_as`, the call is refused as malformed.
    """

    families: tuple[str, ...]
    why: str
    lost: Callable
    example: dict
    same_as: tuple = ()
    reads_as: dict | None = None


# Templates that write no call at all.
NO_CALLS = {
    "deepseek_v3_original": "drops calls",
    "gemma_3": "knows no calls",
    "smollm3": "drops calls",
}

# Templates that do not write two calls of one turn.
ONE_CALL = {
    **dict.fromkeys(("llama_3_1", "llama_3_2", "llama_3_3"), "refuses a second call"),
    "gpt_oss": "writes the first call only",
}

# Templates that do not write text and a call side by side.
NO_TEXT = {
    **dict.fromkeys(("granite_3", "hermes_3", "llama_3_1", "llama_3_2", "llama_3_3"), "drops text beside a call"),
    **dict.fromkeys(("mistral_nemo", "mistral_small_3_2"), "drops text beside a call"),
    "gpt_oss": "writes text beside a call as reasoning",
    "phi_4_mini": "drops the calls beside text",
    "llama_4": "writes a list without a mark, which is a call only where nothing stands before it",
}

# Templates of models that reason, which do not write reasoning in front of a call.
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
    """Arguments that are a string in which the pattern occurs."""
    compiled = re.compile(pattern)
    return lambda arguments: any(
        isinstance(value, str) and compiled.search(f"{around}{value}{around}") for value in arguments.values()
    )


def _anywhere(pattern):
    """Arguments with a string somewhere in which the pattern occurs."""
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
    """Whether values in one place of a schema are not all strings, all lists, all objects or all something else."""
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
    """The losses of a format that puts strings between tags and escapes nothing: each a pattern and an example of it.

    Args:
        families: The families.
        next_value: The end of a value with what opens the next one, called b.
        next_call: The end of a value and of its call, with what ends the calls or opens the next one; the example opens
            a call of f with a value b.
        opening: What opens a value.
        ending: The end of a call, with what ends the calls or opens the next one.
        around: What stands on both sides of a value.
    """
    return (
        Loss(
            families,
            "the string holds the end of a value with what follows one: it could be two arguments",
            _strings(next_value[0], around),
            {"a": f"x{next_value[1]}y"},
            same_as=({"a": "x", "b": "y"},),
        ),
        Loss(
            families,
            "the string holds the end of a value and of its call: it could be two calls",
            _strings(next_call[0], around),
            {"a": f"x{next_call[1]}y"},
            same_as=({"a": "x"}, {"b": "y"}),
        ),
        Loss(
            families,
            "the string holds what opens a value: that could follow a value that was never closed",
            _strings(opening[0], around),
            {"a": f"x{opening[1]}y"},
        ),
        Loss(
            families,
            "the string holds the end of a call: that could follow a value that was never closed",
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


# Every loss of arguments.
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
        "null is left out",
        lambda arguments: any(value is None for value in _values(arguments)),
        {"a": None},
        same_as=({},),
    ),
    Loss(
        ("minimax_m3",),
        "values of several types in one list, which the schema cannot tell apart",
        lambda arguments: _is_mixed([arguments]),
        {"a": ["1", 2]},
        same_as=({"a": [1, "2"]},),
    ),
    Loss(
        ("minimax_m3",),
        "a string holds the token before a tag, and a tag",
        _anywhere(r"\]<\]minimax\[>\[</?[^<>\n]+>"),
        {"a": ["x]<]minimax[>[</item>]<]minimax[>[<item>y"]},
        same_as=({"a": ["x", "y"]},),
    ),
    Loss(
        ("minimax_m3",),
        "a key that is no tag",
        lambda arguments: any(re.fullmatch(r"[^/<>\n][^<>\n]*", key) is None for key in _keys(arguments)),
        {"a": {"<": 1}},
    ),
    Loss(
        ("gemma_4",),
        "a string holds the mark around strings",
        _anywhere(r'<\|"\|>'),
        {"a": 'x<|"|>,b:<|"|>y'},
        same_as=({"a": "x", "b": "y"},),
    ),
    Loss(
        ("gemma_4",),
        "a key holds what separates keys and values; keys are written bare",
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
    """Whether these are the turn's calls, with arguments of equal types on every level and in any order."""
    found = [(call.name, json.dumps(call.input, sort_keys=True)) for call in turn.tool_calls]
    return found == [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_calls_of_any_arguments_come_back_as_they_went_in(family):
    def pieces():
        """All that the family's template writes around the names and values of calls, in pieces."""
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
        """Whether the family's template loses the arguments of one of these calls."""
        return any(loss.lost(arguments) for loss in LOSSES if family in loss.families for _, arguments in calls)

    # Strings, with all in them that the family's template writes around the values of calls.
    texts = st.lists(st.sampled_from((*pieces(), *PIECES, CODE)) | st.text(max_size=6), max_size=5).map("".join)
    values = texts if family == "llama_4" else texts | json_values(texts, texts)
    arguments = st.dictionaries(KEYS, values, max_size=3)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize="CI" in os.environ)
    @given(st.lists(arguments, min_size=1, max_size=1 if family in ONE_CALL else 2), st.booleans(), st.booleans())
    def come_back(drawn, with_text, with_reasoning):
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

    come_back()


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_arguments_of_every_kind_come_back_with_the_text_and_the_reasoning_beside_them(family):
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


@pytest.mark.parametrize("family", FAMILIES_WITH_CALLS)
def test_a_draft_in_reasoning_is_no_call_whoever_opened_it(family):
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
    differences = {
        **dict.fromkeys([(QWEN, "code"), (QWEN, "spaces")], "it strips the white space of strings"),
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
