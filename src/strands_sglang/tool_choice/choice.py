"""From a tool choice to the sampling parameters that force it; whether reasoning comes before depends on the prompt.

A parser writes the call that it reads (`ToolParser.write_call`), from a `CallWriter` and the elements of `grammar`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..templates.chat_template import ChatTemplate, Prompt
from ..tool_parsers import TOOL_PARSER_REGISTRY, ToolParser
from . import grammar
from .grammar import (
    JSON,
    Element,
    Notation,
    constant_text,
    either,
    free_text,
    json_object,
    matching,
    optional,
    sequence,
    structural_tag,
)
from .schemas import Property, Schema, alternatives, argument_schema, object_properties

GRAMMAR_PARAMETERS = ("json_schema", "regex", "ebnf", "structural_tag")
"""SGLang's sampling parameters that constrain what is sampled; a request may have one of them."""

UNCONSTRAINED = dict.fromkeys((*GRAMMAR_PARAMETERS, "stop", "stop_regex", "stop_token_ids", "min_new_tokens"))
"""What a grammar takes out of configured sampling parameters: another grammar, and what ends an answer elsewhere."""

_LARGEST = 250_000  # characters of a grammar; every request carries it, and the server compiles it once
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # what parsers take for a name
CALL_FORMATS = frozenset(TOOL_PARSER_REGISTRY.values())
"""The parsers that write calls; exactly those classes, for a subclass may read something else."""


class CallWriter:
    """What a parser writes: one call.

    Attributes:
        name: The tool.
        schema: Of its arguments.
        start: The mark before calls.
        end: The mark after calls.
    """

    def __init__(self, parser: ToolParser, name: str, schema: Schema) -> None:
        """Write a call of a tool that the parser reads."""
        self.name, self.schema = name, schema
        self.start, self.end = parser.tool_start_token, parser.tool_end_token

    def json(self, notation: Notation = JSON) -> Element:
        """Return what matches the arguments as JSON, or in another notation.

        Raises:
            NotImplementedError: There is no grammar for that.
        """
        if any(option.value.get("type") != "object" for option in alternatives(self.schema)):
            raise self.schema.unsupported("the arguments of a tool are an object")
        return notation.value(self.schema)

    def object(self) -> Element:
        """Return what matches a JSON object of the name and the arguments."""
        return json_object({"name": constant_text(self.name), "arguments": self.json()})

    def properties(self, key: str | None = None) -> list[Property]:
        """Return the parameters of the tool.

        Args:
            key: Pattern of the names that the format can write.

        Raises:
            NotImplementedError: The format cannot write one of the names, or the schema is not that of one object.
        """
        options = alternatives(self.schema)
        if len(options) != 1 or options[0].value.get("type") != "object":
            raise self.schema.unsupported("a grammar of this format needs the schema of a single object")
        properties = object_properties(options[0])
        for found in properties:
            if key is not None and re.fullmatch(key, found.name) is None:
                raise found.schema.unsupported(f"the format cannot write the parameter {found.name!r}")
        return properties


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
    if choice is None or set(choice) == {"auto"}:
        return None
    chosen = f"the tool choice {dict(choice)!r}"
    if set(choice) not in ({"any"}, {"tool"}):
        raise ValueError(f"a tool choice is one of 'auto', 'any' and 'tool', not {dict(choice)!r}")
    if not tool_specs:
        raise ValueError(f"{chosen} needs tools, and there are none")
    specs = list(tool_specs)
    if "tool" in choice:
        wanted = choice["tool"].get("name")
        specs = [spec for spec in tool_specs if spec["name"] == wanted][:1]
        if not specs:
            names = ", ".join(spec["name"] for spec in tool_specs)
            raise ValueError(f"the tool choice asks for {wanted!r}, and the tools are: {names}")
    given = [name for name in GRAMMAR_PARAMETERS if (sampling_params or {}).get(name) is not None]
    if given:
        raise ValueError(
            f"{chosen} needs a grammar, and sampling_params has one already, {given[0]!r}; the server takes one at most"
        )
    for spec in specs:
        if _NAME.fullmatch(spec["name"]) is None:
            raise ValueError(f"{spec['name']!r} is not a name that a call can have: letters, digits, '_' and '-'")
    if type(parser) not in CALL_FORMATS:
        supported = sorted(name for name, known in TOOL_PARSER_REGISTRY.items() if known in CALL_FORMATS)
        raise NotImplementedError(
            f"{chosen} cannot be forced on the format of {type(parser).__name__}: no grammar "
            f"of it is known; there is one for {', '.join(supported)}"
        )
    try:
        writers = [CallWriter(parser, spec["name"], argument_schema(spec)) for spec in specs]
        call = either([parser.write_call(writer, grammar) for writer in writers])
    except NotImplementedError as error:
        raise NotImplementedError(f"{chosen} cannot be forced with {type(parser).__name__}: {error}") from error
    params = structural_tag(sequence(_reasoning(parser, reasoning_open, may_reason), call))
    if (size := len(params["structural_tag"])) > _LARGEST:
        raise NotImplementedError(
            f"{chosen} cannot be forced with {type(parser).__name__}: its grammar would have "
            f"{size} characters, and the server gets {_LARGEST} at most"
        )
    return params


def _reasoning(parser: ToolParser, is_open: bool, may_open: bool) -> Element:
    """Return what may stand before a call."""
    end = parser.think_end_token
    before = matching(parser.BEFORE_CALL)
    if not (is_open or may_open):
        return before
    if not end:
        raise ValueError(f"{type(parser).__name__} has no mark that ends reasoning, so a call cannot follow it")
    rest = sequence(free_text((end,)), end, parser.AFTER_REASONING)
    opened = sequence(before, f"{parser.think_start_token}{parser.THOUGHT}", rest)
    return sequence(rest if is_open else optional(opened), before)


def can_force(
    parser: ToolParser,
    tool_specs: Sequence[Mapping[str, Any]] | None = None,
    choice: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the parser's format has a grammar, and one for a tool choice if there is one."""
    if type(parser) not in CALL_FORMATS:
        return False
    try:
        forced_call(parser, tool_specs, choice)
    except NotImplementedError:
        return False
    return True


def force_call(
    parser: ToolParser,
    tool_specs: Sequence[Mapping[str, Any]] | None,
    choice: Mapping[str, Any] | None,
    template: ChatTemplate,
    prompt: Prompt,
    *,
    sampling_params: Mapping[str, Any],
) -> Mapping[str, Any] | None:
    """The sampling parameters that force a tool choice, with None for what has to go; None if nothing is forced.

    Where the format or a schema has no grammar, a warning says so and nothing is forced, as Strands' other providers
    have it.

    Args:
        parser: Reads the calls of the model.
        tool_specs: The tools, as Strands specs.
        choice: A Strands tool choice.
        template: Tells whether the model may open reasoning by itself.
        prompt: Tells whether it ends inside reasoning.
        sampling_params: The parameters that the request has anyway.

    Raises:
        ValueError: See `forced_call`.
    """
    start, end = parser.think_start_token, parser.think_end_token
    try:
        forced = forced_call(
            parser,
            tool_specs,
            choice,
            sampling_params=sampling_params,
            reasoning_open=prompt.ends_with(start),
            may_reason=bool(start) and not prompt.ends_with(end) and start.strip() in template.template_text,
        )
    except NotImplementedError as error:
        warnings.warn(f"the tool choice is not forced, the model may ignore it: {error}", stacklevel=2)
        return None
    return None if forced is None else {**UNCONSTRAINED, **forced}
