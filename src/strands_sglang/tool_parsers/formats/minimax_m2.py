"""The format of MiniMax M2 (to M2.5): values stand between tags as plain text, typed by the tool's JSON schema.

<minimax:tool_call>
<invoke name="search">
<parameter name="query">x</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping

from ..base import ToolParseResult
from ..reading.arguments import typed_call
from ..reading.marked import ToolSchemas
from ..reading.tagged import TaggedToolParser, Tags
from ..registry import register_tool_parser


@register_tool_parser("minimax_m2")
class MiniMaxM2ToolParser(TaggedToolParser):
    """Reads calls written as `<invoke name="...">` with `<parameter name="...">` values, all of them in one section.

    A string is kept as it is, white space included. Without a schema, a value that is JSON (other than a JSON string)
    is that value; any other is its text. A value with a line that begins with `<parameter name="...">` is refused.
    """

    DEFAULT_TOOL_START_TOKEN = "<minimax:tool_call>"
    DEFAULT_TOOL_END_TOKEN = "</minimax:tool_call>"
    TAGS = Tags.of(
        call=r'<invoke name="(?P<name>[^"\n]+)">',
        call_end="</invoke>",
        parameter=r'<parameter name="(?P<key>[^"\n]+)">',
        parameter_end="</parameter>",
        before_parameter="\n",
    )

    def make_result(
        self, name: str, values: Mapping[str, tuple[str | None, str]], raw: str, tools: ToolSchemas | None
    ) -> ToolParseResult:
        """Return the result for a call that is complete; see `TaggedToolParser.make_result`."""
        return typed_call(name, {key: text for key, (_, text) in values.items()}, raw, tools)
