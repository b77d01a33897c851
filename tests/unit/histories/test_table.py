"""Each way in which a history can differ has a test, and the table of docs/contribute/histories.md is true.

How often the record is right about which answers were kept: reported by the model's hooks, or inferred without them.

Every way in which a history can differ from "what it was, the answer, something new" is played with what may come
before and after it. Answers that the agent throws away say THROWN, all others were kept; the record is held against
that, and the counts against the table of docs/contribute/histories.md.
"""

import asyncio
import logging
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
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

from strands_sglang import SGLangModel, Trajectory, TurnStatus
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from strands_sglang.trajectory.recording import Recording
from support.agents import ask, assistant, call, has_module, make_agent, make_tools, needs_module, raise_once, user

COMPUTES = call(expression="2 * 3")
CALCULATOR = make_tools()[0][0]
AFTERWARDS = ("nothing", "a question", "a summary", "the same question")
DOCS = Path(__file__).parents[3] / "docs" / "contribute" / "histories.md"
COLUMNS = ("answers", "reported right", "right", "not known", "wrong")
TABLE = {
    row: Counter(dict(zip(COLUMNS, map(int, counts.split("|")), strict=True)))
    for row, counts in re.findall(r"^\| +(\d*) \| [^|]+ \|([\d |]+)\|$", DOCS.read_text(), re.MULTILINE)
}


class Guarded(SGLangModel):
    """A model with a guardrail that redacts answers that are thrown away, and what they answer."""

    redaction = {}

    async def stream(self, *args, **kwargs):
        thrown = False
        async for event in super().stream(*args, **kwargs):
            thrown = thrown or "THROWN" in str(event)
            yield event
        if self.redaction and thrown:
            yield {"redactContent": self.redaction}


class Stage:
    """One play: a model on a scripted server, which says what `says` holds next, and afterwards KEPT and a number."""

    def __init__(self, tokenizer, *, has_hooks, before):
        self.server = ScriptedSGLang(tokenizer, self.answer)
        self.model = Guarded(tokenizer=tokenizer, client=self.server.client(), context_window_limit=30000)
        self.says = []
        self.tokenizer, self.has_hooks, self.before = tokenizer, has_hooks, before

    def answer(self, request):
        answer = self.says.pop(0) if self.says and "You are a helper." not in request.text else f"KEPT-{request.index}."
        return answer(request) if callable(answer) else answer

    async def agent(self, *tools, **kwargs):
        """An agent that was asked what comes before."""
        agent = make_agent(self.model, list(tools), hooks=[self.model.hooks] if self.has_hooks else [], **kwargs)
        says, self.says = self.says, []
        for i in range(self.before):
            await agent.invoke_async(f"Before {i}?")
        self.says = says
        return agent

    async def asked(self, *tools, hook=None, **kwargs):
        """An agent that was asked a question, with what comes before; `hook` is a callback and its event."""
        agent = await self.agent(*tools, **kwargs)
        if hook is not None:
            agent.add_hook(*hook)
        await agent.invoke_async("Question?")
        return agent

    async def play(self, way, afterwards):
        """Play a way and what comes after it; count the verdicts on its answers."""
        played = await way(self)
        agents = played if isinstance(played, tuple) else (played,)
        question = "And now?"
        if afterwards == "a summary":
            agents[0].messages[:] = [user("What was said so far."), assistant("I see.")]
        elif afterwards == "the same question":
            agents[0].messages.clear()
            question = "Before 0?" if self.before else "Question?"
        if afterwards != "nothing":
            await agents[0].invoke_async(question)
        for agent in agents:
            self.model.trajectory.settle(agent.messages)
        turns = self.model.trajectory.turns
        return Counter(self.verdict(turn) for turn in turns if turn.answer_digest and not turn.is_auxiliary)

    def verdict(self, turn):
        thrown = "THROWN" in self.tokenizer.decode(turn.output_ids.tolist())
        if "is not known" in turn.note:
            return "not known"
        return "right" if (turn.status is TurnStatus.DISCARDED) is thrown else "wrong"


class Played(Recording):
    """Answers from a record, and does what the stage's server does besides."""

    def __init__(self, recorded, stage):
        super().__init__(recorded)
        self.stage = stage

    def turn_of(self, turn):
        found = super().turn_of(turn)
        is_helper = "You are a helper." in self.stage.tokenizer.decode(turn.token_ids())
        answer = self.stage.says.pop(0) if self.stage.says and not is_helper else ""
        if callable(answer):
            answer(None)
        return found


