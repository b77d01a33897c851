from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from strands_sglang.tool_parsers import (
    TOOL_PARSER_REGISTRY,
    HermesToolParser,
    Llama3JSONToolParser,
    MistralToolParser,
    QwenXMLToolParser,
    ToolParser,
    ToolParseResult,
    UnknownToolParserError,
    get_tool_parser,
    register_tool_parser,
)
from support.agents import CHATML_TEMPLATE, build_chatml_tokenizer

LLAMA3 = '<|start_header_id|>assistant<|end_header_id|>{"name": "f", "parameters": {}}'
MISTRAL = "[INST]{{ messages }}[/INST][TOOL_CALLS]"


class OwnToolParser(ToolParser):
    def parse(self, text: str) -> list[ToolParseResult]:  # type: ignore[override]
        return []


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
