"""The routers that people put in front of SGLang servers, in an environment of their own, and one running as a process.

`ensure_routers` installs the pinned versions once per machine, as `strands_sglang.local` does with SGLang.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from strands_sglang.local.cache import build_once, home
from strands_sglang.local.install import environment_python, find_python, python_version
from strands_sglang.local.process import GuardedProcess, clean_environment, run_quietly, tail
from strands_sglang.local.server import free_port

REQUIREMENTS = Path(__file__).parent / "requirements-routers.txt"

LAUNCHERS = {
    "sglang-router": ("-m", "sglang_router.launch_router"),
    "smg": ("-m", "smg", "launch"),
}
START_DEADLINE_S = 120.0


def ensure_routers() -> Path:
    """The Python of an environment with both routers; installed if need be, which takes about 20 s."""
    base = find_python()
    version = python_version(base)
    assert version is not None, f"{base} cannot make virtual environments"

    def install(directory: Path) -> None:
        run_quietly([base, "-m", "venv", directory], f"creating an environment for routers in {directory}")
        pip = [environment_python(directory), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_quietly([*pip, "-r", REQUIREMENTS], "installing sglang-router and smg")

    pins = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    directory = home() / "envs" / "routers-{}-py{}{}".format(pins, *version)
    return environment_python(build_once(directory, install, usable=lambda d: environment_python(d).exists()))


class Router:
    """A running router in front of some workers. A context manager, which stops it."""

    def __init__(self, python: Path, name: str, workers: Sequence[str], log_path: Path, *arguments: str) -> None:
        """Start it and wait until it has found its workers.

        Args:
            python: From `ensure_routers`.
            name: One of `LAUNCHERS`.
            workers: Their addresses.
            log_path: File for its output.
            *arguments: Further ones for its command line.
        """
        port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.name = name
        self.base_url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        command = [python, *LAUNCHERS[name], "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(metrics), "--worker-urls", *workers, *arguments]
        self._process = GuardedProcess(command, env=clean_environment(PYTHONUNBUFFERED="1"), log_path=log_path)
        try:
            self._wait(len(workers))
        except BaseException:
            self.stop()
            raise

    def _wait(self, workers: int) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        with httpx.Client(base_url=self.base_url, trust_env=False, timeout=5.0) as http:
            while True:
                try:
                    ready = http.get("/readiness").json()
                    if ready.get("healthy_workers") == workers:
                        return
                except (httpx.TransportError, ValueError):
                    pass
                code = self._process.exit_code
                assert code is None, f"{self.name} ended with exit code {code}:\n{tail(self.log_path)}"
                assert time.monotonic() < deadline, f"{self.name} did not get ready:\n{tail(self.log_path)}"
                time.sleep(0.1)

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End its process."""
        self._process.stop()
