r"""What an answer says: a number, a text, an interval, a set, a relation, and so on, read from its one spelling.

Only the shape is read here, and numbers; what is left, formulas with letters or functions, is math-verify's to
understand (`Formula`). No shape is ever taken for another: that is what keeps `(1,2)` from `\{1,2\}`, `BC` from `CB`
and `x > 5` from 5. Nothing of ours is imported but the spelling: this runs in worker processes, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from .notation import CURRENCY, DEGREE, FUNCTIONS, closing, levels, spelled, split
from .units import magnitude, unit_of

LONGEST_NUMBER = 2_000
"""Digits, and powers of ten."""


class UnreadableError(ValueError):
    """A text is no answer in any notation known here."""


@dataclass(frozen=True)
class Text:
    """Words, a letter to choose, a date: compared as they are written, white space and capitals of words aside."""

    words: str

    def key(self) -> str:
        """The same for texts that say the same."""
        bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", self.words).strip()
        bare = re.sub(r"^(?:an?|the)\s+(?=\S\S)", "", bare, flags=re.IGNORECASE)
        bare = re.sub(r"[\s\"'.]+", "", bare).strip("()[],;:")
        return bare if len(bare) == 1 else bare.casefold()


@dataclass(frozen=True)
class Number:
    """A rational number as a literal.

    Attributes:
        value: Which.
        form: integer, decimal, fraction, mixed or scientific.
        digits: Significant digits of a decimal.
    """

    value: Fraction
    form: str
    digits: int = 0


@dataclass(frozen=True)
class Based:
    """Digits in a base that is given: `2516_8`."""

    digits: str
    base: int


@dataclass(frozen=True)
class Formula:
    """What math-verify is asked about, in LaTeX."""

    latex: str


@dataclass(frozen=True)
class Measured:
    """A value with a unit, `%` and currencies among them."""

    value: Value
    unit: str
    suffix: str = ""


@dataclass(frozen=True)
class Ratio:
    """`2:3`."""

    terms: tuple[Value, ...]


@dataclass(frozen=True)
class Bracketed:
    """A point, a vector or an interval: in order, between brackets. Sets have none of either: `Several`."""

    left: str
    items: tuple[Value, ...]
    right: str


@dataclass(frozen=True)
class Several:
    """Values in any order: a set, a list of solutions.

    Attributes:
        items: The values.
        how: What joins them: "or", "and", "," or "set".
    """

    items: tuple[Value, ...]
    how: str = ","


@dataclass(frozen=True)
class Union:
    """Intervals and sets joined."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Relation:
    """`a < b`, or a chain of such."""

    parts: tuple[Value, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Named:
    """`x = 5`: a value and what it is the value of."""

    name: str
    value: Value


@dataclass(frozen=True)
class Matrix:
    """Rows of entries; determinants are another kind."""

    kind: str
    rows: tuple[tuple[Value, ...], ...]


Value = Text | Number | Based | Formula | Measured | Ratio | Bracketed | Several | Union | Relation | Named | Matrix

_LIST = re.compile(r",?\s*\\text\{\s*,?\s*(?:or|and|or else)\s*\}|,?\s+(?:and|or)\s+|[,;]")
_SIGNS_ONLY = re.compile(r"\\(?:angle|ldots|(?:big)?star|mathcal|bigcirc|square)(?![a-zA-Z])|\\begin\{cases\}")
"""What math-verify has no meaning for: compared as it is written."""
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_SIGNS = re.compile(
    r":=|<=|>=|!=|=|<|>|\\(?:le|ge|ne|approx|equiv|sim|cong|in|notin|subset|subseteq|supset|parallel|perp|mid|to|propto"
    r"|Rightarrow|implies|iff|ll|gg|not|mod)(?![a-zA-Z])"
)
_SAME_SIGN = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne", ":=": "="}
_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|\\?[a-zA-Z]+'*|\\(?:angle|overline|triangle|vec|hat)\s*\{?\s*[a-zA-Z]+\}?)"
    r"(?:_(?:\w|\{\w+\}))?\s*(?:\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\))?"
)
_NAMES = re.compile(r"\(\s*\\?[a-zA-Z](?:_\w)?(?:\s*,\s*\\?[a-zA-Z](?:_\w)?)*\s*\)")
_SMALL_WORDS = frozenset(
    "a an and are as at be but by can did do for get got had has he her his how if in is it its me my no nor not of off"
    " on one or our out per she so than the to too two up us was we who why yes yet you cm mm km kg mg ml lb oz ft in"
    " hr min sec".split()
)
"""Too short to be told from products of letters by their length."""
_MONTHS = "january february march april may june july august september october november december".split()
_NUMERALS = "two three four five six seven eight nine ten eleven twelve".split()
_BASES = {**{name: base for base, name in enumerate(_NUMERALS, 2)}, "sixteen": 16}
_LETTERS_OF_CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?")


