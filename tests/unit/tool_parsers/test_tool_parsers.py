"""Tool parsers: the interface, reasoning, calls, the Hermes format, and values between tags."""

import copy
import json
import os
import pickle
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

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
from support.parser_checks import Format, ParserChecks, pairs, write_json_objects, writer

# === interface, results and registry ===


class PublishedStyleParser(ToolParser):
    """A parser from the time when `parse(text)` was the whole interface."""

    def __init__(self):
        self.seen = []

    def parse(self, text):  # type: ignore[override]
        self.seen.append(text)
        return [
            ToolParseResult(id=f"call_{index}", name=body, input={})
            for index, body in enumerate(self.tool_pattern.findall(self.think_pattern.sub("", text)))
        ]


def test_a_valid_result_needs_an_id_a_name_and_its_input():
    result = ToolParseResult("call_1", "search", {"q": "é"})
    assert (result.raw, result.error, result.status, result.is_error) == (None, None, ToolCallStatus.OK, False)
    assert json.loads(result.payload) == {"q": "é"}


def test_a_result_with_raw_text_is_an_error():
    result = ToolParseResult(id="call_1", name="unknown_tool", raw="{oops")
    assert (result.status, result.is_error, result.payload, result.input) == (
        ToolCallStatus.MALFORMED,
        True,
        "{oops",
        {},
    )


def test_a_parse_error_names_no_tool_by_default():
    result = ToolParseResult.from_parse_error("call_1", "{oops", error="no", status=ToolCallStatus.UNTERMINATED)
    assert (result.name, result.attempted_name) == (ToolParseResult.UNKNOWN_NAME, None)
    assert (result.error, result.status) == ("no", ToolCallStatus.UNTERMINATED)
    named = ToolParseResult.from_parse_error("call_1", "", "search")
    assert (named.name, named.attempted_name, named.is_error) == ("search", "search", True)


@pytest.mark.parametrize(("raw", "status"), [("{", ToolCallStatus.OK), (None, ToolCallStatus.UNKNOWN_TOOL)])
def test_status_and_raw_text_cannot_contradict_each_other(raw, status):
    with pytest.raises(ValueError, match="status"):
        ToolParseResult("call_1", "search", raw=raw, status=status)


def test_results_can_be_pickled():
    result = ToolParseResult("call_1", "search", {"q": [1]}, native_id="functions.search:0")
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_processes_make_different_ids():
    def identifier():
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


def test_the_base_class_cannot_be_instantiated():
    with pytest.raises(TypeError):
        ToolParser()  # type: ignore[abstract]


def test_parse_receives_the_turn_without_reasoning():
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


def test_parse_receives_a_turn_without_reasoning_unchanged():
    parser = PublishedStyleParser()
    text = " A <tool_call>b</tool_call>\nB <tool_call>c"
    turn = parser.parse_turn(text)
    assert parser.seen == [text]
    assert (turn.reasoning, turn.text) == (None, " A\nB <tool_call>c")


def test_removing_reasoning_never_forms_a_mark():
    parser = PublishedStyleParser()
    turn = parser.parse_turn("<tool_<think>x</think>call>rm</tool_call>")
    assert turn.tool_calls == ()


def test_a_custom_parser_receives_the_keywords_it_accepts():
    class WithTools(ToolParser):
        def parse(self, text, *, tools=None):  # type: ignore[override]
            return [ToolParseResult(id="1", name=tool["name"]) for tool in tools]

    class WithAll(ToolParser):
        def parse(self, text, **keywords):
            return [ToolParseResult(id="1", name="f", input=keywords)]

    tools = [{"name": "search", "inputSchema": {}}]
    assert WithTools().parse_turn("x", tools=tools).tool_calls[0].name == "search"
    given = {"token_ids": [7], "tokenizer": None, "tools": tools}
    assert WithAll().parse_turn("x", **given).tool_calls[0].input == given
    # The ids of the whole turn do not fit the remaining text.
    assert WithAll().parse_turn("<think>a</think>x", **given).tool_calls[0].input == {"tools": tools}


def test_the_error_text_has_the_error_and_the_raw_text():
    parser = HermesToolParser()
    (result,) = parser.parse("<tool_call>{'name': 'ls'}</tool_call>")
    shown = parser.render_error(result)
    assert result.error is not None
    assert result.error in shown
    assert "{'name': 'ls'}" in shown


def test_the_error_text_of_a_long_call_is_short():
    result = ToolParseResult.from_parse_error("call_1", "BEGIN" + "x" * 100_000 + "END")
    shown = HermesToolParser().render_error(result)
    assert len(shown) < 2300
    assert "BEGIN" in shown
    assert shown.endswith("END")


def test_the_error_text_can_always_be_encoded():
    result = ToolParseResult.from_parse_error("call_1", 'half a pair: "\ud83d"')
    HermesToolParser().render_error(result).encode()


@pytest.mark.parametrize("field", ["raw", "error", "native_id", "attempted_name"])
def test_a_result_that_cannot_be_saved_is_rejected(field):
    """A parser's results are saved after the episode, when such a value would fail."""
    with pytest.raises(ValueError, match=f"the {field} of a tool call must be a string or None, not b'x'"):
        ToolParseResult("c", "n", {}, **{field: b"x"})


@pytest.mark.parametrize(
    "fields", [{"id": ""}, {"name": ""}, {"id": None}, {"input": ["x"]}, {"input": None}], ids=repr
)
def test_a_result_that_strands_would_drop_is_rejected(fields):
    with pytest.raises(ValueError, match="a tool call"):
        ToolParseResult(**{"id": "c", "name": "n", "input": {}, **fields})


