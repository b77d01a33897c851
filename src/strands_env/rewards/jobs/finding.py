r"""Finding the answer in a text, as a person would who grades it.

What a text takes back is not its answer, and what it doubts is not one either: a value that the text negates, offers
as one of several, or guesses is returned together with these words, so that no comparison finds it right.

The regular expressions take time linear in the length of the text.
"""

from __future__ import annotations

import re

from .notation import compact, rewritten, rules, spelled
from .reading import UnreadableError, Value, read

MAX_PHRASE_CHARS = 400
MAX_ANSWER_WORDS = 4
MAX_REST_CHARS = 5_000  # of the text after a box, which may take it back

_BRACES = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)
_JOINED_BOXES = re.compile(
    r"\W{0,20}(?:(?:text\{\s*)?(?:or|and|also|else|possibly|perhaps|maybe|alternatively)\b\W{0,20}){0,3}"
    r"|[^.\n]{0,40}\b(?:if|for|when|otherwise)\b[^.\n]{0,80}",
    re.IGNORECASE,
)
_DOUBTED_BOX = re.compile(
    r"(?:\b(?:not|cannot|never|n?either|maybe|perhaps|possibly|probably|guess(?: is)?|(?:may|might|could) be)|n't)"
    r"(?: be| equal(?: to)?)?[\s:$\\(\[]*$|\b(?:wrong|incorrect|false|mistaken?) (?:to|that)\b[^.,;{}]*$",
    re.IGNORECASE,
)
_VERDICT = (
    r"(?:(?:'s|\s(?:is|was))\s(?:wrong|incorrect|false|not (?:right|correct|the answer))"
    r"|\s(?:is|was)n't (?:right|correct|the answer)|\scan(?:'t|not) be (?:right|correct)"
    r"|\s(?:does(?:n't| not)|fails to) (?:satisfy|work|hold|solve|fit))\b(?! (?:to|that)\b)"
)
# A value that is denied is no answer, here and in what was said before.
_REJECTED = rules(rf"""
    (?i)((?:(?<=\s)|^)-?\d[\d.,/]*|\$[^$\n]{{1,99}}\$)(?=.{{1,200}}?(?:\s|^)\1[$*]{{0,3}}{_VERDICT}) =>
    (?i)(?:\$[^$\n]{{1,99}}\$|(?:^|\s)-?\d[\d.,/]*|\\boxed\{{.{{1,99}}?\}})[$*]{{0,3}}{_VERDICT} =>
""")
# What stands before a denial is taken back, and so is what stands before the other words if a new answer follows them.
_RETRACTED = re.compile(
    rf"(?P<denied>(?:^\}}[$*)\]\\]{{0,4}}|\b(?:that|this|it|which)){_VERDICT})"
    r"|(?:^|[.,;:!?()$}-]\s{0,9}|\n)(?:(?:oh|no|but|hmm+)[\s,]{1,9}){0,2}(?:wait|oops|hold on|scratch that|actually"
    r"|sorry|on (?:second thought|reflection)|hmm+|rather(?=,)|(?<=[.!?]\s)no(?=[,.!:;])|edit(?=:)"
    r"|correction(?=:)|typo|my mistake|make that|i (?:meant?|made a mistake|take (?:that|it) back))\b"
    r"|\blet me (?:re|correct|fix)[\w-]*(?: (?:this|that|it)\b)?",
    re.IGNORECASE,
)
_RIGHT = re.compile(
    r"(?:\bit(?:'s| is)|\b(?:it|that|this|answer|result|[a-z]) should be|\b(?:answer|result) is"
    r"|(?:[.!?\n]\s{0,9}(?:\w{1,20},?\s)?the|\bbut the|\bthe (?:correct|right|true|actual|final)) value"
    r" (?:is|should be))\s{1,9}(?:\$[^$\n]+\$|-?[\d./]*\d)\W{0,3}(?:$|[.;,)!])",
    re.IGNORECASE,
)
_DOUBTED = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|might|may|could|can(?:no|')t|not|\w*n't|never|neither|either|nor|guess\w*"
    r"|unsure|uncertain|whether|false|no longer|anything but|other than|except|about|approximately|roughly|around"
    r"|nearly|almost|no solutions?|exceed\w*|reject\w*|exclud\w*|discard\w*|fails?|over|under|than|least"
    r"|most|between|or so)\b",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"\bI(?: a|')m (?:not|un)\w*|\bI (?:(?:was|do|did|can|could|have)(?: not|n't|not| no|'t)\b|was unable|give up)"
    r"|\bno idea",
    re.IGNORECASE,
)
# What makes the answer before it one of several, or a guess.
_ALTERNATIVE = re.compile(
    r"\W{0,20}(?:but\b[^.\n]*)?\b(?:or(?! equivalently)|alternatively|maybe|perhaps|possibly|could|might"
    r"|i(?:'m| am) (?:not|un))"
    r"|[^.\n]*\botherwise\b",
    re.IGNORECASE,
)
# A reason that takes the answer back.
_REFUTED = re.compile(
    r"\s(?:because|since|as)\b.*\bor\b|^(?:(?!\s(?:because|since|as)\b).)*\s(?:(?:so|which|where|when|thus|hence|therefore)"
    r"\b|\((?=[a-z]{2})).*(?:\b(?:or|not|no|never|cannot|but|maybe|possibly|wrong|false|incorrect|impossible|contradiction"
    r"|otherwise)\b|n't\b)",
    re.IGNORECASE,
)
_ANCHOR = re.compile(
    r"(?:\banswers?\b[^.\n$\\]{0,60}?(?:\bis\b|\bare\b|:|=)|^[^\S\n]*####"
    r"|\b(?:solutions?|choice|option)\b[^.\n$\\]{0,40}?(?:\bis\b|\bare\b|:))"
    r"[ \t]*:?\s*(?:the )?",
    re.IGNORECASE | re.MULTILINE,
)
# Between two anchors that introduce one answer: "Answer: The final answer is 5".
_LEADS_ON = re.compile(r"(?:[\s*:_(]|\b(?:the|my|our|final|correct|right)\b)*", re.IGNORECASE)
_DISPLAY = re.compile(r"\$\$\s*([^$]+?)\s*\$\$|\\\[\s*((?:(?!\\\[).)+?)\s*\\\]", re.DOTALL)
# What chats end with says nothing about the answer.
_CLOSING = re.compile(
    r"(?:^|(?<=[.!?\n]))(?:\s{0,9}(?:(?:please )?(?:let me know if you|feel free to)\b"
    r"|(?:if|do) you (?:have|need) any\b(?: \w{1,20})? (?:questions?|help)\b|is there anything else\b"
    r"|i hope (?:this|that|it) (?:is correct|helps)(?=[.!]))[^.!?\n\d$\\]{0,99}[.!?]?){1,3}\s*\Z",
    re.IGNORECASE,
)
_IS = re.compile(r"(?:\b(?:is|are|equals|be|gives?|get|have|falls on)|\bit's)\s+|(?<![<>!:])=\s*", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:(?<!\b[ap])\.(?=\s|\*|$)|[!?](?=\s+[A-Z]|\s*$)|\n\s*\n)")
_REASON = re.compile(
    r"(?:,?\s(?:because|since|as|so|which|where|when|thus|hence|therefore)\b|\s\((?=[a-z]{2}))"
    r"(?=[^$]*(?:\$[^$]*\$[^$]*)*\Z)"  # not in a formula
)
_LINKS = rules(r"""
    (?<![\w*])\*\*([^*\n]+)\*\*(?![\w*]) => \1
    ^[\s.,:;!?]+|(?<!\s)\s+$ =>
    \?$ => ▁maybe
    (?i)^(?:(?!answer)[^\n$]){0,200},?\s(?:so|thus|hence|therefore),?\s(?=[^\n$=]{0,99}=[^\n$=]{0,99}$) =>
    (?<![^\s$])~(?=\s?[\d$]) => \\approx▁
    (?i)^(?:(?:so|thus|hence|therefore|then|finally|overall|altogether|consequently|as a result|in [a-z]+)\s*,\s*)+ =>
""")
_TRIMMED = rules(r"""
    ^[\s*]+|[\s*]+$ =>
    ,?\s(?:and )?not\s(?:\$[^$]*\$|(?!\.\s)[^,;$])*$ =>
    (?i)^(?:(?:exactly|simply|just|also|it's|option|choice)\s+)+ =>
""")
_VALUES = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\\\[(?P<bracket>(?:(?!\\\[).)+?)\\\]|\\\((?P<round>(?:(?!\\\().)+?)\\\)|(?<!\\)\$"
    r"(?P<inline>(?!\d[\d.,]*[ a-z])[^$\n]+?)(?<!\\)\$"
    r"|(?P<number>(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?|(?<![\w.])-?\.\d+)",
    re.DOTALL,
)
_NEW = re.compile(
    rf"{_VALUES.pattern}|(?<!\w)[A-HJ-Z](?=[\s)*]*(?:$|[.,;!]))"
    r"|(?i:\bit(?:'s| is)|answer is|meant?)\s+\W{0,3}[A-Z\d\\]",
    re.DOTALL,
)
_PART = re.compile(
    r"\s?(?:percent|per cent|dozen|hundred|thousand|million|billion|pairs|half|halves|thirds|quarters|\w+t[h]s)\b|\?"
)
_JOINED = re.compile(r"(?:\s|[,;/^*+×$-]|\bor\b|\band\b|\bto\b|\bmaybe\b|\bperhaps\b|\bpossibly\b)*", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`.

    Nested braces are matched, and escaped braces are text. Takes time linear in the length of the text.

    Args:
        text: Text to search.

    Returns:
        The content, or None if the text has no complete box.
    """
    return next((text[begin:end] for _, begin, end in reversed(_boxes(text))), None)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last box with what the text joins to it, as in `\boxed{2}` and `\boxed{3}`.

    None if there is no box, or if the text takes it back.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    start, begin, end = boxes.pop()
    rest = text[end : end + MAX_REST_CHARS]
    is_repeated = rf"(?:=|\b(?:is|it's))[\s$]*{re.escape(text[begin:end])}(?![\w.^])[^\d$\\]*$"
    if (_RIGHT.search(rest) or _end_of_retracted(rest)) and not re.search(is_repeated, rest):
        return None
    doubt = _DOUBTED_BOX.search(text[:start][-40:])
    after = text[end + 1 :] if _ALTERNATIVE.match(text, end + 1) else ""
    parts = [f"{doubt[0] if doubt else ''}{text[begin:end]}{after[:MAX_PHRASE_CHARS]}"]
    while boxes:
        earlier, begin, end = boxes.pop()
        if end < start and not _JOINED_BOXES.fullmatch(text, end + 1, start):
            break
        if end < start:
            start = earlier
            parts.append(text[begin:end])
    return ", ".join(dict.fromkeys(reversed(parts)))


def _end_of_retracted(text: str) -> int:
    """Return where the part of a text begins that nothing after it takes back."""
    *_, last = [0, *(value.start() for value in _NEW.finditer(text))]
    marks = _RETRACTED.finditer(text)
    return max((mark.end() for mark in marks if mark["denied"] or mark.end() <= last), default=0)


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Return the start of each complete box, and the start and end of its content, ordered by end."""
    found: list[tuple[int, int, int]] = []
    open_braces: list[tuple[int, int] | None] = []  # for a box's brace: the start of the box and of its content
    for match in _BRACES.finditer(text):
        mark = match[0]
        if mark == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                found.append((*box, match.start()))
        elif mark == "{":
            open_braces.append(None)
        elif len(mark) > 2:  # not an escaped character
            open_braces.append((match.start(), match.end()))
    return found


def answer_in(text: str) -> str | None:
    """Return the answer of a text without a box, or None if it has none.

    What the last "answer is", "answer:" or "####" introduces; else the whole text if it is only an answer, perhaps
    after "So," or similar words; else what the last sentence equates something to; else the last formula or number.
    """
    text = rewritten(text, _REJECTED)
    text = rewritten(_CLOSING.sub("", text[_end_of_retracted(text) :]), _LINKS)
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        last = anchors.pop()
        *_, sentence = _SENTENCE.split(text[: last.start()])
        if _REFUSED.search(sentence) or _DOUBTED.search(_clause(sentence)):
            return sentence + text[last.start() :][:MAX_PHRASE_CHARS]
        answers = [_introduced(text[last.end() :])]
        line = text.rfind("\n", 0, last.start())
        if anchors and anchors[-1].start() > line:
            begin = anchors[-1].end()
            if not _LEADS_ON.fullmatch(text, begin, last.start()):
                answers.insert(0, _introduced(text[begin:]))
        return ", ".join({compact(spelled(answer)): answer for answer in answers}.values())
    end = text[-MAX_PHRASE_CHARS:]
    if end == text and "\n" not in text and (answer := _claim(text, MAX_ANSWER_WORDS - 2)) is not None:
        return answer
    if _REFUSED.search(end):
        return None
    *_, sentence = _SENTENCE.split(end.rstrip(" *\n\t.!?"))
    for verb in reversed(list(_IS.finditer(sentence))):
        if (answer := _claim(sentence[verb.end() :], MAX_ANSWER_WORDS)) is not None:
            return sentence if _DOUBTED.search(_clause(sentence[: verb.start()])) else answer
    return _last_value(text)


def _last_value(text: str) -> str | None:
    """Return the last formula or number, unless it is doubted or one of several."""
    found = list(_VALUES.finditer(text))
    if not found:
        return None
    value = found[-1]
    *_, before = _SENTENCE.split(text[: value.start()])
    after = _SENTENCE.split(text[value.end() :])[0]
    is_doubted = _DOUBTED.search(_clause(before)) or _DOUBTED.search(after)
    goes_on = _ALTERNATIVE.match(text, value.end()) or _PART.match(text, value.end())
    is_one_of_several = len(found) > 1 and _JOINED.fullmatch(text, found[-2].end(), value.start())
    return None if is_doubted or goes_on or is_one_of_several else value[0]


def _clause(sentence: str) -> str:
    return re.split(r"[,;]\s", sentence)[-1]


def _introduced(text: str) -> str:
    """Return the answer that a text begins with, or its first sentence."""
    text = text.strip()[:MAX_PHRASE_CHARS]
    if (display := _DISPLAY.match(text)) is not None:
        text = f"${' '.join((display[1] or display[2]).split())}${text[display.end() :]}"
    sentence = _SENTENCE.split(text + "\n\n", maxsplit=1)[0].partition("\n")[0]
    if _ALTERNATIVE.match(text, len(sentence)):
        return text
    return _claim(sentence, MAX_ANSWER_WORDS) or sentence


def _claim(sentence: str, words: int) -> str | None:
    """Return what a sentence states, without its reason, unless it is prose of more than some words."""
    sentence = rewritten(sentence, _TRIMMED)
    if _REFUTED.search(sentence):
        return sentence
    for phrase in (_REASON.split(sentence)[0], sentence):
        try:
            if not _is_prose(read(phrase), words):
                return phrase
        except (UnreadableError, RecursionError):
            continue
    return None


def _is_prose(value: Value, words: int) -> bool:
    """Whether a value is prose: only words, and more of them than an answer has."""
    if value.kind == "words" and not value.text.startswith("@"):
        return len(value.text.split()) > words or re.search(r"\d", value.text) is not None
    n_words = 1 if value.kind == "relation" else words
    return value.kind in ("relation", "list") and any(_is_prose(part, n_words) for part in value.parts)
