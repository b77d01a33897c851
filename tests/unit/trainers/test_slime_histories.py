"""Whatever is done to a history, and however often an episode is aborted, its samples are what slime can use."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent
from strands.agent.conversation_manager import NullConversationManager, SlidingWindowConversationManager

from strands_sglang import TerminationReason
from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from strands_sglang.trainers.slime import to_slime_samples
from support.agents import call, make_tools
from support.history_plans import random_plan
from support.history_runs import Stage
from support.slime_checker import check_against_server, check_rollouts
from support.slime_episodes import ANSWER, CALL, EXPERTS, QUESTION, Rollouts, moe_args
from support.slime_stub import Sample, slime_args, slime_sampling_params

PLANS = 150


def test_random_histories_become_samples(chatml_tokenizer, tmp_path):
    stage = Stage(chatml_tokenizer, tmp_path)
    fanned_out = 0
    for number in range(PLANS):
        player = stage.play(random_plan(random.Random(f"slime/{number}")))
        trajectory = stage.model.trajectory
        reason = list(TerminationReason)[number % len(TerminationReason)]
        for fan_out in (False, True):
            given = Sample(index=number, group_index=0, reward=7.0, tokens=[1], loss_mask=[1])
            samples = to_slime_samples(trajectory, given, reason, tokenizer=chatml_tokenizer, fan_out=fan_out)
            check_rollouts([samples], slime_args(), chatml_tokenizer)
            check_against_server(samples, player.server)
            fanned_out += fan_out and len(samples) > 1
    stage.close()
    assert fanned_out > PLANS / 10


ANSWERS = st.sampled_from(
    [
        CALL,
        f"{CALL}\n{CALL}",
        call("nobody", x=1),
        "<tool_call>\nno JSON\n</tool_call>",
        ANSWER,
        ScriptedAnswer("25 * 17", finish_reason="length"),
        ScriptedAnswer("25 * 17", finish_reason="abort"),
        ScriptedAnswer("", finish_reason="abort"),
        ScriptedFault("drop"),
        ScriptedFault("status", status=400),
    ]
)
ABORTS = st.booleans()


@settings(max_examples=80)
@given(
    script=st.lists(st.tuples(ANSWERS, ABORTS), min_size=1, max_size=8),
    fan_out=st.booleans(),
    partial=st.booleans(),
    masked=st.booleans(),
    replayed=st.booleans(),
    window=st.sampled_from([None, 2, 3]),
    budget=st.sampled_from([40, 150, 2000]),
)
def test_episodes_that_go_wrong_in_every_way_become_samples(
    script, fan_out, partial, masked, replayed, window, budget, chatml_tokenizer, scripted_top_p
):
    def agent_factory(model: Any, sample: Sample) -> Agent:
        manager = NullConversationManager() if window is None else SlidingWindowConversationManager(window_size=window)
        return Agent(model=model, tools=make_tools()[0], callback_handler=None, conversation_manager=manager)

    partial = partial and not fan_out
    args = {"partial_rollout": partial, "mask_offpolicy_in_partial_rollout": masked}
    params = slime_sampling_params(max_new_tokens=budget)
    if replayed:
        args |= {"rollout_top_p": 0.9, **moe_args()}
        params["custom_params"] = {"return_top_p_token_ids": True}
    rollouts = Rollouts(
        chatml_tokenizer, [], server={"experts": EXPERTS}, agent_factory=agent_factory, fan_out=fan_out, max_turns=6
    )
    entries = [rollouts.aborts_with(answer) if aborts else answer for answer, aborts in script]
    rollouts.server._script = type(rollouts.server._script)([*entries, *([ANSWER] * 20)])

    async def play() -> None:
        sample = Sample(index=1, group_index=0, prompt=QUESTION)
        for _ in range(len(script) + 1):
            before = len(rollouts.server.requests)
            given = copy.deepcopy(params)
            result = await rollouts(sample, params=params, **args)
            assert params == given
            check_rollouts([result], slime_args(**args), chatml_tokenizer)
            log = rollouts.server
            if partial:
                check_against_server(result, log, experts=EXPERTS if replayed else None)
            else:
                this_time = copy.copy(log)
                this_time.requests, this_time.responses = log.requests[before:], log.responses[before:]
                check_against_server(result, this_time, experts=EXPERTS if replayed else None)
            rollouts.state.aborted = False
            sample = result[-1] if fan_out else result
            if sample.status.name != "ABORTED":
                return
            sample = Sample.from_dict(copy.deepcopy(sample.to_dict()))
        raise AssertionError("the rollout never ended")

    asyncio.run(play())
