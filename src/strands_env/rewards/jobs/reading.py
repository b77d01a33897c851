r"""Parsing of answers to numbers, words, intervals, sets, relations and so on, from their normalized notation.

Only the structure and numbers are parsed here; formulas with letters or functions are left to math-verify. The kinds
are never confused: `(1,2)` is not `\{1,2\}`, `BC` is not `CB`, and `x > 5` is not 5. This module imports only the
notation, because the process that asks the workers runs it, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

from .notation import FUNCTIONS, WHOLE_TEXT, compact, levels, rewritten, rules, spelled, split, words_of
from .units import unit_of

MAX_NUMBER_CHARS = 2_000  # most digits, and largest power of ten
MAX_KEY_DEPTH = 20  # most nested brackets of an answer that is compared by value


class UnreadableError(ValueError):
    """A text is an answer in no known notation."""


@dataclass(frozen=True)
class Value:
    r"""An answer.

    Attributes:
        kind: What it is:

            - `words`: words, the letter of a choice, or a date;
            - `formula`: a formula for math-verify;
            - `number`: the literal of a number;
            - `name`: a value that `text` names, as in `x = 5`, perhaps after the steps that lead to it;
            - `unit`: a value with the unit, percent sign or currency `text`;
            - `relation`: the sides of a relation, or of a chain of them, with the signs `text`;
            - `list`: a set, or values joined by `text`, in any order;
            - `union`: a union of intervals and sets;
            - brackets such as `[)`, and other kinds of ordered parts.

        parts: The values that it consists of.
        text: Words, LaTeX, name, unit, signs, or `fraction` for a number of this form.
        number: The number.
        digits: Significant digits of a decimal.
    """

    kind: str
    parts: tuple[Value, ...] = ()
    text: str = ""
    number: Fraction = Fraction(0)
    digits: int = 0

    def names(self) -> set[str]:
        """Return the different names of a list's values; those of `x_1` and `x_2` are the same."""
        return {part.text.partition("_")[0] for part in self.parts if part.kind == "name"}


def key_of_words(words: str) -> str:
    """Return a key that is equal for equal words: punctuation and the case of words do not count."""
    bare = compact(rewritten(words_of(words), _PUNCTUATION).strip()).strip("()[],;:")
    return bare if len(bare) == 1 else bare.casefold()


