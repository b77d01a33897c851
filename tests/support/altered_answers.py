r"""Right answers, the same ones spelled otherwise, and wrong ones that differ from them in one place.

`truths()` makes 500 right answers of many kinds, `respelled` other spellings of one, `altered` answers that look like
it and are wrong. `python -m support.altered_answers` (in tests) has `MathReward` grade 10,000 altered and all respelled
ones; a sample of them is in the test suite.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strands_env.rewards import MathReward

from .episodes import answered, task

WORDS = (
    "east west Paris London Monday Tuesday Evelyn Alice Robert parabola ellipse circle hyperbola triangle square"
    " isosceles"
    " scalene obtuse acute yellow purple orange green even odd prime composite rational irrational convergent divergent"
    " increasing decreasing maximum minimum Newton Euler Gauss Saturn Jupiter Mercury oxygen hydrogen carbon iron"
).split()
UNITS = ("cm", "km", "kg", "hours", "minutes", "dollars", "apples", "students", "miles")
LETTERS = "abcknpqrstuvwxyz"


@dataclass(frozen=True)
class Truth:
    """A right answer: its parts, so that it can be changed where it matters.

    Attributes:
        text: As a data set has it.
        kind: What it is.
        same: The same, spelled otherwise.
        other: Wrong ones of its kind, made by its own rules.
    """

    text: str
    kind: str
    same: tuple[str, ...] = ()
    other: tuple[str, ...] = field(default=())


def truths(count: int = 500, seed: int = 0) -> list[Truth]:
    """Different right answers, all kinds in turn."""
    chance = random.Random(seed)
    found: dict[str, Truth] = {}
    at = 0
    while len(found) < count:
        truth = _KINDS[at % len(_KINDS)](chance)
        at += 1
        found.setdefault(truth.text, truth)
    return list(found.values())


def respelled(truth: Truth) -> list[str]:
    """Answers that say the same."""
    text = truth.text
    plain = [text, *truth.same]
    spellings = [f"\\boxed{{{one}}}" for one in plain]
    spellings += [
        f"\\boxed{{ {text} }}",
        f"\\boxed{{{text}.}}",
        f"\\boxed{{${text}$}}",
        f"$\\boxed{{{text}}}$",
        f"\\[ \\boxed{{{text}}} \\]",
        f"\\fbox{{{text}}}",
        f"So the answer is \\boxed{{{text}}}.",
        f"\\boxed{{\\displaystyle {text}}}",
        f"The answer is ${text}$.",
        f"The final answer is: ${text}$",
        f"${text}$",
    ]
    if "\\frac" in text:
        spellings += [f"\\boxed{{{text.replace(chr(92) + 'frac', chr(92) + name)}}}" for name in ("dfrac", "tfrac")]
    if text.startswith(("(", "[")) and text.endswith((")", "]")):
        spellings.append(f"\\boxed{{\\left{text[:-1]}\\right{text[-1]}}}")
    if "," in text and not re.search(r"\d,\d{3}(?!\d)", text):
        spellings.append(f"\\boxed{{{text.replace(',', ', ')}}}")
    return spellings


def altered(truth: Truth, count: int, seed: int = 0) -> list[str]:
    """Answers that are wrong: a digit, the order of letters, a bracket, a relation, a base, an item more."""
    chance = random.Random(f"{seed} {truth.text}")
    found = dict.fromkeys(truth.other)
    positions = [at for at, char in enumerate(truth.text) if char.isdigit()]
    for _ in range(count * 4):
        if positions:
            at = chance.choice(positions)
            digit = chance.choice([one for one in "123456789" if one != truth.text[at]])
            found[truth.text[:at] + digit + truth.text[at + 1 :]] = None
            if chance.random() < 0.3:
                found[truth.text[: at + 1] + chance.choice("123456789") + truth.text[at + 1 :]] = None
    pool = list(found)
    chance.shuffle(pool)
    return [f"\\boxed{{{one}}}" for one in ([*truth.other, *(one for one in pool if one not in truth.other)])[:count]]


def _around(text: str) -> tuple[str, ...]:
    """What makes any value another one, or none."""
    return (
        f"\\neq {text}",
        f"\\ge {text}",
        f"< {text}",
        f"\\approx {text}",
        f"\\text{{not }} {text}",
        f"{text} \\text{{ is wrong}}",
        f"{text} \\text{{ or }} 77771",
        f"{text}, 77771",
        f"[{text}]",
        f"\\{{{text}\\}}",
        f"\\pm {text}",
        f"77771 = {text}",
    )


def _nonzero(chance: random.Random, most: int = 99) -> int:
    return chance.choice([-1, 1, 1]) * chance.randint(1, most)


def _integer(chance: random.Random) -> Truth:
    n = chance.randint(2, 999_999)
    a = chance.randint(1, n - 1)
    same = (
        f"{n:,}",
        f"{n:,}".replace(",", "{,}"),
        f"{n:,}".replace(",", "\\,"),
        f"{n}.0",
        f"x={n}",
        f"0{n}",
        f"\\text{{{n}}}",
    )
    undone = (
        f"{a}+{n - a}",
        f"{n + a} - {a}",
        f"\\frac{{{2 * n}}}{{2}}",
        f"{n}!",
        f"\\sum_{{i=1}}^{{{n}}} 1",
        f"{n} \\cdot 1",
    )
    return Truth(str(n), "integer", same, (*_around(str(n)), *undone, f"-{n}", f"{n}\\%" if n == 1 else f"{n}_7"))


def _decimal(chance: random.Random) -> Truth:
    digits = chance.randint(1, 8)
    n = chance.randint(1, 10**digits - 1) * 10 + chance.randint(1, 9)
    text = f"{n / 10 ** (digits + 1):.{digits + 1}f}"
    same = (f"{text}0", text.lstrip("0"), f"\\frac{{{n}}}{{{10 ** (digits + 1)}}}", f"{n}e-{digits + 1}")
    return Truth(text, "decimal", same, (*_around(text), f"-{text}", f"{text}\\%", f"{text}1"))


def _fraction(chance: random.Random) -> Truth:
    above, below = _nonzero(chance), chance.choice([3, 4, 5, 6, 7, 8, 9, 11, 16, 25])
    while above % below == 0:
        above = _nonzero(chance)
    sign = "-" if above < 0 else ""
    text = f"{sign}\\frac{{{abs(above)}}}{{{below}}}"
    same = [f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}", f"{sign}\\frac{{{3 * abs(above)}}}{{{3 * below}}}"]
    if below in (4, 5, 8, 16, 25):
        same.append(f"{above / below!r}")
    if above > below and above % below:
        same.append(f"{above // below}\\frac{{{above % below}}}{{{below}}}")
    near = f"{above / below:.4f}" if below not in (4, 5, 8, 16, 25) else f"{above / below + 0.00001:.6f}"
    turned = (f"\\frac{{{below}}}{{{above}}}",) if abs(above) != below else ()
    return Truth(text, "fraction", tuple(same), (*_around(text), near, f"{-above}/{below}", *turned))


def _mixed(chance: random.Random) -> Truth:
    whole, below = chance.randint(2, 30), chance.randint(3, 9)
    above = chance.randint(1, below - 1)
    text = f"{whole}\\frac{{{above}}}{{{below}}}"
    same = (
        f"{whole} {above}/{below}",
        f"{whole}\\ \\tfrac{{{above}}}{{{below}}}",
        f"\\frac{{{whole * below + above}}}{{{below}}}",
    )
    return Truth(
        text, "mixed", same, (*_around(text), f"\\frac{{{whole * above}}}{{{below}}}", f"{whole} - {above}/{below}")
    )


def _scientific(chance: random.Random) -> Truth:
    head, power = f"{chance.randint(1, 9)}.{chance.randint(1, 99):02d}", chance.choice([-1, 1]) * chance.randint(4, 30)
    text = f"{head} \\times 10^{{{power}}}"
    same = (
        f"{head}e{power}",
        f"{head} \\cdot 10^{{{power}}}",
        f"{head}*10^{{{power}}}",
        f"{head}\\times10^{{{power}}}",
    )
    return Truth(text, "scientific", same, (*_around(text), f"{head}e{-power}", f"{head}e{power + 1}", head))


def _base(chance: random.Random) -> Truth:
    base = chance.randint(3, 9)
    digits = str(chance.randint(1, base - 1)) + "".join(
        str(chance.randint(0, base - 1)) for _ in range(chance.randint(2, 4))
    )
    text = f"{digits}_{base}"
    bases = tuple(f"{digits}_{other}" for other in range(base + 1, base + 5))
    value = int(digits, base)
    return Truth(
        text, "base", (f"{digits}_{{{base}}}", f"({digits})_{base}"), (*_around(text), *bases, digits, str(value))
    )


def _text(chance: random.Random) -> Truth:
    word = chance.choice(WORDS)
    if chance.random() < 0.4:
        word = f"{word} {chance.choice(WORDS)}"
    wrong = set()
    for _ in range(30):
        letters = list(word)
        i, j = chance.sample(range(len(letters)), 2)
        letters[i], letters[j] = letters[j], letters[i]
        made = "".join(letters)
        if made.replace(" ", "").casefold() != word.replace(" ", "").casefold():
            wrong.add(made)
    other = (
        *sorted(wrong),
        word + "s",
        word[1:],
        f"not {word}",
        f"{word} or {word[::-1]}",
        f"un{word}",
        word[::-1] + "x",
        word * 2,
    )
    return Truth(word, "text", (f"\\text{{{word}}}", f"\\textbf{{{word}}}", word.lower(), f"\\mathrm{{{word}}}"), other)


def _capitals(chance: random.Random) -> Truth:
    word = "".join(chance.sample("ABCDEFGHKLMNPQ", chance.randint(2, 4)))
    orders = {"".join(chance.sample(word, len(word))) for _ in range(30)} - {word}
    return Truth(
        word,
        "capitals",
        (f"\\text{{{word}}}", " ".join(word)),
        (*sorted(orders), word[:-1], word + "Z", "+".join(word), f"\\neq {word}"),
    )


def _choice(chance: random.Random) -> Truth:
    letter = chance.choice("ABCDE")
    others = tuple(one for one in "ABCDE" if one != letter)
    wrong = (
        *others,
        *(f"({one})" for one in others),
        f"{letter}, {others[0]}",
        f"{letter} or {others[1]}",
        f"not {letter}",
        "ABCDE",
    )
    return Truth(letter, "choice", (f"({letter})", f"\\text{{{letter}}}", f"\\textbf{{({letter})}}"), wrong)


def _point(chance: random.Random) -> Truth:
    items = [str(_nonzero(chance)) for _ in range(chance.choice([2, 2, 3, 4]))]
    while len(set(items)) < len(items):
        items = [str(_nonzero(chance)) for _ in items]
    inner = ",".join(items)
    orders = {",".join(chance.sample(items, len(items))) for _ in range(20)} - {inner}
    other = [f"({one})" for one in sorted(orders)]
    other += [
        f"[{inner}]",
        f"({inner}]",
        f"[{inner})",
        f"\\{{{inner}\\}}",
        inner,
        f"({inner},0)",
        f"({','.join(items[:-1])})",
        f"\\langle {inner} \\rangle",
    ]
    return Truth(f"({inner})", "point", (), tuple(other) + _around(f"({inner})")[:6])


def _interval(chance: random.Random) -> Truth:
    low, width = _nonzero(chance), chance.randint(1, 40)
    left, right = chance.choice("(["), chance.choice(")]")
    ends: tuple[str, str] = (str(low), str(low + width))
    if chance.random() < 0.3:
        left, ends = "(", ("-\\infty", ends[1])
    signs = {"(": "<", "[": "\\le", ")": "<", "]": "\\le"}
    text = f"{left}{ends[0]},{ends[1]}{right}"
    relation = f"x {signs[right]} {ends[1]}" if "inf" in text else f"{ends[0]} {signs[left]} x {signs[right]} {ends[1]}"
    flipped = {"(": "[", "[": "(", ")": "]", "]": ")"}
    other = [f"{left}{ends[0]},{ends[1]}{flipped[right]}", f"{flipped[left]}{ends[0]},{ends[1]}{flipped[right]}"]
    other += [
        f"{left}{ends[1]},{ends[0]}{right}",
        f"\\{{{ends[0]},{ends[1]}\\}}",
        f"{ends[0]},{ends[1]}",
        ends[1],
        f"x = {ends[1]}",
    ]
    turned = {"<": "\\le", "\\le": "<"}
    other += [
        f"x > {ends[1]}",
        f"x {turned[signs[right]]} {ends[1]}",
        f"x \\ne {ends[1]}",
        f"{text} \\cup \\{{7777\\}}",
    ]
    if "inf" not in text:
        other += [
            f"{flipped[left]}{ends[0]},{ends[1]}{right}",
            f"{ends[0]} {turned[signs[left]]} x {signs[right]} {ends[1]}",
        ]
    return Truth(text, "interval", (relation, f"x \\in {text}"), tuple(other))


def _set(chance: random.Random) -> Truth:
    items = [str(one) for one in chance.sample(range(-40, 100), chance.randint(2, 5))]
    inner = ",".join(items)
    shuffled = ",".join(items[::-1])
    text, same = (f"\\{{{inner}\\}}", (f"\\{{{shuffled}\\}}", f"\\left\\{{{inner}\\right\\}}"))
    if chance.random() < 0.5:
        text, same = inner, (shuffled, " \\text{ and } ".join(items), " or ".join(items), f"\\{{{inner}\\}}")
    other = (
        f"({inner})",
        f"[{inner}]",
        ",".join(items[:-1]),
        f"{inner},777",
        items[0],
        f"({inner}]",
        "+".join(items) if items[0] != "0" else "777",
    )
    return Truth(text, "set", same, other)


def _inequality(chance: random.Random) -> Truth:
    bound, letter = _nonzero(chance), chance.choice("xytn")
    sign = chance.choice(["<", ">", "\\le", "\\ge"])
    flip = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    long = {"<": "<", ">": ">", "\\le": "\\leq", "\\ge": "\\geqslant"}
    text = f"{letter} {sign} {bound}"
    wrong = [f"{letter} {one} {bound}" for one in ("<", ">", "\\le", "\\ge", "=", "\\ne", "\\approx") if one != sign]
    wrong += [
        f"{letter} {sign} {-bound}",
        f"{bound} {sign} {letter}",
        str(bound),
        f"{letter} {sign} {bound}, 7777",
        f"{letter}+1 {sign} {bound}",
    ]
    return Truth(text, "inequality", (f"{bound} {flip[sign]} {letter}", f"{letter}{long[sign]} {bound}"), tuple(wrong))


def _equation(chance: random.Random) -> Truth:
    slope, offset = chance.randint(2, 30), chance.randint(1, 30)
    text = f"y={slope}x+{offset}"
    same = (
        f"y = {offset} + {slope}x",
        f"{slope}x+{offset}",
        f"{slope}x - y + {offset} = 0",
        f"y - {offset} = {slope}x",
    )
    other = (
        f"y={slope}x-{offset}",
        f"y={offset}x+{slope}" if slope != offset else f"y={slope}x",
        f"y<{slope}x+{offset}",
        f"y \\ne {slope}x+{offset}",
        f"x={slope}y+{offset}",
        f"y={slope}x^2+{offset}",
        f"y=-{slope}x+{offset}",
        "y",
        f"y \\ge {slope}x+{offset}",
        f"y={slope}z+{offset}",
    )
    return Truth(text, "equation", same, other)


def _polynomial(chance: random.Random) -> Truth:
    letter = chance.choice(LETTERS.replace("d", ""))
    a, b, c = (chance.randint(2, 20) for _ in range(3))
    text = f"{a}{letter}^2+{b}{letter}+{c}"
    same = (
        f"{c}+{b}{letter}+{a}{letter}^2",
        f"{a}{letter}^{{2}} + {b} {letter} + {c}",
        f"{letter}({a}{letter}+{b})+{c}",
    )
    other = (
        f"{a}{letter}^2-{b}{letter}+{c}",
        f"{a}{letter}^3+{b}{letter}+{c}",
        f"{a}m^2+{b}m+{c}",
        f"{a}{letter}^2+{b}{letter}",
        f"{text}=0",
        f"\\int ({2 * a}{letter}+{b}) d{letter}",
        f"\\frac{{d}}{{d{letter}}} ({text})",
        f"{text} > 0",
        *_around(text)[:6],
    )
    return Truth(text, "polynomial", same, other)


def _root(chance: random.Random) -> Truth:
    factor, inside = chance.randint(2, 30), chance.choice([2, 3, 5, 6, 7, 10, 11, 13])
    text = f"{factor}\\sqrt{{{inside}}}"
    same = (
        f"{factor} \\sqrt{inside}" if inside < 10 else text,
        f"{factor}\\cdot\\sqrt{{{inside}}}",
        f"\\sqrt{{{factor**2 * inside}}}",
        f"{factor}√{inside}",
    )
    other = (
        f"{inside}\\sqrt{{{factor}}}" if factor not in (inside, inside * 4) else f"\\sqrt{{{inside}}}",
        f"{factor * inside**0.5:.3f}",
        f"-{text}",
        f"{factor}+\\sqrt{{{inside}}}",
        *_around(text),
    )
    return Truth(text, "root", same, other)


def _measured(chance: random.Random) -> Truth:
    n, unit = chance.randint(2, 500), chance.choice(UNITS)
    others = tuple(f"{n} \\text{{ {one}}}" for one in UNITS if one != unit)
    return Truth(
        f"{n}\\text{{ {unit}}}",
        "unit",
        (str(n), f"{n} {unit}", f"{n}\\,\\mathrm{{{unit}}}"),
        (*others, f"{n} {unit}^2", f"{n}\\%"),
    )


def _percent(chance: random.Random) -> Truth:
    n = chance.randint(2, 99)
    wrong = (f"{n}0\\%", f"{n / 1000}", f"{n}\\text{{ cm}}", f"-{n}\\%", f"{n}.1\\%", *_around(f"{n}\\%")[:8])
    return Truth(f"{n}\\%", "percent", (str(n), f"{n}%", f"{n} percent", f"{n / 100}", f"\\frac{{{n}}}{{100}}"), wrong)


def _money(chance: random.Random) -> Truth:
    n, cents = chance.randint(1, 9999), chance.randint(1, 99)
    amount = f"{n}.{cents:02d}"
    same = (amount, f"\\${n:,}.{cents:02d}", f"{amount} \\text{{ dollars}}")
    return Truth(
        f"\\${amount}",
        "money",
        same,
        (f"€{amount}", f"{amount} \\text{{ cents}}", f"-\\${amount}", *_around(amount)[:8]),
    )


def _date(chance: random.Random) -> Truth:
    months = "January February March April May June July August September October November December".split()
    year, month, day = chance.randint(1900, 2030), chance.randint(1, 12), chance.randint(13, 28)
    text = f"{year}-{month:02d}-{day}"
    same = (
        f"{months[month - 1]} {day}, {year}",
        f"{day} {months[month - 1]} {year}",
        f"\\text{{{months[month - 1]} {day}, {year}}}",
    )
    other = (
        f"{year}-{day}-{month:02d}",
        str(year),
        str(year - month - day),
        f"{months[month % 12]} {day}, {year}",
        f"{year}",
        f"{text} or {year}-01-01",
        f"\\ne {text}",
    )
    return Truth(text, "date", same, other)


def _ratio(chance: random.Random) -> Truth:
    a, b = chance.sample(range(2, 60), 2)
    return Truth(
        f"{a}:{b}",
        "ratio",
        (f"{a} : {b}",),
        (f"{b}:{a}", f"{a}:{b}:1", f"{a}.{b}", f"{a}{b}", f"{a},{b}", f"{a}-{b}", f"{a} \\times {b}"),
    )


def _matrix(chance: random.Random) -> Truth:
    a, b, c, d = chance.sample(range(1, 90), 4)

    def made(*cells: int, kind: str = "pmatrix") -> str:
        return f"\\begin{{{kind}}} {cells[0]} & {cells[1]} \\\\ {cells[2]} & {cells[3]} \\end{{{kind}}}"

    wrong = (
        made(a, c, b, d),
        made(b, a, c, d),
        made(d, b, c, a),
        made(a, b, c, d, kind="vmatrix"),
        str(a * d - b * c),
        f"({a},{b},{c},{d})",
        f"\\begin{{pmatrix}} {a} & {b} & {c} & {d} \\end{{pmatrix}}",
        made(a, b, c, -d),
    )
    return Truth(
        made(a, b, c, d), "matrix", (made(a, b, c, d, kind="bmatrix"), made(a, b, c, d).replace(" ", "")), wrong
    )


def _complex(chance: random.Random) -> Truth:
    a, b = chance.sample(range(2, 90), 2)
    return Truth(
        f"{a}+{b}i",
        "complex",
        (f"{b}i+{a}", f"{a} + {b} i"),
        (f"{a}-{b}i", f"{b}+{a}i", f"{a + b}i", f"{a}+{b}", f"-{a}+{b}i", f"({a},{b})"),
    )


_KINDS: tuple[Callable[[random.Random], Truth], ...] = (
    _integer,
    _decimal,
    _fraction,
    _mixed,
    _scientific,
    _base,
    _text,
    _capitals,
    _choice,
    _point,
    _interval,
    _set,
    _inequality,
    _equation,
    _polynomial,
    _root,
    _measured,
    _percent,
    _money,
    _date,
    _ratio,
    _matrix,
    _complex,
    _integer,
    _fraction,
    _text,
    _text,
)


async def misjudged(cases: list[tuple[Any, str]], is_right: bool) -> list[tuple[Any, str, str]]:
    """The pairs of truth and answer that `MathReward` judges otherwise, with its verdict."""
    reward = MathReward()
    results = await asyncio.gather(
        *(reward.compute(action=task(truth), step_result=answered(text)) for truth, text in cases)
    )
    return [
        (*case, result.info["verdict"])
        for case, result in zip(cases, results, strict=True)
        if (result.reward == 1.0) is not is_right
    ]


def main(count: int = 10_000) -> int:
    """Grade them all; print what is misjudged and return how much that is."""
    right = truths()
    wrong = [(truth.text, text) for truth in right for text in altered(truth, 40)]
    random.Random(0).shuffle(wrong)
    wrong = wrong[:count]
    same = [(truth.text, text) for truth in right for text in respelled(truth)]
    began = time.monotonic()
    accepted = asyncio.run(misjudged(wrong, False))
    refused = asyncio.run(misjudged(same, True))
    for name, found in (("accepted", accepted), ("refused", refused)):
        for case in found[:60]:
            print(name, *map(repr, case))
    print(
        f"{len(right)} right answers: {len(accepted)} of {len(wrong)} altered ones accepted,"
        f" {len(refused)} of {len(same)}"
        f" respelled ones refused, {time.monotonic() - began:.0f} s"
    )
    return len(accepted) + len(refused)


if __name__ == "__main__":
    sys.exit(bool(main()))
