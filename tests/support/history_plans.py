"""Random episodes as data: what each step does to the history, what the model answers, what becomes of the answer.

A step's numbers are taken modulo whatever there is when it is played, so a plan stays valid when steps are left out of
it: that is how a failing one is made short (`shrunk`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

AGENTS = 3
NOBODY = AGENTS
"""Who asks from outside every agent's loop: a summary, a judge."""

EDITS = {
    "insert": 3,
    "delete": 3,
    "change": 4,
    "reorder": 2,
    "truncate": 3,
    "forget": 2,
    "summarise": 2,
    "duplicate": 2,
    "merge": 2,
    "split": 1,
    "tools": 2,
    "system": 2,
    "copy": 3,
    "cache point": 3,
}
ARRIVALS = {"turn": 18, "echo": 3, "same question": 2, "again": 2, "two": 2, "foreign answer": 1, "dangling": 1}
ATTEMPTS = {"none": 24, "error": 2, "abort": 1, "thrown away": 2}
ANSWERS = {
    "text": 6,
    "call": 6,
    "two calls": 2,
    "broken call": 2,
    "reasoning": 2,
    "reasoning and call": 1,
    "only reasoning": 1,
    "blank": 1,
    "respelt": 1,
    "twin": 3,
    "structured": 1,
}
ENDS = {"stop": 16, "other stop": 3, "stop string": 1, "cut": 3, "abort": 1, "error": 1}
FATES = {"kept": 24, "thrown away": 2, "cancelled": 1, "edited": 1}


class _Brief:
    """Written with the fields alone that are not as they mostly are, so that a falsified plan can be read."""

    def __repr__(self) -> str:
        told = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in told)})"


@dataclass(frozen=True, repr=False)
class Edit(_Brief):
    """One change of an agent's history, system prompt or tools, at positions modulo its length."""

    kind: str = "change"
    at: int = 0
    to: int = 0


@dataclass(frozen=True, repr=False)
class Step(_Brief):
    """One turn of somebody: edits, what arrives, an attempt that comes to nothing, the call, and what becomes of it.

    Attributes:
        who: An agent, or `NOBODY`.
        edits: What happens to the history before.
        arrives: The new messages; "turn" is what Strands adds, tool results or a user's text; "same question" is what
            another agent was asked last, and it gets the same answer in other tokens.
        attempt: A call with the same messages before the one that counts.
        answer: What is sampled.
        end: How the sampling ends.
        fate: What becomes of the answer.
        injected: Whether a text stands behind the last message for this call only.
        number: Chooses where there is a choice.
        held: Whether the answer comes only when somebody else's step is over.
        stored: Whether the trajectory goes through a file before the step.
    """

    who: int = 0
    edits: tuple[Edit, ...] = ()
    arrives: str = "turn"
    attempt: str = "none"
    answer: str = "text"
    end: str = "stop"
    fate: str = "kept"
    injected: bool = False
    number: int = 0
    held: bool = False
    stored: bool = False


@dataclass(frozen=True, repr=False)
class Plan(_Brief):
    """An episode.

    Attributes:
        steps: What happens.
        has_agents: Whether calls come from agents at all, or all of them from nobody (the model used alone).
    """

    steps: tuple[Step, ...] = ()
    has_agents: bool = True


def random_plan(rng: random.Random) -> Plan:
    """An episode of four to eight steps."""
    steps = tuple(_random_step(rng) for _ in range(rng.randint(4, 8)))
    return Plan(steps, has_agents=rng.random() < 0.9)


def _random_step(rng: random.Random) -> Step:
    def one(weights: Mapping[str, int]) -> str:
        return rng.choices(list(weights), list(weights.values()))[0]

    def number() -> int:
        return rng.randrange(12)

    edits = rng.choices((0, 1, 2), (12, 4, 1))[0]
    return Step(
        who=rng.choices(range(AGENTS + 1), (12, 3, 1, 1))[0],
        edits=tuple(Edit(one(EDITS), number(), number()) for _ in range(edits)),
        arrives=one(ARRIVALS),
        attempt=one(ATTEMPTS),
        answer=one(ANSWERS),
        end=one(ENDS),
        fate=one(FATES),
        injected=rng.random() < 0.04,
        number=number(),
        held=rng.random() < 0.1,
        stored=rng.random() < 0.03,
    )


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """A plan as short and plain as can be that still fails.

    Args:
        plan: One that fails.
        fails: Whether a plan does.
    """
    while True:
        simpler = next((candidate for candidate in _simpler(plan) if fails(candidate)), None)
        if simpler is None:
            return plan
        plan = simpler


def _simpler(plan: Plan) -> Iterator[Plan]:
    steps = plan.steps
    for i in range(len(steps)):
        yield replace(plan, steps=steps[:i] + steps[i + 1 :])
    for i, step in enumerate(steps):
        edits = [replace(step, edits=step.edits[:j] + step.edits[j + 1 :]) for j in range(len(step.edits))]
        for name in ("attempt", "answer", "end", "fate", "arrives", "injected", "held", "stored", "who", "number"):
            default = getattr(Step(), name)
            if getattr(step, name) != default:
                edits.append(replace(step, **{name: default}))
        yield from (replace(plan, steps=(*steps[:i], edited, *steps[i + 1 :])) for edited in edits)
    if not plan.has_agents:
        yield replace(plan, has_agents=True)


def kinds_in(plan: Plan) -> Counter[str]:
    """How often each kind of edit, arrival, attempt, answer, end and fate stands in a plan."""
    found: list[Any] = []
    for step in plan.steps:
        found += [edit.kind for edit in step.edits]
        found += [step.arrives, f"attempt: {step.attempt}", f"answer: {step.answer}"]
        found += [f"end: {step.end}", f"fate: {step.fate}"]
        found += ["injected"] * step.injected + ["held"] * step.held + ["stored"] * step.stored
    return Counter(found)
