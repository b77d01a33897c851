"""Random episodes: how each step edits the history, what the model answers, and whether the answer is kept.

A step's numbers are taken modulo what exists when it is played, so a plan stays valid when hypothesis removes steps.
Every block of every message has a mark of its own, `m<number>x`, by which it is found in the server's prompts.
"""

import asyncio
import copy
import json
import re
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from itertools import count

from hypothesis import strategies as st
from pydantic import BaseModel

from strands_sglang import SGLangAbortedError, SGLangClientError, SGLangModel, Trajectory, TurnStatus
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang

from .judge import Judge, as_line, as_sent, require, require_equal

AGENTS = 3
# The caller outside of every agent's loop: a summary, a judge.
OUTSIDE = AGENTS

EDITS = {"insert": 3, "delete": 3, "change": 4, "reorder": 2, "truncate": 3, "forget": 2, "summarize": 2}
EDITS |= {"duplicate": 2, "merge": 2, "split": 1, "tools": 2, "system": 2, "copy": 3, "cache point": 3}
ARRIVALS = {"turn": 18, "echo": 3, "same question": 2, "again": 2, "two": 2, "foreign answer": 1, "dangling": 1}
ATTEMPTS = {"none": 24, "error": 2, "abort": 1, "thrown away": 2}
ANSWERS = {"text": 6, "call": 6, "two calls": 2, "broken call": 2, "reasoning": 2, "reasoning and call": 1}
ANSWERS |= {"only reasoning": 1, "blank": 1, "respelt": 1, "twin": 3, "structured": 1}
ENDS = {"stop": 16, "other stop": 3, "stop string": 1, "cut": 3, "abort": 1, "error": 1}
FATES = {"kept": 24, "thrown away": 2, "cancelled": 1, "edited": 1}

STOP_STRING = "Qz"
# Strands' replacement for a call in an answer that was cut off.
REWRITTEN = "The selected tool {}'s tool use was incomplete due to maximum token limits being reached."

_TOOLSETS = ((0,), (0, 1), (1, 0), (), (1,), (0, 1, 2))
_MARK = re.compile(r"m\d+x")
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_CONTROL = re.compile(r"<\|(?:im_start|im_end|endoftext)\|>")


# One change of an agent's history, system prompt or tools, at positions modulo its length.
Edit = namedtuple("Edit", ["kind", "at", "to"], defaults=["change", 0, 0])


@dataclass(frozen=True)
class Step:
    """One turn of a participant: edits, new messages, a failed attempt, the call, and the fate of the answer.

    Attributes:
        who: An agent, or `OUTSIDE`.
        edits: Edits of the history before the call.
        arrives: The new messages. "turn" is what Strands adds: tool results or a user's text. "same question" is what
            another agent was asked last; it gets the same answer in other tokens.
        attempt: A call with the same messages before the one that counts.
        answer: What is sampled.
        end: How the sampling ends.
        fate: What the agent does with the answer.
        injected: Whether a text follows the last message for this call only.
        number: Decides wherever there is a choice.
        held: Whether the answer waits until another participant's step is over.
        stored: Whether the trajectory goes through a file before the step.
    """

    who: int = 0
    edits: tuple[Edit, ...] = ()
    arrives: str = "turn"
    attempt: str = "none"
    answer: str = "text"
    end: str = "stop"
    fate: str = "kept"
    injected: bool = False
    number: int = 0
    held: bool = False
    stored: bool = False

    def kinds(self):
        """Yield what the step tests."""
        yield from (edit.kind for edit in self.edits)
        yield from (self.arrives, f"attempt: {self.attempt}", f"answer: {self.answer}")
        yield from (f"end: {self.end}", f"fate: {self.fate}")
        yield from (kind for kind in ("injected", "held", "stored") if getattr(self, kind))


# An episode. Its calls come from agents, or none of them does (the model is used alone).
Plan = namedtuple("Plan", ["steps", "has_agents"], defaults=[(), True])


def _one(weights):
    return st.sampled_from([kind for kind, weight in weights.items() for _ in range(weight)])


