"""Tool parsers: read the tool calls in sampled text, strictly and without repair."""

from .base import AUTO, TOOL_PARSER_REGISTRY, ToolParser, UnknownToolParserError, get_tool_parser, register_tool_parser
from .formats.deepseek import DeepSeekV3ToolParser, DeepSeekV4ToolParser, DeepSeekV31ToolParser, DeepSeekV32ToolParser
from .formats.gemma4 import Gemma4ToolParser
from .formats.glm import GLMToolParser
from .formats.harmony import HarmonyToolParser
from .formats.hermes import GraniteToolParser, HermesToolParser, SmolLM3ToolParser
from .formats.kimi import KimiK2ToolParser, KimiK3ToolParser
from .formats.llama import Llama3JSONToolParser, Llama4PythonicToolParser
from .formats.minimax import MiniMaxM2ToolParser, MiniMaxM3ToolParser
from .formats.mistral import MistralToolParser
from .formats.phi4 import Phi4ToolParser
from .formats.qwen_xml import QwenXMLToolParser
from .formats.seed_oss import SeedOSSToolParser
from .results import ParsedTurn, ToolCallStatus, ToolParseResult

__all__ = [
    "AUTO",
    "DeepSeekV31ToolParser",
    "DeepSeekV32ToolParser",
    "DeepSeekV3ToolParser",
    "DeepSeekV4ToolParser",
    "GLMToolParser",
    "Gemma4ToolParser",
    "GraniteToolParser",
    "HarmonyToolParser",
    "HermesToolParser",
    "KimiK2ToolParser",
    "KimiK3ToolParser",
    "Llama3JSONToolParser",
    "Llama4PythonicToolParser",
    "MiniMaxM2ToolParser",
    "MiniMaxM3ToolParser",
    "MistralToolParser",
    "ParsedTurn",
    "Phi4ToolParser",
    "QwenXMLToolParser",
    "SeedOSSToolParser",
    "SmolLM3ToolParser",
    "TOOL_PARSER_REGISTRY",
    "ToolCallStatus",
    "ToolParseResult",
    "ToolParser",
    "UnknownToolParserError",
    "get_tool_parser",
    "register_tool_parser",
]
