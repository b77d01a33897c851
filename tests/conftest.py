import gc

import hypothesis
import pytest

from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support import agents
from support.agents import build_chatml_tokenizer
from support.judge import Judge

pytest.register_assert_rewrite("support.parser_checks")

# A deadline per example measures the machine's other work, not ours; pytest-timeout catches what hangs.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    # Here and not next to the fixtures that use it: pytest reads options from the first conftest files only.
    parser.addoption(
        "--sglang-base-url",
        metavar="URL",
        help="run the integration tests against this SGLang server instead of starting servers on the CPU",
    )


@pytest.fixture(scope="session")
def chatml_tokenizer():
    """A small real ChatML tokenizer; `support.agents.build_chatml_tokenizer` has variants of it."""
    return build_chatml_tokenizer()


@pytest.fixture
def small_heap():
    """Hides from the garbage collector what exists before the test and would take it a second to walk."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def rollout(chatml_tokenizer):
    """Sets up a scripted server (arguments in `server=`) and a model on it (the other arguments)."""

    def make(answers, *, server=None, **config):
        scripted = ScriptedSGLang(chatml_tokenizer, answers, **(server or {}))
        return scripted, SGLangModel(tokenizer=chatml_tokenizer, client=scripted.client(), **config)

    return make


@pytest.fixture(params=["inferred", "hooks"])
def judged(chatml_tokenizer, request, monkeypatch):
    """Sets up a scripted server (arguments in `server=`), a model on it, and a judge that watches both.

    What agents keep is inferred from later calls, or reported by the model's hooks.
    """
    has_hooks = request.param == "hooks"
    monkeypatch.setattr(agents, "LISTENING", has_hooks)

    def make(answers, *, server=None, model_class=SGLangModel, **config):
        scripted = ScriptedSGLang(chatml_tokenizer, answers, **(server or {}))
        judge = Judge(scripted, model_class(tokenizer=chatml_tokenizer, client=scripted.client(), **config))
        judge.has_hooks = has_hooks
        return judge

    return make
