"""An environment: its steps, its identity, the models that factories make for it, and its episodes under slime."""

import ast
import asyncio
import base64
import contextlib
import functools
import gc
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
from contextlib import AsyncExitStack
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from strands import Agent, tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterToolCallEvent,
    BeforeModelCallEvent,
    HookProvider,
    MessageAddedEvent,
)
from strands.tools.tools import PythonAgentTool

from strands_env import slime
from strands_env.core import (
    Action,
    Environment,
    Observation,
    RewardError,
    RewardFunction,
    RewardResult,
    TaskContext,
    TerminationReason,
)
from strands_env.core.environment import read_conversation
from strands_env.core.identity import describe
from strands_env.core.models import (
    bedrock_model_factory,
    build_model_factory,
    openai_model_factory,
    sglang_model_factory,
)
from strands_env.core.supervision import queued, start_limited
from strands_env.environments import CalculatorEnvironment, MCPEnvironment
from strands_env.eval import CheckpointError, Evaluator
from strands_env.rewards import AllOf, ExactMatchReward, RegexReward, WeightedSum, WorkerLimits
from strands_env.sandbox import PythonSandbox
from strands_env.utils import clear_clients, get_cached_client, get_cached_client_from_slime_args
from strands_sglang import OUTCOMES, RewardRule, SGLangClient, SGLangConnectionError, SGLangModel, outages
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedSGLang
from support.agents import Gate, ScriptedModel, advance, build_chatml_tokenizer, call, idle_for, tool_use
from support.cpu_time import cpu_seconds, on_this_machine
from support.environments import (
    ANSWER,
    ASK,
    CALL,
    CalculatorEnv,
    Contains,
    Gives,
    StubEnvironment,
    lines,
    scripted_env,
    step_result,
    tasks,
)
from support.servers import client_in, network_of, plug, scripted, until_aborted
from support.slime import Sample, SlimeState, check_against_server, check_rollouts, slime_args, slime_sampling_params

# === a step is one episode: its observation, its reward, its own trajectory ===


async def test_step_returns_messages_tokens_reward_and_outcome():
    env, server = scripted_env([CALL, ANSWER])
    result = await env.step(ASK)
    observation = result.observation
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.error is None
    assert result.reward == RewardResult(reward=1.0, info={"verdict": "correct"})
    assert observation.final_response == ANSWER
    assert [message["role"] for message in observation.messages] == ["user", "assistant", "user", "assistant"]
    assert env.steps == ["reset", "cleanup"]
    tokens, [_, second] = observation.tokens, server.requests
    assert tokens is not None and observation.trajectory is not None
    sampled = [token for response in server.responses for token in response.body["output_ids"]]
    assert tokens.token_ids == second.input_ids + server.responses[1].body["output_ids"]
    assert [token for token, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if mask] == sampled
    assert len(tokens.rollout_token_ids) == len(tokens.rollout_loss_mask) == len(tokens.rollout_logprobs)
    assert [turn.status.value for turn in observation.trajectory.turns] == ["committed", "final"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_user_says_after_the_agents_turn_is_not_trained(chatml_tokenizer, is_async):
    class Talk(CalculatorEnv):
        def next_user_message(self, action, messages):
            assert action is ASK and messages[-1]["role"] == "assistant"
            return "And again?" if len(messages) == 4 else None

        if is_async:
            _answer = next_user_message

            async def next_user_message(self, action, messages):
                return self._answer(action, messages)

    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER, "It is still 425."])
    result = await Talk(sglang_model_factory(tokenizer=chatml_tokenizer, client=server.client())).step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.observation.final_response == "It is still 425."
    assert result.observation.metrics["model_calls"] == 3 and result.observation.metrics["sequences"] == 1
    tokens = result.observation.tokens
    sampled = [token for response in server.responses for token in response.body["output_ids"]]
    assert [token for token, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if mask] == sampled
    assert chatml_tokenizer.decode(tokens.token_ids).count("And again?") == 1


@pytest.mark.parametrize("said", ["Let me see.", ""])
@pytest.mark.parametrize("whole", [False, True])
async def test_final_response_is_what_the_model_wrote_before_a_cut_call(said, whole):
    written = said + (CALL if whole else CALL[: -len("}}\n</tool_call>")])
    env, _ = scripted_env([ScriptedAnswer(written, finish_reason="length")])
    result = await env.step(ASK)
    assert result.observation.final_response == (said or None)
    saved = Observation(messages=json.loads(json.dumps(result.observation.messages)))
    assert saved.final_response == (said or None)


async def test_metrics_count_calls_tokens_tools_and_errors():
    turns = [CALL + call("broken", reason="no") + "<tool_call>\n{not json\n</tool_call>", CALL, ANSWER]
    env, server = scripted_env(turns)
    metrics = (await env.step(ASK)).observation.metrics
    bodies = [response.body for response in server.responses]
    sampled = sum(len(body["output_ids"]) for body in bodies)
    assert metrics["model_calls"] == 3
    assert metrics["tool_iterations"] == 2
    assert metrics["tool_calls"] == 4
    assert metrics["tool_errors"] == 2
    assert metrics["tool_parse_errors"] == 1
    assert metrics["sampled_tokens"] == sampled
    assert metrics["total_tokens"] == metrics["input_tokens"] + sampled
    assert metrics["input_tokens"] == sum(len(request.input_ids) for request in server.requests)
    assert metrics["sequences"] == 1
    assert metrics["attempts"] == 1
    assert metrics["seconds"] > 0 and metrics["reward_seconds"] >= 0
    counted = {name: (one["calls"], one["errors"]) for name, one in metrics["tools"].items()}
    assert counted["calculator"] == (2, 0)
    assert counted["broken"] == (1, 1)
    assert sum(one["parse_errors"] for one in metrics["tools"].values()) == 1


async def test_limits_count_across_invocations():
    env, _ = scripted_env([CALL] * 99, max_tool_iterations=40)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.MAX_TOOL_ITERATIONS_REACHED
    assert (result.observation.metrics["tool_iterations"], len(env.ran)) == (40, 40)


async def test_invocation_state_lasts_a_long_episode():
    seen = []

    @tool(context=True)
    def count(tool_context: Any) -> str:
        """Count."""
        state = tool_context.invocation_state["request_state"]
        state["count"] = state.get("count", 0) + 1
        seen.append(state["count"])
        return "counted"

    env, _ = scripted_env([call("count")] * 40 + [ANSWER], more_tools=[count], max_tool_iterations=None)
    await env.step(ASK)
    assert seen == list(range(1, 41))


async def test_episodes_at_once_take_turns():
    """Each starts and asks in iterations of the event loop of its own; requests and timers of others run in between."""
    iterations, started, asked = 0, [], []

    def count():
        nonlocal iterations, counting
        iterations += 1
        counting = asyncio.get_running_loop().call_soon(count)

    class Model(ScriptedModel):
        async def stream(self, *args, **kwargs):
            asked.append(iterations)
            async for event in super().stream(*args, **kwargs):
                yield event

    def start():
        started.append(iterations)
        return Model([[tool_use("call_1")], ANSWER])

    counting = asyncio.get_running_loop().call_soon(count)
    results = await asyncio.gather(*(Environment(start).step(ASK) for _ in range(30)))
    counting.cancel()
    assert {result.termination_reason for result in results} == {TerminationReason.TASK_COMPLETE}
    assert len(set(started)) == 30
    assert len(set(asked)) == 60
    assert min(asked) <= min(started) + 1  # the first request does not wait for other starts


async def test_default_length_episode_is_one_invocation():
    ended = []
    env, _ = scripted_env([CALL] * 9 + [ANSWER], hooks=[Hook(AfterInvocationEvent, ended.append)])
    assert (await env.step(ASK)).termination_reason is TerminationReason.TASK_COMPLETE
    assert len(ended) == 1


async def test_steps_that_share_a_model_have_own_trajectories():
    env, server = scripted_env(lambda request: ANSWER if "tool_response" in request.text else CALL)
    results = await asyncio.gather(*(env.step(ASK) for _ in range(20)))
    assert len({id(result.observation.trajectory) for result in results}) == 20
    assert all(len(result.observation.trajectory) == 2 for result in results)
    assert all(result.reward.reward == 1.0 for result in results)
    assert sum(not request.is_prefill for request in server.requests) == 40


@pytest.mark.parametrize("is_async", [False, True])
async def test_model_factory_may_be_async_and_return_any_model(is_async):
    model = ScriptedModel([[tool_use("1", "calculator", expression="25 * 17")], "It is 425."])

    async def later():
        return model

    env = CalculatorEnv(later if is_async else lambda: model)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.observation.tokens is None and result.observation.trajectory is None
    assert result.reward is None
    assert result.observation.final_response == "It is 425."
    assert result.observation.metrics["model_calls"] == 2
    assert result.observation.metrics["tools"]["calculator"]["calls"] == 1


