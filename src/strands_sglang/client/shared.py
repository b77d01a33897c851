"""Clients and tokenizers that a process makes once and shares, because rollout functions run thousands of times.

Equal arguments return the same object, from any thread. A failure is not cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Hashable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar

from anyio.from_thread import start_blocking_portal

from .client import SGLangClient, normalize_base_urls, slime_client_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

HUB_TIMEOUT_S = 4.0
"""How long to wait for the Hub before a model that is not on this machine counts as unavailable."""

_CLIENT_SIGNATURE = inspect.signature(SGLangClient)


class _Cache:
    """Values by arguments, each made once."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def get(self, arguments: dict[str, Any], make: Callable[[], T]) -> T:
        try:
            key = tuple(
                (name, tuple(sorted(value.items())) if isinstance(value, dict) else value)
                for name, value in sorted(arguments.items(), key=lambda item: item[0])
            )
            hash(key)
        except TypeError as error:
            raise ValueError(f"the arguments of shared objects must be hashable: {error}") from error
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            value: T = self._values[key]
            return value

    def clear(self) -> list[Any]:
        with self._lock:
            values = list(self._values.values())
            self._values.clear()
            return values


_clients = _Cache()
_tokenizers = _Cache()


def get_client(base_url: str | Sequence[str], **settings: Any) -> SGLangClient:
    """Return the process's shared client with these settings.

    Equal arguments return the same client, from any thread. It is made on the first call.

    Args:
        base_url: Root address of the server, or a list of several.
        **settings: Further arguments of [`SGLangClient`][strands_sglang.SGLangClient]; their values must be hashable.

    Raises:
        ValueError: A setting is invalid, or not hashable.
    """
    addresses = normalize_base_urls(base_url)
    bound = _CLIENT_SIGNATURE.bind(addresses[0] if len(addresses) == 1 else addresses, **settings)
    bound.apply_defaults()
    return _clients.get(bound.arguments, lambda: SGLangClient(**bound.arguments))


def get_client_from_slime_args(args: Any, **overrides: Any) -> SGLangClient:
    """Return the process's shared client for slime's router.

    The client has slime's address and concurrency, no timeout, and 60 retries, as from
    [`SGLangClient.from_slime_args`][strands_sglang.SGLangClient.from_slime_args].

    Args:
        args: Parsed arguments of slime or miles.
        **overrides: Arguments of [`SGLangClient`][strands_sglang.SGLangClient] that take precedence.

    Raises:
        ValueError: The arguments name no router, or a setting is invalid.
    """
    return get_client(**slime_client_arguments(args, **overrides))


def clear_clients() -> list[SGLangClient]:
    """Forget all shared clients, so that the next `get_client` makes a new one.

    Returns:
        The forgotten clients. They keep working; `await client.close()` closes their connections.
    """
    return _clients.clear()


def get_tokenizer(
    path: str | PathLike[str], *, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Return the process's shared Hugging Face tokenizer of a model.

    Args:
        path: Folder of the model, or its name on the Hugging Face Hub.
        trust_remote_code: Whether to run code that comes with the model.
        **kwargs: Further arguments of `AutoTokenizer.from_pretrained`; their values must be hashable.

    Raises:
        OSError: The folder or model does not exist, or the model is not on this machine and the Hub is unreachable.
        ValueError: transformers cannot load the tokenizer, for example without `trust_remote_code=True`.
    """
    name = fspath(path)

    def load() -> PreTrainedTokenizerBase:
        if not os.path.isdir(name):
            _check_reachable(name)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)

    return _tokenizers.get({"path": name, "trust_remote_code": trust_remote_code, **kwargs}, load)


def _check_reachable(name: str) -> None:
    """Fail at once where transformers takes minutes, or reports an invalid name.

    Raises:
        OSError: The path does not exist, or the name is not in the cache while the Hub is unreachable.
    """
    if os.path.exists(name):
        raise NotADirectoryError(f"{name} is a file, not a model's folder")
    if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1 or name.endswith("/"):
        raise FileNotFoundError(f"{name}: no such folder")
    from huggingface_hub import constants

    is_cached = os.path.isdir(os.path.join(constants.HF_HUB_CACHE, "models--" + name.replace("/", "--")))
    if not is_cached and not constants.HF_HUB_OFFLINE and not _is_reachable(constants.ENDPOINT):
        raise ConnectionError(
            f"{name}: no such folder, not in the Hugging Face cache, and {constants.ENDPOINT} is unreachable"
        )


def _is_reachable(address: str) -> bool:
    """Return whether a server answers within seconds; a thread, because name resolution may hang, too."""
    import httpx

    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            answers.append(httpx.head(address, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answers)


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine for synchronous code: in a thread if the caller's event loop is running, as in a notebook.

    Ctrl-C cancels it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with start_blocking_portal() as thread:
        return thread.call(lambda: work)
