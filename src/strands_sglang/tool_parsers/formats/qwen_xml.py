"""The XML-like format of Qwen3-Coder, Qwen3.5 and later: values are plain text between tags.

    <tool_call>
    <function=write_file>
    <parameter=path>
    notes.txt
    </parameter>
    <parameter=lines>
    3
    </parameter>
    </function>
    </tool_call>

The format neither escapes nor types values. Types come from the tool's JSON schema.

- Where the schema allows no string, a list or an object ends where its JSON ends, whatever its strings contain.
- Any other value that begins on a line of its own ends at the first line `</parameter>` that is followed by a line
  `<parameter=...>`, or by `</function>` and the end mark. If there is no such line, or if the value begins on the line
  of its tag, white space is ignored.
- A value may contain any other text, except `</function>` followed by the end mark, and a line `<parameter=...>`: both
  could also be the rest of a call whose value was never closed. Such calls are rejected.
- A string that contains the very lines that end one parameter and begin the next is read as two parameters. Nothing in
  the format distinguishes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import TaggedCalls


class _QwenCalls(TaggedCalls):
    """The format adds one newline before and after a value."""

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value of a parameter's text."""
        return super().value(text.removeprefix("\n").removesuffix("\n"), parameter, schema, root)

    def write(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call; Nemotron's template adds a newline."""
        return grammar.sequence(super().write(call, grammar), grammar.optional("\n"))

    def written_values(self, call: Writer, grammar: Grammar, schema: Any) -> Mapping[str, Any]:
        """Return the grammar element of a value, which may contain the end tag of a function."""
        excludes = (*self.excludes[:2], call.end)
        return {"": grammar.plain_value(schema, excludes, python_spellings=True)}


@register_tool_parser("qwen_xml")
class QwenXMLToolParser(ToolParser):
    """Parser for Qwen3-Coder, Qwen3.5 and later, and Nemotron 3.

    Values are plain text; their types come from the tool's JSON schema:

    ```text
    <tool_call>
    <function=search>
    <parameter=query>
    x
    </parameter>
    </function>
    </tool_call>
    ```

    One newline before and after a value belongs to the format. The rest of a declared string is kept unchanged,
    indentation included. Without a schema, a value that is JSON (other than a JSON string) is decoded; any other value
    is its text. A call is rejected if the end of a value is ambiguous.
    """

    CALLS = _QwenCalls(
        call="<function={name}>",
        call_end="</function>",
        parameter="<parameter={key}>",
        parameter_end="</parameter>",
        name=r"[^>\n]+",
        key=r"[^>\n]+",
        several=False,
        tag_before="\n",
        tag_after="\n",
    )
