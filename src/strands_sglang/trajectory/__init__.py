"""What was recorded: the turns of an episode, and what is made of them."""

from .trajectory import Caller, ParsedAnswer, Place, Trajectory
from .turn import Turn, TurnStatus

__all__ = ["Caller", "ParsedAnswer", "Place", "Trajectory", "Turn", "TurnStatus"]
