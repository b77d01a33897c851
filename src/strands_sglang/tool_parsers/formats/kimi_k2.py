"""The format of Kimi K2 (Instruct, Thinking, K2.5): JSON arguments after an id that names the tool.

`<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "x"}
<|tool_call_end|><|tool_calls_section_end|>`, without the line break. The number counts the calls of the conversation.
"""

from __future__ import annotations

import re

from ..base import ToolParser
from ..reading import JSONSection
from ..registry import register_tool_parser


@register_tool_parser("kimi_k2")
class KimiK2ToolParser(ToolParser):
    """Reads calls written as an id such as `functions.search:0` and a JSON object, all of them in one section.

    The id is kept as `native_id`, of broken calls as well: tool results name it.
    """

    DEFAULT_TOOL_START_TOKEN = "<|tool_calls_section_begin|>"
    DEFAULT_TOOL_END_TOKEN = "<|tool_calls_section_end|>"
    FORMAT_TOKENS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    CALLS = JSONSection(
        head=re.compile(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<|:]+):[0-9]+)"
            r"\s*<\|tool_call_argument_begin\|>\s*"
        ),
        tail=re.compile(r"\s*<\|tool_call_end\|>"),
        shape="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
        written_head="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        written_tail="<|tool_call_end|>",
    )