@pytest.fixture
def check_row(chatml_tokenizer, caplog):
    """Plays ways with everything that may come before and after them; the counts are those of a row of the table."""
    caplog.set_level(logging.CRITICAL)

    async def play_twice(way, afterwards, has_hooks, before, *, replays):
        """Play a way, and once more from the file of its trajectory, without a server."""
        stage, again = (Stage(chatml_tokenizer, has_hooks=has_hooks, before=before) for _ in range(2))
        verdicts = await stage.play(way, afterwards)
        if not replays:
            return verdicts
        recording = Played(Trajectory.from_bytes(stage.model.trajectory.to_bytes()), again)
        again.model.trajectory = recording.trajectory
        await again.play(way, afterwards)
        recording.check_end()
        assert recording.difference is None
        assert not again.server.requests
        return verdicts

    async def check(row, *ways, replays=True):
        reported, inferred = Counter(), Counter()
        for way, before, afterwards in product(ways, (0, 1), AFTERWARDS):
            reported += await play_twice(way, afterwards, True, before, replays=replays)
            inferred += await play_twice(way, afterwards, False, before, replays=replays)
        assert set(reported) == {"right"}
        if has_module("strands.middleware"):  # earlier versions of Strands have fewer ways
            found = {"answers": reported.total(), "reported right": reported["right"]}
            assert TABLE[str(row)] == found | {kind: inferred[kind] for kind in COLUMNS[2:]}
        assert inferred["right"] > inferred["wrong"]

    return check


def says_thrown(message):
    """Whether a message is an answer that is to be thrown away."""
    return message["role"] == "assistant" and "THROWN" in str(message)


def test_the_last_line_of_the_table_is_its_sum():
    rows = [counts for row, counts in TABLE.items() if row]
    assert len(rows) == 24 and sum(rows, Counter()) == TABLE[""]


async def test_a_sliding_window_drops_the_oldest_messages(check_row):
    async def window(stage):
        agent = await stage.agent(conversation_manager=SlidingWindowConversationManager(window_size=2))
        await ask(agent, 3)
        return agent

    async def window_per_turn(stage):
        stage.says = [COMPUTES, COMPUTES, COMPUTES]
        manager = SlidingWindowConversationManager(window_size=4, per_turn=True)
        return await stage.asked(CALCULATOR, conversation_manager=manager)

    await check_row(1, window, window_per_turn)


async def test_overflow_recovery_shortens_an_old_tool_result(check_row):
    async def overflow(stage):
        @tool
        def read():
            """Read a page."""
            return "A page. " * 200

        stage.says = [call("read")]
        agent = await stage.agent(read, conversation_manager=SlidingWindowConversationManager())
        await agent.invoke_async("Question?")
        agent.conversation_manager.reduce_context(agent)
        await agent.invoke_async("More?")
        return agent

    await check_row(2, overflow)


async def test_a_summary_takes_the_place_of_the_beginning(check_row):
    async def summary(stage):
        manager = SummarizingConversationManager(
            summary_ratio=0.8, preserve_recent_messages=1, summarization_system_prompt="You are a helper."
        )
        agent = await stage.agent(conversation_manager=manager)
        await ask(agent, 3)
        agent.conversation_manager.reduce_context(agent)
        await agent.invoke_async("More?")
        return agent

    await check_row(3, summary)


@needs_module("strands._context_manager.presets")
async def test_a_context_manager_drops_results_or_adds_a_status(check_row):
    async def dropped(stage):
        from strands._context_manager.strategies.offload import Offload

        stage.says = [COMPUTES] * 4
        strategies = [Offload.drop("tool_results").when(preserve_recent=2)]
        agent = await stage.agent(CALCULATOR, conversation_manager=None, context_manager={"strategies": strategies})
        await agent.invoke_async("Question?")
        return agent

    async def status(stage):
        stage.says = [COMPUTES] * 2
        return await stage.asked(CALCULATOR, conversation_manager=None, context_manager="agentic")

    await check_row(4, dropped, status)


