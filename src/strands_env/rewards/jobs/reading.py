r"""Parsing of answers to numbers, texts, intervals, sets, relations and so on, from their normalized notation.

Only the structure and numbers are parsed here; formulas with letters or functions are left to math-verify (`Formula`).
The kinds are never confused: `(1,2)` is not `\{1,2\}`, `BC` is not `CB`, and `x > 5` is not 5. This module imports only
the notation, because worker processes run it, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .notation import CURRENCY, DEGREE, FUNCTIONS, closing, compact, levels, spelled, split
from .units import UNITS, magnitude, unit_of

MAX_NUMBER_CHARS = 2_000  # most digits, and largest power of ten
MAX_KEY_DEPTH = 20  # most nested brackets of an answer that is compared by value


class UnreadableError(ValueError):
    """A text is an answer in no known notation."""


@dataclass(frozen=True)
class Text:
    """Words, the letter of a choice, a date: compared literally, except for punctuation and the case of words."""

    words: str

    def key(self) -> str:
        """Return a key that is equal for equal texts."""
        bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", self.words).strip()
        bare = re.sub(r"^(?:an?|the)\s+(?=\S\S)", "", bare, flags=re.IGNORECASE)
        bare = re.sub(r"\.(?!\d)|(?<=[^\W\d])\.", " ", re.sub("[\"']", "", bare))  # but no decimal point
        bare = compact(bare.strip()).strip("()[],;:")
        return bare if len(bare) == 1 else bare.casefold()


@dataclass(frozen=True)
class Number:
    """A rational number, written as a literal.

    Attributes:
        value: The number.
        form: integer, decimal, fraction, mixed, repeating or scientific.
        digits: Significant digits of a decimal.
    """

    value: Fraction
    form: str
    digits: int = 0


@dataclass(frozen=True)
class Based:
    """Digits with a base: `2516_8`."""

    digits: str
    base: int


@dataclass(frozen=True)
class Formula:
    """A formula for math-verify, in LaTeX."""

    latex: str


@dataclass(frozen=True)
class Measured:
    """A value with a unit, a percent sign or a currency."""

    value: Value
    unit: str
    suffix: str = ""


@dataclass(frozen=True)
class Ratio:
    """`2:3`."""

    terms: tuple[Value, ...]


@dataclass(frozen=True)
class Bracketed:
    """A point, a vector, an interval or a matrix of rows: ordered values in brackets. Sets are `Several`."""

    left: str
    items: tuple[Value, ...]
    right: str


@dataclass(frozen=True)
class Several:
    """Values in any order: a set or a list of solutions.

    Attributes:
        items: The values.
        how: How they are joined: "or", "and", ",", "set" or "+-".
    """

    items: tuple[Value, ...]
    how: str = ","

    def names(self) -> set[str]:
        """Return the different names of the values; those of indexed ones, such as `x_1` and `x_2`, are the same."""
        return {item.name.partition("_")[0] for item in self.items if isinstance(item, Named)}


@dataclass(frozen=True)
class Union:
    """A union of intervals and sets."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Relation:
    """A relation such as `a < b`, or a chain of relations."""

    parts: tuple[Value, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Named:
    """A value with a name: `x = 5`."""

    name: str
    value: Value


Value = Text | Number | Based | Formula | Measured | Ratio | Bracketed | Several | Union | Relation | Named

_REALS = Bracketed("(", (Formula("-\\infty"), Formula("\\infty")), ")")
_CONSTANTS: dict[str, Value] = {"\\emptyset": Several((), "set"), "\\mathbb{R}": _REALS}
_LIST = r",?\s*\\text\{\s*,?\s*(?:or|and|or else)\s*\}|,?\s+(?:and|or)\s+|[,;]"
# Notation that math-verify does not support: compared literally.
_SIGNS_ONLY = re.compile(r"\\(?:angle|ldots|(?:big)?star|mathcal|bigcirc|square)(?![a-zA-Z])|\\begin\{cases\}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_SIGNS = (
    r":=|<=|>=|!=|(?:\\not\s*)?(?:[=<>]|\\(?:le|ge|ne|approx|equiv|sim|cong|in|notin|subset|subseteq|supset|parallel"
    r"|perp|mid|to|propto|Rightarrow|implies|iff|ll|gg|mod)(?![a-zA-Z]))|\\not(?![a-zA-Z])"
)
_SAME_SIGN = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne", ":=": "=", "\\not=": "\\ne"}
_PLUS_MINUS = r"\\pm(?![a-zA-Z])"
_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|\\?[a-zA-Z]+'*|\\(?:angle|overline|triangle|vec|hat)\s*\{?\s*[a-zA-Z]+\}?)"
    r"(?:_(?:\w|\{\w+\}))?\s*(?:\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\))?"
    r"|\(\s*\\?[a-zA-Z](?:_\w)?(?:\s*,\s*\\?[a-zA-Z](?:_\w)?)*\s*\)"
)
# Words so short that their length does not distinguish them from products of letters.
_SMALL_WORDS = frozenset(
    "a an and are as at be but by can did do for get got had has he her his how if in is it its me my no nor not of off"
    " on one or our out per she so than the to too two up us was we who why yes yet you cm mm km kg mg ml lb oz ft in"
    " hr min sec".split()
)
_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = rf"(?P<month>{'|'.join(rf'{month[:3]}(?:{month[3:]})?' for month in _MONTHS)})\.?"
_DAY, _YEAR = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?P<year>\d{4})"
_DATES = (
    re.compile(rf"{_YEAR}[-/.](?P<month>\d{{1,2}})[-/.](?P<day>\d{{1,2}})"),
    re.compile(rf"(?:\w+day,? )?{_MONTH} {_DAY}(?:,? {_YEAR})?"),
    re.compile(rf"(?:the )?{_DAY}(?: of)? {_MONTH}(?:,? {_YEAR})?"),
    re.compile(rf"{_MONTH},? {_YEAR}"),
)
_TIME = r"(\d{1,2}):(?:(\d\d)\s*([ap]\.?\s?m)\.?|(0\d))"  # no ratio has a term like 05
_NUMERALS = "two three four five six seven eight nine ten eleven twelve".split()
_BASES = {**{name: base for base, name in enumerate(_NUMERALS, 2)}, "sixteen": 16}


