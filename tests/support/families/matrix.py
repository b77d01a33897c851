"""What follows a sampled turn, for every family and every case, against the full render of the same conversation.

The reference is what the template writes behind the end of the sampled turn when it renders everything; the ends of
turns come from the table of families, not from the library. `python tests/support/families/matrix.py` writes
docs/families.md from the results.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from strands_sglang.messages import to_chat_messages, to_chat_tools
from strands_sglang.templates.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    Prompt,
    SampledTurn,
    UnprovenContinuationError,
)
from support.families import FAMILIES, load_tokenizer

CASES = (
    "tool result",
    "several tool results",
    "text beside results",
    "user turn",
    "cut turn",
    "cut reasoning",
    "odd stop",
    "thinking on",
    "thinking off",
    "full render",
)
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "families.md"

ANSWER = "The-unique-answer-is-42"
TOOL_NAMES = ("look_up", "search", "count_words")
TOOLS = [
    {
        "name": name,
        "description": "Looks something up.",
        "inputSchema": {"json": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}},
    }
    for name in TOOL_NAMES
]
USE_IDS = ("call00001", "call00002", "call00003")  # nine letters and digits, which the strictest templates want

DROPS_CALLS = ("deepseek_v3_original", "smollm3")
"""Families whose template has no place for the tool calls of a message, but writes its text."""

_TOOL_CASES = ("tool result", "several tool results", "text beside results", "full render")
REFUSED: dict[tuple[str, str], str] = {
    **{("gemma_3", case): "the template refuses tool results" for case in _TOOL_CASES},
    **{(family, "full render"): "the template drops tool calls" for family in DROPS_CALLS},
    **{(f"llama_3_{n}", "several tool results"): "the template refuses two calls in one turn" for n in (1, 2, 3)},
    **{
        (family, case): reason
        for family, reason in {
            "mistral_nemo": "the template moves system prompt and tools to the last user message",
            "mistral_small_3_2": "the template moves the tools to the last user message",
        }.items()
        for case in ("text beside results", "user turn")
    },
    ("ministral_3", "text beside results"): "the template refuses a user message behind a tool result",
    **{
        (family, "full render"): "the template leaves out text beside a call, and refuses it in a message of its own"
        for family in ("mistral_nemo", "mistral_small_3_2")
    },
}
"""What the template itself makes impossible, by family and case. Nothing else may be unproven."""

MOVES_TEXT = {"gemma_4"}
"""Families whose template puts text beside a call behind its result. A continuation leaves it where it was sampled."""

LEAVES_REASONING_OUT = {"deepseek_v3", "qwq"}
"""Families whose template leaves reasoning out of earlier turns, marks or not, by a rule of its own."""

# The argument that switches reasoning, by the name that the family gave it.
_THINKING = {
    "thinking on": {"enable_thinking": True, "thinking": True, "reasoning_effort": "medium"},
    "thinking off": {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
}


@dataclass(frozen=True)
class Verdict:
    """What came out of a case: proven, refused with a reason, or (a bug) wrong."""

    proven: bool
    reason: str = ""


class WrongContinuationError(AssertionError):
    """A continuation is not what the full render has."""


@functools.cache
def judge(family: str, case: str) -> Verdict:
    """Run one case.

    Raises:
        WrongContinuationError: The continuation is another one than that of the full render.
    """
    try:
        for check in _checks(family, case):
            check.run()
    except UnprovenContinuationError as error:
        return Verdict(False, str(error))
    return Verdict(True)


def _checks(family: str, case: str) -> Iterator[_Check | _FullRender]:
    if case in ("tool result", "several tool results"):
        counts = (1,) if case == "tool result" else (2, 3)
        for calls in counts:
            for earlier_steps in (0, 1, 2):
                yield _Check(family, calls=calls, earlier_steps=earlier_steps)
        if family not in MOVES_TEXT and (family, "full render") not in REFUSED:
            yield _Check(family, calls=counts[-1], text_beside_calls=True)
    elif case == "text beside results":
        for earlier_steps in (0, 1):
            yield _Check(family, calls=1, earlier_steps=earlier_steps, text_beside_results=True)
    elif case == "user turn":
        for earlier_steps in (0, 1, 2):
            yield _Check(family, earlier_steps=earlier_steps)
        if (family, "tool result") not in REFUSED:
            yield _Check(family, earlier_steps=2, earlier_tools=True)
    elif case == "full render":
        yield _FullRender(family)
    else:
        arguments = _THINKING.get(case, {})
        # Where a user turn needs a conversation without tools, or a tool result cannot be, the other one is looked at.
        plain = (family, "user turn") in REFUSED
        yield _Check(family, ending=case, arguments=arguments, plain=plain)
        if case in _THINKING and (family, "tool result") not in REFUSED:
            yield _Check(family, calls=1, arguments=arguments)


@dataclass
class _FullRender:
    """A conversation that is rendered in full: every part of every turn must be in it."""

    family: str

    def run(self) -> None:
        family = self.family
        template = ChatTemplate(load_tokenizer(family))
        parts = {name: f"the-{name}-of-the-turn" for name in ("reasoning", "text", "key")}
        turn = _calls(USE_IDS[0], key=parts["key"])
        reasoning = {"reasoningContent": {"reasoningText": {"text": parts["reasoning"]}}}
        turn["content"] = [reasoning, {"text": parts["text"]}, *turn["content"]]
        messages = [
            _text("user", "What is it?"),
            _calls(USE_IDS[1], key="earlier"),
            _results(USE_IDS[1]),
            _text("assistant", "the-earlier-answer"),
            _text("user", "And now?"),
            turn,
            _results(USE_IDS[0]),
        ]
        try:
            text = template.opening(
                [{"role": "system", "content": "Be brief."}, *to_chat_messages(messages, call_id=template.call_id)],
                to_chat_tools(TOOLS),
            ).text
        except ChatTemplateError as error:
            raise UnprovenContinuationError(str(error)) from error
        wanted = ["Be brief.", "What is it?", "earlier", "the-earlier-answer", "And now?", *parts.values(), "value 0"]
        if family in LEAVES_REASONING_OUT:
            wanted.remove(parts["reasoning"])
        missing = [part for part in wanted if part not in text]
        if missing:
            raise WrongContinuationError(f"a full render without {missing}")
        order = [text.index(parts[name]) for name in parts if parts[name] in text] + [text.rindex("value 0")]
        if (order == sorted(order)) is (family in MOVES_TEXT):
            raise WrongContinuationError(f"the parts of the turn stand in another order: {text!r}")


@dataclass
class _Check:
    """One conversation: a sampled turn with `calls` tool calls (a text if 0), and what follows it."""

    family: str
    calls: int = 0
    earlier_steps: int = 0
    ending: str = ""
    arguments: Mapping[str, Any] = ()  # type: ignore[assignment]
    plain: bool = False
    earlier_tools: bool = False
    text_beside_calls: bool = False
    text_beside_results: bool = False

    def run(self) -> None:
        tokenizer = load_tokenizer(self.family)
        facts = FAMILIES[self.family]
        template = ChatTemplate(tokenizer, arguments=dict(self.arguments))
        tools = None if self.plain else to_chat_tools(TOOLS)
        before = self._before()
        answer = _calls(*USE_IDS[: self.calls]) if self.calls else _text("assistant", ANSWER)
        if self.calls and self.family in DROPS_CALLS:
            answer["content"].insert(0, {"text": ANSWER})
        if self.text_beside_calls:
            answer["content"].insert(0, {"text": "Let me look."})
        new = [_results(*USE_IDS[: self.calls]) if self.calls else _text("user", "And what is the next one?")]
        if self.text_beside_results:
            new[0]["content"].append({"text": "Be quick."})
        system = [] if self.plain else [{"role": "system", "content": "Be brief."}]
        known = [
            {"toolUseId": use_id, "name": name, "id": use_id}
            for use_id, name in zip(USE_IDS[: self.calls], TOOL_NAMES, strict=False)
        ]
        chat = to_chat_messages(new, known_calls=known)

        def continuation(output_ids: list[int], stop: int | None, **options: Any) -> Prompt:
            had = self.earlier_steps > 0 and (self.calls > 0 or self.earlier_tools)
            return template.continuation(
                SampledTurn(output_ids, stop, known, **options),
                chat,
                tools,
                has_system=not self.plain,
                had_tool_results=had,
            )

        try:
            whole = template.render(
                [*system, *to_chat_messages([*before, answer, *new])], tools, add_generation_prompt=True
            )
        except ChatTemplateError as error:
            continuation([7], None)  # must raise: there is nothing to compare it with
            raise WrongContinuationError(f"a continuation where the template refuses: {error}") from error
        behind = whole.rpartition(ANSWER)[2] if ANSWER in whole else ""
        stops = [(behind.index(stop), stop) for stop in facts.end_of_turn if stop in behind]
        if not stops:
            continuation([7], None)
            raise WrongContinuationError(f"a continuation where the template has none: {whole[-300:]!r}")
        position, stop = min(stops)
        end_id = tokenizer.convert_tokens_to_ids(stop)
        expected = template.encode(behind[position:])
        if expected[0] != end_id:
            raise WrongContinuationError(f"{stop!r} is not one token")

        def same(got: list[int], wanted: list[int]) -> None:
            if got != wanted:
                raise WrongContinuationError(f"{template.decode(got)!r} where {template.decode(wanted)!r} was due")

        if self.ending == "cut turn":
            same(continuation([7], None).token_ids, template.encode(behind[:position]) + expected)
            same(continuation([7, end_id], None).token_ids, expected[1:])
        elif self.ending == "cut reasoning":
            start, close = facts.reasoning or ("", "")
            cut = template.encode(start + "Let me see")
            got = continuation(cut, None, ends_in_reasoning=facts.reasoning is not None).token_ids
            same(got[-len(expected) :], expected)
            if close.strip() and not template.decode(got).lstrip().startswith(close.strip()):
                raise WrongContinuationError(f"reasoning is not closed with {close!r}: {template.decode(got)!r}")
        elif self.ending == "odd stop":
            others = {tokenizer.convert_tokens_to_ids(other) for other in facts.end_of_turn if other != stop}
            for other in others or {_another_control_token(tokenizer, end_id)}:
                prompt = continuation([7, other], other)
                same(prompt.token_ids, expected)
                if prompt.kept != 1:
                    raise WrongContinuationError(f"token {other} stays in front of {stop!r}")
        else:
            same(continuation([7, end_id], end_id).token_ids, expected[1:])

    def _before(self) -> list[Any]:
        messages = [_text("user", "What is it? Look it up.")]
        for step in range(self.earlier_steps):
            if self.calls or self.earlier_tools:
                use_id = f"step0000{step}"
                messages += [_calls(use_id, key="earlier"), _results(use_id)]
            else:
                messages += [_text("assistant", f"It is {step}."), _text("user", "Really?")]
        if self.earlier_tools:
            messages += [_text("assistant", "So it is."), _text("user", "Really?")]
        return messages


def _another_control_token(tokenizer: Any, end_id: int) -> int:
    return next(i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i != end_id)


def _text(role: str, content: str) -> Any:
    return {"role": role, "content": [{"text": content}]}


def _calls(*use_ids: str, key: str = ANSWER) -> Any:
    uses = [
        {"toolUse": {"toolUseId": use_id, "name": name, "input": {"key": key}}}
        for use_id, name in zip(use_ids, TOOL_NAMES, strict=False)
    ]
    return {"role": "assistant", "content": uses}


def _results(*use_ids: str) -> Any:
    results = [
        {"toolResult": {"toolUseId": use_id, "status": "success", "content": [{"text": f"value {i}"}]}}
        for i, use_id in enumerate(use_ids)
    ]
    return {"role": "user", "content": results}


# --- docs/families.md ---


def document() -> str:
    """The text of docs/families.md."""
    verdicts = {family: {case: judge(family, case) for case in CASES} for family in FAMILIES}
    real = sum(not facts.stand_in for facts in FAMILIES.values())
    complete = sum(all(verdict.proven for verdict in row.values()) for row in verdicts.values())
    lines = [
        "# Model families",
        "",
        "What follows a sampled turn, for every family and case, compared token by token with a full render by the",
        "family's own chat template. Written by `python tests/support/families/matrix.py`; `make test-families` fails",
        "if it is out of date. *Stand-in*: the family's own tokenizer is not to be had from a package registry, so its",
        "control tokens were added to a related one; the template is the real one.",
        "",
        f"{len(FAMILIES)} families, {real} with their real tokenizer; {complete} prove all cases.",
        "",
        "| family | chat template | tokenizer | tool parser | " + " | ".join(CASES) + " |",
        "|---|---|---|---|" + "---|" * len(CASES),
    ]
    for family, facts in FAMILIES.items():
        tokenizer = f"{facts.tokenizer} (stand-in)" if facts.stand_in else facts.tokenizer
        marks = ["proven" if verdicts[family][case].proven else "refused" for case in CASES]
        parser = f"`{facts.tool_format}`" if facts.tool_format else "none"
        lines.append(f"| {family} | {facts.template} | {tokenizer} | {parser} | " + " | ".join(marks) + " |")
    lines += [
        "",
        "A refused case is never guessed: the call opens a new sequence from a full render, with the reason, or raises",
        "with the template's own message where it refuses that too.",
        "",
        "| family | case | why |",
        "|---|---|---|",
        *(f"| {family} | {case} | {reason} |" for (family, case), reason in REFUSED.items()),
        "",
        "The cases: a *cut turn* was ended by `max_new_tokens` and gets the end that it lacks as prompt tokens; *cut",
        "reasoning* is closed the way the family closes it; an *odd stop* is another control token than the template",
        "puts there, and is left out of what follows; *thinking on/off* are a user turn and a tool result under the",
        "template's own switch; a *full render* must hold every part of every turn (reasoning, text beside a call,",
        "call, result) in a form that the template has for it. Tool results and user turns are looked at in",
        "conversations of three lengths; several tool results are two and three, of different tools, also behind a",
        "turn with text beside its calls. A turn that ended at a user's stop string is a cut turn.",
        "",
        "Where a template leaves out text beside a call (Llama 3, Hermes 3, Granite 3, Phi 4 mini, trl's DeepSeek-V3),",
        "a full render has it as a message of its own in front of the calls. Reasoning that a template does not know",
        "is put into the text between the family's marks.",
        "",
        f"In a full render of {_names(MOVES_TEXT)} text beside a call stands behind the call's result, because the",
        "template puts it there; a continuation leaves it where it was sampled. The templates of",
        f"{_names(LEAVES_REASONING_OUT)} leave reasoning out of earlier turns.",
        "",
    ]
    return "\n".join(lines)


def _names(families: set[str]) -> str:
    return ", ".join(f"`{family}`" for family in sorted(families))


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
