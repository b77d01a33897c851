"""Formats whose calls end with the turn."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import (
    GraniteToolParser,
    Llama3JSONToolParser,
    Llama4PythonicToolParser,
    MistralToolParser,
    ToolCallStatus,
    get_tool_parser,
)
from support.families import load_template, load_tokenizer
from support.parser_checks import (
    Format,
    ListedChecks,
    ParserChecks,
    json_text,
    same,
    summary,
    tools_for,
    write_json_objects,
    writer,
)

GRANITE_TOKENS = ("<tool_call>", "</tool_call>", "<|tool_call|>", "<think>", "</think>")


class TestGranite4(ParserChecks):
    format = Format(
        parser=GraniteToolParser(),
        write=write_json_objects,
        tokens=GRANITE_TOKENS,
        tags=('{"name": ',),
        malformed=("", "f", '{"name": "f"} x', "{}", '{"arguments": {}}', '{"name": "f", "arguments": {}, "id": 1}'),
        closer='"}}</tool_call>',
        strict_json=True,
    )


def granite_3():
    """With the mark of Granite 3 as the one that the suite puts before calls."""
    parser = GraniteToolParser()
    parser.tool_start_token, parser.tool_end_token = "<|tool_call|>", ""
    return parser


class TestGranite3(ListedChecks):
    format = Format(
        parser=granite_3(),
        write=writer('{"name": "%s", "arguments": %s}', ", ", "<|tool_call|>[", "]", json.dumps),
        tokens=GRANITE_TOKENS,
        tags=('{"name": ', "["),
        malformed=("[]", '[{"name": "f"}] x', "[{}]", '[{"name": "f"}, 1]'),
        closer='"}}]',
        strict_json=True,
    )


@pytest.mark.parametrize("text", ["<|tool_call|>", "<|tool_call|> ", "<tool_call>"])
@pytest.mark.parametrize("end", ["", "\n", "</tool_call>"])
def test_both_marks_open_a_list(text, end):
    turn = GraniteToolParser().parse_turn(f'Hm. {text}[{{"name": "f", "arguments": {{"x": 1}}}}, {{"name": "g"}}]{end}')
    assert summary(turn.tool_calls) == [("f", {"x": 1}), ("g", {})]
    assert turn.text == "Hm."


def test_each_call_of_a_list_is_judged_by_itself():
    calls = GraniteToolParser().parse('<|tool_call|>[{"name": "f"}, {"name": "g", "arguments": [1]}, {"name": "h"}]')
    assert [call.status.value for call in calls] == ["ok", "not_an_object", "ok"]
    assert calls[1].raw == '{"name": "g", "arguments": [1]}'


def test_more_calls_than_a_thousand_are_an_error():
    (call,) = GraniteToolParser().parse("<|tool_call|>[" + '{"name": "f"}, ' * 1000 + '{"name": "f"}]')
    assert call.status is ToolCallStatus.MALFORMED
    assert "more than 1000 calls" in (call.error or "")


LLAMA3_CALL = '{"name": "%s", "parameters": %s}'


def written(name, values):
    return LLAMA3_CALL % (name, json_text(values))


class TestLlama3JSON(ListedChecks):
    format = Format(
        parser=Llama3JSONToolParser(),
        write=writer(LLAMA3_CALL, "; ", begin="<|python_tag|>"),
        tokens=("<|python_tag|>", "<think>", "</think>"),
        tags=('{"name": ', ";", "f.call(", '"parameters": '),
        malformed=(
            "print(1)",
            '{"name": "f", "parameters": {}} x',
            '{"name": "f", "arguments": {}}',
            '{"parameters": {}}',
            "[]",
            "f.call(1)",
            'f.call(q="a"b")',
            'f.call(q="a") x',
        ),
        closer='"}}<|python_tag|>',
        strict_json=True,
    )


LLAMA3_JSON_PARSER = Llama3JSONToolParser()


@given(TestLlama3JSON.format.arguments, st.sampled_from(["", "\n", " "]))
def test_a_turn_that_is_nothing_but_a_call_needs_no_mark(arguments, space):
    turn = LLAMA3_JSON_PARSER.parse_turn(space + written("f", arguments) + space, tools=tools_for([("f", arguments)]))
    assert same(summary(turn.tool_calls), [("f", arguments)])
    assert (turn.text, turn.reasoning) == ("", None)


@pytest.mark.parametrize("between", ["; ", ";", "\n", ""])
def test_several_objects_are_several_calls(between):
    assert summary(LLAMA3_JSON_PARSER.parse(written("f", {"x": 1}) + between + written("g", {}))) == [
        ("f", {"x": 1}),
        ("g", {}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 4}',
        '{"name": "Ada", "born": 1815}',
        "{",
        '{"parameters": {}}',
        'Like {"name": "f", "parameters": {}}',
        '[{"name": "f", "parameters": {}}]',
        "",
    ],
)
def test_other_json_and_json_behind_text_is_text(text):
    turn = LLAMA3_JSON_PARSER.parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


def test_a_call_may_follow_reasoning_and_a_draft_in_it_is_none():
    draft, call = written("rm", {}), written("ls", {})
    for text, reasoning_open in [(f"<think>{draft}</think>\n\n{call}", False), (f"{draft}</think>{call}", True)]:
        turn = LLAMA3_JSON_PARSER.parse_turn(text, reasoning_open=reasoning_open)
        assert [found.name for found in turn.tool_calls] == ["ls"]
        assert turn.reasoning == draft
    assert LLAMA3_JSON_PARSER.parse(f"<think>{draft}") == LLAMA3_JSON_PARSER.parse(draft, reasoning_open=True) == []


@pytest.mark.parametrize(
    ("text", "status", "name"),
    [
        ('{"name": "f", "parameters": {"x": 1}', ToolCallStatus.UNTERMINATED, "f"),
        ('{"name": "f", "para', ToolCallStatus.UNTERMINATED, "f"),
        ('{"name": "f", "parameters": {x: 1}}', ToolCallStatus.MALFORMED, "f"),
        ('{"name": "f", "parameters": {}} Done.', ToolCallStatus.MALFORMED, "f"),
        ('{"name": "f", "parameters": "x"}', ToolCallStatus.NOT_AN_OBJECT, "f"),
        ('{"name": "f", "arguments": {}}', ToolCallStatus.MALFORMED, "f"),
    ],
)
def test_what_begins_as_a_call_and_is_none_is_an_error(text, status, name):
    turn = LLAMA3_JSON_PARSER.parse_turn(text)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, name)]
    assert turn.text == ""


def test_built_in_tools_are_called_with_keyword_arguments():
    text = "<|python_tag|>brave_search.call(query=\"weather in 'Paris'\", count=3)"
    assert summary(LLAMA3_JSON_PARSER.parse(text)) == [("brave_search", {"query": "weather in 'Paris'", "count": 3})]


def test_the_type_of_a_function_may_be_there():
    assert summary(LLAMA3_JSON_PARSER.parse('{"type": "function", "name": "f", "parameters": {}}')) == [("f", {})]


@pytest.mark.parametrize("around", ["<|python_start|>{}<|python_end|>", "<|python_start|>{}", "{}\n", "{}"])
def test_llama_4s_marks_may_stand_around_the_calls(around):
    calls = written("f", {"x": "<|python_end|>"}) + written("g", {})
    turn = LLAMA3_JSON_PARSER.parse_turn(around.replace("{}", calls))
    assert summary(turn.tool_calls) == [("f", {"x": "<|python_end|>"}), ("g", {})]
    assert turn.text == ""


def test_text_behind_llama_4s_marks_keeps_the_call_from_running():
    turn = LLAMA3_JSON_PARSER.parse_turn(f"<|python_start|>{written('f', {})}<|python_end|> Done.")
    assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]


def test_calls_come_back_from_the_template_that_has_llama_4_write_json():
    tokenizer = copy.copy(load_tokenizer("llama_4"))
    tokenizer.chat_template = load_template("vllm/tool_chat_template_llama4_json")
    calls = [("f", {"x": 'a"b\n', "n": None, "l": [1, {"k": "<|eot|>é"}]}), ("g", {})]
    uses = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": uses}]
    prompt, whole = (
        tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=count == 1)
        for count in (1, 2)
    )
    ids = tokenizer.encode(whole.removeprefix(prompt).removesuffix("<|eot|>"), add_special_tokens=False)
    parser = get_tool_parser("auto", tokenizer=tokenizer)
    turn = parser.parse_turn(tokenizer.decode(ids), token_ids=ids, tokenizer=tokenizer, tools=tools_for(calls))
    assert same(summary(turn.tool_calls), calls)


def keywords(values):
    spell = json.dumps if values.get("a") == "x@@" else repr
    return ", ".join(f"{key}={spell(value)}" for key, value in values.items())


bare = writer("%s(%s)", ", ", "[", "]", keywords)


class TestLlama4Pythonic(ListedChecks):
    format = Format(
        parser=Llama4PythonicToolParser(),
        write=lambda calls: f"<|python_start|>{bare(calls)}<|python_end|>",
        tokens=("<|python_start|>", "<|python_end|>", "<think>", "</think>"),
        tags=("[f(", ")]", "'", '"""', "=", ", "),
        malformed=(
            "f(a=1)",
            "[]",
            "[f]",
            "[f(1)]",
            "[f(a=1, a=2)]",
            "[f(**{})]",
            "[f(a=g())]",
            "[f(a=1 + 1)]",
            "[f(a=b)]",
            "[f(a={1: 2})]",
            "[f(a={'b': 1, 'b': 2})]",
            "[f(a=1e999)]",
            "[f(a='\\ud83d')]",
            "[f(a=(1, 2))]",
            "[f(a=01)]",
            "[f(a=" + "[" * 65 + "]" * 65 + ")]",
        ),
        closer="')]<|python_end|>",
        strict_json=True,
    )


