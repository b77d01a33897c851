"""What a chat template puts behind a sampled turn, found out by rendering small conversations with it.

The text that follows a sampled turn is found with a sentinel (`text_after_turn`); whether that text is what the whole
conversation would have there is proven on probe conversations (`prove`). Pure functions over a `TemplateRenderer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..families import Family
from ..messages import ChatMessage
from .renderer import ChatTemplateError, TemplateRenderer, Tools

CASES = ("tool result", "several tool results", "user turn", "cut turn")
"""What can follow a sampled turn, and a turn that was cut off before its end; each is proven on its own."""

_SYSTEM = "You are being probed."
_DESCRIPTION = "Looks at what the probe holds."
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": _DESCRIPTION,
        "parameters": {"type": "object", "properties": {"argument": {"type": "string"}}, "required": ["argument"]},
    },
}


class UnprovenContinuationError(Exception):
    """What follows a sampled turn cannot be derived from the template. The message says why."""


@dataclass(frozen=True)
class TextAfterTurn:
    """What the template writes behind the text of an assistant's turn.

    Attributes:
        rest: What it still writes of the turn, such as the end of a section; a turn that was sampled to its end has it.
        end: The token that ends the turn.
        following: The text behind that token.
    """

    rest: str
    end: str
    following: str


def text_after_turn(
    renderer: TemplateRenderer,
    stops: Sequence[str],
    calls: Sequence[Mapping[str, Any]],
    messages: Sequence[ChatMessage],
    tools: Tools,
    *,
    has_system: bool,
    is_known_family: bool,
    after_tool_step: bool = False,
) -> TextAfterTurn:
    """What the template writes behind a turn, found without rendering that turn: a stand-in takes its place.

    Args:
        renderer: Renders.
        stops: Tokens that can end an assistant's turn.
        calls: The turn's tool calls: `{"id", "name"}` in order; none where the template does not write calls.
        messages: The chat messages behind the turn.
        tools: Tools in OpenAI form.
        has_system: Whether the conversation begins with a system message (some templates refuse one).
        is_known_family: Whether `stops` are known, rather than derived from one render.
        after_tool_step: Whether the stand-in conversation has a tool call and its result before the turn.

    Raises:
        UnprovenContinuationError: It cannot be told.
    """
    sentinel = renderer.sentinel()
    if any(message["role"] == "tool" for message in messages):
        # The sentinel stands in every call: what counts is the last one that the template writes, and gpt-oss's writes
        # one of several.
        stand_in = assistant_turn(calls, sentinel)
    else:
        stand_in = {"role": "assistant", "content": sentinel}
    before: list[ChatMessage] = [{"role": "system", "content": "s"}] if has_system else []
    before.append({"role": "user", "content": "u"})
    if after_tool_step:
        before += _tool_step({"id": "call00000", "name": "f"})
    try:
        text = renderer.render([*before, stand_in, *messages], tools, add_generation_prompt=True)
    except ChatTemplateError as error:
        # Whether the template refuses the messages or only the stand-in is for the full render to tell.
        raise UnprovenContinuationError(str(error)) from error
    found = _split(text, sentinel, stops)
    # Without knowing the family, a control token in between may be the true end of the turn, and what stands behind it
    # a message.
    if not is_known_family and any(token in found.rest for token in renderer.added_tokens(special_only=True)):
        raise UnprovenContinuationError(f"a control token stands between the turn and {found.end!r}")
    return found


def assistant_turn(calls: Sequence[Mapping[str, Any]], text: str) -> ChatMessage:
    """An assistant's turn that ends in `text`: in its calls, or in its content where it has none."""
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": {"argument": text}},
            }
            for call in calls
        ],
    }


def _split(text: str, sentinel: str, stops: Sequence[str]) -> TextAfterTurn:
    _, found, after = text.rpartition(sentinel)
    if not found:
        raise UnprovenContinuationError("the chat template leaves the assistant's turn out of its render")
    positions = [(after.index(stop), stop) for stop in stops if stop in after]
    if not positions:
        raise UnprovenContinuationError(f"the chat template does not end the turn with any of {tuple(stops)}")
    position, end = min(positions)
    return TextAfterTurn(after[:position], end, after[position + len(end) :])


