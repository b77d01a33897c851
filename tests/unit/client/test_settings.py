from __future__ import annotations

from argparse import Namespace

import pytest

from strands_sglang.client.client import normalize_base_url, slime_client_arguments


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://h:30000", "http://h:30000"),
        ("http://h:30000/", "http://h:30000"),
        (" https://h//\n", "https://h"),
        ("http://h/behind/a/proxy/", "http://h/behind/a/proxy"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_addresses_lose_white_space_and_slashes_at_their_ends(given, normal):
    assert normalize_base_url(given) == normal


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("h:30000", "write 'http://h:30000'"),
        ("127.0.0.1:30000", "write 'http://127.0.0.1:30000'"),
        ("ftp://h", "write 'http://h'"),
        ("", "http://127.0.0.1:30000"),
        ("http://h:30000/v1", "write 'http://h:30000'"),
        ("http://h:30000/v1/", "write 'http://h:30000'"),
        ("http://h:30000/v1/chat/completions", "write 'http://h:30000'"),
        ("http://h:30000/generate", "write 'http://h:30000'"),
        ("http://", "names no host"),
        ("http://h:port", "not a URL"),
        ("http://h?a=1", "query"),
        (None, "must be a string"),
        (30000, "must be a string"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_what_to_write(given, said):
    with pytest.raises(ValueError, match="base_url") as caught:
        normalize_base_url(given)
    assert said in str(caught.value)


def slime_args(**changes):
    return Namespace(**{"sglang_router_ip": "h", "sglang_router_port": 1, "sglang_server_concurrency": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "connections"),
    [
        ({"rollout_num_engines": 3, "rollout_num_gpus": 100, "rollout_num_gpus_per_engine": 1}, 24),
        ({"rollout_num_engines": None, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 4}, 32),
        ({"rollout_num_gpus": None, "rollout_num_gpus_per_engine": None}, 8),
        ({"rollout_num_gpus": 0, "rollout_num_gpus_per_engine": 0}, 8),
        ({"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 8}, 8),
        ({"sglang_server_concurrency": None}, 512),
        ({}, 8),
    ],
)
def test_slimes_concurrency_is_that_of_all_engines_with_any_way_to_leave_them_out(changes, connections):
    assert slime_client_arguments(slime_args(**changes))["max_connections"] == connections


@pytest.mark.parametrize(
    ("ip", "base_url"),
    [("10.0.0.1", "http://10.0.0.1:1"), ("fe80::1", "http://[fe80::1]:1"), ("[::1]", "http://[::1]:1")],
)
def test_slimes_router_address_may_be_of_either_ip_version(ip, base_url):
    assert slime_client_arguments(slime_args(sglang_router_ip=ip))["base_url"] == base_url


def test_a_router_that_has_no_address_yet_is_told_unless_one_is_given():
    with pytest.raises(ValueError, match="sglang_router_ip is None"):
        slime_client_arguments(slime_args(sglang_router_ip=None))
    assert slime_client_arguments(Namespace(), base_url="http://h:1")["base_url"] == "http://h:1"
