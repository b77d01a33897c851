from __future__ import annotations

import json
from collections.abc import Sequence

from strands_sglang.tool_parsers import get_tool_parser
from strands_sglang.tool_parsers.formats.smollm3 import SmolLM3ToolParser
from support.parser_checks import Call, Format, ParserChecks


def write(calls: Sequence[Call]) -> str:
    bodies = (json.dumps({"name": name, "arguments": values}, ensure_ascii=False) for name, values in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


class TestSmolLM3(ParserChecks):
    format = Format(
        parser=SmolLM3ToolParser(),
        write=write,
        tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        tags=("<code>", "</code>", '{"name": '),
        malformed=("", "f", '{"name": "f"} x', "[]", '{"arguments": {}}'),
        closer='"}}</tool_call>',
        strict_json=True,
    )


def test_the_parser_is_found_by_name_and_code_is_text() -> None:
    turn = get_tool_parser("smollm3").parse_turn("<code>print(1)</code>")
    assert (turn.text, turn.tool_calls) == ("<code>print(1)</code>", ())
