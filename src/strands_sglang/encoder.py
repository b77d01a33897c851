"""A tokenizer of the library's own, which nobody else can call.

Hugging Face keeps truncation, padding and the handling of special tokens as state of the shared tokenizer: a call with
`truncation=True` in one thread, as reward models make, cuts what another thread encodes at that moment. So nothing here
encodes or decodes with the user's object. Each tokenizer gets one `Encoder`, with a copy that has its vocabulary and
none of these settings, and whose state no call changes.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class Encoder:
    """Text into tokens and back, always in full. Safe to share between threads.

    It is the tokenizer as it was: what its owner changes later is not seen.

    Attributes:
        tokenizer: The copy. Nothing that changes its state may be called on it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Copy a tokenizer: 1 ms for a vocabulary in Rust, which is shared; one in Python is copied whole.

        Args:
            tokenizer: A Hugging Face tokenizer.
        """
        self.tokenizer = private_copy(tokenizer)
        # Rust encodes in many threads at once; of others nothing is known.
        self._lock: AbstractContextManager[Any] = threading.Lock()
        if _backend(self.tokenizer) is not None:
            self.encode("")  # a tokenizer that was loaded with settings of its own applies them at its first call
            self._lock = nullcontext()

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no special tokens are added."""
        with self._lock:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
            return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        with self._lock:
            text: str = self.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return text


_encoders: weakref.WeakKeyDictionary[Any, tuple[Any, Encoder]] = weakref.WeakKeyDictionary()
_encoders_lock = threading.Lock()


def get_encoder(tokenizer: Any) -> Encoder:
    """The one encoder of a tokenizer; a new one if tokens or templates were changed since."""
    state = _state(tokenizer)
    with _encoders_lock:
        known_state, encoder = _encoders.get(tokenizer, (None, None))
        if encoder is None or known_state != state:
            encoder = Encoder(tokenizer)
            _encoders[tokenizer] = (state, encoder)
        return encoder


def private_copy(tokenizer: Any) -> Any:
    """A copy of a tokenizer that shares its vocabulary, and nothing that calls change.

    One that cannot be copied is returned as it is, with a warning.
    """
    backend = _backend(tokenizer)
    try:
        if backend is None:
            return copy.deepcopy(tokenizer)
        own = copy.copy(tokenizer)
        own._tokenizer = _without_settings(backend)
        return own
    except Exception as error:  # they hold whatever their authors put there
        logger.warning(
            "tokenizer=<%s>, error=<%s> | the tokenizer cannot be copied: while other threads call it with truncation "
            "or padding, prompts may be cut or padded",
            type(tokenizer).__name__,
            error,
        )
        return tokenizer


def _backend(tokenizer: Any) -> Tokenizer | None:
    """The tokenizer in Rust under a Hugging Face tokenizer; None where there is none."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "_tokenizer", None)
    return backend if isinstance(backend, Tokenizer) else None


def _without_settings(backend: Tokenizer) -> Tokenizer:
    from tokenizers import Tokenizer

    own = Tokenizer(backend.model)  # shares the vocabulary
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(own, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    for special, tokens in itertools.groupby(
        (added[token_id] for token_id in sorted(added)), key=lambda token: token.special
    ):
        (own.add_special_tokens if special else own.add_tokens)(list(tokens))
    if own.get_added_tokens_decoder() == added:
        return own
    own = copy.deepcopy(backend)  # ids with gaps between them
    own.no_truncation()
    own.no_padding()
    return own


def _state(tokenizer: Any) -> Any:
    """What changes when tokens or templates are added to a tokenizer."""
    template = getattr(tokenizer, "chat_template", None)
    return (
        len(tokenizer) if hasattr(tokenizer, "__len__") else None,
        getattr(tokenizer, "special_tokens_map", None),
        dict(template) if isinstance(template, dict) else template,
    )
