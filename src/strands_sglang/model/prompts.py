"""From the place where a call belongs to the prompt tokens that it adds.

A call that extends a recorded turn adds what the chat template puts behind that turn. Where that cannot be proven, or
the user wants the template's own form of history, the call opens a new sequence from a full render instead, and its
place says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from strands.types.content import Messages
from strands.types.tools import ToolSpec

from ..messages import (
    NO_SYSTEM_PROMPT,
    ChatMessage,
    Conversation,
    pictures_of,
    to_chat_messages,
    to_chat_tools,
)
from ..templates.chat_template import ChatTemplate, Prompt, UnprovenContinuationError
from ..templates.images import ImageProcessor
from ..trajectory.trajectory import Place, Trajectory
from ..trajectory.turn import Turn


def next_prompt(
    template: ChatTemplate,
    trajectory: Trajectory,
    place: Place,
    messages: Messages,
    tool_specs: list[ToolSpec] | None,
    system: str | None,
    *,
    keep_history: bool = True,
    images: ImageProcessor | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[Place, Prompt]:
    """The prompt tokens of a call, and the place where it belongs after all.

    Args:
        template: Renders and encodes.
        trajectory: Knows what became of tool calls.
        place: Where the call was attached.
        messages: The whole conversation.
        tool_specs: Its tools.
        system: Its system prompt.
        keep_history: Whether the sampled tokens stay in context where the template would write them anew.
        images: What expands placeholders of images; None where images are refused.
        names: By toolUseId, names that the model wrote and Strands does not hand back, of calls that the trajectory
            does not have.

    Raises:
        UnsupportedContentError: A message holds content that cannot be rendered.
        ChatTemplateError: The template refuses the whole conversation.
    """
    source = _Source(template, trajectory, keep_history, images, names or {})
    tools = to_chat_tools(tool_specs)
    turn = place.turn
    if turn is not None:
        known = len(messages) - len(place.new_messages)
        # One walk over what is known: which kinds of blocks it holds.
        blocks = Counter(kind for message in messages[:known] for block in message["content"] for kind in block)
        try:
            prompt = source.continuation(
                turn,
                place.new_messages,
                tools,
                has_system=system is not None,
                calls_before=blocks["toolUse"],
                had_tool_results=blocks["toolResult"] > 0,
                first=known,
            )
        except UnprovenContinuationError as error:
            place = Place(None, messages, f"opens a sequence: {error}")
        else:
            if prompt.kept is not None:
                place = replace(place, kept=prompt.kept, reason=f"forks inside call {turn.index}: {prompt.note}")
            return place, prompt
    return place, source.opening(messages, tools, system)


def counted_prompt(
    template: ChatTemplate,
    trajectory: Trajectory,
    conversation: Conversation,
    messages: Messages,
    tool_specs: list[ToolSpec] | None,
    system: str | None,
    *,
    is_part: bool,
    keep_history: bool = True,
    images: ImageProcessor | None = None,
) -> tuple[int, Prompt | None]:
    """How many tokens some messages have in front of the model: what is recorded of them, and the prompt that is not.

    Nothing is recorded. The messages may be a part of a conversation, those behind an answer, as Strands counts them.

    Args:
        template: Renders and encodes.
        trajectory: What is recorded.
        conversation: The messages as fingerprints.
        messages: The messages.
        tool_specs: Their tools.
        system: Their system prompt.
        is_part: Whether a system prompt, tools and messages may stand before these.
        keep_history: As for `next_prompt`.
        images: Likewise.

    Raises:
        UnsupportedContentError: A message holds content that cannot be rendered.
        ChatTemplateError: The template refuses the messages.
        UnprovenContinuationError: The messages are a part, and what follows their turn cannot be told.
    """
    tools = to_chat_tools(tool_specs)
    found = trajectory.recorded(conversation, whatever_before=is_part)
    # Behind an answer that is not among the messages, only what they add can be told.
    source = _Source(template, trajectory, keep_history or found is None, images, {}, ahead=True)
    counted = 0
    if found is not None:
        turn, known = found
        counted = len(turn.token_ids())
        if known == len(messages):
            return counted, None
    elif is_part and not any(message["role"] == "assistant" for message in messages):
        blocks = [block for message in messages for block in message["content"]]
        answered = {block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block}
        latest, known = trajectory.latest_answered(answered), 0
        if latest is None:
            return 0, source.opening(messages, tools, system)
        turn = latest
    else:
        return 0, source.opening(messages, tools, system)
    try:
        prompt = source.continuation(
            turn,
            messages[known:],
            tools,
            has_system=turn.parts.get("system prompt") != NO_SYSTEM_PROMPT,
            calls_before=turn.calls_before + len(turn.tool_calls),
            had_tool_results=turn.calls_before > 0,
            first=known,
        )
    except UnprovenContinuationError:
        if found is None:
            raise
        return 0, source.opening(messages, tools, system)
    return counted - (0 if prompt.kept is None else len(turn.output_ids) - prompt.kept), prompt


@dataclass(frozen=True)
class _Source:
    """Makes prompts of Strands messages.

    Attributes:
        template: Renders and encodes.
        trajectory: Knows what became of tool calls.
        keep_history: As for `next_prompt`.
        images: Likewise.
        names: Likewise.
        ahead: Whether a call with the same text is to follow.
    """

    template: ChatTemplate
    trajectory: Trajectory
    keep_history: bool
    images: ImageProcessor | None
    names: Mapping[str, str]
    ahead: bool = False

    def continuation(
        self,
        turn: Turn,
        messages: Messages,
        tools: list[dict[str, Any]] | None,
        *,
        has_system: bool,
        calls_before: int,
        had_tool_results: bool,
        first: int,
    ) -> Prompt:
        """The prompt that follows a turn. Behind `messages[:first]` come the messages."""
        new = self._chat(messages, known_calls=turn.tool_calls, calls_before=calls_before, first=first)
        if self.images is not None and self.images.numbered and pictures_of(new):
            raise UnprovenContinuationError("the chat template numbers the images of a conversation")
        if not self.keep_history:
            _refuse_rewritten_history(self.template, turn, new)
        return self.template.continuation(
            turn.output_ids,
            turn.generation.stop_token_id if turn.generation is not None else None,
            turn.tool_calls,
            new,
            tools,
            has_system=has_system,
            had_tool_results=had_tool_results,
            ends_in_reasoning=turn.ends_in_reasoning,
            ahead=self.ahead,
        )

    def opening(self, messages: Messages, tools: list[dict[str, Any]] | None, system: str | None) -> Prompt:
        """The prompt of a whole conversation."""
        chat = self._chat(messages)
        if system is not None:
            chat.insert(0, {"role": "system", "content": system})
        return self.template.opening(chat, tools, ahead=self.ahead)

    def _chat(self, messages: Messages, **context: Any) -> list[ChatMessage]:
        return to_chat_messages(
            messages,
            result_notice=self.trajectory.result_notice,
            call_id=self._call_id,
            sampled_name=self._sampled_name,
            images=self.images is not None,
            **context,
        )

    def _call_id(self, tool_use_id: str, name: str, number: int) -> str:
        return self.trajectory.call_id(tool_use_id) or self.template.call_id(tool_use_id, name, number)

    def _sampled_name(self, tool_use_id: str) -> str | None:
        return self.trajectory.sampled_name(tool_use_id) or self.names.get(tool_use_id)


def _refuse_rewritten_history(template: ChatTemplate, turn: Turn, new: list[ChatMessage]) -> None:
    reasoning = any(earlier.has_reasoning for earlier in turn.path())
    for role, tool_result in (("user", False), ("tool", True)):
        follows = any(message["role"] == role for message in new)
        if follows and template.rewrites_history(tool_result=tool_result, reasoning=reasoning):
            raise UnprovenContinuationError(f"the chat template writes earlier turns anew behind a {role} message")
