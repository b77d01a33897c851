"""Prints the paths that a Python interpreter needs; the interpreter runs this file itself.

The list begins with the executable. All paths follow: the executable, the standard library, the packages and the shared
libraries. It contains no whole prefix, which may be the root of a project, and no entries of `sys.path` that come from
an environment variable or an editable install.
"""

import json
import os
import site
import sys
import sysconfig


def executable() -> str:
    """Return the file to run, with links resolved except in a virtual environment, whose path leads to its packages."""
    if not sys.executable:
        sys.exit("sys.executable is empty")
    return sys.executable if sys.prefix != sys.base_prefix else os.path.realpath(sys.executable)


def needed() -> list[str]:
    """Return all paths that the interpreter needs, some of which may not exist."""
    started = executable()
    paths = [started, f"{sys.prefix}/pyvenv.cfg", f"{os.path.dirname(started)}/pyvenv.cfg"]
    paths += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [path for path in site.getsitepackages([sys.prefix, sys.base_prefix]) if path in sys.path]
    for name in {"lib", getattr(sys, "platlibdir", "lib")}:
        libraries = f"{sys.base_prefix}/{name}"
        if os.path.isdir(f"{sys.base_prefix}/conda-meta"):
            paths.append(libraries)
        elif os.path.isdir(libraries):
            paths += [f"{libraries}/{file}" for file in os.listdir(libraries) if ".so" in file]
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:  # libraries from other places
            fields = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    except OSError:
        fields = []
    paths += [field[5] for field in fields if len(field) == 6 and field[5].startswith("/") and ".so" in field[5]]
    return [*paths, *map(os.path.realpath, paths)]


if __name__ == "__main__":
    found = {os.path.normpath(path) for path in needed() if os.path.exists(path)} - {"/"}
    print("\n" + json.dumps([os.fsencode(path).hex() for path in [executable(), *sorted(found)]]))
