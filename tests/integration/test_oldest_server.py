"""The oldest supported SGLang: what is sent, sampled, recorded and aborted there is as exact as on the current one.

The tests are those of the current server, with another server behind the same fixture.
"""

import hashlib
import os
import shutil

import httpx
import pytest

from integration.test_client_integration import (  # noqa: F401
    client,
    test_cancelled_request_leaves_the_server_idle_in_a_second,
    test_closing_the_client_returns_partial_answers,
    test_every_way_to_fill_the_context_is_told_as_such,
    test_generation_has_the_requested_ids_and_logprobs,
    test_prompt_without_logprobs_comes_from_the_cache,
    test_the_server_tells_its_health_its_model_and_its_context,
)
from integration.test_exactness import (  # noqa: F401
    test_a_conversation_of_30_tool_turns_is_one_sequence,
    test_logprobs_equal_a_float32_forward_pass,
    wire,
)
from strands_sglang import SGLangClient, SGLangDecodingError, SGLangModel, get_tokenizer, local
from strands_sglang.local.install import build_once, environment_python, sglang_environment
from strands_sglang.local.process import run_quietly
from strands_sglang.local.server import free_port, sglang_command
from support.agents import make_agent
from support.pages import ROOT

# Installed over a copy of the current environment: what this SGLang asks for of the packages that it is bound to.
PINS = ("sglang==0.5.10.post1", "transformers==5.3.0", "tokenizers==0.22.2", "xgrammar==0.1.32")


@pytest.fixture(scope="module")
def tiny_server(external_server, sglang_python, tmp_path_factory):
    """A server of this version, whose Python is a copy of the current one by hard links (20 s, 0.2 GB)."""
    if external_server is not None:
        pytest.skip("needs a server of a certain version, and --sglang-base-url names another")
    source = sglang_python.parent.parent
    pins = hashlib.sha256("\n".join(PINS).encode()).hexdigest()[:12]

    def install(directory):
        directory.rmdir()
        shutil.copytree(source, directory, copy_function=os.link, symlinks=True)
        (directory / ".complete").unlink()
        pip = [environment_python(directory), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_quietly([*pip, "--no-deps", *PINS], f"installing {PINS[0]}")

    python = environment_python(build_once(source.parent / f"{source.name}-oldest-{pins}", install))
    model_path = local.ensure_tiny_qwen3(sglang_python)
    host, settings = "127.0.0.1", local.ServerSettings(threads=1)
    port, env = free_port(host), sglang_environment(threads=settings.thread_count)
    shim = ROOT / "tests/support/older_sglang"
    with local.LocalServer(
        sglang_command(python, model_path, host=host, port=port, settings=settings),
        host=host,
        port=port,
        env={**env, "PYTHONPATH": f"{shim}{os.pathsep}{env['PYTHONPATH']}"},
        model_path=model_path,
        log_path=tmp_path_factory.mktemp("oldest_server") / "server.log",
    ) as server:
        server.wait_until_healthy()
        yield server


async def test_it_is_the_version_that_the_documentation_names(tiny_server):
    version = httpx.get(f"{tiny_server.base_url}/get_server_info", timeout=60, trust_env=False).json()["version"]
    assert PINS[0] == f"sglang=={version}"
    assert f"SGLang {version} " in (ROOT / "docs/start/install.md").read_text(encoding="utf-8")


async def test_sampling_masks_that_it_does_not_know_are_an_error(tiny_server):
    model = SGLangModel(
        tokenizer=get_tokenizer(str(tiny_server.model_path)),
        client=SGLangClient(tiny_server.base_url),
        sampling_params={"top_k": 5, "max_new_tokens": 5},
        request_fields={"return_sampling_mask": True},
    )
    with pytest.raises(SGLangDecodingError, match="the server is too old"):
        await make_agent(model).invoke_async("Continue.")
