"""The oldest SGLang that runs on a CPU as the current one does, in an environment of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from strands_sglang import local
from strands_sglang.local.cache import build_once
from strands_sglang.local.install import environment_python, sglang_environment
from strands_sglang.local.process import run_quietly
from strands_sglang.local.server import free_port, sglang_command

PINS = ("sglang==0.5.10.post1", "transformers==5.3.0", "tokenizers==0.22.2", "xgrammar==0.1.32")
"""Installed over a copy of the current environment: what this SGLang asks for of the packages that it is bound to."""

SHIM = Path(__file__).parent / "older_sglang"


def ensure_oldest_sglang(current: Path) -> Path:
    """The Python of an environment with it: a copy of the current one by hard links, and a few packages (20 s, 0.2 GB).

    Args:
        current: The current SGLang's Python, from `local.ensure_sglang`.
    """
    source = current.parent.parent
    pins = hashlib.sha256("\n".join(PINS).encode()).hexdigest()[:12]

    def install(directory: Path) -> None:
        directory.rmdir()
        shutil.copytree(source, directory, copy_function=os.link, symlinks=True)
        (directory / ".complete").unlink()
        pip = [environment_python(directory), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_quietly([*pip, "--no-deps", *PINS], f"installing {PINS[0]}")

    return environment_python(build_once(source.parent / f"{source.name}-oldest-{pins}", install))


def launch_oldest(python: Path, model_path: Path, log_path: Path) -> local.LocalServer:
    """Start it, without waiting until it is healthy."""
    host, settings = "127.0.0.1", local.ServerSettings(threads=1)
    port = free_port(host)
    env = sglang_environment(threads=settings.thread_count)
    return local.LocalServer(
        sglang_command(python, model_path, host=host, port=port, settings=settings),
        host=host,
        port=port,
        env={**env, "PYTHONPATH": f"{SHIM}{os.pathsep}{env['PYTHONPATH']}"},
        model_path=model_path,
        log_path=log_path,
    )
