"""Runs what the guides of docs/ say, as a user would: their commands and code, each in a process of its own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.pages import blocks

ROOT = Path(__file__).parents[2]


def commands(trainer):
    """The commands of a guide that run an example, in order, each a list of words."""
    lines = [line for block in blocks("bash", ROOT / f"docs/guides/{trainer}.md") for line in block.text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("python examples/")]


def code_of(example):
    """The indented lines of an example's docstring that are Python: what a user puts into a program."""
    docstring = (ROOT / "examples" / example).read_text().split('"""')[1]
    return "\n".join(line[4:] for line in docstring.splitlines() if re.match(r" {4}(?!python )", line))


def run(words, folder, *, replace=None, more=(), before="", path=(), **environment):
    """Run a command of a guide in a process of its own, from the repository's root.

    Args:
        words: The command.
        folder: Folder of the model, in place of the guides' MODEL.
        replace: Further words of the guide, with what a test has instead, such as the server's address.
        more: Options that follow.
        before: Code that runs in the process first, for what this machine lacks.
        path: Folders that the guide puts on the PYTHONPATH.
        environment: Variables.

    Returns:
        What it printed, errors too.

    Raises:
        AssertionError: It failed.
    """
    given = {"MODEL": str(folder), "python": sys.executable, **(replace or {})}
    python, *arguments = [given.get(word, word) for word in words]
    if before:
        program = (
            f"import runpy, sys\n{before}\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        )
        arguments = ["-c", program, *arguments]
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([*(str(ROOT / one) for one in path), os.environ["PYTHONPATH"]]),
        **environment,
    }
    command = [python, *arguments, *map(str, more)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)  # pytest has the timeout
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def run_code(code, *arguments, path=(), **environment):
    """Run a program as `run` runs a command."""
    return run(["python", "-c", code], "MODEL", more=arguments, path=path, **environment)
