"""Episodes written by hand, as the records that readers make of files: every kind of turn, with text that reads well.

Tokens are words: each distinct piece of text is one id. Logprobs and the rest are drawn from a seed.
"""

import itertools
import re
import struct
import zlib

import numpy as np

from strands_sglang.inspection.records import (
    Branching,
    Episode,
    Finding,
    Group,
    Image,
    Said,
    SequenceRecord,
    Span,
    Tokens,
    TurnRecord,
    Writer,
)

SYSTEM = "You are a careful assistant. Use the calculator for every product, and answer in one sentence."
TOOLS = '{"name": "calculator", "description": "Evaluates an expression.", "parameters": {"expression": "string"}}'
QUESTION = "A crate holds 48 jars, and a lorry 36 crates. How many jars are on 7 lorries?"
ANSWERS = (12096, 12096, 1728, 12096, 12069, 12096, 336, 12096)

_PIECES = re.compile(r"<\|\w+\|>|</?\w+>| ?\w{1,6}|\s+|[^\w\s]")


class Vocabulary:
    """Gives each piece of text an id."""

    def __init__(self):
        self.ids = {}

    def encode(self, text):
        return [self.ids.setdefault(piece.encode(), 1000 + len(self.ids)) for piece in _PIECES.findall(text)]

    @property
    def texts(self):
        return {token_id: piece for piece, token_id in self.ids.items()}


class Author:
    """Writes turns into an episode."""

    def __init__(self, vocabulary, seed):
        self.vocabulary = vocabulary
        self.random = np.random.default_rng(seed)
        self.turns = []

    def prompt(self, *parts):
        """Tokens of a prompt from `(writer, text)`."""
        ids, writers = [], []
        for writer, text in parts:
            own = self.vocabulary.encode(text)
            ids += own
            writers += [writer] * len(own)
        return Tokens(np.array(ids, np.int32), writers=np.array(writers, np.uint8))

    def sampled(self, text, versions=(("12", 1.0),)):
        """Tokens of an answer, with which share of it each version sampled."""
        ids = np.array(self.vocabulary.encode(text), np.int32)
        spread = self.random.gamma(0.35, 1.0, len(ids))
        spans, at = [], 0
        for version, share in versions:
            stop = len(ids) if share == 1.0 else round(len(ids) * share)
            spans.append(Span(version, at, stop))
            at = stop
        return Tokens(
            ids,
            logprobs=-spread,
            writers=np.full(len(ids), Writer.MODEL, np.uint8),
            versions=tuple(spans),
            entropy=np.minimum(5.0, spread * self.random.uniform(0.6, 1.6, len(ids))),
        )

    def turn(self, prompt, text, said, *, parent=None, versions=(("12", 1.0),), **facts):
        """Add a turn and return its position."""
        sampled = self.sampled(text, versions) if text else Tokens(np.zeros(0, np.int32))
        before = sum(len(turn.prompt) + len(turn.sampled) for turn in self.turns)
        facts.setdefault("status", "committed")
        facts.setdefault("branching", Branching.OPENS if parent is None else Branching.EXTENDS)
        facts.setdefault("finish", "stop" if text else None)
        self.turns.append(
            TurnRecord(
                len(self.turns),
                prompt,
                sampled,
                parent=parent,
                prompt_tokens=before + len(prompt),
                cached_tokens=max(0, before - 3),
                seconds=round(0.4 + len(sampled) * 0.021, 3),
                said=[part for part in said if part.role != "assistant"],
                answered=[part for part in said if part.role == "assistant"],
                **facts,
            )
        )
        return len(self.turns) - 1


def _opening(author):
    return author.prompt(
        (Writer.TEMPLATE, "<|im_start|>system\n"),
        (Writer.SYSTEM, SYSTEM),
        (Writer.TEMPLATE, f"\n<tools>\n{TOOLS}\n</tools><|im_end|>\n<|im_start|>user\n"),
        (Writer.USER, QUESTION),
        (Writer.TEMPLATE, "<|im_end|>\n<|im_start|>assistant\n"),
    )


