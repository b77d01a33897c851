"""The parser that is chosen for a real chat template reads the calls that the template writes."""

from __future__ import annotations

import pytest

from strands_sglang.tool_parsers import UnknownToolParserError, get_tool_parser
from support.families import FAMILIES, load_template


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parser_of_a_family_is_found_by_its_chat_template(family: str) -> None:
    expected = FAMILIES[family].tool_format
    if expected is None:
        with pytest.raises(UnknownToolParserError, match="name one in place of 'auto'"):
            get_tool_parser("auto", chat_template=load_template(family))
    else:
        found = get_tool_parser("auto", chat_template=load_template(family))
        assert type(found) is type(get_tool_parser(expected))