async def test_system_prompt_is_the_argument_or_the_file(tmp_path):
    class Prompted(CalculatorEnv):
        pass

    path = tmp_path / "prompt.md"
    path.write_text("From the file.\n", encoding="utf-8")
    env, server = scripted_env([ANSWER, ANSWER, ANSWER])
    Prompted.default_system_prompt_path = path
    chat = [{"role": "system", "content": "From the task."}, {"role": "user", "content": "Go."}]
    await Prompted(env.model_factory).step(ASK)
    await Prompted(env.model_factory, system_prompt="Given.").step(ASK)
    await Prompted(env.model_factory, system_prompt="Given.").step(Action(message=chat))
    told = [request.text.split("<|im_end|>")[0] for request in server.requests]
    assert told[0].startswith("<|im_start|>system\nFrom the file.")
    assert told[1].startswith("<|im_start|>system\nGiven.")
    assert told[2].startswith("<|im_start|>system\nGiven.\n\nFrom the task.")


async def test_history_precedes_the_prompt_and_is_not_observed():
    history = [{"role": "user", "content": "My name is Ann."}, {"role": "assistant", "content": "Hello Ann."}]
    env, server = scripted_env(["Ann."])
    action = Action(message="Who am I?", task_context={"conversation_history": history})
    before = action.model_dump()
    result = await env.step(action)
    assert [message["role"] for message in result.observation.messages] == ["user", "assistant"]
    assert "Hello Ann.<|im_end|>" in server.requests[0].text
    assert action.model_dump() == before


async def test_tool_calls_in_the_action_are_not_counted():
    used = {"toolUse": {"toolUseId": "a", "name": "calculator", "input": {"expression": "1 * 1"}}}
    answered = {"toolResult": {"toolUseId": "a", "status": "success", "content": [{"text": "1"}]}}
    chat = [
        {"role": "user", "content": [{"text": "1 * 1?"}]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [answered]},
        {"role": "assistant", "content": [{"text": "1"}]},
        {"role": "user", "content": [{"text": "25 * 17?"}]},
    ]
    env, _ = scripted_env([CALL, ANSWER], max_tool_calls=2)
    result = await env.step(Action(message=chat, task_context=ASK.task_context))
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.observation.metrics["tool_calls"] == 1
    assert len(result.observation.messages) == 8


async def test_compute_metrics_may_replace_the_metrics_and_adds_to_them():
    class Replacing(CalculatorEnv):
        async def compute_metrics(self, observation):
            observation.metrics = {"calls": observation.metrics["tool_calls"]}
            return {"ran": len(self.ran)}

    env, _ = scripted_env([CALL, ANSWER])
    metrics = (await Replacing(env.model_factory).step(ASK)).observation.metrics
    assert metrics == {"calls": 1, "ran": 1, "attempts": 1}


async def test_verbose_prints_the_episode(capsys):
    for verbose in (False, True):
        env, _ = scripted_env([ANSWER], verbose=verbose)
        await env.step(ASK)
        assert (ANSWER in capsys.readouterr().out) is verbose


async def test_steps_work_in_several_event_loops():
    env, _ = scripted_env([ANSWER] * 3)
    results = [await asyncio.to_thread(asyncio.run, env.step(ASK)) for _ in range(3)]
    assert [result.reward.reward for result in results] == [1.0] * 3


@pytest.mark.parametrize(
    "setting",
    [
        {"max_tool_iterations": -1},
        {"max_tool_calls": 1.5},
        {"max_turns": 0},
        {"max_sampled_tokens": 0},
        {"max_total_tokens": True},
        {"episode_timeout": 0},
        {"tool_timeout": -1.0},
        {"reward_timeout": float("nan")},
        {"retries": -1},
    ],
    ids=str,
)
def test_invalid_setting_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Environment(lambda: None, **setting)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5), Fraction(1, 2), np.array(0.5)], ids=repr)
async def test_numbers_of_any_library_are_rewards(value):
    """A reward that was a NumPy number ended in an error."""
    env, _ = scripted_env([ANSWER], reward_fn=Gives(value))
    assert (await env.step(ASK)).reward == RewardResult(reward=0.5)


@pytest.mark.parametrize("value", [None, float("nan"), "1.0", RewardResult(reward=float("inf"))], ids=repr)
async def test_non_finite_reward_is_no_reward(value):
    env, _ = scripted_env([ANSWER], reward_fn=Gives(value))
    result = await env.step(ASK)
    assert result.reward is None
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.error is not None and result.error.startswith("reward function: ")


@pytest.mark.parametrize(
    ("error", "is_infrastructure"),
    [
        (RewardError("the judge is gone", is_infrastructure=True), True),
        (RewardError("the judge rambles"), False),
        (ConnectionError("raised by what the answer made the reward do"), False),
        (MemoryError(), False),
    ],
)
async def test_reward_error_reports_infrastructure(error, is_infrastructure):
    env, _ = scripted_env([ANSWER], reward_fn=Gives(error))
    result = await env.step(ASK)
    assert result.reward is None
    assert result.reward_error is not None and result.reward_error.startswith(type(error).__name__)
    assert result.reward_error_is_infrastructure is is_infrastructure


async def test_judge_on_the_same_model_is_in_no_trajectory(chatml_tokenizer):
    class Judge(RewardFunction):
        async def compute(self, **kwargs):
            verdict = await Agent(model=model, callback_handler=None).invoke_async(ASK.message)
            return RewardResult(reward=1.0, info={"verdict": str(verdict)})

    server = ScriptedSGLang(chatml_tokenizer, lambda request: ANSWER)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    env = Environment(lambda: model, reward_fn=Judge())
    results = await asyncio.gather(*(env.step(ASK) for _ in range(5)))
    assert [len(result.observation.trajectory) for result in results] == [1] * 5
    assert len(model.trajectory) == 0 and len(server.requests) == 10


# --- exceptions of the user's code ---


@pytest.mark.parametrize("kind", [Exception, BaseException])
@pytest.mark.parametrize("place", ["reset", "compute_metrics"])
async def test_exception_without_a_text_ends_its_own_episode(place, kind):
    """An exception whose `__str__` raises blocked the episode or ended others."""

    class MuteError(kind):
        def __str__(self):
            raise ValueError("no text")

    def fails(*args):
        raise MuteError

    env = CalculatorEnv(lambda: ScriptedModel([ANSWER]), Contains())
    setattr(env, place, fails)
    assert "MuteError" in str((await asyncio.wait_for(env.step(ASK), 5)).error)


@pytest.mark.parametrize(
    ("function", "name", "shown"),
    [
        (Evaluator.__init__, "success_threshold", lambda default: f"{default:.1f} by default"),
        (MCPEnvironment.__init__, "max_result_chars", lambda default: f"{default:,} by default"),
        (RegexReward.__init__, "limits", lambda default: f"default {default.cpu_s:g} second of CPU time and"),
        (RegexReward.__init__, "limits", lambda default: f"{default.memory_bytes >> 20} MiB of memory"),
    ],
)
def test_values_of_constant_defaults_are_documented(function, name, shown):
    """The reference shows only the constant's name, so the docstring repeats the value."""
    default = inspect.signature(function).parameters[name].default
    assert shown(default) in " ".join(inspect.getdoc(function).split())


# --- the answer without reasoning ---


def answer(text):
    return Observation(messages=[{"role": "assistant", "content": [{"text": text}]}]).final_response


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  as it is\n", "  as it is\n"),
        ("", ""),
        ("<think>a</think>b", "b"),
        ("<think>\na\n</think>\n\nb", "b"),
        ("a</think>b", "b"),
        ("a<think>b</think>c", "ac"),
        ("a<think>b", "a"),
        ("<think>a", None),
        ("<think>a</think>", None),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("<THINKING>a</THINKING>b", "b"),
        ("<seed:think>a</seed:think>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("\u25c1think\u25b7a\u25c1/think\u25b7b", "b"),
        ("I think> that <b>x</b>", "I think> that <b>x</b>"),
    ],
)
def test_final_response_excludes_reasoning(text, expected):
    """Reasoning was part of the answer."""
    assert answer(text) == expected