_PUNCTUATION = rules(r"""
    ^\s*(?i:an?|the)\s+(?=\S\S) =>
    ["'] =>
    \.(?!\d)|(?<=[^\W\d])\. => ▁
""")
INFINITE = (Value("formula", text="-\\infty"), Value("formula", text="\\infty"))
_CONSTANTS = {"\\emptyset": Value("list", text="set"), "\\mathbb{R}": Value("()", INFINITE)}
_LIST = r",?\s*\\text\{\s*,?\s*(?:or|and|or else)\s*\}|,?\s+(?:and|or)\s+|[,;]"
# Notation that math-verify does not support: compared literally.
_SIGNS_ONLY = re.compile(r"\\(?:angle|ldots|lor|land|(?:big)?star|mathcal|bigcirc|square)(?![a-zA-Z])|\\begin\{cases\}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_SIGNS = (
    r"(?:\\not\s*)?(?:[=<>]|\\(?:le|ge|ne|approx|equiv|sim|cong|in|notin|subset|subseteq|supset|parallel"
    r"|perp|mid|to|propto|Rightarrow|implies|iff|ll|gg|mod)(?![a-zA-Z]))|\\not(?![a-zA-Z])"
)
_TURNED = {">": "<", "\\ge": "\\le"}
_PLUS_MINUS = r"\\pm(?![a-zA-Z])"
_NAME = re.compile(
    r"(?!(?:[ei]|\\pi|\\infty|\\emptyset)\Z)(?:\\text\{[^{}]*\}|\\?[a-zA-Z]+'*|\\(?:angle|overline|triangle|vec|hat)\s*\{?\s*[a-zA-Z]+\}?)"
    r"(?:_(?:\w|\{\w+\}))?\s*(?:\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\))?"
    r"|\(\s*\\?[a-zA-Z](?:_\w)?(?:\s*,\s*\\?[a-zA-Z](?:_\w)?)*\s*\)"
)
# Words so short that their length does not distinguish them from products of letters.
_SMALL_WORDS = frozenset(
    "a an and are as at be but by can did do for get got had has he her his how if in is it its me my no nor not of off"
    " on one or our out per she so than the to too two up us was we who why yes yet you cm mm km kg mg ml lb oz ft in"
    " hr min sec".split()
)
_FRENCH = rules(r"""
    \]([^][]*[,;][^][]*)([][]) => (\1\2
    ([\[(])([^][()]*[,;][^][()]*)\[ => \1\2)
""")
_DATES = rules(r"""
    ^\s+|\s+$ =>
    \s+ => ▁
    ^(\w+day,? )?(the )?(?=.*\d) =>
    \bjan(uary)?\b\.? => @1@
    \bfeb(ruary)?\b\.? => @2@
    \bmar(ch)?\b\.? => @3@
    \bapr(il)?\b\.? => @4@
    \bmay\b => @5@
    \bjune?\b\.? => @6@
    \bjuly?\b\.? => @7@
    \baug(ust)?\b\.? => @8@
    \bsept?(ember)?\b\.? => @9@
    \boct(ober)?\b\.? => @10@
    \bnov(ember)?\b\.? => @11@
    \bdec(ember)?\b\.? => @12@
    ^(\d{4})([-/.])0?(\d{1,2})\2 ?0?(\d{1,2})$ => @date▁\1-\3-\4
    ^@(\d+)@ 0?(\d{1,2})(?:st|nd|rd|th)?(?:,? (\d{4}))?$ => @date▁\3-\1-\2
    ^0?(\d{1,2})(?:st|nd|rd|th)?(?: of)? @(\d+)@(?:,? (\d{4}))?$ => @date▁\3-\2-\1
    ^@(\d+)@,? (\d{4})$ => @date▁\2-\1-
    ^0?(\d{1,2}):(\d\d)\s*([ap])\.?\s?m\.?$ => @time▁\1:\2▁\3m
    ^0?(\d{1,2}):(0\d)$ => @time▁\1:\2
""")
_UNITS = rules(r"""
    ^(-?)\s*([¤€£¥₹])\s*(-?[^-]*?)\s*((?:\\text\{\s*)?(?:/|per|a |[a-z]+(?:ars|red|and|ion)\b).*|)$ => \1\3\2\4
    ^([\d.,+ -]*\d)\s*(\D?)(\\text\{)?\s*hundred\b => \1e2\2\3
    ^([\d.,+ -]*\d)\s*(\D?)(\\text\{)?\s*thousand\b => \1e3\2\3
    ^([\d.,+ -]*\d)\s*(\D?)(\\text\{)?\s*million\b => \1e6\2\3
    ^([\d.,+ -]*\d)\s*(\D?)(\\text\{)?\s*billion\b => \1e9\2\3
    ^([\d.,+ -]*\d)\s*(\D?)(\\text\{)?\s*trillion\b => \1e12\2\3
    \\text\{\s*\}$ =>
""")
# Determinants, in vmatrix, are another kind.
_MATRICES = rules(r"""
    ^[(\[]\s*\\begin\s*\{(?:array|matrix)\}(?:\{[clr| ]*\})? => \\begin{pmatrix}
    \\end\s*\{(?:array|matrix)\}\s*[)\]]$ => \\end{pmatrix}
    \\(begin|end)\s*\{[pb]matrix\} => \\\1{pmatrix}
""")
_BASES = rules(r"""
    ^\s+|\s+$ =>
    \s+ => ▁
    ,? \(?(?:in )?base[ -](\w+)\)?$ => _{\1}
    _\s*\{?\s*\(?(?:base )?(\w+)\)?\s*\}?$ => _{\1}
    ^\(?([0-9A-Za-z. ]+?)\)?_ => \1_
    _\{two\} => _{2}
    _\{three\} => _{3}
    _\{four\} => _{4}
    _\{five\} => _{5}
    _\{six\} => _{6}
    _\{seven\} => _{7}
    _\{eight\} => _{8}
    _\{nine\} => _{9}
    _\{ten\} => _{10}
    _\{eleven\} => _{11}
    _\{twelve\} => _{12}
    _\{sixteen\} => _{16}
""")


