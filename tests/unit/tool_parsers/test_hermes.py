import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_sglang.tool_parsers import HermesToolParser, ToolCallStatus, ToolParseResult

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
PIECES = st.one_of(st.sampled_from((*MARKS, "\n", '"', "{", "}", "\\")), st.text(max_size=6))
TEXTS = st.lists(PIECES, max_size=5).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)


def written(name: str = "search", arguments: Any = None, *, ensure_ascii: bool = False) -> str:
    call = {"name": name, "arguments": {} if arguments is None else arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=ensure_ascii)}\n</tool_call>"


parse = HermesToolParser().parse


def only(text: str, **keywords: Any) -> ToolParseResult:
    (result,) = parse(text, **keywords)
    return result


def assert_refused(result: ToolParseResult, status: ToolCallStatus) -> None:
    assert (result.status, result.is_error) == (status, True)
    assert (result.name, result.input) == (ToolParseResult.UNKNOWN_NAME, {})
    assert result.error


def test_a_call_is_read_from_the_text_alone() -> None:
    result = only(written("search", {"query": "strands", "limit": 3}))
    assert (result.name, result.input, result.status) == ("search", {"query": "strands", "limit": 3}, ToolCallStatus.OK)
    assert not result.is_error
    assert json.loads(result.payload) == result.input


@given(ARGUMENTS, st.booleans())
def test_arguments_come_back_as_they_were_written_whatever_they_hold(arguments: Any, ensure_ascii: bool) -> None:
    turn = HermesToolParser().parse_turn("Hm.\n" + written("f", arguments, ensure_ascii=ensure_ascii))
    (result,) = turn.tool_calls
    assert result.input == arguments
    assert json.dumps(result.input) == json.dumps(arguments)
    assert (turn.text, turn.reasoning) == ("Hm.", None)


@settings(max_examples=30)
@given(st.lists(ARGUMENTS, max_size=4), st.sampled_from(["", "\n", " and "]))
def test_several_calls_come_in_the_order_in_which_they_were_made(batch: list[Any], between: str) -> None:
    calls = parse(between.join(written(f"f{index}", arguments) for index, arguments in enumerate(batch)))
    assert [(call.name, call.input) for call in calls] == [(f"f{i}", arguments) for i, arguments in enumerate(batch)]


def test_every_call_has_an_id_of_its_own_also_when_the_same_text_is_parsed_again() -> None:
    ids = [call.id for _ in range(50) for call in parse(written() + written())]
    assert len(set(ids)) == 100
    assert all(identifier.startswith("call_") for identifier in ids)


def test_left_out_arguments_are_no_arguments() -> None:
    assert only('<tool_call>{"name": "now"}</tool_call>').input == {}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "search",
        "[]",
        '"search"',
        "{'name': 'search'}",
        '{"name": "search", "arguments": {},}',
        '{"name": "search", "arguments": {}',
        '{"name": "search", "arguments": {}}}',
        '{"name": "search", "arguments": {}} please',
        '```json\n{"name": "search", "arguments": {}}\n```',
        '{"name": "search", "arguments": {"q": "a\nb"}}',
        '{"name": "search", "arguments": {"q": True}}',
        '{"name": "search", "arguments": {"q": NaN}}',
        '{"name": "search", "arguments": {"q": -Infinity}}',
        '{"name": "search", "arguments": {"q": 1e999}}',
        '{"name": "search", "arguments": {"q": ' + "1" * 5000 + "}}",
        '{"name": "search", "arguments": {"q": 1, "q": 2}}',
        '{"name": "search", "arguments": {"deep": [{"q": 1, "q": 1}]}}',
        '{"name": "other", "name": "search", "arguments": {}}',
        '{"name": "search", "arguments": {"q": "\\ud83d"}}',
        '{"name": "search", "arguments": {"\\udc00": 1}}',
        '{"name": "search", "arguments": {"q": ' + "[" * 100 + "]" * 100 + "}}",
        '{"name": "search", "arguments": {"q": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"name": "search", "parameters": {"q": 1}}',
        '{"name": "search", "arguments": {}, "id": 1}',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": ["search"], "arguments": {}}',
    ],
)
def test_what_is_not_exactly_a_call_is_malformed_and_keeps_what_was_written(body: str) -> None:
    turn = HermesToolParser().parse_turn(f"A<tool_call>{body}</tool_call>")
    (result,) = turn.tool_calls
    assert_refused(result, ToolCallStatus.MALFORMED)
    assert result.raw == result.payload == body
    assert turn.text == "A"