def read(text: str) -> Value:
    """What an answer says.

    Raises:
        UnreadableError: It is nothing that is known here.
    """
    return _read(spelled(text))


def value_key(text: str) -> str:
    """The same text for answers of the same value, as far as that can be told without algebra; texts as they are."""
    said = " ".join(text.split())
    if len(text) > LONGEST_NUMBER:
        return said
    try:
        value = read(text)
        key = _key(value)
        return (
            " ".join(_plain(value.words).split())
            if isinstance(value, Text)
            else key
            if isinstance(key, str)
            else repr(key)
        )
    except (UnreadableError, RecursionError):
        return said


def _key(value: Value) -> object:
    if isinstance(value, Number):
        return str(value.value)
    if isinstance(value, Text):
        return value.key()
    if isinstance(value, Formula):
        return "".join(value.latex.split())
    if isinstance(value, Several):
        return sorted(map(repr, map(_key, value.items)))
    if isinstance(value, Named):
        return _key(value.value)
    if isinstance(value, Measured):
        return _key(value.value), value.unit
    parts = [getattr(value, name) for name in value.__dataclass_fields__]
    return type(value).__name__, [
        [_key(item) if not isinstance(item, str | tuple) else repr(item) for item in part]
        if isinstance(part, tuple)
        else part
        for part in parts
    ]


def _read(text: str) -> Value:
    text = text.strip()
    if re.fullmatch(r"\][^][]*,[^][]*\[", text):  # the French way to write open ends
        text = f"({text[1:-1]})"
    if text.startswith("\\text{") and closing(text, 5) == len(text) - 1:
        text = spelled(text[6:-1])
    if not text:
        raise UnreadableError("there is nothing")
    for reader in _READERS:
        value = reader(text)
        if value is not None:
            return value
    raise UnreadableError(f"{text!r:.200} is in no known notation")


def _inner(text: str) -> Value:
    return _read(spelled(text))


def _date(text: str) -> Value | None:
    bare = re.sub(r"\s+", " ", _plain(text)).strip().casefold()
    found = re.fullmatch(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})", bare)
    if found is not None:
        return Text(f"date {int(found[1])}-{int(found[2])}-{int(found[3])}")
    found = re.fullmatch(r"(\d{1,2}):(\d\d)\s*([ap])\.?\s?m\.?", bare)
    if found is not None:
        return Text(f"time {int(found[1])}:{found[2]}{found[3]}m")
    if (found := re.fullmatch(r"(\d{1,2}):(0\d)", bare)) is not None:  # no ratio has a term like 05
        return Text(f"time {int(found[1])}:{found[2]}")
    names = "|".join(rf"{month[:3]}(?:{month[3:]})?\.?" for month in _MONTHS)
    day = r"(\d{1,2})(?:st|nd|rd|th)?"
    for pattern, order in (
        (rf"(?:\w+day,? )?({names}) {day}(?:,? (\d{{4}}))?", (2, 1, 3)),
        (rf"(?:the )?{day}(?: of)? ({names})(?:,? (\d{{4}}))?", (1, 2, 3)),
        (rf"({names}),? (\d{{4}})", (0, 1, 2)),
    ):
        if (found := re.fullmatch(pattern, bare)) is not None:
            month = next(n for n, name in enumerate(_MONTHS, 1) if found[order[1]].startswith(name[:3]))
            return Text(f"date {found[order[2]] or '?'}-{month}-{int(found[order[0]]) if order[0] else '?'}")
    return None


