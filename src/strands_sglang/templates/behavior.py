"""What a chat template does, found out by rendering small conversations with it. Functions over a `TemplateRenderer`.

The text that follows a sampled turn is found with a sentinel (`text_after_turn`); whether that text is what the whole
conversation would have there is proven on probe conversations (`prove`). The rest is what the template does with
history, reasoning, tool calls and arguments, each found with a conversation of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..families import numbered_function
from ..messages import ChatMessage
from .renderer import ChatTemplateError, TemplateForms, TemplateRenderer, TextBesideCalls, Tools

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
    calls: Sequence[Mapping[str, Any]],
    messages: Sequence[ChatMessage],
    tools: Tools,
    *,
    has_system: bool,
    after_tool_step: bool = False,
) -> TextAfterTurn:
    """What the template writes behind a turn, found without rendering that turn: a stand-in takes its place.

    Args:
        renderer: Renders.
        calls: The turn's tool calls: `{"id", "name"}` in order; none where the template does not write calls.
        messages: The chat messages behind the turn.
        tools: Tools in OpenAI form.
        has_system: Whether the conversation begins with a system message (some templates refuse one).
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
    found = _split(text, sentinel, renderer.stops)
    # Without knowing the family, a control token in between may be the true end of the turn, and what stands behind it
    # a message.
    if renderer.family is None and any(token in found.rest for token in renderer.added_tokens(special_only=True)):
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


def prove(renderer: TemplateRenderer, case: str, *, has_system: bool, has_tools: bool, shows_calls: bool) -> Proof:
    """Prove the text after a turn for one of `CASES`.

    Conversations of three lengths are rendered in full. What they have behind the turn must be what the stand-in
    conversation has there, and neither the system prompt nor the tools may come after the turn.

    Args:
        renderer: Renders.
        case: One of `CASES`.
        has_system: Whether the conversation begins with a system message.
        has_tools: Whether there are tools.
        shows_calls: Whether the template writes tool calls.
    """
    tools = [PROBE_TOOL] if has_tools else None
    count = {"tool result": 1, "several tool results": 2}.get(case, 0)
    calls = [probe_call(renderer, number) for number in range(5, 5 + count)]
    shown = calls if shows_calls else []
    new: list[ChatMessage] = [probe_result(call) for call in calls] or [{"role": "user", "content": "And then?"}]
    before: list[ChatMessage] = [{"role": "system", "content": _SYSTEM}] if has_system else []
    before.append({"role": "user", "content": "What is there?"})
    exchange = [{"role": "assistant", "content": "A thing."}, {"role": "user", "content": "Which one?"}]

    try:
        references = []
        for number in range(3):
            answer = renderer.sentinel()
            whole = renderer.render([*before, assistant_turn(shown, answer), *new], tools, add_generation_prompt=True)
            references.append(_split(whole, answer, renderer.stops))
            after = references[-1].rest + references[-1].following
            if has_system and _SYSTEM in after:
                return Proof("the chat template moves the system prompt behind the turn")
            if has_tools and _DESCRIPTION in after:
                return Proof("the chat template moves the tools behind the turn")
            before += _tool_step(probe_call(renderer, number)) if count else exchange
        plain = text_after_turn(renderer, shown, new, tools, has_system=has_system)
        if references == [plain] * 3:
            return Proof(None)
        later = text_after_turn(renderer, shown, new, tools, has_system=has_system, after_tool_step=True)
        if count and references == [plain, later, later]:
            return Proof(None, needs_tool_step=True)
    except (UnprovenContinuationError, ChatTemplateError) as error:
        return Proof(str(error))
    return Proof("what the chat template writes behind the turn depends on what came before it")


def _tool_step(call: Mapping[str, str]) -> list[ChatMessage]:
    return [assistant_turn([call], "earlier"), probe_result(call)]


def probe_call(renderer: TemplateRenderer, number: int) -> dict[str, str]:
    """A call of `PROBE_TOOL`: `{"id", "name"}`, the id in the form of the family."""
    use_id = f"call{number:05}"  # nine letters and digits, which is what the strictest templates take
    make = None if renderer.family is None else renderer.family.call_id
    return {"id": use_id if make is None else make(use_id, "look", number), "name": "look"}


def probe_result(call: Mapping[str, str]) -> ChatMessage:
    """What a probe call returned."""
    return {"role": "tool", "content": f"seen by {call['id']}", "name": call["name"], "tool_call_id": call["id"]}


# --- what it does with parts of a conversation ---


def derived_stop(renderer: TemplateRenderer) -> str | None:
    """The first control token that the template writes behind an assistant's text; None if there is none."""
    sentinel = renderer.sentinel()
    exchange = [{"role": "user", "content": "u"}, {"role": "assistant", "content": sentinel}]
    after = renderer.render(exchange, add_generation_prompt=False).rpartition(sentinel)[2]
    special = renderer.added_tokens(special_only=True)
    found = [(after.index(token), -len(token), token) for token in special if token in after]
    return min(found)[2] if found else None


def reasoning_close(renderer: TemplateRenderer) -> str | None:
    """What stands between reasoning that ends and the answer, in an assistant's turn as the template writes it.

    Where the template does not show reasoning, it is the family's mark; None if there is none. Where the turn ends with
    its reasoning, as in harmony, it is empty: the token that ends the turn closes both.
    """
    reasoning, answer = renderer.sentinel(), renderer.sentinel()
    exchange: list[ChatMessage] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": answer, "reasoning_content": reasoning},
    ]
    marks = None if renderer.family is None else renderer.family.reasoning
    # Marks that were put around reasoning only so that it is shown are no proof of what closes it.
    forms = renderer.forms if marks else replace(renderer.forms, reasoning_marks=None)
    try:
        text = renderer.render(exchange, add_generation_prompt=False, forms=forms)
    except ChatTemplateError:
        text = ""
    _, found, behind = text.partition(reasoning)
    if found and answer in behind:
        close = behind.partition(answer)[0]
    elif marks is not None:
        close = marks[1]
    else:
        return None
    return close[: min((close.index(stop) for stop in renderer.stops if stop in close), default=len(close))]


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
    call = {"id": "call00000", "name": "look"}
    turn = assistant_turn([call] if tool_result else [], answer)
    if reasoning:
        turn["reasoning_content"] = thought
    behind = probe_result(call) if tool_result else {"role": "user", "content": "v"}
    tools = [PROBE_TOOL] if tool_result else None
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


