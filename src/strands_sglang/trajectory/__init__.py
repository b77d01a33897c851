"""What was recorded: the turns of an episode, and what is made of them."""

from .trajectory import Trajectory
from .turn import Turn, TurnStatus

__all__ = ["Trajectory", "Turn", "TurnStatus"]
