"""One exact token sequence: what the model saw and what it sampled, in order.

A `TokenManager` is a list of segments. A *prompt* segment holds tokens that the model received: system prompt, user
messages, tool results, and the marks between turns. A *response* segment holds the tokens that one request sampled.

Promises:

- Tokens are recorded as sent and received, in order; no code here looks at text.
- Only tokens of a response segment that is trained have loss mask 1.
- Logprobs are stored as the 64-bit floats of the server's JSON, so they are read back exactly.

A token takes 12 bytes (a 32-bit id, a 64-bit logprob); the mask is a property of the segment.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, overload

from ..protocol.generation import SamplingMask, VersionSpan, joined_mask
from ..templates.image_tokens import ImageInputs, multimodal_train_inputs

_MISSING = math.nan  # how "no logprob" is stored in an array of floats


class Token(NamedTuple):
    """One token of a sequence.

    Attributes:
        token_id: Id in the vocabulary of the served model.
        logprob: Natural logarithm of the token's probability, as the server returned it; None if unknown.
        loss_mask: Whether the token is trained; only sampled tokens are.
    """

    token_id: int
    logprob: float | None = None
    loss_mask: bool = True


class Segment(Sequence[Token]):
    """A run of tokens that belong together: a prompt, or what one request sampled. Immutable.

    A segment is a sequence of [`Token`][strands_sglang.Token]s.

    Attributes:
        is_response: Whether the model sampled these tokens.
        loss_mask: 1 if these tokens are trained, else 0.
        finish_reason: Why sampling ended: `"stop"`, `"length"` or `"abort"`. None for a prompt.
        weight_version: Version of the weights at the end of the request, as the server names it; None if unknown.
        weight_versions: Which weights sampled which tokens, as `(version, start, end)` with positions in the segment.
            There are several if the weights were updated while the request ran.
        sampling_mask: The ids that each token could be sampled from, T rows; None if they were not requested.
    """

    __slots__ = (
        *("_logprobs", "_sampling_logprobs", "_token_ids", "finish_reason", "is_response", "loss_mask"),
        *("sampling_mask", "weight_version", "weight_versions"),
    )

    def __init__(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float | None] | None = None,
        *,
        is_response: bool,
        loss_mask: int | None = None,
        finish_reason: str | None = None,
        weight_version: str | None = None,
        weight_versions: Iterable[VersionSpan] | None = None,
        sampling_mask: SamplingMask | None = None,
        sampling_logprobs: Iterable[float] | None = None,
    ) -> None:
        """Copy the tokens.

        Args:
            token_ids: Ids, shape `(T,)`.
            logprobs: Logprobs, shape `(T,)`; an entry is None if unknown. None if all are unknown.
            is_response: Whether the model sampled the tokens.
            loss_mask: 0 or 1. By default 1 for a response and 0 for a prompt.
            finish_reason: Why sampling ended.
            weight_version: Version of the weights that sampled the tokens.
            weight_versions: The versions by spans of tokens. By default one span of `weight_version`.
            sampling_mask: The ids that each token could be sampled from, T rows.
            sampling_logprobs: Logprobs of the tokens among those ids, shape `(T,)`; NaN if unknown.

        Raises:
            ValueError: `logprobs`, `sampling_mask` or `sampling_logprobs` differ in length from `token_ids`, or a
                prompt has loss mask 1.
            TypeError: A token id is not an int.
            OverflowError: A token id does not fit into 32 bits.
        """
        self._token_ids = array("i", token_ids)
        self._logprobs: array[float] | None = None
        if logprobs is not None:
            if not isinstance(logprobs, array):
                logprobs = (_MISSING if logprob is None else logprob for logprob in logprobs)
            self._logprobs = array("d", logprobs)
            if len(self._logprobs) != len(self._token_ids):
                raise ValueError(
                    f"{len(self._token_ids)} token ids came with {len(self._logprobs)} logprobs; there must be one each"
                )
        self.is_response = is_response
        self.loss_mask = int(is_response) if loss_mask is None else int(loss_mask)
        if self.loss_mask and not is_response:
            raise ValueError("a prompt segment cannot have loss mask 1: the model did not sample it")
        self.finish_reason = finish_reason
        self.weight_version = weight_version
        if weight_versions is None:
            weight_versions = () if weight_version is None else (VersionSpan(weight_version, 0, len(self)),)
        self.weight_versions = tuple(weight_versions)
        self.sampling_mask = sampling_mask
        self._sampling_logprobs = None if sampling_logprobs is None else array("d", sampling_logprobs)
        for column in (sampling_mask, self._sampling_logprobs):
            if column is not None and len(column) != len(self._token_ids):
                raise ValueError(f"{len(self._token_ids)} token ids came with {len(column)} sampling masks or logprobs")

    @property
    def token_ids(self) -> list[int]:
        """Ids, shape `(T,)`."""
        return self._token_ids.tolist()

    @property
    def logprobs(self) -> list[float | None]:
        """Logprobs, shape `(T,)`; None where unknown."""
        return self._known(self._logprobs)

    @property
    def sampling_logprobs(self) -> list[float | None]:
        """Logprobs of the tokens among the ids of `sampling_mask`, shape `(T,)`; None where unknown."""
        return self._known(self._sampling_logprobs)

    def _known(self, logprobs: array[float] | None) -> list[float | None]:
        if logprobs is None:
            return [None] * len(self._token_ids)
        return [None if math.isnan(logprob) else logprob for logprob in logprobs]

    @property
    def policy_versions(self) -> list[str | None]:
        """Version of the weights that sampled each token, shape `(T,)`; None where unknown, and for prompts."""
        versions: list[str | None] = [None] * len(self)
        for version, start, end in self.weight_versions if self.is_response else ():
            versions[start:end] = [version] * (end - start)
        return versions

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | list[Token]:
        """Return the token at an index, or a list of tokens for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        logprob = _MISSING if self._logprobs is None else self._logprobs[index]
        return Token(self._token_ids[index], None if math.isnan(logprob) else logprob, bool(self.loss_mask))

    def __iter__(self) -> Iterator[Token]:
        """Iterate over the tokens in order."""
        mask = bool(self.loss_mask)
        return (
            Token(token_id, logprob, mask) for token_id, logprob in zip(self._token_ids, self.logprobs, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of tokens."""
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show the kind and the length, never the tokens, which may be many."""
        kind = "response" if self.is_response else "prompt"
        return f"Segment({kind}, {len(self)} tokens, loss_mask={self.loss_mask})"


class TokenManager:
    """A token sequence for an RL trainer, made of prompt and response segments.

    `token_ids`, `loss_mask` and `logprobs` all have shape `(T,)`. `model.token_manager` and `trajectory.sequences()`
    return sequences with these values:

    | Tokens | Loss mask | Logprob |
    |---|---|---|
    | opening prompt: system prompt, tools, first messages | 0 | `None` |
    | later prompts: tool results, user messages, the marks around them | 0 | `0.0` |
    | sampled, the stop token included | 1 | the server's |
    | sampled under a grammar: structured output, a forced call | 0 | the server's |

    With `return_prompt_logprobs=True` prompt tokens have their own logprobs, except the very first token. SGLang scales
    the logprobs of sampled tokens by the temperature, and those of prompt tokens not. With `return_logprob=False`
    sampled tokens have `None`, unless `return_prompt_logprobs` is on.

    Examples:
        >>> tm = TokenManager()
        >>> tm.add_prompt([1, 2, 3])
        >>> tm.add_response([4, 5], [-0.1, -0.2])
        >>> tm.token_ids, tm.loss_mask
        ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
        >>> tm.logprobs
        [None, None, None, -0.1, -0.2]
    """

    def __init__(self, segments: Iterable[Segment] = (), image_inputs: Iterable[ImageInputs] = ()) -> None:
        """Start with the given segments.

        Args:
            segments: The segments, in order.
            image_inputs: The images of their prompts, in order.

        Raises:
            RuntimeError: The first segment is a response.
        """
        self._segments: list[Segment] = []
        self._image_inputs = tuple(image_inputs)
        for segment in segments:
            self.add(segment)

    def add(self, segment: Segment) -> None:
        """Append a segment; an empty one is ignored.

        Args:
            segment: The segment.

        Raises:
            RuntimeError: The first segment is a response.
        """
        if not len(segment):
            return
        if segment.is_response and not self._segments:
            raise RuntimeError("the first segment of a sequence must be a prompt, not a response")
        self._segments.append(segment)

    def add_prompt(self, token_ids: Iterable[int], logprobs: Iterable[float | None] | None = None) -> None:
        """Append tokens that the model saw but did not sample: loss mask 0.

        Args:
            token_ids: Ids, shape `(T,)`.
            logprobs: Logprobs, shape `(T,)`, if they were requested.

        Raises:
            ValueError: `logprobs` differs in length from `token_ids`.
        """
        self.add(Segment(token_ids, logprobs, is_response=False))

    def add_response(self, token_ids: Iterable[int], logprobs: Iterable[float | None] | None = None) -> None:
        """Append tokens that the model sampled: loss mask 1.

        Args:
            token_ids: Ids, shape `(T,)`.
            logprobs: Logprobs, shape `(T,)`.

        Raises:
            RuntimeError: There is no prompt before it.
            ValueError: `logprobs` differs in length from `token_ids`.
        """
        self.add(Segment(token_ids, logprobs, is_response=True))

    def reset(self) -> None:
        """Remove all segments."""
        self._segments = []
        self._image_inputs = ()

    @property
    def segments(self) -> list[Segment]:
        """The segments in order. `segments[0]` is the opening prompt, available as soon as it is sent."""
        return list(self._segments)

    @property
    def segment_info(self) -> list[tuple[bool, int]]:
        """For each segment, whether the model sampled it, and its length in tokens."""
        return [(segment.is_response, len(segment)) for segment in self._segments]

    @property
    def tokens(self) -> list[Token]:
        """All tokens, shape `(T,)`."""
        return list(chain.from_iterable(self._segments))

    @property
    def token_ids(self) -> list[int]:
        """All ids, shape `(T,)`."""
        return list(chain.from_iterable(segment._token_ids for segment in self._segments))

    @property
    def loss_mask(self) -> list[int]:
        """1 for tokens that are trained, else 0; shape `(T,)`."""
        return list(chain.from_iterable([segment.loss_mask] * len(segment) for segment in self._segments))

    @property
    def logprobs(self) -> list[float | None]:
        """All logprobs, shape `(T,)`; None where unknown."""
        return list(chain.from_iterable(segment.logprobs for segment in self._segments))

    @property
    def policy_versions(self) -> list[str | None]:
        """Version of the weights that sampled each token, as the server names it; shape `(T,)`.

        None for tokens that the model did not sample, and if the server does not report a version.
        """
        return list(chain.from_iterable(segment.policy_versions for segment in self._segments))

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The ids that each token could be sampled from, T rows; a row is empty if its token was not sampled.

        These are the ids left after grammar, penalties, top-k, top-p and min-p. None if they were never requested with
        `request_fields={"return_sampling_mask": True}`.
        """
        return joined_mask((segment.sampling_mask, len(segment)) for segment in self._segments)

    @property
    def sampling_logprobs(self) -> list[float | None]:
        """Logprobs among the ids of `sampling_mask`, shape `(T,)`; None where unknown.

        They belong to the distribution that was sampled from. `logprobs` are over the whole vocabulary.
        """
        return list(chain.from_iterable(segment.sampling_logprobs for segment in self._segments))

    @property
    def multimodal_train_inputs(self) -> dict[str, Any] | None:
        """The processor's tensors of all images, such as `pixel_values`; None without images.

        The tensors are joined along the first dimension at every access, so keep the result: they are large.
        """
        return multimodal_train_inputs(self._image_inputs)

    @property
    def initial_prompt(self) -> list[Token]:
        """The tokens of the opening prompt: system prompt, tools, first messages. Empty before the first request."""
        return list(self._segments[0]) if self._segments else []

    @property
    def initial_prompt_length(self) -> int:
        """Number of tokens of the opening prompt.

        A trainer's prompt is `token_ids[:initial_prompt_length]`; its response is the rest.
        """
        return len(self._segments[0]) if self._segments else 0

    def __len__(self) -> int:
        """Number of tokens."""
        return sum(len(segment) for segment in self._segments)

    def __repr__(self) -> str:
        """Show counts, never the tokens, which may be many."""
        trained = sum(len(segment) for segment in self._segments if segment.loss_mask)
        return f"TokenManager({len(self)} tokens, {trained} to train, {len(self._segments)} segments)"


Rollout = TokenManager
"""Alias of [`TokenManager`][strands_sglang.TokenManager]."""