def left_out(renderer: TemplateRenderer) -> frozenset[str]:
    """What the template leaves out of its text without a word: "system prompt", "tool calls", "tool results"."""
    system, argument, result = (renderer.sentinel() for _ in range(3))
    call = probe_call(renderer, 0)
    question: ChatMessage = {"role": "user", "content": "u"}
    answered = [question, assistant_turn([call], argument), {**probe_result(call), "content": result}]
    probes: list[tuple[list[ChatMessage], Tools, dict[str, str]]] = [
        ([{"role": "system", "content": system}, question], None, {"system prompt": system}),
        (answered, [PROBE_TOOL], {"tool calls": argument, "tool results": result}),
    ]
    missing: set[str] = set()
    for messages, tools, expected in probes:
        try:
            text = renderer.render(messages, tools, add_generation_prompt=True)
        except ChatTemplateError:
            continue  # it says so itself
        missing.update(part for part, sentinel in expected.items() if sentinel not in text)
    return frozenset(missing)


def prefix_arguments(renderer: TemplateRenderer) -> str:
    """The template arguments that change how history is rendered, as JSON; others touch only the generation prompt."""
    call = {"id": "call00000", "name": "look"}
    plain: list[ChatMessage] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "v"},
    ]
    probes: list[tuple[list[ChatMessage], Tools]] = [
        (plain, None),
        ([*plain, {**assistant_turn([call], "b"), "reasoning_content": "r"}, probe_result(call)], [PROBE_TOOL]),
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


# --- forms ---

_THINK_MARKS = ("<think>\n", "\n</think>\n\n")
"""How models write `<think>`; it is also what models are taught whose family has no marks of its own."""


def find_forms(renderer: TemplateRenderer) -> TemplateForms:
    """The forms in which a template takes what an assistant's turn holds.

    The first form in which a part is not left out is taken. Reasoning that is gone in every form is what the template
    leaves out by a rule of its own; text beside tool calls that is gone in every form is "left out".
    """
    earlier, call = probe_call(renderer, 0), probe_call(renderer, 5)

    def shown(forms: TemplateForms, *parts: str, later: Sequence[ChatMessage] = ()) -> bool | None:
        """Whether the text of a turn has all these parts; None where the template refuses the turn."""
        texts = {part: renderer.sentinel() for part in parts}
        turn = assistant_turn([call], texts["call"]) if "call" in parts else {"role": "assistant", "content": ""}
        turn["content"] = texts.get("text", "")
        if "reasoning" in parts:
            turn["reasoning_content"] = texts["reasoning"]
        before: list[ChatMessage] = [{"role": "user", "content": "u"}]
        behind = later
        if "call" in parts:
            # A template can treat the first step with a call otherwise than later ones.
            before += [assistant_turn([earlier], "earlier"), probe_result(earlier)]
            behind = [probe_result(call), *later]
        try:
            text = renderer.render(
                [*before, turn, *behind],
                [PROBE_TOOL],  # always: some templates render nothing without tools
                add_generation_prompt=False,
                forms=forms,
            )
        except ChatTemplateError:
            return None
        return all(text_of_part in text for text_of_part in texts.values())

    def shows_reasoning(forms: TemplateForms) -> bool:
        return bool(shown(forms, "reasoning", "text") or shown(forms, "reasoning", "call"))

    forms = TemplateForms()
    if not shown(forms, "call") and shown(replace(forms, text_arguments=True), "call"):
        forms = replace(forms, text_arguments=True)
    if not shows_reasoning(forms):
        marked = replace(forms, reasoning_marks=_reasoning_marks(renderer))
        forms = marked if shows_reasoning(marked) else forms
    if shown(forms, "call"):
        forms = replace(forms, text_beside_calls=_text_beside_calls(forms, shown))
    return replace(forms, numbers_calls=_numbers_calls(renderer, forms, call))


def _reasoning_marks(renderer: TemplateRenderer) -> tuple[str, str]:
    marks = None if renderer.family is None else renderer.family.reasoning
    return _THINK_MARKS if marks is None or marks[0] == _THINK_MARKS[0].strip() else marks


def _text_beside_calls(forms: TemplateForms, shown: Callable[..., bool | None]) -> TextBesideCalls:
    if shown(forms, "text", "call"):
        refuses_both = shown(forms, "reasoning", "call") and shown(forms, "reasoning", "text", "call") is None
        return "in reasoning" if refuses_both else "shown"
    # Templates that want roles to alternate refuse two messages in a row only once more follows.
    later = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    return (
        "own message"
        if shown(replace(forms, text_beside_calls="own message"), "text", "call", later=later)
        else "left out"
    )


def _numbers_calls(renderer: TemplateRenderer, forms: TemplateForms, call: Mapping[str, str]) -> bool:
    history = [{"role": "user", "content": "u"}, assistant_turn([call], "argument")]
    try:
        text = renderer.render(history, [PROBE_TOOL], add_generation_prompt=False, forms=forms)
    except ChatTemplateError:
        return False
    return call["id"] not in text and numbered_function(call["id"], call["name"], 0) in text
