"""Names of SGLang's compiled kernels, which older SGLang imports by the dozen while it loads; none is ever called."""

import importlib.abc
import importlib.machinery
import sys


class Absent:
    """A kernel, or a table of them, that is not installed."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} needs SGLang's compiled kernels, which are not installed")


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of this package; each has every name."""

    def find_spec(self, fullname, path, target=None):
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(Absent(module.__name__), name)


def __getattr__(name):
    return getattr(Absent(__name__), name)


sys.meta_path.append(Submodules())
