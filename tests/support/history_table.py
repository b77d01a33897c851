"""How often the record is right about what became of an answer: told by the model's hooks, or inferred without them.

Every way in which a history can differ from "what it was, the answer, something new" is played with what may come
before and after it. Answers that the agent throws away say THROWN, all others were kept; the record is held against
that. `python -m support.history_table`, run in `tests` with the sources on the path, prints the table of
docs/histories.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from strands import ModelRetryStrategy, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolsEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    MessageAddedEvent,
)
from strands.types.agent import ConcurrentInvocationMode
from strands.types.exceptions import EventLoopException, MaxTokensReachedException
from strands.vended_plugins.context_injector import ContextInjector
from strands.vended_plugins.goal import GoalLoop
from strands.vended_plugins.steering import Guide, Proceed, SteeringHandler

from strands_sglang import SGLangModel, TurnStatus
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang

from .agents import call, make_agent, make_tools
from .strands_features import has_module
from .tokenizers import build_chatml_tokenizer

COMPUTES = call(expression="2 * 3")
AFTERWARDS = ("nothing", "a question", "a summary", "the same question")


class Guarded(SGLangModel):
    """A model behind a guardrail that redacts answers that are thrown away, and what they answer."""

    redaction: dict[str, str] = {}

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        thrown = False
        async for event in super().stream(*args, **kwargs):
            thrown = thrown or "THROWN" in str(event)
            yield event
        if self.redaction and thrown:
            yield {"redactContent": self.redaction}


class Stage:
    """One play: a model on a scripted server.

    Attributes:
        model: The model.
        says: What the model says next; afterwards KEPT and a number.
        first: What the agent is asked first.
    """

    def __init__(self, tokenizer: Any, *, told: bool, before: int) -> None:
        """Set up.

        Args:
            tokenizer: The model's.
            told: Whether agents have the model's hooks.
            before: How many questions the agent is asked before.
        """
        server = ScriptedSGLang(tokenizer, self._answer)
        self.model: Any = Guarded(tokenizer=tokenizer, client=server.client(), context_window_limit=30000)
        self.says: list[Any] = []
        self.first = "Question?"
        self._tokenizer, self._told, self._before = tokenizer, told, before

    def _answer(self, request: Any) -> Any:
        answer = self.says.pop(0) if self.says and "You are a helper." not in request.text else f"KEPT-{request.index}."
        return answer(request) if callable(answer) else answer

    async def agent(self, *tools: Any, **kwargs: Any) -> Any:
        """An agent that was asked what comes before."""
        agent = make_agent(self.model, list(tools), hooks=[self.model.hooks] if self._told else [], **kwargs)
        says, self.says = self.says, []
        for i in range(self._before):
            self.first = "Before 0?"
            await agent.invoke_async(f"Before {i}?")
        self.says = says
        return agent

    async def go_on(self, agent: Any, how: str) -> None:
        """Play what comes after."""
        question = "And now?"
        if how == "a summary":
            said = [("user", "What was said so far."), ("assistant", "I see.")]
            agent.messages[:] = [{"role": role, "content": [{"text": text}]} for role, text in said]
        elif how == "the same question":
            agent.messages.clear()
            question = self.first
        await agent.invoke_async(question)

    def verdicts(self) -> Counter[str]:
        """How often the record is right, says that it does not know, or is wrong."""
        found: Counter[str] = Counter()
        for turn in self.model.trajectory.turns:
            if turn.answer_digest is None or turn.is_auxiliary:
                continue
            thrown = "THROWN" in self._tokenizer.decode(turn.output_ids.tolist())
            if "is not known" in turn.note:
                found["not known"] += 1
            else:
                found["right" if (turn.status is TurnStatus.DISCARDED) is thrown else "wrong"] += 1
        return found


Way = Callable[[Stage], Awaitable[Any]]
WAYS: list[tuple[int, str, Way]] = []


def way(row: int, name: str, *, needs: str | None = None) -> Callable[[Way], Way]:
    """Enter a way in the table, if the installed Strands has what it needs."""

    def enter(play: Way) -> Way:
        if needs is None or has_module(needs):
            WAYS.append((row, name, play))
        return play

    return enter


def hook(agent: Any, event_type: Any, act: Callable[[Any], None]) -> None:
    """Let something be done at an event."""
    agent.add_hook(act, event_type)


def says_thrown(message: Any) -> bool:
    """Whether a message is an answer that is to be thrown away."""
    return message["role"] == "assistant" and "THROWN" in str(message)


# --- the ways, by the rows of docs/histories.md ---


@way(1, "a sliding window drops the oldest messages")
async def _window(stage: Stage) -> Any:
    agent = await stage.agent(conversation_manager=SlidingWindowConversationManager(window_size=2))
    for i in range(3):
        await agent.invoke_async(f"Question {i}?")
    return agent


@way(1, "a sliding window drops the oldest messages")
async def _window_per_turn(stage: Stage) -> Any:
    stage.says = [COMPUTES, COMPUTES, COMPUTES]
    manager = SlidingWindowConversationManager(window_size=4, per_turn=True)
    agent = await stage.agent(make_tools()[0][0], conversation_manager=manager)
    await agent.invoke_async("Question?")
    return agent


@way(2, "overflow recovery shortens an old tool result")
async def _overflow(stage: Stage) -> Any:
    @tool
    def read() -> str:
        """Read a page."""
        return "A page. " * 200

    stage.says = [call("read")]
    agent = await stage.agent(read, conversation_manager=SlidingWindowConversationManager())
    await agent.invoke_async("Question?")
    agent.conversation_manager.reduce_context(agent)
    await agent.invoke_async("More?")
    return agent


@way(3, "a summary takes the place of the beginning")
async def _summary(stage: Stage) -> Any:
    manager = SummarizingConversationManager(
        summary_ratio=0.8, preserve_recent_messages=1, summarization_system_prompt="You are a helper."
    )
    agent = await stage.agent(conversation_manager=manager)
    for i in range(3):
        await agent.invoke_async(f"Question {i}?")
    agent.conversation_manager.reduce_context(agent)
    await agent.invoke_async("More?")
    return agent


@way(4, "a context manager drops results, or adds a status to each call", needs="strands._context_manager.presets")
async def _dropped(stage: Stage) -> Any:
    from strands._context_manager.strategies.offload import Offload

    stage.says = [COMPUTES] * 4
    strategies = [Offload.drop("tool_results").when(preserve_recent=2)]
    agent = await stage.agent(make_tools()[0][0], conversation_manager=None, context_manager={"strategies": strategies})
    await agent.invoke_async("Question?")
    return agent


@way(4, "a context manager drops results, or adds a status to each call", needs="strands._context_manager.presets")
async def _status(stage: Stage) -> Any:
    stage.says = [COMPUTES] * 2
    agent = await stage.agent(make_tools()[0][0], conversation_manager=None, context_manager="agentic")
    await agent.invoke_async("Question?")
    return agent


@way(5, "text is injected for one call only")
async def _injected(stage: Stage) -> Any:
    stage.says = [COMPUTES]
    plugin = ContextInjector(lambda context: "<now>noon</now>", trigger="everyTurn")
    agent = await stage.agent(make_tools()[0][0], plugins=[plugin])
    await agent.invoke_async("Question?")
    return agent


def _best_of(taken: int) -> Way:
    async def play(stage: Stage) -> Any:
        from strands.middleware import InvokeModelStage

        events: list[Any] = []

        async def best_of_two(context: Any, next_fn: Any) -> Any:
            for i in range(2):
                async for event in next_fn(context):
                    if i == taken:
                        events.append(event)
            for event in events:
                yield event

        stage.says = ["KEPT.", "THROWN."] if taken == 0 else ["THROWN.", "KEPT."]
        agent = await stage.agent()
        agent.add_middleware(InvokeModelStage, _once(best_of_two))
        await agent.invoke_async("Question?")
        return agent

    return play


def _once(handler: Any) -> Any:
    """Middleware that lets all calls but the first one through."""
    left = [handler]

    async def handle(context: Any, next_fn: Any) -> Any:
        async for event in left.pop()(context, next_fn) if left else next_fn(context):
            yield event

    return handle


for _taken in (0, 1):
    way(6, "middleware asks twice, or makes up an answer of its own", needs="strands.middleware")(_best_of(_taken))


@way(6, "middleware asks twice, or makes up an answer of its own", needs="strands.middleware")
async def _made_up(stage: Stage) -> Any:
    from strands.middleware import InvokeModelStage, ModelStopReason

    async def make_up(context: Any, next_fn: Any) -> Any:
        async for _ in next_fn(context):
            pass
        message = {"role": "assistant", "content": [{"text": "MADE UP"}]}
        usage = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
        yield ModelStopReason(stop_reason="end_turn", message=message, usage=usage, metrics={"latencyMs": 0})

    stage.says = ["THROWN."]
    agent = await stage.agent()
    agent.add_middleware(InvokeModelStage, _once(make_up))
    await agent.invoke_async("Question?")
    return agent


def _replaces(event_type: Any) -> Way:
    async def play(stage: Stage) -> Any:
        def replace(event: Any) -> None:
            message = event.message if event_type is MessageAddedEvent else event.stop_response.message
            if says_thrown(message):
                message["content"] = [{"text": "REPLACED"}]

        stage.says = ["THROWN."]
        agent = await stage.agent()
        hook(agent, event_type, replace)
        await agent.invoke_async("Question?")
        return agent

    return play


for _event_type in (AfterModelCallEvent, MessageAddedEvent):
    way(7, "a hook replaces an answer, edits it or its tool input, or takes its call out")(_replaces(_event_type))


@way(7, "a hook replaces an answer, edits it or its tool input, or takes its call out")
async def _edits_input(stage: Stage) -> Any:
    stage.says = [COMPUTES]
    agent = await stage.agent(make_tools()[0][0])
    hook(agent, BeforeToolCallEvent, lambda event: event.tool_use["input"].update(expression="5 * 5"))
    await agent.invoke_async("Question?")
    return agent


@way(7, "a hook replaces an answer, edits it or its tool input, or takes its call out")
async def _tidies(stage: Stage) -> Any:
    def tidy(event: Any) -> None:
        if event.message["role"] == "assistant":
            event.message["content"].append({"text": "(checked)"})

    agent = await stage.agent()
    hook(agent, MessageAddedEvent, tidy)
    await agent.invoke_async("Question?")
    return agent


@way(7, "a hook replaces an answer, edits it or its tool input, or takes its call out")
async def _takes_call_out(stage: Stage) -> Any:
    def take_out(event: Any) -> None:
        if event.stop_response is not None:
            message = event.stop_response.message
            message["content"] = [block for block in message["content"] if "toolUse" not in block]

    stage.says = [f"THROWN. {COMPUTES}"]
    agent = await stage.agent(make_tools()[0][0])
    hook(agent, AfterModelCallEvent, take_out)
    await agent.invoke_async("Question?")
    return agent


@way(8, "Strands normalises blank text and invalid names")
async def _blank(stage: Stage) -> Any:
    stage.says = [f"  \n {COMPUTES}", call("bad name!"), ""]
    agent = await stage.agent(make_tools()[0][0])
    await agent.invoke_async("Question?")
    await agent.invoke_async("More?")
    return agent


@way(9, "tool input goes through JSON")
async def _json(stage: Stage) -> Any:
    odd = '{"expression" : "2 * 3", "expression":"2 * 4" }'
    stage.says = [f'<tool_call>\n{{"name": "calculator", "arguments": {odd}}}\n</tool_call>']
    agent = await stage.agent(make_tools()[0][0])
    await agent.invoke_async("Question?")
    return agent


@way(10, "a cut tool call is replaced by text")
async def _cut(stage: Stage) -> Any:
    stage.says = [ScriptedAnswer(COMPUTES, finish_reason="length")]
    agent = await stage.agent(make_tools()[0][0])
    try:
        await agent.invoke_async("Question?")
    except MaxTokensReachedException:
        pass
    return agent


@way(11, "a cancel puts text in the place of an answer, or behind tools")
async def _cancelled(stage: Stage) -> Any:
    def cancelled(request: Any) -> str:
        agent.cancel()
        return "THROWN."

    agent = await stage.agent()
    stage.says = [cancelled]
    await agent.invoke_async("Question?")
    return agent


@way(11, "a cancel puts text in the place of an answer, or behind tools")
async def _denied(stage: Stage) -> Any:
    agent = await stage.agent()
    denied: list[Any] = []

    def deny(event: Any) -> None:
        event.cancel = "NOT NOW" if not denied else False
        denied.append(event)

    hook(agent, BeforeModelCallEvent, deny)
    await agent.invoke_async("Question?")
    await agent.invoke_async("More?")
    return agent


@way(11, "a cancel puts text in the place of an answer, or behind tools")
async def _ended(stage: Stage) -> Any:
    stage.says = [COMPUTES]
    agent = await stage.agent(make_tools()[0][0])
    hook(agent, AfterToolsEvent, lambda event: setattr(event, "end_turn", "ENOUGH"))
    await agent.invoke_async("Question?")
    return agent


class Total(BaseModel):
    """A total."""

    total: int


@way(12, "structured output changes the tools")
async def _structured(stage: Stage) -> Any:
    stage.says = [COMPUTES, "KEPT.", call("Total", total=6)]
    agent = await stage.agent(make_tools()[0][0])
    await agent.invoke_async("Question?", structured_output_model=Total)
    return agent


@way(13, "a tool call is left without a result")
async def _dangling(stage: Stage) -> Any:
    raised: list[Any] = []

    def fail(event: Any) -> None:
        if not raised:
            raised.append(event)
            raise ZeroDivisionError

    stage.says = [COMPUTES]
    agent = await stage.agent(make_tools()[0][0])
    hook(agent, BeforeToolsEvent, fail)
    try:
        await agent.invoke_async("Question?")
    except EventLoopException:
        pass
    return agent


@way(14, "results come late and in another order")
async def _interrupted(stage: Stage) -> Any:
    def ask(event: Any) -> None:
        if event.tool_use["input"]["expression"].startswith("2"):
            event.interrupt("approve", reason="may it?")

    stage.says = [COMPUTES + call(expression="3 * 3")]
    agent = await stage.agent(make_tools()[0][0])
    hook(agent, BeforeToolCallEvent, ask)
    result = await agent.invoke_async("Question?")
    answers = [{"interruptResponse": {"interruptId": one.id, "response": "yes"}} for one in result.interrupts]
    await agent.invoke_async(answers)
    return agent


@way(15, "a snapshot is restored, by the agent, by copies of it, or for another attempt")
async def _taken_back(stage: Stage) -> Any:
    agent = await stage.agent()
    await agent.invoke_async("Question?")
    snapshot = agent.take_snapshot(preset="session")
    await agent.invoke_async("Taken back?")
    agent.load_snapshot(snapshot)
    await agent.invoke_async("More?")
    return agent


@way(15, "a snapshot is restored, by the agent, by copies of it, or for another attempt")
async def _copies(stage: Stage) -> Any:
    agent = await stage.agent()
    await agent.invoke_async("Question?")
    snapshot = agent.take_snapshot(preset="session")
    copies = [await stage.agent() for _ in range(2)]
    for one in copies:
        one.load_snapshot(snapshot)
        await one.invoke_async("The same?")
    return copies[0], copies[1], agent


@way(15, "a snapshot is restored, by the agent, by copies of it, or for another attempt")
async def _attempts(stage: Stage) -> Any:
    judged: list[Any] = []

    def is_good(response: Any, agent: Any) -> Any:
        judged.append(response)
        return {"passed": len(judged) > 2, "feedback": "NOT GOOD ENOUGH"}

    before, stage._before = stage._before, 0
    goal = GoalLoop(goal=is_good, max_attempts=4, preserve_context=False)
    agent = await stage.agent(plugins=[goal])
    for i in range(before + 1):
        await agent.invoke_async(f"Question {i}?")
    return agent


@way(16, "the user gives examples, calls tools directly, deletes messages")
async def _edited(stage: Stage) -> Any:
    shots = [("user", "Example?"), ("assistant", "An example.")]
    messages = [{"role": role, "content": [{"text": text}]} for role, text in shots]
    agent = await stage.agent(make_tools()[0][0], messages=messages)
    await agent.invoke_async("Question?")
    agent.tool.calculator(expression="2 * 3")
    await agent.invoke_async("More?")
    del agent.messages[:2]
    await agent.invoke_async("Even more?")
    return agent


@way(17, "the system prompt or the tools change")
async def _other_prefix(stage: Stage) -> Any:
    agent = await stage.agent()
    await agent.invoke_async("Question?")
    agent.system_prompt = "Be verbose."
    await agent.invoke_async("More?")
    agent.tool_registry.process_tools(make_tools()[0])
    await agent.invoke_async("Even more?")
    return agent


@way(18, "results from the background come as calls that nobody sampled", needs="strands.background_tasks")
async def _background(stage: Stage) -> Any:
    ready = asyncio.Event()

    @tool
    async def compute() -> str:
        """Compute."""
        await ready.wait()
        return "42"

    stage.says = [call("compute"), "KEPT: started."]
    agent = await stage.agent(compute, background_tasks={"always": ["compute"]})

    def release(event: Any) -> None:
        if event.stop_response.stop_reason == "end_turn":
            ready.set()

    hook(agent, AfterModelCallEvent, release)
    await agent.invoke_async("Question?")
    return agent


@way(19, "an agent that is a tool asks in between")
async def _nested(stage: Stage) -> Any:
    before, stage._before = stage._before, 0
    helper = await stage.agent(system_prompt="You are a helper.", name="helper")
    stage._before = before
    stage.says = [call("helper", input="x"), call("helper", input="x")]
    agent = await stage.agent(helper.as_tool())
    await agent.invoke_async("Question?")
    return agent, helper


@way(20, "agents share an invocation state, and are asked the same")
async def _shared(stage: Stage) -> Any:
    agents = [await stage.agent() for _ in range(3)]
    state: dict[str, Any] = {}
    await asyncio.gather(*(agent.invoke_async("Question?", invocation_state=state) for agent in agents))
    return tuple(agents)


@way(21, "invocations of one agent interleave")
async def _interleaved(stage: Stage) -> Any:
    agent = await stage.agent(concurrent_invocation_mode=ConcurrentInvocationMode.UNSAFE_REENTRANT)
    await asyncio.gather(*(agent.invoke_async(f"Question {i}?") for i in range(3)))
    return agent


@way(22, "a hook resumes the invocation")
async def _resumed(stage: Stage) -> Any:
    left = ["More.", "Even more."]

    def resume(event: Any) -> None:
        event.resume = left.pop() if left else None

    agent = await stage.agent()
    hook(agent, AfterInvocationEvent, resume)
    await agent.invoke_async("Question?")
    return agent


def _repeated(*answers: str) -> Way:
    async def play(stage: Stage) -> Any:
        def retry(event: Any) -> None:
            event.retry = event.stop_response is not None and says_thrown(event.stop_response.message)

        stage.says = [*answers]
        agent = await stage.agent(make_tools()[0][0])
        hook(agent, AfterModelCallEvent, retry)
        await agent.invoke_async("Question?")
        return agent

    return play


for _answers in (("THROWN.", "THROWN 2."), (COMPUTES, "THROWN.", COMPUTES), ("THROWN.", "THROWN.")):
    way(23, "a hook has a call repeated, guides the model, or raises")(_repeated(*_answers))


class Steering(SteeringHandler):
    """Sends an answer back that is to be thrown away."""

    async def steer_after_model(self, *, message: Any, **kwargs: Any) -> Any:
        return Guide(reason="BE POLITE") if says_thrown(message) else Proceed(reason="")


@way(23, "a hook has a call repeated, guides the model, or raises")
async def _guided(stage: Stage) -> Any:
    stage.says = ["THROWN."]
    agent = await stage.agent(plugins=[Steering()])
    await agent.invoke_async("Question?")
    return agent


@way(23, "a hook has a call repeated, guides the model, or raises")
async def _raised(stage: Stage) -> Any:
    def fail(event: Any) -> None:
        if event.stop_response is not None and says_thrown(event.stop_response.message):
            raise ZeroDivisionError

    stage.says = ["THROWN."]
    agent = await stage.agent()
    hook(agent, AfterModelCallEvent, fail)
    try:
        await agent.invoke_async("Question?")
    except ZeroDivisionError:
        pass
    return agent


@way(23, "a hook has a call repeated, guides the model, or raises")
async def _failed(stage: Stage) -> Any:
    class Retry(ModelRetryStrategy):
        def is_retryable(self, exception: Exception) -> bool:
            return True

    stage.says = [ScriptedAnswer("", finish_reason="abort"), "KEPT."]
    agent = await stage.agent(retry_strategy=Retry(max_attempts=3, initial_delay=0, max_delay=0))
    await agent.invoke_async("Question?")
    return agent


def _redacts(**redaction: str) -> Way:
    async def play(stage: Stage) -> Any:
        stage.says = ["THROWN."]
        stage.model.redaction = redaction
        agent = await stage.agent()
        await agent.invoke_async("Question?")
        return agent

    return play


for _redaction in (
    {"redactAssistantContentMessage": "[answer]"},
    {"redactUserContentMessage": "[user]", "redactAssistantContentMessage": "[answer]"},
):
    way(24, "a guardrail redacts an answer, or its question, too")(_redacts(**_redaction))


# --- the table ---


async def play_all() -> dict[tuple[int, str], dict[str, Counter[str]]]:
    """Play every way with everything that may come before and after it, told and inferred."""
    tokenizer = build_chatml_tokenizer()
    found: dict[tuple[int, str], dict[str, Counter[str]]] = {}
    for row, name, play in WAYS:
        for told in (True, False):
            kind = "told" if told else "inferred"
            counts = found.setdefault((row, name), {"told": Counter(), "inferred": Counter()})[kind]
            for before in (0, 1):
                for afterwards in AFTERWARDS:
                    stage = Stage(tokenizer, told=told, before=before)
                    played = await play(stage)
                    agents = played if isinstance(played, tuple) else (played,)
                    if afterwards != "nothing":
                        await stage.go_on(agents[0], afterwards)
                    for agent in agents:
                        stage.model.trajectory.settle(agent.messages)
                    counts += stage.verdicts()
    return found


def as_table(found: dict[tuple[int, str], dict[str, Counter[str]]]) -> str:
    """The table in Markdown."""
    lines = ["| # | What differs | Answers | Told: right | Inferred: right | not known, and said | wrong |"]
    lines += ["|---|---|---|---|---|---|---|"]
    total = {"told": Counter[str](), "inferred": Counter[str]()}

    def line(row: str, name: str, told: Counter[str], inferred: Counter[str]) -> str:
        numbers = (told["right"], inferred["right"], inferred["not known"], inferred["wrong"])
        return f"| {row} | {name} | {told.total()} | " + " | ".join(map(str, numbers)) + " |"

    for (row, name), counts in sorted(found.items()):
        lines.append(line(str(row), name, counts["told"], counts["inferred"]))
        for kind, summed in total.items():
            summed += counts[kind]
    lines.append(line("", "all", total["told"], total["inferred"]))
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(as_table(asyncio.run(play_all())))