# --- the proof ---


@dataclass(frozen=True)
class Proof:
    """Whether the text after a turn is what the whole conversation would have there.

    Attributes:
        reason: Why that is not proven; None if it is.
        needs_tool_step: Whether it takes a stand-in with a tool step before the turn where the conversation has one.
    """

    reason: str | None
    needs_tool_step: bool = False


def prove(
    renderer: TemplateRenderer,
    stops: Sequence[str],
    family: Family | None,
    case: str,
    *,
    has_system: bool,
    has_tools: bool,
    shows_calls: bool,
) -> Proof:
    """Prove the text after a turn for one of `CASES`.

    Conversations of three lengths are rendered in full. What they have behind the turn must be what the stand-in
    conversation has there, and neither the system prompt nor the tools may come after the turn.

    Args:
        renderer: Renders.
        stops: Tokens that can end an assistant's turn.
        family: The model family, None if unknown.
        case: One of `CASES`.
        has_system: Whether the conversation begins with a system message.
        has_tools: Whether there are tools.
        shows_calls: Whether the template writes tool calls.
    """
    tools = [PROBE_TOOL] if has_tools else None
    count = {"tool result": 1, "several tool results": 2}.get(case, 0)
    calls = [probe_call(family, number) for number in range(5, 5 + count)]
    shown = calls if shows_calls else []
    new: list[ChatMessage] = [probe_result(call) for call in calls] or [{"role": "user", "content": "And then?"}]
    before: list[ChatMessage] = [{"role": "system", "content": _SYSTEM}] if has_system else []
    before.append({"role": "user", "content": "What is there?"})

    def found(after_tool_step: bool) -> TextAfterTurn:
        return text_after_turn(
            renderer,
            stops,
            shown,
            new,
            tools,
            has_system=has_system,
            is_known_family=family is not None,
            after_tool_step=after_tool_step,
        )

    try:
        references = []
        for number in range(3):
            answer = renderer.sentinel()
            whole = renderer.render([*before, assistant_turn(shown, answer), *new], tools, add_generation_prompt=True)
            references.append(_split(whole, answer, stops))
            after = references[-1].rest + references[-1].following
            if has_system and _SYSTEM in after:
                return Proof("the chat template moves the system prompt behind the turn")
            if has_tools and _DESCRIPTION in after:
                return Proof("the chat template moves the tools behind the turn")
            before += _tool_step(probe_call(family, number)) if count else _exchange()
        plain = found(False)
        if references == [plain] * 3:
            return Proof(None)
        if count and references == [plain, *[found(True)] * 2]:
            return Proof(None, needs_tool_step=True)
    except (UnprovenContinuationError, ChatTemplateError) as error:
        return Proof(str(error))
    return Proof("what the chat template writes behind the turn depends on what came before it")


def _tool_step(call: Mapping[str, str]) -> list[ChatMessage]:
    return [assistant_turn([call], "earlier"), probe_result(call)]


def _exchange() -> list[ChatMessage]:
    return [{"role": "assistant", "content": "A thing."}, {"role": "user", "content": "Which one?"}]


def probe_call(family: Family | None, number: int) -> dict[str, str]:
    """A call of `PROBE_TOOL`: `{"id", "name"}`, the id in the form of the family."""
    use_id = f"call{number:05}"  # nine letters and digits, which is what the strictest templates take
    make = family.call_id if family is not None else None
    return {"id": make(use_id, "look", number) if make is not None else use_id, "name": "look"}


def probe_result(call: Mapping[str, str]) -> ChatMessage:
    """What a probe call returned."""
    return {"role": "tool", "content": f"seen by {call['id']}", "name": call["name"], "tool_call_id": call["id"]}
