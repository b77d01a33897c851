from __future__ import annotations

import hypothesis
import pytest
from transformers import PreTrainedTokenizerFast

from support.tokenizers import build_chatml_tokenizer

# A deadline per example measures the machine's other work, not ours; pytest-timeout catches what hangs.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here and not beside the fixtures that use it: pytest reads options from the first conftest files only.
    parser.addoption(
        "--sglang-base-url",
        metavar="URL",
        help="run the integration tests against this SGLang server instead of starting servers on the CPU",
    )


@pytest.fixture(scope="session")
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """A small real ChatML tokenizer; `support.tokenizers.build_chatml_tokenizer` has variants of it."""
    return build_chatml_tokenizer()
