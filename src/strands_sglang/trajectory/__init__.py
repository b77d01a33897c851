"""The record of an episode: its turns, and the sequences that they form."""

from .trajectory import Caller, ParsedAnswer, Place, Trajectory
from .turn import Turn, TurnStatus

__all__ = ["Caller", "ParsedAnswer", "Place", "Trajectory", "Turn", "TurnStatus"]
