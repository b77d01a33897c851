"""`SGLangModel` behind one of Strands' scripted models: that one says what is answered, and all the rest is real.

The stand-in is asked first, with just the arguments that the model got. What it streams becomes the text that a
scripted server samples, so the answer takes the whole way: prompt, request, record, parser, stream events. What no such
server could say (a guardrail's redaction, another provider's citations) is passed on as it came.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import build_chatml_tokenizer

_FINISH_REASONS = {"end_turn": "stop", "tool_use": "stop", "max_tokens": "length"}

_next: ContextVar[ScriptedAnswer | None] = ContextVar("next", default=None)
"""What the running call is answered with: some tests ask one model from two threads at once."""


class BrainModel(SGLangModel):
    """An `SGLangModel` whose answers another model makes up.

    Attributes:
        brain: That one.
    """

    def __init__(self, brain: Any) -> None:
        self.brain = brain
        self._calls = _CallIds()
        self._tokenizer = _tokenizer()
        self._server = ScriptedSGLang(self._tokenizer, self._sample, context_length=10_000_000)
        super().__init__(tokenizer=self._tokenizer, client=self._server.client())

    def _sample(self, request: Any) -> ScriptedAnswer:
        answer = _next.get()
        assert answer is not None, "a request that no call of the stand-in was made for"
        return answer

    async def stream(  # type: ignore[override]
        self, messages: Any, tool_specs: Any = None, system_prompt: Any = None, tool_choice: Any = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        kwargs["tool_choice"] = tool_choice
        signal = kwargs.get("cancel_signal")
        cancelled = signal is not None and signal.is_set()  # then nothing is asked, and no answer is used up
        asked = self.brain.stream(messages, tool_specs, system_prompt, **kwargs)
        events = [] if cancelled else [event async for event in asked]
        said = _Said.of(events)
        if said is None or not (messages or system_prompt):  # chat templates refuse to render nothing
            for event in events:
                yield event
            return
        _next.set(ScriptedAnswer(said.text, finish_reason=_FINISH_REASONS[said.stop_reason]))
        ids = iter(said.call_ids)
        async for event in super().stream(self._calls.as_sampled(messages), tool_specs, system_prompt, **kwargs):
            start = event.get("contentBlockStart", {}).get("start", {})
            if "toolUse" in start:
                shown = next(ids)
                self._calls.note(shown, start["toolUse"]["toolUseId"])
                event = {"contentBlockStart": {"start": {"toolUse": {**start["toolUse"], "toolUseId": shown}}}}
            if "metadata" not in event:
                yield event
        for metadata in said.metadata:
            yield metadata

    async def structured_output(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:  # type: ignore[override]
        async for event in self.brain.structured_output(*args, **kwargs):
            yield event


class CloudModel(SGLangModel):
    """In the place of a cloud's model: says what is scripted for the running test, and then "Hello.".

    Attributes:
        answers: What is left to be said in the running test, by all its models.
    """

    answers: ClassVar[list[str]] = []

    def __init__(self, *args: Any, max_tokens: int | None = None, **kwargs: Any) -> None:
        server = ScriptedSGLang(_tokenizer(), lambda request: self.answers.pop(0) if self.answers else "Hello.")
        limits = {} if max_tokens is None else {"max_new_tokens": max_tokens}
        super().__init__(tokenizer=_tokenizer(), client=server.client(), sampling_params=limits)


@dataclass
class _Said:
    """What a stand-in streamed, in the words of a model of the Hermes format."""

    text: str = ""
    call_ids: list[str] = field(default_factory=list)
    stop_reason: str = "end_turn"
    metadata: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, events: list[Any]) -> _Said | None:
        """The same as a text; None if it is nothing that a model could have sampled."""
        said, kinds = cls(), [""]
        use: dict[str, Any] | None = None
        for event in events:
            if not isinstance(event, dict):
                return None
            if "metadata" in event:
                said.metadata.append(event)
            elif "messageStop" in event:
                said.stop_reason = event["messageStop"].get("stopReason", "")
            elif "contentBlockStart" in event:
                use = event["contentBlockStart"].get("start", {}).get("toolUse")
                use = None if use is None else {**use, "input": ""}
            elif "contentBlockDelta" in event:
                delta = event["contentBlockDelta"]["delta"]
                if set(delta) == {"text"} and use is None:
                    kinds.append("text")
                    said.text += delta["text"]
                elif set(delta) == {"toolUse"} and use is not None:
                    use["input"] += delta["toolUse"].get("input", "")
                elif set(delta) == {"reasoningContent"} and set(delta["reasoningContent"]) == {"text"}:
                    if kinds[-1] not in ("", "reasoning"):
                        return None
                    kinds.append("reasoning")
                    said.text = said.text.removesuffix("</think>") if said.text else "<think>"
                    said.text += delta["reasoningContent"]["text"] + "</think>"
                else:
                    return None
            elif "contentBlockStop" in event:
                if use is not None:
                    if not said._call(use):
                        return None
                    kinds.append("call")
                use = None
            elif "messageStart" not in event:
                return None
        in_order = kinds == sorted(kinds, key=["", "reasoning", "text", "call"].index)
        return said if in_order and said.stop_reason in _FINISH_REASONS and use is None else None

    def _call(self, use: dict[str, Any]) -> bool:
        try:
            arguments = json.loads(use["input"] or "{}")
            self.call_ids.append(use["toolUseId"])
            call = json.dumps({"name": use["name"], "arguments": arguments})
        except (ValueError, KeyError, TypeError):
            return False
        self.text += f"<tool_call>\n{call}\n</tool_call>"
        return isinstance(arguments, dict) and bool(use["name"]) and bool(use["toolUseId"])


class _CallIds:
    """The ids of a script beside those of the model, which are unique; scripts use some several times."""

    def __init__(self) -> None:
        self._sampled: dict[str, list[str]] = {}

    def note(self, shown: str, sampled: str) -> None:
        """Keep which id stands for which."""
        self._sampled.setdefault(shown, []).append(sampled)

    def as_sampled(self, messages: Any) -> Any:
        """Messages with the model's own ids: of an id's calls the first, the second, ... in their order."""
        seen: dict[str, int] = {}

        def own(shown: str, *, begins: bool) -> str:
            if begins:
                seen[shown] = seen.get(shown, -1) + 1
            known = self._sampled.get(shown, [])
            return known[min(seen.get(shown, 0), len(known) - 1)] if known else shown

        def block(given: Any) -> Any:
            for kind in ("toolUse", "toolResult"):
                if isinstance(given, dict) and kind in given:
                    inner = given[kind]
                    return {kind: {**inner, "toolUseId": own(inner["toolUseId"], begins=kind == "toolUse")}}
            return given

        return [{**message, "content": [block(one) for one in message["content"]]} for message in messages]


@cache
def _tokenizer() -> Any:
    return build_chatml_tokenizer()
