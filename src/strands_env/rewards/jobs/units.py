"""Normalization of units to one spelling. Nothing is converted: a meter is not a hundred centimeters."""

from __future__ import annotations

import re

from .notation import rewritten, rules

# The unit, and its other spellings.
_SPELLINGS = """
% percent pct percentage
° degree degrees deg
dollar ¤ $ dollars usd bucks
cent ¢ cents
euro € euros eur
pound-sterling £ gbp
yen ¥ jpy
rupee ₹ rupees inr
mm millimeter millimeters millimetre millimetres
cm cms centimeter centimeters centimetre centimetres
m meter meters metre metres
km kms kilometer kilometers kilometre kilometres
inch in inches
foot ft feet
yard yd yards
mile mi miles
mg milligram milligrams
g gram grams
kg kgs kilogram kilograms
pound lb lbs pounds
ounce oz ounces
ton tons tonne tonnes
ml milliliter milliliters millilitre millilitres
l liter liters litre litres
gallon gal gallons
second s sec secs seconds
minute min mins minutes
hour h hr hrs hours
day days
week weeks
month months
year years yr yrs
mph
radian rad radians
unit units
joule J joules
newton N newtons
watt W watts
kilowatt kW kilowatts
volt V volts
ampere amp amps amperes
ohm ohms Omega
kelvin K kelvins
pascal Pa pascals
hertz Hz
am
pm
person people persons
child children
man men
woman women
fish
sheep
foot-pound foot-pounds
°C
°F
/
"""
UNITS = {name: names.split()[0] for names in _SPELLINGS.strip().splitlines() for name in names.split()}
# Words that end like a plural but count nothing, or that change the count.
_NO_COUNTS = frozenset(
    "is was as has does less plus minus times unless besides thus always perhaps sometimes equals exceeds fails across"
    " hundreds thousands millions billions dozens dozen tens scores pairs pair couples squares powers roots"
    " factors digits this his its us yes guess guesses values options others ones answers seems means gives makes"
    " possibilities towards afterwards upwards downwards remains misses false wrong halves thirds quarters lakhs crores"
    " grosses negatives reciprocals opposites inverses fourths fifths sixths sevenths eighths ninths tenths"
    " elevenths twelfths percents points percentages multiples".split()
)
_PARTS = re.compile(r"[a-z]*(?:teenths|tieths|hundredths|thousandths|illionths|illions)")  # but not: paths
_NORMAL = rules(r"""
    [{}\\~,]|(?<=[a-zA-Z])\.(?!\w)|(?<=\b[ap])\. => ▁
    -(?!pounds) => ▁
    \s*\^\s* => ^
    (°) => \1▁
    (?<=\w)\s*([¤°€%]) => ▁\1
    (?i)\b([ap]) m\b => \1m
    (?i)\bper cent\b => percent
    \*|\s+ => ▁
    (?i)\b(?:square|sq) (\w+) => \1^2
    (?i)\b(?:cubic|cu) (\w+) => \1^3
    (?i)(\w) squared\b => \1^2
    (?i)(\w) cubed\b => \1^3
    (?i)(?:^|\s+)per\s|(?<=\w)\s+an?\s|/ => ▁/▁
    (?<!\S)°\s*([CF])(?!\w) => °\1
    \^1\b =>
""")


def unit_of(text: str) -> str | None:
    """Return the normalized unit, or None if the text is not a unit. The plural of any noun is a unit."""
    parts = []
    for word in rewritten(text, _NORMAL).split():
        name, power, raised = word.partition("^")
        known = UNITS.get(name) or UNITS.get(name.casefold()) or _counted(name)
        if known is None or not re.fullmatch(r"(?:-?\d)?", raised):
            return None
        parts.append(known + power + raised)
    is_counted = any(one.startswith("#") for one in parts)
    if not parts or parts[-1] == "/" or (is_counted and len(parts) > 1 and "/" not in parts):
        return None
    return " ".join(parts).replace(" / ", "/").replace("mile/hour", "mph")


def _counted(word: str) -> str | None:
    """Return the noun of a plural that counts items, as `#egg`."""
    word = word.casefold()
    if word in _NO_COUNTS or not re.fullmatch("[a-z]{2,20}[^sui]s", word) or _PARTS.fullmatch(word):
        return None
    return f"#{word[:-3]}y" if word.endswith("ies") else f"#{word[:-1]}"
