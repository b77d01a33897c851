"""Judges what a model sent and recorded by what the server received and returned, and by what Strands handed over.

Nothing here asks the library how conversations compare: a message stands in a prompt if its text stands in the decoded
ids, a call had to extend an earlier one if its messages begin with that call's messages and that call's answer, and a
token was sampled if the server's log says so.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncGenerator, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any

from strands_sglang import SGLangModel, TokenManager, Trajectory, Turn
from strands_sglang.testing import ScriptedRequest, ScriptedSGLang
from strands_sglang.tool_parsers import ToolParseResult

_BLANK = "[blank text]"

Log = dict[int, tuple[list[int], list[int], list[float]]]
"""By the request's index: prompt ids, sampled ids, and their logprobs."""

_call: ContextVar[int | None] = ContextVar("call", default=None)


@dataclass
class Handed:
    """One model call as Strands made it.

    Attributes:
        messages: Its messages.
        before: What stands before them: the system prompt and the tools.
        asked: When it was made, in the order of all calls and answers.
        answered: When its answer began to come; None until then.
        answer: The content blocks that were given back.
    """

    messages: list[dict[str, Any]]
    before: tuple[str | None, Any]
    asked: int
    answered: int | None = None
    answer: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answer_handed_back(self) -> dict[str, Any]:
        """The answer as Strands shows it to the model at the next call."""
        blocks = self.answer
        blank = [block for block in blocks if "text" in block and not block["text"].strip()]
        if any("toolUse" in block for block in blocks):
            blocks = [block for block in blocks if block not in blank]
        elif blank or not blocks:
            blocks = [{"text": _BLANK} if block in blank else block for block in blocks] or [{"text": _BLANK}]
        return {"role": "assistant", "content": [_under_a_valid_name(block) for block in blocks]}


def _under_a_valid_name(block: dict[str, Any]) -> dict[str, Any]:
    use = block.get("toolUse")
    if use is None or (re.match(r"[a-zA-Z0-9_-]+$", use["name"]) and len(use["name"]) <= 64):
        return block
    return {"toolUse": {**use, "name": "INVALID_TOOL_NAME"}}


