"""Judges what a model sent and recorded by the server's log and by what Strands passed to the model.

Nothing here asks the library how conversations compare. A prompt holds a message if its decoded ids contain the
message's text. A call has to extend an earlier one if its messages begin with that call's messages and answer. A token
was sampled if the server's log lists it.
"""

import copy
import json
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, product

from strands_sglang.tool_parsers import ToolParseResult
from support.agents import make_agent, response_masks, statuses

_BLANK = "[blank text]"
EXPORTS = tuple(product((False, True), repeat=2))
_call = ContextVar("call", default=None)


class ViolationError(AssertionError):
    """A promise that was broken, and the facts found instead."""

    def __init__(self, promise, facts):
        self.promise = promise
        super().__init__(promise + "".join(f"\n  {name}: {value!r}" for name, value in facts.items()))


def require(held, promise, **facts):
    if not held:
        raise ViolationError(promise, facts)


def require_equal(found, expected, promise, **facts):
    """Require that two lists are equal, and name their first difference otherwise."""
    if found != expected:
        i = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
        raise ViolationError(promise, facts | {"at": i, "found": found[i : i + 8], "expected": expected[i : i + 8]})


@dataclass(eq=False)
class Call:
    """One model call as Strands made it.

    Attributes:
        messages: Its messages.
        before: What precedes them: the system prompt and the tools.
        asked: When it was made, in the order of all calls and answers.
        answered: When its answer began to arrive; None until then.
        blocks: The content blocks of the answer.
        owner: Who asked; None if unknown.
        is_rewritten: Whether Strands puts something else into the history than the answer.
    """

    messages: list
    before: tuple
    asked: int
    answered: int | None = None
    blocks: list = field(default_factory=list)
    owner: str | None = None
    is_rewritten: bool = False

    @cached_property
    def lines(self):
        return list(map(as_line, self.messages))

    @property
    def answer(self):
        """The answer as Strands shows it to the model at the next call; None if it never does."""
        return None if self.is_rewritten else as_sent({"role": "assistant", "content": self.blocks})

    def continues(self, earlier):
        """Whether the conversation begins with an earlier one and its answer."""
        known = len(earlier.messages)
        return (
            earlier.answered is not None
            and earlier.answered < self.asked
            and earlier.before == self.before
            and earlier.answer is not None
            and len(self.messages) > known
            and self.lines[: known + 1] == [*earlier.lines, as_line(earlier.answer)]
        )

    def read(self, event):
        """Read an event of its stream."""
        if "contentBlockStart" in event:
            self.blocks.append(copy.deepcopy(event["contentBlockStart"]["start"]))
        elif "contentBlockDelta" in event:
            delta, block = event["contentBlockDelta"]["delta"], self.blocks[-1]
            if "toolUse" in delta:
                block["toolUse"]["input"] = json.loads(delta["toolUse"]["input"])
            elif "reasoningContent" in delta:
                block["reasoningContent"] = {"reasoningText": dict(delta["reasoningContent"])}
            else:
                block["text"] = delta["text"]


@dataclass(eq=False)
class Answer:
    """A request for which the server's log lists sampled tokens, and the answer that it continues."""

    index: int
    call: Call
    input_ids: list
    output_ids: list
    logprobs: list
    finish_reason: dict
    parent: "Answer | None" = None
    kept: int = 0

    @property
    def ids(self):
        return self.input_ids + self.output_ids

    def path(self):
        """Return the answers from the first of the sequence to this one."""
        return [*(self.parent.path() if self.parent else ()), self]


def as_sent(message):
    """Return a message as Strands passes it to the model: without blank assistant texts and invalid tool names."""
    blocks = message["content"]
    if message["role"] == "assistant":
        blank = [block for block in blocks if "text" in block and not block["text"].strip()]
        if any("toolUse" in block for block in blocks):
            blocks = [block for block in blocks if block not in blank]
        else:
            blocks = [{"text": _BLANK} if block in blank else block for block in blocks] or [{"text": _BLANK}]
    return {"role": message["role"], "content": [_under_a_valid_name(block) for block in blocks]}


