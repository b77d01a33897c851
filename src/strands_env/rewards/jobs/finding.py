"""Where a text without a box has its answer."""

from __future__ import annotations

import re

from .reading import Relation, Several, Text, UnreadableError, Value, read

_ANCHOR = re.compile(
    r"(?:\banswers?\b[^.\n$\\]{0,60}?(?:\bis\b|\bare\b|:|=)|^\s*####"
    r"|\b(?:solutions?|choice|option)\b[^.\n$\\]{0,40}?(?:\bis\b|\bare\b|:))"
    r"[ \t]*:?\s*(?:the )?(?:option|choice)?\s*",
    re.IGNORECASE | re.MULTILINE,
)
_IS = re.compile(r"\b(?:is|are|equals|be|gives?|get|have|falls on)\s+|(?<![<>!:])=\s*", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:(?<!\b[ap])\.(?=\s|\*|$)|[!?](?=\s+[A-Z]|\s*$)|\n\s*\n)")
_REASON = re.compile(r",?\s+(?:because|since|as|so|which|where|when|thus|hence|therefore)\b|\s+\((?!\w\))")
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
LONGEST_PHRASE = 400
LONGEST_WORDS = 4


def answer_in(text: str) -> str | None:
    """The answer that a text without a box ends with; None if it has none.

    The whole text, if it is nothing but an answer; else what the last "answer is", "answer:" or "####" introduces; else
    what its last sentence says something is; else the last formula or number. Where more than one value is offered,
    all are the answer: that is for the comparison to refuse.
    """
    whole = text.strip()
    anchors = list(_ANCHOR.finditer(whole))
    is_short = len(whole) <= LONGEST_PHRASE and "\n" not in whole
    if not anchors and is_short and _is_answer(whole, LONGEST_WORDS - 2):
        return whole
    if anchors:
        return _phrase(whole[anchors[-1].end() :])
    sentences = [part for part in _SENTENCE.split(whole) if part.strip(" *\n\t")]
    if not sentences:
        return None
    last = sentences[-1][-LONGEST_PHRASE:]
    for verb in reversed(list(_IS.finditer(last))):
        said = last[verb.end() :].strip()
        if _is_answer(said, LONGEST_WORDS):
            return said
    found = list(_VALUES.finditer(whole))
    if not found or _HEDGE.search(whole[: found[-1].start()].rstrip("$ ")):
        return None
    if len(found) > 1 and _JOINED.fullmatch(whole[found[-2].end() : found[-1].start()]):
        return None
    return found[-1][0]


def _phrase(text: str) -> str | None:
    """The answer that a text begins with: up to the end of the sentence or to a reason."""
    text = text.strip()[:LONGEST_PHRASE]
    sentence = _SENTENCE.split(text + "\n\n", maxsplit=1)[0].partition("\n")[0]
    if _DOUBT.match(text[len(sentence) :]):
        return text
    for said in (sentence, _REASON.split(sentence, maxsplit=1)[0]):
        if _DOUBT.match(sentence[len(said) :]):
            break
        said = re.sub(r"^\s*(?:option|choice)\s+", "", said.strip(" *\t"), flags=re.IGNORECASE)
        if _is_answer(said, LONGEST_WORDS):
            return said
    return sentence.strip() or None


def _is_answer(text: str, words: int) -> bool:
    """Whether a text can be read, and is no talk of more than so many words."""
    try:
        return not _is_talk(read(text), words)
    except (UnreadableError, RecursionError):
        return False


def _is_talk(value: Value, words: int) -> bool:
    """Whether a value is only words, and more of them than an answer has."""
    if isinstance(value, Relation):
        return any(_is_talk(part, 1) for part in value.parts)
    if isinstance(value, Several):
        return any(_is_talk(item, words) for item in value.items)
    if not isinstance(value, Text) or value.words.startswith(("date ", "time ")):
        return False
    return len(value.words.split()) > words or re.search(r"\d", value.words) is not None
