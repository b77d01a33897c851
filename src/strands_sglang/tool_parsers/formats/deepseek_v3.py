"""The format of DeepSeek V3 and R1: JSON arguments in a fenced block after the tool's name.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search
```json
{"query": "x"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from ..base import ToolParser
from ..reading import JSONSection
from ..registry import register_tool_parser


@register_tool_parser("deepseek_v3")
class DeepSeekV3ToolParser(ToolParser):
    """Reads calls written as a name and a fenced JSON object, all of them in one section."""

    DEFAULT_TOOL_START_TOKEN = "<｜tool▁calls▁begin｜>"
    DEFAULT_TOOL_END_TOKEN = "<｜tool▁calls▁end｜>"
    FORMAT_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    CALLS = JSONSection(
        head=re.compile(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<`]+)\s*```json\s*"),
        tail=re.compile(r"\s*```\s*<｜tool▁call▁end｜>"),
        shape="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a line ```json",
        written_head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        written_tail="\n```<｜tool▁call▁end｜>",
    )
