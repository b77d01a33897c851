"""What a chat template does with history, reasoning, tool calls and arguments, found out by rendering with it.

Pure functions over a `TemplateRenderer`, each with a small conversation of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..families import Family, numbered_function
from ..messages import ChatMessage
from .forms import TemplateForms, TextBesideCalls
from .proofs import PROBE_TOOL, assistant_turn, probe_call, probe_result
from .renderer import ChatTemplateError, TemplateRenderer, Tools


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
    has_marks = family is not None and family.reasoning is not None
    # Marks that were put around reasoning only so that it is shown are no proof of what closes it.
    forms = renderer.forms if has_marks else replace(renderer.forms, reasoning_marks=None)
    try:
        text = renderer.render(exchange, add_generation_prompt=False, forms=forms)
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
    call = probe_call(None, 0)
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


def left_out(renderer: TemplateRenderer, family: Family | None) -> frozenset[str]:
    """What the template leaves out of its text without a word: "system prompt", "tool calls", "tool results"."""
    system, argument, result = (renderer.sentinel() for _ in range(3))
    call = probe_call(family, 0)
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
    call = probe_call(None, 0)
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


def find_forms(renderer: TemplateRenderer, family: Family | None) -> TemplateForms:
    """The forms in which a template takes what an assistant's turn holds.

    The first form in which a part is not left out is taken. Reasoning that is gone in every form is what the template
    leaves out by a rule of its own; text beside tool calls that is gone in every form is "left out".
    """
    earlier, call = probe_call(family, 0), probe_call(family, 5)

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
        marked = replace(forms, reasoning_marks=_reasoning_marks(family))
        forms = marked if shows_reasoning(marked) else forms
    if shown(forms, "call"):
        forms = replace(forms, text_beside_calls=_text_beside_calls(forms, shown))
    return replace(forms, numbers_calls=_numbers_calls(renderer, forms, call))


def _reasoning_marks(family: Family | None) -> tuple[str, str]:
    marks = family.reasoning if family is not None else None
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
