"""Names of SGLang's compiled kernels, which older SGLang imports by the dozen while it loads; none is ever called."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import NoReturn


class Absent:
    """A kernel, or a table of them, that is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} needs SGLang's compiled kernels, which are not installed")


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of this package; each has every name."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: getattr(Absent(module.__name__), name)  # type: ignore[method-assign]


def __getattr__(name: str) -> Absent:
    return getattr(Absent(__name__), name)  # type: ignore[no-any-return]


sys.meta_path.append(Submodules())