LLAMA3 = '<|start_header_id|>assistant<|end_header_id|>{"name": "f", "parameters": {}}'
MISTRAL = "[INST]{{ messages }}[/INST][TOOL_CALLS]"


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_an_unknown_name_is_an_error_that_lists_all_names(kind):
    with pytest.raises(kind) as caught:
        get_tool_parser("hermse")
    assert str(caught.value) == (
        "there is no tool parser named 'hermse'; the tool parsers are: " + ", ".join(sorted(TOOL_PARSER_REGISTRY))
    )
    assert "hermes" in str(caught.value)


def test_a_custom_parser_can_be_registered(monkeypatch):
    monkeypatch.setitem(TOOL_PARSER_REGISTRY, "mine", HermesToolParser)  # removes it after the test

    class OwnToolParser(ToolParser):
        def parse(self, text):  # type: ignore[override]
            return []

    assert register_tool_parser("mine")(OwnToolParser) is OwnToolParser
    assert isinstance(get_tool_parser("mine"), OwnToolParser)


def test_a_parser_class_is_rejected_with_a_hint():
    with pytest.raises(TypeError, match=r"HermesToolParser is a class: pass HermesToolParser\(\)"):
        get_tool_parser(HermesToolParser)


TOKENIZER = build_chatml_tokenizer()


def tokenizer_with(chat_template):
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = chat_template
    return tokenizer


FOR_TOOLS = {"default": CHATML_TEMPLATE, "tool_use": LLAMA3}
FOR_RETRIEVAL = {"rag": MISTRAL, "default": CHATML_TEMPLATE}


@pytest.mark.parametrize(
    ("name", "keywords", "parser"),
    [
        ("hermes", {}, HermesToolParser),
        ("qwen_xml", {"tokenizer": TOKENIZER}, QwenXMLToolParser),
        ("auto", {"tokenizer": TOKENIZER}, HermesToolParser),
        ("auto", {"tokenizer": tokenizer_with(LLAMA3)}, Llama3JSONToolParser),
        ("auto", {"chat_template": LLAMA3}, Llama3JSONToolParser),
        ("auto", {"tokenizer": TOKENIZER, "chat_template": MISTRAL}, MistralToolParser),
        ("auto", {"tokenizer": tokenizer_with(FOR_TOOLS)}, Llama3JSONToolParser),
        ("auto", {"tokenizer": tokenizer_with(FOR_TOOLS), "chat_template": "default"}, HermesToolParser),
        ("auto", {"tokenizer": tokenizer_with(FOR_RETRIEVAL)}, HermesToolParser),
    ],
)
def test_a_parser_is_found_by_its_name_or_by_the_chat_template(name, keywords, parser):
    assert type(get_tool_parser(name, **keywords)) is parser


@pytest.mark.parametrize("name", ["hermes", "auto"])
def test_a_parser_that_is_found_has_the_given_marks(name):
    assert get_tool_parser(name, tokenizer=TOKENIZER, think_end_token="[/t]").think_end_token == "[/t]"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "got no tokenizer: pass tokenizer= or chat_template="),
        ({"tokenizer": tokenizer_with(None)}, "got a tokenizer without one"),
        ({"tokenizer": tokenizer_with({"rag": MISTRAL})}, "got a tokenizer without one"),
        ({"tokenizer": SimpleNamespace()}, "got a tokenizer without one"),
        ({"chat_template": "{{ messages }}"}, "no known model family: name a tool parser instead of 'auto'"),
        ({"chat_template": "<start_of_turn>{{ messages }}<end_of_turn>"}, "known for the model family 'gemma'"),
    ],
)
def test_if_auto_finds_no_parser_the_error_says_what_to_pass(keywords, message):
    with pytest.raises(UnknownToolParserError) as caught:
        get_tool_parser("auto", **keywords)
    assert message in str(caught.value)
    assert "the tool parsers are: " in str(caught.value)


# === reasoning and text, which all formats share; a call inside reasoning is never a call ===


CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=ls>\n</function>\n</tool_call>"

both_formats = pytest.mark.parametrize(
    ("parser", "call"), [(HermesToolParser(), CALL), (QwenXMLToolParser(), XML_CALL)], ids=["hermes", "qwen_xml"]
)
PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, XML_CALL, "word", " ", "\n", "{", '"', "\\"]
    ),
    max_size=12,
).map("".join)


@both_formats
def test_a_repeated_opening_mark_does_not_end_reasoning(parser, call):
    turn = parser.parse_turn(f"\n<think>\nHm {call}\n</think>\nYes.", reasoning_open=True)
    assert (turn.reasoning, turn.text, turn.tool_calls) == (f"Hm {call}", "Yes.", ())


@both_formats
def test_a_mark_in_reasoning_does_not_hide_the_next_call(parser, call):
    turn = parser.parse_turn(f"I should use <tool_call> now.</think>{call}")
    assert [found.name for found in turn.tool_calls] == ["ls"]
    assert turn.reasoning == "I should use <tool_call> now."


@both_formats
def test_reasoning_between_text_and_calls_is_reasoning_too(parser, call):
    turn = parser.parse_turn(f"First.\n{call}\n<think>Then {call}</think>\nLast.\n{call}")
    assert [found.name for found in turn.tool_calls] == ["ls", "ls"]
    assert turn.reasoning == f"Then {call}"
    assert turn.text == "First.\nLast."


