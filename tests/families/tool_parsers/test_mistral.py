from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from strands_sglang.tool_parsers import ToolCallStatus
from strands_sglang.tool_parsers.formats.mistral import MistralToolParser
from support.listed_checks import ListedChecks
from support.parser_checks import Call, Format, summary

TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


def write_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values, ensure_ascii=False)}" for name, values in calls)


def write_list(calls: Sequence[Call]) -> str:
    listed = [{"name": name, "arguments": values, "id": f"abcDE{i:04d}"} for i, (name, values) in enumerate(calls)]
    return "[TOOL_CALLS]" + json.dumps(listed, ensure_ascii=False)


class TestMistralNamed(ListedChecks):
    format = Format(
        parser=MistralToolParser(),
        write=write_named,
        tokens=TOKENS,
        tags=('{"name": ', "[", "[INST]", "[TOOL_RESULTS]"),
        malformed=('f{"a": 1}', "f[ARGS]{a: 1}", 'f[ARGS]{"a": 1}}', "[ARGS]{}", "f g[ARGS]{}", "f[CALL_ID]ab[ARGS]{}"),
        closer='"}[TOOL_CALLS]rm[ARGS]{}',
        think=("[THINK]", "[/THINK]"),
        strict_json=True,
    )

    def test_a_broken_call_does_not_take_the_one_before_it_along(self) -> None:
        good, broken = self.format.parser.parse("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{a}[TOOL_CALLS]rm[ARGS]{}")
        assert (good.name, broken.attempted_name, broken.status) == ("f", "g", ToolCallStatus.MALFORMED)


class TestMistralList(ListedChecks):
    format = Format(
        parser=MistralToolParser(),
        write=write_list,
        tokens=TOKENS,
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
def test_native_ids_are_kept_where_the_model_wrote_them(text: str, native_ids: list[str | None]) -> None:
    calls = MistralToolParser().parse(text)
    assert summary(calls) == [("f", {}), ("g", {})]
    assert [call.native_id for call in calls] == native_ids


def test_arguments_that_are_no_object_are_told_apart() -> None:
    (call,) = MistralToolParser().parse("[TOOL_CALLS]f[ARGS][1]")
    assert (call.status, call.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


def test_a_call_quoted_in_a_broken_one_is_not_run() -> None:
    (call,) = MistralToolParser().parse('[TOOL_CALLS]f[ARGS]{"a": "x" [TOOL_CALLS]rm[ARGS]{}"}')
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")
