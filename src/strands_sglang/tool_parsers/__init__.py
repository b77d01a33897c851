"""Tool parsers: from what a model sampled to tool calls, strictly as it was written."""

from .base import ToolParser
from .formats.deepseek_v3 import DeepSeekV3ToolParser
from .formats.deepseek_v3_1 import DeepSeekV31ToolParser
from .formats.deepseek_v3_2 import DeepSeekV4ToolParser, DeepSeekV32ToolParser
from .formats.gemma4 import Gemma4ToolParser
from .formats.glm import GLMToolParser
from .formats.granite import GraniteToolParser
from .formats.harmony import HarmonyToolParser
from .formats.hermes import HermesToolParser
from .formats.kimi_k2 import KimiK2ToolParser
from .formats.kimi_k3 import KimiK3ToolParser
from .formats.llama3_json import Llama3JSONToolParser
from .formats.llama4_pythonic import Llama4PythonicToolParser
from .formats.minimax_m2 import MiniMaxM2ToolParser
from .formats.minimax_m3 import MiniMaxM3ToolParser
from .formats.mistral import MistralToolParser
from .formats.phi4 import Phi4ToolParser
from .formats.qwen_xml import QwenXMLToolParser
from .formats.seed_oss import SeedOSSToolParser
from .formats.smollm3 import SmolLM3ToolParser
from .registry import AUTO, TOOL_PARSER_REGISTRY, UnknownToolParserError, get_tool_parser, register_tool_parser
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