def read(text: str) -> Value:
    """Parse an answer.

    Raises:
        UnreadableError: It is in no known notation.
    """
    text = spelled(text).strip()
    if re.fullmatch(r"\][^][]*,[^][]*\[", text):  # French notation of an open interval
        text = f"({text[1:-1]})"
    if text.startswith("\\text{") and closing(text, 5) == len(text) - 1:
        text = spelled(text[6:-1])
    if not text:
        raise UnreadableError("the answer is empty")
    return next(value for reader in _READERS if (value := reader(text)) is not None)


def value_key(text: str) -> str:
    """Return a key that is equal for answers with the same value, as far as no algebra is needed.

    `1/2`, `0.5` and `0.50` have one key. Words and deeply nested answers are compared literally, except for the amount
    of whitespace.

    Args:
        text: An answer.
    """
    words = " ".join(text.split())
    if len(text) > MAX_NUMBER_CHARS or max(levels(text) or [0]) > MAX_KEY_DEPTH:
        return words
    try:
        value = read(text)
        return " ".join(_plain(value.words).split()) if isinstance(value, Text) else _key(value)
    except (ValueError, RecursionError):  # in no known notation, or a number with too many digits to print
        return words


def _key(value: Value | str | int | tuple[Any, ...]) -> str:
    match value:
        case str() | int():
            return str(value)
        case tuple():
            return _joined(map(_key, value))
        case Number(number):
            return str(number)
        case Text():
            return value.key()
        case Formula(latex):
            return "".join(latex.split())
        case Several(items) if len(value.names()) > 1:
            named = ((item.name, _key(item)) if isinstance(item, Named) else ("", _key(item)) for item in items)
            return _joined(["Several", *sorted(map(_joined, named))])
        case Several(items):
            return _joined(["Several", *sorted(map(_key, items))])
        case Named(_, inner):
            return _key(inner)
        case Measured(inner, unit):
            return _joined(["Measured", _key(inner), unit])
    return _joined([type(value).__name__, *map(_key, vars(value).values())])


