"""Private tokenizers that no other code calls.

Hugging Face keeps truncation, padding and the handling of special tokens as state of the shared tokenizer. A call with
`truncation=True` in one thread, as reward models make, truncates what another thread encodes at that moment. So this
library never encodes or decodes with the user's object. Each tokenizer gets one `Encoder` with a copy that has its
vocabulary and none of these settings, and whose state no call changes.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedText:
    """A text, or a part of one, as tokens.

    Attributes:
        text: The text.
        token_ids: Ids of the text, shape `(T,)`.
        is_plain: Whether the text of control tokens in it was encoded as ordinary text.
    """

    text: str
    token_ids: list[int]
    is_plain: bool = False


class Encoder:
    """Encodes text and decodes tokens, always in full. Safe to share between threads.

    It keeps the state that the tokenizer had when it was copied; later changes by its owner have no effect.

    Attributes:
        tokenizer: The copy. Nothing that changes its state may be called on it.
        templates: The chat templates that encode with it, by their other arguments, the least recently used first.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Copy a tokenizer. A vocabulary in Rust is shared, which takes 1 ms; one in Python is copied.

        Args:
            tokenizer: A Hugging Face tokenizer.
        """
        self.tokenizer = private_copy(tokenizer)
        self.templates: dict[tuple[Any, ...], Any] = {}
        self._pieces: dict[int, bytes] = {}
        # Rust tokenizers are thread-safe; others may not be.
        self._lock: AbstractContextManager[Any] = threading.Lock()
        self._rust: Tokenizer | None = None
        if _backend(self.tokenizer) is not None:
            self.encode("")  # settings with which a tokenizer was loaded are applied at its first call
            self._lock = nullcontext()
            if self.tokenizer is not tokenizer and _codes_in_rust(self.tokenizer):
                self._rust = _backend(self.tokenizer)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the ids of a text; no special tokens are added."""
        if self._rust is not None and not options:
            ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        with self._lock:
            ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False, **options)
            return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens. Ids that the vocabulary does not have are left out."""
        if self._rust is not None:
            return self._rust.decode(list(token_ids), skip_special_tokens=False)
        try:
            return self._decode(token_ids)
        except Exception:  # a tokenizer in Python raises what it likes for an unknown id
            names = self._names_of(token_ids)
            return self._decode([token_id for token_id in token_ids if names[token_id]])

    def _decode(self, token_ids: Sequence[int]) -> str:
        with self._lock:
            text: str = self.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return text

    def pieces(self, token_ids: Iterable[int]) -> dict[int, bytes]:
        """Return the bytes of each id inside a text.

        Those of a sequence, joined, are the bytes of its text: several tokens may share a character. If a vocabulary is
        of an unknown kind, a piece is the text of the id on its own. An id that the vocabulary does not have is empty.
        """
        wanted = [*token_ids]
        missing = self._names_of(token_id for token_id in wanted if token_id not in self._pieces)
        for token_id, name in missing.items():
            spelling = self._spelling
            piece = self.decode([token_id]).encode("utf-8", "replace") if spelling is None else spelling(name)
            self._pieces[token_id] = piece
        return {token_id: self._pieces[token_id] for token_id in wanted}

    def _names_of(self, token_ids: Iterable[int]) -> dict[int, str]:
        name_of = self.tokenizer.convert_ids_to_tokens if self._rust is None else self._rust.id_to_token
        names = dict.fromkeys(token_ids, "")
        for token_id in names:
            with self._lock, suppress(Exception):  # as in `decode`
                names[token_id] = name_of(token_id) or ""
        return names

    @cached_property
    def _spelling(self) -> Callable[[str], bytes] | None:
        """How the vocabulary writes bytes; None if none of the known ways gives the text of a sequence back."""
        ids = self.encode(_EVERY_KIND)
        for spelling in (_as_bytes, _as_words):
            with suppress(Exception):
                names = self._names_of(ids)
                joined = b"".join(spelling(names[token_id]) for token_id in ids)
                if joined.decode("utf-8", "replace") == self.decode(ids):
                    return spelling
        return None

    def without(self, tokens: Collection[str]) -> Callable[[str], list[int]]:
        """Return a function that encodes text without these tokens, which were added to the vocabulary."""
        backend = _backend(self.tokenizer)
        if backend is None:
            return lambda text: self.encode(text, split_special_tokens=True)

        from tokenizers.pre_tokenizers import Metaspace

        bare = _with_same_parts(backend)
        if isinstance(bare.pre_tokenizer, Metaspace) and bare.pre_tokenizer.prepend_scheme == "first":
            bare.pre_tokenizer = copy.deepcopy(bare.pre_tokenizer)
            bare.pre_tokenizer.prepend_scheme = "never"  # the encoded text is inside a prompt
        kept = [
            token
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.content not in tokens and backend.model.token_to_id(token.content) == token_id
        ]
        bare.add_tokens(kept)
        return lambda text: bare.encode(text, add_special_tokens=False).ids


_EVERY_KIND = " One  two\n\tdrei: 12,345 \u00fc\u4e2d\U0001f600 [1]"


def _as_bytes(name: str) -> bytes:
    """Return the bytes of a token of byte-level BPE, which writes each byte as a printable character."""
    try:
        return bytes(map(_byte_of.__getitem__, name))
    except KeyError:
        return name.encode("utf-8", "replace")  # an added token is plain text


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_byte_of = {chr(byte): byte for byte in _PRINTABLE}
_byte_of.update({chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))})


def _as_words(name: str) -> bytes:
    """Return the bytes of a token of SentencePiece, which writes spaces as U+2581 and single bytes as `<0x0A>`."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8", "replace")


