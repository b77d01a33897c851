"""Plays a random episode: keeps agents' histories as Strands does, has them edited, and makes the model's calls."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from strands_sglang import SGLangAbortedError, SGLangClientError, SGLangModel, Trajectory
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang

from .history_edits import Marks, Message, Someone, apply_edit
from .history_log import Call, Notebook
from .history_plans import AGENTS, NOBODY, Plan, Step

STOP_STRING = "Qz"
REWRITTEN = "The selected tool {}'s tool use was incomplete due to maximum token limits being reached."
"""What Strands puts where a call stood in an answer that was cut off."""


class Verdict(BaseModel):
    """What a structured call produces."""

    verdict: str


class _Running:
    """A step whose call waits for its answer."""

    def __init__(self, who: int) -> None:
        self.who = who
        self._asked, self._may_go_on = asyncio.Event(), asyncio.Event()

    async def start(self, step: Coroutine[Any, Any, None]) -> None:
        """Run the step until its request is at the server, or to its end if it makes none that is held."""
        self._step = asyncio.ensure_future(step)
        self._step.add_done_callback(lambda step: self._asked.set())
        await self._asked.wait()

    async def end(self) -> None:
        """Run it to its end."""
        self._may_go_on.set()
        await self._step

    def held(self, answer: Any) -> Any:
        """An answer that comes when it may."""

        async def later(request: Any) -> Any:
            self._asked.set()
            await self._may_go_on.wait()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return later


def as_sent(messages: list[Message]) -> list[Message]:
    """The copy of a history that Strands hands to the model: blank texts of the assistant are replaced or removed."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if message["role"] != "assistant":
            continue
        content = message["content"]
        blank = [block for block in content if "text" in block and not block["text"].strip()]
        if any("toolUse" in block for block in content):
            message["content"] = [block for block in content if block not in blank]
        else:
            for block in blank:
                block["text"] = "[blank text]"
            message["content"] = content or [{"text": "[blank text]"}]
    return messages