LLAMA4_PYTHONIC_PARSER = Llama4PythonicToolParser()


@given(TestLlama4Pythonic.format.arguments)
def test_a_turn_that_is_nothing_but_a_list_of_calls_needs_no_mark(arguments):
    calls = [("f", arguments), ("g", {})]
    turn = LLAMA4_PYTHONIC_PARSER.parse_turn(f"\n{bare(calls)}\n")
    assert same(summary(turn.tool_calls), calls)
    assert turn.text == ""


@given(st.text(), st.sampled_from(["'", '"', "'''", '"""']))
def test_every_kind_of_string_reads_as_python_reads_it(text, quote):
    escaped = text.encode("unicode_escape").decode().replace("'", "\\'").replace('"', '\\"')
    assert summary(LLAMA4_PYTHONIC_PARSER.parse(f"[f(a={quote}{escaped}{quote})]")) == [("f", {"a": text})]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1", 1),
        ("-1.5", -1.5),
        ("1e3", 1000.0),
        ("True", True),
        ("null", None),
        ("'\\q\\x41\\101\\u00e9'", "\\qAAé"),
        ("'''two\nlines'''", "two\nlines"),
        ("[1, 'a', [], {},]", [1, "a", [], {}]),
        ("{'a': 'b',}", {"a": "b"}),
        ("[1, 2, 'x', \"y\", 3.0, None]", [1, 2, "x", "y", 3.0, None]),
    ],
)
def test_literals_are_pythons_and_json_s(literal, value):
    (call,) = LLAMA4_PYTHONIC_PARSER.parse(f"[f(a={literal})]")
    assert same(call.input, {"a": value})


