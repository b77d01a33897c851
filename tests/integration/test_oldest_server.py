"""The oldest supported SGLang: what is sent, sampled, recorded and aborted there is as exact as on the current one.

The tests are those of the current server, with another server behind the same fixture.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from integration.test_client_integration import (  # noqa: F401
    client,
    test_a_cancelled_request_leaves_the_server_idle_within_a_second,
    test_a_generation_has_the_ids_and_logprobs_that_were_asked_for,
    test_a_request_without_prompt_logprobs_takes_its_prompt_from_the_cache,
    test_closing_the_client_returns_what_was_generated_until_then,
    test_every_way_to_fill_the_context_is_told_as_such,
    test_the_server_tells_its_health_its_model_and_its_context,
)
from integration.test_exactness import (  # noqa: F401
    test_a_conversation_of_30_tool_turns_is_one_sequence,
    test_logprobs_equal_a_float32_forward_pass,
    wire,
)
from strands_sglang import SGLangClient, SGLangDecodingError, SGLangModel, get_tokenizer, local
from support.agents import make_agent
from support.oldest_server import PINS, ensure_oldest_sglang, launch_oldest


@pytest.fixture(scope="module")
def tiny_server(external_server, sglang_python, tmp_path_factory):
    if external_server is not None:
        pytest.skip("needs a server of a certain version, and --sglang-base-url names another")
    log_path = tmp_path_factory.mktemp("oldest_server") / "server.log"
    model_path = local.ensure_tiny_qwen3(sglang_python)
    with launch_oldest(ensure_oldest_sglang(sglang_python), model_path, log_path) as server:
        server.wait_until_healthy()
        yield server


async def test_it_is_the_version_that_the_readme_names(tiny_server):
    version = httpx.get(f"{tiny_server.base_url}/get_server_info", trust_env=False).json()["version"]
    assert PINS[0] == f"sglang=={version}"
    assert f"SGLang {version}" in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


async def test_sampling_masks_that_it_does_not_know_are_an_error(tiny_server):
    model = SGLangModel(
        tokenizer=get_tokenizer(str(tiny_server.model_path)),
        client=SGLangClient(tiny_server.base_url),
        sampling_params={"top_k": 5, "max_new_tokens": 5},
        request_fields={"return_sampling_mask": True},
    )
    with pytest.raises(SGLangDecodingError, match="the server is older"):
        await make_agent(model).invoke_async("Go on.")
