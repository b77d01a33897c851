"""The interface of a parser, what it returns, and how one is found."""

import copy
import json
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from strands_sglang.tool_parsers import (
    TOOL_PARSER_REGISTRY,
    HermesToolParser,
    Llama3JSONToolParser,
    MistralToolParser,
    QwenXMLToolParser,
    ToolCallStatus,
    ToolParser,
    ToolParseResult,
    UnknownToolParserError,
    get_tool_parser,
    register_tool_parser,
)
from support.agents import CHATML_TEMPLATE, build_chatml_tokenizer


class PublishedStyleParser(ToolParser):
    """A parser as users wrote them when `parse(text)` was the whole interface."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def parse(self, text: str) -> list[ToolParseResult]:  # type: ignore[override]
        self.seen.append(text)
        return [
            ToolParseResult(id=f"call_{index}", name=body, input={})
            for index, body in enumerate(self.tool_pattern.findall(self.think_pattern.sub("", text)))
        ]


def test_a_good_result_needs_an_id_a_name_and_its_input() -> None:
    result = ToolParseResult("call_1", "search", {"q": "é"})
    assert (result.raw, result.error, result.status, result.is_error) == (None, None, ToolCallStatus.OK, False)
    assert json.loads(result.payload) == {"q": "é"}


def test_a_result_with_raw_text_is_an_error_whose_payload_is_that_text() -> None:
    result = ToolParseResult(id="call_1", name="unknown_tool", raw="{oops")
    assert (result.status, result.is_error, result.payload, result.input) == (
        ToolCallStatus.MALFORMED,
        True,
        "{oops",
        {},
    )


def test_a_parse_error_has_a_name_that_no_tool_has_unless_one_is_given() -> None:
    result = ToolParseResult.from_parse_error("call_1", "{oops", error="no", status=ToolCallStatus.UNTERMINATED)
    assert (result.name, result.attempted_name) == (ToolParseResult.UNKNOWN_NAME, None)
    assert (result.error, result.status) == ("no", ToolCallStatus.UNTERMINATED)
    named = ToolParseResult.from_parse_error("call_1", "", "search")
    assert (named.name, named.attempted_name, named.is_error) == ("search", "search", True)


@pytest.mark.parametrize(("raw", "status"), [("{", ToolCallStatus.OK), (None, ToolCallStatus.UNKNOWN_TOOL)])
def test_status_and_raw_text_cannot_contradict_each_other(raw: str | None, status: ToolCallStatus) -> None:
    with pytest.raises(ValueError, match="status"):
        ToolParseResult("call_1", "search", raw=raw, status=status)


def test_results_can_be_pickled() -> None:
    result = ToolParseResult("call_1", "search", {"q": [1]}, native_id="functions.search:0")
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_processes_do_not_make_the_same_ids() -> None:
    def identifier() -> str:
        return HermesToolParser().parse('<tool_call>{"name": "f"}</tool_call>')[0].id

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, identifier().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() != identifier()
    os.close(reading)
    os.close(writing)


def test_the_interface_itself_is_no_parser() -> None:
    with pytest.raises(TypeError):
        ToolParser()  # type: ignore[abstract]


def test_a_parser_with_parse_alone_gets_the_turn_without_its_reasoning() -> None:
    parser = PublishedStyleParser()
    turn = parser.parse_turn(
        "draft <tool_call>a</tool_call></think>\nHi.\n<tool_call>b</tool_call>",
        token_ids=[1, 2],
        tools=[],
        reasoning_open=True,
        truncated=True,
    )
    assert parser.seen == ["\nHi.\n<tool_call>b</tool_call>"]
    assert (turn.reasoning, turn.text) == ("draft <tool_call>a</tool_call>", "Hi.")
    assert [call.name for call in turn.tool_calls] == ["b"]


def test_a_parser_with_parse_alone_gets_a_turn_without_reasoning_untouched() -> None:
    parser = PublishedStyleParser()
    text = " A <tool_call>b</tool_call>\nB <tool_call>c"
    turn = parser.parse_turn(text)
    assert parser.seen == [text]
    assert (turn.reasoning, turn.text) == (None, " A\nB <tool_call>c")


def test_removing_reasoning_never_makes_a_mark_out_of_what_was_around_it() -> None:
    parser = PublishedStyleParser()
    turn = parser.parse_turn("<tool_<think>x</think>call>rm</tool_call>")
    assert turn.tool_calls == ()


def test_a_parser_of_ones_own_gets_the_keywords_that_it_takes() -> None:
    class WithTools(ToolParser):
        def parse(self, text: str, *, tools: Any = None) -> list[ToolParseResult]:  # type: ignore[override]
            return [ToolParseResult(id="1", name=tool["name"]) for tool in tools]

    class WithAll(ToolParser):
        def parse(self, text: str, **keywords: Any) -> list[ToolParseResult]:
            return [ToolParseResult(id="1", name="f", input=keywords)]

    tools = [{"name": "search", "inputSchema": {}}]
    assert WithTools().parse_turn("x", tools=tools).tool_calls[0].name == "search"
    given = {"token_ids": [7], "tokenizer": None, "tools": tools}
    assert WithAll().parse_turn("x", **given).tool_calls[0].input == given
    # The ids of the whole turn are not those of the part that is left.
    assert WithAll().parse_turn("<think>a</think>x", **given).tool_calls[0].input == {"tools": tools}


def test_the_error_text_says_what_was_wrong_and_what_was_written() -> None:
    parser = HermesToolParser()
    (result,) = parser.parse("<tool_call>{'name': 'ls'}</tool_call>")
    shown = parser.render_error(result)
    assert result.error is not None
    assert result.error in shown
    assert "{'name': 'ls'}" in shown


def test_the_error_text_is_short_also_for_a_long_call_and_shows_its_beginning_and_end() -> None:
    result = ToolParseResult.from_parse_error("call_1", "BEGIN" + "x" * 100_000 + "END")
    shown = HermesToolParser().render_error(result)
    assert len(shown) < 2300
    assert "BEGIN" in shown
    assert shown.endswith("END")


def test_the_error_text_can_always_be_encoded() -> None:
    result = ToolParseResult.from_parse_error("call_1", 'half a pair: "\ud83d"')
    HermesToolParser().render_error(result).encode()


@pytest.mark.parametrize("field", ["raw", "error", "native_id", "attempted_name"])
def test_a_result_that_could_not_be_saved_cannot_be_made(field):
    """A15, its kind: what a parser hands over is saved after the episode."""
    with pytest.raises(ValueError, match=f"the {field} of a tool call is a string or None, not b'x'"):
        ToolParseResult("c", "n", {}, **{field: b"x"})


@pytest.mark.parametrize(
    "fields", [{"id": ""}, {"name": ""}, {"id": None}, {"input": ["x"]}, {"input": None}], ids=repr
)
def test_a_result_that_strands_would_drop_cannot_be_made(fields):
    with pytest.raises(ValueError, match="a tool call"):
        ToolParseResult(**{"id": "c", "name": "n", "input": {}, **fields})


LLAMA3 = '<|start_header_id|>assistant<|end_header_id|>{"name": "f", "parameters": {}}'
MISTRAL = "[INST]{{ messages }}[/INST][TOOL_CALLS]"


def test_parsers_are_found_by_name() -> None:
    assert isinstance(get_tool_parser("hermes"), HermesToolParser)
    assert isinstance(get_tool_parser("qwen_xml"), QwenXMLToolParser)
    assert get_tool_parser("hermes", think_end_token="[/think]").think_end_token == "[/think]"


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        get_tool_parser("hermse")
    assert str(caught.value) == (
        "there is no tool parser named 'hermse'; the tool parsers are: " + ", ".join(sorted(TOOL_PARSER_REGISTRY))
    )
    assert "hermes" in str(caught.value)


def test_a_parser_of_ones_own_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL_PARSER_REGISTRY, "mine", HermesToolParser)  # so that it is gone after the test

    class OwnToolParser(ToolParser):
        def parse(self, text: str) -> list[ToolParseResult]:  # type: ignore[override]
            return []

    assert register_tool_parser("mine")(OwnToolParser) is OwnToolParser
    assert isinstance(get_tool_parser("mine"), OwnToolParser)


def test_a_parser_class_in_place_of_a_parser_is_told_apart_from_a_name():
    with pytest.raises(TypeError, match="HermesToolParser is a class|make one, HermesToolParser"):
        get_tool_parser(HermesToolParser)


def tokenizer_with(chat_template: Any) -> Any:
    tokenizer = copy.copy(build_chatml_tokenizer())
    tokenizer.chat_template = chat_template
    return tokenizer


def test_auto_is_the_parser_of_the_family_that_the_chat_template_belongs_to() -> None:
    assert type(get_tool_parser("auto", tokenizer=build_chatml_tokenizer())) is HermesToolParser
    assert type(get_tool_parser("auto", tokenizer=tokenizer_with(LLAMA3))) is Llama3JSONToolParser
    assert get_tool_parser("auto", tokenizer=build_chatml_tokenizer(), think_end_token="[/t]").think_end_token == "[/t]"


def test_auto_looks_at_a_chat_template_that_is_given_in_place_of_the_tokenizers_own() -> None:
    assert type(get_tool_parser("auto", chat_template=LLAMA3)) is Llama3JSONToolParser
    assert type(get_tool_parser("auto", tokenizer=build_chatml_tokenizer(), chat_template=MISTRAL)) is MistralToolParser


@pytest.mark.parametrize(
    ("templates", "parser"),
    [
        ({"default": CHATML_TEMPLATE, "tool_use": LLAMA3}, Llama3JSONToolParser),
        ({"rag": MISTRAL, "default": CHATML_TEMPLATE}, HermesToolParser),
    ],
)
def test_of_several_chat_templates_auto_takes_the_one_for_tools(templates: Any, parser: type[ToolParser]) -> None:
    assert type(get_tool_parser("auto", tokenizer=tokenizer_with(templates))) is parser
    named = get_tool_parser("auto", tokenizer=tokenizer_with(templates), chat_template="default")
    assert type(named) is HermesToolParser


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({}, "was given none: pass tokenizer= or chat_template="),
        ({"tokenizer": tokenizer_with(None)}, "one without a chat template"),
        ({"tokenizer": tokenizer_with({"rag": MISTRAL})}, "one without a chat template"),
        ({"tokenizer": SimpleNamespace()}, "one without a chat template"),
        ({"chat_template": "{{ messages }}"}, "no known model family: name the tool parser in place of 'auto'"),
        ({"chat_template": "<start_of_turn>{{ messages }}<end_of_turn>"}, "known for the model family 'gemma'"),
    ],
)
def test_where_auto_finds_no_parser_the_error_says_what_to_pass(keywords: Any, said: str) -> None:
    with pytest.raises(UnknownToolParserError) as caught:
        get_tool_parser("auto", **keywords)
    assert said in str(caught.value)
    assert "the tool parsers are: " in str(caught.value)


def test_a_tokenizer_does_not_matter_to_a_parser_that_is_named() -> None:
    assert type(get_tool_parser("qwen_xml", tokenizer=build_chatml_tokenizer())) is QwenXMLToolParser
