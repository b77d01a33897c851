"""What commands print: colors and progress on a terminal only, in 80 columns."""

import io
import logging
import re
import sys
import time

import pytest
from hypothesis import given, settings, strategies as st

from strands_sglang import terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_colors_appear_on_a_terminal_only(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal.paint("proven", "green") == "proven"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert terminal.paint("proven", "green") == "\x1b[32mproven\x1b[0m"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colors_can_be_switched_off(monkeypatch, name, value):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv(name, value)
    assert terminal.paint("proven", "green") == "proven"


def test_long_waits_are_shown_on_a_terminal_and_erased(monkeypatch):
    monkeypatch.setattr(terminal, "PROGRESS_AFTER", 0.01)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(KeyError), terminal.waiting("loading the tokenizer"):
        deadline = time.monotonic() + 20
        while "loading" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
        raise KeyError
    assert re.match(r"\rloading the tokenizer \.\.\. \d+ s", screen.getvalue())
    assert screen.getvalue().endswith("\r\x1b[K")


def test_short_waits_and_logs_stay_quiet(monkeypatch):
    screen, log = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.waiting("loading the tokenizer"):
        pass
    monkeypatch.setattr(terminal, "PROGRESS_AFTER", 0.001)
    monkeypatch.setattr(sys, "stderr", log)
    with terminal.waiting("loading the tokenizer"):
        time.sleep(0.02)
    assert (screen.getvalue(), log.getvalue()) == ("", "")


def test_facts_fit_into_80_columns_and_paths_stay_whole():
    path = "/a" * 50
    lines = list(terminal.fact_lines([("model", path), ("reason", "word " * 40), ("none", "")], column=10))
    assert lines[0] == f"model     {path}"
    assert all(len(line) <= 80 and line[10] != " " for line in lines[1:-1])
    assert lines[1].startswith("reason    word") and lines[-1] == "none"


@pytest.mark.parametrize(("screen", "shown"), [(10, 40), (70, 70), (132, 132)])
def test_texts_are_as_wide_as_the_terminal(monkeypatch, screen, shown):
    monkeypatch.setenv("COLUMNS", str(screen))
    facts = [("reason", "word " * 60)]
    assert max(map(len, terminal.fact_lines(facts, column=10))) in range(76, 81)  # not a terminal
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert terminal.width() == shown
    assert max(map(len, terminal.fact_lines(facts, column=10))) in range(shown - 4, shown + 1)
    assert max(map(len, terminal.wrapped("  " + "word " * 60))) in range(shown - 4, shown + 1)


def test_a_dot_or_an_underline_separates_tokens(monkeypatch):
    tokens = [("<|tool", None), ("_", "green"), ("call|>", None)]
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert list(terminal.token_lines(tokens, 40)) == ["<|tool·_·call|>"]
    assert list(terminal.token_lines(tokens, 8)) == ["<|tool·_", "call|>"]
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert list(terminal.token_lines(tokens, 40)) == ["<|tool\x1b[32m\x1b[4m_\x1b[0mcall|>"]


@settings(deadline=None)
@given(st.lists(st.text("ab|日", max_size=30), max_size=12), st.integers(2, 20))
def test_lines_of_tokens_fit_and_lose_nothing(tokens, columns):
    lines = list(terminal.token_lines([(token, None) for token in tokens], columns))
    assert "".join(lines).replace("·", "") == "".join(tokens)
    assert all(len(line) + line.count("日") <= columns for line in lines)


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e"


def test_a_terminal_interprets_no_printed_text_but_our_colors(monkeypatch, capsys):
    logger = logging.getLogger("test_terminal")
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.NOTSET))
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    terminal.log(logging.ERROR)
    monkeypatch.setattr(logger, "parent", logging.root)
    assert terminal.say("strands-env", f"{terminal.paint('failed', 'red')}: {HOSTILE}") == 0
    terminal.tell(f"first\n{HOSTILE}\x1b[31m")
    logger.error("a reward failed with %s", HOSTILE)
    errors = capsys.readouterr().err
    assert screen.getvalue() == ("\x1b[31mfailed\x1b[0m: \\u{1b}]0;title\\u{7}\\u{1b}[2J\\u{9b}2J\\u{202e}\n")
    assert (
        errors.startswith("first\n") and len(errors.splitlines()) == 3 and not set(errors) & set("\x1b\x07\x9b\u202e")
    )