def _choice(text: str) -> Value | None:
    found = _LETTERS_OF_CHOICE.fullmatch(_plain(text).strip())
    return Text(found[1]) if found is not None else None


def chosen(text: str) -> str | None:
    """The letter of an answer that gives a choice with what it stands for: `(B) 12`."""
    found = re.fullmatch(r"\(?\s*([A-Z])\s*[).:](?!\s*[=<>+*/^-])\s*(.*)", _plain(spelled(text)).strip(), re.DOTALL)
    if found is None or re.search(
        r"(?<![a-zA-Z\\])[A-Z](?![a-zA-Z])|(?<![a-zA-Z])(?:or|and|not)(?![a-zA-Z])", found[2]
    ):
        return None
    return found[1]


def _words(text: str) -> Value | None:
    """Words alone, with none of mathematics' signs."""
    plain = _plain(text)
    if re.fullmatch(r"all real(?:s| numbers)?", plain.strip().casefold()):
        return Bracketed("(", (Formula("-\\infty"), Formula("\\infty")), ")")
    if re.search(r"[\\^_={}<>|+*/%0-9]", plain) or CURRENCY in plain or DEGREE in plain or not _WORD.search(plain):
        return None
    if any(word in FUNCTIONS for word in _WORD.findall(plain)):
        return None
    parts, marks = split(plain, _LIST)
    if len(parts) > 1 and all(part.strip() for part in parts):
        return Several(tuple(Text(part.strip()) for part in parts), _joint(marks))
    return Text(plain)


def _several(text: str) -> Value | None:
    depth = levels(text)
    if depth is None:
        raise UnreadableError(f"the brackets of {text!r:.200} do not match")
    given = text
    # A comma before three digits is no comma of a list, outside of brackets.
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", "") if depth[found.start()] == 0 else found[0], text)
    parts, marks = split(text, _LIST)
    if len(parts) == 1:
        return None if text == given else _read(text)
    if not all(part.strip() for part in parts):
        marks = [mark for mark, part in zip(marks, parts[1:], strict=True) if part.strip()]
        parts = [part for part in parts if part.strip()]
        if len(parts) == 1:
            return _inner(parts[0])
    return _listed(tuple(_inner(part) for part in parts), _joint(marks))


def _joint(marks: list[str]) -> str:
    words = {word for mark in marks for word in re.findall("or|and", mark)}
    return words.pop() if len(words) == 1 else ","


def _listed(items: tuple[Value, ...], how: str) -> Several:
    first = items[0]
    if (
        isinstance(first, Named)
        and len(items) > 1
        and not any(isinstance(item, Named | Relation) for item in items[1:])
    ):
        items = (first, *(Named(first.name, item) for item in items[1:]))  # x = 1, 2
    if isinstance(first, Number | Formula) and isinstance(items[-1], Measured):
        unit = items[-1].unit  # 3 and 5 cm
        items = tuple(Measured(item, unit) if isinstance(item, Number | Formula) else item for item in items)
    return Several(_flat(items), how)


def _flat(items: tuple[Value, ...]) -> tuple[Value, ...]:
    """Both values of 1 +- 2 instead of the pair, which is no value of a list's own."""
    return tuple(
        one for item in items for one in (item.items if isinstance(item, Several) and item.how == "+-" else (item,))
    )


def _union(text: str) -> Value | None:
    parts, marks = split(text, re.compile(r"\\cup(?![a-zA-Z])|(?<=[)\]}])\s*[Uu]\s*(?=[(\[\\])"))
    return Union(tuple(_inner(part) for part in parts)) if marks else None