def _joined(keys: Iterable[str]) -> str:
    """Join keys so that each list of them has its own text. A `repr` would grow exponentially with the nesting."""
    return "".join(f"{len(key)}:{key}" for key in keys)


def _date(text: str) -> Value | None:
    bare = re.sub(r"\s+", " ", _plain(text)).strip().casefold()
    for pattern in _DATES:
        if (found := pattern.fullmatch(bare)) is not None:
            part = {"day": None, **found.groupdict()}
            named = (n for n, name in enumerate(_MONTHS, 1) if str(part["month"]).startswith(name[:3]))
            month = next(named, None) or int(str(part["month"]))
            return Text(f"date {part['year'] or '?'}-{month}-{int(part['day']) if part['day'] else '?'}")
    if (found := re.fullmatch(_TIME, bare)) is not None:
        return Text(f"time {int(found[1])}:{found[2] or found[4]}{re.sub('[^apm]', '', found[3] or '')}")
    return None


def _choice(text: str) -> Value | None:
    found = re.fullmatch(r"\(?\s*([A-Z])\s*\)?", _plain(text).strip())
    return Text(found[1]) if found is not None else None


def chosen(text: str) -> str | None:
    """Return the letter of an answer that gives a choice with its value, such as `(B) 12`."""
    found = re.fullmatch(r"\(?\s*([A-Z])\s*[).:](?!\s*[=<>+*/^-])\s*(.*)", _plain(spelled(text)).strip(), re.DOTALL)
    if found is None or re.search(
        r"(?<![a-zA-Z\\])[A-Z](?![a-zA-Z])|(?<![a-zA-Z])(?:or|and|not)(?![a-zA-Z])", found[2]
    ):
        return None
    return found[1]


def _words(text: str) -> Value | None:
    """Words only, without mathematical signs."""
    plain = _plain(text)
    if re.fullmatch(r"all real(?:s| numbers)?", plain.strip().casefold()):
        return _REALS
    words = _WORD.findall(plain)
    if re.search(rf"[\\^_={{}}<>|+*/%0-9{CURRENCY}{DEGREE}]", plain) or not words or FUNCTIONS.intersection(words):
        return None
    parts, marks = split(plain, _LIST)
    if len(parts) > 1 and all(part.strip() for part in parts):
        return Several(tuple(Text(part.strip()) for part in parts), _joint(marks))
    return Text(plain)


def _several(text: str) -> Value | None:
    depth = levels(text)
    if depth is None:
        raise UnreadableError(f"the brackets of {text!r:.200} do not match")
    # Outside of brackets, a comma before three digits does not separate items.
    joined = _THOUSANDS.sub(lambda found: found[0].replace(",", "") if depth[found.start()] == 0 else found[0], text)
    parts, marks = split(joined, _LIST)
    if not marks:
        return None if joined == text else read(joined)
    given = [(mark, part) for mark, part in zip(["", *marks], parts, strict=True) if part.strip()]
    if len(given) < 2:
        return read(given[0][1] if given else "")
    items = tuple(read(part) for _, part in given)
    match items:
        case Named(name), *values if not any(isinstance(item, Named | Relation) for item in values):  # x = 1, 2
            items = (items[0], *(Named(name, item) for item in values))
        case ((Number() | Formula()), *_, Measured(_, unit)):  # 3 and 5 cm
            items = tuple(Measured(item, unit) if isinstance(item, Number | Formula) else item for item in items)
    return Several(_flat(items), _joint([mark for mark, _ in given]))


def _joint(marks: list[str]) -> str:
    words = {word for mark in marks for word in re.findall("or|and", mark)}
    return words.pop() if len(words) == 1 else ","


def _flat(items: tuple[Value, ...]) -> tuple[Value, ...]:
    """Replace each pair such as 1 +- 2 by its two values."""
    return tuple(
        one for item in items for one in (item.items if isinstance(item, Several) and item.how == "+-" else (item,))
    )


