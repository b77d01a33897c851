"""Normalization of an answer's notation. It never changes an answer's value."""

from __future__ import annotations

import re
import unicodedata

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt frac binom gcd lcm max min"
    " det".split()
)

# Characters, each with its replacement.
_SYMBOLS = {
    ord(pair[0]): pair[1:] + (" " if pair[-1].isalpha() else "")
    for pair in r"""
    ×\times ⋅* ·* ∙* ∗* ÷/ ⁄/ ∕/ −- –- —- ‐- ‑- ≤\le ⩽\le ≥\ge ⩾\ge ≠\ne ≈\approx ≡\equiv ∞\infty π\pi ∪\cup ∩\cap
    ∅\emptyset ∈\in ±\pm º° θ\theta α\alpha β\beta γ\gamma λ\lambda μ\mu φ\phi ω\omega σ\sigma Δ\Delta ℝ\mathbb{R}
    →\to ∣| ′' ’' “" ”" ⟨\langle ⟩\rangle …\ldots ⁰^{0} ¹^{1} ²^{2} ³^{3} ⁴^{4} ⁵^{5} ⁶^{6} ⁷^{7} ⁸^{8} ⁹^{9} ⁺^{+}
    ⁻^{-} ⁿ^{n} ₀_{0} ₁_{1} ₂_{2} ₃_{3} ₄_{4} ₅_{5} ₆_{6} ₇_{7} ₈_{8} ₉_{9} ½\frac{1}{2} ⅓\frac{1}{3} ⅔\frac{2}{3}
    ¼\frac{1}{4} ¾\frac{3}{4} ⅕\frac{1}{5} ⅖\frac{2}{5} ⅗\frac{3}{5} ⅘\frac{4}{5} ⅙\frac{1}{6} ⅚\frac{5}{6}
    ⅛\frac{1}{8} ⅜\frac{3}{8} ⅝\frac{5}{8} ⅞\frac{7}{8} ‰\text{permille}
    """.split()
}
# Commands, each with another command, or with text that replaces it; "▁" is a space.
_RENAMED = dict(
    pair.split(":")
    for pair in """
    dfrac:frac tfrac:frac cfrac:frac dbinom:binom tbinom:binom leq:le leqslant:le leqq:le geq:ge geqslant:ge geqq:ge
    neq:ne thickapprox:approx simeq:approx vee:lor
    wedge:land varnothing:emptyset dots:ldots cdots:ldots bigcup:cup bmod:mod pmod:mod
    longrightarrow:to rightarrow:to pmb:text textbf:text textit:text textrm:text textnormal:text textsf:text
    texttt:text mathrm:text mathit:text mathsf:text mathbf:text mathtt:text boldsymbol:text bm:text operatorname:text
    mbox:text hbox:text textup:text emph:text
    """.split()
)
_REPLACED = dict(
    pair.replace("▁", " ").split(":", 1)
    for pair in r"""
    cdot:* ast:* div:/ lt:< gt:> lbrack:[ rbrack:] lvert:| rvert:| vert:| colon:: thinspace:\, degree:° euro:€
    pounds:£ textdollar:¤ dollar:¤ lbrace:\{ rbrace:\} prime:' R:\mathbb{R} reals:\mathbb{R} Reals:\mathbb{R} left:
    right: middle: big: Big: bigg: Bigg: bigl: bigr: Bigl: Bigr: biggl: biggr: displaystyle: textstyle: limits:
    nolimits: boxed: fbox: bf: rm: it: sf: tt: quad:▁ qquad:▁ enspace:▁ hfill:▁ newline:▁ space:▁
    large: Large: LARGE: huge: Huge: underline: ensuremath:
    """.split()
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?[ ]?")
Rules = list[tuple[re.Pattern[str], str]]


def rules(table: str) -> Rules:
    """Return the patterns and replacements of a table with one pair a line, for `rewritten`; "▁" is a space."""
    pairs = (line.partition(" =>") for line in table.strip().splitlines())
    return [(re.compile(pattern.strip(), re.DOTALL), other.strip().replace("▁", " ")) for pattern, _, other in pairs]


# "¤" is a dollar sign that means money, and "‚" a comma that does not separate the items of a list.
_SIGNS = rules(r"""
    (?<=[\dn+-])\}[_^]\{(?=[\dn+-]+\}) =>
    \\(?:text)?color(?:box)?\s*(?:\[\w*\])?\s*\{[^{}]*\} =>
    [\u200b\u2061\u2062] =>
    √\s*(\d+(?:\.\d+)?|[a-zA-Z]) => \\sqrt{\1}
    √\s*\(([^()]*)\) => \\sqrt{\1}
    √ => \\sqrt
    (\\\\)\s*\[-?[\d.]+\s*(?:pt|em|ex|mm|cm)\] => \1
    \{:\} => :
    \\\$ => ¤
    \{¤\} => ¤
    (?<!\\)\\% => %
    \^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\}) => °
    \{,\}|,\\! => ‚
    \\! =>
    (?<=\d)\s*‚\s*(?=\d) =>
    ‚ => ,
""")
_SPACING = rules(r"""
    \\text\s*(?:\{\s*)?¤(?:\s*\})? => ¤
    \{((?:[^{}]|\{[^{}]*\})*)\\over(?![a-zA-Z])((?:[^{}]|\{[^{}]*\})*)\} => \\frac{\1}{\2}
    \{((?:[^{}]|\{[^{}]*\})*)\\choose(?![a-zA-Z])((?:[^{}]|\{[^{}]*\})*)\} => \\binom{\1}{\2}
    \^\s*(?:\{\s*('[' ]*)\}|(')) => \1\2
    (?<=\d)\s*\\,\s*(?=\d{3}(?!\d)) =>
    \\,|(?<!\\)\\[ ;:>]|~|\\h(?:space|skip)\{[^{}]*\} => ▁
    \s+ => ▁
    (?<=[\d)])\s?\\times\s?|\\times\s?(?=[-\d.(]|\\(?:frac|sqrt|pi)) => *
""")
_ARGUMENTS = rules(r"""
    \$\$ => ▁
    \$|\\[()\[\]] =>
    (?i)^(?:\\text\s?\{\s*)?all real(?:s| numbers)?\s*\}?$ => \\mathbb{R}
    ^\s*=(?!=) =>
    \*\* => ^
    <= => \\le▁
    >= => \\ge▁
    != => \\ne▁
    :=(?!=) => =
    \\not\s*= => \\ne▁
    (?<![\\a-zA-Z])pi(?![a-zA-Z]) => \\pi▁
    (?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z]) => \\infty▁
    (?<![\\a-zA-Z])sqrt\s*\(([^()]*)\) => \\sqrt{\1}
    (?<![\\a-zA-Z{])(sin|cos|tan|cot|log|ln|exp|gcd|lcm)(?=[\s(\\\d^]) => \\\1▁
    \\lor(?![a-zA-Z])(?=.*(?:[=<>]|\\(?:[lg]e|in)(?![a-zA-Z]))) => ▁or▁
    \\land(?![a-zA-Z])(?=.*(?:[=<>]|\\(?:[lg]e|in)(?![a-zA-Z]))) => ▁and▁
    \^\s*(-?\d+) => ^{\1}
    \^\s*\(([^()]*)\) => ^{\1}
    \\(frac|sqrt|binom)\s+ => \\\1
    \\(frac|sqrt|binom)(\d|[a-zA-Z]) => \\\1{\2}
    (\\sqrt\[[^\[\]]*\]|\\(?:frac|binom)\{[^{}]*\})\s*(\d|[a-zA-Z]) => \1{\2}
""")
_INNER = r"(?:\\.|[^{}\\]|\{(?:\\.|[^{}\\]|\{(?:\\.|[^{}\\]|\{(?:\\.|[^{}\\])*\})*\})*\})*"  # of braces
_WRAPPERS = rules(rf"""
    ^\s+|\s+$ =>
    (?<!\\ldots)[.,;:\s]+$|(?<=\\ldots)\s+$|\\\\$ =>
    ^(\$\$|\$|\*\*|"|`)((?:(?!\1).)*)(?<!\\)\1$ => \2
    ^\\\(((?:(?!\\[()]).)*)(?<!\\)\\\)$ => \1
    ^\\\[((?:(?!\\[\[\]]).)*)(?<!\\)\\\]$ => \1
    ^\{{({_INNER})\}}$ => \1
""")
WHOLE_TEXT = rf"\\text\{{({_INNER})\}}"
_WORDS = rules(rf"""
    {WHOLE_TEXT} => ▁\1▁
    {WHOLE_TEXT} => ▁\1▁
""")


def spelled(text: str) -> str:
    """Normalize a text: rename commands, reduce spacing, remove wrappers around the whole."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFC", text).translate(_SYMBOLS)).translate(_SYMBOLS)
    text = _COMMAND.sub(_command, rewritten(text, _SIGNS))
    text = _unwrapped(rewritten(f"{{{text}}}", _SPACING))
    if text.count("$") % 2:  # an unpaired dollar sign means money
        text = re.sub(r"\$\s*(?=[\d.])|(?<=\d)\s*\$$", "¤", text, count=1)
    return _unwrapped(rewritten(text, _ARGUMENTS))


def rewritten(text: str, rules: Rules) -> str:
    """Apply replacement rules in order."""
    for pattern, other in rules:
        text = pattern.sub(other, text)
    return text


def words_of(text: str) -> str:
    r"""Remove `\text{}` around words."""
    return rewritten(text, _WORDS)


def _command(match: re.Match[str]) -> str:
    name = _RENAMED.get(match[1], match[1])
    return _REPLACED.get(name, f"\\{name}" + (" " if match[0].endswith(" ") else ""))


def _unwrapped(text: str) -> str:
    """Remove wrappers around the whole text: whitespace, `$`, braces, quotes, the final period."""
    while (bare := rewritten(text, _WRAPPERS)) != text:
        text = bare
    return text


_TOKEN = re.compile(r"\\(begin|end)\s*\{[a-zA-Z]+\*?\}|\\(?:[a-zA-Z]+|.)?|.", re.DOTALL)
_KINDS = "env {s < f c ( ( {".split()
_OPENS = dict(zip(r"begin \{ \langle \lfloor \lceil ( [ {".split(), _KINDS, strict=True))
_CLOSES = dict(zip(r"end \} \rangle \rfloor \rceil ) ] }".split(), _KINDS, strict=True))


def levels(text: str) -> list[int] | None:
    r"""Return the bracket depth of each character, or None if the brackets do not match.

    `(` and `[` are interchangeable, because of half-open intervals. `\begin` and `\end` are brackets.
    """
    found: list[int] = []
    stack: list[str] = []
    for token in _TOKEN.finditer(text):
        mark = token[1] or token[0]
        if mark in _CLOSES and (not stack or stack.pop() != _CLOSES[mark]):
            return None
        found += [len(stack) + (mark in _OPENS or mark in _CLOSES)] * len(token[0])
        if mark in _OPENS:
            stack.append(_OPENS[mark])
    return found if not stack else None


_GAP = re.compile(r"((?<=\d)\s+(?=\d)|(?<=[^\W\d_]{2})\s+(?=[^\W\d_])|(?<=[^\W\d_])\s+(?=[^\W\d_]{2}))|\s+")


def compact(text: str) -> str:
    """Remove spaces, except between digits and between words: `5 6` is not 56, and "now here" is not "nowhere"."""
    return _GAP.sub(lambda gap: " " if gap[1] else "", text)


def split(text: str, pattern: str) -> tuple[list[str], list[str]]:
    """Split a text at the matches of a pattern outside of all brackets; return the parts and the matches."""
    depth = levels(text)
    if depth is None:
        return [text], []
    marks = [mark for mark in re.finditer(pattern, text) if mark[0] and depth[mark.start()] == 0]
    begins, ends = [0, *(mark.end() for mark in marks)], [*(mark.start() for mark in marks), len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends, strict=True)], [mark[0] for mark in marks]
