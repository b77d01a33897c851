"""Forced tool calls: `tool_choice` by SGLang's constrained decoding, in the format that the model was trained on.

Promises: the grammar of a call lets nothing through but one call that the format's parser reads, of a tool that the
choice allows, with arguments that fit its JSON schema and are declared there. Where that cannot be had, `forced_call`
raises, and `force_call` warns that nothing is forced: a `pattern` other than plain characters, classes and repetitions
between `^` and `$`, objects whose properties nobody declares, schemas that refer to themselves, values that a format
does not tell apart, and keywords that no grammar expresses (`uniqueItems`, `multipleOf`, ...). A grammar lets through
less than a schema allows: declared properties in their order, lists of `prefixItems` as long as those, single values
where no type is declared, numbers of at most 18 digits. `format` is an annotation and not enforced.
"""

from .choice import CALL_FORMATS, GRAMMAR_PARAMETERS, UNCONSTRAINED, can_force, force_call, forced_call

__all__ = ["CALL_FORMATS", "GRAMMAR_PARAMETERS", "UNCONSTRAINED", "can_force", "force_call", "forced_call"]
