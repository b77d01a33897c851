"""One spelling for what LaTeX, Unicode and plain text spell in many ways. It never changes an answer's value."""

from __future__ import annotations

import re
import unicodedata

CURRENCY = "\ue000"
"""Stands for a dollar sign that means money: `$` around formulas is gone."""
DEGREE = "\ue001"

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
    "Reals": "reals", "lbrace": "{", "rbrace": "}", "vee": "lor", "wedge": "land", "bmod": "mod", "pmod": "mod",
    "pmb": "text", "textbf": "text", "textit": "text", "textrm": "text", "textnormal": "text", "textsf": "text",
    "texttt": "text", "mathrm": "text", "mathit": "text", "mathsf": "text", "mathbf": "text", "mathtt": "text",
    "boldsymbol": "text", "operatorname": "text", "mbox": "text", "hbox": "text", "textup": "text", "emph": "text",
    "longrightarrow": "to", "rightarrow": "to",
}  # fmt: skip
_REPLACED = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "lt": "<", "gt": ">", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "colon": ":", "quad": " ", "qquad": " ", "enspace": " ",
    "thinspace": r"\,",
    "degree": DEGREE, "lor": " or ", "land": " and ", "euro": "€", "pounds": "£", "textdollar": CURRENCY,
    "dollar": CURRENCY,
    "left": "", "right": "", "middle": "", "big": "", "Big": "", "bigg": "", "Bigg": "", "bigl": "", "bigr": "",
    "Bigl": "", "Bigr": "", "biggl": "", "biggr": "", "displaystyle": "", "textstyle": "", "limits": "", "nolimits": "",
    "hfill": " ", "newline": " ", "reals": r"\mathbb{R}", "space": " ", "boxed": "",
    "bf": "",
    "rm": "",
    "it": "",
    "sf": "",
    "tt": "", "fbox": "",
}  # fmt: skip
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?[ ]?")
_SPACES = re.compile(r"(?<!\\)\\[ ;:>]|~|\\h(?:space|skip)\{[^{}]*\}|\s+")
_DIGITS = r"(?:\d+|\{\d+\})"
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{([a-zA-Z]+)\*?\}")


