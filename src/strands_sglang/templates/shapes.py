"""Renders of a chat template with holes, so that conversations of one shape are rendered once.

What a template writes after a turn is mostly the same each time: only texts differ, such as the result of a tool. So a
conversation is rendered with a `Hole` instead of each of these texts. What the template wrote, literal text and holes,
is kept, and later texts are filled in.

This is exact, because a hole can only be written. A template that reads one (compares, measures, searches, cuts or
encodes it) raises `HoleReadError`, and its shape is not used. A hole is a string to `is string`, but no function takes
it for one, so that code outside the template cannot read it either. A text may be stripped, which is done when it is
filled in, and one fact about the texts may be used: they hold more than white space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

Part = str | int
"""Literal text, or the number of a hole."""

NOW = -1
"""The hole for the current time, whose text changes between renders."""


class Stripped(int):
    """The number of a hole whose text is written without the white space at its ends."""


class HoleReadError(BaseException):
    """A template read a hole. No `except Exception` of a filter or a test may catch it."""


def _read(self: Hole, *args: Any, **kwargs: Any) -> NoReturn:
    raise HoleReadError


class Hole:
    """One or more texts that are not known yet, with literal text around them.

    Attributes:
        parts: Literal text and the numbers of the holes, in order.
    """

    __class__ = property(lambda self: str)  # for `is string`

    def __init__(self, *parts: Part) -> None:
        """Join parts."""
        self.parts = parts

    def __add__(self, other: Any) -> Hole:
        """Append text."""
        return Hole(*self.parts, *_parts(other))

    def __radd__(self, other: Any) -> Hole:
        """Prepend text."""
        return Hole(*_parts(other), *self.parts)

    def __bool__(self) -> bool:
        """Whether there is text: always."""
        return True

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator, as a string has one; it cannot be used."""
        _read(self)
        yield

    def strip(self, characters: str | None = None) -> Hole:
        """Return one text without the white space at its ends."""
        if characters is not None or len(self.parts) != 1 or isinstance(self.parts[0], str):
            _read(self)
        return Hole(Stripped(self.parts[0]))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse all other methods of strings."""
        raise HoleReadError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _read
    __str__ = __repr__ = __format__ = __len__ = __getitem__ = __contains__ = _read
    __int__ = __float__ = __index__ = __mod__ = __rmod__ = __mul__ = __rmul__ = _read


def _parts(value: Any) -> tuple[Part, ...]:
    if type(value) is Hole:
        return value.parts
    if not isinstance(value, str):
        raise TypeError(f"cannot add {type(value).__name__} to text")
    return (value,)


def _as_text(value: Any) -> Any:
    return value if type(value) is Hole else str(value)


def _joined(values: Iterable[Any]) -> Any:
    texts = [_as_text(value) for value in values]
    if all(type(text) is not Hole for text in texts):
        return "".join(texts)
    return Hole(*chain.from_iterable(map(_parts, texts)))


Rendered = list[Part]
"""What a template wrote: literal text and holes, no two literals in a row."""


def with_holes(template: Any, source: str) -> Callable[[Mapping[str, Any]], Rendered]:
    """Return a function that renders a chat template whose variables may contain holes.

    Args:
        template: The compiled Jinja template.
        source: Its text.
    """
    environment = template.environment.overlay()
    environment.concat = _joined
    code = environment.compile(source)
    compiled = environment.template_class.from_code(environment, code, environment.make_globals(None), None)
    # The compiled template writes values through these names.
    compiled.root_render_func.__globals__.update(str=_as_text, str_join=_joined, markup_join=_joined, concat=_joined)

    def render(variables: Mapping[str, Any]) -> Rendered:
        context = compiled.new_context({**variables, "strftime_now": lambda form: Hole(NOW)})
        rendered: Rendered = []
        for value in compiled.root_render_func(context):
            for part in _parts(value):
                if isinstance(part, str) and rendered and isinstance(rendered[-1], str):
                    rendered[-1] += part
                else:
                    rendered.append(part)
        return rendered

    return render


def filled(parts: Sequence[Part], texts: Sequence[str]) -> str:
    """Return the text of parts whose holes are filled."""
    written = []
    for part in parts:
        if isinstance(part, str):
            written.append(part)
        else:
            written.append(texts[part].strip() if type(part) is Stripped else texts[part])
    return "".join(written)


def can_fill(text: str) -> bool:
    """Whether a text has the property that a template may rely on: it holds more than white space."""
    return type(text) is str and text != "" and not text.isspace()