def read(text: str) -> Value:
    """Parse an answer.

    Raises:
        UnreadableError: It is in no known notation.
    """
    text = spelled(text).strip()
    if levels(text) is None:  # the French notation of an open end
        text = rewritten(text, _FRENCH)
    if (found := re.fullmatch(WHOLE_TEXT, text, re.DOTALL)) is not None:
        text = spelled(found[1])
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
        return " ".join(words_of(value.text).split()) if value.kind == "words" else str(_key(value))
    except (ValueError, RecursionError):  # in no known notation, or a number with too many digits to print
        return words


def _key(value: Value) -> Any:
    keys = list(map(_key, value.parts))
    match value.kind:
        case "number":
            return str(value.number)
        case "words":
            return key_of_words(value.text)
        case "formula":
            return "".join(value.text.split())
        case "name":
            return keys[-1]
        case "list":
            names = [part.text for part in value.parts] if len(value.names()) > 1 else [""] * len(keys)
            return ["list", *sorted(zip(names, keys, strict=True), key=str)]
    return [value.kind, value.text, *keys]


def _date(text: str) -> Value | None:
    date = rewritten(words_of(text).casefold(), _DATES)
    return Value("words", text=date) if date.startswith(("@date", "@time")) else None


def _choice(text: str) -> Value | None:
    found = re.fullmatch(r"(?:(?i:option|choice|answer)\s)?\s*\(?\s*([A-Z])\s*\)?", words_of(text).strip())
    return Value("words", text=found[1]) if found is not None else None


def chosen(text: str, question: str) -> str | None:
    """Return the letter of an answer that gives a choice with its value, such as `(B) 12`.

    Words after the letter may be a verdict on it ("A) eliminated"), unless the question has them after this letter.
    """
    found = re.fullmatch(r"\(?\s*([A-Z])\s*[).:](?!\s*[=<>+*/^-])\s*(.+)", words_of(spelled(text)).strip(), re.DOTALL)
    if found is None:
        return None
    option, options = (re.sub(r"[\W_]+", " ", text).strip() for text in (found[0], question))
    return found[1] if option in options or read(found[2]).kind not in ("words", "list") else None


def _words(text: str) -> Value | None:
    """Words only, without mathematical signs."""
    plain = words_of(text)
    words = _WORD.findall(plain)
    is_list = split(plain, _LIST)[1]
    if re.search(r"[\\^_={}<>|+*/%0-9¤°?]", plain) or not words or is_list or FUNCTIONS.intersection(words):
        return None
    return Value("words", text=plain)


def _list(text: str) -> Value | None:
    depth = levels(text)
    if depth is None:
        raise UnreadableError(f"the brackets of {text!r:.200} do not match")
    # Outside of brackets, a comma before three digits does not separate items.
    joined = _THOUSANDS.sub(lambda found: found[0].replace(",", "") if depth[found.start()] == 0 else found[0], text)
    parts, marks = split(joined, _LIST)
    if not marks:
        return None if joined == text else read(joined)
    given = [part for part in parts if part.strip()]
    if len(given) < 2:
        return read("".join(given))
    items = tuple(map(read, given))
    first, *others = items
    last = items[-1]
    if first.kind == "name" and not {item.kind for item in others} & {"name", "relation"}:  # x = 1, 2
        items = (first, *(Value("name", (item,), first.text) for item in others))
    elif last.kind == "unit" and first.kind in ("number", "formula"):  # 3 and 5 cm
        items = tuple(item if item.kind == "unit" else Value("unit", (item,), last.text) for item in items)
    words = set(re.findall("or|and", " ".join(marks)))
    return Value("list", _flat(items), words.pop() if len(words) == 1 else ",")