@pytest.mark.parametrize("text", ["[1, 2]", "[x]", "f(a=1)", "See [f(a=1)]", "[link](f)", ""])
def test_other_lists_and_lists_behind_text_are_text(text):
    turn = LLAMA4_PYTHONIC_PARSER.parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[f(a=1)", ToolCallStatus.UNTERMINATED),
        ("[f(a='x", ToolCallStatus.UNTERMINATED),
        ("[f(a='x\n')]", ToolCallStatus.MALFORMED),
        ("[f(a=1)] Done.", ToolCallStatus.MALFORMED),
        ('[f(a=say "hi")]', ToolCallStatus.MALFORMED),
    ],
)
def test_what_begins_as_a_list_of_calls_and_is_none_is_an_error(text, status):
    turn = LLAMA4_PYTHONIC_PARSER.parse_turn(text)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, "f")]
    assert turn.text == ""


MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


def mistral_write_list(calls):
    listed = [{"name": name, "arguments": values, "id": f"abcDE{i:04d}"} for i, (name, values) in enumerate(calls)]
    return "[TOOL_CALLS]" + json_text(listed)


class TestMistralNamed(ListedChecks):
    format = Format(
        parser=MistralToolParser(),
        write=writer("[TOOL_CALLS]%s[ARGS]%s"),
        tokens=MISTRAL_TOKENS,
        tags=('{"name": ', "[", "[INST]", "[TOOL_RESULTS]"),
        malformed=('f{"a": 1}', "f[ARGS]{a: 1}", 'f[ARGS]{"a": 1}}', "[ARGS]{}", "f g[ARGS]{}", "f[CALL_ID]ab[ARGS]{}"),
        closer='"}[TOOL_CALLS]rm[ARGS]{}',
        think=("[THINK]", "[/THINK]"),
        strict_json=True,
    )

    def test_a_broken_call_does_not_take_the_one_before_it_along(self):
        good, broken = self.format.parser.parse("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{a}[TOOL_CALLS]rm[ARGS]{}")
        assert (good.name, broken.attempted_name, broken.status) == ("f", "g", ToolCallStatus.MALFORMED)


