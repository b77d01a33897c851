"""Every way in which an environment's episode ends: its reason, its reward, what it leaves, that it is cleaned up."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from strands import tool
from strands.hooks import AfterToolCallEvent, BeforeModelCallEvent, HookProvider, MessageAddedEvent

from strands_env.core import Action, RewardFunction, StepResult, TerminationReason
from strands_sglang import OUTCOMES, RewardRule
from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from support.agents import ScriptedModel, advance, call, tool_use
from support.environments import ANSWER, ASK, CALL, CalculatorEnv, Contains, Gives, scripted_env

FAULT = ScriptedFault(status=500)
LIMIT = 60.0  # seconds that nothing here takes, and that `late` lets pass


def late(request: Any) -> ScriptedAnswer:
    """Answer when it is too late."""
    advance(LIMIT)
    return ScriptedAnswer("Too late.", latency_s=LIMIT)


class Hook(HookProvider):
    """Calls a function at an event."""

    def __init__(self, kind: type[Any], function: Callable[[Any], Any]) -> None:
        self.kind, self.function = kind, function

    def register_hooks(self, registry: Any, **kwargs: Any) -> None:
        registry.add_callback(self.kind, self.function)


CANCELS = Hook(AfterToolCallEvent, lambda event: event.agent.cancel())
FAILS = Hook(BeforeModelCallEvent, lambda event: 1 / 0)


def cancelled_from_within(event: Any) -> None:
    raise asyncio.CancelledError


LONG = Action(message="a question that is longer than the context of the model " * 5, task_context=ASK.task_context)

ENDS: dict[str, tuple[TerminationReason, list[Any], dict[str, Any]]] = {
    "an answer": (TerminationReason.TASK_COMPLETE, [CALL, ANSWER], {}),
    "max_new_tokens": (
        TerminationReason.MAX_TOKENS_REACHED,
        [CALL, "long " * 300],
        {"model": {"sampling_params": {"max_new_tokens": 100}}},
    ),
    "a prompt beyond the context": (
        TerminationReason.CONTEXT_WINDOW_OVERFLOW,
        [],
        {"action": LONG, "server": {"context_length": 40}},
    ),
    "an answer up to the context's end": (
        TerminationReason.CONTEXT_WINDOW_OVERFLOW,
        ["long " * 2000],
        {"server": {"context_length": 1000}},
    ),
    "tool iterations": (TerminationReason.MAX_TOOL_ITERATIONS_REACHED, [CALL] * 3, {"max_tool_iterations": 2}),
    "tool calls": (TerminationReason.MAX_TOOL_CALLS_REACHED, [CALL] * 3, {"max_tool_calls": 2}),
    "turns": (TerminationReason.MAX_TURNS_REACHED, [CALL] * 3, {"max_turns": 2}),
    "turns beyond one invocation": (
        TerminationReason.MAX_TURNS_REACHED,
        [CALL] * 40,
        {"max_turns": 32, "max_tool_iterations": None},
    ),
    "sampled tokens": (TerminationReason.TOKEN_BUDGET_REACHED, [CALL] * 3, {"max_sampled_tokens": 10}),
    "total tokens": (TerminationReason.TOKEN_BUDGET_REACHED, [CALL] * 3, {"max_total_tokens": 10}),
    "time, in a call": (
        TerminationReason.TIMEOUT,
        [CALL, late],
        {"episode_timeout": LIMIT, "client": {"abort_grace": 1}},
    ),
    "a deadline of a call": (TerminationReason.TIMEOUT, [CALL, late], {"client": {"deadline": LIMIT}}),
    "an abort": (TerminationReason.ABORTED, [CALL, ScriptedAnswer("Well", finish_reason="abort")], {}),
    "an abort of the first call": (TerminationReason.ABORTED, [ScriptedAnswer("Well", finish_reason="abort")], {}),
    "a hook cancels": (
        TerminationReason.CANCELLED,
        [CALL] * 3,
        {"hooks": [CANCELS]},
    ),
    "a hook raises a cancellation": (
        TerminationReason.AGENT_ERROR,
        [ANSWER],
        {"hooks": [Hook(BeforeModelCallEvent, cancelled_from_within)]},
    ),
    "a server's error": (TerminationReason.INFRASTRUCTURE_ERROR, [FAULT], {}),
    "a server's error later": (TerminationReason.INFRASTRUCTURE_ERROR, [CALL, FAULT], {}),
    "a throttled request, asked once": (TerminationReason.INFRASTRUCTURE_ERROR, [ScriptedFault(status=429)], {}),
    "garbage": (TerminationReason.INFRASTRUCTURE_ERROR, [CALL, ScriptedFault(kind="garbage")], {}),
    "a lost connection": (TerminationReason.INFRASTRUCTURE_ERROR, [CALL, ScriptedFault(kind="drop")], {}),
    "a refused request": (
        TerminationReason.INFRASTRUCTURE_ERROR,
        [ANSWER],
        {"model": {"sampling_params": {"temperature": -1.0}}},
    ),
    "a hook raises": (
        TerminationReason.AGENT_ERROR,
        [CALL],
        {"hooks": [FAILS]},
    ),
    "a hook raises later": (
        TerminationReason.AGENT_ERROR,
        [CALL, ANSWER],
        {"hooks": [Hook(MessageAddedEvent, lambda event: len(event.agent.messages) > 2 and 1 / 0)]},
    ),
}


@pytest.mark.parametrize("name", ENDS)
async def test_an_episode_ends_as_the_table_has_it(name: str, chatml_tokenizer: Any) -> None:
    reason, answers, settings = ENDS[name]
    settings = dict(settings)
    action = settings.pop("action", ASK)
    env, server = scripted_env(chatml_tokenizer, answers, **settings)
    result = await env.step(action)

    assert result.termination_reason is reason, result.error
    assert env.steps == ["reset", "cleanup"]
    assert env.last_result is result
    has_reward = OUTCOMES[reason].reward is RewardRule.COMPUTED
    assert (result.reward is not None) is has_reward is bool(env.reward_fn.asked)  # type: ignore[union-attr]
    limits = OUTCOMES[reason].reward is RewardRule.COMPUTED or "cancels" in name
    assert (result.error is None) is limits
    # Everything that was sampled is there, and every sampled token is trained once.
    trajectory = result.observation.trajectory
    assert trajectory is not None
    sampled = sum(len(turn.output_ids) for turn in trajectory.turns)
    answered = [
        response.body
        for response in server.responses
        if response is not None and response.status == 200 and b"output_ids" in response.content
    ]
    assert sampled == sum(len(body["output_ids"]) for body in answered)
    assert sum(sum(sequence.loss_mask) for sequence in trajectory.sequences()) == sampled
    assert result.observation.metrics["sampled_tokens"] == sampled
    assert result.observation.messages[0]["role"] == "user"


def test_every_reason_that_an_environment_knows_is_tried() -> None:
    tried = {reason for reason, _, _ in ENDS.values()}
    assert set(TerminationReason) - tried == {TerminationReason.MAX_MESSAGES_REACHED}  # no such budget here


async def test_a_partial_answer_is_kept_when_the_time_is_up(chatml_tokenizer: Any) -> None:
    async def slow(request: Any) -> Any:
        advance(LIMIT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return ScriptedAnswer("25 times", finish_reason="abort")

    env, _ = scripted_env(chatml_tokenizer, [CALL, slow], episode_timeout=LIMIT)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TIMEOUT
    assert result.error == "TimeoutError: the episode took longer than 60 seconds"
    assert result.observation.trajectory is not None
    assert [turn.status.value for turn in result.observation.trajectory.turns] == ["committed", "cut"]
    assert result.reward is None


async def test_a_timeout_with_an_answer_is_rewarded(chatml_tokenizer: Any) -> None:
    class Lingering(CalculatorEnv):
        def get_hooks(self) -> list[Any]:
            async def linger(event: MessageAddedEvent) -> None:
                if event.message["role"] == "assistant":
                    advance(LIMIT)
                    await asyncio.Event().wait()

            return [Hook(MessageAddedEvent, linger)]

    env, _ = scripted_env(chatml_tokenizer, [ANSWER])
    result = await Lingering(env.model_factory, reward_fn=env.reward_fn, episode_timeout=LIMIT).step(ASK)
    assert result.termination_reason is TerminationReason.TIMEOUT
    assert result.reward is not None and result.reward.reward == 1.0


# --- the environment's own code ---


async def test_a_factory_that_makes_nothing_gets_no_model_of_strands() -> None:
    result = await CalculatorEnv(lambda: None).step(ASK)  # type: ignore[arg-type, return-value]
    assert result.termination_reason is TerminationReason.AGENT_ERROR
    assert result.error is not None and "the model factory made no model" in result.error


@pytest.mark.parametrize("where", ["reset", "get_tools", "get_hooks", "model_factory", "cleanup"])
async def test_code_of_the_environment_that_raises_ends_the_episode_in_a_documented_way(
    where: str, chatml_tokenizer: Any
) -> None:
    env, _ = scripted_env(chatml_tokenizer, [ANSWER])

    def fail() -> Any:
        raise OSError("no room")

    async def fail_later() -> Any:
        fail()

    setattr(env, where, fail_later if where in ("reset", "cleanup") else fail)
    result = await env.step(ASK)
    if where == "cleanup":
        assert result.reward is not None and result.termination_reason is TerminationReason.TASK_COMPLETE
        return
    assert result.termination_reason is TerminationReason.AGENT_ERROR
    assert (result.error, result.reward) == ("OSError: no room", None)
    assert result.observation.messages == []
    assert env.steps[-1] == "cleanup"


async def test_an_error_of_another_provider_is_one_of_the_infrastructure(chatml_tokenizer: Any) -> None:
    model = ScriptedModel([[tool_use("1", "calculator", expression="25 * 17")], ConnectionResetError("gone")])
    result = await CalculatorEnv(lambda: model).step(ASK)
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert result.error == "ConnectionResetError: gone"


async def test_a_cleanup_that_hangs_is_given_up(chatml_tokenizer: Any) -> None:
    class Hanging(CalculatorEnv):
        async def cleanup(self) -> None:
            await super().cleanup()
            await asyncio.Event().wait()

    env, _ = scripted_env(chatml_tokenizer, [ANSWER])
    hanging = Hanging(env.model_factory, reward_fn=env.reward_fn, cleanup_timeout=0.2)
    assert (await hanging.step(ASK)).reward is not None
    assert hanging.steps == ["reset", "cleanup"]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (Gives(LookupError("no such answer")), "reward function: LookupError: no such answer"),
        (
            Gives(lambda: asyncio.Event().wait()),
            "reward function: TimeoutError: the reward function took longer than 0.2 seconds",
        ),
    ],
)
async def test_a_reward_function_that_fails_gives_no_reward_and_says_why(
    function: RewardFunction, error: str, chatml_tokenizer: Any
) -> None:
    env, _ = scripted_env(chatml_tokenizer, [ANSWER], reward_fn=function, reward_timeout=0.2)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert (result.reward, result.error) == (None, error)
    assert env.steps == ["reset", "cleanup"]


# --- tools that hang ---


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_tool_that_hangs_ends_with_an_error_and_the_episode_goes_on(kind: str, chatml_tokenizer: Any) -> None:
    import threading

    release = threading.Event()

    @tool(name="hang")
    async def hang_async() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return "never"

    @tool(name="hang")
    def hang_thread() -> str:
        """Hang."""
        release.wait(20)
        return "never"

    env, server = scripted_env(
        chatml_tokenizer,
        [call("hang") + CALL, ANSWER],
        more_tools=[hang_async if kind == "async" else hang_thread],
        tool_timeout=1.5,
    )
    result = await env.step(ASK)
    release.set()
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert "Error: the tool did not finish within 1.5 seconds." in server.requests[1].text
    assert "<tool_response>\n425\n</tool_response>" in server.requests[1].text
    assert result.observation.metrics["tools"]["hang"]["errors"] == 1
    assert env.ran == ["25 * 17"]


@pytest.mark.parametrize("outcome", ["result", "own timeout"])
async def test_a_tool_that_is_done_keeps_its_result_on_a_late_loop(outcome: str, chatml_tokenizer: Any) -> None:
    import threading
    import time

    loop, held = asyncio.get_running_loop(), threading.Event()

    def hold_the_loop_beyond_the_limit() -> None:
        held.set()
        time.sleep(0.3)  # the tool is done by then
        advance(LIMIT)

    @tool
    def quick() -> str:
        """Be done while the loop is held up."""
        loop.call_soon_threadsafe(hold_the_loop_beyond_the_limit)
        held.wait(20)
        if outcome == "own timeout":
            raise asyncio.TimeoutError("the database was slow")
        return "computed"

    env, server = scripted_env(chatml_tokenizer, [call("quick"), ANSWER], more_tools=[quick], tool_timeout=LIMIT)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert ("computed" if outcome == "result" else "the database was slow") in server.requests[1].text


async def test_a_tool_that_ignores_being_cancelled_cannot_hold_an_episode(
    chatml_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strands_env.core.supervision.INSIST_AFTER", 0.1)

    @tool
    async def stubborn() -> str:
        """Do not listen."""
        advance(LIMIT)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if (told := asyncio.current_task()) is not None and told.get_name() == "enough":
                    raise
                if told is not None:
                    told.set_name("enough")

    env, _ = scripted_env(chatml_tokenizer, [call("stubborn")], more_tools=[stubborn], episode_timeout=LIMIT)
    result = await asyncio.wait_for(env.step(ASK), 2 * LIMIT)
    assert result.termination_reason is TerminationReason.TIMEOUT
    assert env.steps == ["reset", "cleanup"]


@pytest.mark.parametrize("ended_by", ["time", "caller"])
async def test_a_timed_tool_is_at_its_end_before_the_cleanup(ended_by: str, chatml_tokenizer: Any) -> None:
    started = asyncio.Event()

    @tool
    async def lock() -> str:
        """Take a while to let go."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            env.steps.append("let go")
        return "never"

    env, _ = scripted_env(
        chatml_tokenizer,
        [call("lock")],
        more_tools=[lock],
        tool_timeout=2 * LIMIT,
        episode_timeout=LIMIT if ended_by == "time" else None,
    )
    step = asyncio.ensure_future(env.step(ASK))
    await started.wait()
    if ended_by == "caller":
        step.cancel()
    else:
        advance(LIMIT)
    await asyncio.wait({step})
    assert env.steps == ["reset", "let go", "cleanup"]