@both_formats
def test_text_before_a_second_closing_mark_is_reasoning(parser, call):
    turn = parser.parse_turn(f"a</think>b {call} c</think>d", reasoning_open=True)
    assert (turn.reasoning, turn.text, turn.tool_calls) == (f"a\nb {call} c", "d", ())


@both_formats
@pytest.mark.parametrize("empty", ["<think>\n\n</think>\n\n", "<think></think>"])
def test_empty_reasoning_is_no_reasoning(parser, call, empty):
    turn = parser.parse_turn(f"{empty}Hello.")
    assert (turn.reasoning, turn.text) == (None, "Hello.")


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        ("", ""),
        ("  Hello. \n", "  Hello. \n"),
        ("\n", "\n"),
        ("Hello.\n\nCALL", "Hello."),
        ("\n\nCALL\n", ""),
        ("CALL\nCALL", ""),
        ("Hello.\nCALL\n\nBye. ", "Hello.\n\nBye. "),
        ("Hello.CALL Bye.", "Hello. Bye."),
        ("Hello. CALL\nBye.", "Hello.\nBye."),
        ("Hello.CALLBye.", "Hello.Bye."),
        ("A\n\nCALL\nCALL\n\nB CALL C", "A\n\nB C"),
        ("<think>x</think>\n\n    indented\ncode", "    indented\ncode"),
        ("<think>x</think> \n \t\n  - item\n", "  - item\n"),
    ],
)
@both_formats
def test_only_white_space_that_separated_markup_is_removed(parser, call, sampled, text):
    assert parser.parse_turn(sampled.replace("CALL", call)).text == text


@both_formats
@given(before=PIECES, inside=PIECES.filter(lambda text: "</think>" not in text), after=PIECES)
def test_no_call_between_reasoning_marks_is_ever_returned(parser, call, before, inside, after):
    marked = call.replace("ls", "draft")
    opened = parser.parse(f"<think>{inside}{marked}{inside}")
    prompted = parser.parse(f"{inside}{marked}{inside}</think>{after}", reasoning_open=True)
    closed_only = parser.parse(f"{before}{marked}{inside.replace('<think>', '')}</think>{after}")
    assert "draft" not in {found.name for found in (*opened, *prompted, *closed_only)}


@both_formats
@given(text=PIECES, reasoning_open=st.booleans())
def test_every_word_of_a_turn_is_in_exactly_one_place(parser, call, text, reasoning_open):
    turn = parser.parse_turn(text, reasoning_open=reasoning_open)
    places = (turn.reasoning or "", turn.text, *(found.raw or "" for found in turn.tool_calls))
    assert sum(place.count("word") for place in places) == text.count("word")
    good = sum(not found.is_error for found in turn.tool_calls)
    assert sum(place.count("ls") for place in places) + good == text.count("ls")


@pytest.mark.parametrize(
    ("text", "reasoning_open", "unclosed"),
    [
        ("\n<think>\nHm", True, True),
        ("<think>Hm</think>\n\nYes.\n<think>No, ", False, True),
        ("Hm</think>\n\nYes.", True, False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "<think>"}}\n</tool_call>', False, False),
    ],
)
def test_a_turn_reports_whether_it_ends_in_reasoning(text, reasoning_open, unclosed):
    class OwnToolParser(ToolParser):
        """A custom parser that leaves the splitting to the base class."""

        def parse(self, text):  # type: ignore[override]
            return []

    for parser in (HermesToolParser(), QwenXMLToolParser(), OwnToolParser()):
        assert parser.parse_turn(text, reasoning_open=reasoning_open).ends_in_reasoning is unclosed


@pytest.mark.parametrize(
    ("text", "reasoning_open", "expected"),
    [
        ("<think></think>Yes.", False, True),
        ("<think>\n\n</think>\n\nYes.", False, True),
        ("</think>Yes.", False, True),
        ("</think>Yes.", True, True),
        ("", True, True),
        ("<think>Hm</think>Yes.", False, True),
        ("Hm</think>Yes.", False, True),
        ("Yes.", False, False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "<think></think>"}}\n</tool_call>', False, False),
    ],
)
def test_a_turn_reports_whether_it_has_reasoning(text, reasoning_open, expected):
    for parser in (HermesToolParser(), QwenXMLToolParser()):
        turn = parser.parse_turn(text, reasoning_open=reasoning_open)
        assert turn.has_reasoning is expected
        assert (turn.reasoning is None) is ("Hm" not in text)


def test_ordinary_tokens_that_look_like_empty_reasoning_are_none():
    assert not HermesToolParser().parse_turn(**encode("Write <thin", "k></thin", "k>.")).has_reasoning


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def encode(*pieces, tokenizer=TOKENIZER):
    """Encode a turn piece by piece, so that a part of a mark consists of ordinary tokens."""
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return {
        "text": tokenizer.decode(ids, skip_special_tokens=False),
        "token_ids": ids,
        "tokenizer": tokenizer,
    }


def test_ordinary_tokens_that_look_like_reasoning_marks_are_text():
    turn = HermesToolParser().parse_turn(**encode("Write <thin", "k> and </thin", "k>, then ", CALL))
    assert turn.reasoning is None
    assert turn.text == "Write <think> and </think>, then"
    assert [call.name for call in turn.tool_calls] == ["ls"]


def test_a_look_alike_does_not_bring_back_a_stop_string():
    sampled = encode("I write <tool", "_call> as text. STOP", " it")
    turn = HermesToolParser().parse_turn(**{**sampled, "text": "I write <tool_call> as text. "})
    assert (turn.text, turn.tool_calls) == ("I write <tool_call> as text. ", ())


