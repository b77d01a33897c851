"""The ways in which a history can differ: each has a test, and docs/histories.md says how often the record is right."""

import logging
import re
from pathlib import Path

from support.history_table import as_table, play_all
from support.strands_features import has_module

DOCS = Path(__file__).parents[3] / "docs" / "histories.md"


async def test_hooks_tell_what_became_of_every_answer_and_the_table_says_what_is_inferred_without(caplog):
    caplog.set_level(logging.CRITICAL)
    found = await play_all()
    assert all(set(counts["told"]) == {"right"} for counts in found.values())
    assert all(counts["inferred"]["right"] > counts["inferred"]["wrong"] for counts in found.values())
    if has_module("strands.middleware"):  # earlier versions of Strands have fewer ways
        assert as_table(found) in DOCS.read_text(), "print the table again: python -m support.history_table, in tests"


ROWS = {
    1: "old messages fall out of a sliding window",
    2: "an overflow shortens an old tool result in place",
    3: "a summary takes the place of the beginning, asked for without an agent",
    4: "a context manager shortens, drops, merges and marks",
    5: "text is injected for one call only",
    6: "middleware asks several times, or makes an answer up",
    7: "hooks edit messages, results and tool input",
    8: "Strands normalises blank text and invalid names",
    9: "tool input goes through JSON",
    10: "a cut tool call is replaced by text",
    11: "a cancel puts text in the place of an answer",
    12: "structured output changes the tools",
    13: "a tool call is left without a result",
    14: "results come late and in another order",
    15: "a session, a snapshot or a checkpoint is restored",
    16: "the user edits, gives examples, calls tools directly",
    17: "the system prompt or the tools change",
    18: "results from the background come as calls that nobody sampled",
    19: "other agents' calls come in between",
    20: "parallel nodes share an invocation state",
    21: "invocations of one agent interleave",
    22: "input is merged into a message that was seen",
    23: "a call is repeated",
    24: "a guardrail redacts",
}


def test_every_row_has_a_test():
    before_a_test = re.compile(r"((?:^# Row \d+\n)+)(?:@.*\n(?:[ )].*\n)*)*(?:async )?def test_", re.MULTILINE)
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for rows in before_a_test.findall(path.read_text()):
            found |= {int(number) for number in re.findall(r"\d+", rows)}
    assert found == set(ROWS)