@pytest.mark.parametrize("part", ["<think>", "</think>", "<think>a</think>", "<", "a"])
def test_without_thinking_takes_linear_time(part):
    assert cpu_seconds(lambda: answer(part * (1_000_000 // len(part)))) < on_this_machine(5)


def test_only_environment_creates_and_invokes_agents():
    """Agents invoked elsewhere have no budgets, no own trajectory and no cleanup."""
    package = Path(inspect.getfile(Environment)).parent.parent
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = getattr(node, "func", None)
            name = getattr(function, "attr", None) or getattr(function, "id", None)
            if name in ("Agent", "invoke_async", "stream_async", "structured_output_async"):
                found.append((path.relative_to(package).as_posix(), name))
    assert sorted(found) == [("core/environment.py", "Agent"), ("core/environment.py", "invoke_async")]


# --- every outcome: its reward, its record, its cleanup ---


FAULT = ScriptedFault(status=500)
LIMIT = 60.0  # seconds; only `late` exceeds it


def late(request):
    """Answer when it is too late."""
    advance(LIMIT)
    return ScriptedAnswer("Too late.", latency_s=LIMIT)


class Hook(HookProvider):
    """Hook that calls a function at an event."""

    def __init__(self, kind, function):
        self.kind, self.function = kind, function

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(self.kind, self.function)


CANCELS = Hook(AfterToolCallEvent, lambda event: event.agent.cancel())
FAILS = Hook(BeforeModelCallEvent, lambda event: 1 / 0)


def cancelled_from_within(event):
    raise asyncio.CancelledError


LONG = Action(message="a question that is longer than the context of the model " * 5, task_context=ASK.task_context)

ENDS = {
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
async def test_episode_ends_as_in_the_table(name):
    reason, answers, settings = ENDS[name]
    settings = dict(settings)
    action = settings.pop("action", ASK)
    env, server = scripted_env(answers, **settings)
    result = await env.step(action)

    assert result.termination_reason is reason, result.error
    assert env.steps == ["reset", "cleanup"]
    assert env.last_result is result
    has_reward = OUTCOMES[reason].reward is RewardRule.COMPUTED
    assert (result.reward is not None) is has_reward is bool(env.reward_fn.asked)  # type: ignore[union-attr]
    limits = OUTCOMES[reason].reward is RewardRule.COMPUTED or "cancels" in name
    assert (result.error is None) is limits
    # Everything sampled is recorded, and every sampled token is trained once.
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


def test_table_covers_every_outcome():
    tried = {reason for reason, _, _ in ENDS.values()}
    elsewhere = {TerminationReason.MAX_MESSAGES_REACHED, TerminationReason.INTERRUPTED}  # no such budget; test_durable
    assert set(TerminationReason) - tried == elsewhere


async def test_partial_answer_is_kept_on_timeout():
    async def slow(request):
        advance(LIMIT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return ScriptedAnswer("25 times", finish_reason="abort")

    env, _ = scripted_env([CALL, slow], episode_timeout=LIMIT)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TIMEOUT
    assert result.error == "TimeoutError: the episode took longer than 60 seconds"
    assert result.observation.trajectory is not None
    assert [turn.status.value for turn in result.observation.trajectory.turns] == ["committed", "cut"]
    assert result.reward is None


async def test_timeout_with_an_answer_is_rewarded():
    class Lingering(CalculatorEnv):
        def get_hooks(self):
            async def linger(event):
                if event.message["role"] == "assistant":
                    advance(LIMIT)
                    await asyncio.Event().wait()

            return [Hook(MessageAddedEvent, linger)]

    env, _ = scripted_env([ANSWER])
    result = await Lingering(env.model_factory, reward_fn=env.reward_fn, episode_timeout=LIMIT).step(ASK)
    assert result.termination_reason is TerminationReason.TIMEOUT
    assert result.reward is not None and result.reward.reward == 1.0


# --- the environment's own code ---


async def test_factory_that_returns_none_is_an_error():
    result = await CalculatorEnv(lambda: None).step(ASK)  # type: ignore[arg-type, return-value]
    assert result.termination_reason is TerminationReason.AGENT_ERROR
    assert result.error is not None and "the model factory returned None" in result.error


@pytest.mark.parametrize("names", [("one",), ("two", "three")])
@pytest.mark.parametrize("is_dead", [True, False])
async def test_a_timeout_is_the_servers_if_none_answers(names, is_dead, chatml_tokenizer, monkeypatch):
    """Otherwise a policy is punished for a server that died."""
    monkeypatch.setattr("strands_env.core.environment.SILENT_S", 0.05)
    hosts = [f"{name}{is_dead:d}" for name in names]  # outages of other tests are known for a while
    network = network_of(**dict.fromkeys(hosts, scripted(CALL)))

    slow = scripted(until_aborted("no"))
    ending = []

    async def end():
        while not ({f"http://{host}" for host in hosts} <= silent() if is_dead else slow.requests):
            await asyncio.sleep(0.001)
        advance(LIMIT)

    def silent():
        return {outage.base_url for outage in outages() if outage.seconds >= 0.05}

    class Dies(HookProvider):
        def register_hooks(self, registry):
            registry.add_callback(AfterToolCallEvent, self.die)

        def die(self, event):
            plug(network, **{**dict.fromkeys(hosts), **({} if is_dead else {hosts[-1]: slow})})
            ending.append(asyncio.ensure_future(end()))

    client = client_in(network, *hosts, max_retries=1000, retry_delay=0.001)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client)
    env = CalculatorEnv(lambda: model, reward_fn=Contains(), hooks=[Dies()], episode_timeout=LIMIT)
    result = await env.step(ASK)
    if is_dead:
        assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR and result.reward is None
        told = f"took longer than 60 seconds, and http://{hosts[0]} had not answered for [01] s$"
        assert re.search(told, result.error)
    else:
        assert result.termination_reason is TerminationReason.TIMEOUT


async def test_error_of_another_provider_is_infrastructure():
    model = ScriptedModel([[tool_use("1", "calculator", expression="25 * 17")], ConnectionResetError("gone")])
    result = await CalculatorEnv(lambda: model).step(ASK)
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert result.error == "ConnectionResetError: gone"


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
async def test_failing_reward_function_is_reported(function, error):
    env, _ = scripted_env([ANSWER], reward_fn=function, reward_timeout=0.2)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert (result.reward, result.error) == (None, error)
    assert not result.reward_error_is_infrastructure
    assert env.steps == ["reset", "cleanup"]


# --- hanging tools ---


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_hanging_tool_is_an_error_and_the_episode_continues(kind):
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
async def test_finished_tool_keeps_its_result_on_a_late_loop(outcome):
    loop, held, threads = asyncio.get_running_loop(), threading.Event(), []

    def hold_the_loop_beyond_the_limit():
        held.set()
        threads[0].join(LIMIT)  # the tool is done by then
        advance(LIMIT)

    @tool
    def quick() -> str:
        """Be done while the loop is held up."""
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(hold_the_loop_beyond_the_limit)
        held.wait(20)
        if outcome == "own timeout":
            raise asyncio.TimeoutError("the database was slow")
        return "computed"

    env, server = scripted_env([call("quick"), ANSWER], more_tools=[quick], tool_timeout=LIMIT)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert ("computed" if outcome == "result" else "the database was slow") in server.requests[1].text


async def test_a_time_limit_that_passes_before_a_task_queues_still_ends_it():
    # The task blocks the event loop beyond its limit and queues before the timer can fire.
    fired = []
    is_late = asyncio.Event()

    async def work():
        for _ in range(2):  # and a limit ends a task only once
            with queued():
                await asyncio.sleep(0)
            await is_late.wait()

    def end():
        fired.append(True)
        is_late.set()

    await asyncio.wait_for(start_limited(work(), 0.0, end), LIMIT)
    assert fired == [True]


def end_step(step, ended_by):
    """End a step, whose limit is `LIMIT`."""
    if ended_by == "caller":
        step.cancel()
    else:
        advance(LIMIT)


@pytest.mark.parametrize("ended_by", ["time", "caller"])
async def test_timed_tool_ends_before_cleanup(ended_by):
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
        [call("lock")],
        more_tools=[lock],
        tool_timeout=2 * LIMIT,
        episode_timeout=LIMIT,
    )
    step = asyncio.ensure_future(env.step(ASK))
    await started.wait()
    end_step(step, ended_by)
    await asyncio.wait({step})
    assert env.steps == ["reset", "let go", "cleanup"]


@pytest.mark.parametrize("ended_by", ["time", "caller"])
async def test_tool_that_ignores_cancellation_is_cancelled_again(ended_by, monkeypatch):
    monkeypatch.setattr("strands_env.core.supervision.RECANCEL_AFTER", 0.1)
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

    env, _ = scripted_env([call("stubborn")], more_tools=[stubborn], episode_timeout=LIMIT)
    step = asyncio.ensure_future(env.step(ASK))
    await started.wait()
    end_step(step, ended_by)
    await asyncio.wait({step}, timeout=20)
    reason = {"time": TerminationReason.TIMEOUT, "caller": TerminationReason.CANCELLED}[ended_by]
    assert step.done() and env.last_result.termination_reason is reason
    assert step.cancelled() is (ended_by == "caller")
    assert env.steps == ["reset", "cleanup"]


async def test_unanswered_interrupt_is_an_agent_error():
    @tool(context=True)
    def ask_a_person(tool_context: Any) -> str:
        """Ask."""
        return str(tool_context.interrupt("approval", reason="may I?"))

    env, _ = scripted_env([call("ask_a_person")], more_tools=[ask_a_person])
    result = await env.step(ASK)
    assert (result.termination_reason, result.reward) == (TerminationReason.AGENT_ERROR, None)
    assert result.error is not None and "interrupt" in result.error


# --- retries ---


async def test_failed_episode_is_retried():
    env, _ = scripted_env([CALL, FAULT, FAULT, CALL, ANSWER], retries=3, retry_delay=0.0)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.reward is not None
    assert result.observation.metrics["attempts"] == 3
    assert env.steps == ["reset", "cleanup"] * 3
    assert result.observation.trajectory is not None and len(result.observation.trajectory) == 2


async def test_retries_end():
    env, server = scripted_env([FAULT] * 3, retries=2, retry_delay=0.0)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert (result.observation.metrics["attempts"], len(server.requests)) == (3, 3)


async def test_abort_is_retried_only_if_named():
    answers = [ScriptedAnswer("Well", finish_reason="abort"), ANSWER]
    env, _ = scripted_env(answers, retries=1)
    assert (await env.step(ASK)).termination_reason is TerminationReason.ABORTED
    named = [TerminationReason.ABORTED]
    env, _ = scripted_env(answers, retries=1, retry_on=named, retry_delay=0.0)
    assert (await env.step(ASK)).termination_reason is TerminationReason.TASK_COMPLETE


# --- cancelled callers ---


async def test_cancelled_step_is_cleaned_up_and_keeps_its_record():
    gate = Gate(ScriptedAnswer("25 times", finish_reason="abort"))
    env, server = scripted_env([CALL, gate], retries=5)
    step = asyncio.ensure_future(env.step(ASK))
    await gate.reached.wait()
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


async def test_cleanup_in_a_cancelled_scope_does_not_spin():
    """A cancel scope cancels in every iteration of the event loop: no spinning, no interrupted cleanup."""
    gate, finished = Gate(ScriptedAnswer("25 times", finish_reason="abort")), []

    class SlowToClean(CalculatorEnv):
        async def cleanup(self):
            await asyncio.sleep(0.4)
            finished.append(True)

    env, _ = scripted_env([CALL, gate])
    slow = SlowToClean(env.model_factory)
    async with AsyncExitStack() as idle:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow.step, ASK)
            await gate.reached.wait()
            idle.enter_context(idle_for(0.15))
            tasks.cancel_scope.cancel()
    assert finished == [True]
    result = slow.last_result
    assert result is not None and result.termination_reason is TerminationReason.CANCELLED
    assert [turn.status.value for turn in result.observation.trajectory.turns] == ["committed", "cut"]


@pytest.mark.parametrize("phase", ["reset", "metrics", "reward", "cleanup", "delay"])
async def test_step_cancelled_in_any_phase_is_cleaned_up(phase):
    reached, finished = asyncio.Event(), []

    async def wait(name):
        if name == phase:
            reached.set()
            await asyncio.sleep(0.2 if name == "cleanup" else 60)

    class Phases(CalculatorEnv):
        async def reset(self):
            await super().reset()
            await wait("reset")

        async def compute_metrics(self, observation):
            await wait("metrics")
            return {}

        async def cleanup(self):
            await wait("cleanup")
            await super().cleanup()
            finished.append(True)

    class Waits(RewardFunction):
        async def compute(self, **kwargs):
            await wait("reward")
            return 1.0

    answers = [FAULT] * 9 if phase == "delay" else [ANSWER]
    env, _ = scripted_env(answers)
    phases = Phases(env.model_factory, reward_fn=Waits(), retries=1, retry_delay=60.0)
    step = asyncio.ensure_future(phases.step(ASK))
    if phase == "delay":
        while not finished:
            await asyncio.sleep(0.01)
    else:
        await reached.wait()
    step.cancel()
    await asyncio.sleep(0)
    step.cancel()  # a second cancellation
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(step), 20)
    assert finished == [True]
    assert phases.steps == ["reset", "cleanup"]
    assert phases.last_result is not None
    if phase != "cleanup":
        assert phases.last_result.termination_reason is TerminationReason.CANCELLED
        assert phases.last_result.reward is None


@pytest.mark.parametrize("iterations", range(4))
async def test_step_cancelled_before_its_turn_delays_no_other(iterations):
    environments = [CalculatorEnv(lambda: ScriptedModel([ANSWER])) for _ in range(8)]
    steps = [asyncio.ensure_future(env.step(ASK)) for env in environments]
    for _ in range(iterations):
        await asyncio.sleep(0)
    for step in steps[::2]:
        step.cancel()
    ended = await asyncio.wait_for(asyncio.gather(*steps, return_exceptions=True), 20)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended[::2])
    assert [end.termination_reason for end in ended[1::2]] == [TerminationReason.TASK_COMPLETE] * 4
    for env in environments[::2] if iterations else []:  # tasks that never ran have no result
        assert env.last_result.termination_reason is TerminationReason.CANCELLED
        assert env.steps in (["cleanup"], ["reset", "cleanup"])


