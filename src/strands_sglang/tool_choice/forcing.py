"""A tool choice for one prompt of a model: whether reasoning comes before the call depends on both."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..templates.chat_template import ChatTemplate, Prompt
from ..tool_parsers import ToolParser
from .choice import CALL_FORMATS, GRAMMAR_PARAMETERS, forced_call

UNCONSTRAINED = dict.fromkeys((*GRAMMAR_PARAMETERS, "stop", "stop_regex", "stop_token_ids", "min_new_tokens"))
"""What a grammar takes out of configured sampling parameters: another grammar, and what ends an answer elsewhere."""


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
            may_reason=bool(start) and not prompt.ends_with(end) and template.mentions(start.strip()),
        )
    except NotImplementedError as error:
        warnings.warn(f"the tool choice is not forced, the model may ignore it: {error}", stacklevel=2)
        return None
    return None if forced is None else {**UNCONSTRAINED, **forced}
