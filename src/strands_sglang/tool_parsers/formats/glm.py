"""The format of GLM-4.5 to GLM-5: keys and values stand between tags as plain text, typed by the tool's JSON schema.

    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>x</arg_value>
    </tool_call>

GLM-4.7 and later leave the line breaks out. Nothing is escaped. A list or an object, where the schema allows no string,
ends where its JSON does, whatever stands in its strings. Any other value ends at the first `</arg_value>` after which
the call goes on as a call does: with `<arg_key>...</arg_key>`, or with the end mark. All other text may stand in a
value, except a key with the opening tag of its value: that could as well follow a value that was never closed. Such a
call is refused.
"""

from ..base import ToolParser, register_tool_parser
from ..reading import TaggedCalls


@register_tool_parser("glm")
class GLMToolParser(ToolParser):
    """Reads calls written as a name with `<arg_key>` and `<arg_value>` pairs between marks."""

    FORMAT_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    CALLS = TaggedCalls(
        call="{name}",
        call_end="",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>",
        parameter_end="</arg_value>",
        name=r"[^\s<]+",
        key=r"[^<\n]+",
        several=False,
        line=None,
    )
