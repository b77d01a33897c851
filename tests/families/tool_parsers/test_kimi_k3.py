from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.kimi_k3 import KimiK3ToolParser
from support.parser_checks import JSON_TYPE, Call, Format, ParserChecks, summary


def opened(tag: str, **attributes: Any) -> str:
    escaped = (
        f' {key}="{str(value).replace("&", "&amp;").replace(chr(34), "&quot;")}"' for key, value in attributes.items()
    )
    return f"<|open|>{tag}{''.join(escaped)}<|sep|>"


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def argument(key: str, value: Any) -> str:
    kind = "number" if isinstance(value, int) and not isinstance(value, bool) else JSON_TYPE[type(value)]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return opened("argument", key=key, type=kind) + text + closed("argument")


def call(name: str, body: str, index: int = 1) -> str:
    return opened("call", tool=name, index=index) + body + closed("call")


def written(calls: Sequence[Call]) -> str:
    """Calls as the chat template writes them."""
    bodies = ("".join(argument(*item) for item in arguments.items()) for _, arguments in calls)
    texts = (call(name, body, at) for at, ((name, _), body) in enumerate(zip(calls, bodies, strict=True), 1))
    return opened("tools") + "".join(texts) + closed("tools")


# A tag of the format in a value; the template writes it as the tokens that it is.
LOST_IN_THE_FORMAT = re.compile(r"<\|(?:open|close)\|>(?:argument|call)")


class TestKimiK3(ParserChecks):
    format = Format(
        parser=KimiK3ToolParser(),
        write=written,
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        tags=(opened("tools"), closed("tools"), opened("argument", key="a", type="string"), closed("argument")),
        malformed=(
            "",
            "text",
            "{}",
            opened("call", tool="f", index=1),
            opened("call", tool="f") + closed("call"),
            call("f", "text"),
            call("f", opened("argument", key="a") + "1" + closed("argument")),
            call("f", opened("argument", key="a", type="word") + "1" + closed("argument")),
            call("f", opened("argument", key="a", type="number") + "one" + closed("argument")),
            call("f", opened("argument", key="a", type="object") + "[]" + closed("argument")),
            call("f", opened("argument", key="a", type="string") + "1"),
            call("f", argument("a", 1) * 2),
            call("f", argument("a", 1) + opened("json", type="object") + "{}" + closed("json")),
            call("f", opened("json", type="object") + "{" + closed("json")),
            call("f", opened("json", type="object") + "{}" + closed("json") + argument("a", 1)),
            call("f", "") + "text",
        ),
        closer=closed("argument") + closed("call") + closed("tools"),
        loses_string=lambda text: LOST_IN_THE_FORMAT.search(text) is not None,
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    )


def test_the_tags_around_the_visible_text_are_no_part_of_it() -> None:
    said = "I look it up." + closed("response")
    turn = KimiK3ToolParser().parse_turn(
        f"Hm.{closed('think')}{opened('response')}{said}{written([('ls', {})])}{closed('message')}", reasoning_open=True
    )
    assert (turn.reasoning, turn.text, summary(turn.tool_calls)) == ("Hm.", "I look it up.", [("ls", {})])
    assert KimiK3ToolParser().parse_turn(said + closed("message")).text == "I look it up."


def test_arguments_may_be_one_json_object() -> None:
    body = opened("json", type="object") + '{"a": "<|close|>json<|sep|>", "b": [1]}' + closed("json")
    text = opened("tools") + call("f", body) + call("g", argument("x", True), 2) + closed("tools")
    assert summary(KimiK3ToolParser().parse(text)) == [
        ("f", {"a": "<|close|>json<|sep|>", "b": [1]}),
        ("g", {"x": True}),
    ]


def test_one_json_value_that_is_no_object_is_said_to_be_none() -> None:
    body = opened("json", type="object") + "[]" + closed("json")
    (found,) = KimiK3ToolParser().parse(opened("tools") + call("f", body) + closed("tools"))
    assert (found.status, found.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


@pytest.mark.parametrize("key", ['a"b', "a&b", "&quot;", "&amp;quot;", "ä b"])
def test_names_of_arguments_are_unescaped(key: str) -> None:
    assert summary(KimiK3ToolParser().parse(written([("f", {key: 1})]))) == [("f", {key: 1})]