async def test_reset_and_cleanup_run_in_one_task():
    tasks = []

    class Tasks(CalculatorEnv):
        async def reset(self):
            tasks.append(asyncio.current_task())

        async def cleanup(self):
            tasks.append(asyncio.current_task())

    env, _ = scripted_env([ScriptedAnswer(ANSWER, latency_s=60)])
    await Tasks(env.model_factory, episode_timeout=0.2).step(ASK)
    assert tasks[0] is tasks[1]


async def test_invalid_action_is_refused_before_anything_runs():
    env, server = scripted_env([])
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
async def test_every_exception_of_a_tool_is_shown_to_the_model(is_async, seconds):
    # A tool that evaluates a model's code raises SystemExit when the code calls `exit()`.
    def raise_it(number):
        """Raise."""
        raise RAISED[number]

    async def raise_it_later(number):
        """Raise."""
        await asyncio.sleep(0)
        raise RAISED[number]

    function = raise_it_later if is_async else raise_it
    answers = [[tool_use(str(n), "raise", number=n)] for n in range(len(RAISED))]
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


@pytest.mark.parametrize("odd", [{}, {"toolUseId": ["0"]}], ids=repr)
async def test_a_malformed_result_of_a_tool_is_an_agent_error(odd):
    result = {"status": "error", "content": [{"text": "no"}], **odd}
    spec = {"name": "odd", "description": "Odd.", "inputSchema": {"json": {"type": "object", "properties": {}}}}
    tools = [PythonAgentTool("odd", spec, lambda *args, **kwargs: result)]
    env = CalculatorEnv(lambda: ScriptedModel([[tool_use("0", "odd")], ANSWER]), tools=tools)
    ended = await asyncio.wait_for(env.step(ASK), LIMIT)
    assert ended.termination_reason is TerminationReason.AGENT_ERROR and ended.error
    assert ended.observation.metrics["tools"]["odd"]["calls"] == 1


@pytest.mark.parametrize("place", ["reset", "get_tools", "get_hooks", "cleanup", "compute_metrics", "model", "reward"])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("no room"), "OSError: no room"),
        (SystemExit(3), "SystemExit: the code called exit (3)"),
        (asyncio.CancelledError(), "the code raised CancelledError"),
        (StopIteration(), " raised StopIteration"),
        (GeneratorExit(), "the code raised GeneratorExit"),
        (BaseException(), "the code raised BaseException"),
    ],
    ids=repr,
)
async def test_every_exception_ends_only_its_own_episode(place, is_async, error, told):
    # The caller is not cancelled, and no event loop or process ends.
    def raises_it(*args, **kwargs):
        raise error

    async def raises_it_later(*args, **kwargs):
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
        if place == "compute_metrics":
            assert result.error.startswith("compute_metrics: ")
    else:
        assert result.termination_reason is TerminationReason.AGENT_ERROR
        assert result.error.endswith(told)
        assert (result.reward, result.observation.messages) == (None, [])
    assert (env.steps[-1] == "cleanup") is (place != "cleanup")


# --- hanging functions ---


async def test_hanging_tools_take_no_thread_from_others():
    # More of them than the event loop has threads.
    hang, hung = threading.Event(), threading.Semaphore(0)

    @tool
    def fetch(url: str) -> str:
        """Fetch a page."""
        if url == "slow":
            hung.release()
            hang.wait(LIMIT)
        return "fetched"

    async def step(url):
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


