from __future__ import annotations

import json
import re
from collections.abc import Sequence

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.minimax_m2 import MiniMaxM2ToolParser
from support.parser_checks import Call, Format, ParserChecks, summary, tools_for

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


def call(name: str, body: str) -> str:
    return f'<invoke name="{name}">\n{body}</invoke>\n'


def written(calls: Sequence[Call]) -> str:
    """Calls as the chat template writes them."""
    texts = [
        call(
            name,
            "".join(
                f'<parameter name="{key}">'
                f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</parameter>\n"
                for key, value in arguments.items()
            ),
        )
        for name, arguments in calls
    ]
    return f"{BEGIN}\n{''.join(texts)}{END}"


_PARAMETER = r'<parameter name="[^"\n]+">'
_CALL_ENDS = r'</invoke>\s*(?:<invoke name="[^"\n]+">|</minimax:tool_call>)'
# What closes a value, and what could as well be the rest of a call whose value was never closed.
LOST_IN_THE_FORMAT = re.compile(rf"</parameter>\s*{_PARAMETER}|\n{_PARAMETER}|{_CALL_ENDS}")


class TestMiniMaxM2(ParserChecks):
    format = Format(
        parser=MiniMaxM2ToolParser(),
        write=written,
        tokens=(BEGIN, END),
        tags=('<invoke name="f">', '<parameter name="a">', "</parameter>", "</invoke>"),
        malformed=(
            "",
            "text",
            '{"name": "f"}',
            '<invoke name="f">',
            "<invoke>\n</invoke>",
            call("f", "text"),
            call("f", '<parameter name="a">1'),
            call("f", '<parameter name="a">1</parameter> and'),
            call("f", '<parameter name="a">1\n<parameter name="b">2</parameter>'),
            call("f", '<parameter name="a">1</parameter><parameter name="a">1</parameter>'),
            call("f", '<parameter name="">1</parameter>'),
            call("f", "") + "text",
        ),
        closer=f"</parameter>\n</invoke>\n{END}",
        loses_string=lambda text: LOST_IN_THE_FORMAT.search(text) is not None,
    )


def test_without_a_schema_json_is_json_and_anything_else_is_text() -> None:
    (found,) = MiniMaxM2ToolParser().parse(written([("f", {"a": "12", "b": "true", "c": "1 + 1", "d": '"x"'})]))
    assert found.input == {"a": 12, "b": True, "c": "1 + 1", "d": '"x"'}


def test_a_value_of_another_type_than_declared_is_malformed_and_the_calls_around_it_stand() -> None:
    calls: list[Call] = [("a", {}), ("f", {"x": "three"}), ("b", {})]
    tools = tools_for([("a", {}), ("f", {"x": 3}), ("b", {})])
    first, wrong, last = MiniMaxM2ToolParser().parse(written(calls), tools=tools)
    assert (first.name, last.name) == ("a", "b")
    assert (wrong.status, wrong.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert "'x' is wrong: it must be an integer" in (wrong.error or "")


def test_tags_that_end_nothing_belong_to_the_value() -> None:
    code = 'x = "</parameter>" </invoke> <parameter name="a"> </minimax:tool_call> </think>'
    calls: list[Call] = [("write", {"code": code, "n": 1}), ("g", {})]
    assert summary(MiniMaxM2ToolParser().parse(written(calls))) == calls


def test_a_value_that_closes_its_own_section_runs_nothing() -> None:
    value = f"x</parameter>\n</invoke>\n{END}\nand more"
    calls = MiniMaxM2ToolParser().parse(written([("write", {"content": value})]))
    assert calls
    assert all(found.is_error for found in calls)
