"""A step is one whole episode: its observation, its reward, its own trajectory."""

import ast
import asyncio
import inspect
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strands import Agent, tool
from strands.hooks import AfterInvocationEvent, HookProvider

from strands_env.core import (
    Action,
    Environment,
    Observation,
    RewardError,
    RewardFunction,
    RewardResult,
    TerminationReason,
)
from strands_env.core.supervision import called
from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.agents import ScriptedModel, call, tool_use
from support.environments import ANSWER, ASK, CALL, CalculatorEnv, Contains, Gives, scripted_env


async def test_a_step_has_the_episodes_messages_tokens_reward_and_end(chatml_tokenizer: Any) -> None:
    env, server = scripted_env(chatml_tokenizer, [CALL, ANSWER])
    result = await env.step(ASK)
    observation = result.observation
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.error is None
    assert result.reward == RewardResult(reward=1.0)
    assert observation.final_response == ANSWER
    assert [message["role"] for message in observation.messages] == ["user", "assistant", "user", "assistant"]
    assert env.steps == ["reset", "cleanup"]
    tokens, [first, second] = observation.tokens, server.requests
    assert tokens is not None and observation.trajectory is not None
    assert tokens.initial_prompt_token_ids == first.input_ids
    sampled = [token for response in server.responses for token in response.body["output_ids"]]
    assert tokens.token_ids == second.input_ids + server.responses[1].body["output_ids"]
    assert [token for token, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if mask] == sampled
    assert len(tokens.rollout_token_ids) == len(tokens.rollout_loss_mask) == len(tokens.rollout_logprobs)
    assert [turn.status.value for turn in observation.trajectory.turns] == ["committed", "final"]


async def test_the_metrics_count_calls_tokens_tools_and_errors(chatml_tokenizer: Any) -> None:
    turns = [CALL + call("broken", reason="no") + "<tool_call>\n{not json\n</tool_call>", CALL, ANSWER]
    env, server = scripted_env(chatml_tokenizer, turns)
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


async def test_limits_count_on_over_the_invocations_of_a_long_episode(chatml_tokenizer: Any) -> None:
    env, _ = scripted_env(chatml_tokenizer, [CALL] * 99, max_tool_iterations=40)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.MAX_TOOL_ITERATIONS_REACHED
    assert (result.observation.metrics["tool_iterations"], len(env.ran)) == (40, 40)


async def test_what_a_tool_keeps_for_the_invocation_is_there_in_a_long_episode(chatml_tokenizer: Any) -> None:
    seen: list[int] = []

    @tool(context=True)
    def count(tool_context: Any) -> str:
        """Count."""
        state = tool_context.invocation_state["request_state"]
        state["count"] = state.get("count", 0) + 1
        seen.append(state["count"])
        return "counted"

    env, _ = scripted_env(
        chatml_tokenizer, [call("count")] * 40 + [ANSWER], more_tools=[count], max_tool_iterations=None
    )
    await env.step(ASK)
    assert seen == list(range(1, 41))


async def test_an_episode_of_the_default_length_is_one_invocation(chatml_tokenizer: Any) -> None:
    class Invocations(HookProvider):
        def __init__(self) -> None:
            self.count = 0

        def register_hooks(self, registry: Any, **kwargs: Any) -> None:
            registry.add_callback(AfterInvocationEvent, self._add)

        def _add(self, event: AfterInvocationEvent) -> None:
            self.count += 1

    hook = Invocations()
    env, _ = scripted_env(chatml_tokenizer, [CALL] * 9 + [ANSWER], hooks=[hook])
    assert (await env.step(ASK)).termination_reason is TerminationReason.TASK_COMPLETE
    assert hook.count == 1


async def test_steps_that_share_a_model_have_trajectories_of_their_own(chatml_tokenizer: Any) -> None:
    env, server = scripted_env(chatml_tokenizer, lambda request: ANSWER if "tool_response" in request.text else CALL)
    results = await asyncio.gather(*(env.step(ASK) for _ in range(20)))
    assert len({id(result.observation.trajectory) for result in results}) == 20
    assert all(len(result.observation.trajectory) == 2 for result in results)
    assert all(result.reward.reward == 1.0 for result in results)
    assert len(server.requests) == 40


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_model_factory_may_be_async_and_make_any_model(is_async: bool) -> None:
    model = ScriptedModel([[tool_use("1", "calculator", expression="25 * 17")], "It is 425."])

    async def later() -> ScriptedModel:
        return model

    env = CalculatorEnv(later if is_async else lambda: model)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.observation.tokens is None and result.observation.trajectory is None
    assert result.reward is None
    assert result.observation.final_response == "It is 425."
    assert result.observation.metrics["model_calls"] == 2
    assert result.observation.metrics["tools"]["calculator"]["calls"] == 1