def _flat(items: tuple[Value, ...]) -> tuple[Value, ...]:
    """Replace each pair such as 1 +- 2 by its two values."""
    return tuple(chain.from_iterable(item.parts if item.text == "+-" else (item,) for item in items))


def _union(text: str) -> Value | None:
    parts, marks = split(text, r"\\cup(?![a-zA-Z])|(?<=[)\]}])\s*[Uu]\s*(?=[(\[\\])")
    return Value("union", tuple(map(read, parts))) if marks else None


def _relation(text: str) -> Value | None:
    parts, marks = split(text, _SIGNS)
    if not marks:
        return None
    parts, signs = [part.strip() for part in parts], [re.sub(r"\s", "", mark) for mark in marks]
    if signs == ["\\in"] and _is_name(parts[0]):
        return read(parts[1])  # x in a set: the set
    if not all(parts[1:]):
        raise UnreadableError(f"{text!r:.200} lacks a side")
    if signs == ["="] and _is_name(parts[1]) and not _is_name(parts[0]):
        parts.reverse()
    if set(signs) == {"="} and _is_name(parts[0]):
        return Value("name", tuple(map(read, parts[1:])), re.sub(r"[\s{}]|\\text", "", parts[0]))
    values = tuple(read(part) if part else Value("words") for part in parts)
    if all(sign in _TURNED for sign in signs):
        return Value("relation", values[::-1], " ".join(_TURNED[sign] for sign in signs[::-1]))
    return Value("relation", values, " ".join(signs))


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text.strip()) is not None


def _plus_minus(text: str) -> Value | None:
    if len(re.findall(_PLUS_MINUS, text)) != 1:
        return None
    return Value("list", tuple(read(re.sub(_PLUS_MINUS, sign, text).lstrip("+ ")) for sign in "+-"), "+-")


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
        return Value("list", _flat(tuple(map(read, parts))) if inner.strip() else (), "set")
    if len(parts) == 1 and left + right == "()":
        return read(inner)
    return Value(left + right, tuple(map(read, parts))) if all(part.strip() for part in parts) else None


def _matrix(text: str) -> Value | None:
    found = re.fullmatch(r"\\begin\{(\w+)\}(.*)\\end\{\1\}", rewritten(text, _MATRICES), re.DOTALL)
    if found is None or "matrix" not in found[1]:
        return None
    rows = [split(row, "&")[0] for row in split(found[2], r"\\\\(?:\[[^\]]*\])?")[0] if row.strip()]
    return Value(found[1], tuple(Value("row", tuple(map(read, cells))) for cells in rows))


def _based(text: str) -> Value | None:
    found = re.fullmatch(r"([0-9A-Za-z. ]+)_\{(\d\d?)\}", rewritten(words_of(text), _BASES))
    if found is None:
        return None
    digits, base = found[1].replace(" ", "").casefold(), int(found[2])
    is_hexadecimal = re.fullmatch("[0-9a-f]{2,}", digits) and base > 10
    if not 2 <= base <= 36 or not (is_hexadecimal or re.search("[0-9]", digits)):
        return None
    return Value(f"base {base}", (Value("words", text=digits.lstrip("0") or "0"),))


