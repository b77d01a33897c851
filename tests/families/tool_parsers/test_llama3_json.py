from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import ToolCallStatus, get_tool_parser
from strands_sglang.tool_parsers.formats.llama3_json import Llama3JSONToolParser
from support.families import load_template, load_tokenizer, require_families
from support.listed_checks import ListedChecks
from support.parser_checks import Call, Format, same, summary, tools_for


def written(name: str, values: dict) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(values, ensure_ascii=False)}}}'


def write(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "; ".join(written(name, values) for name, values in calls)


class TestLlama3JSON(ListedChecks):
    format = Format(
        parser=Llama3JSONToolParser(),
        write=write,
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


PARSER = Llama3JSONToolParser()


@given(TestLlama3JSON.format.arguments, st.sampled_from(["", "\n", " "]))
def test_a_turn_that_is_nothing_but_a_call_needs_no_mark(arguments: dict, space: str) -> None:
    turn = PARSER.parse_turn(space + written("f", arguments) + space, tools=tools_for([("f", arguments)]))
    assert same(summary(turn.tool_calls), [("f", arguments)])
    assert (turn.text, turn.reasoning) == ("", None)


@pytest.mark.parametrize("between", ["; ", ";", "\n", ""])
def test_several_objects_are_several_calls(between: str) -> None:
    assert summary(PARSER.parse(written("f", {"x": 1}) + between + written("g", {}))) == [("f", {"x": 1}), ("g", {})]


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
def test_other_json_and_json_behind_text_is_text(text: str) -> None:
    turn = PARSER.parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


def test_a_call_may_follow_reasoning_and_a_draft_in_it_is_none() -> None:
    draft, call = written("rm", {}), written("ls", {})
    for text, reasoning_open in [(f"<think>{draft}</think>\n\n{call}", False), (f"{draft}</think>{call}", True)]:
        turn = PARSER.parse_turn(text, reasoning_open=reasoning_open)
        assert [found.name for found in turn.tool_calls] == ["ls"]
        assert turn.reasoning == draft
    assert PARSER.parse(f"<think>{draft}") == PARSER.parse(draft, reasoning_open=True) == []


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
def test_what_begins_as_a_call_and_is_none_is_an_error(text: str, status: ToolCallStatus, name: str) -> None:
    turn = PARSER.parse_turn(text)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, name)]
    assert turn.text == ""


def test_built_in_tools_are_called_with_keyword_arguments() -> None:
    text = "<|python_tag|>brave_search.call(query=\"weather in 'Paris'\", count=3)"
    assert summary(PARSER.parse(text)) == [("brave_search", {"query": "weather in 'Paris'", "count": 3})]


def test_the_type_of_a_function_may_be_there() -> None:
    assert summary(PARSER.parse('{"type": "function", "name": "f", "parameters": {}}')) == [("f", {})]


@pytest.mark.parametrize("around", ["<|python_start|>{}<|python_end|>", "<|python_start|>{}", "{}\n", "{}"])
def test_llama_4s_marks_may_stand_around_the_calls(around: str) -> None:
    calls = written("f", {"x": "<|python_end|>"}) + written("g", {})
    turn = PARSER.parse_turn(around.replace("{}", calls))
    assert summary(turn.tool_calls) == [("f", {"x": "<|python_end|>"}), ("g", {})]
    assert turn.text == ""


def test_text_behind_llama_4s_marks_keeps_the_call_from_running() -> None:
    turn = PARSER.parse_turn(f"<|python_start|>{written('f', {})}<|python_end|> Done.")
    assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]


def test_calls_come_back_from_the_template_that_has_llama_4_write_json() -> None:
    require_families()
    tokenizer = copy.copy(load_tokenizer("llama_4"))
    tokenizer.chat_template = load_template("vllm/tool_chat_template_llama4_json")
    calls: list[Call] = [("f", {"x": 'a"b\n', "n": None, "l": [1, {"k": "<|eot|>é"}]}), ("g", {})]
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