def _union(text: str) -> Value | None:
    parts, marks = split(text, r"\\cup(?![a-zA-Z])|(?<=[)\]}])\s*[Uu]\s*(?=[(\[\\])")
    return Union(tuple(map(read, parts))) if marks else None


def _relation(text: str) -> Value | None:
    if text.startswith("="):
        return read(text[1:])
    parts, marks = split(text, _SIGNS)
    if not marks:
        return None
    parts, bare = [part.strip() for part in parts], [re.sub(r"\s", "", mark) for mark in marks]
    signs = tuple(_SAME_SIGN.get(mark, mark) for mark in bare)
    if signs == ("\\in",) and _is_name(parts[0]):
        return read(parts[1])  # x in a set: the set
    if not all(parts[1:]):
        raise UnreadableError(f"{text!r:.200} lacks a side")
    if signs == ("=",) and _is_name(parts[1]) and not _is_name(parts[0]):
        parts = parts[::-1]
    values = tuple(read(part) if part else Text("") for part in parts)
    if set(signs) == {"="} and _is_name(parts[0]):
        value = values[1] if len(values) == 2 else Relation(values[1:], signs[1:])
        return Named(re.sub(r"[\s{}]|\\text", "", parts[0]), value)
    turned = {">": "<", "\\ge": "\\le"}
    if all(sign in turned for sign in signs):
        return Relation(values[::-1], tuple(turned[sign] for sign in signs[::-1]))
    return Relation(values, signs)


def _is_name(text: str) -> bool:
    bare = text.strip()
    return bare not in ("e", "i", "\\pi", "\\infty", "\\emptyset") and _NAME.fullmatch(bare) is not None


def _plus_minus(text: str) -> Value | None:
    parts, marks = split(text, _PLUS_MINUS)
    if not marks and re.match(r"-?\\frac", text):
        parts = re.split(_PLUS_MINUS, text)
    if len(parts) != 2 or not parts[1].strip():
        return None
    return Several(tuple(read(sign.join(parts).strip().lstrip("+")) for sign in "+-"), "+-")


def _bracketed(text: str) -> Value | None:
    found = re.fullmatch(r"(\\\{|\\langle|[(\[])(.*)(\\\}|\\rangle|[)\]])", text, re.DOTALL)
    if found is None or not all(levels(text) or [0]) or levels(found[2]) is None:  # (1)(2)
        return _CONSTANTS.get(text)
    left, inner, right = found.groups()
    parts, _ = split(inner, "[,;]")
    if left == "\\{":
        sides, marks = split(inner, r"\\mid(?![a-zA-Z])|\||:")
        if len(marks) == 1 and _is_name(sides[0].partition("\\in")[0]):
            return read(sides[1])  # {x : x > 2}
        return Several(_flat(tuple(map(read, parts))) if inner.strip() else (), "set")
    if len(parts) == 1 and (left, right) == ("(", ")"):
        return read(inner)
    if not all(part.strip() for part in parts):
        return None
    return Bracketed(left, tuple(map(read, parts)), right)


def _matrix(text: str) -> Value | None:
    found = re.fullmatch(
        r"\\begin\s*\{([pbvBV]?matrix|smallmatrix)\}(.*)\\end\s*\{\1\}", text, re.DOTALL
    ) or re.fullmatch(
        r"[(\[]\s*\\begin\s*\{(array|matrix)\}(?:\{[clr| ]*\})?(.*)\\end\s*\{\1\}\s*[)\]]", text, re.DOTALL
    )
    if found is None:
        return None
    kind = "matrix" if found[1] in ("pmatrix", "bmatrix", "array") else found[1]  # determinants are another kind
    rows = [split(row, "&")[0] for row in split(found[2], r"\\\\(?:\[[^\]]*\])?")[0] if row.strip()]
    return Bracketed(kind, tuple(Bracketed("row", tuple(map(read, cells)), "row") for cells in rows), kind)


