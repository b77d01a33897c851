"""What is there of sandboxed programs, told apart from those of tests that run at the same time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import strands_env.sandbox

NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
"""Before a command: run it without any privilege."""
WITHOUT_MOUNTS = ("setpriv", "--bounding-set", "-sys_admin")
"""Before a command: run it as root in a plain container is."""

_RUN_ALL = """
import asyncio, dataclasses, json, logging, sys
from sandbox import PythonSandbox, SandboxLimits, available_modes
asked = json.load(sys.stdin)
why = available_modes()[asked["mode"]]
ran = []
if why is None:
    sandbox = PythonSandbox(SandboxLimits(**asked["limits"]), min_mode=asked["mode"])
    for program in asked["programs"]:
        try:
            ran.append(dataclasses.asdict(asyncio.run(sandbox.run(program))))
        except Exception as error:
            ran.append({"error": repr(error)})
print(json.dumps({"why": why, "ran": ran}))
"""


def run_as(
    user: tuple[str, ...], python: str, mode: str, programs: list[str], **limits: Any
) -> list[dict[str, Any]] | str:
    """Run programs in a mode in a process of another user: what came of each, or why there is no such mode."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copytree(Path(strands_env.sandbox.__file__).parent, folder / "sandbox")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        asked = json.dumps({"mode": mode, "programs": programs, "limits": limits})
        ran = subprocess.run(
            [*user, python, "-B", "-c", _RUN_ALL], cwd=folder, input=asked, capture_output=True, text=True, timeout=120
        )
    assert ran.returncode == 0, ran
    told = json.loads(ran.stdout)
    return str(told["why"]) if told["why"] is not None else list(told["ran"])


def running(owner: int, folder: str | Path) -> list[int]:
    """Processes of the sandbox of one owner: what watches, and programs that have their folder under `folder`.

    The programs in a namespace end with the process that watches there, which looks like the one outside.
    """
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            command = (process / "cmdline").read_bytes()
            if b"inside.launcher" in command and f'"parent": {owner},'.encode() in command:
                found.append(int(process.name))
            elif os.readlink(process / "cwd").startswith(f"{folder}/"):
                found.append(int(process.name))
        except OSError:
            pass
    return found


def watchers(owner: int) -> list[int]:
    """The processes that watch one owner's programs, from the outermost one on."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if b"inside.launcher" in command and f'"parent": {owner},'.encode() in command:
            found.append(int(process.name))
    return sorted(found)


def programs_of(watching: list[int]) -> list[int]:
    """All that come from the processes that watch, without those."""
    parents = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit():
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    family = set(watching)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return [pid for pid in family - set(watching) if b"main.py" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
