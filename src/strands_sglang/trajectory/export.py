"""From a forest of turns to the token sequences for a trainer."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ..protocol.generation import clip_spans
from .tokens import Segment, TokenManager
from .turn import Turn, TurnStatus


def export_sequences(
    turns: Sequence[Turn], *, discarded: bool, auxiliary: bool, trained: Mapping[int, int]
) -> list[tuple[Turn, TokenManager]]:
    """Return the sequences from each root to each leaf, as pairs of leaf and sequence.

    They are ordered by their last call, with auxiliary and cut ones last. Every sampled token has loss mask 1 in
    exactly one of them, the first that contains it, unless a grammar constrained it.

    Args:
        turns: All turns in the order of their calls.
        discarded: Whether to include answers that the agent threw away.
        auxiliary: Whether to include calls from outside the agents' loops.
        trained: Number of sampled tokens that get loss mask 0 because they are trained elsewhere, by `Turn.index`.
    """
    shown = [
        turn
        for turn in turns
        if turn.is_answered
        and (discarded or turn.status is not TurnStatus.DISCARDED)
        and (auxiliary or not turn.is_auxiliary)
    ]
    exported = {id(turn) for turn in shown}
    inner: set[int] = set()
    for turn in shown:
        step = turn
        # If no later call kept a turn's last token, the turn ends a sequence of its own, which trains that token.
        # An auxiliary call continues in a sequence of its own, which the main one must not need.
        while (
            step.parent is not None and step.parent_kept is None and (step.parent.is_auxiliary or not turn.is_auxiliary)
        ):
            step = step.parent
            inner.add(id(step))
            if id(step) in exported:
                break
    leaves = [turn for turn in shown if id(turn) not in inner]
    leaves.sort(key=lambda leaf: (leaf.is_auxiliary, leaf.status is TurnStatus.CUT, leaf.index))
    already = {id(turn): trained[turn.index] for turn in turns if turn.index in trained}
    if not auxiliary:
        already |= helpers_tokens(turns)
    sequences = []
    for leaf in leaves:
        sequences.append((leaf, sequence_of(leaf, already)))
        for turn, kept in leaf.steps():
            already[id(turn)] = max(kept, already.get(id(turn), 0))
    return sequences


def helpers_tokens(turns: Iterable[Turn]) -> dict[int, int]:
    """Return the number of sampled tokens of each auxiliary turn, by its `id`.

    Where an agent continues from a helper's answer, that is context, and not trained.
    """
    return {id(turn): len(turn.output_ids) for turn in turns if turn.is_auxiliary}


def sequence_of(leaf: Turn, already_trained: Mapping[int, int] | None = None) -> TokenManager:
    """Return the tokens from the root to a turn.

    Args:
        leaf: The turn that the sequence ends with.
        already_trained: Number of sampled tokens that get loss mask 0 because other sequences train them, by `id` of a
            turn. By default those of helpers.
    """
    if already_trained is None:
        already_trained = helpers_tokens(leaf.path())
    segments = (_segments(turn, kept, already_trained.get(id(turn), 0)) for turn, kept in leaf.steps())
    return TokenManager(chain.from_iterable(segments), leaf.image_inputs())


def _segments(turn: Turn, kept: int, trained: int) -> Iterator[Segment]:
    """Yield a turn's prompt and the first `kept` of its sampled tokens; another sequence trains the first `trained`."""
    logprobs: array[float] | None = turn.prompt_logprobs
    if logprobs is None and turn.parent is not None:
        # Observations have logprob 0.0, which trainers expect; those of the opening prompt are unknown.
        logprobs = array("d", bytes(8 * len(turn.prompt_ids)))
    yield Segment(turn.prompt_ids, logprobs, is_response=False)
    generation = turn.generation
    if generation is None:
        return
    trained = min(trained, kept)
    for start, stop, train in ((0, trained, False), (trained, kept, True)):
        yield Segment(
            generation.output_ids[start:stop],
            None if generation.logprobs is None else generation.logprobs[start:stop],
            is_response=True,
            loss_mask=int(train and not turn.constrained),
            finish_reason=generation.finish_type,
            weight_version=generation.weight_version,
            weight_versions=clip_spans(generation.weight_versions, start, stop),
            sampling_mask=None if generation.sampling_mask is None else generation.sampling_mask.part(start, stop),
            sampling_logprobs=None
            if generation.sampling_logprobs is None
            else generation.sampling_logprobs[start:stop],
        )