def _unit(text: str) -> Value | None:
    text = rewritten(text, _UNITS)
    found = re.search(r"\\text\{|%|(?<![\\a-zA-Z{])[a-zA-Z]{2,}|[¤°€£¥₹¢]", text)
    depth = levels(text)
    if found is None or depth is None:
        return _number(text)
    core = text[: found.start()].strip()
    unit = unit_of(words_of(text[found.start() :]))
    is_angle = unit == "°" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", core)
    if depth[found.start()] or not core or core[-1] in "+-*/^_=<>(" or unit is None or is_angle:
        return None
    value = read(core)
    return Value("unit", (value,), unit) if value.kind in ("number", "formula", ":") else None


def _ratio(text: str) -> Value | None:
    parts, marks = split(text, r":|\\text\{\s*to\s*\}|(?<=\d)\s+to\s+(?=\d)")
    if not marks or not all(part.strip() for part in parts):
        return None
    terms = tuple(map(read, parts))
    return Value(":", terms) if {term.kind for term in terms} <= {"number", "formula"} else None


_LITERALS = rules(r"""
    (?<![a-zA-Z}^_\]])\{(\d+)\} => \1
    \{\}$ =>
    \s*\\frac\s*\{\s*([^{}]+?)\s*\}\s*\{\s*([^{}]+?)\s*\} => ▁\1/\2
    ^([+-]?)\s+ => \1
    (?<!\d{4})(?:,(?=\d{3}(?!\d))|\s(?=\d{3}(?![\d/]))) =>
    ^(-?)10\s*\^ => \g<1>1*10^
    \s*\*\s*10\s*\^\s*\{\s*([+-]?)\s*(\d+)\s*\}$ => e\1\2
    \s*/\s* => /
    \s+and\s+ => ▁
""")
_NUMBER = re.compile(
    r"([+-]?)(?:(\d+)\s+(?=\d+/))?((?=\.?\d|\.\\)\d*\.?\d*)(?:\\overline\s*\{\s*(\d+)\s*\})?(?:[eE]([+-]?\d{1,4}))?"
    r"(?:/([+-]?(?:\d+\.?\d*|\.\d+)))?"
)


def _number(text: str) -> Value | None:
    """Parse the literal of a number. `25 * 17` is not a literal."""
    found = _NUMBER.fullmatch(rewritten(text, _LITERALS)) if len(text) <= MAX_NUMBER_CHARS else None
    if found is None:
        return None
    sign, whole, above, repeated, power, below = found.groups("")
    if not Fraction(below or 1) or abs(int(power or 0)) > MAX_NUMBER_CHARS:
        return None
    value = Fraction(f"0{above}")
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(above.partition(".")[2]))
    value = int(whole or 0) + value * Fraction(10) ** int(power or 0) / Fraction(below or 1)
    if sign == "-":
        value = -value
    digits = 0 if below else len(above.replace(".", "").lstrip("0"))
    is_fraction = bool(below) and not whole
    return Value("number", text="fraction" if is_fraction else "", number=value, digits=digits)


def _formula(text: str) -> Value:
    """Everything else: formulas, and texts that are not formulas."""
    if _SIGNS_ONLY.search(text):
        return Value("words", text=text)
    bare = re.sub(r"\\text\{\s*([a-zA-Z]|\d+)\s*\}", r"\1", text)
    found = _WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\}|\\text\{[^{}]*\}", "", bare))
    words = [word for word in found if word not in FUNCTIONS and not word.isupper()]
    if "\\text{" in bare or any(len(word) > 3 or word.casefold() in _SMALL_WORDS for word in words):
        return Value("words", text=text)
    if (
        re.search(r"(?<![_\d])\d+\s+\d|[\d})\]]\s*'|\d\s*_|[#?@&~:;\"$]", bare.replace("\\&", ""))
        or bare.count("|") % 2
    ):
        raise UnreadableError(f"{text!r:.200} is not a formula")
    return Value("formula", text=bare)


_READERS: tuple[Callable[[str], Value | None], ...] = (
    _date, _choice, _words, _based, _list, _union, _relation, _matrix, _bracketed, _plus_minus, _unit, _ratio,
    _number, _formula,
)  # fmt: skip
