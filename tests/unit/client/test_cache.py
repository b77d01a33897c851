from __future__ import annotations

import threading
from argparse import Namespace

import pytest
import transformers

from strands_sglang.client.cache import get_client, get_client_from_slime_args, get_tokenizer


def test_the_same_settings_give_the_same_client():
    client = get_client("http://shared:1", timeout=5)
    assert get_client("http://shared:1/", timeout=5, max_retries=60) is client
    assert get_client("http://shared:1", timeout=6) is not client
    assert get_client("http://shared:2", timeout=5) is not client
    assert client.timeout == 5


def test_the_same_slime_arguments_give_the_same_client():
    args = {"sglang_router_ip": "shared", "sglang_router_port": 3, "sglang_server_concurrency": 4}
    client = get_client_from_slime_args(Namespace(**args))
    assert get_client_from_slime_args(Namespace(**args)) is client
    assert get_client_from_slime_args(Namespace(**args), timeout=300.0) is not client
    assert (client.base_url, client.max_connections) == ("http://shared:3", 4)


def test_settings_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="hashable"):
        get_client("http://shared:1", timeout=[])
    with pytest.raises(TypeError, match="nonsense"):
        get_client("http://shared:1", nonsense=1)


@pytest.fixture
def loads(monkeypatch):
    """What transformers was asked to load; "broken" cannot be."""
    asked = []

    def from_pretrained(path, **kwargs):
        asked.append((path, kwargs))
        if path.endswith("broken"):
            raise ValueError("needs trust_remote_code=True")
        return object()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    return asked


def test_a_tokenizer_is_loaded_once_from_any_thread(tmp_path, loads):
    found = []
    threads = [threading.Thread(target=lambda: found.append(get_tokenizer(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert get_tokenizer(str(tmp_path)) is found[0]
    assert loads == [(str(tmp_path), {"trust_remote_code": False})]
    assert get_tokenizer(tmp_path, use_fast=False) is not found[0]


def test_a_tokenizer_that_could_not_be_loaded_is_tried_again(tmp_path, loads):
    (tmp_path / "broken").mkdir()
    for _ in range(2):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            get_tokenizer(tmp_path / "broken")
    assert len(loads) == 2


@pytest.mark.parametrize("path", ["{tmp}/missing", "./missing", "~/no-such-model", "a/b/c", "missing/"])
def test_a_path_that_does_not_exist_is_called_that(tmp_path, loads, path):
    """Row D6."""
    path = path.format(tmp=tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^{path}: no such folder$"):
        get_tokenizer(path)
    (tmp_path / "file.json").touch()
    with pytest.raises(NotADirectoryError, match="no folder of a model but a file"):
        get_tokenizer(tmp_path / "file.json")
    assert not loads


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_hub_that_cannot_be_reached_is_told_unless_the_model_is_in_the_cache(tmp_path, loads, monkeypatch, is_cached):
    """Row D6."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    if is_cached:
        (tmp_path / "models--foo--bar").mkdir()
        get_tokenizer("foo/bar")
    else:
        with pytest.raises(ConnectionError, match="foo/bar: .*http://127.0.0.1:9 cannot be reached"):
            get_tokenizer("foo/bar")
    assert bool(loads) is is_cached


def test_clients_with_the_same_headers_are_one():
    with_key = get_client("http://127.0.0.1:9", headers={"Authorization": "Bearer a"})
    assert with_key is get_client("http://127.0.0.1:9", headers={"Authorization": "Bearer a"})
    assert with_key is not get_client("http://127.0.0.1:9", headers={"Authorization": "Bearer b"})


def test_the_same_servers_give_the_same_client_in_any_spelling():
    both = get_client(["http://a:1", "http://b:1/"])
    assert both is get_client(("http://a:1/", "http://b:1"))
    assert both.base_urls == ("http://a:1", "http://b:1")
    assert get_client(["http://a:1"]) is get_client("http://a:1")
    assert get_client("http://a:1") is not both
