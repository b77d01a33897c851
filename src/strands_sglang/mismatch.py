"""Mismatch: how far the sampler's logprobs are from the trainer's own, and how a sampling mask removes it.

Before the first update of a batch, a trainer's own logprobs of the sampled tokens should equal the sampler's. They
differ if the engines compute differently (bfloat16, other kernels), if the weights differ, and under top-p, top-k and
min-p, where the sampler renormalizes over the ids that were left. The last kind can be removed: `masked_logprobs`.
What is left is data for a trainer's own correction; docs/understand/mismatch.md says where each trainer takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

from .credit import TrainingRow
from .protocol.generation import SamplingMask

if TYPE_CHECKING:
    import torch

BAND = (0.5, 2.0)
"""Default band of ratios: its upper end is where slime, verl and SkyRL truncate by default."""


@dataclass(frozen=True)
class Mismatch:
    """Differences of logprobs over trained tokens, d = trainer - sampler. The ratio of a token is exp(d).

    Attributes:
        tokens: Number of tokens.
        k1: Mean of -d: an unbiased estimate of KL(sampler || trainer), in nats per token. It may be negative.
        k3: Mean of exp(d) - 1 - d: an estimate of the same that is never negative and varies less.
        mean_difference: Mean of |d|.
        max_difference: Largest |d|.
        min_ratio: Smallest ratio of a token.
        max_ratio: Largest ratio of a token.
        log_sequence_ratio: Sum of d: the log of the ratio of all tokens together.
        outside: Share of tokens whose ratio is outside of the band, 0.0 to 1.0.
    """

    tokens: int
    k1: float
    k3: float
    mean_difference: float
    max_difference: float
    min_ratio: float
    max_ratio: float
    log_sequence_ratio: float
    outside: float


def measure_mismatch(rows: Iterable[TrainingRow], *, band: tuple[float, float] = BAND) -> Mismatch:
    """Compare the logprobs of rows with the trainer's own.

    Args:
        rows: Rows with `trainer_logprobs`; one, those of an episode, or a batch.
        band: Lowest and highest ratio of a token that is inside.

    Raises:
        ValueError: A row has no trainer's logprobs, or not one for each token, or there is no row.
    """
    import numpy as np

    differences: list[float] = []
    for row in rows:
        if row.trainer_logprobs is None:
            raise ValueError(
                f"a row of episode {row.episode} has no trainer's logprobs: "
                "dataclasses.replace(row, trainer_logprobs=...)"
            )
        pairs = zip(row.trainer_logprobs, row.logprobs, strict=True)
        differences += [trained - sampled for trained, sampled in compress(pairs, row.loss_mask)]
    if not differences:
        raise ValueError("there is no trained token to compare")
    d = np.array(differences)
    ratios = np.exp(d)
    return Mismatch(
        tokens=len(d),
        k1=float(-d.mean()),
        k3=float((np.expm1(d) - d).mean()),
        mean_difference=float(np.abs(d).mean()),
        max_difference=float(np.abs(d).max()),
        min_ratio=float(ratios.min()),
        max_ratio=float(ratios.max()),
        log_sequence_ratio=float(d.sum()),
        outside=float(((ratios < band[0]) | (ratios > band[1])).mean()),
    )


def mismatch_by_episode(rows: Iterable[TrainingRow], *, band: tuple[float, float] = BAND) -> Mapping[str, Mismatch]:
    """Compare the logprobs of each episode's rows with the trainer's own; see `measure_mismatch`.

    Returns:
        The mismatch by episode id, in the order of the rows.
    """
    episodes: dict[str, list[TrainingRow]] = {}
    for row in rows:
        episodes.setdefault(row.episode, []).append(row)
    return {name: measure_mismatch(rows, band=band) for name, rows in episodes.items()}


def under_sampling_mask(row: TrainingRow) -> TrainingRow:
    """Return the row with its tokens' logprobs among the ids that they were sampled from.

    These are the logprobs of the distribution that was really sampled, for a trainer that uses `masked_logprobs`. The
    logprobs that rows have otherwise are over the whole vocabulary.

    Args:
        row: A row of a model with `request_fields={"return_sampling_mask": True}`; `row.tokens.sampling_mask` is the
            mask.

    Raises:
        ValueError: A trained token has no sampling mask. Rows that are read from a file have none.
    """
    pairs = list(zip(row.tokens.sampling_logprobs, row.loss_mask, strict=True))
    missing = sum(logprob is None and mask for logprob, mask in pairs)
    if missing:
        raise ValueError(
            f"{missing} of {row.trained} trained tokens of episode {row.episode} have no sampling "
            'mask: set request_fields={"return_sampling_mask": True}, and take rows of the trajectory, not of a file'
        )
    return replace(row, logprobs=[(logprob or 0.0) if mask else 0.0 for logprob, mask in pairs])


def masked_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    mask: SamplingMask | Iterable[Sequence[int]] | None,
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the logprobs of tokens among the ids that they were sampled from.

    The result is differentiable, and comparable with the logprobs of `under_sampling_mask`.

    Args:
        logits: The trainer's logits, or logprobs, that predict each token; shape `(T, V)`.
        token_ids: The tokens, shape `(T,)`, int64.
        mask: The ids of each token, T rows; an empty row means the whole vocabulary. None for all tokens.
        temperature: The sampling temperature.

    Returns:
        Logprobs, shape `(T,)`.

    Examples:
        ```python
        row = under_sampling_mask(row)
        ids = torch.tensor(row.token_ids)
        logits = model(ids[None, :-1]).logits[0]
        mask = row.tokens.sampling_mask.part(1, len(row))
        logprobs = masked_logprobs(logits, ids[1:], mask, temperature=0.7)
        ```

    Raises:
        ValueError: The mask has another number of rows than there are tokens, or a row lacks its own token.
    """
    import torch

    scaled = logits / temperature
    chosen = scaled.gather(1, token_ids[:, None])[:, 0]
    rows: list[Sequence[int]] = []
    if mask is not None:
        rows = list(mask.rows() if isinstance(mask, SamplingMask) else mask)
        if len(rows) != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens came with {len(rows)} rows of a sampling mask")
    for position, (token_id, row) in enumerate(zip(token_ids.tolist(), rows, strict=False)):
        if row and token_id not in row:
            raise ValueError(f"token {token_id} at position {position} is not in its own sampling mask")
    is_masked = torch.tensor([bool(row) for row in rows] or [False] * len(token_ids), device=logits.device)
    totals = torch.zeros_like(chosen)
    totals[~is_masked] = scaled[~is_masked].logsumexp(dim=1)
    given = [row for row in rows if row]
    if given:
        width = max(map(len, given))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in given], device=logits.device)
        lengths = torch.tensor([[len(row)] for row in given], device=logits.device)
        is_filler = torch.arange(width, device=logits.device) >= lengths
        totals[is_masked] = scaled[is_masked].gather(1, ids).masked_fill(is_filler, -torch.inf).logsumexp(dim=1)
    return chosen - totals
