"""The format of DeepSeek V3.1: JSON arguments after the tool's name.

`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`
"""

from __future__ import annotations

import re

from ..base import ToolParser
from ..reading import JSONSection
from ..registry import register_tool_parser


@register_tool_parser("deepseek_v3_1")
class DeepSeekV31ToolParser(ToolParser):
    """Reads calls written as a name and a JSON object, all of them in one section."""

    DEFAULT_TOOL_START_TOKEN = "<｜tool▁calls▁begin｜>"
    DEFAULT_TOOL_END_TOKEN = "<｜tool▁calls▁end｜>"
    FORMAT_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    CALLS = JSONSection(
        head=re.compile(r"<｜tool▁call▁begin｜>\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*"),
        tail=re.compile(r"\s*<｜tool▁call▁end｜>"),
        shape="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        written_head="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        written_tail="<｜tool▁call▁end｜>",
    )
