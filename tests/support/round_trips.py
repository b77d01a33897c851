"""Tool calls on their way through a model family's real chat template and tokenizer, and back through the parser.

The template writes an assistant's message; what it writes for the assistant is encoded and parsed as if it had been
sampled. What templates lose of a call is listed, family by family; everything else must come back from them unchanged.
Every loss has an example that proves it, so that the list cannot outlive its reasons.
"""

import copy
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import jinja2

from strands_sglang.tool_parsers import get_tool_parser
from support.families import FAMILIES, load_tokenizer
from support.parser_checks import JSON_TYPE, strings_in

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


@functools.cache
def pieces_of(family):
    """All that a family's template writes around the names and values of calls, in pieces."""
    message = Message((("f0", {"k0": "v0", "k1": "v1"}), ("f1", {"k2": "v2"})), "t0", "r0")
    for attempt in (message, Message(message.calls), Message(message.calls[:1])):
        try:
            written = sample(family, attempt).text
        except jinja2.TemplateError:
            continue
        if "k0" in written:
            break
    parser = parser_for(family)
    tokens = {parser.tool_start_token, parser.tool_end_token, parser.think_start_token, parser.think_end_token} - {""}
    tokens |= {*FAMILIES[family].marks, *(FAMILIES[family].reasoning or ())}
    found = {piece for piece in re.split(r"[fktrv][0-2]", written) if piece.strip()}
    found |= set(re.findall(r"</?[^<>\s]*[^<>]*>", written))
    stops = FAMILIES[family].end_of_turn
    return tuple(sorted(piece for piece in {*found, *tokens} if not any(stop in piece for stop in stops)))


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


NO_CALLS = {
    "deepseek_v3_original": "drops calls",
    "gemma_3": "knows no calls",
    "smollm3": "drops calls",
}
"""Templates that write no call at all."""

ONE_CALL = {
    **dict.fromkeys(("llama_3_1", "llama_3_2", "llama_3_3"), "refuses a second call"),
    "gpt_oss": "writes the first call only",
}
"""Templates that do not write two calls of one turn."""

NO_TEXT = {
    **dict.fromkeys(("granite_3", "hermes_3", "llama_3_1", "llama_3_2", "llama_3_3"), "drops text beside a call"),
    **dict.fromkeys(("mistral_nemo", "mistral_small_3_2"), "drops text beside a call"),
    "gpt_oss": "writes text beside a call as reasoning",
    "phi_4_mini": "drops the calls beside text",
    "llama_4": "writes a list without a mark, which is a call only where nothing stands before it",
}
"""Templates that do not write text and a call side by side."""

NO_REASONING = {
    "qwq": "drops reasoning",
    "deepseek_v3": "drops reasoning",
    "deepseek_v3_1": "drops reasoning",
}
"""Templates of models that reason, which do not write reasoning in front of a call."""

COMPOSING = frozenset(
    {"qwen2_5", "qwen3", "qwen3_2507", "qwen3_vl", "qwen3_coder", "qwen3_5", "qwen3_6", "qwen3_8", "qwq"}
)
"""Families whose tokenizer composes characters (Unicode NFC) when it encodes a text."""


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
"""Every loss of arguments."""


def is_lost(family, calls):
    """Whether a family's template loses the arguments of one of these calls."""
    return any(loss.lost(arguments) for loss in LOSSES if family in loss.families for _, arguments in calls)
