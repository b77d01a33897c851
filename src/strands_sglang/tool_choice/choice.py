"""Sampling parameters that force a tool choice.

A parser writes the grammar of the calls that it reads (`ToolParser.write_call`), from a `CallWriter` and the elements
of `grammar`. The prompt decides whether reasoning may come before the call.
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
"""SGLang's sampling parameters that set a grammar; a request may have one of them."""

UNCONSTRAINED = dict.fromkeys((*GRAMMAR_PARAMETERS, "stop", "stop_regex", "stop_token_ids", "min_new_tokens"))
"""Sampling parameters that a forced call removes: other grammars and stop conditions."""

_LARGEST = 250_000  # characters of a grammar, which every request contains and the server compiles once
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # names that all parsers read
CALL_FORMATS = frozenset(TOOL_PARSER_REGISTRY.values())
"""Parsers that write calls: exactly these classes, since a subclass may read another format."""


class CallWriter:
    """A call that a parser writes as a grammar.

    Attributes:
        name: Name of the tool.
        schema: Schema of the arguments.
        start: Mark before calls.
        end: Mark after calls.
    """

    def __init__(self, parser: ToolParser, name: str, schema: Schema) -> None:
        """Take the marks from the parser."""
        self.name, self.schema = name, schema
        self.start, self.end = parser.tool_start_token, parser.tool_end_token

    def json(self, notation: Notation = JSON) -> Element:
        """Return the grammar of the arguments, as JSON or in another notation.

        Raises:
            NotImplementedError: No grammar can express the schema.
        """
        if any(option.value.get("type") != "object" for option in alternatives(self.schema)):
            raise self.schema.unsupported("the arguments of a tool must be an object")
        return notation.value(self.schema)

    def object(self) -> Element:
        """Return the grammar of a JSON object with the name and the arguments."""
        return json_object({"name": constant_text(self.name), "arguments": self.json()})

    def properties(self, key: str | None = None) -> list[Property]:
        """Return the parameters of the tool.

        Args:
            key: Pattern of the names that the format can write; None for any name.

        Raises:
            NotImplementedError: The format cannot write one of the names, or the schema does not describe one object.
        """
        options = alternatives(self.schema)
        if len(options) != 1 or options[0].value.get("type") != "object":
            raise self.schema.unsupported("a grammar of this format needs the schema of one object")
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

    Parse the sampled call by its characters, without token ids: the grammar forces the characters of a mark, not its
    token. A response that is cut off by `max_new_tokens` still ends in an unterminated call.

    Args:
        parser: Parser of the model's calls; the model writes its format.
        tool_specs: Strands tool specs.
        choice: Strands tool choice: `{"any": {}}`, `{"tool": {"name": ...}}`, `{"auto": {}}` or None.
        sampling_params: Other sampling parameters of the request.
        reasoning_open: Whether the prompt ended inside reasoning, which the model may then finish before the call.
        may_reason: Whether the model may open reasoning before the call.

    Returns:
        Sampling parameters to add to the request; None if the choice forces nothing.

    Raises:
        ValueError: There are no tools or none of that name, the choice is invalid, the request already has a grammar,
            or the name of a tool cannot be written in a call.
        NotImplementedError: There is no grammar for this format, or for this schema in it.
    """
    if choice is None or set(choice) == {"auto"}:
        return None
    chosen = f"the tool choice {dict(choice)!r}"
    if set(choice) not in ({"any"}, {"tool"}):
        raise ValueError(f"a tool choice must be one of 'auto', 'any' and 'tool', not {dict(choice)!r}")
    if not tool_specs:
        raise ValueError(f"{chosen} needs tools, but there are none")
    specs = list(tool_specs)
    if "tool" in choice:
        name = choice["tool"].get("name")
        specs = [spec for spec in tool_specs if spec["name"] == name][:1]
        if not specs:
            names = ", ".join(spec["name"] for spec in tool_specs)
            raise ValueError(f"the tool choice asks for {name!r}, but the tools are: {names}")
    given = [name for name in GRAMMAR_PARAMETERS if (sampling_params or {}).get(name) is not None]
    if given:
        raise ValueError(
            f"{chosen} needs a grammar, but sampling_params already has one, {given[0]!r}; a request may have only one"
        )
    for spec in specs:
        if _NAME.fullmatch(spec["name"]) is None:
            raise ValueError(
                f"the tool name {spec['name']!r} cannot be written in a call: use letters, digits, '_' and '-'"
            )
    if type(parser) not in CALL_FORMATS:
        supported = sorted(name for name, known in TOOL_PARSER_REGISTRY.items() if known in CALL_FORMATS)
        raise NotImplementedError(
            f"{chosen} cannot be forced: {type(parser).__name__} has no grammar; "
            f"these tool parsers have one: {', '.join(supported)}"
        )
    try:
        writers = [CallWriter(parser, spec["name"], argument_schema(spec)) for spec in specs]
        call = either([parser.write_call(writer, grammar) for writer in writers])
    except NotImplementedError as error:
        raise NotImplementedError(f"{chosen} cannot be forced with {type(parser).__name__}: {error}") from error
    params = structural_tag(sequence(_reasoning(parser, reasoning_open, may_reason), call))
    if (size := len(params["structural_tag"])) > _LARGEST:
        raise NotImplementedError(
            f"{chosen} cannot be forced with {type(parser).__name__}: the grammar would have "
            f"{size} characters, and the limit is {_LARGEST}"
        )
    return params


def _reasoning(parser: ToolParser, is_open: bool, may_open: bool) -> Element:
    """Return the grammar of the text before a call."""
    end = parser.think_end_token
    before = matching(parser.BEFORE_CALL)
    if not (is_open or may_open):
        return before
    if not end:
        raise ValueError(f"{type(parser).__name__} has no mark that ends reasoning, so no call can follow it")
    rest = sequence(free_text((end,)), end, parser.AFTER_REASONING)
    opened = sequence(before, f"{parser.think_start_token}{parser.THOUGHT}", rest)
    return sequence(rest if is_open else optional(opened), before)


def can_force(
    parser: ToolParser,
    tool_specs: Sequence[Mapping[str, Any]] | None = None,
    choice: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether the parser's format has a grammar, also for the tool choice if there is one."""
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
    """Return the sampling parameters that force a tool choice; None if nothing is forced.

    A value of None removes a parameter from the request. If the format or a schema has no grammar, a warning is issued
    and nothing is forced, as with Strands' other providers.

    Args:
        parser: Parser of the model's calls.
        tool_specs: Strands tool specs.
        choice: Strands tool choice.
        template: Chat template, which shows whether the model may open reasoning.
        prompt: Prompt, which shows whether reasoning is open at its end.
        sampling_params: Other sampling parameters of the request.

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
        warnings.warn(f"the tool choice is not forced, and the model may ignore it: {error}", stacklevel=2)
        return None
    return None if forced is None else {**UNCONSTRAINED, **forced}
