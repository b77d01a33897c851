"""Clients and tokenizers that a process makes once and shares: rollout functions are called thousands of times.

Promise: the same arguments give the same object, from any thread; what failed is tried anew.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar

from .client import SGLangClient
from .settings import normalize_base_urls, slime_client_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_CLIENT_SIGNATURE = inspect.signature(SGLangClient)


class _Cache:
    """Values by their arguments, each made once."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def get(self, arguments: dict[str, Any], make: Callable[[], T]) -> T:
        try:
            key = tuple((name, _hashable(value)) for name, value in sorted(arguments.items(), key=lambda item: item[0]))
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


def _hashable(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


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
        OSError: There is no such model.
        ValueError: transformers cannot load its tokenizer (e.g. it needs `trust_remote_code=True`).
    """

    def load() -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(fspath(path), trust_remote_code=trust_remote_code, **kwargs)

    return _tokenizers.get({"path": fspath(path), "trust_remote_code": trust_remote_code, **kwargs}, load)
