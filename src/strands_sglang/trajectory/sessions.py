"""Trajectories that travel with Strands' sessions and snapshots.

Each trajectory is written to a journal in one folder while it happens. An agent's `model_state`, which is part of its
sessions and snapshots, names the journal and the position in it at which the agent's latest answer ends. When an agent
asks in a trajectory that holds nothing yet, the journal is read up to there, and the call is attached as always: by the
content of the conversation.

A journal is continued only from its end, and only by one writer. Any other agent that was restored from it begins its
own with what it read, so what another continuation sampled is never part of its record.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import finalize

from strands.types.content import Messages

from ..exceptions import JournalError
from .journal import Journal, JournalInUseError, TurnWriter
from .storage import TrajectoryFileError
from .trajectory import Trajectory
from .turn import Turn, TurnStatus

logger = logging.getLogger(__name__)

_STATE_KEY = "strands_sglang_journal"
_NAMED = re.compile(r"([0-9a-f]{32})-(\d+)")  # a journal and a position in it; no other text becomes a path

_beginning = threading.Lock()
"""Held while a journal begins. One for all folders, so that models can be copied."""


@dataclass(eq=False)
class _Keeper:
    """Writes the turns of one trajectory.

    Attributes:
        journal: The journal.
        names: Its name, and that of the journal that it copies.
        earlier: Turns that were recorded before.
        is_lost: Whether it could not be written.
    """

    journal: Journal
    names: set[str] = field(default_factory=set)
    earlier: list[Turn] = field(default_factory=list)
    is_lost: bool = False

    def __post_init__(self) -> None:
        self.names.add(self.journal.path.stem)
        self.writer = TurnWriter(self.journal.append)
        finalize(self, self.journal.close)

    def __call__(self, turn: Turn) -> None:
        if self.is_lost:
            return
        try:
            while self.earlier:  # only now their vocabulary is known
                self.writer.add(self.earlier.pop(0))
            self.writer.add(turn)
        except JournalError as error:
            self.is_lost = True
            logger.warning("error=<%s> | from here on a restored agent's tokens are rendered", error)


@dataclass(frozen=True)
class Sessions:
    """The journals of a model's trajectories.

    Attributes:
        folder: The folder that holds them.
    """

    folder: str | PathLike[str]

    def begin(self, trajectory: Trajectory, model_state: Any, messages: Messages) -> None:
        """Write a trajectory from now on; continue the one that the agent was restored with, if this one is empty.

        Args:
            trajectory: The trajectory of the call.
            model_state: Strands' argument of that name.
            messages: The conversation. Without an answer in it, there is nothing to continue.

        Raises:
            JournalError: The journal cannot be opened or begun.
        """
        state = model_state.get(_STATE_KEY) if isinstance(model_state, dict) else None
        named = _NAMED.fullmatch(str(state))
        if all(message["role"] != "assistant" for message in messages):
            named = None
        with _beginning:
            keeper = trajectory.on_record
            held = getattr(keeper, "names", ())
            if keeper is not None and not held:
                return  # something else writes it
            if named is not None and named[1] not in held:
                try:
                    keeper = self._continue(trajectory, named[1], int(named[2]))
                except (OSError, TrajectoryFileError) as error:
                    logger.warning("error=<%s> | a restored agent's tokens are not continued, but rendered", error)
            if keeper is None:
                earlier = [turn for turn in trajectory.turns if turn.status is not TurnStatus.ASKED]
                keeper = _Keeper(self._journal(), earlier=earlier)
            trajectory.on_record = keeper

    def note(self, trajectory: Trajectory, model_state: Any) -> None:
        """Note in an agent's state where the record of its latest answer ends.

        Args:
            trajectory: The trajectory that holds it.
            model_state: Strands' argument of that name, a dictionary that may be written to.
        """
        keeper = trajectory.on_record
        if isinstance(keeper, _Keeper) and not keeper.is_lost and isinstance(model_state, dict):
            model_state[_STATE_KEY] = f"{keeper.journal.path.stem}-{keeper.journal.end}"

    def _journal(self, name: str | None = None) -> Journal:
        return Journal(Path(self.folder) / f"{name or uuid.uuid4().hex}.journal")

    def _continue(self, trajectory: Trajectory, name: str, end: int) -> _Keeper:
        """Read a journal up to an agent's latest answer into an empty trajectory, and return its writer."""
        if len(trajectory):
            raise TrajectoryFileError(f"{name}: the trajectory has other calls; use `with model.episode()` per agent")
        keeper = _Keeper(self._journal(name))
        journal = keeper.journal
        journal.content()  # an error if there is none, which opening would create
        is_free = True
        try:
            journal.open()
        except JournalInUseError:
            is_free = False
        content = journal.content()
        if len(content) < end:
            raise TrajectoryFileError(f"{journal}: ends before byte {end}")
        loaded = Trajectory.from_bytes(content[:end], name=str(journal))
        if len(content) > end or not is_free:
            keeper = _Keeper(self._journal(), keeper.names)
            keeper.journal.begin_with(content[:end])
        keeper.writer.continue_with(loaded)
        trajectory.take_over(loaded)
        return keeper