_NUMBERS = st.integers(0, 11)
_EDIT = st.builds(Edit, _one(EDITS), _NUMBERS, _NUMBERS)
_STEP = st.builds(
    Step,
    who=_one({0: 12, 1: 3, 2: 1, OUTSIDE: 1}),
    edits=_one({0: 12, 1: 4, 2: 1}).flatmap(lambda edits: st.tuples(*[_EDIT] * edits)),
    arrives=_one(ARRIVALS),
    attempt=_one(ATTEMPTS),
    answer=_one(ANSWERS),
    end=_one(ENDS),
    fate=_one(FATES),
    injected=_one({False: 24, True: 1}),
    number=_NUMBERS,
    held=_one({False: 9, True: 1}),
    stored=_one({False: 29, True: 1}),
)
PLANS = st.builds(Plan, st.lists(_STEP, min_size=3, max_size=8).map(tuple), _one({True: 9, False: 1}))


# --- who asks, and what happens to histories ---


@dataclass
class Someone:
    """An agent, or a caller from outside of one (without a name and a `model_state`)."""

    name: str | None
    system: str | None
    tools: list
    messages: list = field(default_factory=list)
    state: dict | None = None

    @property
    def before(self):
        return self.system, self.tools or None


class Marks:
    """Creates marks, and texts with marks."""

    def __init__(self):
        self._numbers = count(1)

    def mark(self):
        return f"m{next(self._numbers)}x"

    def text(self):
        return {"text": f"say {self.mark()} now"}

    def user(self):
        return {"role": "user", "content": [self.text()]}

    def system(self):
        return f"Be {self.mark()}."

    def tools(self, toolset):
        """Return one of a few sets of tool specs; a tool has the same mark in all of them."""
        schema = {"json": {"type": "object", "properties": {"q": {"type": "string"}}}}
        chosen = _TOOLSETS[toolset % len(_TOOLSETS)]
        return [{"name": f"f{i}", "description": f"m{900 + i}x", "inputSchema": schema} for i in chosen]


def apply_edit(edit, someone, participants, marks, notices):
    """Edit a participant's history, system prompt or tools; `notices` of unparsed calls never change."""
    messages = someone.messages = copy.deepcopy(someone.messages)
    if edit.kind == "tools":
        someone.tools = marks.tools(edit.to)
    elif edit.kind == "system":
        someone.system = None if edit.to % 3 == 0 else marks.system()
    elif edit.kind == "copy":
        other = participants[edit.at % len(participants)]
        someone.messages = copy.deepcopy(other.messages)
        if edit.to % 4:
            someone.system, someone.tools = other.system, other.tools
    elif messages:
        at, to = edit.at % len(messages), edit.to % len(messages)
        role, content = messages[at]["role"], messages[at]["content"]
        rearranged = {
            "insert": lambda: messages.insert(at, {**marks.user(), "role": ("user", "assistant")[edit.to % 2]}),
            "delete": lambda: messages.pop(at),
            "truncate": lambda: messages.__delitem__(slice(at, None)),
            "forget": lambda: messages.__delitem__(slice(at)),
            "summarize": lambda: messages.__setitem__(slice(at + 1), [marks.user()]),
            "duplicate": lambda: messages.insert(to, copy.deepcopy(messages[at])),
            "merge": lambda: _merge(messages, at),
            "change": lambda: _change(content, edit.to, marks, notices),
        }
        if edit.kind in rearranged:
            rearranged[edit.kind]()
        elif edit.kind == "reorder":
            messages[at], messages[to] = messages[to], messages[at]
        elif edit.kind == "split" and len(content) > 1:
            messages[at : at + 1] = [{"role": role, "content": [block]} for block in content]
        elif edit.kind == "cache point" and content:
            content.insert(edit.to % (len(content) + 1), {"cachePoint": {"type": "default"}})


def _change(content, which, marks, notices):
    if not content:
        content.append(marks.text())
        return
    block = content[which % len(content)]
    if "text" in block:
        block["text"] = f"rather {marks.mark()}"
    elif "toolUse" in block and block["toolUse"]["toolUseId"] not in notices:
        block["toolUse"]["input"] = {"q": marks.mark()}
    elif "toolResult" in block and block["toolResult"]["toolUseId"] not in notices:
        block["toolResult"]["content"] = [{"text": f"rather {marks.mark()}"}, {"json": {"also": marks.mark()}}]
    elif "reasoningContent" in block:
        block["reasoningContent"]["reasoningText"]["text"] = f"rather {marks.mark()}"


