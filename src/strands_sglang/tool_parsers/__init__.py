"""Tool parsers: from what a model sampled to tool calls, strictly as it was written."""

from .base import ParsedTurn, ToolCallStatus, ToolParser, ToolParseResult
from .deepseek_v3 import DeepSeekV3ToolParser
from .deepseek_v3_1 import DeepSeekV31ToolParser
from .deepseek_v3_2 import DeepSeekV4ToolParser, DeepSeekV32ToolParser
from .gemma4 import Gemma4ToolParser
from .glm import GLMToolParser
from .granite import GraniteToolParser
from .harmony import HarmonyToolParser
from .hermes import HermesToolParser
from .kimi_k2 import KimiK2ToolParser
from .kimi_k3 import KimiK3ToolParser
from .llama3_json import Llama3JSONToolParser
from .llama4_pythonic import Llama4PythonicToolParser
from .minimax_m2 import MiniMaxM2ToolParser
from .minimax_m3 import MiniMaxM3ToolParser
from .mistral import MistralToolParser
from .phi4 import Phi4ToolParser
from .qwen_xml import QwenXMLToolParser
from .registry import AUTO, TOOL_PARSER_REGISTRY, UnknownToolParserError, get_tool_parser, register_tool_parser
from .seed_oss import SeedOSSToolParser
from .smollm3 import SmolLM3ToolParser

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