def _relation(text: str) -> Value | None:
    parts, marks = split(text, _SIGNS)
    if not marks:
        return None
    signs = [_SAME_SIGN.get(mark, mark) for mark in marks]
    for at in range(len(signs) - 1, 0, -1):  # \not =
        if signs[at - 1] == "\\not" and not parts[at].strip():
            signs[at - 1 : at + 1] = ["\\ne" if signs[at] == "=" else f"not {signs[at]}"]
            del parts[at]
    if signs == ["\\in"] and _NAME.fullmatch(parts[0].strip()):
        return _inner(parts[1])  # x in a set: the set
    if signs[0] == "=" and not parts[0].strip():
        signs, parts = signs[1:], parts[1:]  # = 5
        if not signs:
            return _inner(parts[0])
    if not all(part.strip() for part in parts[1:]):
        raise UnreadableError(f"{text!r:.200} lacks a side")
    if set(signs) == {"="}:
        first, last = parts[0].strip(), parts[-1].strip()
        if len(parts) == 2 and _is_name(last) and not _is_name(first):
            first, last, parts = last, first, parts[::-1]
        if _is_name(first):
            rest = tuple(_inner(part) for part in parts[1:])
            name = re.sub(r"[\s{}]|\\text", "", first)
            return Named(name, rest[0] if len(rest) == 1 else Relation(rest, tuple(signs[1:])))
    read_parts = tuple(_inner(part) if part.strip() else Text("") for part in parts)
    turned = {">": "<", "\\ge": "\\le"}
    if all(sign in turned for sign in signs):
        return Relation(read_parts[::-1], tuple(turned[sign] for sign in signs[::-1]))
    return Relation(read_parts, tuple(signs))


def _is_name(text: str) -> bool:
    bare = text.strip()
    if bare in ("e", "i", "\\pi", "\\infty", "\\emptyset"):
        return False
    return _NAME.fullmatch(bare) is not None or _NAMES.fullmatch(bare) is not None


def _plus_minus(text: str) -> Value | None:
    parts, marks = split(text, re.compile(r"\\pm(?![a-zA-Z])"))
    if not marks and re.match(r"-?\\frac", text) and len(re.findall(r"\\pm(?![a-zA-Z])", text)) == 1:
        return Several(tuple(_inner(re.sub(r"\\pm(?![a-zA-Z])", sign, text)) for sign in "+-"), "+-")
    if len(marks) != 1 or not parts[1].strip():
        return None
    left, right = parts
    return Several((_inner(f"{left}+{right}" if left.strip() else right), _inner(f"{left}-{right}")), "+-")


