"""docs/slime.md says what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from strands_sglang.trainers import slime
from strands_sglang.trainers.slime import samples

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "slime.md").read_text(encoding="utf-8")


def rows(text: str, first: str) -> list[str]:
    """The rows of the table whose header begins with a cell."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.lower().startswith(f"| {first}"))
    return [line for line in lines[start + 2 :][: len(lines)] if line.startswith("|")][: _length(lines[start + 2 :])]


def _length(lines: list[str]) -> int:
    return next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))


def test_the_table_of_ends_is_the_modules():
    documented = rows(TEXT, "the episode")
    assert documented == rows(inspect.getdoc(samples) or "", "the episode")
    assert len(documented) == 9


def test_all_public_names_are_there():
    named = re.findall(r"^\| `(\w+)", "\n".join(rows(TEXT, "name")), re.MULTILINE)
    assert sorted(named) == sorted(slime.__all__)


def test_links_lead_to_files():
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