def test_a_look_alike_in_open_reasoning_does_not_close_it():
    turn = HermesToolParser().parse_turn(**encode("I end with </thin", f"k> {CALL}</think>Done."), reasoning_open=True)
    assert turn.tool_calls == ()
    assert turn.reasoning == f"I end with </think> {CALL}"
    assert turn.text == "Done."


def test_marks_of_several_tokens_are_found_by_their_text():
    without_marks = build_chatml_tokenizer(with_marks=False)
    turn = HermesToolParser().parse_turn(**encode(f"<think>{CALL}</think>{CALL}", tokenizer=without_marks))
    assert turn.reasoning == CALL
    assert [call.name for call in turn.tool_calls] == ["ls"]


def test_marks_may_be_partly_in_the_vocabulary():
    parser = HermesToolParser(think_start_token="[think]", think_end_token="[/think]")
    turn = parser.parse_turn(**encode("[think]<tool", f"_call>{CALL}[/think]Yes.", CALL))
    assert turn.reasoning == f"<tool_call>{CALL}"
    assert (turn.text, len(turn.tool_calls)) == ("Yes.", 1)


def test_ids_win_if_the_text_has_lost_its_marks():
    sampled = encode(f"Hm.{CALL}")
    sampled["text"] = sampled["text"].replace("<tool_call>", "").replace("</tool_call>", "")
    turn = HermesToolParser().parse_turn(**sampled)
    assert (turn.text, [call.name for call in turn.tool_calls]) == ("Hm.", ["ls"])


def test_a_space_after_a_mark_survives_decoding():
    class SpaceDroppingTokenizer:
        """One word per token; like sentencepiece, decoding drops the space before the first word."""

        words = {1: "<tool_call>", 2: "</tool_call>", 3: " a", 4: " <tool_call>", 5: " b"}
        __hash__ = None  # type: ignore[assignment]

        def convert_tokens_to_ids(self, token):
            return next((index for index, word in self.words.items() if word == token), 0)

        def decode(self, token_ids, skip_special_tokens):
            assert skip_special_tokens is False
            return "".join(self.words.get(index, "<unk>") for index in token_ids).removeprefix(" ")

    parser = HermesToolParser()
    (call,) = parser.parse(
        "a <tool_call><tool_call> b</tool_call>", token_ids=[3, 4, 1, 5, 2], tokenizer=SpaceDroppingTokenizer()
    )
    assert call.raw == " b"


@given(
    st.lists(
        st.one_of(st.sampled_from((*MARKS, "<tool", "_call>", "</", "think>", '"', "{", CALL)), st.text(max_size=5))
    ),
    st.booleans(),
)
def test_with_ids_no_turn_raises_or_loses_text(pieces, reasoning_open):
    sampled = encode(*pieces)
    for parser in (HermesToolParser(), QwenXMLToolParser()):
        turn = parser.parse_turn(**sampled, reasoning_open=reasoning_open)
        kept = (turn.reasoning or "") + turn.text + "".join(call.raw or "" for call in turn.tool_calls)
        good = sum(not call.is_error for call in turn.tool_calls)
        assert kept.count('"name"') + good == sampled["text"].count('"name"')


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.sampled_from(MARKS), st.text(max_size=9)), max_size=4))
def test_with_ids_arguments_round_trip(arguments):
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    (call,) = HermesToolParser().parse(**encode(f"<tool_call>{body}</tool_call>"))
    assert call.input == arguments


@pytest.mark.parametrize("missing", ["token_ids", "tokenizer"])
def test_ids_need_a_tokenizer_and_a_tokenizer_needs_ids(missing):
    sampled = encode("<tool", '_call>{"name": "ls"}</tool', "_call>")
    del sampled[missing]
    assert [call.name for call in HermesToolParser().parse(**sampled)] == ["ls"]


# === hermes ===


class TestHermes(ParserChecks):
    # test_linear_time.py, which runs alone, measures this format.
    test_a_megabyte_of_hostile_text_is_cheap = test_the_cost_of_hostile_text_is_linear = None

    format = Format(
        parser=HermesToolParser(),
        write=write_json_objects,
        tokens=MARKS,
        tags=('{"name": ',),
        malformed=("",),
        closer='"}}</tool_call>',
        strict_json=True,
    )


def written(name):
    return write_json_objects([(name, {})])


parse = HermesToolParser().parse


def only(text, **keywords):
    (result,) = parse(text, **keywords)
    return result


def assert_refused(result, status):
    assert (result.status, result.is_error) == (status, True)
    assert (result.name, result.input) == (ToolParseResult.UNKNOWN_NAME, {})
    assert result.error


def test_missing_arguments_are_empty():
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
def test_an_inexact_call_is_malformed_and_keeps_its_text(body):
    turn = HermesToolParser().parse_turn(f"A<tool_call>{body}</tool_call>")
    (result,) = turn.tool_calls
    assert_refused(result, ToolCallStatus.MALFORMED)
    assert result.raw == result.payload == body
    assert turn.text == "A"


@pytest.mark.parametrize("arguments", [[], [1], "text", '{"q": 1}', 3, None, True])
def test_arguments_must_be_an_object(arguments):
    body = json.dumps({"name": "search", "arguments": arguments})
    result = only(f"<tool_call>{body}</tool_call>")
    assert_refused(result, ToolCallStatus.NOT_AN_OBJECT)
    assert (result.raw, result.attempted_name) == (body, "search")


