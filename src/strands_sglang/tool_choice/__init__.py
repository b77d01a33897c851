"""Forced tool calls: `tool_choice` by SGLang's constrained decoding, in the format that the model was trained on.

Promises: the grammar of a call lets nothing through but one call that the format's parser reads, of a tool that the
choice allows, with arguments that fit its JSON schema. Where that cannot be had, `forced_call` raises, and `force_call`
warns that nothing is forced. What a schema's `format` says of a string that is written as plain text is an annotation
and not enforced.
"""

from .choice import GRAMMAR_PARAMETERS, forced_call
from .forcing import UNCONSTRAINED, can_force, force_call
from .formats import CALL_FORMATS

__all__ = ["CALL_FORMATS", "GRAMMAR_PARAMETERS", "UNCONSTRAINED", "can_force", "force_call", "forced_call"]