class TestMistralList(ListedChecks):
    format = Format(
        parser=MistralToolParser(),
        write=mistral_write_list,
        tokens=MISTRAL_TOKENS,
        tags=('{"name": ', "[", "[INST]", "[TOOL_RESULTS]"),
        malformed=("[]", '[{"name": "f"}] x', "[{}]", '[{"name": "f", "id": "short"}]', '[{"name": "f", "x": 1}]'),
        closer='"}}]',
        think=("[THINK]", "[/THINK]"),
        strict_json=True,
    )


@pytest.mark.parametrize(
    ("text", "native_ids"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcDEF123"}, {"name": "g"}]', ["abcDEF123", None]),
        ('[TOOL_CALLS] [{"name": "f"}, {"name": "g", "id": "000000000"}]', [None, "000000000"]),
        ("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]g[ARGS]{}", ["abcDEF123", None]),
        ("[TOOL_CALLS]f[ARGS]{}\n[TOOL_CALLS]g[CALL_ID]000000000[ARGS] {}", [None, "000000000"]),
    ],
)
def test_native_ids_are_kept_where_the_model_wrote_them(text, native_ids):
    calls = MistralToolParser().parse(text)
    assert summary(calls) == [("f", {}), ("g", {})]
    assert [call.native_id for call in calls] == native_ids


def test_arguments_that_are_no_object_are_told_apart():
    (call,) = MistralToolParser().parse("[TOOL_CALLS]f[ARGS][1]")
    assert (call.status, call.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


def test_a_call_quoted_in_a_broken_one_is_not_run():
    (call,) = MistralToolParser().parse('[TOOL_CALLS]f[ARGS]{"a": "x" [TOOL_CALLS]rm[ARGS]{}"}')
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")
