"""The format of DeepSeek V3.1: JSON arguments behind the tool's name.

`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`
"""

from __future__ import annotations

import re

from ..reading.sections import JSONSectionToolParser
from ..registry import register_tool_parser


@register_tool_parser("deepseek_v3_1")
class DeepSeekV31ToolParser(JSONSectionToolParser):
    """Reads calls written as a name and a JSON object, all of them in one section."""

    DEFAULT_TOOL_START_TOKEN = "<｜tool▁calls▁begin｜>"
    DEFAULT_TOOL_END_TOKEN = "<｜tool▁calls▁end｜>"
    FORMAT_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    HEAD = re.compile(r"<｜tool▁call▁begin｜>\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*")
    TAIL = re.compile(r"\s*<｜tool▁call▁end｜>")
    SHAPE = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"
