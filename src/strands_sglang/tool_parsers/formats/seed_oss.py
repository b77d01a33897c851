"""The format of Seed-OSS: values are plain text between tags, typed by the tool's JSON schema.

    <seed:tool_call>
    <function=write_file>
    <parameter=path>notes.txt</parameter>
    <parameter=lines>3</parameter>
    </function>
    </seed:tool_call>

The template writes lists and objects as Python does, so they are read as JSON or else as Python literals. Reasoning is
between `<seed:think>` and `</seed:think>`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ..base import ToolParser, register_tool_parser
from ..reading import TaggedCalls, json_or_python, skip_space


class _SeedCalls(TaggedCalls):
    """Lists and objects are JSON or Python literals."""

    literal = staticmethod(json_or_python)

    def value(self, text: str, parameter: re.Match[str], schema: Any, root: Any) -> Any:
        """Return the value of a parameter's text, read as JSON or else as Python."""
        if self.nested_end(text, 0, schema, root) == len(text):
            decoded = self.literal(text, skip_space(text, 0))
            text = json.dumps(decoded.value) if decoded.problem is None else text
        return super().value(text, parameter, schema, root)


@register_tool_parser("seed_oss")
class SeedOSSToolParser(ToolParser):
    """Parser for Seed-OSS.

    Values are plain text; their types come from the tool's JSON schema. Lists and objects may be JSON or Python
    literals:

    ```text
    <seed:tool_call>
    <function=search>
    <parameter=query>x</parameter>
    </function>
    </seed:tool_call>
    ```

    A declared string is kept unchanged. Without a schema, a value that is JSON (other than a JSON string) is decoded;
    any other value is its text. A value with a line that begins with `<parameter=...>` is rejected.
    """

    DEFAULT_TOOL_START_TOKEN = "<seed:tool_call>"
    DEFAULT_TOOL_END_TOKEN = "</seed:tool_call>"
    DEFAULT_THINK_START_TOKEN = "<seed:think>"
    DEFAULT_THINK_END_TOKEN = "</seed:think>"
    CALLS = _SeedCalls(
        call="<function={name}>",
        call_end="</function>",
        parameter="<parameter={key}>",
        parameter_end="</parameter>",
        name=r"[^<>\n]+",
        key=r"[^<>\n]+",
        several=False,
        tag_before="\n",
        python_spellings=True,
    )
