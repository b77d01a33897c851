"""Mutation test: the share of small changes to the library that its unit tests detect.

    python benchmarks/mutants.py --map map.json --out mutants.json [--tree .]

Needs `coverage`. The tree is copied to a temporary folder, where one site at a time is changed, tested and restored:

1. The unit tests run once with a coverage context per test. The result is saved in `--map`, and read from there later.
2. `--count` sites are drawn uniformly, with the commit's hash as the seed, from all sites that a test covers. A
   constant of a module or class counts as covered where its name is used, a default where its function is. `_Finder`
   has the operators; annotations, texts of messages, logging and `__main__` are not changed.
3. For each site, up to `--tests` tests that cover it run until one fails, those that cover the fewest lines first. Up
   to `--more` tests run on survivors. Every run is a fork of a process that has imported the dependencies but nothing
   of the library. Tests that also fail on the unchanged tree do not count. Reaching the time limit counts as caught.

With 120 mutants, a difference between two trees is meaningful from about 9 points on; `--count` draws more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

PRELOADED = (
    "aiohttp httpx_aiohttp hypothesis jsonschema math_verify mcp numpy openai PIL.Image pytest_asyncio pytest_timeout "
    "respx scipy.stats strands.models.openai strands.multiagent torch transformers xdist"
).split()
LEFT_OUT = ("test_linear_time.py",)  # it measures CPU time
IGNORED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "dist", "*.egg-info")
PYTEST = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
SETTLE_S = 30.0
"""Seconds for a run of tests, in addition to five times their duration while coverage was measured."""


# --- Sites ---


@dataclass(frozen=True)
class Site:
    """One possible change: `old`, at character `start` of `file`, becomes `new`.

    Attributes:
        lines: First and last of the lines of which a test must run one; None for code that runs at import.
        names: Names that an import assigns here; tests that run a line with one of them cover the site.
    """

    file: str
    line: int
    operator: str
    start: int
    old: str
    new: str
    lines: tuple[int, int] | None
    names: tuple[str, ...] = ()

    def changed(self, text: str) -> str:
        """Return the text of the file with this change."""
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


COMPARISONS = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}
ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: (r"\*\*", "*"),
    ast.BitOr: (r"\|", "&"),
    ast.BitAnd: ("&", "|"),
}
LEFT_ALONE = re.compile(r"(logger|logging|warnings)\.|if (TYPE_CHECKING|__name__)\b")
"""Beginnings of statements that are not changed."""


class _Finder:
    """Collects every site of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.found: list[Site] = []
        self._file, self._text = file, text
        self._starts = [0]  # of each line, in characters
        self._lines = text.splitlines(keepends=True)
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._where: tuple[tuple[int, int] | None, tuple[str, ...]] = (None, ())
        self._in_function = False
        self._children(ast.parse(text))

    def _span(self, node: Any) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _replace(self, operator: str, node: Any, new: str) -> None:
        start, end = self._span(node)
        self.found.append(Site(self._file, node.lineno, operator, start, self._text[start:end], new, *self._where))

    def _between(self, operator: str, left: Any, right: Any, pattern: str, new: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        if match := re.search(pattern, self._text[start:end]):
            line = self._text.count("\n", 0, start + match.start()) + 1
            where = start + match.start()
            self.found.append(Site(self._file, line, operator, where, match[0], new, *self._where))

    def _children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child)
            elif not isinstance(child, ast.arg | ast.JoinedStr):  # annotations, texts of messages
                self._expression(child)

    def _statement(self, node: ast.stmt) -> None:
        if LEFT_ALONE.match(self._text, self._span(node)[0]):
            return
        outside = self._where, self._in_function
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        if self._in_function:
            last = node.end_lineno if not body else max(node.lineno, getattr(body[0], "lineno", node.lineno) - 1)
            self._where = (node.lineno, last), ()
        else:
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            names = [getattr(part, "id", None) for target in targets if target for part in ast.walk(target)]
            self._where = None, tuple(filter(None, names))
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._where = (node.body[0].lineno, node.body[-1].end_lineno), ()
                for default in [*node.args.defaults, *node.args.kw_defaults]:
                    if isinstance(default, ast.Constant) and default.value is None:
                        self._replace("default None", default, "0")
                self._children(node.args)
                self._in_function = True
                for statement in node.body:
                    self._statement(statement)
                self._where, self._in_function = outside
                return
            case ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Raise() if self._in_function:
                self._replace("delete statement", node, "pass")
            case ast.Expr(value=ast.Call() | ast.Await()) if self._in_function:
                self._replace("delete statement", node, "pass")
            case ast.Return(value=ast.expr()) if getattr(node.value, "value", "") is not None:
                self._replace("return None", node.value, "None")
            case ast.Break() | ast.Continue():
                self._replace("break, continue", node, "continue" if isinstance(node, ast.Break) else "break")
            case ast.If() | ast.While():
                self._negate(node.test)
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            pattern, new = ARITHMETIC[type(node.op)]
            self._between("arithmetic", node.target, node.value, pattern + "=", new + "=")
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._expression(node.value)
        elif not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            self._children(node)
        self._where, self._in_function = outside

    def _negate(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            start, end = self._span(test)
            self._replace("negate condition", test, f"(not ({self._text[start:end]}))")

    def _expression(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, operator, right in zip(sides, node.ops, node.comparators, strict=False):
                    self._between("comparison", left, right, *COMPARISONS[type(operator)])
                for side in sides:
                    for text in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]:
                        if isinstance(text, ast.Constant) and isinstance(text.value, str):
                            self._replace("string in comparison", text, repr(f"mutant {text.value}"))
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self._between("and, or", left, right, rf"\b{old}\b", new)
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                self._between("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])
            case ast.UnaryOp(op=ast.Not()):
                start, end = self._span(node.operand)
                self._replace("remove not", node, f"({self._text[start:end]})")
            case ast.IfExp():
                self._negate(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    self._negate(test)
            case ast.Constant(value=bool()):
                self._replace("True, False", node, str(not node.value))
            case ast.Constant(value=int() | float()):
                self._replace("number + 1", node, f"({node.value + 1!r})")
                self._replace("number - 1", node, f"({node.value - 1!r})")
        self._children(node)


def all_sites(tree: Path) -> list[Site]:
    """Return every possible change of the library."""
    files = sorted(tree.glob("src/**/*.py"))
    return [site for path in files for site in _Finder(path.relative_to(tree).as_posix(), path.read_text()).found]


# --- Coverage ---


class _Contexts:
    """A pytest plugin that attributes the lines that a test and its fixtures run to the test."""

    def __init__(self, coverage: Any) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self._coverage = coverage

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        started = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - started
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def cover(tree: Path, files: list[str], out: Path) -> None:
    """Run test files and write the lines that each test runs; in its own process, because it traces."""
    import coverage

    measured = coverage.Coverage(data_file=None, source=[str(tree / "src")], messages=False, config_file=False)
    contexts = _Contexts(measured)
    measured.start()
    pytest.main([*PYTEST, *files], plugins=[contexts])
    measured.stop()
    data = measured.get_data()
    lines = {str(Path(file).relative_to(tree)): data.contexts_by_lineno(file) for file in data.measured_files()}
    out.write_text(json.dumps({"lines": lines, "seconds": contexts.seconds, "failed": sorted(contexts.failed)}))


@dataclass
class Coverage:
    """The lines that tests run, and the code on which they were measured.

    Attributes:
        digest: Of that code.
        tests: Names of the tests.
        seconds: How long each took.
        lines: Indices of the tests that run a line, by file and line number (a string, as in JSON).
    """

    digest: str
    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def measure(cls, tree: Path, processes: int) -> Coverage:
        """Run the unit tests in several processes, with the files distributed by size."""
        paths = sorted((tree / "tests/unit").rglob("test_*.py"), key=lambda path: -path.stat().st_size)
        files = [str(path.relative_to(tree)) for path in paths if path.name not in LEFT_OUT]
        outs = [tree / f"coverage-{index}.json" for index in range(processes)]
        running = []
        for index, out in enumerate(outs):
            command = [sys.executable, __file__, "--tree", str(tree), "--cover", str(out), *files[index::processes]]
            with open(out.with_suffix(".log"), "w") as log:
                running.append(subprocess.Popen(command, cwd=tree, env=environment(tree), stdout=log, stderr=log))
        merged = cls(digest(tree))
        for process, out in zip(running, outs, strict=True):
            if process.wait() or not out.exists():
                raise SystemExit(out.with_suffix(".log").read_text()[-4000:])
            merged.add(**json.loads(out.read_text()))
        return merged

    def add(self, lines: dict[str, dict[str, list[str]]], seconds: dict[str, float], failed: list[str]) -> None:
        """Merge the measurement of one process; a failed test covers nothing."""
        if failed:
            print("failed while coverage was measured, and left out:", *failed, sep="\n    ")
        passed = [test for test in seconds if test not in failed]
        indices = {test: len(self.tests) + index for index, test in enumerate(passed)}
        self.tests += passed
        self.seconds += [seconds[test] for test in passed]
        for file, by_line in lines.items():
            for line, tests in by_line.items():
                self.lines[file].setdefault(line, []).extend(indices[test] for test in tests if test in indices)


def digest(tree: Path) -> str:
    """Return a hash of the code and the tests of a tree."""
    whole = hashlib.sha256()
    for path in sorted([*tree.glob("src/**/*.py"), *tree.glob("tests/**/*.py")]):
        whole.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return whole.hexdigest()


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of processes that run tests: the copied tree, one thread, none of the user's caches."""
    single = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1")
    paths = {"PYTHONPATH": f"{tree / 'src'}:{tree / 'tests'}", "HOME": str(tree.parent / "home")}
    return os.environ | single | paths | {"TOKENIZERS_PARALLELISM": "false"}


def draw(tree: Path, coverage: Coverage, seed: str, count: int) -> list[tuple[Site, list[str]]]:
    """Return the sites that tests cover, each with its tests, those that cover the fewest lines first."""
    used: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for file in coverage.lines:
        for node in ast.walk(ast.parse((tree / file).read_text())):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                used[node.id if isinstance(node, ast.Name) else node.attr].add((file, str(node.lineno)))
    breadth = Counter(test for lines in coverage.lines.values() for tests in lines.values() for test in tests)
    sites = all_sites(tree)
    random.Random(seed).shuffle(sites)
    drawn = []
    for site in sites:
        if site.lines is not None:
            where = {(site.file, str(line)) for line in range(site.lines[0], site.lines[1] + 1)}
        else:
            where = set().union(*(used[name] for name in site.names))
        tests = {test for file, line in where for test in coverage.lines.get(file, {}).get(line, ())}
        if tests and _compiles(site.changed((tree / site.file).read_text())):
            ordered = sorted((breadth[test], coverage.tests[test]) for test in tests)
            drawn.append((site, [test for _, test in ordered]))
        if len(drawn) == count:
            break
    return drawn


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


# --- Test runs ---


class _Picked:
    """A pytest plugin that runs the given tests in order, and records those that fail."""

    def __init__(self, tests: list[str]) -> None:
        self.failed: list[str] = []
        self._order = {test: index for index, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


class Runner:
    """Runs tests on the current tree, each time in a fork of this process."""

    def __init__(self, tree: Path, seconds: dict[str, float]) -> None:
        self.tree = tree
        self._seconds = seconds
        self._out = tree.parent / "failed.json"
        self._version = 0
        os.environ.update(environment(tree))
        os.chdir(tree)
        Path(os.environ["HOME"]).mkdir(exist_ok=True)
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        for module in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        assert not any(name.startswith(("strands_sglang", "strands_env")) for name in sys.modules)

    @contextlib.contextmanager
    def changed(self, site: Site) -> Iterator[None]:
        """Make one change to the tree, and revert it."""
        path = self.tree / site.file
        text, modified = path.read_text(), int(path.stat().st_mtime)
        path.write_text(site.changed(text))
        # Bytecode is found by the modification second and size of its source, so no two versions may share both.
        self._version += 1
        os.utime(path, (modified, modified - self._version))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, (modified, modified))

    def failed(self, tests: list[str], *, only_first: bool = True) -> list[str] | None:
        """Return the tests that fail, "collection" if none of them can run, and None if the time is over."""
        self._out.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            self._run(tests, ["-x"] if only_first else [])
        ends_at = time.monotonic() + SETTLE_S + 5 * sum(self._seconds[test] for test in tests)
        while not (is_over := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < ends_at:
            time.sleep(0.02)
        _kill_group(child)
        if not is_over:
            os.waitpid(child, 0)
            return None
        return json.loads(self._out.read_text()) if self._out.exists() else ["crash"]

    def _run(self, tests: list[str], options: list[str]) -> None:
        """Run the tests in the fork."""
        code = 1
        try:
            os.setsid()
            output = os.open(self.tree.parent / "pytest.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(output, stream)
            picked = _Picked(tests)
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            code = pytest.main([*PYTEST, *options, *files], plugins=[picked])
            # A module that fails to import reports no test, and with `-x` pytest exits as if a test had failed.
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                picked.failed = picked.failed or ["collection"]
            self._out.write_text(json.dumps(picked.failed))
        finally:
            os._exit(int(code))


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


# --- Verdicts ---


@dataclass
class Mutant:
    """A change and its verdict: "caught", "timeout", "survived", or "unclear" if no run finished in time."""

    site: Site
    tests: list[str]
    verdict: str = ""
    caught_by: str | None = None
    tests_run: int = 0
    seconds: float = 0.0

    def judge(self, runner: Runner, limit: int, unfit: Collection[str]) -> None:
        """Run the site's tests on the changed tree."""
        started = time.monotonic()
        tests = [test for test in self.tests if test not in unfit][:limit]
        with runner.changed(self.site):
            failed = runner.failed(tests)
        self.tests_run, self.caught_by = len(tests), failed[0] if failed else None
        self.verdict = "caught" if failed else "survived"
        if failed is None:
            self.verdict = "unclear" if runner.failed(tests) is None else "timeout"
        self.seconds += time.monotonic() - started

    def as_json(self, tree: Path) -> dict[str, Any]:
        text = (tree / self.site.file).read_text()
        first = text.count("\n", 0, self.site.start)
        last = first + self.site.old.count("\n") + 1
        changed = self.site.changed(text).splitlines()
        return {
            "file": self.site.file,
            "line": first + 1,
            "operator": self.site.operator,
            "before": "\n".join(text.splitlines()[first:last]).strip(),
            "after": "\n".join(changed[first : first + self.site.new.count("\n") + 1]).strip(),
            **{name: value for name, value in asdict(self).items() if name not in ("site", "tests")},
            "tests_covering": len(self.tests),
        }


def judge_all(mutants: list[Mutant], runner: Runner, limit: int) -> None:
    """Give each mutant a verdict; judge those again that only a test caught which also fails without the change."""
    unfit: set[str] = set()
    confirmed: set[str] = {"collection", "crash"}
    pending = mutants
    while pending:
        for number, mutant in enumerate(pending):
            mutant.judge(runner, limit, unfit)
            site = mutant.site
            print(
                f"{number + 1:4}/{len(pending)} {mutant.verdict:8} {mutant.seconds:6.1f} s  {site.file}:{site.line} "
                f"{site.operator}  {mutant.caught_by or ''}",
                flush=True,
            )
        catchers = sorted({mutant.caught_by for mutant in mutants if mutant.caught_by} - confirmed)
        failed = runner.failed(catchers, only_first=False) if catchers else []
        unfit |= set(catchers if failed is None else failed)
        confirmed |= set(catchers) - unfit
        pending = [mutant for mutant in mutants if mutant.caught_by in unfit]


def summary(mutants: list[Mutant]) -> str:
    verdicts = Counter(mutant.verdict for mutant in mutants)
    found, total = verdicts["caught"] + verdicts["timeout"], len(mutants) - verdicts["unclear"]
    share = found / max(total, 1)
    margin = 1.96 * math.sqrt(share * (1 - share) / max(total, 1))
    return f"{found} of {total} found: {share:.1%} (95 % interval +- {margin:.1%}); {dict(verdicts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(), help="checkout to measure")
    parser.add_argument("--commit", help="commit whose hash is the seed; by default the checkout's HEAD")
    parser.add_argument("--map", type=Path, help="file for the coverage; measured if it is missing")
    parser.add_argument("--out", type=Path, help="file for the mutants and their verdicts, as JSON")
    parser.add_argument("--count", type=int, default=120, help="number of mutants; 0 only measures coverage")
    parser.add_argument("--tests", type=int, default=25, help="maximum number of tests per mutant")
    parser.add_argument("--more", type=int, default=0, help="maximum number of further tests per survivor")
    parser.add_argument("--processes", type=int, default=2, help="number of processes that measure coverage")
    parser.add_argument("--cover", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cover:
        return cover(arguments.tree, arguments.files, arguments.cover)
    if arguments.map is None or arguments.out is None:
        parser.error("--map and --out are required")
    tree, out, kept = (path.resolve() for path in (arguments.tree, arguments.out, arguments.map))
    revision = ["git", "-C", str(tree), "rev-parse", arguments.commit or "HEAD"]
    seed = subprocess.run(revision, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = shutil.copytree(tree, Path(folder, "tree"), ignore=IGNORED)
        if not kept.exists():
            kept.write_text(json.dumps(vars(Coverage.measure(copy, arguments.processes))))
        coverage = Coverage(**json.loads(kept.read_text()))
        if coverage.digest != digest(copy):
            raise SystemExit(f"{kept} was measured on other code than that of {tree}")
        mutants = [Mutant(*each) for each in draw(copy, coverage, seed, arguments.count)]
        runner = Runner(copy, dict(zip(coverage.tests, coverage.seconds, strict=True)))
        results: dict[str, Any] = {"commit": seed, "summary": {}}
        for limit in (arguments.tests, arguments.more):
            survivors = [mutant for mutant in mutants if mutant.verdict in ("", "survived")]
            if limit and survivors:
                judge_all(survivors, runner, limit)
                results["summary"][f"up to {limit} tests each"] = summary(mutants)
                results["mutants"] = [mutant.as_json(copy) for mutant in mutants]
                out.write_text(json.dumps(results, indent=1))
                print(f"{seed[:10]}, up to {limit} tests each: {summary(mutants)}", flush=True)
    return None


if __name__ == "__main__":
    main()
