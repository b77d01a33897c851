"""SGLang model provider for Strands Agents with exact token trajectories."""

from __future__ import annotations

from .client import SGLangClient
from .exceptions import (
    SGLangAbortedError,
    SGLangClientError,
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangThrottledError,
    TokenizerMismatchError,
)
from .model import SGLangModel
from .outcomes import OUTCOMES, Outcome, TerminationReason, termination_reason
from .shared import get_client, get_client_from_slime_args, get_tokenizer
from .tokens import Rollout, Segment, Token, TokenManager
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
from .trajectory import Trajectory, Turn, TurnStatus

__all__ = [
    "OUTCOMES",
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "Outcome",
    "Rollout",
    "SGLangAbortedError",
    "SGLangClient",
    "SGLangClientError",
    "SGLangConnectionError",
    "SGLangContextLengthError",
    "SGLangDecodingError",
    "SGLangHTTPError",
    "SGLangModel",
    "SGLangThrottledError",
    "Segment",
    "TerminationReason",
    "Token",
    "TokenManager",
    "TokenizerMismatchError",
    "ToolIterationLimiter",
    "ToolLimiter",
    "ToolParseResult",
    "ToolParser",
    "Trajectory",
    "Turn",
    "TurnStatus",
    "get_client",
    "get_client_from_slime_args",
    "get_tool_parser",
    "get_tokenizer",
    "limit_cause",
    "register_tool_parser",
    "termination_reason",
]