def _based(text: str) -> Value | None:
    plain = re.sub(r"\s+", " ", _plain(text)).strip()
    found = re.fullmatch(
        r"\(?([0-9A-Za-z]*\d[0-9A-Za-z. ]*|[0-9A-Fa-f]+)\)?_\{?\s*\(?(?:base )?(\w+)\)?\s*\}?", plain
    ) or re.fullmatch(r"\(?([0-9A-Za-z. ]*\d[0-9A-Za-z. ]*?)\)?,? \(?(?:in )?base[ -](\w+)\)?", plain)
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
        inner, unit = read(sign[1] + sign[3] + text[sign.end() :]), UNITS[sign[2]]
        value, rate = (inner.value, inner.unit) if isinstance(inner, Measured) else (inner, "")
        if rate == unit:
            return inner
        if not isinstance(value, Number | Formula) or not (rate + "/").startswith("/"):
            return None
        return Measured(value, unit + rate, sign[2])
    found = re.search(r"\\text\{|%|(?<![\\a-zA-Z{])[a-zA-Z]{2,}|[" + CURRENCY + DEGREE + r"€£¥₹¢]", text)
    depth = levels(text)
    if found is None or depth is None or depth[found.start()]:
        return None
    core, suffix = text[: found.start()].strip(), text[found.start() :].strip()
    scale, rest = magnitude(_plain(suffix))
    known = unit_of(rest) if rest else ""
    if not core or core[-1] in "+-*/^_=<>(" or known is None:
        return None
    value = read(core)
    if isinstance(value, Number) and scale != 1:
        value = Number(value.value * scale, "decimal")
    elif not isinstance(value, Number | Formula | Ratio) or scale != 1:
        return None
    return Measured(value, known, suffix) if known else value


def _ratio(text: str) -> Value | None:
    parts, marks = split(text, r":|\\text\{\s*to\s*\}|(?<=\d)\s+to\s+(?=\d)")
    if not marks or not all(part.strip() for part in parts):
        return None
    terms = tuple(map(read, parts))
    return Ratio(terms) if all(isinstance(term, Number | Formula) for term in terms) else None


_INTEGER = r"\d+|\d{1,3}(?:[ ,]\d{3})+"
_DECIMAL = rf"(?:{_INTEGER})(?:\.\d*)?|\.\d+"
_TERM = rf"(?:[+-]\s*)?(?:{_DECIMAL})"
_LITERALS = (
    ("plain", re.compile(rf"(?P<whole>{_TERM})")),
    ("scientific", re.compile(r"(?P<whole>[+-]?(?:\d+(?:\.\d*)?|\.\d+))[eE](?P<power>[+-]?\d+)")),
    (
        "scientific",
        re.compile(rf"(?:(?P<whole>{_TERM})\s*\*\s*)?(?P<sign>-?)10\s*\^\s*\{{\s*(?P<power>[+-]?\s*\d+)\s*\}}"),
    ),
    (
        "fraction",
        re.compile(rf"(?P<sign>[+-]?)\s*\\frac\s*\{{\s*(?P<above>{_TERM})\s*\}}\s*\{{\s*(?P<below>{_TERM})\s*\}}"),
    ),
    ("fraction", re.compile(rf"(?P<sign>[+-]?)\s*(?P<above>{_DECIMAL})\s*/\s*(?P<below>-?\s*(?:{_DECIMAL}))")),
    ("repeating", re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>\d*\.(?P<fixed>\d*))\\overline\s*\{\s*(?P<above>\d+)\s*\}")),
    (
        "mixed",
        re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>\d+)\s*\\frac\s*\{\s*(?P<above>\d+)\s*\}\s*\{\s*(?P<below>\d+)\s*\}"),
    ),
    ("mixed", re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>\d+)\s+(?:and\s+)?(?P<above>\d+)\s*/\s*(?P<below>\d+)")),
)


