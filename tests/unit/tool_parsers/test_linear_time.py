"""A megabyte of hostile text costs every parser about a second of CPU time, or less."""

import pytest

from strands_sglang.tool_parsers import HermesToolParser, QwenXMLToolParser, ToolParser, ToolParseResult
from support.cpu_time import cpu_seconds, write_a_million_numbers

MEGABYTE = 1 << 20


def repeated(unit: str, before: str = "", after: str = "") -> str:
    return before + unit * (MEGABYTE // len(unit)) + after


def numbered(unit: str, before: str, after: str) -> str:
    count = MEGABYTE // len(unit.format(1000))
    return before + "".join(unit.format(index) for index in range(count)) + after


MARKS = {
    "start marks": repeated("<tool_call>"),
    "empty calls": repeated("<tool_call></tool_call>"),
    "open reasoning": repeated("<think>"),
    "closed reasoning": repeated("</think>"),
    "empty reasoning": repeated("<think></think>"),
    "words in reasoning": repeated("<think>a</think>b"),
}

_ARGUMENT = '<tool_call>{"name":"a","arguments":{"x":'
_CALL = _ARGUMENT + "1}}</tool_call>"
JSON = {
    "open braces": repeated("<tool_call>{</tool_call>"),
    "open strings": repeated('<tool_call>{"a</tool_call>'),
    "open strings on lines": repeated('<tool_call>{"a\n</tool_call>'),
    "lines": repeated("\n<tool_call>{x</tool_call>"),
    "drafts": repeated(_CALL + "</think>"),
    "drafts with a mark in a string": repeated('<tool_call>{"</think>"', after="</tool_call>"),
    "white space": repeated(" \n", "<tool_call>"),
    "braces": repeated("{", "<tool_call>"),
    "brackets": repeated("[", _ARGUMENT, "}</tool_call>"),
    "deep nesting": repeated('<tool_call>{"a":' + "[" * 2000 + "</tool_call>"),
    "a huge string": repeated("x", _ARGUMENT + '"', '"}}</tool_call>'),
    "a huge string of end marks": repeated("</tool_call>", _ARGUMENT + '"', '"}}</tool_call>'),
    "strings of end marks": repeated('"</tool_call>",', _ARGUMENT + "[", "1]}}</tool_call>"),
    "backslashes": repeated("\\", '<tool_call>{"'),
    "a huge number": repeated("1", _ARGUMENT),
    "numbers": repeated('<tool_call>{"a":' + "1" * 4200 + "}</tool_call>"),
    "one key": repeated('"a":1,', "<tool_call>{", '"a":1}</tool_call>'),
    "valid calls": repeated(_CALL),
}

_FUNCTION = "<tool_call><function=f>"
_END = "</function></tool_call>"
XML = {
    "open functions": repeated("<tool_call>\n<function=f>\n<parameter=a>\n"),
    "open functions and closing marks": repeated(
        "<tool_call>\n<function=f>\n<parameter=a>\n</think>", after="</tool_call>"
    ),
    "functions before unmatched ends": (
        "<tool_call>\n<function=f>\n<parameter=a>\n</tool_call>" * 12_000 + "</parameter></function>" * 20_000
    ),
    "functions in values": numbered(
        "<parameter=a{0}></think><tool_call><function=f><parameter=b{0}>x</parameter>", _FUNCTION, "x</tool_call>"
    ),
    "ends of values": repeated("</parameter> ", f"{_FUNCTION}<parameter=a>"),
    "open tags": repeated("\n<parameter=", f"{_FUNCTION}<parameter=a>"),
    "spaces after a value": repeated(" ", f"{_FUNCTION}<parameter=a></parameter>"),
    "many parameters": numbered("<parameter=a{0}>1</parameter>", _FUNCTION, _END),
    "values nested too deeply": numbered("<parameter=a{0}>" + "[" * 1000 + "</parameter>", _FUNCTION, _END),
    "valid calls": repeated(f"{_FUNCTION}<parameter=a>1</parameter>{_END}"),
}


class OwnToolParser(ToolParser):
    """A custom parser that leaves the splitting to the base class."""

    def parse(self, text: str) -> list[ToolParseResult]:  # type: ignore[override]
        return []


def assert_cheap(parser: ToolParser, text: str, *, reasoning_open: bool = False) -> None:
    def is_cheap() -> bool:
        taken = cpu_seconds(lambda: parser.parse_turn(text, reasoning_open=reasoning_open))
        return taken < 1.0 or taken < 20 * cpu_seconds(write_a_million_numbers)  # a slow machine, not slow code

    # Other programs only slow a run down, so one fast run proves that the work is small.
    assert any(is_cheap() for _ in range(5))


@pytest.mark.parametrize("text", MARKS.values(), ids=MARKS.keys())
@pytest.mark.parametrize("parser", [HermesToolParser(), QwenXMLToolParser(), OwnToolParser()])
def test_a_megabyte_of_marks_is_cheap_in_every_parser(parser: ToolParser, text: str) -> None:
    assert_cheap(parser, text)


@pytest.mark.parametrize("text", JSON.values(), ids=JSON.keys())
def test_a_megabyte_of_hostile_json_is_cheap(text: str) -> None:
    assert_cheap(HermesToolParser(), text)


@pytest.mark.parametrize("text", XML.values(), ids=XML.keys())
def test_a_megabyte_of_hostile_xml_is_cheap(text: str) -> None:
    assert_cheap(QwenXMLToolParser(), text)


@pytest.mark.parametrize("text", [MARKS["closed reasoning"], JSON["drafts"], XML["functions in values"]])
def test_a_megabyte_after_open_reasoning_is_cheap(text: str) -> None:
    assert_cheap(HermesToolParser(), text, reasoning_open=True)
