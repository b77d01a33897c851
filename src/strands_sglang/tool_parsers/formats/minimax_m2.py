"""The format of MiniMax M2 (to M2.5): values stand between tags as plain text, typed by the tool's JSON schema.

<minimax:tool_call>
<invoke name="search">
<parameter name="query">x</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from ..base import ToolParser
from ..reading import TaggedCalls
from ..registry import register_tool_parser


@register_tool_parser("minimax_m2")
class MiniMaxM2ToolParser(ToolParser):
    """Reads calls written as `<invoke name="...">` with `<parameter name="...">` values, all of them in one section.

    A value with a line that begins with `<parameter name="...">` is refused.
    """

    DEFAULT_TOOL_START_TOKEN = "<minimax:tool_call>"
    DEFAULT_TOOL_END_TOKEN = "</minimax:tool_call>"
    CALLS = TaggedCalls(
        call='<invoke name="{name}">',
        call_end="</invoke>",
        parameter='<parameter name="{key}">',
        parameter_end="</parameter>",
        name=r'[^"\n]+',
        key=r'[^"\n]+',
        tag_before="\n",
    )
