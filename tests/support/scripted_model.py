"""A Strands model in memory that answers with what it was told to, for tests that need no server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Iterable
from typing import Any

from strands.models import Model
from strands.types.content import Messages
from strands.types.streaming import StreamEvent


def tool_use(identifier: str, name: str = "echo", **arguments: Any) -> dict[str, Any]:
    """One tool call of a scripted answer."""
    return {"toolUseId": identifier, "name": name, "input": arguments}


class ScriptedModel(Model):
    """Answers the calls of an agent one after the other.

    Attributes:
        answers: What is still to be answered: a text, a list of tool calls, or an exception to raise.
        calls: The messages of every call so far.
    """

    def __init__(self, answers: Iterable[str | list[dict[str, Any]] | Exception]) -> None:
        self.answers = list(answers)
        self.calls: list[Messages] = []

    def update_config(self, **model_config: Any) -> None:
        pass

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Messages, *args: Any, **kwargs: Any) -> AsyncIterable[StreamEvent]:  # type: ignore[override]
        self.calls.append(messages)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(answer, str):
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": answer}}}
            yield {"contentBlockStop": {}}
        else:
            for use in answer:
                start = {"toolUseId": use["toolUseId"], "name": use["name"]}
                yield {"contentBlockStart": {"start": {"toolUse": start}}}  # type: ignore[typeddict-item]
                yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(use["input"])}}}}
                yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(answer, str) else "tool_use"}}
        yield {
            "metadata": {
                "usage": {"inputTokens": 1, "outputTokens": 1, "totalTokens": 2},
                "metrics": {"latencyMs": 1},
            }
        }
