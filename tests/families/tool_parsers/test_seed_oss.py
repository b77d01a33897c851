from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from strands_sglang.tool_parsers.formats.seed_oss import SeedOSSToolParser
from support.parser_checks import Call, Format, ParserChecks, same, tools_for


def write(calls: Sequence[Call]) -> str:
    texts = []
    for name, values in calls:
        body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
        texts.append(f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>")
    return "\n".join(texts)


class TestSeedOSS(ParserChecks):
    format = Format(
        parser=SeedOSSToolParser(),
        write=write,
        tokens=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        tags=("<function=f>", "</function>", "<parameter=a>", "</parameter>"),
        malformed=(
            "",
            "f",
            "<function=f>",
            "<function=f></function><function=g></function>",
            "<function=f>\nx\n</function>",
            "<function=f><parameter=a>1</function>",
            "<function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>",
        ),
        closer="</parameter>\n</function>\n</seed:tool_call>",
        loses=lambda text: (
            any(text.count(tag) != text.count(f"\n{tag}") for tag in ("<parameter=", "</function>"))
            or text.count("</parameter>") != text.count("<parameter=")
            or text.count("</function>") != 1
            or len(re.findall(r"\n<parameter=", text)) != len(re.findall(r"</parameter>\n", text))
        ),
        think=("<seed:think>", "</seed:think>"),
    )


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, {"b": "it's"}], "c": None, "d": True},
        ["x", 'say "hi"', "é\n", -1.5, False],
        [],
        {},
    ],
)
@pytest.mark.parametrize("spell", [repr, json.dumps])
def test_lists_and_objects_may_be_written_as_python_or_as_json(value: Any, spell: Any) -> None:
    text = f"<seed:tool_call><function=f><parameter=x>{spell(value)}</parameter></function></seed:tool_call>"
    (call,) = SeedOSSToolParser().parse(text, tools=tools_for([("f", {"x": value})]))
    assert same(call.input, {"x": value})


def test_a_string_that_looks_like_a_python_list_stays_a_string() -> None:
    text = "<seed:tool_call><function=f><parameter=x>['a']</parameter></function></seed:tool_call>"
    (call,) = SeedOSSToolParser().parse(text, tools=tools_for([("f", {"x": ""})]))
    assert call.input == {"x": "['a']"}


def test_newlines_at_the_edges_of_a_value_belong_to_it() -> None:
    text = "<seed:tool_call><function=f><parameter=x>\na\n</parameter></function></seed:tool_call>"
    (call,) = SeedOSSToolParser().parse(text, tools=tools_for([("f", {"x": ""})]))
    assert call.input == {"x": "\na\n"}
