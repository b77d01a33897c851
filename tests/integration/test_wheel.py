"""The wheel, installed where nothing else is: its declared dependencies are enough for what the README promises."""

import os
import subprocess
import sys
import venv

import pytest

from support.readme import ROOT, blocks

pytestmark = pytest.mark.registry

QUICK_START = """
import sys

from transformers import AutoTokenizer

from strands_sglang.testing import ScriptedSGLang

source, folder = sys.argv[1:]
call = '<tool_call>\\n{"name": "multiply", "arguments": {"a": 25, "b": 17}}\\n</tool_call>'
server = ScriptedSGLang(AutoTokenizer.from_pretrained(folder), [call, "25 * 17 is 425."])
with server.serve() as base_url:
    with open(source) as file:
        text = file.read().replace("http://localhost:30000", base_url).replace("Qwen/Qwen3-4B-Instruct-2507", folder)
    exec(compile(text, source, "exec"))
assert "<tool_response>\\n425\\n</tool_response>" in server.requests[1].text
assert tm.loss_mask.count(1) == sum(logprob not in (None, 0.0) for logprob in tm.logprobs) > 0
assert "torch" not in sys.modules
print("installed at", __import__("strands_sglang").__file__)
"""

IMPORTS = """
import importlib, pkgutil, sys

failures = {}
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, f"{root}."):
        parts = module.name.split(".")
        # What is private, and programs that other processes run.
        if any(part.startswith("_") for part in parts) or {"scripts", "shim"} & set(parts):
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failures[module.name] = repr(error)
sys.exit("\\n".join(f"{name}: {error}" for name, error in failures.items()) or None)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _checked(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of a new environment with the wheel and without extras, far from the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder)
    python = folder / "bin" / "python"
    _install(python, wheel)
    return python


def _install(python, requirement):
    _checked(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", requirement)


def _checked(*command, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    ran = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


def test_the_quick_start_runs_without_extras(python, chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    quick_start = next(block for block in blocks("python") if block.section == "Quick start")
    (tmp_path / "quick_start.py").write_text(quick_start.text)
    printed = _checked(python, "-c", QUICK_START, tmp_path / "quick_start.py", tmp_path / "model", cwd=tmp_path)
    assert "25 * 17 is 425." in printed
    assert "elsewhere" in printed.splitlines()[-1]


def test_every_module_of_the_provider_imports_without_extras(python, tmp_path):
    _checked(python, "-c", IMPORTS, "strands_sglang", cwd=tmp_path)


def test_every_module_of_the_environments_imports_with_their_extra(python, wheel, tmp_path):
    _install(python, f"{wheel}[env]")
    _checked(python, "-c", IMPORTS, "strands_env", cwd=tmp_path)
