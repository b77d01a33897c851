"""Clients and tokenizers that a process makes once and shares: rollout functions are called thousands of times.

Promise: the same arguments give the same object, from any thread; what failed is tried anew.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar

from .client import SGLangClient, normalize_base_urls, slime_client_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

HUB_ANSWERS_WITHIN_S = 4.0
"""How long the Hub is waited for before a model that is not on this machine counts as one that cannot be had."""

_CLIENT_SIGNATURE = inspect.signature(SGLangClient)


class _Cache:
    """Values by their arguments, each made once."""

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
            raise ValueError(f"shared objects are found by their arguments, which must be hashable: {error}") from error
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
    """The process's shared client with these settings.

    Args:
        base_url: See `SGLangClient`.
        **settings: Further arguments of `SGLangClient`.

    Raises:
        ValueError: A setting cannot work.
    """
    addresses = normalize_base_urls(base_url)
    bound = _CLIENT_SIGNATURE.bind(addresses[0] if len(addresses) == 1 else addresses, **settings)
    bound.apply_defaults()
    return _clients.get(bound.arguments, lambda: SGLangClient(**bound.arguments))


def get_client_from_slime_args(args: Any, **overrides: Any) -> SGLangClient:
    """The process's shared client of slime's router; see `SGLangClient.from_slime_args`.

    Args:
        args: slime's (or miles') parsed arguments.
        **overrides: Arguments of `SGLangClient` that win over them.

    Raises:
        ValueError: The arguments name no router, or a setting cannot work.
    """
    return get_client(**slime_client_arguments(args, **overrides))


def clear_clients() -> list[SGLangClient]:
    """Forget all shared clients; the next `get_client` makes a new one.

    Returns:
        Those that were forgotten. They go on for whoever has them; `await client.close()` closes their connections.
    """
    return _clients.clear()


def get_tokenizer(
    path: str | PathLike[str], *, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """The process's shared Hugging Face tokenizer of a model.

    Args:
        path: A model's folder or its name on the Hugging Face Hub.
        trust_remote_code: Whether code that comes with the model may be run.
        **kwargs: Further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError: There is no such folder or model, or the Hub cannot be reached and the model is not on this machine.
        ValueError: transformers cannot load its tokenizer (e.g. it needs `trust_remote_code=True`).
    """
    name = fspath(path)

    def load() -> PreTrainedTokenizerBase:
        if not os.path.isdir(name):
            _refuse_unreachable(name)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)

    return _tokenizers.get({"path": name, "trust_remote_code": trust_remote_code, **kwargs}, load)


def _refuse_unreachable(name: str) -> None:
    """Say at once what transformers takes minutes for, or calls a bad name.

    Raises:
        OSError: It is a path that does not exist, or a name that is not in the cache while the Hub cannot be reached.
    """
    if os.path.exists(name):
        raise NotADirectoryError(f"{name}: no folder of a model but a file")
    if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1 or name.endswith("/"):
        raise FileNotFoundError(f"{name}: no such folder")
    from huggingface_hub import constants

    is_cached = os.path.isdir(os.path.join(constants.HF_HUB_CACHE, "models--" + name.replace("/", "--")))
    if not is_cached and not constants.HF_HUB_OFFLINE and not _can_be_reached(constants.ENDPOINT):
        raise ConnectionError(
            f"{name}: no such folder, not in the cache of the Hub's models, and {constants.ENDPOINT} cannot be reached"
        )


def _can_be_reached(address: str) -> bool:
    """Whether a server answers anything at all, within seconds: name resolution, too, may hang."""
    import httpx

    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            answers.append(httpx.head(address, timeout=HUB_ANSWERS_WITHIN_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_ANSWERS_WITHIN_S)
    return bool(answers)
