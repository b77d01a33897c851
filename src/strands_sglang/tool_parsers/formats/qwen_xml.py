"""The XML-like format of Qwen3-Coder, Qwen3.5 and later: values stand between tags as plain text.

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

The format escapes nothing and types nothing. Types come from the tool's JSON schema. A list or an object, where the
schema allows no string, ends where its JSON does, whatever stands in its strings. Any other value that begins on a line
of its own ends at the first line `</parameter>` after which the call goes on as a call does: with a line
`<parameter=...>`, or with `</function>` and the end mark. Where there is no such line, and for a value on the line of
its tag, white space does not count. All other text may stand in a value, with two exceptions that could as well be the
rest of a call whose value was never closed: `</function>` followed by the end mark, and a line `<parameter=...>`. Such
a call is refused. A string that holds the very lines that end one parameter and begin the next is two parameters:
nothing in the format tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..base import Element, Grammar, ToolParser, Writer, register_tool_parser
from ..reading import TaggedCalls


class _QwenCalls(TaggedCalls):
    """One newline on either side of a value belongs to the format."""

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value that a text means."""
        return super().value(text.removeprefix("\n").removesuffix("\n"), parameter, schema, root)

    def write(self, call: Writer, grammar: Grammar) -> Element:
        """Write a call; Nemotron's template ends the line after it."""
        return grammar.sequence(super().write(call, grammar), grammar.optional("\n"))

    def written_values(self, call: Writer, grammar: Grammar, schema: Any) -> Mapping[str, Any]:
        """Return what matches the text of a value, which may hold the end tag of a function."""
        excludes = (*self.excludes[:2], call.end)
        return {"": grammar.plain_value(schema, excludes, python_spellings=True)}


@register_tool_parser("qwen_xml")
class QwenXMLToolParser(ToolParser):
    """Reads calls written as `<function=...>` with `<parameter=...>` values between marks.

    The rest of a string is kept as it is, indentation included. Without a schema, a value that is JSON (other than a
    JSON string) is that value; any other is its text.
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