@pytest.mark.parametrize(
    "body",
    ["", "{", '{"name": "search", "arguments": {"q": "', '{"name": "search", "arguments": {}}', "nonsense"],
)
@pytest.mark.parametrize("truncated", [False, True])
def test_a_call_without_an_end_mark_is_unterminated(body, truncated):
    turn = HermesToolParser().parse_turn(f"Let me see.\n<tool_call>\n{body}", truncated=truncated)
    (result,) = turn.tool_calls
    assert_refused(result, ToolCallStatus.UNTERMINATED)
    assert result.raw == f"\n{body}"
    assert ("cut off" in (result.error or "")) is truncated
    assert turn.text == "Let me see."


def test_a_start_mark_inside_a_call_starts_no_other_call():
    (result,) = parse("<tool_call>\n" + written("rm"))
    assert_refused(result, ToolCallStatus.MALFORMED)


def test_a_valid_call_after_a_broken_one_runs():
    broken, good = parse("<tool_call>{'name': 'a'}</tool_call>\n" + written("b"))
    assert_refused(broken, ToolCallStatus.MALFORMED)
    assert (good.name, good.status) == ("b", ToolCallStatus.OK)


def test_a_stray_end_mark_is_text():
    turn = HermesToolParser().parse_turn("All done.</tool_call>")
    assert (turn.text, turn.tool_calls) == ("All done.</tool_call>", ())


@pytest.mark.parametrize("body", ['{"name": "search", "arguments": {', '{"name":"search", nonsense'])
def test_a_broken_call_keeps_its_attempted_name(body):
    assert only(f"<tool_call>{body}</tool_call>").attempted_name == "search"


def test_a_broken_call_has_no_name_of_the_next_one():
    broken, good = parse("<tool_call>{oops}</tool_call>\n" + written("search"))
    assert (broken.attempted_name, good.name) == (None, "search")


@pytest.mark.parametrize("key", [" dry_run", "dry_run ", '"dry_run"'])
def test_a_key_of_gemma_that_is_not_bare_is_refused(key):
    """Strands ignores an unknown argument: the tool would run without it."""

    def parsed(key, *properties):
        text = f"<|tool_call>call:rm{{path:1,{key}:true}}<tool_call|>"
        return get_tool_parser("gemma4").parse(text, tools=[tool("rm", dict.fromkeys(properties, {}))])

    (result,) = parsed(key, "path", "dry_run")
    assert_refused(result, ToolCallStatus.MALFORMED)
    assert "write dry_run" in result.error
    assert parsed("dry_run", "path", "dry_run")[0].input == {"path": 1, "dry_run": True}
    assert parsed(key, "path", key)[0].input == {"path": 1, key: True}  # a name that a schema declares


def test_the_marks_can_be_changed():
    parser = HermesToolParser(tool_start_token="[call]", tool_end_token="[/call]")
    (result,) = parser.parse('<tool_call>[call]{"name": "f"}[/call]')
    assert result.name == "f"
    with pytest.raises(ValueError, match="needs a tool_start_token and a tool_end_token"):
        HermesToolParser(tool_end_token="")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"content": "one:\nCALLtwo:\nCALL\n"}',  # raw newlines break the string
        r'{"path": "C:\dir", "content": "CALLCALL"}',  # so does a lone backslash
    ],
)
def test_calls_quoted_in_a_broken_call_do_not_run(arguments):
    quoted = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    calls = parse(text.replace("CALL", quoted))
    assert calls and all(call.is_error for call in calls)


# === formats with plain text between tags: calls, and where values end ===
# The type of a value comes from the schema, from any part of it.


class TestQwenXML(ParserChecks):
    # test_linear_time.py, which runs alone, measures this format.
    test_a_megabyte_of_hostile_text_is_cheap = test_the_cost_of_hostile_text_is_linear = None

    format = Format(
        parser=QwenXMLToolParser(),
        write=writer(
            "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>",
            "\n",
            arguments=pairs("<parameter=%s>\n%s\n</parameter>\n"),
        ),
        tokens=MARKS,
        tags=("<function=f>", "</function>", "<parameter=a>", "</parameter>"),
        malformed=("",),
        closer="\n</parameter>\n</function>\n</tool_call>",
        # The end of a call, and text that could be the rest of a call whose value was never closed.
        loses_string=re.compile(r"</function>\s*</tool_call>|(?:^|\n)<parameter=[^>\n]+>(?:\n|$)").search,
    )


def tagged_written(name, arguments):
    return TestQwenXML.format.write([(name, arguments)])


def tool(name, properties, **schema):
    return {"name": name, "inputSchema": {"json": {"type": "object", "properties": properties, **schema}}}


def tagged_only(text, **keywords):
    (result,) = QwenXMLToolParser().parse(text, **keywords)
    return result


def value_of(written_value, schema, **root):
    result = tagged_only(tagged_written("f", {"x": written_value}), tools=[tool("f", {"x": schema}, **root)])
    assert result.status is ToolCallStatus.OK, result.error
    return result.input["x"]


