"""Real SGLang servers for the tests, started on first use, and stopped when the session ends in any way.

Each worker of pytest-xdist starts its own servers; `--dist loadfile` keeps the tests of a file on one worker.

`tiny_server` serves a tiny random Qwen3 (fast, exact float32, nonsense), `tiny_moe_server` one with experts,
`tiny_vl_server` a tiny random Qwen2.5-VL, and `smollm_server` SmolLM2-135M-Instruct (a language model). With
`--sglang-base-url=URL` the first and the last are the server at that URL. Tests that use another one or the fixture
`own_server` are then skipped: they need a certain model, or would disturb other users of the server.
"""

import os
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from strands_sglang import local
from support.real_servers import LOG_EVERYTHING


class Server(namedtuple("Server", ["base_url", "model_path", "log_path", "chat_template"], defaults=[None])):
    """A running SGLang server.

    `model_path` is where its tokenizer can be loaded from; `log_path` is None for a server that the tests did
    not start; `chat_template` is one with a place for tools that fits the model (None: the tokenizer's own has).
    """


@pytest.fixture(scope="session")
def external_server(request):
    """The server named by `--sglang-base-url`, if there is one."""
    url = request.config.getoption("--sglang-base-url")
    if url is None:
        return None
    response = httpx.get(f"{url.rstrip('/')}/model_info", timeout=30, trust_env=False)
    response.raise_for_status()
    tokenizer_path = Path(os.environ.get("SGLANG_TOKENIZER") or response.json()["tokenizer_path"])
    if not tokenizer_path.is_dir():
        pytest.exit(f"the server's tokenizer {tokenizer_path} is not on this machine: set SGLANG_TOKENIZER", 4)
    return Server(base_url=url.rstrip("/"), model_path=tokenizer_path, log_path=None)


@pytest.fixture
def own_server(external_server):
    """Skip the test on a given server: for tests that need a certain model, or that stop or pause the server."""
    if external_server is not None:
        pytest.skip("needs a server that the tests started themselves, and --sglang-base-url names another")


@pytest.fixture(scope="session")
def sglang_python():
    """The Python of the SGLang environment, installed if necessary (minutes, the first time on a machine)."""
    try:
        return local.ensure_sglang()
    except local.UnsupportedPlatformError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def serve(request, external_server, tmp_path_factory):
    """Start a server with a model of `local`; `certain` is what a given server is not known to have."""
    with ExitStack() as servers:

        def start(name, ensure_model, *arguments, certain=None, chat_template=None):
            if external_server is not None:
                if certain:
                    pytest.skip(f"needs {certain}, and --sglang-base-url names another server")
                return external_server
            python = request.getfixturevalue("sglang_python")
            log_path = tmp_path_factory.mktemp(name) / "server.log"
            model_path = ensure_model(python)
            # Two servers and the tests share the cores: with more threads, the servers mostly wait for each other.
            settings = local.ServerSettings(threads=1, extra_arguments=arguments)
            started = local.start_server(python, model_path, settings=settings, log_path=log_path)
            return Server(servers.enter_context(started).base_url, model_path, log_path, chat_template)

        yield start


@pytest.fixture(scope="session")
def tiny_server(serve):
    """A server with a tiny random Qwen3: vocabulary 512, context 4096, ChatML with tools as its chat template."""
    return serve("tiny_server", local.ensure_tiny_qwen3)


@pytest.fixture(scope="session")
def tiny_moe_server(serve):
    """A server with a tiny random Qwen3-MoE (3 layers, 8 experts, top 2) that returns routed experts on request."""
    return serve(
        "tiny_moe",
        local.ensure_tiny_qwen3_moe,
        "--enable-return-routed-experts",
        certain="a certain mixture-of-experts model",
    )


@pytest.fixture(scope="session")
def tiny_vl_server(serve):
    """A server with a tiny random Qwen2.5-VL, which takes images."""
    return serve(
        "tiny_vl",
        local.ensure_tiny_qwen2_5_vl,
        "--mm-attention-backend",
        "sdpa",
        certain="a certain model that takes images",
    )


@pytest.fixture(scope="session")
def smollm_server(serve):
    """A server with SmolLM2-135M-Instruct, 8192 tokens of context; its own chat template does not support tools.

    Its log has every request and answer (`support.real_servers.logged`).
    """
    template = local.CHATML_TOOLS_TEMPLATE.read_text(encoding="utf-8")
    return serve("smollm_server", local.ensure_smollm2, *LOG_EVERYTHING, chat_template=template)


# What takes longest begins first: a worker that takes it last would work while the other has nothing left.
LONGEST = ("test_ray", "test_forced_calls", "test_benchmarks", "test_commands", "test_routers", "test_exactness")


def pytest_collection_modifyitems(items):
    # The time limit is for a test, not for its fixtures that install and start a server.
    for item in items:
        if "tests/integration" in item.path.as_posix() and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300, func_only=True))
    places = {f"tests/integration/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-3:]), len(places)))
