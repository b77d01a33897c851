"""Run the trainers' tests: `python tests/trainers/run.py [TRAINER ...] [-- arguments of pytest]`.

Each folder here is a trainer, or another library that ours works with. Its tests run in their own environment with its
published packages, as requirements.txt pins them, and once more for each requirements-VERSION.txt. Environments are
made once per machine and list of packages, in the project's cache.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from strands_sglang.local.install import PIP_OPTIONS, build_once, environment_python, home
from strands_sglang.local.process import LocalServerError, run_quietly

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REQUIREMENTS = {
    path.parent.name + path.stem.removeprefix("requirements"): path for path in HERE.glob("*/requirements*.txt")
}
LONGEST = ("trl", "packages", "skyrl", "verl", "harbor", "harbor-0.24")  # one that is begun last runs alone
TRAINERS = [*LONGEST, *sorted(REQUIREMENTS.keys() - LONGEST)]
WITHOUT_TORCH = ("packages", "trackers", "harbor", "harbor-0.24")  # the other tests compute the gradient on paper
NEWER_PYTHON = {"harbor": "3.12", "harbor-0.24": "3.12"}
OWN = ["pytest>=8", "pytest-asyncio>=1.0", "pytest-timeout>=2.3", "filelock>=3.13"]


def environment(trainer):
    """Return the Python of a trainer's environment; make it first if necessary.

    `requirements.txt` is installed with what this project depends on, then `nodeps.txt` without its dependencies.
    """
    requirements = REQUIREMENTS[trainer]
    python = python_of(NEWER_PYTHON[trainer]) if trainer in NEWER_PYTHON else sys.executable
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    torch = [line for line in constraints if line.startswith("torch==") and trainer not in WITHOUT_TORCH]
    nodeps = requirements.with_name("nodeps.txt")
    versions = [sys.version, *filter(None, [NEWER_PYTHON.get(trainer)])]
    text = "\n".join([*versions, *project, *torch, *OWN, requirements.read_text()])
    text += nodeps.read_text() if nodeps.exists() else ""

    def install(directory):
        print(f"installing {trainer} into {directory} (once; minutes)", flush=True)
        pip = [environment_python(directory), "-m", "pip", "install", *PIP_OPTIONS]
        run_quietly([python, "-m", "venv", directory], "creating the environment")
        if torch:
            run_quietly([*pip, *torch], "installing PyTorch")
        run_quietly([*pip, *torch, *project, *OWN, "-r", requirements], f"installing {trainer}")
        if nodeps.exists():
            run_quietly([*pip, "--no-deps", "-r", nodeps], "installing packages without their dependencies")

    name = f"{trainer}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    usable = lambda directory: environment_python(directory).exists()  # noqa: E731
    return environment_python(build_once(home() / "trainers" / name, install, usable=usable))


def python_of(version):
    """Return a Python of a version: on the PATH, or one of pyenv's."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for python in filter(None, found):
        if subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return python
    raise LocalServerError(f"Harbor needs Python {version}, and there is none: put python{version} on the PATH")


def run(trainer, installed, arguments):
    """Run the tests of one trainer with its environment's Python; print what they say, and return their exit status."""
    python = installed.result()
    paths = [ROOT / "src", ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ,
        "PROJECT_PYTHON": sys.executable,  # for programs that run in both environments
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",  # two wait for each other on a busy machine
    }
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--confcutdir", HERE, REQUIREMENTS[trainer].parent]
    print(f"testing {trainer}", flush=True)
    with tempfile.TemporaryFile("w+") as said:
        status = subprocess.run([*command, *arguments], cwd=ROOT, env=variables, stdout=said, stderr=said).returncode
        said.seek(0)
        print(f"== {trainer}\n{said.read()}", flush=True)
    return status


def main(arguments):
    """Run the tests of the named trainers, or of all; return whether any failed."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, rest = arguments[:at] or TRAINERS, arguments[at + 1 :]
    unknown = set(chosen) - set(TRAINERS)
    if unknown:
        sys.exit(f"error: no trainer {', '.join(sorted(unknown))}; there are {', '.join(TRAINERS)}")
    # Most tests use one core, so two trainers run at once; meanwhile the next environment is made.
    with ThreadPoolExecutor(max_workers=1) as installer, ThreadPoolExecutor(max_workers=2) as testers:
        installed = [installer.submit(environment, trainer) for trainer in chosen]
        statuses = list(testers.map(run, chosen, installed, [rest] * len(chosen)))
    return any(statuses)  # negative for a signal


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LocalServerError as failure:
        sys.exit(f"error: {failure}")
