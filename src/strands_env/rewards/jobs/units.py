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
cm cms Cm CM centimeter centimeters centimetre centimetres
m meter meters metre metres
km kms Km KM kilometer kilometers kilometre kilometres
inch in inches
foot ft Ft feet
yard yd yards
mile mi miles
mg milligram milligrams
g gram grams
kg kgs Kg KG kilogram kilograms
pound lb lbs pounds
ounce oz ounces
ton tons tonne tonnes
ml mL milliliter milliliters millilitre millilitres
l L liter liters litre litres
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
kelvin kelvins
pascal Pa pascals
hertz Hz
am Am AM
pm Pm PM
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
UNITS: dict[str, str] = {}
for _names in _SPELLINGS.strip().splitlines():
    UNITS.update(dict.fromkeys(_names.split(), _names.split()[0]))
# Words that end like a plural but count nothing, or that change the count.
_NO_COUNTS = re.compile(
    r"is|was|as|has|does|less|plus|minus|times|unless|besides|thus|always|perhaps|sometimes|equals|exceeds"
    r"|fails|across|hundreds|thousands|millions|billions|dozens|dozen|tens|scores|pairs|pair|couples|squares"
    r"|powers|roots|factors|digits|this|his|its|us|yes|guess|guesses|values|options|others|ones|answers|seems"
    r"|means|gives|makes|possibilities|towards|afterwards|upwards|downwards|remains|misses|false|wrong|halves"
    r"|thirds|quarters|lakhs|crores|grosses|negatives|reciprocals|opposites|inverses|fourths|fifths|sixths"
    r"|sevenths|eighths|ninths|tenths|elevenths|twelfths|percents|points|percentages|multiples|factorials"
    r"|doubles|triples|quadruples|decades|centuries|millennia|googols|fortnights|exponents|logs|logarithms|sines"
    r"|cosines|tangents|integrals|derivatives|sums|products|differences|quotients|remainders|ones|twos|threes"
    r"|fours|fives|sevens|eights|nines|elevens|twelves"
    r"|[a-z]*(?:teens|(?:twen|thir|for|fif|six|seven|eigh|nine)ties|teenths|tieths|hundredths|thousandths"
    r"|illionths|illions)"  # but not: paths
)
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
        known = UNITS.get(name) or UNITS.get(name[2:] and name.casefold()) or _counted(name)
        if known is None or not re.fullmatch(r"(?:-?\d)?", raised):
            return None
        parts.append(known + power + raised)
    unit = " ".join(parts)
    if re.fullmatch(r"|.*/|(?=.*#)[^/]* [^/]*", unit):  # a noun has no other unit next to it
        return None
    return unit.replace(" / ", "/").replace("mile/hour", "mph")


def _counted(word: str) -> str | None:
    """Return the noun of a plural that counts items, as `#egg`."""
    word = word.casefold()
    if _NO_COUNTS.fullmatch(word) or not re.fullmatch("[a-z]{2,20}[^sui]s", word):
        return None
    return f"#{word[:-3]}y" if word.endswith("ies") else f"#{word[:-1]}"
