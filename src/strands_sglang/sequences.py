"""From a forest of turns to the token sequences that a trainer takes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from .tokens import Segment, TokenManager
from .turns import Turn, TurnStatus


def export_sequences(turns: Sequence[Turn], *, discarded: bool, auxiliary: bool) -> list[TokenManager]:
    """The sequences from each root to each leaf, in the order of their last call, auxiliary and cut ones last.

    Every sampled token has loss mask 1 in exactly one of them, the first that contains it, unless a grammar constrained
    it.

    Args:
        turns: All turns in the order of their calls.
        discarded: Whether answers that the agent threw away are given out, too.
        auxiliary: Whether calls from outside the agents' loops are given out, too.
    """
    shown = [
        turn
        for turn in turns
        if turn.is_answered
        and (discarded or turn.status is not TurnStatus.DISCARDED)
        and (auxiliary or not turn.is_auxiliary)
    ]
    # A turn whose last token no later call kept ends a sequence of its own, where that token is trained.
    inner = {id(turn.parent) for turn in shown if turn.parent_kept is None and not turn.is_auxiliary}
    leaves = [turn for turn in shown if id(turn) not in inner]
    leaves.sort(key=lambda leaf: (leaf.is_auxiliary, leaf.status is TurnStatus.CUT, leaf.index))
    trained: set[int] = set()
    sequences = []
    for leaf in leaves:
        sequences.append(sequence_of(leaf, trained))
        trained.update(id(turn) for turn in leaf.path())
    return sequences


def sequence_of(leaf: Turn, already_trained: Iterable[int] = ()) -> TokenManager:
    """The tokens from the root to a turn.

    Args:
        leaf: The turn that the sequence ends with.
        already_trained: `id`s of the turns that another sequence trains; they have loss mask 0 here.
    """
    trained = set(already_trained)
    return TokenManager(
        segment for turn, kept in leaf.steps() for segment in _segments(turn, kept, train=id(turn) not in trained)
    )


def _segments(turn: Turn, kept: int, *, train: bool) -> Iterator[Segment]:
    """A turn's prompt, and the first `kept` of its sampled tokens."""
    logprobs: array[float] | None = turn.prompt_logprobs
    if logprobs is None and turn.parent is not None:
        # Observations carry logprob 0.0, which trainers ask for; the opening prompt's are unknown.
        logprobs = array("d", bytes(8 * len(turn.prompt_ids)))
    yield Segment(turn.prompt_ids, logprobs, is_response=False)
    generation = turn.generation
    if generation is not None:
        yield Segment(
            generation.output_ids[:kept],
            None if generation.logprobs is None else generation.logprobs[:kept],
            is_response=True,
            loss_mask=int(train and not turn.constrained),
            finish_reason=generation.finish_type,
            weight_version=generation.weight_version,
        )
