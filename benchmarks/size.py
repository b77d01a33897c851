"""The size of the code: tokens, statements, files, functions, parameters; compared with another checkout.

    python benchmarks/size.py [BEFORE] [--tree .]

A code token is a token of Python's tokenizer that is no comment, docstring, line break or indentation, so that denser
writing gains nothing. Python 3.12 splits f-strings into tokens, so measure with 3.11. For tests, statements count only
outside test functions: imports, fixtures, helpers. A function is public if the
`__init__.py` of a package exports it or its class, and its name has no leading underscore.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_PARAMETERS = 7
FOLDERS = ["src", "src/strands_sglang", "src/strands_env", "src/strands_sglang/testing"]
CORE = "strands_sglang.model.model"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENCODING, tokenize.ENDMARKER}


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


def code_tokens(path: Path) -> int:
    """Count the code tokens of a file."""
    text = path.read_text()
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, node.end_lineno + 1))
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_documentation = token.type == tokenize.STRING and token.start[0] in documentation
        count += token.type not in LAYOUT and not is_documentation
    return count


def needed(src: Path, module: str) -> set[Path]:
    """Return the files that a module of ours imports, those imported inside functions too."""
    found: set[Path] = set()
    modules = [module]
    while modules:
        name = modules.pop()
        base = src.joinpath(*name.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if not path.exists() or path in found:
                continue
            found.add(path)
            package = path.relative_to(src).parent.parts
            for node in imports(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    modules += [alias.name for alias in node.names]
                    continue
                start = package[: len(package) - node.level + 1] if node.level else ()
                source = ".".join([*start, *([node.module] if node.module else [])])
                modules += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return found


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports under `node` that run; those for type checkers do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imports(other)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from imports(child)


def dense(module: ast.Module) -> tuple[int, int]:
    """Count conditional expressions inside others, and comprehensions with two `for` or more."""
    nested = many = 0
    for node in ast.walk(module):
        if isinstance(node, ast.IfExp):
            nested += any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)
        elif isinstance(node, Comprehension):
            many += len(node.generators) > 1
    return nested, many


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
    tokens = {path: code_tokens(path) for folder in ("src", "tests") for path in tree.glob(f"{folder}/**/*.py")}
    for folder in [*FOLDERS, "tests"]:
        weights = [count for path, count in tokens.items() if path.is_relative_to(tree / folder)]
        figures[f"code tokens in {folder}"] = sum(weights)
    core = needed(tree / "src", CORE)
    figures["code tokens that SGLangModel imports"] = sum(tokens[path] for path in core)
    figures["files that SGLangModel imports"] = len(core)
    nested, many = zip(*map(dense, parsed.values()), strict=True)
    figures["nested conditional expressions in src"] = sum(nested)
    figures["comprehensions with several for in src"] = sum(many)
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
