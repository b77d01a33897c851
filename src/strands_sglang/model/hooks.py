"""Hooks by which a recording knows what became of an answer, where it would have to infer it from later calls.

Strands tells hooks when a model call begins and ends, whether it is repeated, and which message comes into the agent's
history. An answer that does not come into it was thrown away; one that another message stands for was replaced, or kept
in another form. Tool calls that did not parse get the provider's own error text as their result, so the history holds
what the model reads.
"""

from __future__ import annotations

from typing import Any

from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AgentInitializedEvent,
    BeforeModelCallEvent,
    HookOrder,
    HookProvider,
    HookRegistry,
    MessageAddedEvent,
)

from ..messages import is_unknown_tool, message_digest
from ..trajectory.episodes import Episodes, begin_call, end_call, known_agent


class RecordingHooks(HookProvider):
    """What a model listens to: `Agent(model=model, hooks=[model.hooks])`. It serves any number of agents."""

    def __init__(self, model: Any, episodes: Episodes) -> None:
        """Listen for a model.

        Args:
            model: The model.
            episodes: Its trajectories.
        """
        self._model = model
        self._episodes = episodes

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register the callbacks: before other hooks, and where these may have a call repeated, after them."""
        first, last = HookOrder.SDK_FIRST, HookOrder.SDK_LAST
        registry.add_callback(AgentInitializedEvent, self._made, order=first)
        registry.add_callback(BeforeModelCallEvent, self._asks, order=first)
        registry.add_callback(AfterModelCallEvent, self._answered, order=last)
        registry.add_callback(MessageAddedEvent, self._added, order=first)
        registry.add_callback(AfterToolCallEvent, self._ran_tool, order=first)
        registry.add_callback(AfterInvocationEvent, self._ended, order=last)

    def _made(self, event: AgentInitializedEvent) -> None:
        self._episodes.adopt(known_agent(event.agent))

    def _asks(self, event: BeforeModelCallEvent) -> None:
        agent = known_agent(event.agent)
        if event.agent.model is self._model:
            self._episodes.expect(agent)
        for call in list(agent.calls):
            is_of_this = call.invocation_state is event.invocation_state
            if call.is_over and (is_of_this or call.message is not None):
                call.close("the agent asked again without it")
        begin_call(agent, event.invocation_state)

    def _answered(self, event: AfterModelCallEvent) -> None:
        call = end_call(known_agent(event.agent), event.invocation_state)
        if call is None:
            return
        if event.exception is not None:
            call.close(f"the call failed behind it: {type(event.exception).__name__}")
        elif event.retry:
            call.close("a hook had the call repeated")

    def _added(self, event: MessageAddedEvent) -> None:
        agent, message = known_agent(event.agent), event.message
        if message["role"] != "assistant":
            return
        waiting = [call for call in agent.calls if call.is_over and call.message is None]
        if waiting:
            digest = message_digest(message)
            fitting = [call for call in waiting if any(turn.answer_digest == digest for turn in call.answers)]
            call = (fitting or waiting)[0]
            call.message, call.position = message, len(event.agent.messages) - 1

    def _ran_tool(self, event: AfterToolCallEvent) -> None:
        trajectory = known_agent(event.agent).trajectory
        recorded = None if trajectory is None else trajectory()
        if recorded is not None and is_unknown_tool(event.result):
            notice = recorded.result_notice(event.result["toolUseId"])
            if notice is not None:
                event.result = {**event.result, "content": [{"text": notice}]}

    def _ended(self, event: AfterInvocationEvent) -> None:
        for call in list(known_agent(event.agent).calls):
            if call.invocation_state is event.invocation_state:
                call.close("the agent's invocation ended without it")
