"""What slime has per token, for one sequence of a trajectory: mask, logprobs, top-p ids, routed experts.

Promises: everything belongs to the tokens at the same place; a token with loss mask 1 was sampled on-policy and has a
finite logprob; whatever lacks something that training replays has loss mask 0.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...exceptions import SGLangDecodingError
from ...protocol.generation import Generation
from ...protocol.top_p import kept_ids
from ...trajectory.tokens import TokenManager
from ...trajectory.turn import Turn, TurnStatus
from .arguments import Replay, SlimeExportError

if TYPE_CHECKING:
    import torch

_NO_COUNTS: Mapping[int, int] = {}
_ID_BYTES = 4


@dataclass(frozen=True, eq=False)
class Rows:
    """One sequence, prompt and response apart. R is the response's length, T that of both.

    Attributes:
        token_ids: Prompt and response, shape (T,).
        loss_mask: 0 or 1 for each token of the response, shape (R,).
        logprobs: 0.0 where the mask is 0, shape (R,).
        top_p: Ids that top-p kept, one span after the other, and where they start, shape (R + 1,); both int32. None if
            they are not replayed.
        experts: int32, shape (T - 1, layers, experts per token); None if they are not replayed, or not all there.
        problems: What is wrong with tokens that therefore have loss mask 0, for people.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    top_p: tuple[torch.Tensor, torch.Tensor] | None
    experts: torch.Tensor | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Span:
    """Where the sampled tokens of a turn stand in a sequence: from `start` up to `stop`."""

    turn: Turn
    start: int
    stop: int


def spans_of(leaf: Turn) -> Iterator[Span]:
    """The sampled tokens of every turn of the sequence that ends with `leaf`."""
    position = 0
    for turn, kept in leaf.steps():
        start = position + len(turn.prompt_ids)
        position = start + kept
        yield Span(turn, start, position)


def rows_of(
    leaf: Turn,
    sequence: TokenManager,
    *,
    replay: Replay,
    keep_cut: bool = False,
    off_policy_tokens: Mapping[int, int] = _NO_COUNTS,
) -> Rows:
    """Lay out a sequence that has at least one sampled token.

    Args:
        leaf: The turn that it ends with.
        sequence: Its tokens, with the mask that they have in this sequence.
        replay: What training replays.
        keep_cut: Whether turns that were cut keep their mask: the sample is to be continued, not trained.
        off_policy_tokens: By `Turn.index`, how many of its first tokens older weights sampled; they have mask 0.

    Raises:
        SlimeExportError: Logprobs, top-p ids or experts were never asked for, or are another model's.
    """
    spans = list(spans_of(leaf))
    start = len(spans[0].turn.prompt_ids)
    mask, recorded = sequence.loss_mask, sequence.logprobs
    problems: list[str] = []
    for span in spans:
        if span.turn.status is TurnStatus.DISCARDED or (span.turn.status is TurnStatus.CUT and not keep_cut):
            _clear(mask, span.start, span.stop)
        old = span.start + off_policy_tokens.get(span.turn.index, 0)
        _clear(mask, span.start, min(span.stop, old))
        if any(mask[span.start : span.stop]):
            problems += _mask_unknown(span, mask, recorded)
    top_p = _top_p(spans, mask, start, problems) if replay.top_p else None
    experts = None
    if replay.experts is not None:
        try:
            experts = expert_rows(leaf, *replay.experts)
        except SGLangDecodingError as error:
            problems.append(str(error))
        if experts is None:
            _require_experts(leaf)
            problems.append("its routed experts are not complete")
    logprobs = [logprob if kept and logprob is not None else 0.0 for kept, logprob in zip(mask, recorded, strict=True)]
    return Rows(sequence.token_ids, mask[start:], logprobs[start:], top_p, experts, tuple(problems))


def _clear(mask: list[int], start: int, stop: int) -> None:
    mask[start:stop] = [0] * len(mask[start:stop])


def _is_uninterrupted(turn: Turn) -> bool:
    """Whether one request gave the whole answer, so that all that was asked for is there.

    An answer that was resumed lacks what its aborted part lacks, whatever its last part has.
    """
    generation = turn.generation
    return generation is not None and generation.finish_type != "abort" and not generation.resumed_ids


def _mask_unknown(span: Span, mask: list[int], logprobs: list[float | None]) -> list[str]:
    """Take tokens without a finite logprob out of the mask.

    Raises:
        SlimeExportError: Logprobs were not asked for.
    """
    generation = span.turn.generation
    if generation is not None and generation.logprobs is None and _is_uninterrupted(span.turn):
        raise SlimeExportError(
            f"call {span.turn.index} has no logprobs, and slime trains on nothing without: leave return_logprob of "
            "SGLangModel at its default, True"
        )
    unknown = 0
    for position in range(span.start, span.stop):
        logprob = logprobs[position]
        if mask[position] and (logprob is None or not math.isfinite(logprob)):
            mask[position] = 0
            unknown += 1
    return [f"{unknown} tokens of call {span.turn.index} have no finite logprob"] if unknown else []