async def test_text_is_injected_for_one_call_only(check_row):
    async def injected(stage):
        stage.says = [COMPUTES]
        plugin = ContextInjector(lambda context: "<now>noon</now>", trigger="everyTurn")
        return await stage.asked(CALCULATOR, plugins=[plugin])

    await check_row(5, injected)


@needs_module("strands.middleware")
async def test_middleware_asks_twice_or_makes_up_an_answer(check_row):
    from strands.middleware import InvokeModelStage, ModelStopReason

    def best_of(taken):
        async def play(stage):
            events = []

            async def best_of_two(context, next_fn):
                for i in range(2):
                    async for event in next_fn(context):
                        if i == taken:
                            events.append(event)
                for event in events:
                    yield event

            stage.says = ["KEPT.", "THROWN."] if taken == 0 else ["THROWN.", "KEPT."]
            return await with_middleware(stage, best_of_two)

        return play

    def once(handler):
        """Middleware that blocks only the first call."""
        left = [handler]

        async def handle(context, next_fn):
            async for event in left.pop()(context, next_fn) if left else next_fn(context):
                yield event

        return handle

    async def with_middleware(stage, handler):
        agent = await stage.agent()
        agent.add_middleware(InvokeModelStage, once(handler))
        await agent.invoke_async("Question?")
        return agent

    async def made_up(stage):
        async def make_up(context, next_fn):
            async for _ in next_fn(context):
                pass
            message = assistant("MADE UP")
            usage = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
            yield ModelStopReason(stop_reason="end_turn", message=message, usage=usage, metrics={"latencyMs": 0})

        stage.says = ["THROWN."]
        return await with_middleware(stage, make_up)

    await check_row(6, best_of(0), best_of(1), made_up)


async def test_a_hook_replaces_an_answer_edits_it_or_its_tool_input(check_row):
    def replaces(event_type):
        async def play(stage):
            def replace(event):
                message = event.message if event_type is MessageAddedEvent else event.stop_response.message
                if says_thrown(message):
                    message["content"] = [{"text": "REPLACED"}]

            stage.says = ["THROWN."]
            return await stage.asked(hook=(replace, event_type))

        return play

    async def edits_input(stage):
        stage.says = [COMPUTES]
        return await stage.asked(
            CALCULATOR, hook=(lambda event: event.tool_use["input"].update(expression="5 * 5"), BeforeToolCallEvent)
        )

    async def tidies(stage):
        def tidy(event):
            if event.message["role"] == "assistant":
                event.message["content"].append({"text": "(checked)"})

        return await stage.asked(hook=(tidy, MessageAddedEvent))

    async def takes_call_out(stage):
        def take_out(event):
            if event.stop_response is not None:
                message = event.stop_response.message
                message["content"] = [block for block in message["content"] if "toolUse" not in block]

        stage.says = [f"THROWN. {COMPUTES}"]
        return await stage.asked(CALCULATOR, hook=(take_out, AfterModelCallEvent))

    await check_row(
        7,
        replaces(AfterModelCallEvent),
        replaces(MessageAddedEvent),
        edits_input,
        tidies,
        takes_call_out,
    )


async def test_strands_normalises_blank_text_and_invalid_names(check_row):
    async def blank(stage):
        stage.says = [f"  \n {COMPUTES}", call("bad name!"), ""]
        agent = await stage.agent(CALCULATOR)
        await ask(agent, "Question?", "More?")
        return agent

    await check_row(8, blank)


async def test_tool_input_goes_through_json(check_row):
    async def json(stage):
        odd = '{"expression" : "2 * 3", "expression":"2 * 4" }'
        stage.says = [f'<tool_call>\n{{"name": "calculator", "arguments": {odd}}}\n</tool_call>']
        return await stage.asked(CALCULATOR)

    await check_row(9, json)


async def test_a_cut_tool_call_is_replaced_by_text(check_row):
    async def cut(stage):
        stage.says = [ScriptedAnswer(COMPUTES, finish_reason="length")]
        agent = await stage.agent(CALCULATOR)
        with pytest.raises(MaxTokensReachedException):
            await agent.invoke_async("Question?")
        return agent

    await check_row(10, cut)


