"""Reads the README and the pages of docs/: fenced blocks and tables, so that tests can hold them against the code."""

import ast
import asyncio
import inspect
import os
import re
import shlex
import sys
from collections import namedtuple
from pathlib import Path
from unittest import mock

from strands_sglang.testing import ScriptedSGLang
from strands_sglang.tool_parsers import TOOL_PARSER_REGISTRY
from support.agents import call
from support.processes import run_fork

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

URL = "http://localhost:30000"

_FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?[^\n]*\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)
_TABLE = re.compile(r"^\|.*\|\n\|[-| ]+\|\n(?:\|.*\|\n)+", re.MULTILINE)


class Block(namedtuple("Block", ["language", "text", "line", "section", "title", "path"])):
    """A fenced block.

    Attributes:
        language: The word after the opening fence.
        text: The lines between the fences.
        line: Line of the file on which the text begins, from 1.
        section: The heading above it.
        title: The file that the block shows, None without.
        path: The page.
    """

    def run(self, namespace, replace=str):
        """Execute Python in a namespace, `await` at the top level allowed; tracebacks name the page's own lines.

        Args:
            namespace: Globals, shared by the blocks of a page.
            replace: Applied to the text before.
        """
        source = "\n" * (self.line - 1) + replace(self.text)
        code = compile(source, str(self.path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            asyncio.run(result)


def blocks(language, path=README):
    """The fenced blocks of a language (None: of all), in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            match["language"],
            match["text"],
            text.count("\n", 0, match.start("text")) + 1,
            _heading_above(text[: match.start()]),
            match["title"],
            path,
        )
        for match in _FENCE.finditer(text)
        if language in (None, match["language"])
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


def sampled_text(request):
    """What an obedient model samples for the documentation's prompts."""
    schema = request.sampling_params.get("json_schema")
    if schema is not None:
        return '{"reasoning": "It is short.", "score": 8}' if "reasoning" in str(schema) else '{"product": 425}'
    _, _, question = request.text.rpartition("<|im_start|>user\n")
    result = re.search(r"<tool_response>\s*(-?\d+)", question)
    if result:
        return f"It is \\boxed{{{result[1]}}}."
    factors = re.search(r"(\d+) \* (\d+)", question)
    if factors is not None and '"multiply"' in request.text:
        return call("multiply", a=int(factors[1]), b=int(factors[2]))
    if factors is not None and '"calculator"' in request.text:
        return call("calculator", expression=factors[0])
    return "I don't know."


def run_page(page, name, model, folder, patch):
    """Run the blocks of a page in order, in one namespace and one empty folder, against a scripted server.

    Python runs as written, a command of this project in a process of its own. A block with a title is a file, which
    is written first.

    Args:
        page: Path of the page.
        name: Name of the model on the page.
        model: Its tokenizer or processor.
        folder: A temporary folder.
        patch: pytest's `monkeypatch`.
    """
    from support import slime  # needs PyTorch, which reading a page does not

    model.save_pretrained(folder / name)
    work = folder / "work"
    work.mkdir()
    patch.chdir(work)
    patch.syspath_prepend(str(work))
    patch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = getattr(model, "tokenizer", model)
    slime.install_slime(patch, tokenizer)
    namespace = {"__name__": "__docs__"}
    server = ScriptedSGLang(tokenizer, sampled_text, model_path=str(folder / name))
    with mock.patch.dict(TOOL_PARSER_REGISTRY), server.serve() as base_url:

        def localized(text):
            return text.replace(name, str(folder / name)).replace(URL, base_url)

        for block in blocks(None, page):
            if block.title:
                (work / block.title).write_text(localized(block.text), encoding="utf-8")
            if block.language == "python":
                block.run(namespace, localized)
            elif block.language == "bash":
                _run_commands(localized(block.text), f"{page}:{block.line}")


def _run_commands(text, where):
    """Run the commands of this project in a block of shell lines."""
    scripts = Path(sys.executable).parent
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    for line in text.replace("\\\n", " ").splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        # tests/integration serves.
        if command in ("strands-sglang", "strands-env") and arguments[:1] != ["serve"]:
            run = run_fork(scripts / command, *arguments, timeout=240, environment=environment)
            assert run.returncode == 0, f"{where}: {line}\n{run.stdout}{run.stderr}"