async def test_tool_parameters_may_have_any_name() -> None:
    @tool
    def plot(function: str) -> str:
        """Plot a function."""
        return f"plotted {function}"

    model = ScriptedModel([[tool_use("1", "plot", function="sin")], ANSWER])
    result = await CalculatorEnv(lambda: model, tools=[plot]).step(ASK)
    assert result.observation.messages[2]["content"][0]["toolResult"]["content"] == [{"text": "plotted sin"}]


@pytest.mark.skipif("delegate" not in inspect.signature(Agent.as_tool).parameters, reason="a later version of Strands")
@pytest.mark.parametrize("seconds", [None, 60])
async def test_an_agent_to_which_a_task_is_delegated_ends_the_episode(seconds):
    helper = Agent(model=ScriptedModel(["It is 425."]), name="helper", callback_handler=None)
    model = ScriptedModel([[tool_use("1", "helper", input="25 * 17")], ANSWER])
    env = CalculatorEnv(lambda: model, tools=[helper.as_tool(delegate=True)], tool_timeout=seconds)
    result = await env.step(ASK)
    assert len(model.calls) == 1 and result.observation.final_response == "It is 425."


@pytest.mark.parametrize("place", ["reset", "cleanup", "compute_metrics", "reward"])
async def test_blocking_code_times_out_and_blocks_no_other_step(place, monkeypatch):
    monkeypatch.setattr("strands_env.core.environment.RECANCEL_AFTER", 0.1)
    hang, hung = threading.Event(), threading.Event()

    def hangs(*args, **kwargs):
        hung.set()
        hang.wait(LIMIT)

    reward = Contains()
    limits = dict.fromkeys(("episode_timeout", "reward_timeout", "cleanup_timeout"), LIMIT)
    env = CalculatorEnv(lambda: ScriptedModel([ANSWER]), reward, **limits)
    if place == "reward":
        reward.compute = hangs  # type: ignore[assignment]
    else:
        setattr(env, place, hangs)
    try:
        step = asyncio.ensure_future(env.step(ASK))
        while not hung.is_set():
            await asyncio.sleep(0.005)  # the event loop keeps running
        advance(LIMIT)
        result = await step
    finally:
        hang.set()
    assert result.termination_reason is (
        TerminationReason.TIMEOUT if place == "reset" else TerminationReason.TASK_COMPLETE
    )


def test_process_does_not_wait_for_hanging_tools():
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


@pytest.mark.parametrize("what", ["reward", "part of a reward", "metrics"])
async def test_what_ignores_its_cancellation_after_the_episode_is_ended(monkeypatch, what):
    monkeypatch.setattr("strands_env.core.supervision.RECANCEL_AFTER", 0.01)
    ended, unheard = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))

    async def ignore(*args, **kwargs):
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        finally:
            ended.append(what)

    class Stubborn(RewardFunction):
        async def compute(self, **kwargs):
            return 1.0 if what == "metrics" else await ignore()

    reward = WeightedSum({"part": (Stubborn(), 1.0)}) if what == "part of a reward" else Stubborn()
    environment = Environment(lambda: ScriptedModel(["4"]), reward, reward_timeout=0.01)
    if what == "metrics":
        environment.compute_metrics = ignore
    before = asyncio.all_tasks()
    result = await asyncio.wait_for(environment.step(tasks(1)[0]), 10)
    assert ended == [what] and "longer than 0.01 seconds" in result.error
    assert (result.reward is None) == (what != "metrics")
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()
    gc.collect()
    assert unheard == []


async def test_cleanup_that_ignores_cancellation_is_abandoned(monkeypatch):
    # The step waited forever.
    monkeypatch.setattr("strands_env.core.supervision.ABANDON_AFTER", 0.05)
    over, ended = asyncio.Event(), asyncio.Event()

    class Stubborn(CalculatorEnv):
        async def cleanup(self):
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
    assert env.steps == ["reset"]  # an abandoned episode is not retried


# --- the forms of an action's messages ---


HELLO = {"role": "user", "content": [{"text": "Hello."}]}


def read(message, history=()):
    return read_conversation(Action(message=message, task_context={"conversation_history": list(history)}))


@pytest.mark.parametrize(
    "message",
    [
        "Hello.",
        HELLO,
        [HELLO],
        {"role": "user", "content": "Hello."},
        [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}],
        [{"role": "user", "content": ["Hello."]}],
    ],
    ids=str,
)
def test_text_message_and_chat_are_equivalent(message):
    found = read(message)
    assert (found.system, found.history, found.prompt) == ([], [], HELLO)


def test_system_messages_are_separated():
    chat = [{"role": "system", "content": "A"}, {"role": "developer", "content": [{"type": "text", "text": "B"}]}]
    assert read([*chat, HELLO]).system == ["A", "B"]
    with pytest.raises(ValueError, match=r"message\[1\]: system messages must come before"):
        read([HELLO, chat[0], HELLO])


def test_history_is_distinguished_from_the_message():
    answer = {"role": "assistant", "content": "Yes?"}
    found = read([HELLO, answer, HELLO], [HELLO, answer])
    assert [message["role"] for message in found.history] == ["user", "assistant"] * 2
    assert found.history_length == 2


def test_openai_tool_calls_become_strands_blocks():
    calls = [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": {"x": 2}}},
    ]
    found = read(
        [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "assistant", "content": "Done."},
            HELLO,
        ]
    )
    _, called, answered, _ = found.history
    assert [block["toolUse"]["input"] for block in called["content"]] == [{"x": 1}, {"x": 2}]
    assert [block["toolResult"]["toolUseId"] for block in answered["content"]] == ["a", "b"]


def test_image_is_read_from_its_data_url():
    pixel = b"\x89PNG-not-really"
    url = "data:image/png;base64," + base64.b64encode(pixel).decode()
    found = read({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
    assert found.prompt["content"] == [{"image": {"format": "png", "source": {"bytes": pixel}}}]


@pytest.mark.parametrize(
    "message",
    [
        [],
        [{"role": "assistant", "content": "Hello."}],
        [{"content": "Hello."}],
        [{"role": "critic", "content": "Hello."}],
        {"role": "user", "content": 7},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,??"}}]},
        [{"role": "tool", "content": "1"}, HELLO],
        [{"role": "system", "content": [{"image": {}}]}, HELLO],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}, HELLO],
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "add", "arguments": "[]"}}]}, HELLO],
        ["Hello."],
    ],
    ids=str,
)
def test_unsupported_messages_are_refused(message):
    with pytest.raises(ValueError):
        read(message)


def test_conversation_shares_nothing_with_the_action():
    action = Action(message=HELLO, task_context={"conversation_history": [HELLO]})
    found = read_conversation(action)
    found.prompt["content"][0]["text"] = found.history[0]["content"][0]["text"] = "changed"
    assert action.message["content"][0]["text"] == "Hello."
    assert action.task_context.conversation_history[0]["content"][0]["text"] == "Hello."


# === results of different environments, rewards or servers are never mixed ===


class Scripted(Environment):
    """An environment without a model."""

    steps = 0

    def __init__(self, model_factory=None, *args, level=1, hints=(), **kwargs):
        super().__init__(model_factory, *args, **kwargs)
        self.seen = []

    async def step(self, action):
        Scripted.steps += 1
        self.seen.append(action)
        return step_result()


class Other(Scripted):
    pass


class Strict(RewardFunction):
    def __init__(self, least=0.5):
        self.graded = 0

    async def compute(self, *, action, step_result):
        return RewardResult(reward=1.0)


def run(factory, path, count=2, **settings):
    return Evaluator(lambda action: factory(), output_path=path, show_progress=False, **settings).run(tasks(count))


def strict(server, **changed):
    """Creates environments with a strict reward whose models ask the server."""
    made = sglang_model_factory(tokenizer=server.tokenizer, client=server.client())
    vars(made).update(changed)
    return lambda: CalculatorEnvironment(made, Strict())


CHANGES = {
    "class": (Other, "class was "),
    "argument": (lambda: Scripted(level=2), "arguments.level was None and is 2"),
    "container": (lambda: Scripted(hints=["a"]), "arguments.hints was None and is ['a']"),
    "budget": (lambda: Scripted(max_turns=3), "arguments.max_turns was None and is 3"),
    "prompt": (lambda: Scripted(system_prompt="Think."), "system_prompt was None and is 'Think.'"),
    "reward": (lambda: Scripted(reward_fn=ExactMatchReward()), "reward_fn"),
    "model": (lambda: Scripted(print), "arguments.model_factory was None and is "),
    "partial": (functools.partial(Scripted, max_tool_calls=7), "arguments.max_tool_calls was None and is 7"),
}