async def test_a_cancel_puts_text_in_the_place_of_an_answer(check_row):
    async def cancelled(stage):
        def cancelled(request):
            agent.cancel()
            return "THROWN."

        agent = await stage.agent()
        stage.says = [cancelled]
        await agent.invoke_async("Question?")
        return agent

    async def denied(stage):
        agent = await stage.agent()
        denied = []

        def deny(event):
            event.cancel = "NOT NOW" if not denied else False
            denied.append(event)

        agent.add_hook(deny, BeforeModelCallEvent)
        await ask(agent, "Question?", "More?")
        return agent

    async def ended(stage):
        stage.says = [COMPUTES]
        return await stage.asked(CALCULATOR, hook=(lambda event: setattr(event, "end_turn", "ENOUGH"), AfterToolsEvent))

    await check_row(11, cancelled, denied, ended)


async def test_structured_output_changes_the_tools(check_row):
    class Total(BaseModel):
        """A total."""

        total: int

    async def structured(stage):
        stage.says = [COMPUTES, "KEPT.", call("Total", total=6)]
        agent = await stage.agent(CALCULATOR)
        await agent.invoke_async("Question?", structured_output_model=Total)
        return agent

    await check_row(12, structured)


async def test_a_tool_call_is_left_without_a_result(check_row):
    async def dangling(stage):
        stage.says = [COMPUTES]
        agent = await stage.agent(CALCULATOR)
        raise_once(agent, BeforeToolsEvent)
        with pytest.raises(EventLoopException):
            await agent.invoke_async("Question?")
        return agent

    await check_row(13, dangling)


async def test_results_come_late_and_in_another_order(check_row):
    async def interrupted(stage):
        def ask_a_person(event):
            if event.tool_use["input"]["expression"].startswith("2"):
                event.interrupt("approve", reason="may it?")

        stage.says = [COMPUTES + call(expression="3 * 3")]
        agent = await stage.agent(CALCULATOR)
        agent.add_hook(ask_a_person, BeforeToolCallEvent)
        result = await agent.invoke_async("Question?")
        answers = [{"interruptResponse": {"interruptId": one.id, "response": "yes"}} for one in result.interrupts]
        await agent.invoke_async(answers)
        return agent

    await check_row(14, interrupted)


async def test_a_snapshot_is_restored_by_the_agent_by_copies_of_it(check_row):
    async def taken_back(stage):
        agent = await stage.agent()
        await agent.invoke_async("Question?")
        snapshot = agent.take_snapshot(preset="session")
        await agent.invoke_async("Taken back?")
        agent.load_snapshot(snapshot)
        await agent.invoke_async("More?")
        return agent

    async def copies(stage):
        agent = await stage.agent()
        await agent.invoke_async("Question?")
        snapshot = agent.take_snapshot(preset="session")
        copies = [await stage.agent() for _ in range(2)]
        for one in copies:
            one.load_snapshot(snapshot)
            await one.invoke_async("The same?")
        return copies[0], copies[1], agent

    async def attempts(stage):
        judged = []

        def is_good(response, agent):
            judged.append(response)
            return {"passed": len(judged) > 2, "feedback": "NOT GOOD ENOUGH"}

        before, stage.before = stage.before, 0
        goal = GoalLoop(goal=is_good, max_attempts=4, preserve_context=False)
        agent = await stage.agent(plugins=[goal])
        await ask(agent, before + 1)
        return agent

    await check_row(15, taken_back, copies, attempts)


async def test_the_user_gives_examples_calls_tools_directly_deletes(check_row):
    async def edited(stage):
        agent = await stage.agent(CALCULATOR, messages=[user("Example?"), assistant("An example.")])
        await agent.invoke_async("Question?")
        agent.tool.calculator(expression="2 * 3")
        await agent.invoke_async("More?")
        del agent.messages[:2]
        await agent.invoke_async("Even more?")
        return agent

    await check_row(16, edited)


async def test_the_system_prompt_or_the_tools_change(check_row):
    async def other_prefix(stage):
        agent = await stage.agent()
        await agent.invoke_async("Question?")
        agent.system_prompt = "Be verbose."
        await agent.invoke_async("More?")
        agent.tool_registry.process_tools(make_tools()[0])
        await agent.invoke_async("Even more?")
        return agent

    await check_row(17, other_prefix)


