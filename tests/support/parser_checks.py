"""What every tool parser must do, whatever its format: one suite that each format's test file fills in and inherits."""

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from strands_sglang.tool_parsers import ToolCallStatus, ToolParser, ToolParseResult
from support.agents import build_chatml_tokenizer

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
    """A value as most templates write it."""
    return json.dumps(value, ensure_ascii=False)


def pairs(pair):
    """Write arguments one after the other: a name and a value each, and strings as they are."""
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
    """Write calls one after the other: a name and arguments each."""
    return lambda calls: begin + between.join(call % (name, arguments(values)) for name, values in calls) + end


write_json_objects = writer('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', between="\n")

# One property, inherited by the test class of every format.
for_every_format = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.filter_too_much])


@dataclass(frozen=True)
class Format:
    """One format: how calls are written, and what it cannot carry.

    Attributes:
        parser: The parser.
        write: Callables calls as the format's chat templates do.
        tokens: Tokens of its vocabulary that its marks consist of.
        tags: Other markup, for hostile text.
        malformed: What is no call although the marks of calls stand around it.
        loses: Whether the format itself loses the arguments of a call written like this.
        loses_string: Whether the format itself loses a value with this string in it.
        think: The marks around reasoning.
        closer: What would end a string and its call if its marks were real.
        strict_json: Whether arguments are JSON, in which strings are escaped.
        delimits: A list tells by itself where it ends, whatever its strings hold.
        values: Values of arguments; any JSON by default.
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
        """The mark before calls."""
        return self.parser.tool_start_token

    @property
    def end(self):
        """The mark behind calls."""
        return self.parser.tool_end_token

    @functools.cached_property
    def texts(self):
        """Strings, with marks in them."""
        pieces = (*self.tokens, *self.tags, *self.think, *PIECES)
        return st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=6)), max_size=6).map("".join)

    @functools.cached_property
    def arguments(self):
        """Arguments of a call that the format can carry."""
        return st.dictionaries(KEYS, self.values(self.texts), max_size=4)


def json_values(texts, keys):
    """Any JSON with these strings."""
    return st.recursive(
        st.none() | SCALARS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def strings_in(value):
    """All strings in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from strings_in(inner)


def schema_of(value):
    """The JSON schema of a value; lists by their first element."""
    schema = {"type": JSON_TYPE[type(value)]}
    if isinstance(value, dict):
        schema["properties"] = {key: schema_of(inner) for key, inner in value.items()}
    elif isinstance(value, list) and value:
        schema["items"] = schema_of(value[0])
    return schema


def tools_for(calls):
    """Tool specs that declare the arguments of these calls."""
    return [{"name": name, "inputSchema": {"json": schema_of(arguments)}} for name, arguments in calls]


@functools.cache
def tokenizer_with(tokens):
    """A small tokenizer in whose vocabulary these are single tokens."""
    tokenizer = Tokenizer.from_str(build_chatml_tokenizer(with_marks=False).backend_tokenizer.to_str())
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def sampled(tokenizer, *pieces):
    """A turn of pieces that were sampled one by one: a token that is cut in two is made of ordinary tokens."""
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return {"text": tokenizer.decode(ids), "token_ids": ids, "tokenizer": tokenizer}


def imitated(tokens, text):
    """The text in pieces that cut each of these tokens, so that it is made of ordinary ones."""
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
    """Names and arguments of calls."""
    return [(call.name, call.input) for call in calls]


def same(found, written):
    """Whether two values are equal and of equal types on every level (True is no 1)."""
    return repr(found) == repr(written)


def hostile_texts(form):
    """What to repeat, and what to put before and behind it."""
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