def _merge(messages, at):
    """Join a message with the next one of its role, or else its own texts."""
    message = messages[at]
    if at + 1 < len(messages) and messages[at + 1]["role"] == message["role"]:
        message["content"] += messages.pop(at + 1)["content"]
        return
    content = []
    for block in message["content"]:
        if content and "text" in block and "text" in content[-1]:
            content[-1] = {"text": content[-1]["text"] + "\n" + block["text"]}
        else:
            content.append(block)
    message["content"] = content


class Verdict(BaseModel):
    """The output of a structured call."""

    verdict: str


class _Running:
    """A step whose answer waits until another participant's step is over."""

    def __init__(self, who):
        self.who = who
        self._asked, self._released = asyncio.Event(), asyncio.Event()

    async def start(self, step):
        """Run the step until its request is at the server, or to its end if no request is held."""
        self._step = asyncio.ensure_future(step)
        self._step.add_done_callback(lambda step: self._asked.set())
        await self._asked.wait()

    async def end(self):
        self._released.set()
        await self._step

    def held(self, answer):
        """Return an answer that waits for its release."""

        async def later(request):
            self._asked.set()
            await self._released.wait()
            return raised_or(answer)

        return later


def raised_or(answer):
    """Return an answer, or raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


class Player:
    """Plays one episode on a model: keeps the agents' histories as Strands does, and makes the model's calls.

    Attributes:
        server: The scripted server.
        model: The model, with the episode's trajectory.
        judge: Watches both.
        participants: The agents and the outside caller.
        notices: By the toolUseId of an unparsed call, the mark of what the model wrote, which replaces the result.
        thrown_away: The calls whose answers their agent threw away.
        structured: The calls that a grammar constrained.
    """

    def __init__(self, tokenizer, folder, **config):
        stops = [tokenizer.convert_tokens_to_ids(stop) for stop in ("<|im_end|>", "<|endoftext|>")]
        self.server = ScriptedSGLang(tokenizer, self._answer, stop_token_ids=stops)
        client = self.server.client()
        self.model = SGLangModel(tokenizer=tokenizer, client=client, sampling_params={"stop": [STOP_STRING]}, **config)
        self.judge = Judge(self.server, self.model)
        self.participants, self.notices, self.thrown_away, self.structured = [], {}, [], []
        self._path, self._marks, self._running = folder / "trajectory", Marks(), None

    def _answer(self, request):
        return self._next(request) if callable(self._next) else raised_or(self._next)

    async def play(self, plan):
        system, tools = self._marks.system(), self._marks.tools(0)
        for number in range(AGENTS + 1):
            is_agent = plan.has_agents and number != OUTSIDE
            name, state = (f"agent {number}", {}) if is_agent else (None, None)
            self.participants.append(Someone(name, system, tools, state=state))
        try:
            for step in plan.steps:
                if self._running is not None and (step.stored or step.who == self._running.who):
                    await self._release()
                if step.stored:
                    self.model.trajectory.save(self._path)
                    self.model.trajectory = Trajectory.load(self._path)
                if step.held and self._running is None:
                    self._running = _Running(step.who)
                    await self._running.start(self._step(step, self._running))
                else:
                    await self._step(step)
                    await self._release()
        finally:
            await self._release()
            await self.model.client.close()

    async def _release(self):
        """Let the step that is held run to its end."""
        running, self._running = self._running, None
        if running is not None:
            await running.end()

    async def _step(self, step, running=None):
        someone = self.participants[step.who]
        for edit in step.edits:
            apply_edit(edit, someone, self.participants, self._marks, self.notices)
        answer, end = step.answer, step.end
        if step.arrives == "same question" and self._take_question(someone, step.number):
            answer = "twin"
        else:
            someone.messages += self._arrivals(someone, step)
        messages = json.loads(json.dumps([as_sent(message) for message in someone.messages]))
        if step.injected:
            messages[-1]["content"].append(self._marks.text())
        if running is None and step.attempt == "thrown away":
            await self._call(someone, messages, step.number, "text", fate="thrown away")
        elif running is None and step.attempt != "none":
            await self._call(someone, messages, step.number, "text", end=step.attempt)
        if answer == "structured":
            message = await self._structured(someone, messages)
        else:
            if step.fate == "cancelled":  # the answer must be known without the stream's end
                answer, end = "text", "stop" if end in ("cut", "stop string") else end
            message = await self._call(someone, messages, step.number, answer, end=end, fate=step.fate, running=running)
        if message is None or step.fate == "thrown away":
            return
        if step.fate == "cancelled":
            message = {"role": "assistant", "content": [{"text": f"Cancelled by user {self._marks.mark()}"}]}
        elif step.fate == "edited":
            message["content"].append(self._marks.text())
        someone.messages.append(message)

    def _take_question(self, someone, which):
        """Ask what another participant was asked last; False if there is none."""
        others = [other for other in self.participants if other is not someone and len(other.messages) > 1]
        others = [other for other in others if other.messages[-1]["role"] == "assistant"]
        if others:
            other = others[which % len(others)]
            someone.system, someone.tools = other.system, other.tools
            someone.messages = copy.deepcopy(other.messages[:-1])
        return bool(others)

    def _arrivals(self, someone, step):
        """Return the new messages; the history always ends with at least one message."""
        messages, marks = someone.messages, self._marks
        if step.arrives == "again" and messages:
            return []
        if step.arrives == "echo":  # what another participant was asked at this point
            others = [other.messages for other in self.participants if other is not someone]
            said = [m[len(messages)] for m in others if len(m) > len(messages) and m[len(messages)]["role"] == "user"]
            if said:
                return [copy.deepcopy(said[step.number % len(said)])]
        if step.arrives == "foreign answer":
            return [{**marks.user(), "role": "assistant"}, marks.user()]
        content = []
        if step.arrives != "dangling" and messages:
            uses = [block["toolUse"]["toolUseId"] for block in messages[-1]["content"] if "toolUse" in block]
            texts = ["Unknown tool" if use in self.notices else f"found {marks.mark()}" for use in uses]
            content = [
                {"toolResult": {"toolUseId": use, "status": "success", "content": [{"text": text}]}}
                for use, text in zip(uses, texts, strict=True)
            ][:: -1 if step.number % 2 else 1]  # Strands puts the results of some calls out of order
        if not content or step.number % 4 == 0:
            content.append(marks.text())
        return [{"role": "user", "content": content}, *([marks.user()] if step.arrives == "two" else [])]

    # --- calls ---

    async def _call(self, someone, messages, number, answer, *, end="stop", fate="kept", running=None):
        """Make a call, and return the message that Strands makes of the answer; None without an answer."""
        sampled, written = self._sampled(someone, messages, number, answer, end)
        self._next = sampled if running is None else running.held(sampled)
        state = copy.deepcopy(someone.state)
        arguments = {} if state is None else {"model_state": state}
        tools = copy.deepcopy(someone.tools) or None
        stream = self.model.stream(copy.deepcopy(messages), tools, someone.system, **arguments)
        asked, stop_reason = len(self.judge.calls), None
        call = None
        try:
            async for event in stream:
                call = self.judge.calls[asked]
                if fate == "cancelled":
                    await stream.aclose()
                    call.blocks = [{"text": written[0]}]
                    call.owner = someone.name
                    if someone.state == {}:  # its id is lost with the state, so the model sees a new agent
                        someone.name = f"{someone.name} again"
                    return copy.deepcopy(call.answer)
                stop_reason = event.get("messageStop", {}).get("stopReason", stop_reason)
        except (SGLangClientError, SGLangAbortedError):
            return None
        finally:
            call = self.judge.calls[asked]
            call.owner = call.owner or someone.name
            if fate == "thrown away":
                self.thrown_away.append(call)
        someone.state = state
        uses = [block["toolUse"] for block in call.blocks if "toolUse" in block]
        unread = [(use, raw) for use, raw in zip(uses, written[1:], strict=False) if use["name"] == "unknown_tool"]
        self.notices.update((use["toolUseId"], raw) for use, raw in unread)
        message = {"role": "assistant", "content": copy.deepcopy(call.blocks)}
        if uses and stop_reason == "max_tokens":
            call.is_rewritten = True
            message["content"] = [
                {"text": REWRITTEN.format(block["toolUse"]["name"])} if "toolUse" in block else block
                for block in message["content"]
            ]
        return message

    async def _structured(self, someone, messages):
        self._next = json.dumps({"verdict": self._marks.mark()})
        asked = len(self.judge.calls)
        async for _ in self.model.structured_output(Verdict, copy.deepcopy(messages), someone.system):
            pass
        self.judge.calls[asked].blocks = [{"text": self._next}]
        self.structured.append(self.judge.calls[asked])
        return {"role": "assistant", "content": [{"text": self._next}]}

    def _sampled(self, someone, messages, number, answer, end):
        """Return the server's answer and the texts in it: the spoken one, then the mark of each call."""
        if end == "error":
            return RuntimeError("planned"), []
        marks = [self._marks.mark(), self._marks.mark()]
        spoken = f"well {self._marks.mark()}"
        thought = f"<think>\nperhaps {self._marks.mark()}\n</think>\n\n"
        calls = [f'<tool_call>\n{{"name": "f0",  "arguments": {{"q": "{mark}"}}}}\n</tool_call>' for mark in marks]
        text = {
            "call": f"{spoken}\n{calls[0]}",
            "two calls": calls[0] + calls[1],
            "broken call": calls[0].replace("}}", "}") + calls[1],
            "reasoning": thought + spoken,
            "reasoning and call": thought + calls[0],
            "only reasoning": thought,
            "blank": ("", " ", "\n\n")[number % 3],
            "twin": self._twin(someone, messages) or spoken,
        }.get(answer, spoken)
        if end == "cut" and answer == "call":
            text = text[: -len('"}}\n</tool_call>')]  # before its end mark
        elif end == "cut" and answer == "reasoning":
            text = thought[: -len("\n</think>\n\n")]
        elif end == "stop string" and answer == "text":
            text += f" {STOP_STRING} never seen"
        elif end == "abort" and number % 3 == 0:
            text = ""
        encode = self.model.tokenizer.encode
        letters = number if answer in ("respelt", "twin") else 0  # one by one: ids that encoding would not give
        ids = [*(token_id for letter in text[:letters] for token_id in encode(letter)), *encode(text[letters:])]
        stop = self.model.tokenizer.convert_tokens_to_ids("<|endoftext|>") if end == "other stop" else None
        finish = {"cut": "length", "abort": "abort"}.get(end, "stop")
        return ScriptedAnswer(token_ids=ids, finish_reason=finish, stop_token_id=stop), [spoken, *marks]

    def _twin(self, someone, messages):
        """Return the text of an answer to the same conversation, or else of the latest one."""
        said = [call for call in self.judge.calls if len(call.blocks) == 1 and "text" in call.blocks[0]]
        lines = [as_line(message) for message in messages]
        same = [call for call in said if call.before == someone.before and call.lines == lines]
        return next((call.answer["content"][0]["text"] for call in reversed(same or said)), None)

    # --- the verdict ---

    def check(self, provable=lambda earlier, one: True):
        """Judge the episode, before and after the agents' messages settle it.

        Args:
            provable: See `Judge.check`.

        Returns:
            The number of answers, of those that extended an earlier one, of those that forked (started over, or took
            another way than an earlier one), and whether there were any.
        """
        requests, trajectory = self.server.requests, self.model.trajectory
        calls = [self.judge.call_of(request) for request in requests]
        # An opening that calls share is sent once more, without output.
        sent = [(request, call) for request, call in zip(requests, calls, strict=True) if not request.is_prefill]
        require(len(sent) == len(self.judge.calls), "a call is one request")
        first_agent = min((call.asked for call in calls if call.owner is not None), default=float("inf"))
        structured = {i for i, call in enumerate(calls) if call in self.structured}
        auxiliary = {i for i, call in enumerate(calls) if call.owner is None and call.asked > first_agent} | structured
        by_rid = {turn.generation.request_id: turn for turn in trajectory.turns if turn.generation is not None}
        turns = {i: by_rid[request.rid] for i, request in enumerate(requests) if request.rid in by_rid}
        answers = self.judge.check(constrained=structured, exports=[(True, True)], provable=provable)
        for request, call in sent:
            self._check_chat(call, request.text)
        for one in answers:
            _check_reason(one, turns[one.index].reason, turns, calls)
        # A call from outside the agents' loops continues in a sequence of its own, and a sampled token that a later
        # call did not keep ends a sequence; fewer sequences could not hold every token.
        covered = [
            one.parent
            for one in answers
            if one.parent is not None
            and one.kept == len(one.parent.output_ids)
            and (one.parent.index in auxiliary or one.index not in auxiliary)
        ]
        sequences = trajectory.sequences(discarded=True, auxiliary=True)
        least = sum(one not in covered for one in answers)
        require(len(sequences) == least, "there are as many sequences as it takes", found=len(sequences), least=least)
        main = [one for one in answers if one.index not in auxiliary]
        discarded = {i for i, turn in turns.items() if turn.status is TurnStatus.DISCARDED}
        self._check_main(main, discarded)
        self._check_settled(main)
        forked = sum(_is_fork(one, answers) for one in answers)
        extended = sum(one.parent is not None for one in answers)
        found = {"cases": 1, "answers": len(answers), "extending": extended, "forking": forked}
        return Counter(found | {f"cases {kind}": found[kind] > 0 for kind in ("extending", "forking")})

    def _check_chat(self, call, text):
        """Require that the prompt is well formed, and holds exactly each mark once, in order, under its role."""
        turns = _TURN.findall(text)
        whole = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns) + "<|im_start|>assistant\n"
        is_chat = text == whole and not any(_CONTROL.search(said) for _, said in turns)
        require(is_chat, "a prompt is a chat", prompt=text)
        system, tools = call.before
        tools_marks = [("system", mark) for mark in _MARK.findall(json.dumps(tools))]
        found = [(role, mark) for role, said in turns for mark in _MARK.findall(said)]
        require(
            [entry for entry in found if entry in tools_marks] == tools_marks,
            "each tool is described once",
            prompt=text,
        )
        found = [entry for entry in found if entry not in tools_marks]
        for role, mark, is_needed in [("system", mark, True) for mark in _MARK.findall(system or "")] + self._marks_of(
            call.messages
        ):
            if found[:1] == [(role, mark)]:
                del found[0]
            else:
                require(not is_needed, "no message is missing", mark=mark, role=role, prompt=text)
        require(not found, "nothing else is in the prompt", found=found, prompt=text)

    def _marks_of(self, messages):
        """Return role and mark of each block in template order, and whether a prompt must hold it.

        Templates drop earlier reasoning; an unparsed call is in the sampled ids, but in no message.
        """
        expected, uses = [], []
        for message in messages:
            role, results, others = message["role"], [], [[], [], []]  # reasoning, text, calls
            for block in message["content"]:
                marks = [(role, mark, "reasoningContent" not in block) for mark in _MARK.findall(str(block))]
                use_id = block.get("toolUse", block.get("toolResult", {})).get("toolUseId")
                if use_id in self.notices:
                    marks = [(role, self.notices[use_id], "toolResult" in block)]
                if "toolResult" in block:
                    results.append((uses.index(use_id) if use_id in uses else len(uses), marks))
                else:
                    others[0 if "reasoningContent" in block else 2 if "toolUse" in block else 1] += marks
            if role == "assistant":
                uses = [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]
            for marks in [marks for _, marks in sorted(results, key=lambda result: result[0])] + others:
                expected += marks
        return expected

    def _check_main(self, main, discarded):
        """Require that the main sequence is the latest one of the conversation that was answered first."""
        opening = next((one.call for one in main if one.parent is None), None)
        if opening is not None:
            roots = [(one, one.path()[0].call) for one in main]
            ends = [one for one, root in roots if (root.before, root.lines) == (opening.before, opening.lines)]
            latest = ([one for one in ends if one.index not in discarded] or ends)[-1]
            found = self.model.trajectory.latest_main_sequence().token_ids
            require_equal(found, latest.ids, "the main sequence is the latest of the first conversation")

    def _check_settled(self, main):
        """Require that, once settled, kept answers are exported and discarded ones are not."""
        trajectory = self.model.trajectory
        histories = {one.name: [as_sent(m) for m in one.messages] for one in self.participants if one.name is not None}
        for messages in histories.values():
            trajectory.settle(messages)
        ends = {owner: [as_line(message) for message in messages] for owner, messages in histories.items()}
        full = {
            one: [*one.call.lines, as_line(one.call.answer)]
            if one.call.answered is not None and one.call.answer is not None
            else None
            for one in main
        }
        exported = set()
        for sequence in trajectory.sequences():
            leaf = next((one for one in main if one.ids == sequence.token_ids), None)
            require(leaf is not None, "a sequence is what was sent and sampled", ids=sequence.token_ids)
            exported.update(tuple(one.ids) for one in leaf.path())
        for one in main:
            said, own_end = full[one], ends.get(one.call.owner, [])
            children = [other for other in main if other.parent is one]
            if children or (said is not None and own_end[: len(said)] == said):
                # Of several attempts of one agent with the same text one was kept; it is unknown which.
                same = (one.call.owner, one.call.before, said)
                twins = [other for other in main if (other.call.owner, other.call.before, full[other]) == same]
                is_shown = any(tuple(other.ids) in exported for other in ([one] if children else twins))
                require(is_shown, "what an agent kept is exported", request=one.index)
                continue
            stands = said is not None and any(end[: len(said)] == said for end in ends.values())
            is_alone = all(other is one or other.ids != one.ids for other in main)
            if is_alone and not stands and self._is_thrown_away(one, said):
                is_shown = tuple(one.ids) in exported
                require(not is_shown, "what an agent threw away is not exported", request=one.index)

    def _is_thrown_away(self, one, said):
        """Whether the agent threw the answer away, and its next call shows it."""
        call, known = one.call, len(one.call.lines)
        after = [other for other in self.judge.calls if other.owner == call.owner and other.asked > call.asked]
        return (
            call in self.thrown_away
            and call.owner is not None
            and one.finish_reason["type"] == "stop"
            and bool(after)
            and after[0].before == call.before
            and after[0].lines[:known] == call.lines
            and (said is None or after[0].lines[: known + 1] != said)
        )


