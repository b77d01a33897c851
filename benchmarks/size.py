"""The size of the code: statements without docstrings, files, functions, parameters; compared with another checkout.

    python benchmarks/size.py [BEFORE] [--tree .]

For tests, only code outside test functions counts: imports, fixtures, helpers. A function is public if the
`__init__.py` of a package exports it or its class, and its name has no leading underscore.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_PARAMETERS = 7
FOLDERS = ["src", "src/strands_sglang", "src/strands_env", "src/strands_sglang/testing"]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Measured:
    """A function: its place, its lines without decorators, its parameters without `self`."""

    name: str
    lines: int
    parameters: int
    is_public: bool


def statements(node: ast.AST, *, tests: bool = True) -> int:
    """Count the statements under `node`, without docstrings, and without test functions if `tests` is false."""
    count = 0
    if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
        count -= 1
    for child in ast.iter_child_nodes(node):
        if tests or not (isinstance(child, Function) and child.name.startswith("test_")):
            count += isinstance(child, ast.stmt) + statements(child, tests=tests)
    return count


def functions(node: ast.AST, path: str, exported: set[str], is_public: bool = True) -> Iterator[Measured]:
    """Yield all functions under `node`; at the top of a module, those in `exported` are public."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | Function):
            yield from functions(child, path, exported, is_public)
            continue
        if isinstance(node, ast.Module):
            public = child.name in exported
        else:
            public = is_public and (not child.name.startswith("_") or child.name == "__init__")
        if isinstance(child, Function):
            taken = child.args
            parameters = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
            names = [each.arg for each in parameters if each is not None and each.arg not in ("self", "cls")]
            yield Measured(f"{path}:{child.name}", child.end_lineno - child.lineno + 1, len(names), public)
            public = False  # nested functions are not reachable by name
        separator = "." if ":" in path else ":"
        yield from functions(child, f"{path}{separator}{child.name}", exported, public)


def exports(modules: Iterable[ast.Module]) -> set[str]:
    """Return the names that modules import from their own package."""
    imports = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if node.level for alias in node.names}


def report(tree: Path) -> dict[str, float | list[str]]:
    """Return each figure by its name; a list is shown line by line."""
    parsed = {path.relative_to(tree): ast.parse(path.read_text()) for path in sorted(tree.glob("src/**/*.py"))}
    figures: dict[str, float | list[str]] = {}
    for folder in FOLDERS:
        inside = [module for path, module in parsed.items() if path.is_relative_to(folder)]
        figures[f"statements in {folder}"] = sum(map(statements, inside))
    tests = [ast.parse(path.read_text()) for path in tree.glob("tests/**/*.py")]
    figures["statements in tests, outside test functions"] = sum(statements(module, tests=False) for module in tests)

    lengths = {path: len((tree / path).read_text().splitlines()) for path in parsed}
    figures["files in src"] = len(lengths)
    figures["median file in src, lines"] = statistics.median(lengths.values())
    figures["longest file in src, lines"] = max(lengths.values())
    figures["longest files"] = [f"{lengths[path]:4} {path}" for path in sorted(lengths, key=lengths.get)[:-4:-1]]

    exported = exports(module for path, module in parsed.items() if path.name == "__init__.py")
    found = [each for path, module in parsed.items() for each in functions(module, str(path), exported)]
    found.sort(key=lambda each: -each.lines)
    figures["longest function, lines"] = found[0].lines
    figures["longest functions"] = [f"{each.lines:4} {each.name}" for each in found[:5]]
    many = sorted((each for each in found if each.parameters > MAX_PARAMETERS), key=lambda each: -each.parameters)
    for kind, is_public in (("internal", False), ("public", True)):
        shown = [f"{each.parameters:4} {each.name}" for each in many if each.is_public == is_public]
        figures[f"{kind} functions of more than {MAX_PARAMETERS} parameters"] = len(shown)
        figures[f"{kind}, their parameters"] = shown
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="checkout to compare with")
    parser.add_argument("--tree", type=Path, default=Path(), help="checkout to measure")
    arguments = parser.parse_args()
    before = report(arguments.before) if arguments.before else {}
    for name, figure in report(arguments.tree).items():
        if isinstance(figure, list):
            print(*(f"    {line}" for line in figure), sep="\n", end="\n" if figure else "")
        elif name in before:
            print(f"{name:55} {before[name]:>9,} -> {figure:>7,}  {figure / max(before[name], 1):7.1%}")
        else:
            print(f"{name:55} {figure:>9,}")


if __name__ == "__main__":
    main()