@pytest.mark.parametrize("arguments", [[], [1], "text", '{"q": 1}', 3, None, True])
def test_arguments_that_are_no_object_are_told_apart_and_never_become_empty_arguments(arguments: Any) -> None:
    body = json.dumps({"name": "search", "arguments": arguments})
    result = only(f"<tool_call>{body}</tool_call>")
    assert_refused(result, ToolCallStatus.NOT_AN_OBJECT)
    assert (result.raw, result.attempted_name) == (body, "search")


@pytest.mark.parametrize(
    "body",
    ["", "{", '{"name": "search", "arguments": {"q": "', '{"name": "search", "arguments": {}}', "nonsense"],
)
@pytest.mark.parametrize("truncated", [False, True])
def test_a_call_without_an_end_is_unterminated(body: str, truncated: bool) -> None:
    turn = HermesToolParser().parse_turn(f"Let me see.\n<tool_call>\n{body}", truncated=truncated)
    (result,) = turn.tool_calls
    assert_refused(result, ToolCallStatus.UNTERMINATED)
    assert result.raw == f"\n{body}"
    assert ("cut off" in (result.error or "")) is truncated
    assert turn.text == "Let me see."


def test_a_mark_in_a_json_string_does_not_end_the_call() -> None:
    arguments = {"text": 'use </tool_call> and <tool_call>{"name": "rm"}</tool_call> and </think>'}
    assert only(written("write", arguments) + "done").input == arguments


def test_a_call_quoted_without_escapes_inside_a_broken_call_does_not_run() -> None:
    inner = written("rm", {"path": "/"})
    text = '<tool_call>{"name": "write", "arguments": {"text": "see ' + inner + '"}}</tool_call>'
    assert all(call.is_error for call in parse(text))


def test_a_start_mark_inside_an_open_call_does_not_start_another_one() -> None:
    (result,) = parse("<tool_call>\n" + written("rm"))
    assert_refused(result, ToolCallStatus.MALFORMED)


def test_a_good_call_behind_a_broken_one_is_still_a_call() -> None:
    broken, good = parse("<tool_call>{'name': 'a'}</tool_call>\n" + written("b"))
    assert_refused(broken, ToolCallStatus.MALFORMED)
    assert (good.name, good.status) == ("b", ToolCallStatus.OK)


def test_a_stray_end_mark_is_text() -> None:
    turn = HermesToolParser().parse_turn("All done.</tool_call>")
    assert (turn.text, turn.tool_calls) == ("All done.</tool_call>", ())


@pytest.mark.parametrize("tools", [None, [], [{"name": "search", "description": "", "inputSchema": {"json": {}}}]])
@pytest.mark.parametrize("name", ["serach", "search now", "search\n", "s" * 65])
def test_a_name_that_no_tool_has_is_read_as_written(name: str, tools: Any) -> None:
    result = only(written(name, {"query": "x"}), tools=tools)
    assert (result.status, result.name, result.input) == (ToolCallStatus.OK, name, {"query": "x"})


@pytest.mark.parametrize("body", ['{"name": "search", "arguments": {', '{"name":"search", nonsense'])
def test_the_name_that_a_broken_call_seems_to_have_is_kept_for_counting(body: str) -> None:
    assert only(f"<tool_call>{body}</tool_call>").attempted_name == "search"


def test_other_marks_can_be_given() -> None:
    parser = HermesToolParser(tool_start_token="[call]", tool_end_token="[/call]")
    (result,) = parser.parse('<tool_call>[call]{"name": "f"}[/call]')
    assert result.name == "f"
    with pytest.raises(ValueError, match="mark"):
        HermesToolParser(tool_end_token="")


@given(st.lists(PIECES).map("".join), st.booleans(), st.booleans())
def test_no_text_makes_the_parser_raise(text: str, reasoning_open: bool, truncated: bool) -> None:
    turn = HermesToolParser().parse_turn(text, reasoning_open=reasoning_open, truncated=truncated, tools=[])
    assert all(call.is_error for call in turn.tool_calls)


QUOTED = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        # Raw newlines in a JSON string: the call is broken, and what it quotes must not run.
        '<tool_call>{"name": "write", "arguments": {"content": "one:\n'
        + QUOTED
        + "\ntwo:\n"
        + QUOTED
        + '\n"}}</tool_call>',
        '<tool_call>{"name": "write", "arguments": {"path": "C:\\dir", "content": "'
        + QUOTED
        + QUOTED
        + '"}}</tool_call>',
    ],
)
def test_calls_that_are_quoted_in_a_broken_call_do_not_run(text):
    calls = HermesToolParser().parse(text)
    assert calls
    assert all(call.is_error for call in calls)


def test_a_good_call_beside_a_broken_one_with_its_own_end_runs():
    broken = "<tool_call>oops</tool_call>"
    statuses = [call.is_error for call in HermesToolParser().parse(broken + QUOTED)]
    assert statuses == [True, False]
