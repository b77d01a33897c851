"""Episodes on one model object: each has a trajectory of its own, whoever runs it."""

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest
from strands import tool

from support.agents import call, make_agent, make_tools


async def test_concurrent_episodes_are_recorded_apart(rollout):
    def outputs(server):
        return sum(len(response.body["output_ids"]) for response in server.responses)

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


async def test_a_task_that_outlives_its_episode_works_for_the_one_that_runs(rollout, caplog):
    """A3: a worker that a tool starts in the first episode serves later ones."""

    def answer(request):
        return (
            call("ask_expert", q="x")
            if "question" in request.text and "An answer." not in request.text
            else "An answer."
        )

    _, model = rollout(answer)
    queue = asyncio.Queue()
    workers = []

    async def work():
        while True:
            question, answered = await queue.get()
            expert = make_agent(model, system_prompt="You know.")
            answered.set_result(str(await expert.invoke_async(question)))

    @tool
    async def ask_expert(q: str) -> str:
        """Ask.

        Args:
            q: What.
        """
        if not workers:
            workers.append(asyncio.create_task(work()))
        answered = asyncio.get_running_loop().create_future()
        await queue.put((q, answered))
        return await answered

    trajectories = []
    for number in range(3):
        with model.episode() as trajectory:
            await make_agent(model, [ask_expert]).invoke_async(f"question {number}")
        trajectories.append(trajectory)
    workers[0].cancel()
    assert [len(trajectory) for trajectory in trajectories] == [3, 3, 3]
    assert len(model.trajectory) == 0
    assert not caplog.records


@pytest.mark.parametrize("running", [0, 2])
async def test_a_task_that_outlives_its_episode_is_recorded_outside_where_nothing_tells_whom_it_works_for(
    rollout, caplog, running
):
    """A3: said once."""
    _, model = rollout(lambda request: "ok")
    may_ask = asyncio.Event()

    async def late():
        await may_ask.wait()
        for _ in range(2):
            await make_agent(model).invoke_async("late")

    with model.episode() as ended:
        task = asyncio.create_task(late())
        await make_agent(model).invoke_async("in time")
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(model.episode()) for _ in range(running)]
        may_ask.set()
        await task
    assert [len(trajectory) for trajectory in (ended, *others, model.trajectory)] == [1, *[0] * running, 2]
    (record,) = caplog.records
    assert "after its own had ended" in record.getMessage()


async def test_a_task_that_outlives_an_inner_episode_belongs_to_the_outer_one(rollout, caplog):
    """A3."""
    _, model = rollout(lambda request: "ok")
    may_ask = asyncio.Event()

    async def late():
        await may_ask.wait()
        assert model.trajectory is outer
        await make_agent(model).invoke_async("late")

    with model.episode() as outer:
        with model.episode() as inner:
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        with model.episode() as third:
            may_ask.set()
            await task
    assert [len(trajectory) for trajectory in (outer, inner, third)] == [1, 0, 0]
    assert not caplog.records


async def test_copies_of_one_agent_in_threads_without_the_context_are_recorded_in_the_episodes_that_they_began_in(
    rollout,
):
    """A3: agents that are restored from one snapshot have one state."""
    _, model = rollout(lambda request: "ok")
    saved = make_agent(model)
    await saved.invoke_async("hello")
    snapshot = saved.take_snapshot(preset="session")
    outside = len(model.trajectory)

    async def episode(number, begun, others):
        with model.episode() as trajectory:
            copy = make_agent(model)
            copy.load_snapshot(snapshot)
            await copy.invoke_async(f"first of {number}")
            begun.set()
            await asyncio.gather(*(other.wait() for other in others))
            await asyncio.get_running_loop().run_in_executor(None, copy, f"second of {number}")
        return trajectory

    begun = [asyncio.Event() for _ in range(3)]
    trajectories = await asyncio.gather(*(episode(i, event, begun) for i, event in enumerate(begun)))
    assert [[turn.parent is None for turn in trajectory.turns] for trajectory in trajectories] == [[True, False]] * 3
    assert len({turn.agent for trajectory in trajectories for turn in trajectory.turns}) == 3
    assert len(model.trajectory) == outside


async def test_nothing_keeps_an_episode_alive_that_has_ended(rollout):
    """A3: the contexts of tasks that were started inside it do not."""
    _, model = rollout(lambda request: "ok")
    with model.episode() as trajectory:
        await make_agent(model).invoke_async("hi")
        alive = asyncio.create_task(asyncio.Event().wait())
        await asyncio.sleep(0)
    ended = weakref.ref(trajectory)
    del trajectory
    gc.collect()
    assert ended() is None
    alive.cancel()


async def test_an_episode_may_be_left_in_another_task_than_it_was_entered_in(rollout):
    """A3: as asynchronous fixtures and generators are."""
    _, model = rollout(lambda request: "ok")

    async def fixture():
        with model.episode() as trajectory:
            await make_agent(model).invoke_async("hi")
            yield trajectory

    begun = fixture()
    trajectory = await asyncio.create_task(anext(begun))
    await asyncio.create_task(begun.aclose())
    with model.episode() as other:
        await make_agent(model).invoke_async("hi")
    assert (len(trajectory), len(other), len(model.trajectory)) == (1, 1, 0)


def test_episodes_may_end_in_another_order_than_they_began(rollout):
    """A3."""
    _, model = rollout(lambda request: "ok")
    first, second = model.episode(), model.episode()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    make_agent(model)("hi")
    second.__exit__(None, None, None)
    make_agent(model)("hi")
    assert (len(one), len(two), len(model.trajectory)) == (0, 1, 1)


async def test_a_call_without_an_agent_from_a_thread_without_the_context_is_recorded_outside_and_that_is_said(
    rollout, caplog
):
    """A3: whose history it begins with would be a guess."""
    _, model = rollout(lambda request: f"answer {request.index}")

    async def summary(messages):
        async for _ in model.stream([*messages, {"role": "user", "content": [{"text": "Summarise."}]}]):
            pass

    with model.episode() as trajectory:
        agent = make_agent(model)
        await agent.invoke_async("the same question")
        thread = threading.Thread(target=lambda: asyncio.run(summary(agent.messages)))
        thread.start()
        thread.join()
    assert (len(trajectory), len(model.trajectory)) == (1, 1)
    assert len(caplog.records) == 1


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