def _number(text: str) -> Number | None:
    """Parse the literal of a number. `25 * 17` is not a literal."""
    text = re.sub(r"(?<![a-zA-Z}^_\]])\{(\d+)\}", r"\1", text.strip().removesuffix("{}"))
    if len(text) > MAX_NUMBER_CHARS:
        return None
    for form, pattern in _LITERALS:
        if (found := pattern.fullmatch(text)) is not None:
            part = found.groupdict()
            whole = part.get("whole") or ("1" if form == "scientific" else "0")
            above, below, power = part.get("above") or "0", part.get("below") or "1", part.get("power") or "0"
            if form == "repeating":
                below = "9" * len(above) + "0" * len(part["fixed"])
            if not _exact(below) or abs(_exact(power)) > MAX_NUMBER_CHARS:
                return None
            value = (_exact(whole) + _exact(above) / _exact(below)) * Fraction(10) ** int(_exact(power))
            if form == "plain":
                form = "decimal" if "." in whole.rstrip(".") else "integer"
            digits = 0 if "above" in part else len(re.sub(r"\D", "", whole).lstrip("0"))
            return Number(-value if part.get("sign") == "-" else value, form, digits)
    return None


def _exact(text: str) -> Fraction:
    return Fraction(re.sub(r"[\s,]", "", text).rstrip(".") or "0")


def _formula(text: str) -> Value:
    """Everything else: formulas, and texts that are not formulas."""
    if _SIGNS_ONLY.search(text):
        return Text(text)
    bare = re.sub(r"\\text\{\s*([a-zA-Z]|\d+)\s*\}", r"\1", text)
    found = _WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\}|\\text\{[^{}]*\}", "", bare))
    words = [word for word in found if word not in FUNCTIONS and not word.isupper()]
    if "\\text{" in bare or any(len(word) > 3 or word.casefold() in _SMALL_WORDS for word in words):
        return Text(text)
    if re.search(r"(?<![_\d])\d+\s+\d|\d'|[#?@&~:;\"$]", bare.replace("\\&", "")) or bare.count("|") % 2:
        raise UnreadableError(f"{text!r:.200} is not a formula")
    return Formula(bare)


def _plain(text: str) -> str:
    r"""Remove `\text{}` around words."""
    while (start := text.find("\\text{")) >= 0 and (end := closing(text, start + 5)) >= 0:
        text = f"{text[:start]} {text[start + 6 : end]} {text[end + 1 :]}"
    return text


_READERS: tuple[Callable[[str], Value | None], ...] = (
    _date, _choice, _words, _based, _several, _union, _relation, _plus_minus, _matrix, _bracketed, _measured, _ratio,
    _number, _formula,
)  # fmt: skip


# --- the answer of a text without a box ---

_ANCHOR = re.compile(
    r"(?:\banswers?\b[^.\n$\\]{0,60}?(?:\bis\b|\bare\b|:|=)|^\s*####"
    r"|\b(?:solutions?|choice|option)\b[^.\n$\\]{0,40}?(?:\bis\b|\bare\b|:))"
    r"[ \t]*:?\s*(?:the )?(?:option|choice)?\s*",
    re.IGNORECASE | re.MULTILINE,
)
_IS = re.compile(r"\b(?:is|are|equals|be|gives?|get|have|falls on)\s+|(?<![<>!:])=\s*", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:(?<!\b[ap])\.(?=\s|\*|$)|[!?](?=\s+[A-Z]|\s*$)|\n\s*\n)")
_REASON = re.compile(r",?\s+(?:because|since|as|so|which|where|when|thus|hence|therefore)\b|\s+\((?!\w\))")
_LINK = re.compile(
    r"\A(?:(?:so|thus|hence|therefore|then|finally|overall|altogether|consequently|in (?:total|all|conclusion|summary)"
    r"|as a result)\s*,\s*)+",
    re.IGNORECASE,
)
_VALUES = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<round>.+?)\\\)|(?<!\\)\$"
    r"(?P<inline>(?!\d[\d.,]*[ a-z])[^$\n]+?)(?<!\\)\$"
    r"|(?P<number>(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?|(?<![\w.])-?\.\d+)",
    re.DOTALL,
)
_HEDGE = re.compile(
    r"(?:\bnot|n't|\bthan|\babout|\bleast|\bmost|\bover|\bunder|\bnearly|\balmost|\baround|\broughly|\bapproximately"
    r"|\bbetween)\s*$",
    re.IGNORECASE,
)
_JOINED = re.compile(r"(?:\s|[,;/^*+×$-]|\bor\b|\band\b|\bto\b|\bmaybe\b|\bperhaps\b|\bpossibly\b)*", re.IGNORECASE)
_DOUBT = re.compile(
    r"\W*\((?:[^()]*[^()\w])?(?:or|but|not|maybe|perhaps|possibly|may|might|could|alternatively|unless)\b"
    r"|\W*(?:or|alternatively|maybe|perhaps|possibly)\b|.*\botherwise\b",
    re.IGNORECASE,
)
_REFUTED = re.compile(
    r"\b(?:or|not|no|never|cannot|but|wrong|false|incorrect|impossible|contradiction)\b|n't\b", re.IGNORECASE
)
MAX_PHRASE_CHARS = 400
MAX_ANSWER_WORDS = 4


