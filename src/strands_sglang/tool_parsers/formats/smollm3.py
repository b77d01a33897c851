"""The format of SmolLM3: Hermes' calls.

SmolLM3's template describes tools given as `xml_tools` and asks for `<tool_call>{"name": ..., "arguments": {...}}` and
`</tool_call>`. It drops the calls of earlier turns, so that what it asks for is all there is to go by. Python code
between `<code>` and `</code>`, for its `python_tools`, is text here: nothing runs it.
"""

from __future__ import annotations

from ..base import ToolParser
from ..registry import register_tool_parser
from .hermes import JSONObject


@register_tool_parser("smollm3")
class SmolLM3ToolParser(ToolParser):
    """Reads SmolLM3's calls; see `HermesToolParser`."""

    CALLS = JSONObject()
