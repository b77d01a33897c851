"""Agents for tests: Strands agents as a rollout uses them, and tools that note what was run."""

from __future__ import annotations

import json
from typing import Any

from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager

from strands_sglang import SGLangModel
from strands_sglang.tool_parsers import ToolParser, ToolParseResult


def call(name: str = "calculator", **arguments: Any) -> str:
    """A tool call as a model writes it in Hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_tools() -> tuple[list[Any], list[str]]:
    """A calculator and a tool that always fails, and the list in which they note what was run."""
    ran: list[str] = []

    @tool
    def calculator(expression: str) -> str:
        """Compute a product.

        Args:
            expression: Such as "2 * 3".
        """
        ran.append(expression)
        left, right = expression.split("*")
        return str(int(left) * int(right))

    @tool
    def broken(reason: str) -> str:
        """Fail.

        Args:
            reason: Why.
        """
        ran.append(reason)
        raise RuntimeError(reason)

    return [calculator, broken], ran


def raise_once(agent: Agent, event_type: type[Any]) -> None:
    """Make the agent's hooks raise `ZeroDivisionError` at the first event of a kind."""
    raised: list[Any] = []

    def raise_at_first(event: Any) -> None:
        if not raised:
            raised.append(event)
            raise ZeroDivisionError("in a hook")

    agent.add_hook(raise_at_first, event_type)


def _hooks_of(model: Any) -> list[Any]:
    """The hooks of a model, of the one behind a view, and of those behind a router."""
    models = [getattr(one, "model", one) for one in getattr(model, "models", [model])]
    return [one.hooks for one in models if isinstance(one, SGLangModel)]


LISTENING = False
"""Whether agents get their model's hooks; a fixture sets it."""


def make_agent(model: SGLangModel, tools: list[Any] | None = None, **kwargs: Any) -> Agent:
    """An agent without printing, without history management and without hidden retries."""
    if LISTENING:
        kwargs["hooks"] = [*kwargs.get("hooks", ()), *_hooks_of(model)]
    defaults: dict[str, Any] = {
        "system_prompt": "Be brief.",
        "callback_handler": None,
        "conversation_manager": NullConversationManager(),
        "retry_strategy": None,
    }
    return Agent(model=model, tools=tools or [], **{**defaults, **kwargs})


class EveryAnswerCallsATool(ToolParser):
    """Takes what was sampled for a tool call, a number of times: a model that cannot call tools drives a tool loop."""

    def __init__(self, turns: int) -> None:
        """Take the next answers for calls."""
        super().__init__()
        self.turns = turns

    def parse(self, text: str) -> list[ToolParseResult]:
        """One call of the calculator, until enough were made."""
        self.turns -= 1
        if self.turns < 0:
            return []
        return [ToolParseResult(id=f"call_{self.turns}", name="calculator", input={"expression": f"{self.turns} * 7"})]
