"""Reads the README: its fenced blocks and its tables, so that tests can hold them against the code."""

import ast
import asyncio
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"^\|.*\|\n\|[-| ]+\|\n(?:\|.*\|\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: What stands behind the opening fence.
        text: What stands between the fences.
        line: Line of the file on which the text begins, from 1.
        section: The heading above it.
    """

    language: str
    text: str
    line: int
    section: str

    def run(self, namespace, replace=str):
        """Execute Python in a namespace, `await` at the top level allowed; tracebacks name the README's own lines.

        Args:
            namespace: Globals, which blocks that go on from one another share.
            replace: Applied to the text before.
        """
        source = "\n" * (self.line - 1) + replace(self.text)
        code = compile(source, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            asyncio.run(result)


def blocks(language, path=README):
    """The fenced blocks of a language, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            language,
            match["text"],
            text.count("\n", 0, match.start("text")) + 1,
            _heading_above(text[: match.start()]),
        )
        for match in _FENCE.finditer(text)
        if match["language"] == language
    ]


def table(section, *headings, path=README):
    """The rows of the table in a section that has these column headings, markup of cells included.

    Raises:
        LookupError: There is not exactly one such table.
    """
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _TABLE.finditer(text):
        head, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in match[0].splitlines()
        ]
        if tuple(head) == headings and _heading_above(text[: match.start()]) == section:
            found.append([dict(zip(head, row, strict=True)) for row in rows])
    if len(found) != 1:
        raise LookupError(f"{path.name}, {section!r}: {len(found)} tables with the columns {headings}")
    return found[0]


def names_in_code(text):
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def _heading_above(text):
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), flags=re.MULTILINE)
    return headings[-1] if headings else ""