_encoders: weakref.WeakKeyDictionary[Any, tuple[Any, Encoder]] = weakref.WeakKeyDictionary()
_encoders_lock = threading.Lock()


def get_encoder(tokenizer: Any) -> Encoder:
    """Return the shared encoder of a tokenizer; a new one if tokens or templates changed since."""
    try:
        hash(weakref.ref(tokenizer))
    except TypeError:  # it cannot be a key
        return Encoder(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    state = (  # what changes when tokens or templates are added
        len(tokenizer) if hasattr(tokenizer, "__len__") else None,
        getattr(tokenizer, "special_tokens_map", None),
        dict(template) if isinstance(template, dict) else template,
    )
    with _encoders_lock:
        known_state, encoder = _encoders.get(tokenizer, (None, None))
        if encoder is None or known_state != state:
            encoder = Encoder(tokenizer)
            _encoders[tokenizer] = (state, encoder)
        return encoder


def private_copy(tokenizer: Any) -> Any:
    """Copy a tokenizer so that it shares the vocabulary, and nothing that calls change.

    A tokenizer that cannot be copied is returned itself, with a warning.
    """
    backend = _backend(tokenizer)
    try:
        if backend is None:
            return copy.deepcopy(tokenizer)
        private = copy.copy(tokenizer)
        # Special tokens and named templates change in place.
        changeable = {name: value for name, value in vars(private).items() if isinstance(value, dict | list | set)}
        vars(private).update({name: copy.copy(value) for name, value in changeable.items()})
        rust = _with_same_parts(backend)
        added = backend.get_added_tokens_decoder()
        for special, tokens in itertools.groupby(
            (added[token_id] for token_id in sorted(added)), key=lambda token: token.special
        ):
            (rust.add_special_tokens if special else rust.add_tokens)(list(tokens))
        if rust.get_added_tokens_decoder() != added:  # there are gaps between their ids
            rust = copy.deepcopy(backend)
            rust.no_truncation()
            rust.no_padding()
        private._tokenizer = rust
        return private
    except Exception as error:  # tokenizers may hold any objects
        logger.warning(
            "tokenizer=<%s>, error=<%s> | the tokenizer cannot be copied: prompts may be truncated or padded while "
            "other threads call it with truncation or padding",
            type(tokenizer).__name__,
            error,
        )
        return tokenizer


_CODING = ("__call__", "encode", "decode", "_call_one", "_encode_plus", "_batch_encode_plus", "_decode")
"""The methods through which Hugging Face tokenizers encode and decode."""


def _codes_in_rust(tokenizer: Any) -> bool:
    """Whether a tokenizer's methods add nothing to what its Rust tokenizer does, as subclasses may."""
    methods = (getattr(type(tokenizer), name, None) for name in _CODING)
    return vars(tokenizer).keys().isdisjoint(_CODING) and all(
        method is None or method.__module__.startswith("transformers.tokenization") for method in methods
    )


def _backend(tokenizer: Any) -> Tokenizer | None:
    """Return the Rust tokenizer of a Hugging Face tokenizer; None if there is none."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "_tokenizer", None)
    return backend if isinstance(backend, Tokenizer) else None


def _with_same_parts(backend: Tokenizer) -> Tokenizer:
    """Create a tokenizer with the same, shared vocabulary and no added tokens."""
    from tokenizers import Tokenizer

    rebuilt = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        value = getattr(backend, part)
        if value is not None:
            with suppress(Exception):  # parts in Python cannot be copied
                value = copy.deepcopy(value)
            setattr(rebuilt, part, value)
    return rebuilt