def _bracketed(text: str) -> Value | None:
    depth = levels(text)
    for left, right in (("\\{", "\\}"), ("\\langle", "\\rangle"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if not (text.startswith(left) and text.endswith(right) and depth is not None):
            continue
        inner = text[len(left) : -len(right)]
        if 0 in depth or levels(inner) is None:
            return None  # (1)(2)
        parts, _ = split(inner, re.compile("[,;]"))
        if left == "\\{":
            parts_of, marks = split(inner, re.compile(r"\\mid(?![a-zA-Z])|\||:"))
            if len(marks) == 1 and _is_name(parts_of[0].partition("\\in")[0]):
                return _inner(parts_of[1])  # {x : x > 2}
            return Several(_flat(tuple(_inner(part) for part in parts)) if inner.strip() else (), "set")
        if len(parts) == 1 and (left, right) == ("(", ")"):
            return _inner(inner)
        if not all(part.strip() for part in parts):
            return None
        return Bracketed(left, tuple(_inner(part) for part in parts), right)
    if text == "\\emptyset":
        return Several((), "set")
    if text == "\\mathbb{R}":
        return Bracketed("(", (Formula("-\\infty"), Formula("\\infty")), ")")
    return None


def _matrix(text: str) -> Value | None:
    found = re.fullmatch(r"\\begin\s*\{([pbvBV]?matrix|smallmatrix)\}(.*)\\end\s*\{\1\}", text, re.DOTALL)
    around = re.fullmatch(
        r"([(\[])\s*\\begin\s*\{(array|matrix)\}(?:\{[clr| ]*\})?(.*)\\end\s*\{\2\}\s*[)\]]", text, re.DOTALL
    )
    if found is None and around is None:
        return None
    kind = "matrix" if around is not None or found is not None and found[1][0] in "pb" else str(found and found[1])
    content = around[3] if around is not None else found[2] if found is not None else ""
    rows = [row for (row,) in zip(split(content, re.compile(r"\\\\(?:\[[^\]]*\])?"))[0]) if row.strip()]
    return Matrix(kind, tuple(tuple(_inner(cell) for cell in split(row, re.compile("&"))[0]) for row in rows))


def _based(text: str) -> Value | None:
    plain = re.sub(r"\s+", " ", _plain(text)).strip()
    found = re.fullmatch(r"\(?([0-9A-Za-z]*\d[0-9A-Za-z. ]*|[0-9A-Fa-f]+)\)?_\{?\s*\(?(?:base )?(\w+)\)?\s*\}?", plain)
    found = found or re.fullmatch(r"\(?([0-9A-Za-z. ]*\d[0-9A-Za-z. ]*?)\)?,? \(?(?:in )?base[ -](\w+)\)?", plain)
    if found is None:
        return None
    base = _BASES.get(found[2].casefold()) or (int(found[2]) if re.fullmatch("[0-9]{1,2}", found[2]) else 0)
    digits = found[1].replace(" ", "").casefold()
    if not 2 <= base <= 36 or (not re.search("[0-9]", digits) and (base < 11 or len(digits) < 2)):
        return None
    return Based(digits.lstrip("0") or "0", base)


def _measured(text: str) -> Value | None:
    sign = re.match(r"\s*(-?)\s*([" + CURRENCY + r"€£¥₹])\s*(-?)", text)
    if sign is not None:
        rest = sign[1] + sign[3] + text[sign.end() :]
        inner = _inner(rest)
        unit = unit_of(sign[2]) or sign[2]
        if not isinstance(inner, Number | Formula | Measured):
            return None
        if isinstance(inner, Measured):
            if inner.unit == unit:
                return inner
            return Measured(inner.value, unit + inner.unit) if inner.unit.startswith("/") else None
        return Measured(inner, unit, sign[2])
    found = re.search(r"\\text\{|%|(?<![\\a-zA-Z{])[a-zA-Z]{2,}|[" + CURRENCY + DEGREE + r"€£¥₹¢]", text)
    depth = levels(text)
    if found is None or depth is None or depth[found.start()] or not text[: found.start()].strip():
        return None
    core, suffix = text[: found.start()].strip(), text[found.start() :].strip()
    if core[-1] in "+-*/^_=<>(":
        return None
    scale, rest = magnitude(_plain(suffix))
    unit = unit_of(rest) if rest else ""
    if unit is None:
        return None
    value = _inner(core)
    if not isinstance(value, Number | Formula | Ratio):
        return None
    if scale != 1:
        if not isinstance(value, Number):
            return None
        value = Number(value.value * scale, "integer" if (value.value * scale).denominator == 1 else "decimal")
    return Measured(value, unit, suffix) if unit else value


def _ratio(text: str) -> Value | None:
    parts, marks = split(text, re.compile(r":|\\text\{\s*to\s*\}|(?<=\d)\s+to\s+(?=\d)"))
    if not marks or not all(part.strip() for part in parts):
        return None
    terms = tuple(_inner(part) for part in parts)
    return Ratio(terms) if all(isinstance(term, Number | Formula) for term in terms) else None


def _formula(text: str) -> Value:
    """What is left: formulas, and texts that are none."""
    number = number_of(text)
    if number is not None:
        return number
    if _SIGNS_ONLY.search(text):
        return Text(text)
    bare = re.sub(r"\\text\{\s*([a-zA-Z]|\d+)\s*\}", r"\1", text)
    words = _WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\}|\\text\{[^{}]*\}", "", bare))
    words = [word for word in words if word not in FUNCTIONS and not word.isupper()]
    if "\\text{" in bare or any(len(word) > 3 or word.casefold() in _SMALL_WORDS for word in words):
        return Text(text)
    if re.search(r"(?<![_\d])\d+\s+\d|\d'|[#?@&~:;\"$]", bare.replace("\\&", "")) or bare.count("|") % 2:
        raise UnreadableError(f"{text!r:.200} is no formula")
    return Formula(bare)


_READERS: tuple[Callable[[str], Value | None], ...] = (
    _date, _choice, _words, _based, _several, _union, _relation, _plus_minus, _matrix, _bracketed, _measured, _ratio,
    _formula,
)  # fmt: skip

_INTEGER = r"\d+|\d{1,3}(?:[ ,]\d{3})+"
_DECIMAL = rf"(?:{_INTEGER})(?:\.\d*)?|\.\d+"
_TERM = rf"(?:[+-]\s*)?(?:{_DECIMAL})"
_LITERALS = (
    ("plain", re.compile(rf"({_TERM})")),
    ("scientific", re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([+-]?\d+)")),
    ("scientific", re.compile(rf"(?:({_TERM})\s*\*\s*)?(-?)10\s*\^\s*\{{\s*([+-]?\s*\d+)\s*\}}")),
    ("fraction", re.compile(rf"([+-]?)\s*\\frac\s*\{{\s*({_TERM})\s*\}}\s*\{{\s*({_TERM})\s*\}}")),
    ("fraction", re.compile(rf"([+-]?)\s*({_DECIMAL})\s*/\s*(-?\s*(?:{_DECIMAL}))")),
    ("repeating", re.compile(r"([+-]?)\s*(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}")),
    ("mixed", re.compile(r"([+-]?)\s*(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")),
    ("mixed", re.compile(r"([+-]?)\s*(\d+)\s+(?:and\s+)?(\d+)\s*/\s*(\d+)")),
)


def number_of(text: str) -> Number | None:
    """The number that a text is the literal of, if it is one. `25 * 17` is none."""
    text = re.sub(r"(?<![a-zA-Z}^_\]])\{(\d+)\}", r"\1", text.strip().removesuffix("{}"))
    if len(text) > LONGEST_NUMBER:
        return None
    for form, pattern in _LITERALS:
        if (found := pattern.fullmatch(text)) is None:
            continue
        if form == "plain":
            value = _exact(found[1])
            digits = re.sub(r"\D", "", found[1]).lstrip("0")
            return Number(value, "decimal" if "." in found[1].rstrip(".") else "integer", len(digits))
        if form == "scientific":
            groups = found.groups()
            power = int(groups[-1].replace(" ", ""))
            if abs(power) > LONGEST_NUMBER:
                return None
            value = _exact(groups[0] or "1") * Fraction(10) ** power
            digits = re.sub(r"\D", "", groups[0] or "1").lstrip("0")
            return Number(-value if len(groups) == 3 and groups[1] else value, "scientific", len(digits))
        sign = -1 if found[1] == "-" else 1
        if form == "fraction":
            below = _exact(found[3])
            return Number(sign * _exact(found[2]) / below, "fraction") if below else None
        if form == "repeating":
            whole = _exact(f"{found[2]}.{found[3]}")
            return Number(
                sign * (whole + Fraction(int(found[4]), (10 ** len(found[4]) - 1) * 10 ** len(found[3]))), form
            )
        if not int(found[4]):
            return None
        return Number(sign * (int(found[2]) + Fraction(int(found[3]), int(found[4]))), "mixed")
    return None


def _exact(text: str) -> Fraction:
    return Fraction(re.sub(r"[\s,]", "", text).rstrip(".") or "0")


def _plain(text: str) -> str:
    r"""Without `\text{}` around words."""
    while (start := text.find("\\text{")) >= 0:
        end = closing(text, start + 5)
        if end < 0:
            break
        text = f"{text[:start]} {text[start + 6 : end]} {text[end + 1 :]}"
    return text
