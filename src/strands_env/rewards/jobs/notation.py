"""Normalization of LaTeX, Unicode and plain text to one notation. It never changes an answer's value."""

from __future__ import annotations

import itertools
import re
import unicodedata

CURRENCY, DEGREE = "\ue000", "\ue001"  # a dollar sign that means money; `$` around formulas is removed

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt frac binom gcd lcm max min"
    " det".split()
)

_SYMBOLS = {
    "×": "*", "⋅": "*", "·": "*", "∙": "*", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "−": "-", "–": "-", "—": "-",
    "‐": "-", "‑": "-", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "≡": r"\equiv ", "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
    "±": r"\pm ", "°": DEGREE, "º": DEGREE, "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
    "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ", "Δ": r"\Delta ",
    "ℝ": r"\mathbb{R}", "→": r"\to ", "∣": "|", "′": "'", "’": "'", "“": '"', "”": '"', "⟨": r"\langle ",
    "⟩": r"\rangle ", "\u00a0": " ", "\u2009": r"\,", "\u202f": r"\,", "\u200b": "", "\u2061": "", "\u2062": "",
    "…": r"\ldots ",
}  # fmt: skip
_TABLE = str.maketrans(_SYMBOLS)
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le",
    "leqslant": "le", "leqq": "le", "geq": "ge", "geqslant": "ge", "geqq": "ge", "neq": "ne", "thickapprox": "approx",
    "simeq": "approx", "varnothing": "emptyset", "dots": "ldots", "cdots": "ldots", "bigcup": "cup", "R": "reals",
    "Reals": "reals", "vee": "lor", "wedge": "land", "bmod": "mod", "pmod": "mod",
    "pmb": "text", "textbf": "text", "textit": "text", "textrm": "text", "textnormal": "text", "textsf": "text",
    "texttt": "text", "mathrm": "text", "mathit": "text", "mathsf": "text", "mathbf": "text", "mathtt": "text",
    "boldsymbol": "text", "operatorname": "text", "mbox": "text", "hbox": "text", "textup": "text", "emph": "text",
    "longrightarrow": "to", "rightarrow": "to",
}  # fmt: skip
_REPLACED = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "lt": "<", "gt": ">", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "colon": ":", "quad": " ", "qquad": " ", "enspace": " ",
    "thinspace": r"\,", "degree": DEGREE, "lor": " or ", "land": " and ", "euro": "€", "pounds": "£",
    "textdollar": CURRENCY, "dollar": CURRENCY,
    "left": "", "right": "", "middle": "", "big": "", "Big": "", "bigg": "", "Bigg": "", "bigl": "", "bigr": "",
    "Bigl": "", "Bigr": "", "biggl": "", "biggr": "", "displaystyle": "", "textstyle": "", "limits": "", "nolimits": "",
    "lbrace": r"\{", "rbrace": r"\}", "hfill": " ", "newline": " ", "reals": r"\mathbb{R}", "space": " ", "boxed": "",
    "bf": "", "rm": "", "it": "", "sf": "", "tt": "", "fbox": "",
}  # fmt: skip
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?[ ]?")
_COMMA = "\ue002"  # between digits it does not separate the items of a list
Rules = tuple[tuple[re.Pattern[str], str], ...]


