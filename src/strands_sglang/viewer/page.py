"""One self-contained page: the files of `front/` put into one document with the data of the episodes.

The modules of `front/` are ordinary JavaScript modules, which tests import as they are. A page cannot import from
itself, so here each becomes a function that returns what it exports. The content security policy names the one script
and the one style sheet by their hashes and allows no request, so text from a file cannot run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ..inspection.records import Finding, Group, count_tokens, turns_of
from .blocks import Blocks
from .payload import page_index
from .stores import run_name

if TYPE_CHECKING:
    from .reports import Report

FRONT = Path(__file__).parent / "front"

MODULES = (
    *("text", "dom", "layout", "virtual", "data", "colors", "score", "strip", "tree", "markdown", "conversation"),
    *("biography", "search", "episode", "siblings", "tables", "report", "app"),
)
"""The modules of `front/`, each after those that it imports."""

MOST_TOKENS = 2_000_000
"""Tokens that a page can hold; a browser takes about 20 bytes of file and 60 of memory for each."""


class PageTooLargeError(ValueError):
    """The files hold more tokens than a page can show; the message says how many."""


def render(
    groups: Sequence[Group],
    findings: Sequence[Finding] | None = None,
    *,
    title: str = "",
    report: Report | None = None,
) -> str:
    """Return recorded episodes as an HTML page.

    Args:
        groups: The episodes, such as `inspection.reading.read` returns.
        findings: What the doctor found; None if nothing was examined.
        title: Title of the page; by default the name of the run, or those of the files.
        report: What the page shows first of the evaluation, or the two, that the episodes are the samples of.

    Raises:
        PageTooLargeError: They hold more tokens than a page can show.
    """
    check_size(groups)
    blocks = Blocks()
    title = title or run_name([group.file for group in groups])
    index = page_index(groups, findings, blocks)
    blocks.json({"title": title, **index, "report": report}, "index")
    style = (FRONT / "style.css").read_text(encoding="utf-8")
    script = bundle()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    template = Template((FRONT / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        policy=policy, title=html.escape(title), style=style, script=script, blocks="\n".join(blocks.html)
    )


def check_size(groups: Sequence[Group]) -> None:
    """Check that a page can hold the episodes, before anything is derived from them.

    Raises:
        PageTooLargeError: They hold more tokens than a page can show.
    """
    tokens = count_tokens(turns_of(groups))
    if tokens > MOST_TOKENS:
        raise PageTooLargeError(
            f"the files hold {tokens:,} tokens, more than the {MOST_TOKENS:,} that a page can show: name fewer files"
        )


def bundle() -> str:
    """Return the modules of `front/` as one script."""
    library = (FRONT / "markdown-it.min.js").read_text(encoding="utf-8").split("//# source")[0]
    notice = (FRONT / "markdown-it.LICENSE").read_text(encoding="utf-8")
    parts = [f"/* markdown-it\n\n{notice}*/\n{library}", "const modules = {};\n"]
    for name in MODULES:
        body = _as_function((FRONT / f"{name}.mjs").read_text(encoding="utf-8"))
        parts.append(f"modules.{name} = (() => {{\n{body}}})();\n")
    return "".join(parts)


def _as_function(source: str) -> str:
    """Turn a module into the body of a function: imports read the other modules' results, exports are returned."""
    source = re.sub(
        r'^import (\{[^}]*\}) from "\./(\w+)\.mjs";$',
        lambda match: f"const {match[1].replace(' as ', ': ')} = modules.{match[2]};",
        source,
        flags=re.MULTILINE,
    )
    exported = re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", source, flags=re.MULTILINE)
    source = re.sub(r"^export ", "", source, flags=re.MULTILINE)
    return f"{source}return {{ {', '.join(exported)} }};\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