def _under_a_valid_name(block):
    use = block.get("toolUse")
    if use is None or (re.match(r"[a-zA-Z0-9_-]+$", use["name"]) and len(use["name"]) <= 64):
        return block
    return {"toolUse": {**use, "name": "INVALID_TOOL_NAME"}}


def as_line(message):
    """Return a message as text, without what the model never sees."""
    content = [block for block in message["content"] if "cachePoint" not in block]
    return json.dumps([message["role"], content], sort_keys=True, default=repr)


class Judge:
    """Watches a model on a scripted server.

    Attributes:
        calls: The calls in order.
        has_hooks: Whether agents have the model's hooks.
    """

    has_hooks = False

    def __init__(self, server, model):
        self.server = server
        self.model = model
        self.calls = []
        self._clock = count()
        stream, structured_output, generate = model.stream, model.structured_output, model.client.generate

        async def watched(messages, tool_specs=None, system_prompt=None, **kwargs):
            call = self._note(messages, tool_specs, system_prompt)
            async for event in stream(messages, tool_specs, system_prompt, **kwargs):
                if "messageStart" in event:
                    call.answered = next(self._clock)
                call.read(event)
                yield event

        async def watched_output(output_model, prompt, system_prompt=None, **kwargs):
            call = self._note(prompt, None, system_prompt)
            async for event in structured_output(output_model, prompt, system_prompt, **kwargs):
                call.answered = next(self._clock)
                call.blocks = [{"text": event["output"].model_dump_json()}]
                yield event

        async def watched_generate(*args, **kwargs):
            return await generate(*args, **kwargs, rid=f"call{_call.get()}")  # the log tells whose request it was

        model.stream, model.structured_output, model.client.generate = watched, watched_output, watched_generate

    def _note(self, messages, tool_specs, system_prompt):
        seen = [{"role": message["role"], "content": copy.deepcopy(message["content"])} for message in messages]
        call = Call(seen, (system_prompt, copy.deepcopy(tool_specs) or None), next(self._clock))
        _call.set(len(self.calls))
        self.calls.append(call)
        return call

    def call_of(self, request):
        """Return the call that a request was made for."""
        return self.calls[int(request.rid.partition("-")[0].removeprefix("call"))]

    def answers(self):
        """Return every request for which tokens were sampled; one aborted before that has nothing to record."""
        found = []
        for index, (request, response) in enumerate(zip(self.server.requests, self.server.responses, strict=True)):
            meta = response.body["meta_info"] if response is not None and response.status == 200 else {}
            entries = meta.get("output_token_logprobs")
            if request.is_prefill:
                continue
            if entries or (meta and meta["finish_reason"]["type"] != "abort"):
                ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
                call = self.call_of(request)
                found.append(Answer(index, call, request.input_ids, ids, logprobs, meta["finish_reason"]))
        return found

    def trained_text(self, trajectory=None):
        """Return the text of the tokens to train."""
        sequences = (self.model.trajectory if trajectory is None else trajectory).sequences()
        trained = [[token.token_id for token in sequence.tokens if token.loss_mask] for sequence in sequences]
        return "|".join(map(self.server.tokenizer.decode, trained))

    # --- shorthands ---

    @property
    def trajectory(self):
        return self.model.trajectory

    def agent(self, tools=None, **kwargs):
        """Return an agent on the model; the arguments are those of `make_agent`."""
        return make_agent(self.model, tools, **kwargs)

    def prompt(self, index):
        """Return the text of a request's prompt."""
        return self.server.requests[index].text

    def with_text(self, text):
        """Return the indexes of the requests whose prompts hold a text."""
        return [i for i, request in enumerate(self.server.requests) if text in request.text]

    def masks(self):
        return response_masks(self.trajectory)

    def statuses(self):
        return statuses(self.trajectory)

    def settle(self, agent):
        self.trajectory.settle(agent.messages)

    # --- the verdict ---

    def check(
        self,
        *trajectories,
        discarded=(),
        auxiliary=(),
        constrained=(),
        exports=EXPORTS,
        provable=lambda earlier, answer: True,
        masks=None,
    ):
        """Require that every prompt holds its whole conversation, and that the record matches the server's log.

        Args:
            trajectories: The trajectories that hold the record; by default the model's.
            discarded: Requests whose answers the agent threw away.
            auxiliary: Requests from outside the agents' loops.
            constrained: Requests whose tokens a grammar constrained.
            exports: Exports to check, as pairs: with discarded answers, with auxiliary ones.
            provable: Whether the chat template determines the text between an earlier answer and one that continues it.
            masks: The loss mask of each sampled segment of the model's trajectory, by sequence; None for any.

        Returns:
            The answers, each with the one that it extends.
        """
        trajectories = trajectories or (self.model.trajectory,)
        answers = self.answers()
        decode = self.server.tokenizer.decode
        spoken = [(one.call.answer, decode(one.output_ids[:-1])) for one in answers]
        uses = [block["toolUse"] for call in self.calls for block in call.blocks if "toolUse" in block]
        # The model reads why a call did not parse, instead of its result.
        unread = {use["toolUseId"] for use in uses if use["name"] == ToolParseResult.UNKNOWN_NAME}
        for request in self.server.requests:
            if request.is_prefill:  # the opening of a prompt, without output
                continue
            _check_prompt(self.call_of(request), request.text, spoken, unread)
        turns = self._check_record(trajectories, answers)
        for trajectory in trajectories:
            recorded = [one for one in answers if turns[one.index] in trajectory.turns]
            for one in recorded:
                _place(one, recorded, turns, provable)
            for shows_discarded, shows_auxiliary in exports:
                exported = trajectory.sequences(discarded=shows_discarded, auxiliary=shows_auxiliary)
                hidden = {*(() if shows_discarded else discarded), *(() if shows_auxiliary else auxiliary)}
                _check_exported(exported, recorded, hidden | set(constrained))
        if masks is not None:
            require_equal(self.masks(), masks, "the sampled tokens are trained in these sequences")
        return answers

    def _check_record(self, trajectories, answers):
        """Require that every answer is recorded once, unchanged. Return the turns by index of their requests."""
        recorded = [turn for trajectory in trajectories for turn in trajectory.turns if turn.generation is not None]
        by_rid = {turn.generation.request_id: turn for turn in recorded}
        require(len(by_rid) == len(recorded), "an answer is recorded once")
        turns = {}
        for one in answers:
            turn = turns[one.index] = by_rid.pop(self.server.requests[one.index].rid, None)
            require(turn is not None, "each answer is recorded", request=one.index)
            require_equal(turn.token_ids(), one.ids, "a turn holds what was sent and sampled", request=one.index)
            require_equal(list(turn.output_ids), one.output_ids, "sampled ids stay unchanged", request=one.index)
            require(list(turn.generation.logprobs or ()) == one.logprobs, "logprobs are the server's")
        require(not by_rid, "what was recorded was sampled", requests=list(by_rid))
        return turns


