"""What was asked in a random episode, and what the server's log says about it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from strands_sglang.testing import ScriptedSGLang

Message = dict[str, Any]


class ViolationError(AssertionError):
    """A promise that did not hold.

    Attributes:
        promise: Which one.
        facts: What was there instead.
    """

    def __init__(self, promise: str, facts: dict[str, Any], plan: Any = None) -> None:
        """Say so, and which plan broke it."""
        self.promise, self.facts = promise, facts
        told = "".join(f"\n  {name}: {value!r}" for name, value in facts.items())
        super().__init__(f"{promise}{told}" + ("" if plan is None else f"\n  {plan!r}"))


def require(held: bool, promise: str, **facts: Any) -> None:
    """Raise a `ViolationError` unless something holds."""
    if not held:
        raise ViolationError(promise, facts)


def require_equal(found: list[Any], expected: list[Any], promise: str, **facts: Any) -> None:
    """Raise a `ViolationError` that names the first difference, unless two lists are equal."""
    if found != expected:
        i = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
        raise ViolationError(
            promise, {**facts, "position": i, "found": found[i : i + 8], "expected": expected[i : i + 8]}
        )


@dataclass(eq=False)
class Call:
    """What was asked, and what the server's log says about it.

    Attributes:
        owner: Who asked; None for a call that no agent makes.
        system: The system prompt.
        tools: The tool specs, as text.
        messages: The conversation as it was handed to the model.
        is_thrown_away: Whether the agent forgot the answer.
        is_structured: Whether a grammar constrained it.
        answer: The answer as Strands hands it back; None if it never can be in a history.
        index: Position in the order in which the calls were made.
        known_from: Index of the first call that was made when the answer had come.
        outcome: "answered", "cut" or "failed".
        finish: Why the sampling ended.
        stop_token: The token that ended it; None if it was cut off or ended at a text.
        parent: The call that it extends.
        kept: How many of the parent's sampled ids stand before its own prompt.
    """

    owner: str | None
    system: str | None
    tools: str
    messages: list[Message]
    is_thrown_away: bool = False
    is_structured: bool = False
    answer: Message | None = None
    index: int = -1
    known_from: int = -1
    outcome: str = "failed"
    finish: str = ""
    stop_token: int | None = None
    input_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    parent: Call | None = None
    kept: int = 0
    is_auxiliary: bool = False
    asked: list[str] = field(default_factory=list)
    full: list[str] | None = None

    @property
    def ids(self) -> list[int]:
        """All ids of the sequence that ends with the call."""
        return self.input_ids + self.output_ids

    def path(self) -> list[Call]:
        """The calls from the first of the sequence to this one."""
        before = [] if self.parent is None else self.parent.path()
        return [*before, self]


class Notebook:
    """The calls of an episode.

    Attributes:
        calls: In their order.
        notices: By the toolUseId of a call that did not parse, the mark of what the model wrote, which it is shown
            instead of a result.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.calls: list[Call] = []
        self.notices: dict[str, str] = {}

    def begin(self, call: Call) -> None:
        """Add a call that is about to be made."""
        call.index = len(self.calls)
        call.asked = [as_line(message) for message in call.messages]
        self.calls.append(call)

    def end(self, call: Call, server: ScriptedSGLang) -> None:
        """Add what the server's log says about a call that is over."""
        require(len(server.requests) == len(self.calls), "a call is one request", requests=len(server.requests))
        call.known_from = len(self.calls)
        request, response = server.requests[call.index], server.responses[call.index]
        call.input_ids = request.input_ids
        assert response is not None
        if response.status == 200:
            body = response.body
            call.output_ids = body["output_ids"]
            call.logprobs = [entry[0] for entry in body["meta_info"]["output_token_logprobs"]]
            reason = body["meta_info"]["finish_reason"]
            call.finish = reason["type"]
            call.stop_token = reason["matched"] if isinstance(reason.get("matched"), int) else None
            call.outcome = "answered" if call.finish != "abort" else "cut" if call.output_ids else "failed"
        if call.outcome == "answered" and call.answer is not None:
            call.full = [*call.asked, as_line(call.answer)]

    def twin_of(self, system: str | None, tools: str, messages: list[Message]) -> str | None:
        """The text of an answer to the same conversation, or else of the latest one."""
        asked = [as_line(message) for message in messages]
        said: list[tuple[bool, str]] = []
        for call in self.calls:
            content = call.answer["content"] if call.answer is not None else []
            if len(content) == 1 and "text" in content[0]:
                said.append(((call.system, call.tools, call.asked) == (system, tools, asked), content[0]["text"]))
        same = [text for is_same, text in said if is_same]
        return (same or [text for _, text in said] or [None])[-1]


def as_line(message: Message) -> str:
    """A message as text, without what the model never sees."""
    content = [block for block in message["content"] if "cachePoint" not in block]
    return json.dumps([message["role"], content], sort_keys=True)