def _is_fork(one, answers):
    earlier = [other for other in answers if other.call.asked < one.call.asked]
    if one.parent is None:
        return bool(earlier)
    return one.kept < len(one.parent.output_ids) or any(other.parent is one.parent for other in earlier)


def _check_reason(one, reason, turns, calls):
    """Require that the reason is true."""
    facts = {"request": one.index, "reason": reason}
    if one.parent is None:
        begun = ("opens ",)
    else:
        parent = turns[one.parent.index].index
        is_inside = one.kept < len(one.parent.output_ids)
        begun = (
            (f"forks inside call {parent}:",)
            if is_inside
            else (f"extends call {parent} ", f"forks after call {parent}: ")
        )
    require(reason.startswith(begun), "a reason says what is extended", **facts)
    compared = re.search(r"compared with call (\d+)", reason)
    if compared is None:
        return
    call, other = one.call, calls[int(compared[1])]
    full = [*other.lines, as_line(other.answer) if other.answered and other.answer else "in no history"]
    pairs = enumerate(zip(call.lines, full, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(call.lines), len(full)))
    said = re.search(r"message (\d+) \(\w+\) is not the recorded one|stops after message (-?\d+)", reason)
    if "the system prompt changed" in reason:
        require(call.before[0] != other.before[0], "a reason is true", **facts)
    elif "the tools changed" in reason:
        require(call.before[1] != other.before[1], "a reason is true", **facts)
    elif said is not None:
        named = int(said[1]) if said[1] is not None else int(said[2]) + 1
        require(first == named, "a reason names the first difference", first=first, **facts)
