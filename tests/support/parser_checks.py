"""One suite for the tool parsers of all formats, inherited by the test class of each format."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from strands_sglang.tool_parsers import ToolCallStatus, ToolParser, ToolParseResult
from support.agents import build_chatml_tokenizer
from support.cpu_time import cpu_seconds, on_this_machine

MAX_CALLS = 1000
MEGABYTE = 1 << 20
JSON_TYPE = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
KEYS = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
PIECES = (
    "123",
    "-1.5",
    "true",
    "null",
    "None",
    "[1]",
    '{"a": 1}',
    '"',
    "\\",
    "{",
    "\n",
    "    x",
    "é日本\U0001f642",
)


def json_text(value):
    """Write a value as most templates do."""
    return json.dumps(value, ensure_ascii=False)


def pairs(pair):
    """Return a writer of arguments: a name and a value each, with strings unchanged."""
    return lambda values: "".join(
        pair % (key, value if isinstance(value, str) else json_text(value)) for key, value in values.items()
    )


def writer(
    call,
    between="",
    begin="",
    end="",
    arguments=json_text,
):
    """Return a writer of calls: a name and arguments each."""
    return lambda calls: begin + between.join(call % (name, arguments(values)) for name, values in calls) + end


write_json_objects = writer('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', between="\n")

# Each property is inherited by the test classes of all formats.
for_every_format = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.filter_too_much])


@dataclass(frozen=True)
class Format:
    """A format: how calls are written, and which values it cannot represent.

    Attributes:
        parser: Parser of the format.
        write: Writes calls as the format's chat templates do.
        tokens: Tokens of the vocabulary that the marks consist of.
        tags: Other markup, for hostile text.
        malformed: Texts that are not calls although the marks of calls enclose them.
        closer: Text that would end a string and its call if its marks were real.
        loses: Whether the format loses the arguments of a call with this text.
        loses_string: Whether the format loses a value that contains this string.
        think: Marks around reasoning.
        strict_json: Whether arguments are JSON, which escapes strings.
        delimits: Whether the end of a list does not depend on the content of its strings.
        values: Strategy for the values of arguments; any JSON by default.
    """

    parser: ToolParser
    write: Callable
    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    malformed: tuple[str, ...]
    closer: str
    loses: Callable = lambda text: False
    loses_string: Callable = lambda text: None
    think: tuple[str, str] = ("<think>", "</think>")
    strict_json: bool = False
    delimits: bool = True
    values: Callable = lambda texts: json_values(texts, texts)

    @property
    def start(self):
        """Return the mark before calls."""
        return self.parser.tool_start_token

    @property
    def end(self):
        """Return the mark after calls."""
        return self.parser.tool_end_token

    @functools.cached_property
    def texts(self):
        """Return a strategy for strings that contain marks."""
        pieces = (*self.tokens, *self.tags, *self.think, *PIECES)
        return st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=6)), max_size=6).map("".join)

    @functools.cached_property
    def arguments(self):
        """Return a strategy for arguments that the format can represent."""
        return st.dictionaries(KEYS, self.values(self.texts), max_size=4)


def json_values(texts, keys):
    """Return a strategy for any JSON with these strings."""
    return st.recursive(
        st.none() | SCALARS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def strings_in(value):
    """Yield all strings in a value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from strings_in(inner)


def schema_of(value):
    """Return the JSON schema of a value; the first element determines that of a list."""
    schema = {"type": JSON_TYPE[type(value)]}
    if isinstance(value, dict):
        schema["properties"] = {key: schema_of(inner) for key, inner in value.items()}
    elif isinstance(value, list) and value:
        schema["items"] = schema_of(value[0])
    return schema


def tools_for(calls):
    """Return tool specs that declare the arguments of these calls."""
    return [{"name": name, "inputSchema": {"json": schema_of(arguments)}} for name, arguments in calls]


@functools.cache
def tokenizer_with(tokens):
    """Return a small tokenizer with these as single tokens."""
    tokenizer = Tokenizer.from_str(build_chatml_tokenizer(with_marks=False).backend_tokenizer.to_str())
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def sampled(tokenizer, *pieces):
    """Encode a turn piece by piece, so that a token cut in two becomes ordinary tokens."""
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return {"text": tokenizer.decode(ids), "token_ids": ids, "tokenizer": tokenizer}


