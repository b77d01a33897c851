"""The trainer of the study: one update per batch, in float32, in plain PyTorch.

The rows of a group share their beginning, which is computed once, with its gradient: the group is one packed sequence,
in which each row sees the shared tokens and its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from study_rollouts import Row
from transformers import DynamicCache

from strands_sglang.mismatch import masked_logprobs

CLIP = 0.2


@dataclass
class Packed:
    """Rows of one group, without the beginning that the whole batch shares, as one sequence of N tokens.

    Attributes:
        token_ids: Shape `(N,)`.
        positions: Position of each token in its row, shape `(N,)`.
        attention: Which token sees which, shape `(N, shared + N)`.
        sources: Packed position whose logits predict each trained token, shape `(M,)`.
        targets: The trained tokens, shape `(M,)`.
        places: Row and position of each trained token, M pairs.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    places: list[tuple[int, int]]


def common_length(rows: Sequence[Row]) -> int:
    """Return the number of tokens with which all rows begin, before the first trained one."""
    count = min(row.loss_mask.index(1) for row in rows) - 1
    return next((at for at in range(count) if len({row.token_ids[at] for row in rows}) > 1), count)


def pack(rows: Sequence[Row], shared: int) -> Packed:
    """Pack rows after the prefix of their group, which follows the `shared` tokens of the batch."""
    common = common_length(rows)
    ids = list(rows[0].token_ids[shared:common])
    positions = list(range(shared, common))
    starts = []
    for row in rows:
        starts.append(len(ids))
        ids += row.token_ids[common:]
        positions += range(common, len(row.token_ids))
    attention = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    attention[:, : common - shared] = True
    sources, targets, places = [], [], []
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        end = start + len(row.token_ids) - common
        attention[start:end, start:end] = True
        for at in range(1, len(row.token_ids)):
            if row.loss_mask[at]:
                sources.append(start + at - 1 - common)
                targets.append(row.token_ids[at])
                places.append((number, at))
    return Packed(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.cat([torch.ones(len(ids), shared, dtype=torch.bool), attention.tril()], dim=1),
        torch.tensor(sources, dtype=torch.long),
        torch.tensor(targets, dtype=torch.long),
        places,
    )


class Beginning:
    """The keys and values of the tokens that all rows of a batch begin with, and their gradient."""

    def __init__(self, model: torch.nn.Module, token_ids: Sequence[int], *, has_gradient: bool) -> None:
        """Compute them."""
        with torch.set_grad_enabled(has_gradient):
            output = model.model(input_ids=torch.tensor([token_ids]), use_cache=True)
        self.computed = [part for layer in output.past_key_values.layers for part in (layer.keys, layer.values)]
        self.leaves = [part.detach().requires_grad_(has_gradient) for part in self.computed]

    def cache(self) -> DynamicCache:
        """Return a cache that a forward pass may append to."""
        cache = DynamicCache()
        for number in range(len(self.leaves) // 2):
            cache.update(self.leaves[2 * number], self.leaves[2 * number + 1], number)
        return cache

    def backward(self) -> None:
        """Pass on the gradients that the groups have left."""
        pairs = zip(self.computed, self.leaves, strict=True)
        reached = [(part, leaf.grad) for part, leaf in pairs if leaf.grad is not None]
        if reached:
            torch.autograd.backward([part for part, _ in reached], [gradient for _, gradient in reached])


def logprobs_of(
    model: torch.nn.Module,
    rows: Sequence[Row],
    packed: Packed,
    beginning: Beginning,
    temperature: float,
    *,
    under_mask: bool = True,
) -> torch.Tensor:
    """Return the model's logprobs of the trained tokens, shape `(M,)`."""
    hidden = model.model(
        input_ids=packed.token_ids[None],
        position_ids=packed.positions[None],
        attention_mask=packed.attention[None, None],
        past_key_values=beginning.cache(),
        use_cache=True,
    ).last_hidden_state[0]
    logits = model.lm_head(hidden[packed.sources]).float()
    kept = [rows[number].kept_ids[at] if rows[number].kept_ids else [] for number, at in packed.places]
    return masked_logprobs(logits, packed.targets, kept if under_mask else None, temperature=temperature)


@dataclass
class StepFigures:
    """What a step measured before its update, over all trained tokens.

    Attributes:
        tokens: Number of trained tokens.
        never_sampled: Share of them that the model did not sample there.
        mean_gap: Mean |trainer - sampler| of the others.
        max_gap: Largest |trainer - sampler|.
        k1: Mean of sampler - trainer, an estimate of the KL divergence of the trainer from the sampler.
        k3: The same by the always positive estimate.
        clipped: Share of the trained tokens whose ratio leaves the band and has no gradient.
        outside: Share of the sampled tokens with trainer / sampler outside of the band.
        loss: The loss.
        grad_norm: Norm of the gradient.
    """

    tokens: int
    never_sampled: float
    mean_gap: float
    max_gap: float
    k1: float
    k3: float
    clipped: float
    outside: float
    loss: float = math.nan
    grad_norm: float = math.nan


def step(
    model: torch.nn.Module,
    groups: Sequence[Sequence[Row]],
    temperature: float,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    under_mask: bool = True,
) -> StepFigures:
    """Measure the rows, and update the model if there is an optimizer.

    The loss is the token mean over the whole batch, clipped as in PPO. Groups without an advantage are measured and
    count in the mean, but train nothing.
    """
    total = sum(sum(row.loss_mask) for group in groups for row in group)
    trainer, sampler, ratios, signs = [], [], [], []
    loss_sum = 0.0
    everything = [row for group in groups for row in group]
    shared = common_length(everything)
    beginning = Beginning(model, everything[0].token_ids[:shared], has_gradient=optimizer is not None)
    for group in groups:
        packed = pack(group, shared)
        has_gradient = optimizer is not None and any(row.advantage for row in group)
        with torch.set_grad_enabled(has_gradient):
            logprobs = logprobs_of(model, group, packed, beginning, temperature, under_mask=under_mask)
            old = torch.tensor([group[number].old_logprobs[at] for number, at in packed.places])
            advantage = torch.tensor([group[number].advantage for number, _ in packed.places])
            ratio = torch.exp(logprobs - torch.where(old.isnan(), logprobs.detach(), old))
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).sum() / total
            if has_gradient:
                loss.backward()
        loss_sum += float(loss.detach())
        trainer.append(logprobs.detach())
        sampler.append(torch.tensor([group[number].sampled_logprobs[at] for number, at in packed.places]))
        ratios.append(ratio.detach())
        signs.append(advantage)
    known = ~torch.cat(sampler).isnan()
    difference = (torch.cat(trainer) - torch.cat(sampler))[known]
    all_ratios, all_signs = torch.cat(ratios), torch.cat(signs)
    is_clipped = ((all_ratios > 1 + CLIP) & (all_signs > 0)) | ((all_ratios < 1 - CLIP) & (all_signs < 0))
    true_ratio = difference.exp()
    figures = StepFigures(
        tokens=len(known),
        never_sampled=float((~known).float().mean()),
        mean_gap=float(difference.abs().mean()),
        max_gap=float(difference.abs().max()),
        k1=float(-difference.mean()),
        k3=float((true_ratio - 1 - difference).mean()),
        clipped=float(is_clipped.float().mean()),
        outside=float(((true_ratio > 1 + CLIP) | (true_ratio < 1 - CLIP)).float().mean()),
        loss=loss_sum,
    )
    if optimizer is not None:
        beginning.backward()
        figures.grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return figures
