"""From a tool choice to the sampling parameters that force it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..tool_parsers import TOOL_PARSER_REGISTRY, ToolParser
from .formats import CALL_FORMATS, Call, CallFormat
from .grammar import Element, either, free_text, matching, optional, sequence, structural_tag
from .schemas import argument_schema

GRAMMAR_PARAMETERS = ("json_schema", "regex", "ebnf", "structural_tag")
"""SGLang's sampling parameters that constrain what is sampled; a request may have one of them."""

_LARGEST = 250_000  # characters of a grammar; every request carries it, and the server compiles it once
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # what parsers take for a name


def forced_call(
    parser: ToolParser,
    tool_specs: Sequence[Mapping[str, Any]] | None,
    choice: Mapping[str, Any] | None,
    *,
    sampling_params: Mapping[str, Any] | None = None,
    reasoning_open: bool = False,
    may_reason: bool = False,
) -> dict[str, str] | None:
    """Return the sampling parameters that make a model call exactly one tool, with arguments that fit its schema.

    What comes out has to be parsed by its characters, without token ids: the grammar forces the characters of a mark,
    not its token. An answer that is cut off (`max_new_tokens`) still ends in an unterminated call.

    Args:
        parser: Reads the calls of the model; its format is what the model will write.
        tool_specs: The tools, as Strands specs.
        choice: A Strands tool choice: `{"any": {}}`, `{"tool": {"name": ...}}`, `{"auto": {}}` or None.
        sampling_params: The parameters that the request has anyway.
        reasoning_open: The prompt ended inside reasoning; the model may then finish it before the call.
        may_reason: The model may open reasoning itself before the call.

    Returns:
        Parameters to add to the request's; None if nothing is forced.

    Raises:
        ValueError: There are no tools, or none of that name; the choice is none; the request has a grammar already; a
            tool has a name that no call can have.
        NotImplementedError: There is no grammar for this format, or none for such a schema in it.
    """
    specs = _forced_specs(tool_specs or (), choice)
    if specs is None:
        return None
    given = [name for name in GRAMMAR_PARAMETERS if (sampling_params or {}).get(name) is not None]
    if given:
        raise ValueError(
            f"the tool choice {_shown(choice)} needs a grammar, and sampling_params has one already, {given[0]!r}; "
            "the server takes one at most"
        )
    for spec in specs:
        if _NAME.fullmatch(spec["name"]) is None:
            raise ValueError(f"{spec['name']!r} is not a name that a call can have: letters, digits, '_' and '-'")
    call_format = CALL_FORMATS.get(type(parser))
    if call_format is None:
        supported = sorted(name for name, known in TOOL_PARSER_REGISTRY.items() if known in CALL_FORMATS)
        raise NotImplementedError(
            f"the tool choice {_shown(choice)} cannot be forced on the format of {type(parser).__name__}: no grammar "
            f"of it is known; there is one for {', '.join(supported)}"
        )
    try:
        call = either([call_format.write(Call(parser, spec["name"], argument_schema(spec))) for spec in specs])
    except NotImplementedError as error:
        name = type(parser).__name__
        raise NotImplementedError(f"the tool choice {_shown(choice)} cannot be forced with {name}: {error}") from error
    params = structural_tag(sequence(_reasoning(call_format, parser, reasoning_open, may_reason), call))
    if (size := len(params["structural_tag"])) > _LARGEST:
        raise NotImplementedError(
            f"the tool choice {_shown(choice)} cannot be forced with {type(parser).__name__}: its grammar would have "
            f"{size} characters, and the server gets {_LARGEST} at most"
        )
    return params


def _forced_specs(
    tool_specs: Sequence[Mapping[str, Any]], choice: Mapping[str, Any] | None
) -> list[Mapping[str, Any]] | None:
    """Return the tools one of which has to be called; None if none has to."""
    if choice is None or set(choice) == {"auto"}:
        return None
    if set(choice) not in ({"any"}, {"tool"}):
        raise ValueError(f"a tool choice is one of 'auto', 'any' and 'tool', not {_shown(choice)}")
    if not tool_specs:
        raise ValueError(f"the tool choice {_shown(choice)} needs tools, and there are none")
    if "any" in choice:
        return list(tool_specs)
    wanted = choice["tool"].get("name")
    found = [spec for spec in tool_specs if spec["name"] == wanted]
    if not found:
        names = ", ".join(spec["name"] for spec in tool_specs)
        raise ValueError(f"the tool choice asks for {wanted!r}, and the tools are: {names}")
    return found[:1]


def _reasoning(call_format: CallFormat, parser: ToolParser, is_open: bool, may_open: bool) -> Element:
    """Return what may stand before a call."""
    end = parser.think_end_token
    before = matching(call_format.before) if call_format.before else sequence("")
    if not (is_open or may_open):
        return before
    if not end:
        raise ValueError(f"{type(parser).__name__} has no mark that ends reasoning, so a call cannot follow it")
    rest = sequence(free_text((end,)), end, call_format.after_reasoning)
    if is_open:
        return sequence(rest, before)
    opened = sequence(before, f"{parser.think_start_token}{call_format.thought}", rest)
    return sequence(optional(opened), before)


def _shown(choice: Mapping[str, Any] | None) -> str:
    return repr(dict(choice or {}))