async def test_the_system_prompt_is_the_given_one_or_that_of_the_file(chatml_tokenizer: Any, tmp_path: Path) -> None:
    class Prompted(CalculatorEnv):
        pass

    path = tmp_path / "prompt.md"
    path.write_text("From the file.\n", encoding="utf-8")
    env, server = scripted_env(chatml_tokenizer, [ANSWER, ANSWER, ANSWER])
    Prompted.default_system_prompt_path = path
    chat = [{"role": "system", "content": "From the task."}, {"role": "user", "content": "Go."}]
    await Prompted(env.model_factory).step(ASK)
    await Prompted(env.model_factory, system_prompt="Given.").step(ASK)
    await Prompted(env.model_factory, system_prompt="Given.").step(Action(message=chat))
    told = [request.text.split("<|im_end|>")[0] for request in server.requests]
    assert told[0].startswith("<|im_start|>system\nFrom the file.")
    assert told[1].startswith("<|im_start|>system\nGiven.")
    assert told[2].startswith("<|im_start|>system\nGiven.\n\nFrom the task.")


async def test_the_history_stands_before_the_question_and_is_no_part_of_the_observation(chatml_tokenizer: Any) -> None:
    history = [{"role": "user", "content": "My name is Ann."}, {"role": "assistant", "content": "Hello Ann."}]
    env, server = scripted_env(chatml_tokenizer, ["Ann."])
    action = Action(message="Who am I?", task_context={"conversation_history": history})
    before = action.model_dump()
    result = await env.step(action)
    assert [message["role"] for message in result.observation.messages] == ["user", "assistant"]
    assert "Hello Ann.<|im_end|>" in server.requests[0].text
    assert action.model_dump() == before


async def test_tool_calls_in_the_action_are_not_counted_as_the_episodes(chatml_tokenizer: Any) -> None:
    used = {"toolUse": {"toolUseId": "a", "name": "calculator", "input": {"expression": "1 * 1"}}}
    answered = {"toolResult": {"toolUseId": "a", "status": "success", "content": [{"text": "1"}]}}
    chat = [
        {"role": "user", "content": [{"text": "1 * 1?"}]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [answered]},
        {"role": "assistant", "content": [{"text": "1"}]},
        {"role": "user", "content": [{"text": "25 * 17?"}]},
    ]
    env, _ = scripted_env(chatml_tokenizer, [CALL, ANSWER], max_tool_calls=2)
    result = await env.step(Action(message=chat, task_context=ASK.task_context))
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.observation.metrics["tool_calls"] == 1
    assert len(result.observation.messages) == 8


async def test_a_subclass_adds_metrics_and_may_do_so_async(chatml_tokenizer: Any) -> None:
    class Counting(CalculatorEnv):
        async def compute_metrics(self, observation: Observation) -> dict[str, Any]:
            return {"ran": len(self.ran), "calls": observation.metrics["tool_calls"]}

    env, _ = scripted_env(chatml_tokenizer, [CALL, ANSWER])
    metrics = (await Counting(env.model_factory).step(ASK)).observation.metrics
    assert (metrics["ran"], metrics["calls"]) == (1, 1)


async def test_metrics_that_raise_do_not_end_an_episode(chatml_tokenizer: Any) -> None:
    class Raising(CalculatorEnv):
        def compute_metrics(self, observation: Observation) -> dict[str, Any]:
            raise KeyError("nothing")

    env, _ = scripted_env(chatml_tokenizer, [ANSWER])
    result = await Raising(env.model_factory, reward_fn=env.reward_fn).step(ASK)
    assert result.reward is not None and result.reward.reward == 1.0
    assert result.error == "compute_metrics: KeyError: 'nothing'"


async def test_verbose_prints_what_the_agent_does(chatml_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        env, _ = scripted_env(chatml_tokenizer, [ANSWER], verbose=verbose)
        await env.step(ASK)
        assert (ANSWER in capsys.readouterr().out) is verbose


async def test_an_environment_without_anything_is_a_single_answer(chatml_tokenizer: Any) -> None:
    server = ScriptedSGLang(chatml_tokenizer, ["Hello."])
    env = Environment(lambda: SGLangModel(tokenizer=chatml_tokenizer, client=server.client()))
    result = await env.step(Action(message="Hi."))
    assert (result.observation.final_response, result.reward) == ("Hello.", None)
    assert env.last_result is result


async def test_steps_work_from_one_event_loop_after_the_other(chatml_tokenizer: Any) -> None:
    env, _ = scripted_env(chatml_tokenizer, [ANSWER] * 3)
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
def test_a_setting_that_cannot_work_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        Environment(lambda: None, **setting)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("value", [None, float("nan"), "1.0", RewardResult(reward=float("inf"))], ids=repr)
async def test_a_reward_that_is_no_finite_number_is_none_at_all(value: Any, chatml_tokenizer: Any) -> None:
    env, _ = scripted_env(chatml_tokenizer, [ANSWER], reward_fn=Gives(value))
    result = await env.step(ASK)
    assert result.reward is None
    assert result.termination_reason is TerminationReason.TASK_COMPLETE
    assert result.error is not None and result.error.startswith("reward function: ")


async def test_a_plain_number_is_a_reward(chatml_tokenizer: Any) -> None:
    env, _ = scripted_env(chatml_tokenizer, [ANSWER], reward_fn=Gives(0.5))
    result = await env.step(ASK)
    assert result.reward == RewardResult(reward=0.5)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), np.array(0.5)], ids=repr)