# --- top-p ---


def _top_p(spans: list[Span], mask: list[int], start: int, problems: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that top-p kept, an empty span for every token with mask 0; tokens that have none get mask 0."""
    import torch

    ids: list[torch.Tensor] = []
    offsets = torch.zeros(len(mask) - start + 1, dtype=torch.int32)
    for span in spans:
        if not any(mask[span.start : span.stop]) or span.turn.generation is None:
            continue
        try:
            kept = kept_ids(span.turn.generation)
        except ValueError as error:
            problems.append(f"call {span.turn.index}: {error}")
            _clear(mask, span.start, span.stop)
            continue
        if kept is None:
            if _is_uninterrupted(span.turn):
                raise SlimeExportError(
                    f"call {span.turn.index} came without top_p_token_ids, which rollout_top_p != 1 needs: use slime's "
                    "SGLang, and pass slime's sampling_params (custom_params) on; or have any SGLang tell sampling "
                    "masks, by request_fields={'return_sampling_mask': True} of SGLangModel and a finite top_k"
                )
            problems.append(f"call {span.turn.index} was aborted, and a part of it has no top-p ids")
            _clear(mask, span.start, span.stop)
            continue
        told = kept.part(0, span.stop - span.start)
        widths = torch.tensor(told.lengths, dtype=torch.int32)
        trained = torch.tensor(mask[span.start : span.stop], dtype=torch.bool)
        if unknown := int((trained & (widths == 0)).sum()):  # of a part that the server aborted
            problems.append(f"{unknown} tokens of call {span.turn.index} have no top-p ids")
            trained &= widths > 0
            mask[span.start : span.stop] = trained.int().tolist()
        ids.append(torch.tensor(told.token_ids, dtype=torch.int32)[trained.repeat_interleave(widths)])
        offsets[span.start - start + 1 : span.stop - start + 1] = widths * trained
    return torch.cat([torch.zeros(0, dtype=torch.int32), *ids]), offsets.cumsum(0, dtype=torch.int32)


# --- routed experts ---


def expert_rows(leaf: Turn, layers: int, top_k: int) -> torch.Tensor | None:
    """The experts of every token of a sequence but the last, each as the call told them that first ran the token.

    So the rows of sampled tokens are those that were in force when they were sampled.

    Args:
        leaf: The turn that the sequence ends with.
        layers: Layers of the model, those without experts too.
        top_k: Experts per token.

    Returns:
        int32, shape (T - 1, layers, top_k); None if rows are missing.

    Raises:
        SlimeExportError: The server's model has other numbers of layers and experts.
    """
    import torch

    parts: list[torch.Tensor] = []
    have = position = 0
    for turn, kept in leaf.steps():
        position += len(turn.prompt_ids)
        generation = turn.generation
        rows = position + len(turn.output_ids) - 1
        if generation is not None and generation.routed_experts is not None and generation.routed_rows == rows > have:
            if generation.routed_width != layers * top_k:
                raise SlimeExportError(
                    f"call {turn.index} has {generation.routed_width} routed experts per token, and num_layers * "
                    f"moe_router_topk is {layers} * {top_k}: the arguments are another model's"
                )
            parts.append(_tail(generation, have).reshape(-1, layers, top_k))
            have = rows
        position += kept
        if have > position:  # rows of tokens that no later call kept
            parts, have = [torch.cat(parts)[:position]], position
    needed = position - 1
    if have < needed or not parts:
        return None
    return torch.cat(parts)[:needed]


def _tail(generation: Generation, start: int) -> torch.Tensor:
    """A generation's expert ids from row `start` on; only that part of the text is decoded."""
    import torch

    skipped = start * (generation.routed_width or 0) * _ID_BYTES
    try:
        content = base64.b64decode((generation.routed_experts or "")[skipped // 3 * 4 :], validate=True)
    except binascii.Error as error:
        raise SGLangDecodingError(f"the server's routed_experts are not base64: {error}") from error
    return torch.frombuffer(bytearray(content[skipped % 3 :]), dtype=torch.int32)


def _require_experts(leaf: Turn) -> None:
    """Tell rows that were never asked for from rows that an abort left out.

    Raises:
        SlimeExportError: They were not asked for.
    """
    if _is_uninterrupted(leaf) and leaf.generation is not None and leaf.generation.routed_experts is None:
        raise SlimeExportError(
            f"call {leaf.index} came without routed experts, which use_rollout_routing_replay needs: set "
            "return_routed_experts=True of SGLangModel, and start the server with --enable-return-routed-experts"
        )


def placeholder_experts(token_count: int, layers: int, top_k: int) -> torch.Tensor:
    """Rows for a sample that is not trained: different experts for each token, since slime refuses layers of zeros."""
    import torch

    return torch.arange(top_k, dtype=torch.int32).repeat(token_count - 1, layers, 1)
