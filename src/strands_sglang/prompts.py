"""From the place where a call belongs to the prompt tokens that it adds.

A call that extends a recorded turn adds what the chat template puts behind that turn. Where that cannot be proven, or
the user wants the template's own form of history, the call opens a new sequence from a full render instead, and its
place says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from strands.types.content import Messages
from strands.types.tools import ToolSpec

from .chat_template import ChatTemplate, Prompt, UnprovenContinuationError
from .images import ImageProcessor
from .messages import ChatMessage, pictures_of, to_chat_messages, to_chat_tools
from .recording import Place
from .trajectory import Trajectory
from .turns import Turn


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
    tools = to_chat_tools(tool_specs)
    names = names or {}

    def call_id(tool_use_id: str, name: str, number: int) -> str:
        return trajectory.call_id(tool_use_id) or template.call_id(tool_use_id, name, number)

    def sampled_name(tool_use_id: str) -> str | None:
        return trajectory.sampled_name(tool_use_id) or names.get(tool_use_id)

    turn = place.turn
    if turn is not None:
        known = len(messages) - len(place.new_messages)
        # One walk over what is known: which kinds of blocks it holds.
        blocks = Counter(kind for message in messages[:known] for block in message["content"] for kind in block)
        new = to_chat_messages(
            place.new_messages,
            known_calls=turn.tool_calls,
            result_notice=trajectory.result_notice,
            call_id=call_id,
            sampled_name=sampled_name,
            calls_before=blocks["toolUse"],
            first=known,
            images=images is not None,
        )
        try:
            if images is not None and images.numbered and pictures_of(new):
                raise UnprovenContinuationError("the chat template numbers the images of a conversation")
            if not keep_history:
                _refuse_rewritten_history(template, turn, new)
            prompt = template.continuation(
                turn.output_ids,
                turn.generation.stop_token_id if turn.generation is not None else None,
                turn.tool_calls,
                new,
                tools,
                has_system=system is not None,
                had_tool_results=blocks["toolResult"] > 0,
                ends_in_reasoning=turn.ends_in_reasoning,
            )
        except UnprovenContinuationError as error:
            place = Place(None, messages, f"opens a sequence: {error}")
        else:
            if prompt.kept is not None:
                place = replace(place, kept=prompt.kept, reason=f"forks inside call {turn.index}: {prompt.note}")
            return place, prompt

    chat = to_chat_messages(
        messages,
        result_notice=trajectory.result_notice,
        call_id=call_id,
        sampled_name=sampled_name,
        images=images is not None,
    )
    if system is not None:
        chat.insert(0, {"role": "system", "content": system})
    return place, template.opening(chat, tools)


def _refuse_rewritten_history(template: ChatTemplate, turn: Turn, new: list[ChatMessage]) -> None:
    reasoning = any(earlier.has_reasoning for earlier in turn.path())
    for role, tool_result in (("user", False), ("tool", True)):
        follows = any(message["role"] == role for message in new)
        if follows and template.rewrites_history(tool_result=tool_result, reasoning=reasoning):
            raise UnprovenContinuationError(f"the chat template writes earlier turns anew behind a {role} message")