def spelled(text: str) -> str:
    """The one spelling of a text: commands renamed, spacing reduced, wrappers of the whole taken off."""
    text = re.sub(r"(\\\\)\s*\[-?[\d.]+\s*(?:pt|em|ex|mm|cm)\]", r"\1", text)  # space between rows
    text = _ascii(text).replace("{:}", ":").replace("\\$", CURRENCY).replace("{" + CURRENCY + "}", CURRENCY)
    text = re.sub(r"(?<!\\)\\%", "%", text)
    text = re.sub(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})", DEGREE, text)
    text = text.replace("{,}", "\ue002").replace(",\\!", "\ue002").replace("\\!", "")
    text = re.sub(r"(?<=\d)\s*\ue002\s*(?=\d)", "", text).replace("\ue002", ",")
    text = _COMMAND.sub(_command, text)
    text = re.sub(r"\\text\s*(?:\{\s*)?" + CURRENCY + r"(?:\s*\})?", CURRENCY, text)
    text = re.sub(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d)\s*\\,\s*(?=\d{3}(?!\d))", "", text).replace("\\,", " ")
    text = _unwrapped(_SPACES.sub(" ", text))
    text = _dollars(text)
    text = re.sub(r"\*\*", "^", text)
    text = re.sub(
        r"(?<![\\a-zA-Z])(pi|infinity|inf)(?![a-zA-Z])", lambda m: rf"\{m[1] if m[1] == 'pi' else 'infty'} ", text
    )
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z{])(sin|cos|tan|cot|log|ln|exp|gcd|lcm)(?=[\s(\\\d^])", r"\\\1 ", text)
    text = re.sub(r"\^\s*(-?\d+)", r"^{\1}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"\\(frac|sqrt|binom)\s+", r"\\\1", text)
    text = re.sub(r"\\sqrt(\d|[a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(\\sqrt\[[^\[\]]*\])\s*(\d|[a-zA-Z])", r"\1{\2}", text)
    text = re.sub(r"\\(frac|binom)(\d|[a-zA-Z])", r"\\\1{\2}", text)
    text = re.sub(r"(\\(?:frac|binom)\{[^{}]*\})\s*(\d|[a-zA-Z])", r"\1{\2}", text)
    return _unwrapped(text)


def _ascii(text: str) -> str:
    """Full-width and other variants of characters as their plain ones, fractions and powers as LaTeX."""
    out: list[str] = []
    raised: str | None = None  # the kind of script that is open
    for char in unicodedata.normalize("NFC", text):  # letters and their accents as one
        form = unicodedata.decomposition(char) if ord(char) > 127 else ""
        kind = form[1 : form.index(">")] if form.startswith("<") else None
        script = {"super": "^{", "sub": "_{"}.get(kind or "") if char not in _SYMBOLS else None
        if raised is not None and script != raised:
            out.append("}")
            raised = None
        if script is not None:
            if raised is None:
                out.append(script)
                raised = script
            out.append(unicodedata.normalize("NFKC", char).translate(_TABLE))
        elif kind == "fraction":
            above, _, below = unicodedata.normalize("NFKC", char).partition("\u2044")
            out.append(rf"\frac{{{above}}}{{{below}}}")
        elif char == "√":
            out.append("\ue003")
        else:
            out.append(_SYMBOLS.get(char) or unicodedata.normalize("NFKC", char).translate(_TABLE))
    if raised is not None:
        out.append("}")
    joined = "".join(out)
    joined = re.sub(r"\ue003\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"\\sqrt{\1}", joined)
    joined = re.sub(r"\ue003\s*\(([^()]*)\)", r"\\sqrt{\1}", joined)
    return joined.replace("\ue003", r"\sqrt")


def _command(match: re.Match[str]) -> str:
    name = _RENAMED.get(match[1], match[1])
    if name in _REPLACED:
        return _REPLACED[name]
    if name in "{}":
        return "\\" + name
    return f"\\{name}" + (" " if match[0].endswith(" ") else "")


def _unwrapped(text: str) -> str:
    """Without what stands around the whole: white space, `$`, braces, quotes, the full stop."""
    while True:
        before = text
        text = text.strip().rstrip(".,;: ").rstrip() if not text.endswith("\\ldots") else text
        text = text.removesuffix("\\\\").strip()
        for left, right in (
            ("$$", "$$"),
            ("$", "$"),
            ("\\(", "\\)"),
            ("\\[", "\\]"),
            ("**", "**"),
            ('"', '"'),
            ("`", "`"),
        ):
            if len(text) >= len(left) + len(right) and text.startswith(left) and text.endswith(right):
                inner = text[len(left) : -len(right)]
                if left not in inner and right not in inner and not inner.endswith("\\"):
                    text = inner
                    break
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def _dollars(text: str) -> str:
    """Without the dollars around formulas; one alone is money."""
    if text.count("$") % 2:
        if (first := re.search(r"\$\s*(?=[\d.])", text)) is not None:
            text = f"{text[: first.start()]}{CURRENCY}{text[first.end() :]}"
        elif re.search(r"\d\s*\$$", text):
            text = text[:-1] + CURRENCY
    return (
        text.replace("$$", " ")
        .replace("$", "")
        .replace("\\(", "")
        .replace("\\)", "")
        .replace("\\[", "")
        .replace("\\]", "")
    )


_OPEN, _CLOSE = "([{", ")]}"


def closing(text: str, start: int) -> int:
    """Where the brace that opens at `start` is closed; -1 if it is not. Escaped braces are no braces."""
    depth = 0
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return position
        position += 1
    return -1


def levels(text: str) -> list[int] | None:
    r"""For each character how many brackets of any kind are open around it; None if they do not match.

    Half-open intervals make `(` and `[` interchangeable. What is between `\begin` and `\end` is inside.
    """
    found: list[int] = []
    stack: list[str] = []
    position = 0
    while position < len(text):
        char, width = text[position], 1
        closes = opens = None
        if (mark := _ENVIRONMENT.match(text, position)) is not None:
            width = len(mark[0])
            opens, closes = ("env", None) if mark[1] == "begin" else (None, "env")
        elif char == "\\":
            width = 2
            name = re.match(r"\\(?:[a-zA-Z]+|.)", text[position:], re.DOTALL)
            if name is not None:
                width = len(name[0])
                opens = {"\\{": "{s", "\\langle": "<", "\\lfloor": "f", "\\lceil": "c"}.get(name[0])
                closes = {"\\}": "{s", "\\rangle": "<", "\\rfloor": "f", "\\rceil": "c"}.get(name[0])
        elif char in _OPEN:
            opens = "{" if char == "{" else "("
        elif char in _CLOSE:
            closes = "{" if char == "}" else "("
        if closes is not None:
            if not stack or stack.pop() != closes:
                return None
        found += [len(stack) + (opens is not None or closes is not None)] * width
        if opens is not None:
            stack.append(opens)
        position += width
    return found if not stack else None


def compact(text: str) -> str:
    """Without the spaces that mean nothing: `5 6` is not 56."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between the matches of a pattern outside of all brackets, and the matches."""
    depth = levels(text)
    if depth is None:
        return [text], []
    parts: list[str] = []
    marks: list[str] = []
    start = 0
    for match in pattern.finditer(text):
        if match.end() > match.start() and depth[match.start()] == 0 and match.start() >= start:
            parts.append(text[start : match.start()])
            marks.append(match[0])
            start = match.end()
    return [*parts, text[start:]], marks