class Judge:
    """Watches a model on a scripted server.

    Attributes:
        server: The server.
        model: The model.
        handed: The calls in the order in which they came.
        told: Whether agents have the model's hooks.
    """

    told = False

    def __init__(self, server: ScriptedSGLang, model: SGLangModel) -> None:
        self.server = server
        self.model = model
        self.handed: list[Handed] = []
        self._clock = count()
        self._watch_calls()
        self._watch_requests()

    def _watch_calls(self) -> None:
        model: Any = self.model
        stream, structured_output = model.stream, model.structured_output

        async def watched(
            messages: Any, tool_specs: Any = None, system_prompt: Any = None, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            handed = self._note(messages, tool_specs, system_prompt)
            async for event in stream(messages, tool_specs, system_prompt, **kwargs):
                self._read(handed, event)
                yield event

        async def watched_output(
            output_model: Any, prompt: Any, system_prompt: Any = None, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            handed = self._note(prompt, None, system_prompt)
            async for event in structured_output(output_model, prompt, system_prompt, **kwargs):
                handed.answered = next(self._clock)
                yield event

        model.stream, model.structured_output = watched, watched_output

    def _note(self, messages: Any, tool_specs: Any, system_prompt: Any) -> Handed:
        before = (system_prompt, copy.deepcopy(tool_specs) or None)
        seen = [{"role": message["role"], "content": copy.deepcopy(message["content"])} for message in messages]
        handed = Handed(seen, before, next(self._clock))
        _call.set(len(self.handed))
        self.handed.append(handed)
        return handed

    def _read(self, handed: Handed, event: Any) -> None:
        if "messageStart" in event:
            handed.answered = next(self._clock)
        elif "contentBlockStart" in event:
            handed.answer.append(copy.deepcopy(event["contentBlockStart"]["start"]))
        elif "contentBlockDelta" in event:
            delta, block = event["contentBlockDelta"]["delta"], handed.answer[-1]
            if "toolUse" in delta:
                block["toolUse"]["input"] = json.loads(delta["toolUse"]["input"])
            elif "reasoningContent" in delta:
                block["reasoningContent"] = {"reasoningText": dict(delta["reasoningContent"])}
            else:
                block["text"] = delta["text"]

    def _watch_requests(self) -> None:
        client: Any = self.model.client
        generate = client.generate

        async def watched(*args: Any, **kwargs: Any) -> Any:
            return await generate(*args, **kwargs, rid=f"call{_call.get()}")  # the log tells whose request it was

        client.generate = watched

    # --- the server's log ---

    def call_of(self, index: int) -> Handed:
        """The call that a request was made for."""
        return self.handed[int(self.server.requests[index].rid.partition("-")[0].removeprefix("call"))]

    def sampled(self) -> Log:
        """Every request for which something was sampled; one that was aborted before has nothing to record."""
        log: Log = {}
        for index, (request, response) in enumerate(zip(self.server.requests, self.server.responses, strict=True)):
            if response is not None and response.status == 200:
                entries = response.body["meta_info"]["output_token_logprobs"]
                if not entries:
                    continue
                log[index] = (request.input_ids, [entry[1] for entry in entries], [entry[0] for entry in entries])
        return log

    def trained_text(self, trajectory: Trajectory | None = None) -> str:
        """What the tokens to train say."""
        sequences = (self.model.trajectory if trajectory is None else trajectory).sequences()
        return "|".join(
            self.server.tokenizer.decode([token.token_id for token in sequence.tokens if token.loss_mask])
            for sequence in sequences
        )

    # --- the verdict ---

    def check(
        self,
        *trajectories: Trajectory,
        discarded: Collection[int] = (),
        auxiliary: Collection[int] = (),
        constrained: Collection[int] = (),
    ) -> None:
        """Assert that every prompt holds its whole conversation, and that the record is what the server logged.

        Args:
            trajectories: Which ones hold the record; by default the model's.
            discarded: Requests whose answers the agent threw away.
            auxiliary: Requests from outside the agents' loops.
            constrained: Requests whose tokens a grammar chose among.
        """
        trajectories = trajectories or (self.model.trajectory,)
        spoken = self._spoken()
        for index, request in enumerate(self.server.requests):
            self._check_prompt(self.call_of(index), request.text, spoken)
        turns = self._check_record(trajectories)
        self._check_places(turns)
        for trajectory in trajectories:
            log = {i: entry for i, entry in self.sampled().items() if turns[i][0] is trajectory}
            for shows_discarded, shows_auxiliary in product((False, True), repeat=2):
                exported = trajectory.sequences(discarded=shows_discarded, auxiliary=shows_auxiliary)
                hidden = {*(() if shows_discarded else discarded), *(() if shows_auxiliary else auxiliary)}
                _check_masks(exported, log, hidden | set(constrained))

    def _spoken(self) -> list[tuple[dict[str, Any], str]]:
        """The answers as Strands hands them back, each with what was sampled, its stop token left out."""
        decode = self.server.tokenizer.decode
        return [(self.call_of(i).answer_handed_back, decode(ids[:-1])) for i, (_, ids, _) in self.sampled().items()]

    def _check_prompt(self, handed: Handed, prompt: str, spoken: list[tuple[dict[str, Any], str]]) -> None:
        """Every block of every message stands in the prompt, message behind message: in words, or as it was sampled."""
        system, tools = handed.before
        assert system is None or system in prompt
        assert all(f'"{tool["name"]}"' in prompt for tool in tools or ())
        position = 0
        unread = _unread_calls(handed.messages)
        for message in handed.messages:
            ends = [position]
            verbatim = [text for answer, text in spoken if answer == message and prompt.find(text, position) >= 0]
            for text in verbatim[:1] or _texts(message, unread):
                found = prompt.find(text, position)
                assert found >= 0, f"{text!r} of {message} is not behind {prompt[:position]!r} in {prompt!r}"
                ends.append(found + len(text))
            position = max(ends)

    def _check_record(self, trajectories: Collection[Trajectory]) -> dict[int, tuple[Trajectory, Turn]]:
        """Every sampled answer is recorded once, as it came. Returns the turns by the indices of their requests."""
        by_rid = {}
        for trajectory in trajectories:
            for turn in trajectory.turns:
                if turn.generation is not None:
                    assert turn.generation.request_id not in by_rid
                    by_rid[turn.generation.request_id] = (trajectory, turn)
        turns = {}
        for index, (prompt, output, logprobs) in self.sampled().items():
            trajectory, turn = by_rid.pop(self.server.requests[index].rid)
            assert turn.token_ids() == prompt + output
            assert list(turn.output_ids) == output
            assert turn.generation is not None and list(turn.generation.logprobs or ()) == logprobs
            turns[index] = (trajectory, turn)
        assert not by_rid
        return turns

    def _check_places(self, turns: dict[int, tuple[Trajectory, Turn]]) -> None:
        """A call extends the longest conversation that it continues; without one it opens a sequence."""
        for index, (trajectory, turn) in turns.items():
            handed = self.call_of(index)
            continued = {
                id(other): len(earlier.messages)
                for i, (place, other) in turns.items()
                if place is trajectory and _continues(handed, earlier := self.call_of(i))
            }
            if turn.parent is None:
                assert not continued, f"request {index} had to extend one of its history: {turn.reason}"
            else:
                assert continued.get(id(turn.parent)) == max(continued.values(), default=-1), turn.reason


def numbered(request: ScriptedRequest) -> str:
    """An answer that can be told from every other one."""
    return f"Answer-{request.index}."


def statuses(trajectory: Trajectory) -> list[str]:
    """How far each turn has come."""
    return [turn.status.value for turn in trajectory.turns]


def response_masks(trajectory: Trajectory) -> list[list[int]]:
    """The loss mask of each sampled segment, by sequence."""
    return [
        [segment.loss_mask for segment in sequence.segments if segment.is_response]
        for sequence in trajectory.sequences()
    ]


def _check_masks(sequences: Collection[TokenManager], log: Log, left_out: Collection[int]) -> None:
    """Each sampled token has loss mask 1 in exactly one sequence, each other token in none."""
    expected: dict[tuple[int, ...], int] = {}
    trained: dict[tuple[int, ...], int] = {}
    for index, (prompt, output, _) in log.items():
        whole = (*prompt, *output)
        expected[whole] = expected.get(whole, 0) + (index not in left_out)
    for sequence in sequences:
        ids, mask = sequence.token_ids, sequence.loss_mask
        unseen = list(mask)
        for prompt, output, logprobs in log.values():
            start, end = len(prompt), len(prompt) + len(output)
            if ids[:end] != prompt + output:
                continue
            assert mask[start:end] in ([0] * len(output), [1] * len(output))
            assert sequence.logprobs[start:end] == logprobs
            if any(unseen[start:end]):
                trained[tuple(ids[:end])] = trained.get(tuple(ids[:end]), 0) + 1
            unseen[start:end] = [0] * len(output)
        assert not any(unseen), "a token that no model sampled is trained"
    assert {whole: trained.get(whole, 0) for whole in expected} == expected


def _continues(handed: Handed, earlier: Handed) -> bool:
    known = len(earlier.messages)
    return (
        earlier.answered is not None
        and earlier.answered < handed.asked
        and earlier.before == handed.before
        and handed.messages[:known] == earlier.messages
        and handed.messages[known : known + 1] == [earlier.answer_handed_back]
    )


def _unread_calls(messages: list[dict[str, Any]]) -> set[str]:
    """The ids of calls that did not parse: the model is told why, in place of their results."""
    return {
        block["toolUse"]["toolUseId"]
        for message in messages
        for block in message["content"]
        if "toolUse" in block and block["toolUse"]["name"] == ToolParseResult.UNKNOWN_NAME
    }


def _texts(message: dict[str, Any], unread: Collection[str]) -> Iterator[str]:
    """What of a message has to stand in a prompt. Reasoning of earlier turns is left out: chat templates drop it."""
    for block in message["content"]:
        if "text" in block and block["text"] != _BLANK:
            yield block["text"].strip()
        elif "toolUse" in block and block["toolUse"]["toolUseId"] not in unread:
            yield block["toolUse"]["name"]
            yield from _leaves(block["toolUse"]["input"])
        elif "toolResult" in block and block["toolResult"]["toolUseId"] not in unread:
            for part in block["toolResult"]["content"]:
                yield from [part["text"].strip()] if "text" in part else _leaves(part.get("json"))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)[1:-1]
