"""Environments with random agents on random budgets, of a thousand turns, and two thousand at once.

No budget is overspent beyond what it promises, and none ends an episode early. Of many episodes in one process each
one ends, is kept once, and is its own.
"""

import asyncio
import copy
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from strands import tool
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    HookProvider,
    MessageAddedEvent,
)

from strands_env.core import Action, Environment, TaskContext, TerminationReason
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_env.eval import Evaluator
from strands_env.rewards import ExactMatchReward
from strands_sglang.testing import ScriptedSGLang
from support.agents import ScriptedModel, call, make_agent, tool_use
from support.environments import ANSWER, ASK, CALL, lines, scripted_env

BROKEN = call("broken", reason="no")
UNREADABLE = "<tool_call>\n{not json\n</tool_call>"
UNKNOWN = call("unregistered", x=1)

turns = st.lists(st.lists(st.sampled_from([CALL, BROKEN, UNREADABLE, UNKNOWN]), min_size=1, max_size=4), max_size=40)


def limit(least, most):
    return st.none() | st.integers(least, most)


@settings(max_examples=150)
@given(
    turns=turns,
    iterations=limit(0, 45),
    calls=limit(0, 60),
    parallel=limit(0, 4),
    model_calls=limit(1, 45),
    sampled=limit(1, 2000),
    total=limit(1, 40_000),
)
def test_budgets_hold_within_a_batch_and_over_invocations(
    turns,
    iterations,
    calls,
    parallel,
    model_calls,
    sampled,
    total,
):
    env, server = scripted_env(
        ["".join(turn) for turn in turns] + [ANSWER],
        max_tool_iterations=iterations,
        max_tool_calls=calls,
        max_parallel_tool_calls=parallel,
        max_turns=model_calls,
        max_sampled_tokens=sampled,
        max_total_tokens=total,
    )
    result = asyncio.run(env.step(ASK))
    bodies = [response.body for response in server.responses if response is not None]
    outputs = [len(body["output_ids"]) for body in bodies]
    totals = [len(request.input_ids) + output for request, output in zip(server.requests, outputs, strict=True)]
    made = len(server.requests)
    played = [len(turn) for turn in turns[:made]]

    # What would have stopped it after each turn, and that it is what did, at the first turn where anything does.
    spent = []
    for turn in range(1, made + 1):
        reasons = set()
        if turn <= len(turns):
            if iterations is not None and turn >= iterations:
                reasons.add(TerminationReason.MAX_TOOL_ITERATIONS_REACHED)
            if calls is not None and sum(played[:turn]) >= calls:
                reasons.add(TerminationReason.MAX_TOOL_CALLS_REACHED)
            if model_calls is not None and turn >= model_calls:
                reasons.add(TerminationReason.MAX_TURNS_REACHED)
            if sampled is not None and sum(outputs[:turn]) >= sampled:
                reasons.add(TerminationReason.TOKEN_BUDGET_REACHED)
            if total is not None and sum(totals[:turn]) >= total:
                reasons.add(TerminationReason.TOKEN_BUDGET_REACHED)
        else:
            reasons.add(TerminationReason.TASK_COMPLETE)
        spent.append(reasons)
    assert not any(spent[:-1]), "an episode continued beyond a budget"
    assert result.termination_reason in spent[-1], "an episode ended for what was not spent"

    # No tool ran beyond a budget, and every call has its result.
    ran = len(env.ran)
    assert calls is None or ran <= calls
    assert iterations != 0 or ran == 0
    allowed = [turn[: parallel if parallel is not None else None] for turn in turns[:made]]
    if calls is None and iterations != 0:
        assert ran == sum(one in (CALL, BROKEN) for turn in allowed for one in turn)
    messages = result.observation.messages
    uses = [block["toolUse"]["toolUseId"] for one in messages for block in one["content"] if "toolUse" in block]
    results = [b["toolResult"]["toolUseId"] for one in messages for b in one["content"] if "toolResult" in b]
    assert sorted(uses) == sorted(results)
    assert result.observation.metrics["tool_calls"] == len(uses) == sum(played)
    assert result.observation.metrics["model_calls"] == made

    # Nothing was put into the model's context but what it sampled and what the tools said.
    [sequence] = result.observation.trajectory.sequences()
    assert sum(sequence.loss_mask) == sum(outputs)
    assert result.reward is not None


# --- at their largest ---


@pytest.mark.timeout(1800)  # nearly two minutes of CPU, most of it Strands copying its history
async def test_a_thousand_turns_with_tools_are_one_sequence():
    env, server = scripted_env([CALL] * 1000 + [ANSWER], server={"context_length": 200_000}, max_tool_iterations=None)
    result = await env.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE, result.error
    assert result.observation.metrics["model_calls"] == 1001
    assert result.observation.metrics["tool_iterations"] == 1000
    assert [message["role"] for message in result.observation.messages] == ["user", "assistant"] * 1001
    [sequence] = result.observation.trajectory.sequences()
    last = server.requests[-1].input_ids
    assert sequence.token_ids[: len(last)] == last


