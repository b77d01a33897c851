import hypothesis
import pytest

from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.agents import build_chatml_tokenizer

pytest.register_assert_rewrite("support.parser_checks")

# A deadline per example measures the machine's other work, not ours; pytest-timeout catches what hangs.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    # Here and not beside the fixtures that use it: pytest reads options from the first conftest files only.
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
def rollout(chatml_tokenizer):
    """Sets up a scripted server (arguments in `server=`) and a model on it (the other arguments)."""

    def make(answers, *, server=None, **config):
        scripted = ScriptedSGLang(chatml_tokenizer, answers, **(server or {}))
        return scripted, SGLangModel(tokenizer=chatml_tokenizer, client=scripted.client(), **config)

    return make
