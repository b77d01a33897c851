"""What a chat template does, found out by rendering small conversations with it.

The text that follows a sampled turn is found with a sentinel (`text_after_turn`); whether that text is what the whole
conversation would have there is proven on probe conversations (`why_unproven`); and how a template treats history,
reasoning and its arguments is looked at in the same way. Pure functions over a `TemplateRenderer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .families import Family
from .messages import ChatMessage
from .template_renderer import ChatTemplateError, TemplateRenderer, Tools

CASES = ("tool result", "several tool results", "user turn", "cut turn")
"""What can follow a sampled turn, and a turn that was cut off before its end; each is proven on its own."""

_SYSTEM = "You are being probed."
_DESCRIPTION = "Looks at what the probe holds."
_TOOL = {
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
        calls: The turn's tool calls: `{"id", "name"}` in order.
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
        stand_in = _assistant_turn(calls, sentinel)
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


def _assistant_turn(calls: Sequence[Mapping[str, Any]], text: str) -> ChatMessage:
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
    """
    tools = [_TOOL] if has_tools else None
    count = {"tool result": 1, "several tool results": 2}.get(case, 0)
    calls = [_call(family, number) for number in range(5, 5 + count)]
    new: list[ChatMessage] = [_result(call) for call in calls] or [{"role": "user", "content": "And then?"}]
    before: list[ChatMessage] = [{"role": "system", "content": _SYSTEM}] if has_system else []
    before.append({"role": "user", "content": "What is there?"})

    def found(after_tool_step: bool) -> TextAfterTurn:
        return text_after_turn(
            renderer,
            stops,
            calls,
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
            whole = renderer.render([*before, _assistant_turn(calls, answer), *new], tools, add_generation_prompt=True)
            references.append(_split(whole, answer, stops))
            after = references[-1].rest + references[-1].following
            if has_system and _SYSTEM in after:
                return Proof("the chat template moves the system prompt behind the turn")
            if has_tools and _DESCRIPTION in after:
                return Proof("the chat template moves the tools behind the turn")
            before += _tool_step(_call(family, number)) if count else _exchange()
        plain = found(False)
        if references == [plain] * 3:
            return Proof(None)
        if count and references == [plain, *[found(True)] * 2]:
            return Proof(None, needs_tool_step=True)
    except (UnprovenContinuationError, ChatTemplateError) as error:
        return Proof(str(error))
    return Proof("what the chat template writes behind the turn depends on what came before it")


def _tool_step(call: Mapping[str, str]) -> list[ChatMessage]:
    return [_assistant_turn([call], "earlier"), _result(call)]


def _exchange() -> list[ChatMessage]:
    return [{"role": "assistant", "content": "A thing."}, {"role": "user", "content": "Which one?"}]


def _call(family: Family | None, number: int) -> dict[str, str]:
    use_id = f"call{number:05}"  # nine letters and digits, which is what the strictest templates take
    make = family.call_id if family is not None else None
    return {"id": make(use_id, "look", number) if make is not None else use_id, "name": "look"}


def _result(call: Mapping[str, str]) -> ChatMessage:
    return {"role": "tool", "content": f"seen by {call['id']}", "name": call["name"], "tool_call_id": call["id"]}


# --- history, reasoning, arguments ---


def derived_stop(renderer: TemplateRenderer) -> str | None:
    """The first control token that the template writes behind an assistant's text; None if there is none."""
    sentinel = renderer.sentinel()
    exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}]
    after = renderer.render(exchange, add_generation_prompt=False).rpartition(sentinel)[2]
    special = renderer.added_tokens(special_only=True)
    found = [(after.index(token), -len(token), token) for token in special if token in after]
    return min(found)[2] if found else None