def test_line_breaks_between_tags_are_optional():
    text = "<tool_call><function=f><parameter=a> 1 </parameter><parameter=b>x\n</parameter></function></tool_call>"
    assert tagged_only(text).input == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("written_value", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" -3 ", {"type": "integer"}, -3),
        ("3", {"type": "number"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("1e-07", {"type": "number"}, 1e-07),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("None", {"type": "null"}, None),
        ("[1, [2]]", {"type": "array"}, [1, [2]]),
        ('{"a": "1"}', {"type": "object"}, {"a": "1"}),
        ("5", {"type": ["integer", "string"]}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nullable", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nullable"),
        ("None", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("{broken", {"type": ["object", "string"]}, "{broken"),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"const": "7"}, "7"),
        ("7", {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "7"),
        ("7", {"$ref": "#/$defs/Word"}, "7"),
        ("7", {"anyOf": [{"$ref": "#/$defs/Word"}, {"type": "null"}]}, "7"),
        ("7", {"$ref": "#/$defs/Missing"}, 7),
        ("7", {"$ref": "#/$defs/Loop"}, 7),
        ("7", {}, 7),
        ("seven", {}, "seven"),
        ("7", True, 7),
        ("7", {"type": "word"}, 7),
        ("null", {"type": "integer", "default": None}, None),
        ("None", {"type": "integer", "default": None}, None),
    ],
)
def test_values_have_the_type_that_the_schema_declares(written_value, schema, value):
    definitions = {"Word": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    found = value_of(written_value, schema, **{"$defs": definitions})
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("written_value", "schema", "error"),
    [
        ("three", {"type": "integer"}, "an integer"),
        ("3.5", {"type": "integer"}, "an integer"),
        ("true", {"type": "integer"}, "an integer"),
        ('"3"', {"type": "integer"}, "an integer"),
        ("", {"type": "integer"}, "an integer"),
        ("yes", {"type": "boolean"}, "a boolean"),
        ("1", {"type": "boolean"}, "a boolean"),
        ("NaN", {"type": "number"}, "NaN is not JSON"),
        ("{'a': 1}", {"type": "object"}, "an object"),
        ('{"a": 1} ', {"type": "array"}, "an array"),
        ("[1, 2", {"type": "array"}, "an array"),
        ("['x']", {"type": "array"}, "an array"),
        ('{"a": 1, "a": 2}', {"type": "object"}, "more than once"),
        ("[" * 100 + "]" * 100, {"type": "array"}, "nested too deeply"),
        ("x", {"type": ["integer", "null"]}, "an integer or null"),
    ],
)
def test_a_value_of_the_wrong_type_is_malformed(written_value, schema, error):
    result = tagged_only(tagged_written("f", {"x": written_value}), tools=[tool("f", {"x": schema})])
    assert result.status is ToolCallStatus.MALFORMED
    assert (result.name, result.input, result.attempted_name) == (ToolParseResult.UNKNOWN_NAME, {}, "f")
    assert result.error is not None and error in result.error


def test_without_a_schema_json_is_decoded():
    arguments = {"a": "12", "b": "true", "c": "null", "d": "[1]", "e": "1 + 1", "f": '"x"', "g": "True", "h": "NaN"}
    found = tagged_only(tagged_written("f", arguments)).input
    assert found == {"a": 12, "b": True, "c": None, "d": [1], "e": "1 + 1", "f": '"x"', "g": "True", "h": "NaN"}


def test_additional_properties_type_undeclared_parameters():
    text = tagged_written("f", {"x": "12"})
    assert tagged_only(text, tools=[tool("f", {})]).input == {"x": 12}
    assert tagged_only(text, tools=[tool("f", {}, additionalProperties={"type": "string"})]).input == {"x": "12"}
    assert tagged_only(text, tools=[tool("f", {}, additionalProperties=False)]).input == {"x": 12}


def test_the_schema_may_be_a_reference_without_the_json_key():
    definition = {"properties": {"x": {"type": "string"}}}
    schema = {"$ref": "#/$defs/Input", "$defs": {"Input": definition}}
    assert tagged_only(tagged_written("f", {"x": "12"}), tools=[{"name": "f", "inputSchema": schema}]).input == {
        "x": "12"
    }


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<function=>",
        "search",
        '{"name": "f", "arguments": {}}',
        "<function=f>",
        "<function=f></function></function>",
        "<function=f>\n</function>\n<function=g>\n</function>",
        "<function=f>\nx\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter>",
        "<function=f>\n<parameter=a>\n1\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter> and\n</function>",
        "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>",
        "<function=f>\n<parameter=>\n1\n</parameter>\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n1\n</parameter>\n</function>",
    ],
)
def test_an_inexact_tagged_call_is_malformed(body):
    turn = QwenXMLToolParser().parse_turn(f"A\n<tool_call>\n{body}\n</tool_call>\nB")
    (result,) = turn.tool_calls
    assert (result.status, result.name, result.input) == (ToolCallStatus.MALFORMED, ToolParseResult.UNKNOWN_NAME, {})
    assert result.raw == f"\n{body}\n"
    assert result.error
    assert turn.text == "A\nB"


def test_tags_inside_a_value_belong_to_the_value():
    code = "x = '</parameter>'\n</tool_call> <tool_call>\n<function=rm>\n</function> </think>\n<parameter=y>z"
    turn = QwenXMLToolParser().parse_turn(tagged_written("write", {"code": code, "n": 1}))
    (result,) = turn.tool_calls
    assert result.input == {"code": code, "n": 1}
    assert turn.reasoning is None


def test_an_unclosed_value_does_not_swallow_the_next_call():
    first = tagged_written("f", {"a": "1"}).replace("</parameter>\n", "")
    broken, good = QwenXMLToolParser().parse(first + "\n" + tagged_written("g", {"b": "2"}))
    assert (broken.status, broken.attempted_name) == (ToolCallStatus.MALFORMED, "f")
    assert (good.name, good.input) == ("g", {"b": 2})