def _result(author, text):
    return author.prompt(
        (Writer.TEMPLATE, "\n<|im_start|>user\n<tool_response>\n"),
        (Writer.TOOL, text),
        (Writer.TEMPLATE, "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    )


def _call(expression):
    call = f'{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}'
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>", Said(
        "assistant", "call", f'{{"expression": "{expression}"}}', "calculator"
    )


def _asked():
    return [Said("system", "text", SYSTEM), Said("user", "text", QUESTION)]


def jars(vocabulary, number, *, answer, image=None):
    """One sibling: a product, a second one, and an answer; some with a fork, a retry, a cut or a summary."""
    author = Author(vocabulary, number)
    thought = "One lorry carries 48 × 36 jars, so I start with that product."
    call, said = _call("48 * 36")
    opening = _opening(author)
    said_first = [*_asked(), Said("assistant", "reasoning", thought), said]
    first = author.turn(
        opening,
        f"<think>\n{thought}\n</think>\n\n{call}",
        said_first,
        reason="opens the first sequence",
        agent="jars",
        images=() if image is None else [Image(image, "png", "message 0")],
    )
    if number == 1:
        author.turn(
            _result(author, "1728"),
            "The answer is 1728 jars.<|im_end|>",
            [Said("tool", "result", "1728", "calculator"), Said("assistant", "text", "The answer is 1728 jars.")],
            parent=first,
            status="discarded",
            note="the agent asked the same again",
            reason="extends call 0 with 1 new message(s)",
            agent="jars",
        )
    if answer == 1728:
        last = first
    else:
        call, said = _call("1728 * 7")
        versions = (("12", 0.5), ("13", 1.0)) if number % 3 == 0 else (("12", 1.0),)
        last = author.turn(
            _result(author, "1728"),
            f"That is one lorry. Seven of them:\n{call}",
            [
                Said("tool", "result", "1728", "calculator"),
                Said("assistant", "text", "That is one lorry. Seven of them:"),
                said,
            ],
            parent=first,
            reason="extends call 0 with 1 new message(s)",
            agent="jars",
            versions=versions,
            is_resumed=len(versions) > 1,
        )
    text = f"**{answer:,} jars** are on 7 lorries."
    if number == 3:
        text += "\n\n| load | jars |\n|---|---|\n| a crate | 48 |\n| a lorry | 1,728 |\n\n- checked with `48 * 36 * 7`"
    author.turn(
        _result(author, "12096" if last != first else "1728"),
        f"{text}<|im_end|>" if number != 6 else "**336 jars** are on 7 lorries, because 48 times",
        [Said("tool", "result", "12096" if last != first else "1728", "calculator"), Said("assistant", "text", text)],
        parent=last,
        status="final" if number != 6 else "cut",
        finish="stop" if number != 6 else "abort",
        failure=None if number != 6 else "SGLangAbortedError: the server aborted the request",
        reason=f"extends call {last} with 1 new message(s)",
        agent="jars",
    )
    if number == 3:
        _checker(author, opening, first)
    return _episode(f"jars-{number}", author.turns, reward=float(answer == 12096), number=number)


def _checker(author, opening, first):
    """A fork that rewrites the result, a sub-agent, and a summary from outside."""
    author.turn(
        _result(author, "1728 jars on one lorry"),
        "So 7 lorries carry 12096 jars.<|im_end|>",
        [
            Said("tool", "result", "1728 jars on one lorry", "calculator"),
            Said("assistant", "text", "So 7 lorries carry 12096 jars."),
        ],
        parent=first,
        status="final",
        branching=Branching.FORKS,
        reason="forks after call 0: message 2 (user) is not the recorded one (user) (compared with call 2)",
        agent="jars",
    )
    author.turn(
        author.prompt(
            (Writer.TEMPLATE, "<|im_start|>system\n"),
            (Writer.SYSTEM, "You check the work of others."),
            (Writer.TEMPLATE, "<|im_end|>\n<|im_start|>user\n"),
            (Writer.USER, "Is 48 × 36 × 7 = 12096?"),
            (Writer.TEMPLATE, "<|im_end|>\n<|im_start|>assistant\n"),
        ),
        "Yes: 48 × 36 = 1728, and 1728 × 7 = 12096.<|im_end|>",
        [
            Said("system", "text", "You check the work of others."),
            Said("user", "text", "Is 48 × 36 × 7 = 12096?"),
            Said("assistant", "text", "Yes: 48 × 36 = 1728, and 1728 × 7 = 12096."),
        ],
        status="final",
        reason="opens a sequence: the system prompt changed (compared with call 2)",
        agent="checker",
    )
    author.turn(
        author.prompt((Writer.USER, "Grade the answer as JSON."), (Writer.TEMPLATE, "<|im_start|>assistant\n")),
        '{"score": 1}<|im_end|>',
        [Said("user", "text", "Grade the answer as JSON."), Said("assistant", "text", '{"score": 1}')],
        status="answered",
        is_auxiliary=True,
        is_constrained=True,
        reason="opens a sequence: message 0 (user) is not the recorded one (user) (compared with call 4)",
    )


def _episode(name, turns, *, reward, number):
    episode = Episode(name, turns, [], file="step-000012", outcome="task_complete", reward=reward, seconds=3.5 + number)
    parents = {turn.parent for turn in turns}
    trained = set()
    for position, turn in enumerate(turns):
        if position in parents or turn.is_discarded or turn.is_auxiliary:
            continue
        steps = episode.steps(position)
        mask = np.zeros(steps[-1].stop, np.uint8)
        for step in steps:
            mask[step.sampled : step.stop] = step.turn not in trained
        trained.update(step.turn for step in steps)
        random = np.random.default_rng(100 + position)
        recorded = episode.column(SequenceRecord(steps, mask), "logprobs")
        trainer = np.where(mask > 0, recorded + random.normal(0, 0.01, len(mask)), np.nan)
        episode.sequences.append(SequenceRecord(steps, mask, trainer_logprobs=trainer))
    return episode


def with_credit(group, batch=None):
    """Give the sequences of a group advantages, the reward minus the mean, and the weights of an episode mean.

    `batch` is the number of episodes in the batch, by default those of the group.
    """
    mean = np.mean([episode.reward for episode in group.episodes])
    for episode in group.episodes:
        trained = sum(int(sequence.mask.sum()) for sequence in episode.sequences)
        for sequence in episode.sequences:
            kept = sequence.mask > 0
            sequence.advantages = np.where(kept, episode.reward - mean, 0.0)
            sequence.weights = np.where(kept, 1 / ((batch or len(group.episodes)) * trained), 0.0)
    return group


def groups_of_jars(image=None):
    """Eight siblings with rewards, advantages, weights and the trainer's logprobs, and two with equal rewards."""
    vocabulary = Vocabulary()
    episodes = [jars(vocabulary, i, answer=answer, image=image if i == 0 else None) for i, answer in enumerate(ANSWERS)]
    equal = [jars(vocabulary, i, answer=12096) for i in (8, 10)]
    return [
        with_credit(Group(name, own, "step", "step-000012", vocabulary.texts, is_scored=True), batch=10)
        for name, own in (("jars on lorries", episodes), ("jars again", equal))
    ]


def group_of_jars(image=None):
    """The eight siblings."""
    return groups_of_jars(image)[0]


def findings_of_jars():
    """What is wrong with them: at a token, at a turn, and in a group."""
    where = {"file": "step-000012", "group": "jars on lorries"}
    step = group_of_jars().episodes[3].sequences[0].steps[2]
    return [
        Finding(
            "version-falls",
            "version 12 sampled these tokens after version 13 had sampled the end of turn 1",
            **where,
            episode="jars-3",
            turn=2,
            sequence=0,
            token=step.sampled,
            count=step.stop - step.sampled,
        ),
        Finding(
            "cut-complete",
            "the server aborted the last request, but the outcome is task_complete",
            **where,
            episode="jars-6",
            turn=2,
        ),
        Finding("flat-group", "both rewards are 1.0, so the group trains nothing", "step-000012", "jars again"),
    ]


def long_group(siblings=8, tokens=100_000, vocabulary_size=50_000, *, seed=0, per_turn=2_000):
    """Siblings of many random tokens: what the size and the speed of a page are measured with."""
    random = np.random.default_rng(seed)
    words = random.integers(97, 123, (vocabulary_size, 6))
    lengths = random.integers(1, 7, vocabulary_size)
    texts = {
        i: (b" " if i % 3 else b"") + bytes(words[i, : lengths[i]].tolist()) + (b"\n" if i % 40 == 0 else b"")
        for i in range(vocabulary_size)
    }
    shared = random.integers(0, vocabulary_size, per_turn // 2).astype(np.int32)
    episodes = []
    for number in range(siblings):
        turns = []
        for position in range(max(1, tokens // per_turn)):
            prompt = shared if not position else random.integers(0, vocabulary_size, per_turn // 2).astype(np.int32)
            ids = random.integers(0, vocabulary_size, per_turn - len(prompt)).astype(np.int32)
            turns.append(
                TurnRecord(
                    position,
                    Tokens(prompt, writers=np.full(len(prompt), Writer.TOOL if position else Writer.USER, np.uint8)),
                    Tokens(
                        ids,
                        logprobs=-random.gamma(0.4, 1.0, len(ids)),
                        writers=np.full(len(ids), Writer.MODEL, np.uint8),
                        versions=(Span(str(position // 10), 0, len(ids)),),
                        entropy=random.gamma(0.8, 1.0, len(ids)),
                    ),
                    parent=position - 1 if position else None,
                    branching=Branching.EXTENDS if position else Branching.OPENS,
                    reason="extends the call before" if position else "opens the first sequence",
                    status="committed",
                    finish="stop",
                    said=[Said("tool", "result", "result " * 40, "search")],
                    answered=[Said("assistant", "text", "Some **words**. " * 30)],
                )
            )
        episode = Episode(f"long-{number}", turns, [], file="long", reward=float(number % 2), outcome="task_complete")
        steps = episode.steps(len(turns) - 1)
        mask = np.zeros(steps[-1].stop, np.uint8)
        for step in steps:
            mask[step.sampled : step.stop] = 1
        logprobs = episode.column(SequenceRecord(steps, mask), "logprobs")
        trainer = np.where(mask > 0, logprobs + random.normal(0, 0.01, len(mask)), np.nan)
        episode.sequences.append(SequenceRecord(steps, mask, trainer_logprobs=trainer))
        episodes.append(episode)
    return with_credit(Group("long", episodes, "step", "long", texts, is_scored=True))


def hostile_group():
    """Episodes whose every string tries to run script, to move the terminal, or to turn the direction of text."""
    strings = list(HOSTILE)
    vocabulary = Vocabulary()
    author = Author(vocabulary, 7)
    vocabulary.ids.update({text.encode(): 10 + i for i, text in enumerate(strings)})
    vocabulary.ids.update({b"\xf0\x9f": 90, b"\x98\x80": 91, b"\xff": 92})
    ids = np.array([*range(10, 10 + len(strings)), 90, 91, 92], np.int32)
    tokens = Tokens(ids, logprobs=np.full(len(ids), -1.0), versions=(Span(strings[0], 0, len(ids)),))
    said = [
        Said(role, kind, text, text, text)
        for text in strings
        for role, kind in itertools.product(("user",), ("text", "reasoning", "call", "result"))
    ]
    author.turns.append(
        TurnRecord(
            0,
            Tokens(ids),
            tokens,
            reason=strings[0],
            status=strings[1],
            note=strings[2],
            failure=strings[0],
            agent=strings[3],
            finish=strings[1],
            said=said,
            images=[
                Image(strings[0].encode(), "svg+xml", strings[1]),
                Image(b"no picture", 'png"><script>', strings[2]),
            ],
        )
    )
    episode = Episode(
        strings[0], author.turns, [], file=strings[1], outcome=strings[2], reward=1.0, left_out=strings[3]
    )
    steps = episode.steps(0)
    mask = np.zeros(steps[-1].stop, np.uint8)
    mask[len(ids) :] = 1
    episode.sequences.append(SequenceRecord(steps, mask, advantages=mask * 1.0))
    return Group(strings[0], [episode], strings[1], strings[1], vocabulary.texts)


HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    '<img src="http://127.0.0.1:9/x.png" onerror="window.pwned = 1">',
    "<svg/onload=window.pwned=1>",
    "\x1b[2J\x1b]0;pwned\x07\x9b31m",
    "\u202eevil\u202c\u2066x\u2069\u200b\ufeff",
    "[click](javascript:window.pwned=1) ![x](http://127.0.0.1:9/y.png)",
    "<style>*{display:none}</style><meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "`<b onclick=window.pwned=1>` **<a href=javascript:1>x</a>**",
    "<!--",
    "-->",
    "]]>",
    "$script ${policy} $$",
    "__proto__",
    "\ud7ff\uffff\x00\x0b",
)


def _picture(width=160, height=90):
    """A PNG of a smooth change of color."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (
        b"\0" + b"".join(bytes((x * 255 // width, y * 255 // height, 160)) for x in range(width)) for y in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


PICTURE = _picture()
