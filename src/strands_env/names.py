"""What options of `strands-env` name: environments, rewards and benchmarks of this package, of others, and your own.

Other packages declare theirs as entry points. Benchmarks name themselves with `@register_eval`, so their entry
point is the module that has them:

    [project.entry-points."strands_env.environments"]
    shop = "my_package:ShopEnvironment"

    [project.entry-points."strands_env.rewards"]
    in-stock = "my_package:InStockReward"

    [project.entry-points."strands_env.benchmarks"]
    shop = "my_package.benchmarks"
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from strands_sglang.terminal import meant


@dataclass(frozen=True)
class Kind:
    """What an option names.

    Attributes:
        option: The option.
        group: Group of the entry points that other packages declare.
        built_in: Dotted paths of this package's, by name.
    """

    option: str
    group: str
    built_in: Mapping[str, str]

    def paths(self) -> dict[str, str]:
        """Dotted paths by name. No other package can take a name of this one."""
        others = {entry.name: entry.value for entry in declared(self.group)}
        return {**self.built_in, **others, **self.built_in}  # the first sets the order, the last wins


ENVIRONMENTS = Kind(
    "--env",
    "strands_env.environments",
    {
        "calculator": "strands_env.environments.CalculatorEnvironment",
        "python": "strands_env.environments.PythonEnvironment",
        "world": "strands_env.environments.WorldEnvironment",
        "agentcore": "strands_env.environments.AgentCoreCodeEnvironment",
        "mcp": "strands_env.environments.MCPServersEnvironment",
        "harbor": "strands_env.harbor.HarborEnvironment",
        "reasoning-gym": "strands_env.environments.ReasoningGymEnvironment",
    },
)

REWARDS = Kind(
    "--reward",
    "strands_env.rewards",
    {
        "math": "strands_env.rewards.MathReward",
        "exact": "strands_env.rewards.ExactMatchReward",
        "regex": "strands_env.rewards.RegexReward",
    },
)

BENCHMARKS = "strands_env.benchmarks"
"""Group of the entry points whose modules register benchmarks."""


def declared(group: str) -> list[EntryPoint]:
    """Entry points of installed packages, in the order of their names."""
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def load(kind: Kind, name: str) -> Any:
    """Import what an option names by a short name or a dotted path.

    A dotted path is `package.module.Name`, or with `:` before the last part. The current folder is searched too.

    Raises:
        ValueError: There is no such object.
    """
    paths = kind.paths()
    if name not in paths and "." not in name and ":" not in name:
        raise ValueError(f"{kind.option} {name}: {unknown(name, paths)}")
    return load_path(kind.option, name, paths.get(name, name))


def unknown(name: str, known: Iterable[str]) -> str:
    """Say that a name is not known, and which one may be meant."""
    names = list(known)
    return f"no such name{meant(name, names)} (known: {', '.join(names)}; or a dotted path such as package.module.Name)"


def load_path(option: str, name: str, path: str) -> Any:
    """Import the object at a dotted path.

    Args:
        option: Option that names it, for errors.
        name: What the option names.
        path: The dotted path.

    Raises:
        ValueError: There is no such object.
    """
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{option} {name}: {module_name} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{option} {name}: {module_name} has no {attribute}")
    return getattr(module, attribute)


def load_benchmark_class(name: str, known: Iterable[str]) -> Any:
    """The `Evaluator` subclass of a benchmark: one that an installed package registers, or at a dotted path.

    Args:
        name: Its registered name, its dotted path, or `reasoning_gym:FAMILY`.
        known: Names of the benchmarks of this package, for errors.

    Raises:
        ValueError: There is no such benchmark.
    """
    from .eval import Evaluator

    package, _, family = name.partition(":")
    if package == "reasoning_gym":
        from .environments import reasoning_gym_tasks

        return type(family, (Evaluator,), {"load_dataset": lambda self: reasoning_gym_tasks(family)})
    registered, failures = registered_benchmarks()
    if name in registered:
        return registered[name]
    if "." not in name and ":" not in name:
        failed = "".join(
            f"; the benchmarks of {package} cannot be imported: {why}" for package, why in failures.items()
        )
        raise ValueError(f"--benchmark {name}: {unknown(name, [*known, *registered])}{failed}")
    found = load_path("--benchmark", name, name)
    if not (inspect.isclass(found) and issubclass(found, Evaluator)):
        raise ValueError(f"--benchmark {name}: not a subclass of strands_env.eval.Evaluator")
    return found


def registered_benchmarks() -> tuple[dict[str, Any], dict[str, str]]:
    """The benchmarks that installed packages register, by name; and why modules cannot be imported, by module."""
    from .eval.evaluator import REGISTERED

    failures: dict[str, str] = {}
    for entry in declared(BENCHMARKS):
        try:
            entry.load()
        except Exception as error:  # the code of another package may raise anything
            failures[entry.value] = f"{type(error).__name__}: {error}"
    return dict(REGISTERED), failures


# --- what cannot run here ---


def why_not(kind: Kind, name: str) -> str | None:
    """Why what a name of a kind names cannot run on this machine; None if it can."""
    if name in kind.built_in:
        return _NEEDS[name]() if name in _NEEDS else None
    try:
        load(kind, name)
    except Exception as error:  # the code of another package may raise anything
        return re.sub(rf"^{kind.option} {re.escape(name)}: ", "", f"{error}") or type(error).__name__
    return None


def needs(package: str, extra: str) -> Callable[[], str | None]:
    """A function that says how to install a package of an extra; None if it is installed."""

    def missing() -> str | None:
        try:
            found = importlib.util.find_spec(package) is not None
        except ValueError:  # `sys.modules` has something without a spec
            found = sys.modules.get(package) is not None
        return None if found else f"{package} is not installed: pip install -e '.[{extra}]'"

    return missing


def _no_sandbox() -> str | None:
    from .sandbox import PythonSandbox, SandboxUnavailableError

    try:
        PythonSandbox()
    except SandboxUnavailableError as error:
        return str(error)
    return None


def _no_harbor() -> str | None:
    try:
        import strands_env.harbor  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def _no_world() -> str | None:
    from .sandbox import available_modes

    return available_modes()["namespaces"]


_NEEDS: dict[str, Callable[[], str | None]] = {
    "python": _no_sandbox,
    "world": _no_world,
    "agentcore": needs("bedrock_agentcore", "agentcore"),
    "harbor": _no_harbor,
    "math": needs("math_verify", "env"),
    "reasoning-gym": needs("reasoning_gym", "reasoning-gym"),
}
