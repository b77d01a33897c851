"""All model calls of an episode, as a forest of turns: what is read of it, exported and saved.

A *turn* is one model call: the prompt tokens that it added, and the tokens that it sampled; `recording` says which one
it extends.

Invariants:
- A turn's token ids are fixed once it is answered; failed turns hold no sampled token.
- The ids sent for a turn are `parent.token_ids() + prompt_ids`.
- In `sequences()` every sampled token has loss mask 1 in exactly one sequence, the first that contains it, unless its
  turn was sampled under a grammar (off-policy), which has mask 0 everywhere.
"""

from __future__ import annotations

import logging
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..drift import Drift, measure_drift
from .explain import explain
from .export import export_sequences, sequence_of
from .recording import Recording
from .storage import decode_turns, encode_turns, write_file
from .tokens import TokenManager
from .turn import Turn, TurnStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Trajectory(Recording):
    """The recorded turns of an episode. Safe to use from several threads.

    Attributes:
        tool_parse_errors: How many tool calls did not parse, by the name that they seemed to mean.
    """

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to one safetensors file; see `turn_files` for its layout. `load` gives it back bit by bit.

        Raises:
            OSError: The file cannot be written; what was there stays as it was.
        """
        write_file(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        with self._lock:
            return encode_turns(self._turns, self._facts())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trajectory:
        """Read a trajectory that was saved. It can be extended like any other.

        Raises:
            OSError: The file cannot be read.
            TrajectoryFileError: It is no trajectory, or one of another version.
        """
        with open(path, "rb") as file:
            return cls.from_bytes(file.read(), name=str(path))

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str = "the bytes") -> Trajectory:
        """Read what `to_bytes` returned.

        Args:
            content: It.
            name: What an error calls it.

        Raises:
            TrajectoryFileError: It is no trajectory, or one of another version.
        """
        turns, facts = decode_turns(content, name)
        trajectory = cls()
        trajectory._restore(turns, facts)
        return trajectory

    def __reduce__(self) -> Any:
        """Pickle and copy it as `save` writes it: flat, in size linear in the tokens, without its lock.

        Errors of failed turns become `RecordedError`s, as in a file.
        """
        return type(self).from_bytes, (self.to_bytes(),)

    # --- reading ---

    @property
    def turns(self) -> list[Turn]:
        """All turns in the order of their calls."""
        with self._lock:
            return list(self._turns)

    def __len__(self) -> int:
        """Number of turns."""
        return len(self._turns)

    def sequences(self, *, discarded: bool = False, auxiliary: bool = False) -> list[TokenManager]:
        """The sequences from each root to each leaf, in the order of their last call, cut ones last.

        Turns without an answer are left out. Every sampled token has loss mask 1 in exactly one of the sequences, the
        first that contains it, unless a grammar constrained it.

        Args:
            discarded: Whether answers that the agent threw away are given out, too.
            auxiliary: Whether calls from outside the agents' loops are given out, too.
        """
        return [sequence for _, sequence in self.branches(discarded=discarded, auxiliary=auxiliary)]

    def branches(self, *, discarded: bool = False, auxiliary: bool = False) -> list[tuple[Turn, TokenManager]]:
        """The same as `sequences`, each behind the turn that it ends with, whose `path()` has all its turns."""
        with self._lock:
            return export_sequences(self._turns, discarded=discarded, auxiliary=auxiliary)

    def latest_main_sequence(self, *, warn: bool = False) -> TokenManager:
        """The latest sequence of the main conversation, with its own full mask.

        The main conversation is the first one since the start that was answered, every attempt at its first call
        included, calls from outside the agents' loops left aside; before any answer it is the latest one that was
        asked, so that its opening prompt can be seen. It ends with the latest answer that was not thrown away; where
        all were, with the latest one, whose tokens are not trained then.

        Args:
            warn: Whether to log, once, that other sequences hold tokens to train, too.
        """
        with self._lock:
            if warn and not self._warned_of_several and self._has_several():
                self._warned_of_several = True
                logger.warning(
                    "turns=<%d> | token_manager is one of several sequences of this episode: train on "
                    "trajectory.sequences(), or see trajectory.explain()",
                    len(self._turns),
                )
            leaf = self.main_leaf()
            if leaf is None:
                return TokenManager()
            is_thrown_away = leaf.status is TurnStatus.DISCARDED
            return sequence_of(leaf, {id(leaf): len(leaf.output_ids)} if is_thrown_away else {})

    def main_leaf(self) -> Turn | None:
        """The turn that `latest_main_sequence` ends with; None before any call."""
        with self._lock:
            roots = [turn for turn in self._turns if turn.parent is None and not turn.is_auxiliary]
            first = next((turn for turn in roots if turn.is_answered), None)
            if first is None:
                return roots[-1] if roots else None
            ends = [
                turn
                for turn in self._turns
                if turn.is_answered and not turn.is_auxiliary and turn.root.key == first.key
            ]
            kept = [turn for turn in ends if turn.status is not TurnStatus.DISCARDED]
            return kept[-1] if kept else ends[-1]

    def _has_several(self) -> bool:
        """Whether there is more than one sequence to train."""
        return sum(any(sequence.loss_mask) for sequence in self.sequences()) > 1

    def drift(self, tokenizer: PreTrainedTokenizerBase) -> Drift:
        """How far the sequences are from what decoding and encoding them again would give.

        Args:
            tokenizer: The tokenizer of the served model.
        """
        return measure_drift(self.sequences(), tokenizer)

    def explain(self) -> str:
        """What became of every call, for people: what it extends, where it forked and why, how it ended."""
        with self._lock:
            return explain(self._turns)


__all__ = ["Trajectory", "Turn", "TurnStatus"]
