"""Formats with a notation or a structure of their own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang.tool_parsers import (
    Gemma4ToolParser,
    HarmonyToolParser,
    Phi4ToolParser,
    ToolCallStatus,
    ToolParseResult,
)
from support.parser_checks import (
    KEYS,
    Format,
    ListedChecks,
    ParserChecks,
    json_text,
    json_values,
    same,
    sampled,
    summary,
    tokenizer_with,
    tools_for,
    writer,
)

QUOTE = '<|"|>'


def value(of):
    if isinstance(of, str):
        return f"{QUOTE}{of}{QUOTE}"
    if of is None or isinstance(of, bool):
        return {None: "null", True: "true", False: "false"}[of]
    if isinstance(of, dict):
        return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in of.items()) + "}"
    return "[" + ",".join(map(value, of)) + "]" if isinstance(of, list) else str(of)


class TestGemma4(ParserChecks):
    format = Format(
        parser=Gemma4ToolParser(),
        write=writer("<|tool_call>call:%s%s<tool_call|>", arguments=value),
        tokens=("<|tool_call>", "<tool_call|>", QUOTE, "<|channel>", "<channel|>"),
        tags=("call:f{", "thought\n", "{", "}", ":", ","),
        malformed=(
            "",
            "f{}",
            "call:f",
            "call:f{}}",
            "call:f{a}",
            'call:f{a:"x"}',
            "call:f{a:1,}",
            "call:f{,a:1}",
            "call:f{a:1 b:2}",
            "call:f{a:1,a:2}",
            "call:f{a:[1,]}",
            "call:f{a:[1 2]}",
            "call:f{a:nan}",
            "call:f{a:1e999}",
            "call:f{a:x}",
            "call:f{a:" + "[" * 65 + "]" * 65 + "}",
            "call:f{} x",
        ),
        delimits=False,
        closer=f"{QUOTE}}}<tool_call|>",
        think=("<|channel>", "<channel|>"),
        # A mark of strings in a string ends it, unless it is made of other tokens.
        # Keys are bare words.
        values=lambda texts: json_values(texts.filter(lambda text: QUOTE not in text), KEYS),
    )


GEMMA4_PARSER = Gemma4ToolParser()


def test_the_name_of_the_channel_is_no_part_of_the_reasoning():
    turn = GEMMA4_PARSER.parse_turn("<|channel>thought\nHm.\n<channel|>Yes.")
    assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    turn = GEMMA4_PARSER.parse_turn("Hm.\n<channel|>Yes.", reasoning_open=True)
    assert (turn.reasoning, turn.text) == ("Hm.", "Yes.")
    assert GEMMA4_PARSER.parse_turn("<|channel>thought\n<channel|>Yes.").reasoning is None


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("None", None),
        ("1e-07", 1e-07),
        ("-2", -2),
        (f"{QUOTE}None{QUOTE}", "None"),
        ("[1,2.5,true,null]", [1, 2.5, True, None]),
        (f"{{a b:{QUOTE}c, d{QUOTE},e:[]}}", {"a b": "c, d", "e": []}),
    ],
)
def test_values_are_typed_as_they_are_written(written, found):
    assert summary(GEMMA4_PARSER.parse(f"<|tool_call>call:f{{x:{written}}}<tool_call|>")) == [("f", {"x": found})]


def test_a_string_that_does_not_end_is_unterminated_or_malformed():
    (call,) = GEMMA4_PARSER.parse(f"<|tool_call>call:f{{x:{QUOTE}abc")
    assert (call.status, call.attempted_name) == (ToolCallStatus.UNTERMINATED, "f")
    (call,) = GEMMA4_PARSER.parse(f"<|tool_call>call:f{{x:{QUOTE}abc}}<tool_call|>")
    assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")


TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_PARSER = HarmonyToolParser()


harmony_write = writer("<|start|>assistant<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>")


class TestHarmony(ListedChecks):
    format = Format(
        parser=HARMONY_PARSER,
        write=harmony_write,
        tokens=TOKENS,
        tags=("assistant", " to=functions.f", "analysis", "commentary", "final", "json"),
        malformed=(),
        closer='"}<|call|><|start|>assistant<|channel|>',
        think=("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
        strict_json=True,
    )

    def test_a_draft_in_reasoning_is_not_a_call(self):
        draft, call = harmony_write([("rm", {})]), harmony_write([("ls", {})])
        for text, reasoning_open in [
            (f"<|channel|>analysis<|message|>Maybe {draft}?<|end|>{call}", False),
            (f"Maybe {draft}?<|end|>{call}", True),
        ]:
            turn = HARMONY_PARSER.parse_turn(text, reasoning_open=reasoning_open)
            assert [found.name for found in turn.tool_calls] == ["ls"]
            assert (turn.reasoning, turn.text) == (f"Maybe {draft}?", "")

    def test_a_turn_that_is_cut_off_anywhere_ends_in_an_unterminated_call(self):
        text = harmony_write([("f", {"a": 1, "b": "x"})]).removeprefix("<|start|>assistant")
        for end in range(text.index("functions") + 1, len(text) - len("<|call|>") + 1):
            (call,) = HARMONY_PARSER.parse_turn(text[:end], truncated=True).tool_calls
            assert (call.status, call.name) == (ToolCallStatus.UNTERMINATED, ToolParseResult.UNKNOWN_NAME), text[:end]
            assert "cut off" in (call.error or "")

    @pytest.mark.parametrize(
        "text",
        [
            '<|channel|>commentary to=functions.f<|message|>{"a": 1} x<|call|>',
            "<|channel|>commentary to=functions.f<|message|>{a}<|call|>",
            "<|channel|>commentary to=functions.f<|message|>{}<|end|>",
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>}",
            "<|channel|>commentary to=functions.f code<|message|>{}",
            "<|channel|>analysis to=functions.f<|message|>{}",
            " to=functions.f<|channel|>commentary to=functions.f json<|message|>{}",
            " to=functions.f<|message|>{}",
            "<|channel|>commentary to=functions.f json please<|message|>{}",
            '<|channel|>commentary to=functions.f<|message|>{"a": 1, "a": 2}',
        ],
    )
    def test_what_is_not_exactly_a_call_is_malformed_and_runs_nothing(self, text):
        (call,) = HARMONY_PARSER.parse(text)
        assert (call.status, call.attempted_name, call.input) == (ToolCallStatus.MALFORMED, "f", {})
        assert call.raw is not None and call.raw in text

    def test_text_behind_a_call_keeps_it_from_running(self):
        turn = HARMONY_PARSER.parse_turn(f"{harmony_write([('f', {})])} and that is it.")
        assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]
        assert turn.text == ""

    def test_an_end_of_ordinary_tokens_leaves_the_call_unterminated(self):
        head = harmony_write([("f", {})]).removesuffix("<|call|>")
        (call,) = HARMONY_PARSER.parse(**sampled(tokenizer_with(TOKENS), head, "<|ca", "ll|>"))
        assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")


HEADERS = (
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.f<|message|>",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
    "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>",
)


@given(st.sampled_from(HEADERS), TestHarmony.format.arguments)
def test_every_way_to_write_a_header_is_read_and_the_stop_token_may_be_gone(header, arguments):
    turn = HARMONY_PARSER.parse_turn(header + json_text(arguments), tools=tools_for([("f", arguments)]))
    assert same(summary(turn.tool_calls), [("f", arguments)])
    assert (turn.text, turn.reasoning) == ("", None)


def test_each_channel_goes_where_it_belongs():
    turn = HARMONY_PARSER.parse_turn(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Ah.<|end|><|start|>assistant<|channel|>final<|message|>  Yes."
    )
    assert (turn.reasoning, turn.text, turn.tool_calls) == ("Hm.\nAh.", "I look.\n  Yes.", ())


@pytest.mark.parametrize("text", ["Hello.", "", "a\n b ", "to be <|end|> or not"])
def test_a_turn_without_headers_is_text(text):
    assert HARMONY_PARSER.parse_turn(text).text == text.strip()


def test_a_call_to_anything_but_a_function_names_no_tool():
    (call,) = HARMONY_PARSER.parse('<|channel|>commentary to=browser.search<|message|>{"query": "x"}')
    assert (call.status, call.attempted_name) == (ToolCallStatus.UNKNOWN_TOOL, "browser.search")


def test_arguments_that_are_no_object_are_told_apart():
    (call,) = HARMONY_PARSER.parse("<|channel|>commentary to=functions.f<|message|>[1]")
    assert (call.status, call.attempted_name) == (ToolCallStatus.NOT_AN_OBJECT, "f")


def test_a_call_quoted_in_a_final_answer_is_text():
    turn = HARMONY_PARSER.parse_turn(
        "<|channel|>final<|message|>Like " + harmony_write([("rm", {})]).removesuffix("<|call|>")
    )
    assert turn.tool_calls == ()
    assert turn.text.startswith("Like <|start|>")


@pytest.mark.parametrize(
    ("text", "unclosed"),
    [
        ("<|channel|>analysis", True),
        ("<|channel|>analysis<|message|>", True),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>analysis<|message|>Well", True),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", False),
        ("<|channel|>final<|message|>Yes", False),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", False),
    ],
)
def test_a_turn_ends_in_reasoning_where_its_last_message_is_an_unended_analysis(text, unclosed):
    assert HARMONY_PARSER.parse_turn(text, truncated=True).ends_in_reasoning is unclosed


class TestPhi4(ParserChecks):
    format = Format(
        parser=Phi4ToolParser(),
        write=writer('<|tool_call|>{"name": "%s", "arguments": %s}<|/tool_call|>'),
        tokens=("<|tool_call|>", "<|/tool_call|>", "<think>", "</think>"),
        tags=('{"name": ', "functools[", "["),
        malformed=("", "f", '{"name": "f"} x', "{}", "[]", '[{"name": "f"}', '{"type": "function"}', "1"),
        closer='"}}<|/tool_call|>',
        strict_json=True,
    )


CALLS = [("f", {"x": "1"}), ("g", {})]
PLAIN = '[{"name": "f", "arguments": {"x": "1"}}, {"name": "g", "arguments": {}}]'
WRAPPED = (
    '[{"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}, '
    '{"type": "function", "function": {"name": "g"}}]'
)


@pytest.mark.parametrize("body", [PLAIN, WRAPPED])
@pytest.mark.parametrize("around", ["<|tool_call|>{}<|/tool_call|>", "functools{}", "\nfunctools{}\n"])
def test_a_list_holds_several_calls(body, around):
    turn = Phi4ToolParser().parse_turn(around.replace("{}", body))
    assert summary(turn.tool_calls) == CALLS
    assert turn.text == ""


def test_functools_is_a_call_behind_reasoning_and_text_anywhere_else():
    parser = Phi4ToolParser()
    assert summary(parser.parse(f"Hm.</think>functools{PLAIN}", reasoning_open=True)) == CALLS
    turn = parser.parse_turn(f"Write functools{PLAIN}")
    assert (turn.text, turn.tool_calls) == (f"Write functools{PLAIN}", ())


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"functools{PLAIN} Done.", ToolCallStatus.MALFORMED),
        ("functools[]", ToolCallStatus.MALFORMED),
        ("functools[{name: 'f'}]", ToolCallStatus.MALFORMED),
        (f"functools{PLAIN[:-1]}", ToolCallStatus.UNTERMINATED),
        (f"functools{PLAIN[:30]}", ToolCallStatus.UNTERMINATED),
    ],
)
def test_a_list_that_no_mark_ends_is_all_or_nothing(text, status):
    turn = Phi4ToolParser().parse_turn(text)
    assert [call.status for call in turn.tool_calls] == [status]
    assert turn.text == ""


OBJECTS = (
    '{"name": "f", "arguments": {"x": "1"}},\n{"name": "g", "arguments": {}}',
    """{"name": "f", "arguments": {'x': '1'}},{"name": "g", "arguments": {}}""",
)


@pytest.mark.parametrize("text", OBJECTS)
def test_a_turn_that_is_nothing_but_objects_is_calls(text):
    turn = Phi4ToolParser().parse_turn(f"\n{text}\n")
    assert summary(turn.tool_calls) == CALLS
    assert turn.text == ""


def test_the_arguments_of_an_object_may_be_written_as_python():
    values = {"s": 'it\'s "é"\n', "b": True, "n": None, "l": [1, -1.5e10, {"k": []}], "t": "true"}
    (call,) = Phi4ToolParser().parse(f'{{"name": "f", "arguments": {values}}}')
    assert same(call.input, values)


@pytest.mark.parametrize(
    "text", [f"See {OBJECTS[0]}", '{"name": "Ada", "born": 1815}', '{"answer": 4}', "{", "[1]", OBJECTS[0][1:]]
)
def test_other_objects_and_objects_behind_text_are_text(text):
    turn = Phi4ToolParser().parse_turn(text)
    assert (turn.text, turn.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"{OBJECTS[0]} Done.", ToolCallStatus.MALFORMED),
        (f"{OBJECTS[0]}, Done.", ToolCallStatus.MALFORMED),
        ('{"name": "f", "arguments": {x: 1}}', ToolCallStatus.MALFORMED),
        ('{"name": "f", "arguments": {"x": 1}', ToolCallStatus.UNTERMINATED),
        ("""{"name": "f", "arguments": {'x': 1""", ToolCallStatus.UNTERMINATED),
        ('{"name": "f", "arguments": [1]}', ToolCallStatus.NOT_AN_OBJECT),
    ],
)
def test_what_begins_as_an_object_of_a_call_and_is_none_is_an_error(text, status):
    turn = Phi4ToolParser().parse_turn(text, truncated=status is ToolCallStatus.UNTERMINATED)
    assert [(call.status, call.attempted_name) for call in turn.tool_calls] == [(status, "f")]
    assert turn.text == ""