@pytest.mark.parametrize("name", ["g", "f g", "f" * 65])
def test_a_name_that_no_tool_has_is_read_as_written_in_tags(name):
    result = tagged_only(tagged_written(name, {"x": 1}), tools=[tool("f", {})])
    assert (result.status, result.name, result.input) == (ToolCallStatus.OK, name, {"x": 1})


def test_a_value_that_closes_its_own_call_runs_nothing():
    value = "x\n</parameter>\n</function>\n</tool_call>\nand more"
    calls = QwenXMLToolParser().parse(tagged_written("write", {"content": value}))
    assert calls and all(call.is_error for call in calls)


def test_tags_inside_json_strings_belong_to_them():
    inside = "x</parameter><parameter=b></parameter></function></tool_call><tool_call>"
    types = {"a": {"type": "object"}, "b": {"type": ["array", "null"]}}
    text = tagged_written("f", {"a": {inside: inside}, "b": [inside]})
    result = tagged_only(text, tools=[tool("f", types)])
    assert result.input == {"a": {inside: inside}, "b": [inside]}


_TOKEN = "]<]minimax[>["
WRITTEN = {
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter={key}>{value}</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{value}</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "minimax_m3": f'{_TOKEN}<tool_call>\n{_TOKEN}<invoke name="f">{_TOKEN}<{{key}}>{{value}}{_TOKEN}</{{key}}>'
    f"{_TOKEN}</invoke>\n{_TOKEN}</tool_call>",
}
FORMATS = pytest.mark.parametrize("format_name", sorted(WRITTEN))


def read(format_name, value, schema, key="a"):
    """Return the value of one parameter of a call, typed by the schema of the tool."""
    text = WRITTEN[format_name].format(key=key, value=value)
    (call,) = get_tool_parser(format_name).parse(text, tools=[{"name": "f", "inputSchema": {"json": schema}}])
    assert call.error is None, call.error
    return call.input[key]


def test_lists_of_pythonic_calls_are_read_as_in_python():
    (call,) = get_tool_parser("llama4_pythonic").parse("[f(a=[1, 'a', -2.5, [], {}, 3], b=[[1], {'b': [None]}, True])]")
    assert call.input == {"a": [1, "a", -2.5, [], {}, 3], "b": [[1], {"b": [None]}, True]}


WORD = {"type": "string"}


@FORMATS
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"z": {"anyOf": [{"type": "integer"}, WORD]}, "a": {"$ref": "#/properties/z/anyOf/1"}}},
        {"properties": {"a": {"$ref": "#/$defs/a%20word"}}, "$defs": {"a word": WORD}},
        {"properties": {"a": {"$ref": "#/$defs/a word"}}, "$defs": {"a word": WORD}},
        {"properties": {"a": {"$ref": "#/$defs/a~1b~0c%25"}}, "$defs": {"a/b~c%": WORD}},
        {"properties": {"a": {"$ref": "#word"}}, "$defs": {"w": {"$anchor": "word", **WORD}}},
        {"properties": {"a": {"$ref": "word.json"}}, "$defs": {"w": {"$id": "https://e.org/word.json", **WORD}}},
        {
            "properties": {"a": {"$ref": "#/$defs/W0"}},
            "$defs": {**{f"W{i}": {"$ref": f"#/$defs/W{i + 1}"} for i in range(20)}, "W20": WORD},
        },
        {"properties": {"a": {"$ref": "#/$defs/W"}}, "$defs": {"W": {"anyOf": [WORD, {"$ref": "#/$defs/W"}]}}},
        {"properties": {"a": {"pattern": "^[0-9]+$"}}},
        {"properties": {"a": {"minLength": 1}}},
        {"allOf": [{"properties": {"a": WORD}}, {"properties": {"b": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"a": WORD}}, {"properties": {"b": {"type": "integer"}}}]},
        {"oneOf": [{"properties": {"a": WORD}}, {"properties": {"a": {"const": "x"}}}]},
        {"patternProperties": {"^a$": WORD}},
        {"patternProperties": {r"^\p{L}+$": WORD}},
        {
            "properties": {"a": {"description": "x"}},
            "allOf": [{"$ref": "#/$defs/O"}],
            "$defs": {"O": {"properties": {"a": WORD}}},
        },
        {"$ref": "#/$defs/O", "$defs": {"O": {"allOf": [{"anyOf": [{"properties": {"a": WORD}}]}]}}},
        {"if": {"required": ["b"]}, "then": {"properties": {"a": WORD}}},
        {"dependentSchemas": {"b": {"properties": {"a": WORD}}}},
        {"additionalProperties": {"$ref": "#/$defs/W"}, "$defs": {"W": WORD}},
    ],
    ids=str,
)
@pytest.mark.parametrize("value", ["1", "true", "null", "[1]"])
def test_a_string_stays_text_wherever_the_schema_declares_it(format_name, schema, value):
    """Such strings became numbers."""
    assert read(format_name, value, {"type": "object", **schema}) == value


@FORMATS
@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("1", {"type": "number", "enum": [0.5, 1.0, 2.0]}, 1),
        ("1", {"enum": [0.5, 1.0]}, 1),
        ("1.0", {"type": "number", "enum": [1, 2]}, 1.0),
        ("1.0", {"const": 1}, 1.0),
        ("1", {"const": 1.0}, 1),
        ("3.0", {"type": "integer"}, 3.0),
        ("1e2", {"type": "integer"}, 100.0),
        ("[1.0]", {"const": [1]}, [1.0]),
    ],
)
def test_numbers_are_compared_as_in_json_schema(format_name, value, schema, expected):
    """Valid numbers were rejected."""
    found = read(format_name, value, {"type": "object", "properties": {"a": schema}})
    assert (found, type(found)) == (expected, type(expected))


