"""Notices that another package which is also called `strands_sglang` or `strands_env` is installed beside this one.

A public package index has distributions named `strands-sglang` and `strands-env` that are not this project, so an
environment can come to hold both: one installed over the other, on another entry of `sys.path`, or left behind in part.
Which of the two a process imports then depends on the order of its path. Promise: importing this package in such an
environment warns once and says what was found where and what to do; the check uses no network, takes less than a
millisecond, and never keeps anyone from importing. What it cannot see is an environment in which the other one was
imported in this one's place.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata

logger = logging.getLogger(__name__)

DISTRIBUTION = "strands-sglang"
ENTRY_POINT = "strands_sglang.cli:main"
"""In the metadata of this project's distribution, and not in that of the other one."""

OTHER_DISTRIBUTIONS = ("strands-env",)
"""Distributions that bring a package of this project's; nothing of this project has their names."""

PACKAGES = ("strands_sglang", "strands_env")

MODULES_OF_OTHERS = ("limiter.py", "models.py", "rollout.py", "sglang.py", "token.py", "tool_parser.py", "utils.py")
"""Modules that the other `strands_sglang` has had and this one never had."""

UNKNOWN_VERSION = "0+unknown"
"""The version of a checkout that was never installed."""

_HERE = os.path.dirname(os.path.abspath(__file__))


def own_version() -> str:
    """The version of this project's distribution; `UNKNOWN_VERSION` if it is not installed, only on the path."""
    own = (found for found in metadata.distributions(name=DISTRIBUTION) if _is_own(found))
    return next((found.version for found in own), UNKNOWN_VERSION)


def find_other_installs(package_dir: str = _HERE, search_path: Iterable[str] | None = None) -> list[str]:
    """What else is installed under the names of this project.

    Args:
        package_dir: The folder of this project's `strands_sglang`.
        search_path: Folders in which packages are looked for; by default `sys.path`.

    Returns:
        What was found and where, one phrase each; empty if there is nothing.
    """
    folders = [entry or os.getcwd() for entry in (sys.path if search_path is None else search_path)]
    found = [*_distributions(folders), *_packages(package_dir, folders), *_leftover_modules(package_dir)]
    return list(dict.fromkeys(found))


def warn_of_other_installs() -> None:
    """Warn if anything else is installed under the names of this project. Never raises, except as a warning may."""
    try:
        found = find_other_installs()
    except Exception as error:  # unreadable folders, broken metadata: no reason to fail an import
        logger.debug("error=<%s> | cannot look for other installations", error)
        return
    if found:
        warnings.warn(
            f"another package uses the names of this one ({_HERE}): {'; '.join(found)}. Which one is imported depends "
            "on sys.path. Keep one: run `pip uninstall strands-sglang strands-env` until nothing is left, delete what "
            "remains in the places named here, and install this project again from source.",
            stacklevel=3,
        )


def _distributions(folders: list[str]) -> Iterator[str]:
    others = [found for found in metadata.distributions(name=DISTRIBUTION, path=folders) if not _is_own(found)]
    for name in OTHER_DISTRIBUTIONS:
        others.extend(metadata.distributions(name=name, path=folders))
    for other in others:
        yield f"{other.metadata['Name']} {other.version} in {other.locate_file('')}"


def _is_own(distribution: metadata.Distribution) -> bool:
    return ENTRY_POINT in (distribution.read_text("entry_points.txt") or "")


def _packages(package_dir: str, folders: list[str]) -> Iterator[str]:
    own = os.path.realpath(os.path.dirname(package_dir))
    mark = os.path.join(PACKAGES[0], os.path.basename(__file__))
    for folder in folders:
        for package in PACKAGES:
            module = os.path.join(folder, package, "__init__.py")
            # Another copy of this project (a second checkout, say) has the mark, and is not another package.
            if os.path.isfile(module) and not os.path.isfile(os.path.join(folder, mark)):
                if os.path.realpath(folder) != own:
                    yield f"a package {package} in {folder}"


def _leftover_modules(package_dir: str) -> Iterator[str]:
    left = sorted(set(MODULES_OF_OTHERS).intersection(os.listdir(package_dir)))
    if left:
        yield f"modules of another package ({', '.join(left)}) in {package_dir}"
