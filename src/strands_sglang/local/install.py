"""SGLang in a virtual environment of its own, because it pins much and the project should not be bound by it.

Promises: `ensure_sglang` returns a Python that can start the pinned SGLang; it installs once per
machine and set of pins, and says in one sentence when the machine cannot run it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .cache import Progress, build_once, home, say
from .process import LocalServerError, clean_environment, run_quietly

HERE = Path(__file__).parent
SHIM_DIRECTORY = HERE / "shim"
REQUIREMENTS = HERE / "requirements-sglang.txt"
REQUIREMENTS_WITHOUT_DEPENDENCIES = HERE / "requirements-sglang-nodeps.txt"

PIP_OPTIONS = ("--quiet", "--disable-pip-version-check")
SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13))  # that the pinned SGLang is published for
MINIMUM_GLIBC = (2, 34)  # from the platform tag of its wheels, manylinux_2_34


class UnsupportedPlatformError(LocalServerError):
    """SGLang's CPU mode cannot run on this machine; a running server elsewhere still can be used."""


def require_platform() -> None:
    """Check that this machine can run the pinned SGLang on its CPU.

    Raises:
        UnsupportedPlatformError: It cannot; the message says why and what to do.
    """
    system, machine = platform.system(), platform.machine()
    library, version = platform.libc_ver()
    if (system, machine) != ("Linux", "x86_64"):
        found = f"{system} on {machine}"
    elif library != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_GLIBC:
        found = f"Linux with {library or 'an unknown C library'} {version}".rstrip()
    else:
        return
    raise UnsupportedPlatformError(
        "SGLang's CPU mode runs on Linux x86-64 with glibc {}.{} or newer only, and this is {}: ".format(
            *MINIMUM_GLIBC, found
        )
        + "set SGLANG_BASE_URL to the address of an SGLang server that runs elsewhere."
    )


def find_python() -> Path:
    """Return a Python interpreter that the pinned SGLang is published for: this one, or else one on the PATH.

    Raises:
        UnsupportedPlatformError: There is none.
    """
    if sys.version_info[:2] in SUPPORTED_PYTHONS:
        return Path(sys.executable)
    for version in SUPPORTED_PYTHONS:
        candidate = shutil.which("python{}.{}".format(*version))
        if candidate and python_version(Path(candidate)) == version:
            return Path(candidate)
    raise UnsupportedPlatformError(
        "SGLang's CPU mode needs Python {}.{} to {}.{}".format(*SUPPORTED_PYTHONS[0], *SUPPORTED_PYTHONS[-1])
        + ", and this is Python {}.{} with none of those on the PATH: ".format(*sys.version_info)
        + "install one, or set SGLANG_BASE_URL to the address of a running SGLang server."
    )


def python_version(python: Path) -> tuple[int, int] | None:
    """Return the version of an interpreter that can make virtual environments, or None if it cannot or does not run."""
    # A version manager's placeholder is on the PATH also for versions that are switched off: only running it tells.
    question = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", question], capture_output=True, text=True, timeout=30, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return (int(answer[0]), int(answer[1]))


def environment_directory(version: tuple[int, int]) -> Path:
    """Return where the environment of the current pins for a Python version lives."""
    pins = hashlib.sha256(REQUIREMENTS.read_bytes() + REQUIREMENTS_WITHOUT_DEPENDENCIES.read_bytes()).hexdigest()
    return home() / "envs" / "sglang-{}-py{}{}".format(pins[:12], *version)


def environment_python(directory: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return directory / "bin" / "python"


def ensure_sglang(progress: Progress = say) -> Path:
    """Return the Python of an environment with the pinned SGLang, installing it first if need be.

    Args:
        progress: Takes the lines that tell how the installation goes on.

    Raises:
        UnsupportedPlatformError: This machine cannot run it.
        LocalServerError: An installation step failed; the message ends with its last output.
    """
    require_platform()
    base = find_python()
    version = python_version(base)
    if version is None:
        raise LocalServerError(
            f"{base} cannot make virtual environments: the modules venv and ensurepip are missing "
            "(on Debian and Ubuntu: install the package python3-venv)."
        )

    def install(directory: Path) -> None:
        progress(f"installing SGLang for the CPU into {directory} (once; two to three minutes, 2.5 GB)")
        started = time.monotonic()
        pip: list[str | Path] = [environment_python(directory), "-m", "pip", "install", *PIP_OPTIONS]
        steps: list[tuple[str, list[str | Path]]] = [
            ("[1/3] creating the environment", [base, "-m", "venv", directory]),
            ("[2/3] installing PyTorch and the server's dependencies", [*pip, "-r", REQUIREMENTS]),
            ("[3/3] installing SGLang", [*pip, "--no-deps", "-r", REQUIREMENTS_WITHOUT_DEPENDENCIES]),
        ]
        for what, command in steps:
            run_quietly(command, what, progress=progress)
        progress(f"installed SGLang in {time.monotonic() - started:.0f} s")

    # The interpreter is a link to the one that made the environment, which may have been removed since.
    directory = build_once(
        environment_directory(version), install, usable=lambda d: environment_python(d).exists(), progress=progress
    )
    return environment_python(directory)


def sglang_environment(*, threads: int) -> dict[str, str]:
    """Return the variables under which SGLang and the scripts of this package run in its environment.

    Args:
        threads: Threads for the matrix products of one process.
    """
    return clean_environment(
        PYTHONPATH=os.fspath(SHIM_DIRECTORY),
        PYTHONUNBUFFERED="1",
        SGLANG_USE_CPU_ENGINE="1",
        OMP_NUM_THREADS=str(threads),
        # Threads that spin while they wait take the cores from what they wait for; by default they do so for
        # milliseconds, which on two cores with other work halves the speed.
        GOMP_SPINCOUNT="3000",
        # Models are folders here: nothing should wait for a hub that may not answer.
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
    )
