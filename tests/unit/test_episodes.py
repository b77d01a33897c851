"""Episodes on one model object: each has a trajectory of its own, whoever runs it."""

import asyncio
import threading

import pytest

from support.agents import call, make_agent, make_tools


def outputs(server):
    return sum(len(response.body["output_ids"]) for response in server.responses)


async def test_concurrent_episodes_are_recorded_apart(rollout):
    server, model = rollout(lambda request: call(expression="2 * 3") if "<tool_response>" not in request.text else "ok")

    async def episode():
        with model.episode() as trajectory:
            await make_agent(model, make_tools()[0]).invoke_async("2 times 3?")
            assert model.trajectory is trajectory
            assert model.token_manager.token_ids == trajectory.sequences()[0].token_ids
            return trajectory

    trajectories = await asyncio.gather(*(episode() for _ in range(8)))
    assert [len(trajectory) for trajectory in trajectories] == [2] * 8
    assert len(model.trajectory) == 0
    assert sum(sum(t.sequences()[0].loss_mask) for t in trajectories) == outputs(server)


def test_episodes_in_threads_are_recorded_apart(rollout):
    _, model = rollout(lambda request: "ok")
    lengths = []

    def run():
        with model.episode() as trajectory:
            make_agent(model)("hi")
            make_agent(model)("hi")
        lengths.append((len(trajectory), len(trajectory.sequences())))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [(2, 2)] * 4


async def test_a_call_from_a_thread_without_the_context_goes_to_the_episode_whose_history_it_has(rollout):
    _, model = rollout(lambda request: f"answer {request.index}")

    async def summary(messages):
        async for _ in model.stream([*messages, {"role": "user", "content": [{"text": "Summarise."}]}]):
            pass

    def elsewhere(messages):
        thread = threading.Thread(target=lambda: asyncio.run(summary(messages)))
        thread.start()
        thread.join()

    async def episode(inside, other):
        with model.episode() as trajectory:
            agent = make_agent(model)
            await agent.invoke_async("the same question")
            inside.set()
            await other.wait()
            elsewhere(agent.messages)
        return trajectory

    one, two = asyncio.Event(), asyncio.Event()
    first, second = await asyncio.gather(episode(one, two), episode(two, one))
    assert [turn.is_auxiliary for turn in first.turns] == [False, True]
    assert [turn.is_auxiliary for turn in second.turns] == [False, True]
    assert len(model.trajectory) == 0


async def test_an_agent_in_a_thread_without_the_context_is_recorded_outside_and_that_is_said_once(rollout, caplog):
    _, model = rollout(lambda request: "ok")
    with model.episode() as trajectory:
        await asyncio.to_thread(make_agent(model), "with the context")
        assert not caplog.records
        for _ in range(2):
            await asyncio.get_running_loop().run_in_executor(None, make_agent(model), "without it")
    assert (len(trajectory), len(model.trajectory)) == (1, 2)
    (record,) = caplog.records
    assert "asyncio.to_thread" in record.getMessage()


async def test_a_reset_inside_an_episode_is_refused(rollout):
    _, model = rollout(["ok"])
    with model.episode() as trajectory:
        with pytest.raises(RuntimeError, match="inside `with model.episode"):
            model.reset()
        await make_agent(model).invoke_async("hi")
    assert len(trajectory) == 1


async def test_what_an_episode_recorded_stays_readable_after_it(rollout):
    server, model = rollout(["ok", "fine"])
    with model.episode() as trajectory:
        await make_agent(model).invoke_async("hi")
    await make_agent(model).invoke_async("outside")
    assert (len(trajectory), len(model.trajectory)) == (1, 1)
    (sequence,) = trajectory.sequences()
    assert sequence.token_ids == server.requests[0].input_ids + server.responses[0].body["output_ids"]
