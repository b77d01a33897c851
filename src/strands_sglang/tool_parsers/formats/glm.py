"""The format of GLM-4.5 to GLM-5: keys and values are plain text between tags, typed by the tool's JSON schema.

    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>x</arg_value>
    </tool_call>

GLM-4.7 and later omit the line breaks. Nothing is escaped. Where the schema allows no string, a list or an object ends
where its JSON ends, whatever its strings contain. Any other value ends at the first `</arg_value>` that is followed by
`<arg_key>...</arg_key>` or by the end mark. A value may contain any text except a key with the opening tag of its
value, which could also follow a value that was never closed; such calls are rejected.
"""

from ..base import ToolParser, register_tool_parser
from ..reading import TaggedCalls


@register_tool_parser("glm")
class GLMToolParser(ToolParser):
    """Parser for GLM-4.5 to GLM-5: a name, then `<arg_key>` and `<arg_value>` pairs.

    Values are plain text; their types come from the tool's JSON schema:

    ```text
    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>x</arg_value>
    </tool_call>
    ```

    A declared string is kept unchanged. Without a schema, a value that is JSON (other than a JSON string) is decoded;
    any other value is its text.
    """

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
