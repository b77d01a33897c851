"""Thoughts in plain text are taken off an answer."""

from __future__ import annotations

import time

import pytest

from strands_env.core import Observation


def answer(text: str) -> str | None:
    return Observation(messages=[{"role": "assistant", "content": [{"text": text}]}]).final_response


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  as it is\n", "  as it is\n"),
        ("", ""),
        ("<think>a</think>b", "b"),
        ("<think>\na\n</think>\n\nb", "b"),
        ("a</think>b", "b"),
        ("a<think>b</think>c", "ac"),
        ("a<think>b", "a"),
        ("<think>a", None),
        ("<think>a</think>", None),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("<THINKING>a</THINKING>b", "b"),
        ("<seed:think>a</seed:think>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("\u25c1think\u25b7a\u25c1/think\u25b7b", "b"),
        ("I think> that <b>x</b>", "I think> that <b>x</b>"),
    ],
)
def test_the_answer_is_what_is_not_thought(text: str, expected: str | None) -> None:
    """B5."""
    assert answer(text) == expected


@pytest.mark.parametrize("part", ["<think>", "</think>", "<think>a</think>", "<", "a"])
def test_it_takes_linear_time(part: str) -> None:
    began = time.process_time()
    answer(part * (1_000_000 // len(part)))
    assert time.process_time() - began < 5