@pytest.mark.timeout(600)
async def test_two_thousand_episodes_at_once_are_each_their_own(chatml_tokenizer, tmp_path):
    episodes = 2_000
    asked, all_asked, made = set(), asyncio.Event(), []

    async def solve(request):
        left = int(re.findall(r"What is (\d+) \+ 1", request.text)[-1])
        if "<tool_response>" in request.text:
            return str(left + 1)
        asked.add(left)
        if len(asked) == episodes:
            all_asked.set()
        await all_asked.wait()  # so that all of them run at once
        return call("calculator", expression=f"{left} + 1")

    class Watched(CalculatorEnvironment):
        async def reset(self):
            self.steps = ["reset"]
            await super().reset()

        async def cleanup(self):
            self.steps.append("cleanup")
            await super().cleanup()

    server = ScriptedSGLang(chatml_tokenizer, solve)
    factory = sglang_model_factory(tokenizer=chatml_tokenizer, client=server.client(max_connections=episodes))
    reward_fn = ExactMatchReward()

    async def env_factory(action):
        made.append(Watched(factory, reward_fn))
        return made[-1]

    tasks = [
        Action(message=f"What is {n} + 1?", task_context=TaskContext(id=n, ground_truth=str(n + 1)))
        for n in range(episodes)
    ]
    evaluator = Evaluator(
        env_factory, max_concurrency=episodes, keep_tokens=True, output_path=tmp_path / "out", show_progress=False
    )
    metrics = evaluator.compute_metrics(await evaluator.run(tasks))
    assert (metrics["pass@1"], metrics["dropped_samples"]) == (1.0, 0.0)
    assert sum(not request.is_prefill for request in server.requests) == 2 * episodes
    assert [environment.steps for environment in made] == [["reset", "cleanup"]] * episodes
    records = lines(tmp_path / "out" / "results.jsonl")
    assert {record["prompt_id"] for record in records} == {str(n) for n in range(episodes)} and len(records) == episodes
    for record in records:
        text = chatml_tokenizer.decode(record["observation"]["tokens"]["token_ids"])
        assert record["message"] in text and record["final_response"] == record["task_context"]["ground_truth"]


# --- what hooks, tools and models see ---

plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
values = st.recursive(
    plain | st.tuples(plain) | st.frozensets(st.integers()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
EVENTS = (
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    AfterModelCallEvent,
    MessageAddedEvent,
    BeforeToolCallEvent,
    AfterToolCallEvent,
    AfterInvocationEvent,
)


class Witness(HookProvider):
    """Keeps what hooks, a tool and a model see. The tool returns the given values one after the other."""

    def __init__(self, given):
        self.seen = []
        given = iter(given)

        @tool(name="echo", context=True)
        async def echo(tool_context: Any) -> dict[str, Any]:
            """Return the next value."""
            self.see("tool", tool_context.agent.messages)
            return {"status": "success", "content": [{"json": copy.deepcopy(next(given))}]}

        self.tools = [echo]

    def see(self, who, messages):
        kept = [{"role": one["role"], "content": one["content"]} for one in messages]
        self.seen.append((who, copy.deepcopy(kept)))

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(list(EVENTS), lambda event: self.see(type(event).__name__, event.agent.messages))


class Vandal(ScriptedModel):
    """A model that destroys the messages it gets, after its witness has seen them."""

    def __init__(self, witness, turns):
        super().__init__([*([tool_use(f"call_{turn}")] for turn in range(turns)), ANSWER])
        self.witness = witness

    async def stream(self, messages, *args, **kwargs):
        self.witness.see("model", messages)
        destroy(messages)
        async for event in super().stream(messages, *args, **kwargs):
            yield event


def destroy(value):
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        destroy(inner)
    if isinstance(value, dict | list):
        value.clear()


@settings(max_examples=100)
@given(given=st.lists(values, max_size=4), history=st.lists(values, max_size=2))
def test_hooks_tools_and_models_see_what_strands_shows(given, history):
    before = [
        {"role": role, "content": [{"json": value} if role == "user" else {"text": "Yes."}]}
        for value in history
        for role in ("user", "assistant")
    ]
    action = Action(message="What is it?", task_context=TaskContext(conversation_history=before))
    expected, found = Witness(given), Witness(given)

    class Watched(Environment):
        def get_tools(self):
            return found.tools

        def get_hooks(self):
            return [found]

    async def run():
        agent = make_agent(
            Vandal(expected, len(given)),
            expected.tools,
            hooks=[expected],
            messages=copy.deepcopy(before),
            system_prompt=None,
        )
        await agent.invoke_async([{"role": "user", "content": [{"text": "What is it?"}]}])
        result = await Watched(lambda: Vandal(found, len(given))).step(action)
        assert result.termination_reason is TerminationReason.TASK_COMPLETE, result.error

    asyncio.run(run())
    assert found.seen == expected.seen