@FORMATS
@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("1", {"enum": ["1", 2]}, "1"),
        ("2", {"enum": ["1", 2]}, 2),
        ("1", {"enum": ["1", 1]}, 1),
        ("true", {"anyOf": [{"const": "true"}, {"const": False}]}, "true"),
        ("null", {"enum": ["null", "x", 3]}, "null"),
        ("1", {"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}, "1"),
        ("1", {"allOf": [{"enum": ["1", "x", 5]}]}, "1"),
        ("7", {"enum": ["1", 2]}, 7),
        ("[1]", {"enum": ["[1]", [1]]}, [1]),
    ],
)
def test_text_listed_as_a_constant_stays_text(format_name, value, schema, expected):
    """With the constants `"1"` and `2`, the text 1 became a number that the schema does not allow."""
    whole = {"type": "object", "properties": {"a": schema}, "$defs": {"E": {"enum": ["1", 2]}}}
    found = read(format_name, value, whole)
    assert (found, type(found)) == (expected, type(expected))


def test_a_property_without_a_schema_is_typed_by_its_text():
    schema = {"type": "object", "anyOf": [{"properties": {"b": WORD}}], "additionalProperties": False}
    assert read("qwen_xml", "1", schema) == 1
    assert read("qwen_xml", "one", schema) == "one"


def test_nested_elements_are_typed_by_any_part_of_the_schema():
    """Such strings became numbers, in the one format whose lists and objects are elements."""
    token = _TOKEN
    inner = f"{token}<item>1{token}</item>{token}<item>2{token}</item>"
    tuples = {"type": "array", "prefixItems": [{"type": "integer"}, WORD]}
    for schema in (
        tuples,
        {"allOf": [{"$ref": "#/$defs/T%31"}]},
        {"type": "array", "items": [{"type": "integer"}, WORD]},
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": WORD},
    ):
        whole = {"type": "object", "properties": {"a": schema}, "$defs": {"T1": tuples}}
        assert read("minimax_m3", inner, whole) == [1, "2"]
    nested = {"type": "object", "patternProperties": {"^x": WORD}}
    assert read("minimax_m3", f"{token}<x1>1{token}</x1>", {"properties": {"a": nested}}) == {"x1": "1"}


def test_elements_that_are_nested_too_deeply_are_refused():
    text = f"{_TOKEN}<a>" * 100 + "1" + f"{_TOKEN}</a>" * 100
    (result,) = get_tool_parser("minimax_m3").parse(
        f'{_TOKEN}<tool_call>\n{_TOKEN}<invoke name="f">{text}{_TOKEN}</invoke>\n{_TOKEN}</tool_call>'
    )
    assert_refused(result, ToolCallStatus.MALFORMED)
    assert "nested too deeply" in result.error


def test_a_lone_surrogate_in_an_escaped_string_is_refused():
    parser = get_tool_parser("llama4_pythonic")
    (result,) = parser.parse('[f(x="\\ud800")]')
    assert_refused(result, ToolCallStatus.MALFORMED)
    assert "lone surrogate" in result.error
    assert parser.parse('[f(x="\\u0041\\n")]')[0].input == {"x": "A\n"}


STRING_AND_MORE = {"type": "object", "properties": {"a": WORD, "b": WORD}}


def calls(format_name, text):
    parser = get_tool_parser(format_name)
    return parser.parse(text, tools=[{"name": "f", "inputSchema": {"json": STRING_AND_MORE}}])


@pytest.mark.parametrize(
    "value",
    [
        "x</function></parameter><parameter=b>y",
        "</parameter><parameter=b>",
        "x\n</parameter><parameter=b>y",
        "x</parameter>\n  <parameter=b>\ny",
        "</parameter></function></tool",
    ],
)
def test_tags_not_on_their_own_line_are_text(value):
    """A string was split into two parameters."""
    (call,) = calls("qwen_xml", WRITTEN["qwen_xml"].format(key="a", value=value))
    assert call.input == {"a": value}


def test_a_value_without_line_breaks_ends_at_its_tag():
    body = "<parameter=a>x</parameter><parameter=b>\ny</parameter></function>"
    (call,) = calls("qwen_xml", f"<tool_call><function=f>{body}</tool_call>")
    assert call.input == {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    ("format_name", "value"),
    [
        ("seed_oss", "x</parameter><parameter=b>y"),
        ("seed_oss", "</function></parameter> <parameter=b>"),
        ("minimax_m2", 'x</parameter><parameter name="b">y'),
    ],
)
def test_a_value_with_an_ambiguous_end_is_an_error(format_name, value):
    """A string was split into two parameters, in formats that write a value on the line of its tags."""
    (call,) = calls(format_name, WRITTEN[format_name].format(key="a", value=value))
    assert call.is_error
    assert "it is ambiguous which </parameter> ends parameter 'a'" in call.error


def test_unambiguous_parameters_may_be_on_one_line():
    text = (
        "<seed:tool_call><function=f><parameter=a>x</parameter><parameter=b>y</parameter></function></seed:tool_call>"
    )
    (call,) = calls("seed_oss", text)
    assert call.input == {"a": "x", "b": "y"}
