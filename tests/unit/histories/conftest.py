from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support import agents  # noqa: E402
from support.judge import Judge  # noqa: E402  (its assertions have to be rewritten first)


@pytest.fixture(params=["inferred", "told"])
def judged(
    chatml_tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Judge]:
    """Sets up a scripted server (arguments in `server=`), a model on it, and a judge that watches both.

    What became of an answer is inferred from later calls, or told by the hooks of the model, which agents get then.
    """
    told = request.param == "told"
    monkeypatch.setattr(agents, "LISTENING", told)

    def make(
        answers: Any,
        *,
        server: dict[str, Any] | None = None,
        model_class: type[SGLangModel] = SGLangModel,
        **config: Any,
    ) -> Judge:
        scripted = ScriptedSGLang(chatml_tokenizer, answers, **(server or {}))
        judge = Judge(scripted, model_class(tokenizer=chatml_tokenizer, client=scripted.client(), **config))
        judge.told = told
        return judge

    return make