@pytest.mark.parametrize(("changed", "told"), CHANGES.values(), ids=list(CHANGES))
async def test_results_of_another_environment_are_refused(tmp_path, changed, told):
    await run(Scripted, tmp_path)
    before, steps = lines(tmp_path / "results.jsonl"), Scripted.steps
    plan = (tmp_path / "results.run.json").read_bytes()
    for count in (2, 3):  # with and without samples left to run
        with pytest.raises(CheckpointError, match="has results of another environment: .*use another file") as caught:
            await run(changed, tmp_path, count)
        assert told in str(caught.value)
    assert lines(tmp_path / "results.jsonl") == before and Scripted.steps == steps
    assert (tmp_path / "results.run.json").read_bytes() == plan


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Strict(), Strict(0.25)),
        (ExactMatchReward(), ExactMatchReward(boxed=True)),
        (RegexReward("a"), RegexReward("b")),
        (WeightedSum({"a": (Strict(), 1.0)}), WeightedSum({"a": (Strict(), 2.0)})),
        (AllOf({"a": Strict()}), AllOf({"a": ExactMatchReward()})),
    ],
)
async def test_results_of_another_reward_are_refused(tmp_path, first, second):
    await run(lambda: Scripted(reward_fn=first), tmp_path)
    with pytest.raises(CheckpointError, match="another environment: reward_fn"):
        await run(lambda: Scripted(reward_fn=second), tmp_path)


async def test_same_environment_is_resumed_after_use(tmp_path):
    shared = Scripted(reward_fn=Strict(), level=3)
    await run(lambda: shared, tmp_path)
    shared.reward_fn.graded = 7
    # Explicit defaults, and arguments that do not affect results.
    steps = Scripted.steps
    await run(lambda: Scripted(None, Strict(0.5), level=3, verbose=False, retries=2, hints=()), tmp_path, 3)
    assert Scripted.steps == steps + 1


async def test_identity_has_class_reward_and_functions(tmp_path):
    async def run_stub(play, **more):
        stub = StubEnvironment(play, **more)
        await Evaluator(stub.factory, output_path=tmp_path, show_progress=False).run(tasks(2))
        return len(stub.episodes)

    def play(reward):
        return lambda action: step_result(reward)

    assert await run_stub(lambda action: step_result(1.0)) == 2
    assert await run_stub(lambda action: step_result(1.0)) == 0
    for other in (lambda action: step_result(0.0), play(1.0)):
        with pytest.raises(CheckpointError, match="another environment: play"):
            await run_stub(other)
    with pytest.raises(CheckpointError, match="another environment: reward_fn was True and is"):
        await run_stub(lambda action: step_result(1.0), reward_fn=Strict())


async def test_environments_may_depend_on_the_task(tmp_path):
    def factory(action):
        return (Scripted if action.task_context.id == "t0" else Other)()

    for count in (2, 3):
        await Evaluator(factory, output_path=tmp_path, show_progress=False).run(tasks(count))
    with pytest.raises(CheckpointError, match="another environment: class"):
        await run(Scripted, tmp_path)


async def test_results_of_another_openai_server_are_refused(tmp_path, monkeypatch):
    module = ModuleType("strands.models.openai")
    module.OpenAIModel = lambda **arguments: None
    monkeypatch.setitem(sys.modules, "strands.models.openai", module)

    def served_at(url):
        factory = openai_model_factory(model_id="m", base_url=url, api_key="secret")
        return lambda: Scripted(factory)

    await run(served_at("http://one/v1"), tmp_path)
    await run(served_at("http://one/v1"), tmp_path)
    assert "secret" not in (tmp_path / "results.jsonl").read_text()
    with pytest.raises(CheckpointError, match="model_factory.base_url was 'http://one/v1' and is 'http://two/v1'"):
        await run(served_at("http://two/v1"), tmp_path)


@pytest.mark.parametrize("changed", ["model_path", "weight_version"])
async def test_results_of_other_weights_are_refused(tmp_path, chatml_tokenizer, changed):
    await run(strict(ScriptedSGLang(chatml_tokenizer, lambda request: "4")), tmp_path)
    other = ScriptedSGLang(chatml_tokenizer, lambda request: "4")
    await run(strict(other), tmp_path, 3)
    assert len(other.requests) == 1
    setattr(other, changed, "another")
    with pytest.raises(CheckpointError, match=f"served.{changed} was .* and is 'another'"):
        await run(strict(other), tmp_path, 3)


async def test_what_a_killed_writer_left_is_removed(tmp_path, chatml_tokenizer):
    folder = tmp_path / "results.trajectories"
    folder.mkdir()
    (folder / ".t0.safetensors.0123456789abcdef").write_bytes(b"half")
    await run(strict(ScriptedSGLang(chatml_tokenizer, ["4"])), tmp_path, 1, keep_trajectories=True)
    assert [path.name[0] == "." for path in folder.iterdir()] == [False]


async def test_weights_are_asked_for_until_the_server_answers(tmp_path, chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, lambda request: "4")
    answers = [SGLangConnectionError("down"), {"model_path": "one"}]

    async def served():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    results = await run(strict(server, served=served), tmp_path, 3, max_concurrency=1)
    found = [sample.environment["served"] for samples in results.values() for sample in samples]
    assert answers == []
    assert sorted(map(bool, found)) == [False, True, True]


def test_identity_has_the_models_parameters(chatml_tokenizer):
    def made(**more):
        return describe(sglang_model_factory(tokenizer=chatml_tokenizer, base_url="http://localhost:1", **more))

    assert made() == made()
    assert made(sampling_params={"temperature": 0.5}) != made() != made(enable_thinking=False)


def _pairs_of_values():
    def limited(limit, seen):
        return lambda answer, limit=limit, seen=seen: len(answer) > limit

    return {
        "number of numpy": (np.float32(1), np.float32(2)),
        "array": (np.zeros(3), np.ones(3)),
        "decimal": (Decimal("0.1"), Decimal("0.2")),
        "fraction": (Fraction(1, 2), Fraction(1, 3)),
        "date": (date(2024, 1, 1), date(2024, 1, 2)),
        "range": (range(3), range(4)),
        "bytes": (bytearray(b"a"), bytearray(b"b")),
        "built-in function": (max, min),
        "function of numpy": (np.sin, np.cos),
        "default of an argument": (limited(1, []), limited(2, [])),
    }


@pytest.mark.parametrize(("one", "other"), _pairs_of_values().values(), ids=list(_pairs_of_values()))
def test_identity_distinguishes_plain_arguments_by_value(one, other):
    """Described by its class alone, an argument let results of another environment in."""
    assert describe(one) == json.loads(json.dumps(describe(one))) != describe(other)


@pytest.mark.parametrize("value", [WorkerLimits(), Action(message="x")])
def test_arguments_of_any_depth_are_described(value):
    for _ in range(10):
        value = [value]
        assert str(describe(value)).startswith("[")


def test_identity_has_no_credentials_of_addresses():
    one, other = ({"servers": ["http://h/mcp", f"https://{user}h:1/a@b"]} for user in ("", "me:secret@"))
    assert describe(other) == describe(one)


def test_identity_is_the_same_before_and_after_episodes():
    """State of episodes in the identity made a run refuse its own results."""
    seen = []
    collecting = lambda answer, seen=seen: seen.append(answer)  # noqa: E731
    before = describe(collecting)
    collecting("x")
    assert describe(collecting) == before
    assert describe(float("nan")) == json.loads(json.dumps(describe(float("nan"))))


