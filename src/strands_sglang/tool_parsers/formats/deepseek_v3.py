"""The format of DeepSeek V3 and R1: JSON arguments in a fenced block behind the tool's name.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search
```json
{"query": "x"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from ..reading.sections import JSONSectionToolParser
from ..registry import register_tool_parser


@register_tool_parser("deepseek_v3")
class DeepSeekV3ToolParser(JSONSectionToolParser):
    """Reads calls written as a name and a fenced JSON object, all of them in one section."""

    DEFAULT_TOOL_START_TOKEN = "<｜tool▁calls▁begin｜>"
    DEFAULT_TOOL_END_TOKEN = "<｜tool▁calls▁end｜>"
    FORMAT_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    HEAD = re.compile(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<`]+)\s*```json\s*")
    TAIL = re.compile(r"\s*```\s*<｜tool▁call▁end｜>")
    SHAPE = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a line ```json"
