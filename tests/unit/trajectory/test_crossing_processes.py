"""Results and errors cross process boundaries: pickle, cloudpickle, `copy.deepcopy`, a real worker process."""

import concurrent.futures
import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil

import cloudpickle
import pytest

import strands_env
import strands_sglang
from strands_env.core import Action, Environment, TaskContext
from strands_env.eval import Evaluator
from strands_sglang import SGLangContextLengthError, SGLangHTTPError, SGLangThrottledError, Trajectory
from strands_sglang.testing import ScriptedAnswer
from support.agents import call, make_agent, make_tools
from support.evaluation import StubEnvironment, tasks

WAYS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(params=list(WAYS))
def cross(request):
    return WAYS[request.param]


def error_classes():
    """Every public error of both packages: those whose names and modules have no leading underscore."""
    found = set()
    for package in (strands_sglang, strands_env):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if (
                any(part.startswith("_") for part in info.name.split("."))
                or ".scripts" in info.name
                or ".shim" in info.name
            ):
                continue
            try:
                module = importlib.import_module(info.name)
            except ModuleNotFoundError:  # an extra that is not installed
                continue
            found |= {
                kind
                for name, kind in vars(module).items()
                if inspect.isclass(kind) and issubclass(kind, BaseException) and not name.startswith("_")
                if kind.__module__.startswith(("strands_sglang", "strands_env"))
            }
    return sorted(found, key=lambda kind: kind.__qualname__)


def made(kind):
    """An error of a kind, with a made-up value for every argument that has to be given."""
    values = {"int": 418, "str": "told", "bool": True, "dict[str, Any]": {"a": 1}}
    if not inspect.isfunction(kind.__init__):  # it takes what any exception takes
        return kind("told")
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    keywords = {p.name: values.get(str(p.annotation), "told") for p in parameters if p.kind is p.KEYWORD_ONLY}
    positional = [
        values.get(str(p.annotation), "told")
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return kind(*positional or ["told"], **keywords)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__qualname__)
def test_every_error_crosses_with_all_that_it_says(kind, cross):
    """A4."""
    error = made(kind)
    there = cross(error)
    assert type(there) is kind
    assert (str(there), there.args, vars(there)) == (str(error), error.args, vars(error))


def raise_http_error(kind):
    raise kind("POST http://x/generate: HTTP 418", status=418, body="tea")


@pytest.mark.parametrize("kind", [SGLangHTTPError, SGLangContextLengthError, SGLangThrottledError])
def test_an_error_in_a_worker_reaches_its_parent_and_breaks_no_pool(kind):
    """A4: such an error broke a process pool, and `multiprocessing.Pool` waited for ever."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        with pytest.raises(kind) as caught:
            pool.submit(raise_http_error, kind).result(timeout=120)
        assert (caught.value.status, caught.value.body) == (418, "tea")
        assert pool.submit(int, "1").result(timeout=120) == 1


@pytest.fixture
async def episode(rollout):
    """A tool loop, a fork, a call that failed."""
    _, model = rollout([call(expression="2 * 3"), "Six.", "Edited."])
    agent = make_agent(model, make_tools()[0])
    await agent.invoke_async("2 times 3?")
    agent.messages[0]["content"][0]["text"] = "edited"
    await agent.invoke_async("again")
    with pytest.raises(Exception, match="501"):
        await agent.invoke_async("the script has run out")
    return model


def told(trajectory):
    return [
        (
            turn.index,
            turn.status,
            turn.reason,
            list(turn.prompt_ids),
            list(turn.output_ids),
            turn.failure,
            turn.tool_calls,
        )
        for turn in trajectory.turns
    ]


async def test_a_trajectory_crosses_whole(episode, cross):
    """A4."""
    trajectory = episode.trajectory
    there = cross(trajectory)
    assert isinstance(there, Trajectory) and there is not trajectory
    assert told(there) == told(trajectory)
    assert [s.tokens for s in there.sequences()] == [s.tokens for s in trajectory.sequences()]
    assert there.explain() == trajectory.explain()


async def test_turns_stay_parts_of_one_trajectory(episode, cross):
    """A4."""
    turns = cross(episode.trajectory.turns)
    assert told(turns[0].trajectory) == told(episode.trajectory)
    assert all(turn.trajectory is turns[0].trajectory for turn in turns)
    parents = [None if turn.parent is None else turns.index(turn.parent) for turn in turns]
    originals = episode.trajectory.turns
    assert parents == [None if turn.parent is None else originals.index(turn.parent) for turn in originals]


async def test_sequences_cross_with_every_token(episode, cross):
    """A4."""
    for sequence in [*episode.trajectory.sequences(), episode.token_manager]:
        there = cross(sequence)
        assert there.tokens == sequence.tokens and there.segment_info == sequence.segment_info
        assert there.policy_versions == sequence.policy_versions


async def test_a_copy_is_extended_and_leaves_the_original_alone(rollout, cross):
    """A4."""
    server, model = rollout(["One.", "Two."])
    agent = make_agent(model)
    await agent.invoke_async("a")
    original, model.trajectory = model.trajectory, cross(model.trajectory)
    await agent.invoke_async("b")
    assert (len(original), len(model.trajectory)) == (1, 2)
    assert len(model.trajectory.sequences()) == 1


async def test_the_result_of_a_step_crosses(rollout, cross):
    """A4."""
    _, model = rollout(["hello"])
    result = await Environment(model_factory=lambda: model).step(
        Action(message="hi", task_context=TaskContext(id="1", extra={"a": 1}))
    )
    there = cross(result)
    assert there.model_dump() == result.model_dump()
    assert told(there.observation.trajectory) == told(result.observation.trajectory)


async def test_results_of_an_evaluation_cross(tmp_path, cross):
    """A4."""
    results = await Evaluator(StubEnvironment().factory, show_progress=False).run(tasks(2))
    there = cross(results)
    assert {key: [s.model_dump() for s in row] for key, row in there.items()} == {
        key: [s.model_dump() for s in row] for key, row in results.items()
    }


async def test_a_long_episode_crosses_in_a_size_linear_in_its_tokens(rollout, cross):
    """A4: a chain of 400 turns was a RecursionError."""
    _, model = rollout(lambda request: ScriptedAnswer("ok"), server={"context_length": 10**6})
    messages, sizes = [], {}
    for number in range(1, 401):
        messages += [{"role": "user", "content": [{"text": "q"}]}]
        async for _ in model.stream(messages):
            pass
        messages += [{"role": "assistant", "content": [{"text": "ok"}]}]
        if number in (200, 400):
            sizes[number] = len(pickle.dumps(model.trajectory.turns))
    there = cross(model.trajectory.turns)
    assert len(there) == 400 and there[-1].token_ids() == model.trajectory.turns[-1].token_ids()
    assert cross(model.trajectory.turns[-1]).token_ids() == there[-1].token_ids()
    assert sizes[400] < 2.2 * sizes[200]


def test_a_turn_without_a_trajectory_says_that_it_cannot_cross(rollout, cross):
    """A4."""
    turn = strands_sglang.Turn(0, None, "alone", b"", {}, (), (), [])
    with pytest.raises(TypeError, match="part of no trajectory"):
        cross(turn)
