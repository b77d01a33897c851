"""Environments, rewards, tasks and samples for tests."""

import asyncio
import json

from strands_env.core import (
    Action,
    Environment,
    Observation,
    RewardFunction,
    RewardResult,
    StepResult,
    TaskContext,
    TerminationReason,
)
from strands_env.eval import EvalSample
from strands_sglang import SGLangModel
from strands_sglang.testing import ScriptedSGLang

from .agents import build_chatml_tokenizer, call, make_tools

CALL = call("calculator", expression="25 * 17")
ANSWER = "25 * 17 is 425."
ASK = Action(message="What is 25 * 17?", task_context=TaskContext(id="product", ground_truth="425"))


class Contains(RewardFunction):
    """1.0 if the answer contains the ground truth; counts its calls in `asked`."""

    def __init__(self):
        self.asked = 0

    async def compute(self, *, action, step_result):
        self.asked += 1
        assert step_result.reward is None
        answer = step_result.observation.final_response or ""
        found = str(action.task_context.ground_truth) in answer
        return RewardResult(reward=float(found), info={"verdict": "correct" if found else "wrong"})


class Gives(RewardFunction):
    """Return a value or the result of an async function, or raise an exception."""

    def __init__(self, outcome):
        self.outcome = outcome

    async def compute(self, **kwargs):
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return await self.outcome() if callable(self.outcome) else self.outcome


class CalculatorEnv(Environment):
    """Records resets and cleanups in `steps`, and arguments of tools in `ran`."""

    def __init__(
        self,
        *args,
        hooks=None,
        tools=None,
        more_tools=None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        own, self.ran = (tools, []) if tools is not None else make_tools()
        self.tools = [*own, *(more_tools or [])]
        self.hooks = hooks or []
        self.steps = []

    async def reset(self):
        self.steps.append("reset")

    async def cleanup(self):
        self.steps.append("cleanup")

    def get_tools(self):
        return self.tools

    def get_hooks(self):
        return self.hooks


def scripted_env(
    answers,
    *,
    server=None,
    model=None,
    client=None,
    **settings,
):
    """Create an environment whose steps share one `SGLangModel` with a scripted server."""
    tokenizer = build_chatml_tokenizer()
    scripted = ScriptedSGLang(tokenizer, answers, **(server or {}))
    shared = SGLangModel(tokenizer=tokenizer, client=scripted.client(**(client or {})), **(model or {}))
    settings = {"reward_fn": Contains(), **settings}
    return CalculatorEnv(lambda: shared, **settings), scripted


def worked_examples(values):
    """Return a chat that makes a small model call tools: calculator calls for the expressions, with their values."""
    messages = []
    for expression, value in values.items():
        function = {"name": "calculator", "arguments": {"expression": expression}}
        messages += [
            {"role": "user", "content": f"What is {expression}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": expression, "function": function}]},
            {"role": "tool", "tool_call_id": expression, "content": str(value)},
            {"role": "assistant", "content": f"The answer is {value}."},
        ]
    return messages


def task(ground_truth=None, message="What is it?"):
    """Create a task with a ground truth."""
    return Action(message=message, task_context=TaskContext(id="t1", ground_truth=ground_truth))


def answered(text):
    """Create the result of an episode that ended with a text, or without one."""
    messages = [{"role": "user", "content": [{"text": "What is it?"}]}]
    if text is not None:
        messages.append({"role": "assistant", "content": [{"text": text}]})
    return StepResult(observation=Observation(messages=messages), termination_reason=TerminationReason.TASK_COMPLETE)


def tasks(count):
    return [
        Action(message=f"What is {n} + {n}?", task_context=TaskContext(id=f"t{n}", ground_truth=str(2 * n)))
        for n in range(count)
    ]


def step_result(reward=1.0, text="4", reason=TerminationReason.TASK_COMPLETE, error=None):
    return StepResult(
        observation=Observation(
            messages=[{"role": "assistant", "content": [{"text": text}]}], metrics={"model_calls": 1}
        ),
        reward=None if reward is None else RewardResult(reward=reward, info={"answer": text}),
        termination_reason=reason,
        error=error,
    )


def sample(reward, text="4", *, finished=True, prompt="p", **fields):
    reason = TerminationReason.TASK_COMPLETE if finished else TerminationReason.INFRASTRUCTURE_ERROR
    return EvalSample(
        prompt_id=prompt,
        action=Action(message=prompt),
        step_result=step_result(reward, text, reason),
        is_finished=finished,
        **fields,
    )


class StubEnvironment:
    """Returns the result of `play(action)` from each step; records its actions in `episodes`."""

    def __init__(self, play=None, *, reward_fn=True):
        self.play = play or (lambda action: step_result())
        self.reward_fn = reward_fn
        self.episodes = []

    async def factory(self, action):
        return self

    async def step(self, action):
        self.episodes.append(action)
        await asyncio.sleep(0)
        result = self.play(action)
        if asyncio.iscoroutine(result):
            result = await result
        return result


def lines(path):
    """Read the records of a file, with the standard library only."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