class Player:
    """One episode on a model."""

    def __init__(self, server: ScriptedSGLang, answer: Callable[[Any], None], model: SGLangModel, folder: Path) -> None:
        """Start with empty histories.

        Args:
            server: The server, its log empty.
            answer: Sets what the server answers next; an exception is raised there.
            model: A model on it, with an empty trajectory.
            folder: Where trajectories are stored in between.
        """
        self.server, self.model, self._script, self._folder = server, model, answer, folder
        self._marks = Marks()
        self.notebook = Notebook()
        self.everybody: list[Someone] = []
        self._running: _Running | None = None

    async def play(self, plan: Plan) -> None:
        """Play a plan; what was asked and answered is in the notebook."""
        system, tools = self._marks.system(), self._marks.tools(0)
        for number in range(AGENTS + 1):
            is_agent = plan.has_agents and number != NOBODY
            name, state = (f"agent {number}", {}) if is_agent else (None, None)
            self.everybody.append(Someone(name, system, tools, state=state))
        try:
            for step in plan.steps:
                if self._running is not None and (step.stored or step.who == self._running.who):
                    await self._let_go()
                if step.stored:
                    self.store()
                if step.held and self._running is None:
                    self._running = _Running(step.who)
                    await self._running.start(self._step(step, self._running))
                else:
                    await self._step(step)
                    await self._let_go()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        """Let the step that is held go on to its end."""
        running, self._running = self._running, None
        if running is not None:
            await running.end()

    def store(self) -> None:
        """Go on with what a file gives back of the trajectory."""
        path = self._folder / "trajectory.safetensors"
        self.model.trajectory.save(path)
        self.model.trajectory = Trajectory.load(path)

    # --- a step ---

    async def _step(self, step: Step, running: _Running | None = None) -> None:
        someone = self.everybody[step.who]
        for edit in step.edits:
            apply_edit(edit, someone, self.everybody, self._marks, self.notebook.notices)
        answer, end = step.answer, step.end
        if step.arrives == "same question" and self._take_question(someone, step.number):
            answer = "twin"
        else:
            someone.messages += self._arrivals(someone, step)
        messages = as_sent(someone.messages)
        if step.injected:
            messages[-1]["content"].append(self._marks.text())
        if running is None and step.attempt == "thrown away":
            await self._call(someone, messages, step, answer="text", fate="thrown away")
        elif running is None and step.attempt != "none":
            await self._call(someone, messages, step, answer="text", end=step.attempt)
        if answer == "structured":
            message = await self._structured(someone, messages)
        else:
            if step.fate == "cancelled":  # what it would have been has to be known without the stream's end
                answer, end = "text", "stop" if end in ("cut", "stop string") else end
            message = await self._call(someone, messages, step, answer=answer, end=end, fate=step.fate, running=running)
        if message is None or step.fate == "thrown away":
            return
        if step.fate == "cancelled":
            message = {"role": "assistant", "content": [{"text": f"Cancelled by user {self._marks.mark()}"}]}
        elif step.fate == "edited":
            message["content"].append(self._marks.text())
        someone.messages.append(message)

    def _take_question(self, someone: Someone, which: int) -> bool:
        """Ask what somebody else was asked last; False if nobody was."""
        others = [other for other in self.everybody if other is not someone and other.messages]
        others = [other for other in others if other.messages[-1]["role"] == "assistant" and len(other.messages) > 1]
        if not others:
            return False
        other = others[which % len(others)]
        someone.system, someone.tools = other.system, other.tools
        someone.messages = copy.deepcopy(other.messages[:-1])
        return True

    def _arrivals(self, someone: Someone, step: Step) -> list[Message]:
        """The new messages; there is always at least one message in the end."""
        arrives = step.arrives
        messages = someone.messages
        if arrives == "again" and messages:
            return []
        if arrives == "echo":  # what somebody else was asked at this point
            others = [other.messages for other in self.everybody if other is not someone]
            said = [m[len(messages)] for m in others if len(m) > len(messages) and m[len(messages)]["role"] == "user"]
            if said:
                return [copy.deepcopy(said[step.number % len(said)])]
        uses = [block["toolUse"] for block in messages[-1]["content"] if "toolUse" in block] if messages else []
        if arrives == "foreign answer":
            return [
                {"role": "assistant", "content": [self._marks.text()]},
                {"role": "user", "content": [self._marks.text()]},
            ]
        content: list[dict[str, Any]] = []
        if arrives != "dangling":
            content = [self._result(use["toolUseId"]) for use in uses]
            if step.number % 2:
                content.reverse()  # Strands puts the results of some calls out of order
        if not content or step.number % 4 == 0:
            content.append(self._marks.text())
        arrived = [{"role": "user", "content": content}]
        return [*arrived, {"role": "user", "content": [self._marks.text()]}] if arrives == "two" else arrived

    def _result(self, tool_use_id: str) -> dict[str, Any]:
        text = "Unknown tool" if tool_use_id in self.notebook.notices else f"found {self._marks.mark()}"
        return {"toolResult": {"toolUseId": tool_use_id, "status": "success", "content": [{"text": text}]}}

    # --- calls ---

    async def _call(
        self,
        someone: Someone,
        messages: list[Message],
        step: Step,
        *,
        answer: str,
        end: str = "stop",
        fate: str = "kept",
        running: _Running | None = None,
    ) -> Message | None:
        """Make a call, note it, and return the message that Strands would make of the answer; None without one."""
        sampled, written = self._sampled(someone, messages, step, answer, end)
        self._script(sampled if running is None else running.held(sampled))
        state = copy.deepcopy(someone.state)
        arguments = {} if state is None else {"model_state": state}
        tools = copy.deepcopy(someone.tools) or None
        stream = self.model.stream(copy.deepcopy(messages), tools, someone.system, **arguments)
        call = Call(someone.name, someone.system, json.dumps(someone.tools), messages, fate == "thrown away")
        self.notebook.begin(call)
        message = None
        try:
            if fate == "cancelled":
                await stream.__anext__()
                await stream.aclose()
                call.answer = message = {"role": "assistant", "content": [{"text": written[0]}]}
                if someone.state == {}:  # its id is lost with the state, so for the model it is somebody new
                    someone.name = f"{someone.name} again"
            else:
                message, was_cut = await _message(stream)
                someone.state = state
                call.answer = self._given_back(message, written, was_cut)
        except (SGLangClientError, SGLangAbortedError):
            pass
        self.notebook.end(call, self.server)
        return message

    def _given_back(self, message: Message, written: list[str], was_cut: bool) -> Message | None:
        """The answer as the model gets it back; None if it cannot, because Strands rewrites it in place."""
        uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        for use, raw in zip(uses, written[1:], strict=False):
            if use["name"] == "unknown_tool":
                self.notebook.notices[use["toolUseId"]] = raw
        if uses and was_cut:
            message["content"] = [
                {"text": REWRITTEN.format(block["toolUse"]["name"])} if "toolUse" in block else block
                for block in message["content"]
            ]
            return None
        return as_sent([message])[0]

    async def _structured(self, someone: Someone, messages: list[Message]) -> Message:
        text = json.dumps({"verdict": self._marks.mark()})
        self._script(text)
        call = Call(None, someone.system, "[]", messages, is_structured=True)
        self.notebook.begin(call)
        async for _ in self.model.structured_output(Verdict, copy.deepcopy(messages), someone.system):
            pass
        message: Message = {"role": "assistant", "content": [{"text": text}]}
        call.answer = copy.deepcopy(message)
        self.notebook.end(call, self.server)
        return message

    def _sampled(
        self, someone: Someone, messages: list[Message], step: Step, answer: str, end: str
    ) -> tuple[Any, list[str]]:
        """What the server answers, and the texts in it: the spoken one, then the mark of each call."""
        if end == "error":
            return RuntimeError("planned"), []
        marks = [self._marks.mark(), self._marks.mark()]
        spoken = f"well {self._marks.mark()}"
        thought = f"<think>\nperhaps {self._marks.mark()}\n</think>\n\n"
        calls = [f'<tool_call>\n{{"name": "f0",  "arguments": {{"q": "{mark}"}}}}\n</tool_call>' for mark in marks]
        texts = {
            "text": spoken,
            "call": f"{spoken}\n{calls[0]}",
            "two calls": calls[0] + calls[1],
            "broken call": calls[0].replace("}}", "}") + calls[1],
            "reasoning": thought + spoken,
            "reasoning and call": thought + calls[0],
            "only reasoning": thought,
            "blank": ("", " ", "\n\n")[step.number % 3],
            "respelt": spoken,
            "twin": self.notebook.twin_of(someone.system, json.dumps(someone.tools), messages) or spoken,
        }
        text = texts[answer]
        if end == "cut" and answer == "call":
            text = text[: -len('"}}\n</tool_call>')]  # before its end mark
        elif end == "cut" and answer == "reasoning":
            text = thought[: -len("\n</think>\n\n")]
        elif end == "stop string" and answer == "text":
            text += f" {STOP_STRING} never seen"
        elif end == "abort" and step.number % 3 == 0:
            text = ""
        ids = self._encoded(text, step.number if answer in ("respelt", "twin") else 0)
        finish = {"cut": "length", "abort": "abort"}.get(end, "stop")
        stop = self.model.tokenizer.convert_tokens_to_ids("<|endoftext|>") if end == "other stop" else None
        sampled = ScriptedAnswer(token_ids=ids, finish_reason=finish, stop_token_id=stop)  # type: ignore[arg-type]
        return sampled, [spoken, *marks]

    def _encoded(self, text: str, letters: int) -> list[int]:
        """Ids of a text, its first letters one by one: ids that encoding the text would not give."""
        encode = self.model.tokenizer.encode
        return [*(token_id for letter in text[:letters] for token_id in encode(letter)), *encode(text[letters:])]


async def _message(stream: Any) -> tuple[Message, bool]:
    """The message that Strands makes of a stream, and whether the answer was cut off."""
    content: list[dict[str, Any]] = []
    was_cut = False
    async for event in stream:
        if "contentBlockStart" in event:
            start = event["contentBlockStart"]["start"]
            content.append({"toolUse": {**start["toolUse"]}} if "toolUse" in start else {})
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            if "toolUse" in delta:
                content[-1]["toolUse"]["input"] = json.loads(delta["toolUse"]["input"])
            elif "reasoningContent" in delta:
                content[-1] = {"reasoningContent": {"reasoningText": {"text": delta["reasoningContent"]["text"]}}}
            else:
                content[-1] = {"text": delta["text"]}
        elif "messageStop" in event:
            was_cut = event["messageStop"]["stopReason"] == "max_tokens"
    return {"role": "assistant", "content": content}, was_cut
