"""One exact token sequence: what the model saw and what it sampled, in order.

A `TokenManager` is a list of segments. A *prompt* segment holds tokens that were put in front of the model (system
prompt, user messages, tool results, the marks between turns); a *response* segment holds the tokens that one request
sampled.
Promises:

- Tokens are kept as they came, in order; nothing here looks at text.
- A token has loss mask 1 only if it stands in a response segment that is to be trained.
- Logprobs are kept as the 64-bit floats that the server's JSON held, so reading one back gives the recorded value.

Memory is 12 bytes a token (a 32-bit id, a 64-bit logprob); the mask is a property of the segment.
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
        logprob: Natural logarithm of the probability with which it was sampled, None where it is not known.
        loss_mask: True if the token was sampled by the model and is to be trained on.
    """

    token_id: int
    logprob: float | None = None
    loss_mask: bool = True


class Segment(Sequence[Token]):
    """A run of tokens that came in one piece: part of a prompt, or what one request sampled. Immutable.

    Attributes:
        is_response: True if the model sampled these tokens.
        loss_mask: 1 if they are to be trained on, else 0; one value for the whole segment.
        finish_reason: Why sampling ended ("stop", "length", "abort"), None for a prompt segment.
        weight_version: Version of the weights at the end of the request, as the server named it; None if unknown.
        weight_versions: Which weights sampled which of the tokens, as `(version, start, end)` with positions in the
            segment; more than one where the weights were updated while the request ran.
        sampling_mask: The ids that each token was sampled from; None where the server was not asked for them.
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
            token_ids: Ids, shape (T,).
            logprobs: Logprobs, shape (T,), None entries where unknown; None if all are unknown.
            is_response: Whether the model sampled the tokens.
            loss_mask: 0 or 1; by default 1 for a response and 0 for a prompt.
            finish_reason: Why sampling ended.
            weight_version: Version of the weights that sampled the tokens.
            weight_versions: The same by spans of tokens; by default one span of `weight_version`.
            sampling_mask: The ids that each token was sampled from, T rows.
            sampling_logprobs: The logprobs of the tokens among those ids, shape (T,), NaN where unknown.

        Raises:
            ValueError: `logprobs` and the like have another length than `token_ids`, or a prompt is to be trained on.
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
        for beside in (sampling_mask, self._sampling_logprobs):
            if beside is not None and len(beside) != len(self._token_ids):
                raise ValueError(f"{len(self._token_ids)} token ids came with {len(beside)} sampling masks or logprobs")

    @property
    def token_ids(self) -> list[int]:
        """Ids, shape (T,)."""
        return self._token_ids.tolist()

    @property
    def logprobs(self) -> list[float | None]:
        """Logprobs, shape (T,); None where unknown."""
        return self._known(self._logprobs)

    @property
    def sampling_logprobs(self) -> list[float | None]:
        """The logprobs of the tokens among the ids of their sampling masks, shape (T,); None where unknown."""
        return self._known(self._sampling_logprobs)

    def _known(self, logprobs: array[float] | None) -> list[float | None]:
        if logprobs is None:
            return [None] * len(self._token_ids)
        return [None if math.isnan(logprob) else logprob for logprob in logprobs]

    @property
    def policy_versions(self) -> list[str | None]:
        """The version of the weights that sampled each token, shape (T,); None where unknown, and for prompts."""
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
        """The token at an index, or a list of tokens for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        logprob = _MISSING if self._logprobs is None else self._logprobs[index]
        return Token(self._token_ids[index], None if math.isnan(logprob) else logprob, bool(self.loss_mask))

    def __iter__(self) -> Iterator[Token]:
        """The tokens in order."""
        mask = bool(self.loss_mask)
        return (
            Token(token_id, logprob, mask) for token_id, logprob in zip(self._token_ids, self.logprobs, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of equal tokens."""
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Kind and length; never the tokens, which may be many."""
        kind = "response" if self.is_response else "prompt"
        return f"Segment({kind}, {len(self)} tokens, loss_mask={self.loss_mask})"


class TokenManager:
    """A token sequence made of prompt and response segments, as an RL trainer wants it.

    Example:
        >>> tm = TokenManager()
        >>> tm.add_prompt([1, 2, 3])
        >>> tm.add_response([4, 5], [-0.1, -0.2])
        >>> tm.token_ids, tm.loss_mask
        ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
        >>> tm.logprobs
        [None, None, None, -0.1, -0.2]
    """

    def __init__(self, segments: Iterable[Segment] = (), image_inputs: Iterable[ImageInputs] = ()) -> None:
        """Start with the given segments, by default none.

        Args:
            segments: The segments.
            image_inputs: The images of their prompts, in order.

        Raises:
            RuntimeError: The first segment is a response.
        """
        self._segments: list[Segment] = []
        self._image_inputs = tuple(image_inputs)
        for segment in segments:
            self.add(segment)

    def add(self, segment: Segment) -> None:
        """Append a segment. An empty one is left out.

        Raises:
            RuntimeError: The first segment is a response.
        """
        if not len(segment):
            return
        if segment.is_response and not self._segments:
            raise RuntimeError("the first segment of a sequence must be a prompt, and this one is a response")
        self._segments.append(segment)

    def add_prompt(self, token_ids: Iterable[int], logprobs: Iterable[float | None] | None = None) -> None:
        """Append tokens that the model saw but did not sample: loss mask 0.

        Args:
            token_ids: Ids, shape (T,).
            logprobs: Logprobs, shape (T,), if the server was asked for them.

        Raises:
            ValueError: `logprobs` has another length than `token_ids`.
        """
        self.add(Segment(token_ids, logprobs, is_response=False))

    def add_response(self, token_ids: Iterable[int], logprobs: Iterable[float | None] | None = None) -> None:
        """Append tokens that the model sampled: loss mask 1.

        Args:
            token_ids: Ids, shape (T,).
            logprobs: Logprobs, shape (T,).

        Raises:
            RuntimeError: Nothing was added before it.
            ValueError: `logprobs` has another length than `token_ids`.
        """
        self.add(Segment(token_ids, logprobs, is_response=True))

    def reset(self) -> None:
        """Forget all segments."""
        self._segments = []
        self._image_inputs = ()

    @property
    def segments(self) -> list[Segment]:
        """The segments in order; `segments[0]` is the opening prompt."""
        return list(self._segments)

    @property
    def segment_info(self) -> list[tuple[bool, int]]:
        """For each segment whether the model sampled it, and its length in tokens."""
        return [(segment.is_response, len(segment)) for segment in self._segments]

    @property
    def tokens(self) -> list[Token]:
        """All tokens, shape (T,)."""
        return list(chain.from_iterable(self._segments))

    @property
    def token_ids(self) -> list[int]:
        """All ids, shape (T,)."""
        return list(chain.from_iterable(segment._token_ids for segment in self._segments))

    @property
    def loss_mask(self) -> list[int]:
        """1 where a token is to be trained on, else 0; shape (T,)."""
        return list(chain.from_iterable([segment.loss_mask] * len(segment) for segment in self._segments))

    @property
    def logprobs(self) -> list[float | None]:
        """All logprobs, shape (T,); None where unknown."""
        return list(chain.from_iterable(segment.logprobs for segment in self._segments))

    @property
    def policy_versions(self) -> list[str | None]:
        """The version of the weights that sampled each token, as the server names it; shape (T,).

        None for tokens that nobody sampled, and where the server does not tell.
        """
        return list(chain.from_iterable(segment.policy_versions for segment in self._segments))

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The ids that each token was sampled from, T rows; a row is empty where nothing was sampled.

        None if the server was never asked for them, by `request_fields={"return_sampling_mask": True}`.
        """
        return joined_mask((segment.sampling_mask, len(segment)) for segment in self._segments)

    @property
    def sampling_logprobs(self) -> list[float | None]:
        """The logprobs among the ids of `sampling_mask` alone, shape (T,); None where unknown.

        They are those of the distribution that was sampled from; `logprobs` are over the whole vocabulary.
        """
        return list(chain.from_iterable(segment.sampling_logprobs for segment in self._segments))

    @property
    def multimodal_train_inputs(self) -> dict[str, Any] | None:
        """What the model's processor made of the images, e.g. `pixel_values` and `image_grid_thw`; None without any.

        Joined anew at every reading, along the first dimension: the tensors of images are large.
        """
        return multimodal_train_inputs(self._image_inputs)

    @property
    def initial_prompt(self) -> list[Token]:
        """The tokens of the opening prompt: system prompt, tools, first messages; empty before the first request."""
        return list(self._segments[0]) if self._segments else []

    @property
    def initial_prompt_length(self) -> int:
        """Number of tokens of the opening prompt."""
        return len(self._segments[0]) if self._segments else 0

    def __len__(self) -> int:
        """Number of tokens."""
        return sum(len(segment) for segment in self._segments)

    def __repr__(self) -> str:
        """Counts; never the tokens, which may be many."""
        trained = sum(len(segment) for segment in self._segments if segment.loss_mask)
        return f"TokenManager({len(self)} tokens, {trained} to train, {len(self._segments)} segments)"


Rollout = TokenManager
"""A second name of `TokenManager`."""