def test_identity_is_the_same_in_another_process(tmp_path):
    program = (
        "import functools, json, re\n"
        "from strands_env.core import Environment\n"
        "from strands_env.core.identity import describe\n"
        "from strands_env.rewards import RegexReward\n"
        "env = Environment(functools.partial(print, {'b', 'a', 'c'}), RegexReward('x'), max_turns=2)\n"
        "plain = lambda text: text in {'one', 'two', 'three'}\n"
        "print(json.dumps([env.identity(), describe(plain), describe({re.compile('a'), b'b', object})]))\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1 and " at 0x" not in told.pop()


def test_identified_classes_keep_their_signatures():
    assert "level" in inspect.signature(Scripted).parameters
    with pytest.raises(TypeError):
        Strict(least=1, most=2)


def test_an_argument_that_is_given_its_default_leaves_the_identity():
    assert Scripted(level=1).identity() == Scripted().identity() != Scripted(level=2).identity()


def test_classes_in_results_keep_their_paths():
    """A class that moves gets another identity: results of earlier releases would be refused."""
    paths = {
        "strands_env.core.environment.Environment",
        "strands_env.environments.agentcore.AgentCoreCodeEnvironment",
        "strands_env.environments.calculator.CalculatorEnvironment",
        "strands_env.environments.mcp.MCPEnvironment",
        "strands_env.environments.mcp_servers.MCPServersEnvironment",
        "strands_env.environments.python.PythonEnvironment",
        "strands_env.environments.reasoning_gym.ReasoningGymEnvironment",
        "strands_env.environments.reasoning_gym.ReasoningGymReward",
        "strands_env.environments.world.SandboxedEnvironment",
        "strands_env.environments.world.WorldEnvironment",
        "strands_env.core.types.RewardFunction",
        "strands_env.rewards.combining.AllOf",
        "strands_env.rewards.combining.WeightedSum",
        "strands_env.rewards.evaluators.EvaluatorReward",
        "strands_env.rewards.judging.JudgeReward",
        "strands_env.rewards.matching.ExactMatchReward",
        "strands_env.rewards.matching.RegexReward",
        "strands_env.rewards.mathematics.MathReward",
    }
    found = [Environment, RewardFunction]
    for cls in found:
        found += cls.__subclasses__()
    ours = {describe(cls) for cls in found if cls.__module__.startswith("strands_env.")}
    assert ours == paths
    arguments = [WorkerLimits(), PythonSandbox()]
    assert [describe(one)["class"] for one in arguments] == [
        "strands_env.rewards.workers.WorkerLimits",
        "strands_env.sandbox.python_sandbox.PythonSandbox",
    ]


# === model factories ===


URL = "http://localhost:30000"


@pytest.fixture
def folder(chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _own_clients():
    clear_clients()
    yield
    clear_clients()


def test_a_pickled_model_factory_loads_and_connects_anew(chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path)
    client = SGLangClient([URL, "http://localhost:2"], max_connections=7, deadline=60, headers={"X-Key": "1"})
    factory = sglang_model_factory(
        tokenizer=tmp_path, client=client, sampling_params={"top_p": 0.5}, max_context_tokens=9
    )
    content = pickle.dumps(factory)
    assert len(content) < 2000  # without the tokenizer
    copy = pickle.loads(content)
    assert copy.identity() == factory.identity()
    model = copy()
    assert model.client is not client and model.client.base_urls == client.base_urls
    assert (model.client.max_connections, model.client.deadline) == (7, 60)
    assert model.get_config() == factory().get_config()


async def test_factory_models_share_the_client_but_no_state(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER])
    client = server.client()
    params = {"temperature": 0.5}
    factory = sglang_model_factory(
        model_id="a-model", tokenizer=chatml_tokenizer, client=client, sampling_params=params
    )
    first, second = factory(), factory()
    assert first is not second and first.client is second.client is client
    assert first.chat_template is second.chat_template
    first.update_config(sampling_params={"temperature": 0.1})
    assert second.get_config()["sampling_params"] == params
    assert (await CalculatorEnv(factory).step(ASK)).observation.tokens is not None
    assert server.requests[0].sampling_params["temperature"] == 0.5


def test_analysis_of_a_chat_template_outlives_episodes(chatml_tokenizer):
    import gc

    factory = sglang_model_factory(tokenizer=chatml_tokenizer, base_url=URL, chat_template="{{ messages[0].content }}")
    number = id(factory().chat_template)
    gc.collect()
    assert id(factory().chat_template) == number


@pytest.mark.parametrize("form", [str, Path])
def test_tokenizer_may_be_a_folder(form, folder):
    factory = sglang_model_factory(tokenizer=form(folder), base_url=URL)
    assert factory().tokenizer is factory().tokenizer
    assert sglang_model_factory(model_id=str(folder), base_url=URL)().get_config()["model_id"] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "exactly one of client= and base_url="),
        ({"base_url": URL, "temperature": 1.0}, "unknown configuration: temperature"),
        ({"base_url": URL, "tool_parser": "no-such"}, "no tool parser named"),
        ({"base_url": URL, "on_abort": "ignore"}, "on_abort"),
        ({"base_url": URL, "tokenizer": None}, "tokenizer="),
    ],
)
def test_invalid_arguments_fail_when_the_factory_is_created(arguments, told, chatml_tokenizer):
    with pytest.raises(ValueError, match=told):
        sglang_model_factory(**{"tokenizer": chatml_tokenizer, **arguments})


@pytest.fixture
def openai(monkeypatch):
    module = SimpleNamespace(OpenAIModel=lambda **arguments: SimpleNamespace(arguments=arguments))
    monkeypatch.setitem(sys.modules, "strands.models.openai", module)  # type: ignore[arg-type]


@pytest.mark.usefixtures("openai")
def test_openai_factory_uses_openai_parameters():
    model = openai_model_factory(
        model_id="gpt", sampling_params={"max_new_tokens": 7, "temperature": 0.2}, base_url=f"{URL}/v1", api_key="k"
    )()
    assert model.arguments == {
        "model_id": "gpt",
        "params": {"max_tokens": 7, "temperature": 0.2},
        "client_args": {"base_url": f"{URL}/v1", "api_key": "k"},
    }


@pytest.mark.parametrize(
    ("module", "factory", "extra"),
    [
        ("strands.models.openai", openai_model_factory, "openai"),
        ("strands.models.bedrock", bedrock_model_factory, "bedrock"),
    ],
)
def test_missing_package_is_reported_with_its_extra(module, factory, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"\.\[{extra}\]"):
        factory(model_id="m")


def test_bedrock_factory_shares_one_model():
    factory = bedrock_model_factory(
        model_id="m", region_name="eu-west-1", sampling_params={"max_new_tokens": 7, "top_p": 0.5}
    )
    config = factory().get_config()
    assert factory() is factory()
    assert (config["model_id"], config["max_tokens"], config["top_p"]) == ("m", 7, 0.5)


@pytest.mark.parametrize("params", [{"top_k": 3}, {"max_tokens": 1, "max_new_tokens": 2}], ids=str)
def test_bedrock_refuses_unsupported_parameters(params):
    with pytest.raises(ValueError, match="top_k|which mean the same"):
        bedrock_model_factory(model_id="m", region_name="eu-west-1", sampling_params=params)


def test_factory_from_plain_data(folder):
    factory = build_model_factory(
        {
            "backend": "sglang",
            "base_url": URL,
            "tokenizer": str(folder),
            "tool_parser": "hermes",
            "sampling_params": {"temperature": 0.7},
            "client": {"max_retries": 3},
            "config": {"enable_thinking": False},
        }
    )
    model = factory()
    assert isinstance(model, SGLangModel)
    assert model.client is get_cached_client(URL, max_retries=3)
    assert model.get_config()["sampling_params"] == {"temperature": 0.7}


@pytest.mark.usefixtures("openai")
def test_openai_and_bedrock_from_plain_data():
    made = build_model_factory({"backend": "openai", "model_id": "gpt", "client": {"timeout": 5}})()
    assert made.arguments["client_args"] == {"timeout": 5}
    bedrock = build_model_factory({"backend": "bedrock", "model_id": "m", "region_name": "eu-west-1"})()
    assert bedrock.get_config()["model_id"] == "m"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "backend"),
        ({"backend": "vllm"}, "vllm"),
        ({"backend": "openai"}, "model_id: Field required"),
        ({"backend": "sglang", "temperature": 1.0}, "temperature: Extra inputs are not permitted"),
        ({"backend": "sglang", "base_url": 7}, "base_url"),
        ({"backend": "sglang", "client": {"no_such": 1}}, "no_such"),
        ({"backend": "sglang", "config": {"no_such": 1}}, "no_such"),
        ({"backend": "sglang", "base_url": f"{URL}/v1"}, "ends in /v1"),
    ],
    ids=str,
)
def test_invalid_plain_data_is_refused(config, told, folder):
    given = {"tokenizer": str(folder), **config} if config.get("backend") == "sglang" else config
    with pytest.raises(ValueError, match=told):
        build_model_factory(given)


def test_clients_are_shared_until_cleared():
    client = get_cached_client_from_slime_args(slime_args(URL))
    assert get_cached_client_from_slime_args(slime_args(URL)) is client
    assert clear_clients() == [client]
    assert get_cached_client_from_slime_args(slime_args(URL)) is not client
    assert clear_clients() and clear_clients() == []


# === environments under slime: the documented split functions, and `make_generate` ===


QUESTION = "What is 25 * 17?"