def rules(*pairs: tuple[str, str]) -> Rules:
    """Compile pairs of a pattern and its replacement, for `rewritten`."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


_SIGNS = rules(
    (r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√", r"\\sqrt"),
    (r"(\\\\)\s*\[-?[\d.]+\s*(?:pt|em|ex|mm|cm)\]", r"\1"),  # space between rows
    (r"\{:\}", ":"),
    (r"\\\$", CURRENCY),
    (r"\{" + CURRENCY + r"\}", CURRENCY),
    (r"(?<!\\)\\%", "%"),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})", DEGREE),
    (r"\{,\}|,\\!", _COMMA),
    (r"\\!", ""),
    (rf"(?<=\d)\s*{_COMMA}\s*(?=\d)", ""),
    (_COMMA, ","),
)
_SPACING = rules(
    (r"\\text\s*(?:\{\s*)?" + CURRENCY + r"(?:\s*\})?", CURRENCY),
    (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"(?<=\d)\s*\\,\s*(?=\d{3}(?!\d))", ""),
    (r"\\,|(?<!\\)\\[ ;:>]|~|\\h(?:space|skip)\{[^{}]*\}", " "),
    (r"\s+", " "),
)
_ARGUMENTS = rules(
    (r"\$\$", " "),
    (r"\$|\\[()\[\]]", ""),
    (r"\*\*", "^"),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
    (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\a-zA-Z{])(sin|cos|tan|cot|log|ln|exp|gcd|lcm)(?=[\s(\\\d^])", r"\\\1 "),
    (r"\^\s*(-?\d+)", r"^{\1}"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"\\(frac|sqrt|binom)\s+", r"\\\1"),
    (r"\\(frac|sqrt|binom)(\d|[a-zA-Z])", r"\\\1{\2}"),
    (r"(\\sqrt\[[^\[\]]*\]|\\(?:frac|binom)\{[^{}]*\})\s*(\d|[a-zA-Z])", r"\1{\2}"),
)
_WRAPPED = re.compile(
    r"(\$\$|\$|\*\*|\"|`)((?:(?!\1).)*)(?<!\\)\1|\\\(((?:(?!\\[()]).)*)(?<!\\)\\\)"
    r"|\\\[((?:(?!\\[\[\]]).)*)(?<!\\)\\\]",
    re.DOTALL,
)


def spelled(text: str) -> str:
    """Normalize a text: rename commands, reduce spacing, remove wrappers around the whole."""
    text = _COMMAND.sub(_command, rewritten(_ascii(text), _SIGNS))
    text = _unwrapped(rewritten(text, _SPACING))
    if text.count("$") % 2:  # an unpaired dollar sign means money
        text = re.sub(r"\$\s*(?=[\d.])|(?<=\d)\s*\$$", CURRENCY, text, count=1)
    return _unwrapped(rewritten(text, _ARGUMENTS))


def rewritten(text: str, rules: Rules) -> str:
    """Apply replacement rules in order."""
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _ascii(text: str) -> str:
    """Replace character variants by plain characters, and Unicode fractions and powers by LaTeX."""
    if text.isascii():
        return text
    parts = []
    for script, run in itertools.groupby(unicodedata.normalize("NFC", text), _script):  # NFC composes accents
        plain = "".join(map(_plain_character, run))
        parts.append(f"{script}{{{plain}}}" if script else plain)
    return "".join(parts)


def _script(char: str) -> str:
    kind = "" if char in _SYMBOLS else unicodedata.decomposition(char).partition(">")[0]
    return {"<super": "^", "<sub": "_"}.get(kind, "")


def _plain_character(char: str) -> str:
    plain = _SYMBOLS.get(char) or unicodedata.normalize("NFKC", char).translate(_TABLE)
    if unicodedata.decomposition(char).startswith("<fraction>"):
        return "\\frac{{{}}}{{{}}}".format(*plain.split("/"))
    return plain


def _command(match: re.Match[str]) -> str:
    name = _RENAMED.get(match[1], match[1])
    return _REPLACED.get(name, f"\\{name}" + (" " if match[0].endswith(" ") else ""))


def _unwrapped(text: str) -> str:
    """Remove wrappers around the whole text: whitespace, `$`, braces, quotes, the final period."""
    while True:
        before = text
        text = text.strip().rstrip(".,;: ").rstrip() if not text.endswith("\\ldots") else text
        text = text.removesuffix("\\\\").strip()
        if (wrapped := _WRAPPED.fullmatch(text)) is not None:
            text = wrapped[wrapped.lastindex or 0]
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def closing(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at `start`, or -1. Escaped braces do not count."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return -1


_TOKEN = re.compile(r"\\(begin|end)\s*\{[a-zA-Z]+\*?\}|\\(?:[a-zA-Z]+|.)?|.", re.DOTALL)
_OPENS = {"begin": "env", "\\{": "{s", "\\langle": "<", "\\lfloor": "f", "\\lceil": "c", "(": "(", "[": "(", "{": "{"}
_CLOSES = {"end": "env", "\\}": "{s", "\\rangle": "<", "\\rfloor": "f", "\\rceil": "c", ")": "(", "]": "(", "}": "{"}


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