async def test_numbers_of_other_libraries_are_rewards(value: Any, chatml_tokenizer: Any) -> None:
    """B15."""
    env, _ = scripted_env(chatml_tokenizer, [ANSWER], reward_fn=Gives(value))
    assert (await env.step(ASK)).reward == RewardResult(reward=0.5)


@pytest.mark.parametrize(
    ("error", "is_infrastructure"),
    [
        (RewardError("the judge is gone", is_infrastructure=True), True),
        (RewardError("the judge rambles"), False),
        (ConnectionError("raised by what the answer made the reward do"), False),
        (MemoryError(), False),
    ],
)
async def test_a_reward_that_fails_says_whether_the_infrastructure_did(
    error: Exception, is_infrastructure: bool, chatml_tokenizer: Any
) -> None:
    env, _ = scripted_env(chatml_tokenizer, [ANSWER], reward_fn=Gives(error))
    result = await env.step(ASK)
    assert result.reward is None
    assert result.reward_error is not None and result.reward_error.startswith(type(error).__name__)
    assert result.reward_error_is_infrastructure is is_infrastructure


async def test_a_reward_that_takes_too_long_fails_and_not_the_infrastructure(chatml_tokenizer: Any) -> None:
    hangs = Gives(asyncio.Event().wait)
    env, _ = scripted_env(chatml_tokenizer, [ANSWER], reward_fn=hangs, reward_timeout=0.05)
    result = await env.step(ASK)
    assert result.reward_error is not None and not result.reward_error_is_infrastructure


async def test_a_judge_on_the_same_model_is_in_nobodys_trajectory(chatml_tokenizer: Any) -> None:
    class Judge(RewardFunction):
        async def compute(self, **kwargs: Any) -> RewardResult:
            verdict = await Agent(model=model, callback_handler=None).invoke_async(ASK.message)
            return RewardResult(reward=1.0, info={"verdict": str(verdict)})

    server = ScriptedSGLang(chatml_tokenizer, lambda request: ANSWER)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    env = Environment(lambda: model, reward_fn=Judge())
    results = await asyncio.gather(*(env.step(ASK) for _ in range(5)))
    assert [len(result.observation.trajectory) for result in results] == [1] * 5
    assert len(model.trajectory) == 0 and len(server.requests) == 10


# --- what the user's code raises ---


async def test_an_error_whose_text_cannot_be_made_leaves_nobody_waiting() -> None:
    """B9."""

    class Speechless(BaseException):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fails() -> None:
        raise Speechless

    with pytest.raises(RuntimeError, match="Speechless"):
        await asyncio.wait_for(called(fails), 5)


@pytest.mark.parametrize("place", ["reset", "compute_metrics"])
async def test_an_error_of_an_environment_whose_text_cannot_be_made_ends_its_own_episode(place: str) -> None:
    """B9."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fails(*args: object) -> None:
        raise MuteError

    env = CalculatorEnv(lambda: ScriptedModel([ANSWER]), Contains())
    setattr(env, place, fails)
    assert "MuteError" in str((await env.step(ASK)).error)


# --- the answer without thoughts ---


def answer(text: str) -> str | None:
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
def test_the_answer_is_what_is_not_thought(text: str, expected: str | None) -> None:
    """B5."""
    assert answer(text) == expected


@pytest.mark.parametrize("part", ["<think>", "</think>", "<think>a</think>", "<", "a"])
def test_it_takes_linear_time(part: str) -> None:
    began = time.process_time()
    answer(part * (1_000_000 // len(part)))
    assert time.process_time() - began < 5


def test_environment_alone_makes_and_drives_agents():
    """What drives one elsewhere has no budgets, no trajectory of its own and no cleanup."""
    package = Path(inspect.getfile(Environment)).parent.parent
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = getattr(node, "func", None)
            name = getattr(function, "attr", None) or getattr(function, "id", None)
            if name in ("Agent", "invoke_async", "stream_async", "structured_output_async"):
                found.append((path.relative_to(package).as_posix(), name))
    assert sorted(found) == [("core/environment.py", "Agent"), ("core/environment.py", "invoke_async")]