def _check_prompt(call, prompt, spoken, unread):
    """Require that the prompt holds every block of every message in order: as words, or as sampled."""
    system, tools = call.before
    require(system is None or system in prompt, "the system prompt is in the prompt", prompt=prompt)
    require(all(f'"{tool["name"]}"' in prompt for tool in tools or ()), "every tool is in the prompt", prompt=prompt)
    position = 0
    for message in call.messages:
        ends, texts = [position], list(_texts(message, unread))
        words = prompt.find(texts[0], position) if texts else -1
        said = [(prompt.find(text, position), text) for answer, text in spoken if answer == message]
        # What stands behind the words is a later message with the same answer.
        verbatim = [text for found, text in said if found >= 0 and (words < 0 or found <= words)]
        for text in (verbatim[:1] or texts) if texts else ():
            found = prompt.find(text, position)
            require(found >= 0, "no message is missing", text=text, message=message, after=prompt[position:])
            ends.append(found + len(text))
        position = max(ends)


def _place(one, recorded, turns, provable):
    """Find the answer that an answer continues: the longest conversation, its own agent's first."""
    turn = turns[one.index]
    continued = [earlier for earlier in recorded if one.call.continues(earlier.call)]
    depth = max((len(earlier.call.messages) for earlier in continued), default=0)
    continued = [earlier for earlier in continued if len(earlier.call.messages) == depth]
    continued = [earlier for earlier in continued if earlier.call.owner == one.call.owner] or continued
    continued = [earlier for earlier in continued if provable(earlier, one)]
    one.parent = next((earlier for earlier in continued if turns[earlier.index] is turn.parent), None)
    found = None if turn.parent is None else turn.parent.index
    facts = {"request": one.index, "extends turn": found, "continues": [earlier.index for earlier in continued]}
    expected = turn.parent is None if not continued else one.parent is not None
    require(expected, "a call extends the longest conversation that it continues", reason=turn.reason, **facts)
    if one.parent is not None:
        sampled = len(one.parent.output_ids)
        one.kept = sampled if turn.parent_kept is None else turn.parent_kept
        require(one.kept >= sampled - 1, "nothing but a stop token is left out", **facts)


