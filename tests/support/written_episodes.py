"""Episodes written by hand, as the records that readers make of files: every kind of turn, with text that reads well.

Tokens are words: each distinct piece of text is one id. Logprobs and the rest are drawn from a seed.
"""

import itertools
import re
import struct
import zlib
from array import array
from dataclasses import replace

import numpy as np

from strands_sglang.credit import training_rows
from strands_sglang.inspection.formats.trajectories import inspect
from strands_sglang.inspection.records import Finding, Group
from strands_sglang.messages.content import Picture
from strands_sglang.messages.said import Said
from strands_sglang.protocol.generation import Generation, VersionSpan
from strands_sglang.reasons import Reason
from strands_sglang.templates.image_tokens import ImageInputs
from strands_sglang.trajectory.trajectory import EpisodeEnd, Trajectory
from strands_sglang.trajectory.turn import RecordedError, Turn, TurnStatus

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

    def turn(
        self,
        prompt,
        text,
        said,
        *,
        parent=None,
        versions=(("12", 1.0),),
        finish="stop",
        status="committed",
        failure=None,
        images=(),
        **facts,
    ):
        """Add a turn and return it; `versions` are which share of the answer each version sampled."""
        ids = self.vocabulary.encode(text)
        spans, at = [], 0
        for version, share in versions:
            stop = len(ids) if share == 1.0 else round(len(ids) * share)
            spans.append(VersionSpan(version, at, stop))
            at = stop
        facts.setdefault("why", Reason("opens") if parent is None else Reason("extends", parent.index, None, ("1",)))
        turn = Turn(
            index=len(self.turns),
            parent=parent,
            key=b"",
            parts={},
            digests=(),
            roles=(),
            prompt_ids=array("i", self.vocabulary.encode(prompt)),
            status=TurnStatus(status),
            said=tuple(part for part in said if part.role != "assistant"),
            answered=tuple(part for part in said if part.role == "assistant"),
            cause=None if failure is None else RecordedError(failure),
            images=ImageInputs(tuple(images), array("i"), {}) if images else None,
            **facts,
        )
        turn.generation = Generation(
            output_ids=array("i", ids),
            logprobs=array("d", -self.random.gamma(0.35, 1.0, len(ids))),
            finish_type=finish,
            weight_versions=tuple(spans),
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=max(0, turn.prompt_tokens - len(turn.prompt_ids) - 3),
            resumed_ids=("earlier",) if len(spans) > 1 else (),
            latency_s=round(0.4 + len(ids) * 0.021, 3),
        )
        self.turns.append(turn)
        return turn


