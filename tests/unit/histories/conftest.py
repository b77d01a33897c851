from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang

pytest.register_assert_rewrite("support.judge")

from support.judge import Judge  # noqa: E402  (its assertions have to be rewritten first)


@pytest.fixture
def judged(chatml_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Judge]:
    """Sets up a scripted server (arguments in `server=`), a model on it, and a judge that watches both."""

    def make(
        answers: Any,
        *,
        server: dict[str, Any] | None = None,
        model_class: type[SGLangModel] = SGLangModel,
        **config: Any,
    ) -> Judge:
        scripted = ScriptedSGLang(chatml_tokenizer, answers, **(server or {}))
        return Judge(scripted, model_class(tokenizer=chatml_tokenizer, client=scripted.client(), **config))

    return make
