"""How often the record is right about what became of an answer: the table of docs/histories.md."""

import logging
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