def _opening():
    return (
        "<|im_start|>system\n"
        f"{SYSTEM}"
        f"\n<tools>\n{TOOLS}\n</tools><|im_end|>\n<|im_start|>user\n"
        f"{QUESTION}"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def _result(text):
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


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
    opening = _opening()
    said_first = [*_asked(), Said("assistant", "reasoning", thought), said]
    first = author.turn(
        opening,
        f"<think>\n{thought}\n</think>\n\n{call}",
        said_first,
        why=Reason("first"),
        agent="jars",
        images=() if image is None else [Picture(image, "png", "message 0")],
    )
    if number == 1:
        author.turn(
            _result("1728"),
            "The answer is 1728 jars.<|im_end|>",
            [Said("tool", "result", "1728", "calculator"), Said("assistant", "text", "The answer is 1728 jars.")],
            parent=first,
            status="discarded",
            fate=Reason("asked_again"),
            agent="jars",
        )
    if answer == 1728:
        last = first
    else:
        call, said = _call("1728 * 7")
        versions = (("12", 0.5), ("13", 1.0)) if number % 3 == 0 else (("12", 1.0),)
        last = author.turn(
            _result("1728"),
            f"That is one lorry. Seven of them:\n{call}",
            [
                Said("tool", "result", "1728", "calculator"),
                Said("assistant", "text", "That is one lorry. Seven of them:"),
                said,
            ],
            parent=first,
            agent="jars",
            versions=versions,
        )
    text = f"**{answer:,} jars** are on 7 lorries."
    if number == 3:
        text += "\n\n| load | jars |\n|---|---|\n| a crate | 48 |\n| a lorry | 1,728 |\n\n- checked with `48 * 36 * 7`"
    author.turn(
        _result("12096" if last != first else "1728"),
        f"{text}<|im_end|>" if number != 6 else "**336 jars** are on 7 lorries, because 48 times",
        [Said("tool", "result", "12096" if last != first else "1728", "calculator"), Said("assistant", "text", text)],
        parent=last,
        status="final" if number != 6 else "cut",
        finish="stop" if number != 6 else "abort",
        failure=None if number != 6 else "SGLangAbortedError: the server aborted the request",
        agent="jars",
    )
    if number == 3:
        _checker(author, opening, first)
    return _episode(f"jars-{number}", author.turns, reward=float(answer == 12096), number=number)


def _checker(author, opening, first):
    """A fork that rewrites the result, a sub-agent, and a summary from outside."""
    author.turn(
        _result("1728 jars on one lorry"),
        "So 7 lorries carry 12096 jars.<|im_end|>",
        [
            Said("tool", "result", "1728 jars on one lorry", "calculator"),
            Said("assistant", "text", "So 7 lorries carry 12096 jars."),
        ],
        parent=first,
        status="final",
        why=Reason("forks", 0, None, (Reason("message_changed", 2, 2, ("user", "user")),)),
        agent="jars",
    )
    author.turn(
        (
            "<|im_start|>system\n"
            "You check the work of others."
            "<|im_end|>\n<|im_start|>user\n"
            "Is 48 × 36 × 7 = 12096?"
            "<|im_end|>\n<|im_start|>assistant\n"
        ),
        "Yes: 48 × 36 = 1728, and 1728 × 7 = 12096.<|im_end|>",
        [
            Said("system", "text", "You check the work of others."),
            Said("user", "text", "Is 48 × 36 × 7 = 12096?"),
            Said("assistant", "text", "Yes: 48 × 36 = 1728, and 1728 × 7 = 12096."),
        ],
        status="final",
        why=Reason("opens_because", detail=(Reason("part_changed", 2, None, ("system prompt",)),)),
        agent="checker",
    )
    author.turn(
        ("Grade the answer as JSON.<|im_start|>assistant\n"),
        '{"score": 1}<|im_end|>',
        [Said("user", "text", "Grade the answer as JSON."), Said("assistant", "text", '{"score": 1}')],
        status="answered",
        is_auxiliary=True,
        constrained=True,
        why=Reason("opens_because", detail=(Reason("message_changed", 4, 0, ("user", "user")),)),
    )


def _episode(name, turns, *, reward, number):
    trajectory = Trajectory.of_turns(turns)
    trajectory.end = EpisodeEnd("task_complete", reward)
    episode = inspect(trajectory, name, file="step-000012")
    episode.seconds = 3.5 + number
    return episode


def with_credit(group, batch=None):
    """Give the sequences of a group their rows, with the weights of an episode mean and the trainer's logprobs.

    `batch` is the number of episodes in the batch, by default those of the group.
    """
    rows = iter(training_rows(episode.as_episode(group.id) for episode in group.episodes))
    for number, episode in enumerate(group.episodes):
        episode.in_batch = True
        for sequence in episode.sequences:
            row = next(rows)
            random = np.random.default_rng(100 + number)
            trainer = np.asarray(row.logprobs) + random.normal(0, 0.01, len(row)) * (sequence.mask > 0)
            weight = 1 / ((batch or len(group.episodes)) * row.episode_trained)
            sequence.row = replace(row, trainer_logprobs=trainer.tolist(), loss_weight=weight)
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
    shared = random.integers(0, vocabulary_size, per_turn // 2).tolist()
    episodes = []
    for number in range(siblings):
        turns = []
        for position in range(max(1, tokens // per_turn)):
            prompt = random.integers(0, vocabulary_size, per_turn // 2).tolist() if position else shared
            count = per_turn - len(prompt)
            turns.append(
                Turn(
                    index=position,
                    parent=turns[-1] if turns else None,
                    why=Reason("extends", position - 1, None, ("1",)) if turns else Reason("first"),
                    key=b"",
                    parts={},
                    digests=(),
                    roles=(),
                    prompt_ids=array("i", prompt),
                    status=TurnStatus.COMMITTED,
                    said=(Said("tool", "result", "result " * 40, "search"),),
                    answered=(Said("assistant", "text", "Some **words**. " * 30),),
                    generation=Generation(
                        output_ids=array("i", random.integers(0, vocabulary_size, count).tolist()),
                        logprobs=array("d", -random.gamma(0.4, 1.0, count)),
                        finish_type="stop",
                        weight_versions=(VersionSpan(str(position // 10), 0, count),),
                    ),
                )
            )
        episodes.append(_episode(f"long-{number}", turns, reward=float(number % 2), number=number))
    return with_credit(Group("long", episodes, "step", "long", texts, is_scored=True))


def hostile_group():
    """Episodes whose every string tries to run script, to move the terminal, or to turn the direction of text."""
    strings = list(HOSTILE)
    vocabulary = Vocabulary()
    vocabulary.ids.update({text.encode(): 10 + i for i, text in enumerate(strings)})
    vocabulary.ids.update({b"\xf0\x9f": 90, b"\x98\x80": 91, b"\xff": 92})
    ids = array("i", [*range(10, 10 + len(strings)), 90, 91, 92])
    said = [
        Said(role, kind, text, text, text)
        for text in strings
        for role, kind in itertools.product(("user",), ("text", "reasoning", "call", "result"))
    ]
    turn = Turn(
        index=0,
        parent=None,
        why=Reason("in_words", detail=(strings[0],)),
        key=b"",
        parts={},
        digests=(),
        roles=(),
        prompt_ids=ids,
        fate=Reason("in_words", detail=(strings[2],)),
        cause=RecordedError(strings[0]),
        agent=strings[3],
        said=tuple(said),
        images=ImageInputs(
            (
                Picture(strings[0].encode(), "svg+xml", strings[1]),
                Picture(b"no picture", 'png"><script>', strings[2]),
            ),
            ids,
            {},
        ),
        generation=Generation(
            output_ids=ids,
            logprobs=array("d", [-1.0] * len(ids)),
            finish_type=strings[1],
            weight_versions=(VersionSpan(strings[0], 0, len(ids)),),
        ),
    )
    episode = inspect(Trajectory.of_turns([turn]), strings[0], file=strings[1])
    episode.end = EpisodeEnd(strings[2], 1.0)
    episode.left_out = Reason("in_words", detail=(strings[3],))
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
