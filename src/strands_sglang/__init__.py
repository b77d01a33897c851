"""SGLang model provider for Strands Agents with exact token trajectories."""

from __future__ import annotations

from typing import Any

from .client.balancer import Outage, outages
from .client.client import SGLangClient
from .client.loads import ServerLoad
from .client.shared import clear_clients, get_client, get_client_from_slime_args, get_tokenizer
from .exceptions import (
    EpisodeInterruptedError,
    JournalError,
    SGLangAbortedError,
    SGLangCancelledError,
    SGLangClientError,
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangDeadlineError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangThrottledError,
    TokenizerMismatchError,
)
from .model.model import SGLangModel
from .outcomes import MAY_CONTINUE, OUTCOMES, Outcome, RewardRule, TerminationReason, outcome_of, termination_reason
from .tool_limiter import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
    ToolIterationLimiter,
    ToolLimiter,
    limit_cause,
)
from .tool_parsers import ToolParser, ToolParseResult, get_tool_parser, register_tool_parser
from .trajectory.journal import Journal, JournalInUseError
from .trajectory.storage import TrajectoryFileError
from .trajectory.tokens import Rollout, Segment, Token, TokenManager
from .trajectory.trajectory import Trajectory
from .trajectory.turn import Turn, TurnStatus

__all__ = [
    "MAY_CONTINUE",
    "OUTCOMES",
    "EpisodeInterruptedError",
    "Journal",
    "JournalError",
    "JournalInUseError",
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "Outage",
    "Outcome",
    "RewardRule",
    "Rollout",
    "SGLangAbortedError",
    "SGLangCancelledError",
    "SGLangClient",
    "SGLangClientError",
    "SGLangConnectionError",
    "SGLangContextLengthError",
    "SGLangDeadlineError",
    "SGLangDecodingError",
    "SGLangHTTPError",
    "SGLangModel",
    "SGLangThrottledError",
    "Segment",
    "ServerLoad",
    "TerminationReason",
    "Token",
    "TokenManager",
    "TokenizerMismatchError",
    "ToolIterationLimiter",
    "ToolLimiter",
    "ToolParseResult",
    "ToolParser",
    "Trajectory",
    "TrajectoryFileError",
    "Turn",
    "TurnStatus",
    "clear_clients",
    "get_client",
    "get_client_from_slime_args",
    "get_tool_parser",
    "get_tokenizer",
    "limit_cause",
    "register_tool_parser",
    "outages",
    "outcome_of",
    "termination_reason",
]


def __getattr__(name: str) -> Any:
    """Return `__version__`, read from the metadata on first access."""
    if name == "__version__":
        from importlib import metadata

        try:
            version = metadata.version("strands-sglang")
        except metadata.PackageNotFoundError:  # a checkout on the path
            version = "0+unknown"
        globals()["__version__"] = version
        return version
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