def reasoning_close(renderer: TemplateRenderer, stops: Sequence[str], family: Family | None) -> str | None:
    """What stands between reasoning that ends and the answer, in an assistant's turn as the template writes it.

    Where the template does not show reasoning, it is the family's mark; None if there is none. Where the turn ends with
    its reasoning, as in harmony, it is empty: the token that ends the turn closes both.
    """
    reasoning, answer = renderer.sentinel(), renderer.sentinel()
    exchange: list[ChatMessage] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": answer, "reasoning_content": reasoning},
    ]
    try:
        text = renderer.render(exchange, add_generation_prompt=False)
    except ChatTemplateError:
        text = ""
    _, found, behind = text.partition(reasoning)
    close = behind.partition(answer)[0] if found and answer in behind else None
    if close is None:
        close = family.reasoning[1] if family is not None and family.reasoning is not None else None
    if close is None:
        return None
    return close[: min((close.index(stop) for stop in stops if stop in close), default=len(close))]


def rewrites_history(renderer: TemplateRenderer, *, tool_result: bool, reasoning: bool) -> bool:
    """Whether the template writes a sampled turn differently once something follows it.

    Reasoning models strip their reasoning then; an empty block of reasoning that the generation prompt held may vanish.

    Args:
        renderer: Renders.
        tool_result: Whether a tool result follows, rather than a user message.
        reasoning: Whether the turn holds reasoning.
    """
    thought, answer = renderer.sentinel(), renderer.sentinel()
    question: ChatMessage = {"role": "user", "content": "u"}
    call = _call(None, 0)
    turn = _assistant_turn([call] if tool_result else [], answer)
    if reasoning:
        turn["reasoning_content"] = thought
    behind = _result(call) if tool_result else {"role": "user", "content": "v"}
    tools = [_TOOL] if tool_result else None
    try:
        opening = renderer.render([question], tools, add_generation_prompt=True)
        as_last = renderer.render([question, turn], tools, add_generation_prompt=False)
        whole = renderer.render([question, turn, behind], tools, add_generation_prompt=True)
    except ChatTemplateError:
        return True  # nothing is known: the template's own form is its full render
    if not whole.startswith(opening) or (reasoning and thought not in whole):
        return True
    # What stands before the answer may be there only while the turn is the last one.
    before = whole.partition(answer)[0]
    return before not in (opening, as_last.partition(answer)[0]) and not tool_result


def drops_tool_calls(renderer: TemplateRenderer, family: Family | None) -> bool:
    """Whether the template leaves tool calls out of what it writes, without a word."""
    argument = renderer.sentinel()
    call = _call(family, 0)
    history = [{"role": "user", "content": "u"}, _assistant_turn([call], argument), _result(call)]
    try:
        return argument not in renderer.render(history, [_TOOL], add_generation_prompt=True)
    except ChatTemplateError:
        return False  # it says so itself


def prefix_arguments(renderer: TemplateRenderer) -> str:
    """The template arguments that change how history is rendered, as JSON; others touch only the generation prompt."""
    call = _call(None, 0)
    plain: list[ChatMessage] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "v"},
    ]
    probes: list[tuple[list[ChatMessage], Tools]] = [
        (plain, None),
        ([*plain, {**_assistant_turn([call], "b"), "reasoning_content": "r"}, _result(call)], [_TOOL]),
    ]

    def render(probe: tuple[list[ChatMessage], Tools], arguments: Mapping[str, Any]) -> str | None:
        try:
            return renderer.render(*probe, add_generation_prompt=False, arguments=arguments)
        except ChatTemplateError:
            return None

    def changes(name: str) -> bool:
        alone = {name: renderer.arguments[name]}
        others = {other: value for other, value in renderer.arguments.items() if other != name}
        # Some arguments matter only beside others.
        pairs = [(render(probe, alone), render(probe, {})) for probe in probes]
        pairs += [(render(probe, renderer.arguments), render(probe, others)) for probe in probes]
        # An argument that no probe can be rendered with, or without, may change anything.
        return any(with_it != without for with_it, without in pairs) or pairs[0] == (None, None)

    relevant = {name: value for name, value in renderer.arguments.items() if changes(name)}
    return json.dumps(relevant, sort_keys=True, default=repr)