def _check_exported(sequences, answers, untrained):
    """Require that sequences equal what the server saw and sampled; just one of them trains each answer's tokens."""
    trained = dict.fromkeys([one.index for one in answers], 0)
    left = [*answers]
    parents = [(one.parent, one.kept) for one in answers if one.parent is not None]
    continued = {parent.index for parent, kept in parents if kept == len(parent.output_ids)}
    for sequence in sequences:
        same = [one for one in left if one.ids == sequence.token_ids]
        require(bool(same), "a sequence is what was sent and sampled", ids=sequence.token_ids)
        leaf = min(same, key=lambda one: (one.index in untrained, trained[one.index], one.index in continued))
        left.remove(leaf)
        mask, logprobs, path = [], [], leaf.path()
        for one, after in zip(path, [*path[1:], None], strict=True):
            kept = len(one.output_ids) if after is None else after.kept
            prompt, done = len(one.input_ids) - len(mask), trained[one.index]
            mask += [0] * prompt + [int(one.index not in untrained and i >= done) for i in range(kept)]
            logprobs += [None if one.parent is None else 0.0] * prompt + one.logprobs[:kept]
            trained[one.index] = max(done, kept)
        once = "a sampled token is trained in the first sequence that holds it"
        require_equal(sequence.loss_mask, mask, once, request=leaf.index)
        require_equal(sequence.logprobs, logprobs, "logprobs are the server's", request=leaf.index)
    missing = [one.index for one in left if one.index not in untrained and trained[one.index] < len(one.output_ids)]
    require(not missing, "each sampled token is in a sequence", requests=missing)


def _texts(message, unread):
    """Yield the texts of a message that a prompt must hold. Chat templates drop earlier reasoning."""
    for block in message["content"]:
        if "text" in block and block["text"] != _BLANK:
            yield block["text"].strip()
        elif "toolUse" in block and block["toolUse"]["toolUseId"] not in unread:
            yield block["toolUse"]["name"]
            yield from _leaves(block["toolUse"]["input"])
        elif "toolResult" in block and block["toolResult"]["toolUseId"] not in unread:
            for part in block["toolResult"]["content"]:
                yield from [part["text"].strip()] if "text" in part else _leaves(part.get("json"))


def _leaves(value):
    if isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)[1:-1]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