def answer_in(text: str) -> str | None:
    """Return the answer of a text without a box, or None if it has none.

    The whole text if it is only an answer, perhaps after "So," or similar words; else what the last "answer is",
    "answer:" or "####" introduces; else what the last sentence equates something to; else the last formula or number.
    If the text offers several values, all of them are the answer; the comparison then refuses it.
    """
    whole = _LINK.sub("", text.strip(), count=1)
    anchors = list(_ANCHOR.finditer(whole))
    is_short = not anchors and len(whole) <= MAX_PHRASE_CHARS and "\n" not in whole
    if is_short and (answer := _answer(whole, MAX_ANSWER_WORDS - 2)) is not None:
        return answer
    if anchors:
        return _phrase(whole[anchors[-1].end() :])
    sentences = (part for part in reversed(_SENTENCE.split(whole)) if part.strip(" *\n\t"))
    last = next(sentences, "")[-MAX_PHRASE_CHARS:]
    for verb in reversed(list(_IS.finditer(last))):
        if (answer := _answer(last[verb.end() :].strip(), MAX_ANSWER_WORDS)) is not None:
            return answer
    found = list(_VALUES.finditer(whole))
    is_hedged = found and _HEDGE.search(whole[: found[-1].start()].rstrip("$ "))
    is_one_of_several = len(found) > 1 and _JOINED.fullmatch(whole[found[-2].end() : found[-1].start()])
    return found[-1][0] if found and not is_hedged and not is_one_of_several else None


def _phrase(text: str) -> str | None:
    """Return the answer that a text begins with, up to the end of the sentence or to a reason."""
    text = text.strip()[:MAX_PHRASE_CHARS]
    sentence = _SENTENCE.split(text + "\n\n", maxsplit=1)[0].partition("\n")[0]
    if _DOUBT.match(text[len(sentence) :]):
        return text
    for phrase in (sentence, _REASON.split(sentence, maxsplit=1)[0]):
        if _DOUBT.match(sentence[len(phrase) :]):
            break
        phrase = re.sub(r"^\s*(?:option|choice)\s+", "", phrase.strip(" *\t"), flags=re.IGNORECASE)
        if (answer := _answer(phrase, MAX_ANSWER_WORDS)) is not None:
            return answer
    return sentence.strip() or None


def _answer(text: str, words: int) -> str | None:
    """Return a text if it can be parsed and is not prose of more than some words.

    A reason is no item of a list: `425, as required` is 425.
    """
    try:
        value = read(text)
    except (UnreadableError, RecursionError):
        return None
    if _is_prose(value, words):
        return None
    before = _REASON.split(text, maxsplit=1)[0]
    reason = text[len(before) :]
    is_doubted = _DOUBT.match(reason) or _REFUTED.search(reason) or re.search(r"\b(?:or|and)$", before)  # 425, or so
    if is_doubted or not isinstance(value, Several) or not any(isinstance(item, Text) for item in value.items):
        return text
    return text if before == text else _answer(before, words) or text


def _is_prose(value: Value, words: int) -> bool:
    """Whether a value is prose: only words, and more of them than an answer has."""
    match value:
        case Relation(parts):
            return any(_is_prose(part, 1) for part in parts)
        case Several(items):
            return any(_is_prose(item, words) for item in items)
        case Text(text) if not text.startswith(("date ", "time ")):
            return len(text.split()) > words or re.search(r"\d", text) is not None
    return False
