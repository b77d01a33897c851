"""Where tool parsers are found: by name, or by the model family that a chat template belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..families import find_family
from .base import ToolParser

AUTO = "auto"
"""In place of a name: the parser of the model family."""

TOOL_PARSER_REGISTRY: dict[str, type[ToolParser]] = {}
"""The parser classes by name."""

ParserT = TypeVar("ParserT", bound=ToolParser)


class UnknownToolParserError(KeyError, ValueError):
    """No tool parser is registered under that name, or none is known for a model family."""

    def __str__(self) -> str:
        """Return the message (a `KeyError` would put it in quotes)."""
        return str(self.args[0])


def register_tool_parser(name: str) -> Callable[[type[ParserT]], type[ParserT]]:
    """Return a decorator that registers a parser class under `name`, in place of an earlier one."""

    def register(parser: type[ParserT]) -> type[ParserT]:
        TOOL_PARSER_REGISTRY[name] = parser
        return parser

    return register


def get_tool_parser(name: str, *, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any) -> ToolParser:
    """Return a new parser by name.

    Args:
        name: A registered name, such as `hermes` or `qwen_xml`, or `auto` for the parser of the model family that the
            chat template belongs to.
        tokenizer: For `auto`: the model's tokenizer, whose chat template is looked at. Of several named templates that
            is `tool_use`, or else `default`.
        chat_template: For `auto`: the text of the chat template (or its name, if the tokenizer has several) in place of
            the tokenizer's own.
        **kwargs: Arguments of the parser class.

    Raises:
        UnknownToolParserError: No parser has that name, or `auto` finds none (it is a `ValueError` and a `KeyError`).
    """
    if isinstance(name, type):
        raise TypeError(
            f"a tool parser is an object or a name, and {name.__name__} is a class: make one, {name.__name__}()"
        )
    if name == AUTO:
        name = _name_by_template(tokenizer, chat_template)
    parser = TOOL_PARSER_REGISTRY.get(name)
    if parser is None:
        raise UnknownToolParserError(f"there is no tool parser named {name!r}; {_known()}")
    return parser(**kwargs)


def _name_by_template(tokenizer: Any, chat_template: str | None) -> str:
    """Return the name of the parser of the family that a chat template belongs to."""
    template = _template_text(tokenizer, chat_template)
    if template is None:
        given = "one without a chat template" if tokenizer is not None else "none"
        raise UnknownToolParserError(
            f"the tool parser {AUTO!r} needs a tokenizer with a chat template, and was given {given}: "
            f"pass tokenizer= or chat_template=, or name the tool parser; {_known()}"
        )
    family = find_family(template)
    if family is None:
        raise UnknownToolParserError(
            f"the chat template belongs to no known model family: name the tool parser in place of {AUTO!r}; {_known()}"
        )
    if family.tool_parser is None:
        raise UnknownToolParserError(
            f"no tool parser is known for the model family {family.name!r}: "
            f"name one in place of {AUTO!r}, or register one of your own; {_known()}"
        )
    return family.tool_parser


def _template_text(tokenizer: Any, chat_template: str | None) -> str | None:
    """Return the text of the chat template that conversations with tools are rendered with; None if there is none."""
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, Mapping):
        if chat_template is None:
            return templates.get("tool_use", templates.get("default"))
        return templates.get(chat_template, chat_template)
    return templates if chat_template is None else chat_template


def _known() -> str:
    return "the tool parsers are: " + ", ".join(sorted(TOOL_PARSER_REGISTRY))
