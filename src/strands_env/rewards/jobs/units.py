"""Normalization of units to one spelling. Nothing is converted: a meter is not a hundred centimeters."""

from __future__ import annotations

import re
from fractions import Fraction

from .notation import CURRENCY, DEGREE, rewritten, rules

_SPELLINGS = {
    "%": "% percent pct percentage",
    "°": f"{DEGREE} degree degrees deg",
    "dollar": f"{CURRENCY} $ dollar dollars usd bucks",
    "cent": "¢ cent cents",
    "euro": "€ euro euros eur",
    "pound sterling": "£ gbp",
    "yen": "¥ yen jpy",
    "rupee": "₹ rupee rupees inr",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kms kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kgs kilogram kilograms",
    "pound": "lb lbs pound pounds",
    "ounce": "oz ounce ounces",
    "ton": "ton tons tonne tonnes",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "l": "l liter liters litre litres",
    "gallon": "gal gallon gallons",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "mph": "mph",
    "radian": "rad radian radians",
    "unit": "unit units",
    "joule": "J joule joules",
    "newton": "N newton newtons",
    "watt": "W watt watts",
    "kilowatt": "kW kilowatt kilowatts",
    "volt": "V volt volts",
    "ampere": "amp amps ampere amperes",
    "ohm": "ohm ohms Omega",
    "kelvin": "K kelvin kelvins",
    "pascal": "Pa pascal pascals",
    "hertz": "Hz hertz",
    "am": "am",
    "pm": "pm",
    "person": "person people persons",
    "child": "child children",
    "man": "man men",
    "woman": "woman women",
    "fish": "fish",
    "sheep": "sheep",
    "foot-pound": "foot-pounds",
}
UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_MAGNITUDES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words that end like a plural but count nothing, or that change the count.
_NO_COUNTS = frozenset(
    "is was as has does less plus minus times unless besides thus always perhaps sometimes equals exceeds fails across"
    " minus hundreds thousands millions billions dozens dozen tens pairs pair squares powers roots factors digits"
    " this his its us yes guess guesses values options others ones answers seems means gives makes possibilities"
    " besides towards afterwards upwards downwards remains misses false wrong halves thirds lakhs crores"
    " grosses negatives reciprocals opposites inverses fourths fifths sixths sevenths eighths ninths tenths"
    " elevenths twelfths".split()
)
_PARTS = re.compile(r"[a-z]*(?:teenths|tieths|hundredths|thousandths|illionths|illions)")  # but not: paths


def magnitude(text: str) -> tuple[Fraction, str]:
    """Return the factor that a text begins with, and the rest: one million and "dollars" for "million dollars"."""
    words = text.split()
    scale = Fraction(1)
    while words and words[0].casefold() in _MAGNITUDES:
        scale *= _MAGNITUDES[words.pop(0).casefold()]
    return scale, " ".join(words)


_SPACING = rules(
    (r"[{}\\~,]|(?<=[a-zA-Z])\.(?!\w)|(?<=\b[ap])\.", " "),
    (r"-(?!pounds)", " "),
    (r"\s*\^\s*", "^"),
    (f"([{DEGREE}])", r"\1 "),
    (r"(?<=\w)\s*([" + CURRENCY + DEGREE + r"€%])", r" \1"),
    (r"(?i)\b([ap]) m\b", r"\1m"),
    (r"\*", " "),
    ("/", " / "),
)
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_RAISED = {"squared": "^2", "cubed": "^3"}


def unit_of(text: str) -> str | None:
    """Return the normalized unit, or None if the text is not a unit. The plural of any noun is a unit."""
    parts: list[str] = []
    power = ""
    for word in rewritten(text, _SPACING).split():
        lower = word.casefold()
        name, _, raised = word.partition("^")
        known = UNITS.get(name) or UNITS.get(name.casefold()) or _counted(name)
        if lower in _POWERS:
            power = _POWERS[lower]
        elif lower in _RAISED and parts:
            parts[-1] += _RAISED[lower]
        elif lower in ("/", "per") or (lower in ("a", "an") and parts):
            parts.append("/")
        elif known is not None and re.fullmatch(r"(?:-?\d)?", raised):
            parts.append(known + (f"^{raised}" if raised not in ("", "1") else power))
            power = ""
        elif name in ("C", "F") and parts == ["°"]:
            parts = [f"°{name}"]
        else:
            return None
    is_counted = any(one.startswith("#") for one in parts)
    if power or not parts or parts[-1] == "/" or (is_counted and len(parts) > 1 and "/" not in parts):
        return None
    joined = " ".join(parts)
    return {"mile / hour": "mph", "° radian": "radian"}.get(joined, joined.replace(" / ", "/"))


def _counted(word: str) -> str | None:
    """Return the noun of a plural that counts items, as `#egg`."""
    word = word.casefold()
    if not re.fullmatch("[a-z]{3,20}s", word) or word.endswith(("ss", "us", "is", "ys's")):
        return None
    if word in _NO_COUNTS or _PARTS.fullmatch(word):
        return None
    return f"#{word[:-3]}y" if word.endswith("ies") else f"#{word[:-1]}"