@pytest.mark.parametrize("chat", [False, True])
async def test_documented_split_functions_work_unchanged(chat, chatml_tokenizer):
    # As in the documentation of the published package.
    split_functions = """
    from strands_env.core import Action, TaskContext
    from strands_env.core.models import sglang_model_factory
    from strands_env.utils import get_cached_client_from_slime_args

    async def generate(args, sample, sampling_params):
        # Build model factory with cached client
        factory = sglang_model_factory(
            model_id=args.hf_checkpoint,
            tokenizer=tokenizer,
            client=get_cached_client_from_slime_args(args),
            sampling_params=sampling_params,
        )

        # Create environment and run step
        env = YourEnv(model_factory=factory, reward_fn=None)
        action = Action(message=sample.prompt, task_context=TaskContext(ground_truth=sample.label))
        step_result = await env.step(action)

        # Extract TITO data for training
        token_obs = step_result.observation.tokens
        sample.tokens = token_obs.token_ids
        sample.loss_mask = token_obs.rollout_loss_mask
        sample.rollout_log_probs = token_obs.rollout_logprobs
        sample.response_length = len(token_obs.rollout_token_ids)

        # Attach for reward computation
        sample.action = action
        sample.step_result = step_result
        return sample

    async def reward_func(args, sample, **kwargs):
        reward_fn = YourRewardFunction()
        reward_result = await reward_fn.compute(action=sample.action, step_result=sample.step_result)
        return reward_result.reward
"""
    clear_clients()
    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER])
    namespace = {
        "tokenizer": chatml_tokenizer,
        "YourEnv": CalculatorEnv,
        "YourRewardFunction": Contains,
    }
    exec(textwrap.dedent(split_functions), namespace)
    prompt = [{"role": "user", "content": QUESTION}] if chat else QUESTION
    with server.serve() as url:
        args = slime_args(url)
        sample = await namespace["generate"](args, Sample(index=0, prompt=prompt, label="425"), slime_sampling_params())
    clear_clients()
    assert await namespace["reward_func"](args, sample) == 1.0
    # The functions above leave the outcome to slime.
    sample.status, sample.reward = Sample.Status.COMPLETED, 1.0
    sample.response = chatml_tokenizer.decode(sample.tokens[-sample.response_length :])
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    last = server.responses[-1]
    assert last is not None
    assert sample.tokens == server.requests[-1].input_ids + last.body["output_ids"]
    sampled = [logprob for logprob, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if mask]
    told = [pair[0] for response in server.responses for pair in response.body["meta_info"]["output_token_logprobs"]]
    assert sampled == pytest.approx(told)
    assert {lp for lp, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not mask} == {0.0}


class Rollouts:
    """A `generate` of `make_generate` with a scripted server; records its environments."""

    def __init__(self, answers, *, reward_fn=None, make=CalculatorEnv, **limits):
        tokenizer = build_chatml_tokenizer()
        self.state = SlimeState(tokenizer)
        self.server = ScriptedSGLang(tokenizer, answers)
        self.environments = []
        self.models = []

        def make_environment(model_factory, sample):
            self.models.append(model_factory())
            self.environments.append(make(model_factory, reward_fn, **limits))
            return self.environments[-1]

        self.generate = slime.make_generate(
            make_environment,
            client_settings={"transport": self.server.transport(), "max_retries": 0},
            generate_state=lambda args: self.state,
        )

    async def __call__(self, sample=None, **args):
        sample = sample or Sample(index=3, group_index=1, prompt=QUESTION, label="425")
        result = await self.generate(slime_args(**args), sample, slime_sampling_params())
        assert [env.steps for env in self.environments] == [["reset", "cleanup"]] * len(self.environments)
        check_rollouts(result, slime_args(**args), self.state.tokenizer)
        return result


class Unanswering(CalculatorEnv):
    """Its user never answers."""

    async def next_user_message(self, action, messages):
        await asyncio.Event().wait()


SLIME_ENDS = {
    "an answer": ([CALL, ANSWER], {"reward_fn": Contains()}, "COMPLETED", 1.0, False),
    "an answer for slime's function": ([CALL, ANSWER], {}, "COMPLETED", None, False),
    "a limit": ([CALL] * 3, {"max_tool_iterations": 2, "reward_fn": Contains()}, "TRUNCATED", 0.0, False),
    "the response's budget": (["long " * 400], {"reward_fn": Contains()}, "TRUNCATED", 0.0, False),
    "the response's budget, by a later turn": ([CALL] * 9, {"reward_fn": Contains()}, "TRUNCATED", 0.0, False),
    "an error of the server": ([CALL, ScriptedFault(status=500)], {"reward_fn": Contains()}, "FAILED", 0.0, True),
    "an error at once": ([ScriptedFault(status=500)], {"reward_fn": Contains()}, "FAILED", 0.0, True),
    "an unrequested abort": (
        [CALL, ScriptedAnswer("25", finish_reason="abort")],
        {"reward_fn": Contains()},
        "TRUNCATED",
        0.0,
        True,
    ),
    "a reward function that fails": (
        [ANSWER],
        {"reward_fn": Gives(LookupError("no such answer"))},
        "COMPLETED",
        0.0,
        True,
    ),
    "a reward function that fails after the time": (
        [ANSWER],
        {"reward_fn": Gives(LookupError("no such answer")), "make": Unanswering, "episode_timeout": 0.5},
        "TRUNCATED",
        0.0,
        True,
    ),
}


@pytest.mark.parametrize("name", SLIME_ENDS)
async def test_every_outcome_is_a_usable_slime_sample(name):
    answers, settings, status, reward, removed = SLIME_ENDS[name]
    rollouts = Rollouts(answers, **settings)
    sample = await rollouts()
    assert (sample.status.name, sample.reward, sample.remove_sample) == (status, reward, removed)
    assert sample.response_length <= 256
    facts = sample.metadata["strands_sglang"]
    if name == "an answer":
        assert (facts["outcome"], facts["tool_calls"]) == ("task_complete", 1)
        check_against_server(sample, rollouts.server)


async def test_no_request_after_slime_aborts():
    def abort(request):
        rollouts.state.aborted = True
        return CALL

    rollouts = Rollouts([abort, ANSWER], reward_fn=Contains())
    sample = await rollouts()
    assert (sample.status.name, sample.reward, len(rollouts.server.requests)) == ("ABORTED", None, 1)


async def test_reward_is_stored_under_slimes_key():
    rollouts = Rollouts([ANSWER], reward_fn=Contains())
    assert (await rollouts(reward_key="score")).reward == {"score": 1.0}


async def test_failing_environment_factory_is_a_failed_sample(chatml_tokenizer):
    async def make_environment(model_factory, sample):
        raise OSError("no room")

    state = SlimeState(chatml_tokenizer)
    generate = slime.make_generate(make_environment, generate_state=lambda args: state)
    sample = await generate(slime_args(), Sample(index=0, prompt=QUESTION), slime_sampling_params())
    assert (sample.status.name, sample.remove_sample) == ("FAILED", True)
    check_rollouts(sample, slime_args(), chatml_tokenizer)


async def test_cancelled_generate_raises_cancelled_error():
    asked = asyncio.Event()

    async def wait(request):
        asked.set()
        await asyncio.Event().wait()
        return ANSWER

    rollouts = Rollouts([wait])
    task = asyncio.ensure_future(rollouts())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rollouts.environments[0].steps == ["reset", "cleanup"]


def test_task_of_a_sample_has_its_label_and_metadata():
    sample = SimpleNamespace(
        prompt=QUESTION, label="425", index=7, metadata={"level": 3, "id": "x", "strands_sglang": {}}
    )
    assert slime.action_of(sample) == Action(
        message=QUESTION, task_context=TaskContext(id=7, ground_truth="425", level=3)
    )
    assert slime.action_of(SimpleNamespace(**{**vars(sample), "metadata": None})).message == ASK.message
    unlabeled = SimpleNamespace(prompt=QUESTION, label=None, index=7, metadata={"ground_truth": "425"})
    assert slime.action_of(unlabeled).task_context.ground_truth == "425"


def test_episode_function_excludes_agent_settings():
    from strands_sglang.trainers.slime import make_generate

    with pytest.raises(ValueError, match="episode= runs the whole episode"):
        make_generate(episode=lambda model, sample: None, max_turns=3)


async def test_judge_on_the_sampled_model_is_not_in_the_sample():
    class Judge(RewardFunction):
        async def compute(self, **kwargs):
            agent = Agent(model=rollouts.models[0], callback_handler=None)
            return float("425" in str(await agent.invoke_async("Is it right?")))

    rollouts = Rollouts([ANSWER, ANSWER], reward_fn=Judge())
    sample = await rollouts()
    assert (sample.reward, len(rollouts.server.requests)) == (1.0, 2)
    assert sample.metadata["strands_sglang"]["other_sequences"] == 0
    assert sum(sample.loss_mask) == len(rollouts.server.responses[0].body["output_ids"])


async def test_invalid_metadata_are_reported():
    """Every sample failed without a reason."""
    generate = Rollouts([]).generate
    given = Sample(index=7, prompt="2 + 2?", label="4", metadata={"conversation_history": "abc"})
    sample = await generate(slime_args(), given, slime_sampling_params())
    assert sample.status.name == "FAILED"
    error = sample.metadata["strands_sglang"]["error"]
    assert "sample 7" in error and "conversation_history" in error and "abc" in error