def imitated(tokens, text):
    """Split a text within each of these tokens, so that they become ordinary tokens."""
    pieces = [text]
    for token in tokens:
        pieces = [
            part
            for piece in pieces
            for index, rest in enumerate(piece.split(token))
            for part in ([token[:2], token[2:], rest] if index else [rest])
        ]
    return [piece for piece in pieces if piece]


def summary(calls):
    """Return the names and arguments of calls."""
    return [(call.name, call.input) for call in calls]


def same(found, written):
    """Return whether two values and their types are equal on every level, so that True is not 1."""
    return repr(found) == repr(written)


def hostile_texts(form):
    """Yield hostile texts as (prefix, text to repeat, suffix)."""
    text = form.write([("f", {"a": "x"})])
    inner = text[text.index(form.start) + len(form.start) : text.rindex(form.end)]
    pieces = [*form.tokens, *form.tags, form.end, *form.think, inner, "[", "{", '{"', " \n", "<", "1", "\\"]
    parts = [inner[: len(inner) * part // 6] for part in range(1, 6)]
    for unit in [*pieces, *(form.start + piece for piece in (*pieces, *parts))]:
        yield "", unit, ""
    for unit in pieces:
        yield form.start + inner[: inner.index("x")], unit, inner[inner.index("x") :] + form.end
    for part in parts:
        yield "", form.start + part + form.end, ""
        yield "", form.start + part + form.think[1], form.end


def assert_cheap(parser, unit, length, before="", after="", **keywords):
    """Fail if a turn of this length takes more than a second of CPU time per megabyte."""
    text = before + unit * (length // len(unit)) + after

    def is_cheap(reasoning_open):
        taken = cpu_seconds(lambda: parser.parse_turn(text, reasoning_open=reasoning_open, **keywords))
        return taken < length / MEGABYTE or taken < on_this_machine(length / MEGABYTE)

    # A busy machine only slows a run down, so one fast run proves that the work is small.
    for reasoning_open in (False, True):
        assert any(is_cheap(reasoning_open) for _ in range(5)), (before, unit, after)


class ParserChecks:
    """The suite; a subclass sets the format."""

    format: ClassVar[Format]

    @for_every_format
    @given(st.data())
    def test_arguments_round_trip(self, data):
        arguments = data.draw(st.lists(self.format.arguments, min_size=1, max_size=3))
        calls = [(f"f{index}", values) for index, values in enumerate(arguments)]
        assume(not any(self.format.loses_string(text) for text in strings_in(arguments)))
        assume(not any(self.format.loses(self.format.write([call])) for call in calls))
        text = self.format.write(calls)
        turn = self.format.parser.parse_turn(f"So:\n\n{text}", tools=tools_for(calls))
        assert [call.error for call in turn.tool_calls] == [None] * len(calls)
        assert same(summary(turn.tool_calls), calls)
        assert (turn.text, turn.reasoning) == ("So:", None)
        assert len({call.id for call in turn.tool_calls}) == len(calls)

    @pytest.mark.parametrize("value", ["x\n" * 50_000, "", " ", "123", "null", "  indented\n\tcode\n\n"])
    def test_a_declared_string_is_kept_unchanged(self, value):
        calls = [("write", {"content": value, "n": 3})]
        assert summary(self.format.parser.parse(self.format.write(calls), tools=tools_for(calls))) == calls

    def test_marks_in_the_strings_of_a_list_belong_to_them(self):
        if not self.format.delimits:
            pytest.skip("the format does not delimit lists")
        calls = [("f", {"a": [f"x{self.format.closer}", {"b": self.format.closer}]}), ("g", {})]
        assert summary(self.format.parser.parse(self.format.write(calls), tools=tools_for(calls))) == calls

    @for_every_format
    @given(st.data())
    def test_no_text_raises(self, data):
        written = self.format.write([("f", {"a": "1"})])
        pieces = [*self.format.tokens, *self.format.tags, *self.format.think, written, self.format.start, *PIECES]
        halves = [written[: len(written) // 2], written[len(written) // 2 :]]
        text = data.draw(st.lists(st.sampled_from([*pieces, *halves]) | st.text(max_size=4)).map("".join))
        flags = {"reasoning_open": data.draw(st.booleans()), "truncated": data.draw(st.booleans())}
        self.format.parser.parse_turn(text, tools=[], **flags)
        ids = sampled(tokenizer_with(self.format.tokens), *imitated(self.format.tokens[:1], text))
        self.format.parser.parse_turn(**ids, tools=[], **flags)

    @settings(for_every_format, max_examples=50)
    @given(st.data())
    def test_a_call_that_runs_was_written_for_any_tokenization(self, data):
        form = self.format
        written = form.write([("f", {"a": "x", "b": [1, "y"]}), ("g", {})])
        pieces = [*form.tokens, *form.tags, *form.think, written, form.write([("f", {"a": "z"})]), form.start, *PIECES]
        text = data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=8).map("".join))
        text = text[: data.draw(st.integers(len(text) // 2, len(text)))]
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4))), len(text)]
        parts = [text[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]
        turn = form.parser.parse_turn(**sampled(tokenizer_with(form.tokens), *parts))
        for call in turn.tool_calls:
            assert call.is_error or call.name in text
            if not call.is_error and "\\" not in text:  # escapes decode to other text
                assert all(found in text for found in strings_in(call.input)), text

    def test_calls_after_the_first_thousand_are_one_malformed_call(self):
        many = [("f", {})] * MAX_CALLS
        assert summary(self.format.parser.parse(self.format.write(many))) == many
        *good, rest = self.format.parser.parse(self.format.write([*many, *many[:5]]))
        assert summary(good) in ([], many)
        assert rest.status is ToolCallStatus.MALFORMED
        assert "1000 calls" in (rest.error or "")

    def test_a_draft_in_reasoning_is_not_a_call(self):
        opened, closed = self.format.think
        draft, call = self.format.write([("rm", {})]), self.format.write([("ls", {})])
        for text, reasoning_open in [
            (f"{opened}Maybe {draft}?{closed}\n\nYes.\n{call}", False),
            (f"Maybe {draft}?{closed}\n\nYes.\n{call}", True),
            (f"Maybe {draft}?{closed}\n\nYes.\n{call}", False),
        ]:
            turn = self.format.parser.parse_turn(text, reasoning_open=reasoning_open)
            assert [found.name for found in turn.tool_calls] == ["ls"]
            assert (turn.reasoning, turn.text) == (f"Maybe {draft}?", "Yes.")

    @pytest.mark.parametrize("opened_by_prompt", [True, False])
    def test_reasoning_that_never_closes_has_no_calls(self, opened_by_prompt):
        draft = self.format.write([("rm", {})])
        mark = "" if opened_by_prompt else self.format.think[0]
        turn = self.format.parser.parse_turn(f"{mark}I will {draft}", reasoning_open=opened_by_prompt)
        assert (turn.tool_calls, turn.text, turn.reasoning) == ((), "", f"I will {draft}")

    def test_a_turn_reports_whether_it_ends_in_reasoning(self):
        opened, closed = self.format.think
        call = self.format.write([("ls", {})])
        for text, reasoning_open, unclosed in [
            ("", False, False),
            ("", True, True),
            ("Hm", True, True),
            (f"{opened}", False, True),
            (f"{opened}Hm {call}", False, True),
            (f"Hm {call}", True, True),
            (f"{opened}Hm{closed}", False, False),
            (f"Hm{closed}", True, False),
            (f"Hm{closed}", False, False),
            (f"Hm{closed}\n\n{call}", True, False),
            (f"{opened}Hm{closed}\n\nYes.", False, False),
            (f"{opened}Hm{closed}\n\nYes.{opened}No, ", False, True),
            (f"Yes.\n{call}", False, False),
        ]:
            turn = self.format.parser.parse_turn(text, reasoning_open=reasoning_open)
            assert turn.ends_in_reasoning is unclosed, (text, reasoning_open)

    def test_several_calls_keep_their_order_and_the_text(self):
        calls = [("a", {"x": 1}), ("b", {}), ("a", {"x": 2})]
        turn = self.format.parser.parse_turn(f"First.\n{self.format.write(calls)}\nLast.")
        assert summary(turn.tool_calls) == calls
        assert turn.text == "First.\nLast."

    def test_a_turn_cut_off_anywhere_has_an_unterminated_call(self):
        calls = [("f", {"a": 1, "b": "x"}), ("g", {"c": "2"})]
        text = self.format.write(calls)
        begin = text.index(self.format.start) + len(self.format.start)
        for end in range(begin, text.rindex(self.format.end) + len(self.format.end) - 1):
            turn = self.format.parser.parse_turn("A\n" + text[:end], tools=tools_for(calls), truncated=True)
            *before, last = turn.tool_calls
            assert summary(before) == calls[: len(before)]
            if text[:end].count(self.format.start) == text[:end].count(self.format.end):
                assert summary([last]) == calls[len(before) : len(before) + 1]
                continue
            assert (last.status, last.name) == (ToolCallStatus.UNTERMINATED, ToolParseResult.UNKNOWN_NAME)
            assert "cut off" in (last.error or "")

    def test_an_inexact_call_is_malformed(self):
        for body in self.format.malformed:
            turn = self.format.parser.parse_turn(f"A\n{self.format.start}{body}{self.format.end}\nB")
            assert turn.tool_calls, body
            result = turn.tool_calls[-1]
            assert (result.status, result.name) == (ToolCallStatus.MALFORMED, ToolParseResult.UNKNOWN_NAME), body
            assert result.input == {}
            assert result.error
            assert (result.raw or "") in body
            assert turn.text == "A\nB"

    def test_an_unknown_tool_name_is_returned_unchanged(self):
        text = self.format.write([("g", {"x": 1}), ("f", {})])
        assert summary(self.format.parser.parse(text, tools=tools_for([("f", {})]))) == [("g", {"x": 1}), ("f", {})]

    def test_a_broken_call_keeps_the_calls_before_it(self):
        text = self.format.write([("f", {"a": 1}), ("g", {"b": "x"})])
        end = text.rindex(self.format.end)
        good, *_, broken = self.format.parser.parse(f"{text[:end]}\x00{text[end:]}")
        assert summary([good]) == [("f", {"a": 1})]
        assert (broken.status, "\x00" in (broken.raw or "")) == (ToolCallStatus.MALFORMED, True)

    def test_an_unmatched_end_mark_makes_a_call_ambiguous(self):
        text = self.format.write([("f", {"a": "x"})])
        for call in self.format.parser.parse(f"{text} and more {self.format.end}"):
            assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")

    def test_a_megabyte_of_hostile_text_is_cheap(self):
        text = self.format.write([("f", {"a": "x", "b": 1})])
        for unit in (self.format.start, self.format.think[1], text, text + self.format.think[1]):
            assert_cheap(self.format.parser, unit, MEGABYTE)

    def test_the_cost_of_hostile_text_is_linear(self):
        for before, unit, after in hostile_texts(self.format):
            assert_cheap(self.format.parser, unit, MEGABYTE // 8, before, after)

    def test_a_megabyte_of_hostile_lists_is_cheap(self):
        if not self.format.delimits:
            pytest.skip("the format does not delimit lists")
        calls = [("f", {"a": [7], "b": [8]})]
        head, rest = self.format.write(calls).split("[7]")
        between, tail = rest.split("[8]")
        for piece in ("[", '["', "['", '["\\"', '{"', "[" * 30):
            for unit in (between + piece, piece + between):
                assert_cheap(self.format.parser, unit, MEGABYTE // 4, head + "[7]", tail, tools=tools_for(calls))

    def test_a_call_with_real_mark_tokens_is_a_call(self):
        calls = [("f", {"a": "x", "n": 3}), ("g", {})]
        tokenizer = tokenizer_with(self.format.tokens)
        turn = self.format.parser.parse_turn(**sampled(tokenizer, "Hm. ", self.format.write(calls)))
        assert summary(turn.tool_calls) == calls
        assert turn.text == "Hm."

    def test_ordinary_tokens_that_look_like_a_call_are_text(self):
        tokenizer, text = tokenizer_with(self.format.tokens), self.format.write([("rm", {"a": "x"})]).strip()
        turn = self.format.parser.parse_turn(**sampled(tokenizer, "Like ", *imitated(self.format.tokens, text), "."))
        assert turn.tool_calls == ()
        assert turn.text == f"Like {text}."

    def test_look_alike_marks_in_a_string_belong_to_it(self):
        tokenizer, closer = tokenizer_with(self.format.tokens), f"{self.format.closer}{self.format.think[1]} é\n"
        inside = json.dumps(closer, ensure_ascii=False)[1:-1] if self.format.strict_json else closer
        before, after = self.format.write([("f", {"a": "x@@"}), ("g", {})]).split("@@")
        pieces = sampled(tokenizer, before, *imitated(self.format.tokens, inside), after)
        turn = self.format.parser.parse_turn(**pieces, tools=tools_for([("f", {"a": ""}), ("g", {})]))
        assert summary(turn.tool_calls) == [("f", {"a": f"x{closer}"}), ("g", {})]

    def test_a_look_alike_end_mark_leaves_the_call_unterminated(self):
        tokenizer, text = tokenizer_with(self.format.tokens), self.format.write([("f", {})]).rstrip()
        head = text.removesuffix(self.format.end)
        (call,) = self.format.parser.parse(**sampled(tokenizer, head, *imitated(self.format.tokens, self.format.end)))
        assert (call.status, call.attempted_name) == (ToolCallStatus.UNTERMINATED, "f")


class ListedChecks(ParserChecks):
    """The suite for formats in which calls end the turn, and a broken call takes the rest of the turn."""

    def test_several_calls_keep_their_order_and_the_text(self):
        calls = [("a", {"x": 1}), ("b", {}), ("a", {"x": 2})]
        turn = self.format.parser.parse_turn(f"First.\n{self.format.write(calls)}\n")
        assert summary(turn.tool_calls) == calls
        assert turn.text == "First."

    def test_a_turn_cut_off_anywhere_has_an_unterminated_call(self):
        text = self.format.write([("f", {"a": 1, "b": "x"})])
        begin = text.index(self.format.start) + len(self.format.start)
        for end in range(begin, len(text) - len(self.format.end)):
            for result in self.format.parser.parse_turn(text[:end], truncated=True).tool_calls:
                if result.is_error:
                    assert (result.status, result.input) == (ToolCallStatus.UNTERMINATED, {}), text[:end]
                    assert "cut off" in (result.error or "")
                else:
                    assert summary([result]) == [("f", {"a": 1, "b": "x"})]

    def test_an_inexact_call_is_malformed(self):
        for body in self.format.malformed:
            turn = self.format.parser.parse_turn(f"A\n{self.format.start}{body}\n")
            assert turn.tool_calls, body
            result = turn.tool_calls[-1]
            assert (result.status, result.name) == (ToolCallStatus.MALFORMED, ToolParseResult.UNKNOWN_NAME), body
            assert result.input == {}
            assert result.error
            assert (result.raw or "").strip() in body
            assert turn.text == "A"

    def test_a_broken_call_keeps_the_calls_before_it(self):
        pytest.skip("in such a format, one broken call fails all calls, unless its class overrides this test")

    def test_the_cost_of_hostile_text_is_linear(self):
        for before, unit, after in hostile_texts(self.format):
            if unit:
                assert_cheap(self.format.parser, unit, MEGABYTE // 8, before, after)

    def test_text_after_a_call_keeps_it_from_running(self):
        text = self.format.write([("f", {"a": 1})])
        turn = self.format.parser.parse_turn(f"{text} and that is it.")
        assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]
        assert turn.text == ""

    def test_a_look_alike_end_mark_leaves_the_call_unterminated(self):
        if not self.format.end:
            pytest.skip("the format has no end mark")
        tokenizer, text = tokenizer_with(self.format.tokens), self.format.write([("f", {})]).rstrip()
        head = text.removesuffix(self.format.end)
        turn = self.format.parser.parse_turn(**sampled(tokenizer, head, *imitated(self.format.tokens, self.format.end)))
        assert all(call.is_error for call in turn.tool_calls)
