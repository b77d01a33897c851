"""Tool parsers: from what a model sampled to tool calls, strictly as it was written."""

from .base import (
    TOOL_PARSER_REGISTRY,
    ParsedTurn,
    ToolCallStatus,
    ToolParser,
    ToolParseResult,
    UnknownToolParserError,
    get_tool_parser,
    register_tool_parser,
)
from .hermes import HermesToolParser
from .qwen_xml import QwenXMLToolParser

__all__ = [
    "TOOL_PARSER_REGISTRY",
    "HermesToolParser",
    "ParsedTurn",
    "QwenXMLToolParser",
    "ToolCallStatus",
    "ToolParseResult",
    "ToolParser",
    "UnknownToolParserError",
    "get_tool_parser",
    "register_tool_parser",
]
