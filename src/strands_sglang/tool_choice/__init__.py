"""Forced tool calls: `tool_choice` by constrained decoding, in the format that the model was trained on.

Promise: the grammar matches exactly one call that the format's parser reads, of a tool that the choice allows, with
declared arguments that fit the tool's JSON schema. If no grammar can guarantee that, `forced_call` raises, and
`force_call` warns and forces nothing. Unsupported are: a `pattern` other than plain characters, classes, repetitions
and groups of alternatives between `^` and `$`; values that a format does not distinguish; an object without declared
properties in formats with their own notation of objects; and keywords that no grammar expresses (`uniqueItems`,
`multipleOf`, ...).

A grammar matches less than a schema allows: properties in declared order, as many list items as `prefixItems`, scalars
where no type is declared, numbers of at most 18 digits, and recursive values of a few levels. `format` is an annotation
and is not enforced. What no grammar can prevent is a key that is written twice in an object of any keys: the parser
rejects such a call.
"""

from .choice import CALL_FORMATS, GRAMMAR_PARAMETERS, UNCONSTRAINED, can_force, force_call, forced_call

__all__ = ["CALL_FORMATS", "GRAMMAR_PARAMETERS", "UNCONSTRAINED", "can_force", "force_call", "forced_call"]