def assert_cheap(parser, unit, length, before="", behind="", **keywords):
    """Fail if a turn of this length costs more CPU time than a second per megabyte."""
    text = before + unit * (length // len(unit)) + behind

    def seconds(reasoning_open):
        begin = time.process_time()
        parser.parse_turn(text, reasoning_open=reasoning_open, **keywords)
        return time.process_time() - begin

    # A busy machine makes a run slower, never faster: one fast run shows that the work is small.
    for reasoning_open in (False, True):
        assert any(seconds(reasoning_open) < length / MEGABYTE for _ in range(5)), (before, unit, behind)


class ParserChecks:
    """The suite; a subclass has the format."""

    format: ClassVar[Format]

    @for_every_format
    @given(st.data())
    def test_arguments_come_back_as_they_were_written(self, data):
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
    def test_a_declared_string_stays_exactly_what_was_written(self, value):
        calls = [("write", {"content": value, "n": 3})]
        assert summary(self.format.parser.parse(self.format.write(calls), tools=tools_for(calls))) == calls

    def test_marks_in_the_strings_of_a_list_belong_to_them(self):
        if not self.format.delimits:
            pytest.skip("the format writes the strings of a list as it writes all others")
        calls = [("f", {"a": [f"x{self.format.closer}", {"b": self.format.closer}]}), ("g", {})]
        assert summary(self.format.parser.parse(self.format.write(calls), tools=tools_for(calls))) == calls

    @for_every_format
    @given(st.data())
    def test_no_text_makes_the_parser_raise(self, data):
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
    def test_wherever_a_turn_is_cut_into_tokens_a_call_that_runs_was_written(self, data):
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
            if not call.is_error and "\\" not in text:  # what escapes mean is not what is written
                assert all(found in text for found in strings_in(call.input)), text

    def test_more_calls_than_a_thousand_are_one_malformed_call(self):
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

    def test_a_turn_says_whether_it_ends_in_reasoning_that_nothing_closed(self):
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

    def test_several_calls_keep_their_order_and_the_text_around_them(self):
        calls = [("a", {"x": 1}), ("b", {}), ("a", {"x": 2})]
        turn = self.format.parser.parse_turn(f"First.\n{self.format.write(calls)}\nLast.")
        assert summary(turn.tool_calls) == calls
        assert turn.text == "First.\nLast."

    def test_a_turn_that_is_cut_off_anywhere_ends_in_an_unterminated_call(self):
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

    def test_what_is_not_exactly_a_call_is_malformed_and_runs_nothing(self):
        for body in self.format.malformed:
            turn = self.format.parser.parse_turn(f"A\n{self.format.start}{body}{self.format.end}\nB")
            assert turn.tool_calls, body
            result = turn.tool_calls[-1]
            assert (result.status, result.name) == (ToolCallStatus.MALFORMED, ToolParseResult.UNKNOWN_NAME), body
            assert result.input == {}
            assert result.error
            assert (result.raw or "") in body
            assert turn.text == "A\nB"

    def test_a_name_that_no_tool_has_is_read_as_written(self):
        text = self.format.write([("g", {"x": 1}), ("f", {})])
        assert summary(self.format.parser.parse(text, tools=tools_for([("f", {})]))) == [("g", {"x": 1}), ("f", {})]

    def test_a_broken_call_does_not_take_the_one_before_it_along(self):
        text = self.format.write([("f", {"a": 1}), ("g", {"b": "x"})])
        end = text.rindex(self.format.end)
        good, *_, broken = self.format.parser.parse(f"{text[:end]}\x00{text[end:]}")
        assert summary([good]) == [("f", {"a": 1})]
        assert (broken.status, "\x00" in (broken.raw or "")) == (ToolCallStatus.MALFORMED, True)

    def test_an_end_mark_that_closes_nothing_puts_the_call_before_it_in_doubt(self):
        text = self.format.write([("f", {"a": "x"})])
        for call in self.format.parser.parse(f"{text} and more {self.format.end}"):
            assert (call.status, call.attempted_name) == (ToolCallStatus.MALFORMED, "f")

    def test_a_megabyte_of_hostile_text_is_cheap(self):
        text = self.format.write([("f", {"a": "x", "b": 1})])
        for unit in (self.format.start, self.format.think[1], text, text + self.format.think[1]):
            assert_cheap(self.format.parser, unit, MEGABYTE)

    def test_hostile_text_costs_no_more_than_its_length(self):
        for before, unit, behind in hostile_texts(self.format):
            assert_cheap(self.format.parser, unit, MEGABYTE // 8, before, behind)

    def test_a_megabyte_of_hostile_lists_is_cheap_where_a_list_ends_by_itself(self):
        if not self.format.delimits:
            pytest.skip("the format writes the strings of a list as it writes all others")
        calls = [("f", {"a": [7], "b": [8]})]
        head, rest = self.format.write(calls).split("[7]")
        between, tail = rest.split("[8]")
        for piece in ("[", '["', "['", '["\\"', '{"', "[" * 30):
            for unit in (between + piece, piece + between):
                assert_cheap(self.format.parser, unit, MEGABYTE // 4, head + "[7]", tail, tools=tools_for(calls))

    def test_a_call_of_real_tokens_is_a_call(self):
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

    def test_marks_of_ordinary_tokens_in_a_string_belong_to_the_string(self):
        tokenizer, closer = tokenizer_with(self.format.tokens), f"{self.format.closer}{self.format.think[1]} é\n"
        inside = json.dumps(closer, ensure_ascii=False)[1:-1] if self.format.strict_json else closer
        before, behind = self.format.write([("f", {"a": "x@@"}), ("g", {})]).split("@@")
        pieces = sampled(tokenizer, before, *imitated(self.format.tokens, inside), behind)
        turn = self.format.parser.parse_turn(**pieces, tools=tools_for([("f", {"a": ""}), ("g", {})]))
        assert summary(turn.tool_calls) == [("f", {"a": f"x{closer}"}), ("g", {})]

    def test_an_end_of_ordinary_tokens_leaves_the_call_unterminated(self):
        tokenizer, text = tokenizer_with(self.format.tokens), self.format.write([("f", {})]).rstrip()
        head = text.removesuffix(self.format.end)
        (call,) = self.format.parser.parse(**sampled(tokenizer, head, *imitated(self.format.tokens, self.format.end)))
        assert (call.status, call.attempted_name) == (ToolCallStatus.UNTERMINATED, "f")


class ListedChecks(ParserChecks):
    """The suite where nothing may follow the calls, and where a broken call takes the rest of the turn along."""

    def test_several_calls_keep_their_order_and_the_text_around_them(self):
        calls = [("a", {"x": 1}), ("b", {}), ("a", {"x": 2})]
        turn = self.format.parser.parse_turn(f"First.\n{self.format.write(calls)}\n")
        assert summary(turn.tool_calls) == calls
        assert turn.text == "First."

    def test_a_turn_that_is_cut_off_anywhere_ends_in_an_unterminated_call(self):
        text = self.format.write([("f", {"a": 1, "b": "x"})])
        begin = text.index(self.format.start) + len(self.format.start)
        for end in range(begin, len(text) - len(self.format.end)):
            for result in self.format.parser.parse_turn(text[:end], truncated=True).tool_calls:
                if result.is_error:
                    assert (result.status, result.input) == (ToolCallStatus.UNTERMINATED, {}), text[:end]
                    assert "cut off" in (result.error or "")
                else:
                    assert summary([result]) == [("f", {"a": 1, "b": "x"})]

    def test_what_is_not_exactly_a_call_is_malformed_and_runs_nothing(self):
        for body in self.format.malformed:
            turn = self.format.parser.parse_turn(f"A\n{self.format.start}{body}\n")
            assert turn.tool_calls, body
            result = turn.tool_calls[-1]
            assert (result.status, result.name) == (ToolCallStatus.MALFORMED, ToolParseResult.UNKNOWN_NAME), body
            assert result.input == {}
            assert result.error
            assert (result.raw or "").strip() in body
            assert turn.text == "A"

    def test_a_broken_call_does_not_take_the_one_before_it_along(self):
        pytest.skip("the calls of such a format stand and fall together, or a file of its own says otherwise")

    def test_hostile_text_costs_no_more_than_its_length(self):
        for before, unit, behind in hostile_texts(self.format):
            if unit:
                assert_cheap(self.format.parser, unit, MEGABYTE // 8, before, behind)

    def test_text_behind_a_call_keeps_it_from_running(self):
        text = self.format.write([("f", {"a": 1})])
        turn = self.format.parser.parse_turn(f"{text} and that is it.")
        assert [call.status for call in turn.tool_calls] == [ToolCallStatus.MALFORMED]
        assert turn.text == ""

    def test_an_end_of_ordinary_tokens_leaves_the_call_unterminated(self):
        if not self.format.end:
            pytest.skip("the format has no end mark")
        tokenizer, text = tokenizer_with(self.format.tokens), self.format.write([("f", {})]).rstrip()
        head = text.removesuffix(self.format.end)
        turn = self.format.parser.parse_turn(**sampled(tokenizer, head, *imitated(self.format.tokens, self.format.end)))
        assert all(call.is_error for call in turn.tool_calls)