async def test_a_tool_that_ignores_its_callers_cancellation_is_told_again(
    chatml_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strands_env.core.supervision.INSIST_AFTER", 0.1)
    started, told = asyncio.Event(), []

    @tool
    async def stubborn() -> str:
        """Do not listen the first time."""
        started.set()
        while len(told) < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.append(True)
        raise asyncio.CancelledError

    env, _ = scripted_env(chatml_tokenizer, [call("stubborn")], more_tools=[stubborn])
    step = asyncio.ensure_future(env.step(ASK))
    await started.wait()
    step.cancel()
    await asyncio.wait({step}, timeout=20)
    assert step.cancelled()
    assert env.steps == ["reset", "cleanup"]


async def test_an_interrupt_that_nobody_answers_is_no_end_of_the_policys(chatml_tokenizer: Any) -> None:
    @tool(context=True)
    def ask_a_person(tool_context: Any) -> str:
        """Ask."""
        return str(tool_context.interrupt("approval", reason="may I?"))

    env, _ = scripted_env(chatml_tokenizer, [call("ask_a_person")], more_tools=[ask_a_person])
    result = await env.step(ASK)
    assert (result.termination_reason, result.reward) == (TerminationReason.AGENT_ERROR, None)
    assert result.error is not None and "interrupt" in result.error


# --- retries ---


async def test_a_failed_episode_is_begun_anew_where_that_is_asked_for(chatml_tokenizer: Any) -> None:
    env, _ = scripted_env(chatml_tokenizer, [CALL, FAULT, FAULT, CALL, ANSWER], retries=3, retry_delay=0.0)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.reward is not None
    assert result.observation.metrics["attempts"] == 3
    assert env.steps == ["reset", "cleanup"] * 3
    assert result.observation.trajectory is not None and len(result.observation.trajectory) == 2


async def test_retries_end(chatml_tokenizer: Any) -> None:
    env, server = scripted_env(chatml_tokenizer, [FAULT] * 3, retries=2, retry_delay=0.0)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert (result.observation.metrics["attempts"], len(server.requests)) == (3, 3)


async def test_an_abort_is_retried_only_where_it_is_named(chatml_tokenizer: Any) -> None:
    answers = [ScriptedAnswer("Well", finish_reason="abort"), ANSWER]
    env, _ = scripted_env(chatml_tokenizer, answers, retries=1)
    assert (await env.step(ASK)).termination_reason is TerminationReason.ABORTED
    named = [TerminationReason.ABORTED]
    env, _ = scripted_env(chatml_tokenizer, answers, retries=1, retry_on=named, retry_delay=0.0)
    assert (await env.step(ASK)).termination_reason is TerminationReason.TASK_COMPLETE


# --- cancelled callers ---


class Gate:
    """An answer that waits, and tells when it is asked for."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def __call__(self, request: Any) -> Any:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return ScriptedAnswer("25 times", finish_reason="abort")


async def test_a_cancelled_step_is_cleaned_up_and_leaves_what_was_recorded(chatml_tokenizer: Any) -> None:
    gate = Gate()
    env, server = scripted_env(chatml_tokenizer, [CALL, gate], retries=5)
    step = asyncio.ensure_future(env.step(ASK))
    await gate.asked.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert env.steps == ["reset", "cleanup"]
    result = env.last_result
    assert result is not None and result.termination_reason is TerminationReason.CANCELLED
    assert result.reward is None
    assert result.observation.trajectory is not None
    assert [turn.status.value for turn in result.observation.trajectory.turns] == ["committed", "cut"]
    assert server.running == []


async def test_a_step_that_anyio_has_cancelled_is_cleaned_up_idly(chatml_tokenizer: Any) -> None:
    """A11: a cancel scope cancels again in every round of the event loop, which must neither spin nor interrupt."""
    gate, finished = Gate(), []

    class SlowToClean(CalculatorEnv):
        async def cleanup(self) -> None:
            await asyncio.sleep(0.4)
            finished.append(True)

    env, _ = scripted_env(chatml_tokenizer, [CALL, gate])
    slow = SlowToClean(env.model_factory)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slow.step, ASK)
        await gate.asked.wait()
        used = time.thread_time()
        tasks.cancel_scope.cancel()
    assert time.thread_time() - used < 0.15
    assert finished == [True]
    result = slow.last_result
    assert result is not None and result.termination_reason is TerminationReason.CANCELLED
    assert [turn.status.value for turn in result.observation.trajectory.turns] == ["committed", "cut"]


@pytest.mark.parametrize("phase", ["reset", "metrics", "reward", "cleanup", "delay"])
async def test_a_step_that_is_cancelled_in_any_phase_is_cleaned_up_to_the_end(
    phase: str, chatml_tokenizer: Any
) -> None:
    reached, finished = asyncio.Event(), []

    async def wait(name: str) -> None:
        if name == phase:
            reached.set()
            await asyncio.sleep(0.2 if name == "cleanup" else 60)

    class Phases(CalculatorEnv):
        async def reset(self) -> None:
            await super().reset()
            await wait("reset")

        async def compute_metrics(self, observation: Any) -> dict[str, Any]:
            await wait("metrics")
            return {}

        async def cleanup(self) -> None:
            await wait("cleanup")
            await super().cleanup()
            finished.append(True)

    class Waits(RewardFunction):
        async def compute(self, **kwargs: Any) -> Any:
            await wait("reward")
            return 1.0

    answers = [FAULT] * 9 if phase == "delay" else [ANSWER]
    env, _ = scripted_env(chatml_tokenizer, answers)
    phases = Phases(env.model_factory, reward_fn=Waits(), retries=1, retry_delay=60.0)
    step = asyncio.ensure_future(phases.step(ASK))
    if phase == "delay":
        while not finished:
            await asyncio.sleep(0.01)
    else:
        await reached.wait()
    step.cancel()
    await asyncio.sleep(0)
    step.cancel()  # somebody in a hurry
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(step), 20)
    assert finished == [True]
    assert phases.steps == ["reset", "cleanup"]
    assert phases.last_result is not None
    if phase != "cleanup":
        assert phases.last_result.termination_reason is TerminationReason.CANCELLED
        assert phases.last_result.reward is None


async def test_prepared_and_cleaned_up_in_one_task(chatml_tokenizer: Any) -> None:
    tasks: list[Any] = []

    class Tasks(CalculatorEnv):
        async def reset(self) -> None:
            tasks.append(asyncio.current_task())

        async def cleanup(self) -> None:
            tasks.append(asyncio.current_task())

    env, _ = scripted_env(chatml_tokenizer, [ScriptedAnswer(ANSWER, latency_s=60)])
    await Tasks(env.model_factory, episode_timeout=0.2).step(ASK)
    assert tasks[0] is tasks[1]


async def test_a_bad_action_is_an_error_before_anything_runs(chatml_tokenizer: Any) -> None:
    env, server = scripted_env(chatml_tokenizer, [])
    with pytest.raises(ValueError, match="last message"):
        await env.step(Action(message=[{"role": "assistant", "content": "Hello."}]))
    assert (env.steps, server.requests) == ([], [])


RAISED = [
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    StopIteration(),
    GeneratorExit(),
    BaseException(),
]


@pytest.mark.parametrize("seconds", [None, LIMIT])
@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_a_tool_raises_is_an_error_that_the_model_sees(is_async: bool, seconds: float | None) -> None:
    # B9; a tool that evaluates what a model wrote raises SystemExit when that says `exit()`
    def raise_it(number: int) -> str:
        """Raise."""
        raise RAISED[number]

    async def raise_it_later(number: int) -> str:
        """Raise."""
        await asyncio.sleep(0)
        raise RAISED[number]

    function: Any = raise_it_later if is_async else raise_it
    answers: list[Any] = [[tool_use(str(n), "raise", number=n)] for n in range(len(RAISED))]
    env = CalculatorEnv(
        lambda: ScriptedModel([*answers, ANSWER]),
        Contains(),
        tools=[tool(function, name="raise")],
        tool_timeout=seconds,
    )
    result = await asyncio.wait_for(env.step(ASK), LIMIT)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE and result.reward is not None
    told = [message["content"][0]["toolResult"] for message in result.observation.messages[2::2]]
    assert [one["status"] for one in told] == ["error"] * len(RAISED)
    assert "exit (3)" in told[0]["content"][0]["text"] and "KeyboardInterrupt" in told[1]["content"][0]["text"]


@pytest.mark.parametrize("place", ["reset", "get_tools", "get_hooks", "cleanup", "compute_metrics", "model", "reward"])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("error", [error for error in RAISED if not isinstance(error, KeyboardInterrupt)], ids=repr)
async def test_whatever_code_of_an_environment_raises_ends_its_own_episode_only(
    place: str, is_async: bool, error: BaseException
) -> None:
    # B9; the caller is not cancelled, no event loop and no process ends
    def raises_it(*args: Any, **kwargs: Any) -> Any:
        raise error

    async def raises_it_later(*args: Any, **kwargs: Any) -> Any:
        raise error

    function = raises_it_later if is_async else raises_it
    reward = Contains()
    env = CalculatorEnv(function if place == "model" else lambda: ScriptedModel([ANSWER]), reward)
    if place == "reward":
        reward.compute = function  # type: ignore[method-assign]
    elif place != "model":
        setattr(env, place, function)
    result = await asyncio.wait_for(env.step(ASK), LIMIT)
    if place in ("cleanup", "compute_metrics", "reward"):
        assert result.termination_reason is TerminationReason.TASK_COMPLETE
        assert (result.reward is None) == (place == "reward") and (result.error is None) == (place == "cleanup")
    else:
        assert result.termination_reason is TerminationReason.AGENT_ERROR and result.error


# --- functions that hang ---


async def test_tools_that_hang_take_no_thread_from_others(chatml_tokenizer: Any) -> None:
    # B8; more of them than the event loop has threads
    hang, hung = threading.Event(), threading.Semaphore(0)

    @tool
    def fetch(url: str) -> str:
        """Fetch a page."""
        if url == "slow":
            hung.release()
            hang.wait(LIMIT)
        return "fetched"

    async def step(url: str) -> StepResult:
        model = ScriptedModel([[tool_use("1", "fetch", url=url)], ANSWER])
        return await CalculatorEnv(lambda: model, tools=[fetch], tool_timeout=LIMIT).step(ASK)

    try:
        slow = [asyncio.ensure_future(step("slow")) for _ in range(40)]
        for _ in slow:
            while not hung.acquire(blocking=False):
                await asyncio.sleep(0.005)
        quick = await step("quick")
        assert quick.observation.messages[2]["content"][0]["toolResult"]["status"] == "success"
        advance(LIMIT)
        for result in await asyncio.gather(*slow):
            assert "did not finish" in str(result.observation.messages[2])
    finally:
        hang.set()


@pytest.mark.parametrize("place", ["reset", "cleanup", "compute_metrics", "reward"])
async def test_code_of_an_environment_that_blocks_ends_with_its_limit_and_holds_up_nobody(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strands_env.core.environment.INSIST_AFTER", 0.1)
    hang, hung = threading.Event(), threading.Event()

    def hangs(*args: Any, **kwargs: Any) -> Any:
        hung.set()
        hang.wait(LIMIT)

    reward = Contains()
    limits: Any = dict.fromkeys(("episode_timeout", "reward_timeout", "cleanup_timeout"), LIMIT)
    env = CalculatorEnv(lambda: ScriptedModel([ANSWER]), reward, **limits)
    if place == "reward":
        reward.compute = hangs  # type: ignore[assignment]
    else:
        setattr(env, place, hangs)
    try:
        step = asyncio.ensure_future(env.step(ASK))
        while not hung.is_set():
            await asyncio.sleep(0.005)  # the event loop runs on
        advance(LIMIT)
        result = await step
    finally:
        hang.set()
    assert result.termination_reason is (
        TerminationReason.TIMEOUT if place == "reset" else TerminationReason.TASK_COMPLETE
    )


def test_a_process_does_not_wait_for_tools_that_hang() -> None:
    code = """
        import asyncio, threading
        from strands import tool
        from strands_env.core import Action
        from support.environments import CalculatorEnv
        from support.agents import ScriptedModel, tool_use

        @tool
        def hangs() -> str:
            "Hang."
            threading.Event().wait()

        model = ScriptedModel([[tool_use("1", "hangs")], "done"])
        result = asyncio.run(CalculatorEnv(lambda: model, tools=[hangs], tool_timeout=0.2).step(Action(message="x")))
        print(result.termination_reason.value)
    """
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "task_complete\n", ran


async def test_a_cleanup_that_swallows_its_cancellation_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # B15
    monkeypatch.setattr("strands_env.core.supervision.ABANDON_AFTER", 0.05)
    over, ended = asyncio.Event(), asyncio.Event()

    class Stubborn(CalculatorEnv):
        async def cleanup(self) -> None:
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    pass
            ended.set()

    env = Stubborn(
        lambda: ScriptedModel([ANSWER]), Contains(), cleanup_timeout=0.05, retries=3, retry_on=list(OUTCOMES)
    )
    result = await asyncio.wait_for(env.step(ASK), LIMIT)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE and result.reward is not None
    assert env.last_result is result and result.observation.metrics["attempts"] == 1
    over.set()
    await ended.wait()
    await asyncio.sleep(0.02)
    assert env.steps == ["reset"]  # what is left to itself does not begin another attempt


@pytest.mark.parametrize("place", ["reset", "reward"])
async def test_code_of_the_environment_that_wants_the_process_to_exit_ends_its_episode_only(place):
    class Exits(Contains):
        async def compute(self, *, action, step_result):
            raise SystemExit

    class Env(CalculatorEnv):
        async def reset(self):
            if place == "reset":
                raise SystemExit

    env = Env(lambda: ScriptedModel([ANSWER]), Exits(), tools=[])
    result = await env.step(ASK)
    assert result.reward is None and "SystemExit" in result.error and env.steps == ["cleanup"]
    assert result.termination_reason is (
        TerminationReason.AGENT_ERROR if place == "reset" else TerminationReason.TASK_COMPLETE
    )