@needs_module("strands.background_tasks")
async def test_results_from_the_background_come_as_calls_that(check_row):
    async def background(stage):
        ready = asyncio.Event()

        @tool
        async def compute():
            """Compute."""
            await ready.wait()
            return "42"

        stage.says = [call("compute"), "KEPT: started."]
        agent = await stage.agent(compute, background_tasks={"always": ["compute"]})

        def release(event):
            if event.stop_response.stop_reason == "end_turn":
                ready.set()

        agent.add_hook(release, AfterModelCallEvent)
        await agent.invoke_async("Question?")
        return agent

    await check_row(18, background, replays=False)  # Strands writes random ids and the time into the prompts


async def test_an_agent_that_is_a_tool_asks_in_between(check_row):
    async def nested(stage):
        before, stage.before = stage.before, 0
        helper = await stage.agent(system_prompt="You are a helper.", name="helper")
        stage.before = before
        stage.says = [call("helper", input="x"), call("helper", input="x")]
        agent = await stage.agent(helper.as_tool())
        await agent.invoke_async("Question?")
        return agent, helper

    await check_row(19, nested)


async def test_agents_share_an_invocation_state_and_are_asked(check_row):
    async def shared(stage):
        agents = [await stage.agent() for _ in range(3)]
        state = {}
        await asyncio.gather(*(agent.invoke_async("Question?", invocation_state=state) for agent in agents))
        return tuple(agents)

    await check_row(20, shared)


async def test_invocations_of_one_agent_interleave(check_row):
    async def interleaved(stage):
        agent = await stage.agent(concurrent_invocation_mode=ConcurrentInvocationMode.UNSAFE_REENTRANT)
        await asyncio.gather(*(agent.invoke_async(f"Question {i}?") for i in range(3)))
        return agent

    await check_row(21, interleaved, replays=False)  # in which order they ask is chance


async def test_a_hook_resumes_the_invocation(check_row):
    async def resumed(stage):
        left = ["More.", "Even more."]

        def resume(event):
            event.resume = left.pop() if left else None

        return await stage.asked(hook=(resume, AfterInvocationEvent))

    await check_row(22, resumed)


async def test_a_hook_has_a_call_repeated_guides_the_model(check_row):
    def repeated(*answers):
        async def play(stage):
            def retry(event):
                event.retry = event.stop_response is not None and says_thrown(event.stop_response.message)

            stage.says = [*answers]
            return await stage.asked(CALCULATOR, hook=(retry, AfterModelCallEvent))

        return play

    class Steering(SteeringHandler):
        """Sends an answer back that is to be thrown away."""

        async def steer_after_model(self, *, message, **kwargs):
            return Guide(reason="BE POLITE") if says_thrown(message) else Proceed(reason="")

    async def guided(stage):
        stage.says = ["THROWN."]
        return await stage.asked(plugins=[Steering()])

    async def raised(stage):
        def fail(event):
            if event.stop_response is not None and says_thrown(event.stop_response.message):
                raise ZeroDivisionError

        stage.says = ["THROWN."]
        agent = await stage.agent()
        agent.add_hook(fail, AfterModelCallEvent)
        with pytest.raises(ZeroDivisionError):
            await agent.invoke_async("Question?")
        return agent

    async def failed(stage):
        class Retry(ModelRetryStrategy):
            def is_retryable(self, exception) -> bool:
                return True

        stage.says = [ScriptedAnswer("", finish_reason="abort"), "KEPT."]
        return await stage.asked(retry_strategy=Retry(max_attempts=3, initial_delay=0, max_delay=0))

    await check_row(
        23,
        repeated("THROWN.", "THROWN 2."),
        repeated(COMPUTES, "THROWN.", COMPUTES),
        repeated("THROWN.", "THROWN."),
        guided,
        raised,
        failed,
    )


async def test_a_guardrail_redacts_an_answer_or_its_question_too(check_row):
    def redacts(**redaction):
        async def play(stage):
            stage.says = ["THROWN."]
            stage.model.redaction = redaction
            return await stage.asked()

        return play

    await check_row(
        24,
        redacts(redactAssistantContentMessage="[answer]"),
        redacts(redactUserContentMessage="[user]", redactAssistantContentMessage="[answer]"),
    )


def test_every_row_has_a_test():
    before_a_test = re.compile(r"((?:^# Row \d+\n)+)(?:@.*\n(?:[ )].*\n)*)*(?:async )?def test_", re.MULTILINE)
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for rows in before_a_test.findall(path.read_text()):
            found |= {int(number) for number in re.findall(r"\d+", rows)}
    assert found == {int(row) for row in TABLE if row}
