"""What a client is told: addresses, limits, and where a trainer's arguments keep them.

Promise: a setting that cannot work is a `ValueError` that says what to write instead, when the client is made and not
at its first request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx

SLIME_CONCURRENCY_PER_ENGINE = 512
"""slime's default of `--sglang-server-concurrency`."""

ENDPOINT_SUFFIXES = ("/v1", "/generate", "/v1/chat/completions", "/v1/completions")
"""Paths that people copy along with an address; everything here is below the server's root."""


def normalize_base_url(base_url: str) -> str:
    """The address of a server without white space around it or slashes at its end.

    Raises:
        ValueError: It is not an http(s) address of a server's root; says what to write instead.
    """
    if not isinstance(base_url, str):
        raise ValueError(f"base_url must be a string such as 'http://127.0.0.1:30000', got {base_url!r}")
    address = base_url.strip()
    if not address.lower().startswith(("http://", "https://")):
        guess = address.split("://")[-1] or "127.0.0.1:30000"
        raise ValueError(f"base_url {base_url!r} has no http:// or https:// in front: write 'http://{guess}'")
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url {base_url!r} is not a URL: {error}") from error
    if not url.host:
        raise ValueError(f"base_url {base_url!r} names no host: write e.g. 'http://127.0.0.1:30000'")
    address = address.rstrip("/")
    if url.query or url.fragment:
        raise ValueError(f"base_url {base_url!r} has a query or a fragment: leave it out")
    for suffix in sorted(ENDPOINT_SUFFIXES, key=len, reverse=True):
        if url.path.rstrip("/").endswith(suffix):
            raise ValueError(
                f"base_url {base_url!r} ends in {suffix}: drop that and write {address[: -len(suffix)]!r} "
                "(SGLang's own /generate is used, not its OpenAI endpoints)"
            )
    return address


def normalize_base_urls(base_url: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of one server or of several, as `normalize_base_url` gives them.

    Raises:
        ValueError: There is none, one is twice there, or one is not an http(s) address of a server's root.
    """
    if isinstance(base_url, str) or not isinstance(base_url, Sequence):
        return (normalize_base_url(base_url),)
    addresses = tuple(normalize_base_url(one) for one in base_url)
    if not addresses:
        raise ValueError("base_url is an empty list: name at least one server")
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError(f"base_url names {', '.join(twice)} more than once: name each server once")
    return addresses


def checked_routing_key(key: Any) -> str | None:
    """The routing key itself, if it can be sent as a header; None stays None.

    Raises:
        ValueError: It is not a string of printable ASCII characters.
    """
    if key is None or (isinstance(key, str) and key.strip() == key != "" and key.isascii() and key.isprintable()):
        return key
    raise ValueError(f"routing_key must be a string of printable ASCII characters or None, got {key!r}")


def checked_number(name: str, value: Any, *, at_least: float | None = None, above: float | None = None) -> Any:
    """The value itself, if it is a finite number within its bounds.

    Raises:
        ValueError: It is not; names the setting.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number and (at_least is None or value >= at_least) and (above is None or value > above):
        return value
    bound = f"at least {at_least:g}" if at_least is not None else f"above {above:g}"
    raise ValueError(f"{name} must be a number {bound}, got {value!r}")


def slime_client_arguments(args: Any, **overrides: Any) -> dict[str, Any]:
    """The arguments of `SGLangClient` that suit slime's: as many connections as its engines serve at a time.

    slime's names: `sglang_router_ip`, `sglang_router_port`, `sglang_server_concurrency`, `rollout_num_engines`,
    `rollout_num_gpus`, `rollout_num_gpus_per_engine`; the last three may be None or 0 with external engines.

    Args:
        args: slime's (or miles') parsed arguments.
        **overrides: Arguments of `SGLangClient`, which win.

    Raises:
        ValueError: There is no router address, neither in `args` nor as `base_url`.
    """
    arguments = {
        "max_connections": _slime_concurrency(args),
        "timeout": None,
        "max_retries": 60,
        "retry_delay": 1.0,
        **overrides,
    }
    if "base_url" not in arguments:
        ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
        if not ip or not port:
            raise ValueError(
                f"sglang_router_ip is {ip!r} and sglang_router_port is {port!r}: slime sets them when it starts its "
                "router; before that, give --sglang-router-ip and --sglang-router-port, or pass base_url="
            )
        host = f"[{ip}]" if ":" in ip and not ip.startswith("[") else ip
        arguments["base_url"] = f"http://{host}:{port}"
    return arguments


def _slime_concurrency(args: Any) -> int:
    per_engine = getattr(args, "sglang_server_concurrency", None) or SLIME_CONCURRENCY_PER_ENGINE
    engines = getattr(args, "rollout_num_engines", None)
    if not engines:
        gpus = getattr(args, "rollout_num_gpus", None) or 0
        engines = gpus // (getattr(args, "rollout_num_gpus_per_engine", None) or 1)
    return int(per_engine) * max(1, int(engines))
