"""Model factories: what they make, what they share, what they refuse."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strands_env.core.models import (
    bedrock_model_factory,
    build_model_factory,
    openai_model_factory,
    sglang_model_factory,
)
from strands_env.utils import clear_clients, get_cached_client, get_cached_client_from_slime_args
from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.environments import ANSWER, ASK, CALL, CalculatorEnv
from support.slime import slime_args

URL = "http://localhost:30000"


@pytest.fixture
def folder(chatml_tokenizer: Any, tmp_path: Path) -> Path:
    chatml_tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _own_clients() -> Any:
    clear_clients()
    yield
    clear_clients()


async def test_a_factory_makes_models_that_share_the_client_and_nothing_that_can_change(chatml_tokenizer: Any) -> None:
    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER])
    client = server.client()
    params = {"temperature": 0.5}
    factory = sglang_model_factory(
        model_id="a-model", tokenizer=chatml_tokenizer, client=client, sampling_params=params
    )
    first, second = factory(), factory()
    assert first is not second and first.client is second.client is client
    assert first.chat_template is second.chat_template
    first.update_config(sampling_params={"temperature": 0.1})
    assert second.get_config()["sampling_params"] == params
    assert (await CalculatorEnv(factory).step(ASK)).observation.tokens is not None
    assert server.requests[0].sampling_params["temperature"] == 0.5


def test_what_is_known_of_a_chat_template_outlives_the_episodes(chatml_tokenizer: Any) -> None:
    import gc

    factory = sglang_model_factory(tokenizer=chatml_tokenizer, base_url=URL, chat_template="{{ messages[0].content }}")
    number = id(factory().chat_template)
    gc.collect()
    assert id(factory().chat_template) == number


@pytest.mark.parametrize("form", [str, Path])
def test_the_tokenizer_may_be_a_folder(form: Any, folder: Path) -> None:
    factory = sglang_model_factory(tokenizer=form(folder), base_url=URL)
    assert factory().tokenizer is factory().tokenizer
    assert sglang_model_factory(model_id=str(folder), base_url=URL)().get_config()["model_id"] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "exactly one of client= and base_url="),
        ({"base_url": URL, "temperature": 1.0}, "unknown configuration: temperature"),
        ({"base_url": URL, "tool_parser": "no-such"}, "no tool parser named"),
        ({"base_url": URL, "on_abort": "ignore"}, "on_abort"),
        ({"base_url": URL, "tokenizer": None}, "tokenizer="),
    ],
)
def test_what_cannot_work_is_an_error_when_the_factory_is_made(
    arguments: dict[str, Any], told: str, chatml_tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=told):
        sglang_model_factory(**{"tokenizer": chatml_tokenizer, **arguments})


@pytest.fixture
def openai(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(OpenAIModel=lambda **arguments: SimpleNamespace(arguments=arguments))
    monkeypatch.setitem(sys.modules, "strands.models.openai", module)  # type: ignore[arg-type]


@pytest.mark.usefixtures("openai")
def test_openais_factory_speaks_openais_words() -> None:
    model: Any = openai_model_factory(
        model_id="gpt", sampling_params={"max_new_tokens": 7, "temperature": 0.2}, base_url=f"{URL}/v1", api_key="k"
    )()
    assert model.arguments == {
        "model_id": "gpt",
        "params": {"max_tokens": 7, "temperature": 0.2},
        "client_args": {"base_url": f"{URL}/v1", "api_key": "k"},
    }


@pytest.mark.parametrize(
    ("module", "factory", "extra"),
    [
        ("strands.models.openai", openai_model_factory, "openai"),
        ("strands.models.bedrock", bedrock_model_factory, "bedrock"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, factory: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"strands-sglang\[{extra}\]"):
        factory(model_id="m")


def test_bedrocks_factory_shares_one_model_with_its_costly_client() -> None:
    factory = bedrock_model_factory(
        model_id="m", region_name="eu-west-1", sampling_params={"max_new_tokens": 7, "top_p": 0.5}
    )
    config: Any = factory().get_config()
    assert factory() is factory()
    assert (config["model_id"], config["max_tokens"], config["top_p"]) == ("m", 7, 0.5)


@pytest.mark.parametrize("params", [{"top_k": 3}, {"max_tokens": 1, "max_new_tokens": 2}], ids=str)
def test_bedrock_refuses_what_it_does_not_have(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="top_k|which are the same"):
        bedrock_model_factory(model_id="m", region_name="eu-west-1", sampling_params=params)


def test_a_factory_from_plain_data(folder: Path) -> None:
    factory = build_model_factory(
        {
            "backend": "sglang",
            "base_url": URL,
            "tokenizer": str(folder),
            "tool_parser": "hermes",
            "sampling_params": {"temperature": 0.7},
            "client": {"max_retries": 3},
            "config": {"enable_thinking": False},
        }
    )
    model = factory()
    assert isinstance(model, SGLangModel)
    assert model.client is get_cached_client(URL, max_retries=3)
    assert model.get_config()["sampling_params"] == {"temperature": 0.7}


@pytest.mark.usefixtures("openai")
def test_openai_and_bedrock_from_plain_data() -> None:
    made: Any = build_model_factory({"backend": "openai", "model_id": "gpt", "client": {"timeout": 5}})()
    assert made.arguments["client_args"] == {"timeout": 5}
    bedrock: Any = build_model_factory({"backend": "bedrock", "model_id": "m", "region_name": "eu-west-1"})()
    assert bedrock.get_config()["model_id"] == "m"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "backend"),
        ({"backend": "vllm"}, "vllm"),
        ({"backend": "openai"}, "model_id: Field required"),
        ({"backend": "sglang", "temperature": 1.0}, "temperature: Extra inputs are not permitted"),
        ({"backend": "sglang", "base_url": 7}, "base_url"),
        ({"backend": "sglang", "client": {"no_such": 1}}, "no_such"),
        ({"backend": "sglang", "config": {"no_such": 1}}, "no_such"),
        ({"backend": "sglang", "base_url": f"{URL}/v1"}, "ends in /v1"),
    ],
    ids=str,
)
def test_plain_data_that_cannot_be_used_is_refused(config: dict[str, Any], told: str, folder: Path) -> None:
    given = {"tokenizer": str(folder), **config} if config.get("backend") == "sglang" else config
    with pytest.raises(ValueError, match=told):
        build_model_factory(given)


def test_clients_are_shared_until_they_are_cleared() -> None:
    client = get_cached_client_from_slime_args(slime_args(URL))
    assert get_cached_client_from_slime_args(slime_args(URL)) is client
    assert clear_clients() == [client]
    assert get_cached_client_from_slime_args(slime_args(URL)) is not client
    assert clear_clients() and clear_clients() == []
