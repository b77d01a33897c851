import asyncio
import copy
import errno
import os
import pickle
import random
import re
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strands_env.core import (
    Action,
    Observation,
    RewardResult,
    StepResult,
    TaskContext,
    TerminationReason,
    TokenObservation,
)
from strands_env.eval import (
    CheckpointError,
    DuplicateTaskError,
    EvaluationStoppedError,
    Evaluator,
    read_results,
)
from strands_env.eval.evaluator import Progress
from strands_sglang import SGLangConnectionError
from support.environments import StubEnvironment, lines, step_result, tasks
from support.environments import sample as a_sample


def evaluator(stub, **arguments):
    return Evaluator(stub.factory, **{"show_progress": False, **arguments})


def pairs(path):
    return sorted((record["prompt_id"], record["sample_index"]) for record in lines(path))


async def test_the_documented_example_runs():
    class YourEvaluator(Evaluator):
        benchmark_name = "YourBenchmark"

        def load_dataset(self):
            return tasks(4)

    async def env_factory(action):
        return StubEnvironment(lambda action: step_result(float(action.task_context.id != "t0")))

    evaluator = YourEvaluator(
        env_factory=env_factory, n_samples_per_prompt=8, max_concurrency=30, keep_tokens=False, metrics_fns=[]
    )
    results = await evaluator.run(evaluator.load_dataset())
    metrics = evaluator.compute_metrics(results)
    assert metrics["pass@1"] == metrics["pass@8"] == 0.75
    assert list(results) == ["t0", "t1", "t2", "t3"] and {len(samples) for samples in results.values()} == {8}
    assert all(type(value) is float for value in metrics.values())


async def test_every_sample_gets_its_own_copy_of_the_action_and_of_no_more_at_once_than_asked_for():
    running = most = 0

    async def play(action):
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert not hasattr(action.task_context, "seen")
        action.task_context.seen = True
        await asyncio.sleep(0)
        running -= 1
        return step_result()

    await evaluator(StubEnvironment(play), n_samples_per_prompt=3, max_concurrency=4).run(tasks(5))
    assert most == 4


async def test_a_second_run_repeats_nothing_and_has_the_same_results(tmp_path):
    stub = StubEnvironment(lambda action: step_result(random.random()))
    first = await evaluator(stub, n_samples_per_prompt=2, output_path=tmp_path / "out").run(tasks(3))
    assert len(stub.episodes) == 6
    again = await evaluator(stub, n_samples_per_prompt=2, output_path=tmp_path / "out").run(tasks(3))
    assert len(stub.episodes) == 6
    assert {p: [s.model_dump() for s in row] for p, row in again.items()} == {
        p: [s.model_dump() for s in row] for p, row in first.items()
    }
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 6


async def test_more_samples_or_tasks_later_add_what_is_missing_only(tmp_path):
    stub, path = StubEnvironment(), tmp_path / "r.jsonl"
    await evaluator(stub, n_samples_per_prompt=1, output_path=path).run(tasks(2))
    await evaluator(stub, n_samples_per_prompt=3, output_path=path).run(tasks(3))
    assert len(stub.episodes) == 9
    assert pairs(path) == [(f"t{n}", index) for n in range(3) for index in range(3)]
    fewer = await evaluator(stub, n_samples_per_prompt=1, output_path=path).run(tasks(1))
    assert {prompt: len(samples) for prompt, samples in fewer.items()} == {"t0": 1}


async def test_a_task_whose_content_changed_is_run_anew(tmp_path):
    stub, path = StubEnvironment(), tmp_path / "r.jsonl"
    await evaluator(stub, output_path=path).run(tasks(1))
    changed = Action(message="another question", task_context=TaskContext(id="t0", ground_truth="0"))
    results = await evaluator(stub, output_path=path).run([changed])
    assert [action.message for action in stub.episodes] == ["What is 0 + 0?", "another question"]
    assert results["t0"][0].action.message == "another question"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_a_results_file_cut_at_any_byte_is_completed_without_repeating_a_whole_record(tmp_path, data):
    def offsets(content):
        start = 0
        for line in content.splitlines():
            yield start, line
            start += len(line) + 1

    path = tmp_path / "r.jsonl"
    path.unlink(missing_ok=True)
    order = data.draw(st.permutations(range(4)))
    asyncio.run(
        evaluator(StubEnvironment(), n_samples_per_prompt=2, output_path=path).run([tasks(4)[n] for n in order])
    )
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, 10**6)) * len(whole) // 10**6  # lengths differ by a run's timings
    path.write_bytes(whole[:cut])
    kept = sum(len(line) <= cut - start for start, line in offsets(whole))
    stub = StubEnvironment()
    again = [tasks(4)[n] for n in data.draw(st.permutations(range(4)))]
    asyncio.run(evaluator(stub, n_samples_per_prompt=2, output_path=path).run(again))
    assert len(stub.episodes) == 8 - kept
    assert pairs(path) == [(f"t{n}", index) for n in range(4) for index in range(2)]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
@pytest.mark.parametrize("reward_fn", [None, True])
async def test_a_reward_that_is_no_finite_number_is_the_same_in_a_run_and_its_resumption(tmp_path, reward, reward_fn):
    """B15."""
    stub = StubEnvironment(lambda action: step_result(reward), reward_fn=reward_fn)
    runs = [evaluator(stub, output_path=tmp_path / "r.jsonl") for _ in range(2)]
    first, second = [await run.run(tasks(2)) for run in runs]
    assert [s.reward for samples in first.values() for s in samples] == [None, None]
    assert runs[0].compute_metrics(first) == runs[1].compute_metrics(second)


def failing(failed):
    def play(action):
        if isinstance(failed, BaseException):
            raise failed
        return failed

    return play


UNREACHABLE = StepResult(
    observation=step_result().observation,
    termination_reason=TerminationReason.TASK_COMPLETE,
    error="reward function: the judge cannot be reached",
    reward_error="the judge cannot be reached",
    reward_error_is_infrastructure=True,
)


@pytest.mark.parametrize(
    "failed",
    [
        step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="SGLangConnectionError: gone"),
        step_result(None, reason=TerminationReason.ABORTED, error="aborted"),
        step_result(None, reason=TerminationReason.CANCELLED, error="cancelled"),
        UNREACHABLE,
        SGLangConnectionError("gone"),
    ],
    ids=["infrastructure", "aborted", "cancelled", "judge's server", "raised"],
)
async def test_failures_of_the_infrastructure_go_to_a_file_of_their_own_and_are_tried_again(tmp_path, failed):
    path = tmp_path / "r.jsonl"
    results = await evaluator(StubEnvironment(failing(failed)), output_path=path).run(tasks(2))
    assert [sample.aborted for samples in results.values() for sample in samples] == [True, True]
    assert lines(path) == []
    cause = "SGLangConnectionError: gone" if isinstance(failed, Exception) else failed.error
    assert [record["error"] for record in lines(tmp_path / "r.failures.jsonl")] == [cause] * 2
    stub = StubEnvironment()
    run = evaluator(stub, output_path=path)
    results = await run.run(tasks(2))
    assert len(stub.episodes) == 2 and run.compute_metrics(results)["dropped_samples"] == 0
    assert pairs(path) == [("t0", 0), ("t1", 0)]


ERRORS = {
    "the agent's code": step_result(None, reason=TerminationReason.AGENT_ERROR, error="KeyError: 'x'"),
    "the reward function": step_result(None, error="reward function: ValueError: no"),
    "no answer in time": StepResult(observation=Observation(), termination_reason=TerminationReason.TIMEOUT),
    "a reward that is no number": step_result(float("nan")),
    "raised": RuntimeError("the environment itself"),
    "raised for its time": asyncio.TimeoutError("too long"),
    "asked to exit": SystemExit(3),
    "cancelled by nobody": asyncio.CancelledError(),
}


@pytest.mark.parametrize("failed", ERRORS.values(), ids=list(ERRORS))
async def test_an_answer_that_makes_its_grader_or_environment_fail_is_a_wrong_answer(tmp_path, failed):
    """Row B16: two of four answers are right, and the others do not leave the denominator by failing."""

    def play(action):
        return failing(failed)(action) if action.task_context.id in ("t1", "t2") else step_result()

    path = tmp_path / "r.jsonl"
    metrics = []
    for _ in range(2):  # a resumed run says the same, and gives no such answer another try
        stub = StubEnvironment(play)
        run = evaluator(stub, output_path=path)
        results = await run.run(tasks(4))
        metrics.append(run.compute_metrics(results))
    assert metrics[0] == metrics[1] == run.compute_metrics(read_results(path)[1])
    assert (metrics[0]["pass@1"], metrics[0]["avg@1"], metrics[0]["pass@1_prompts"]) == (0.5, 0.5, 4)
    assert (metrics[0]["errored_samples"], metrics[0]["dropped_samples"]) == (2, 0)
    assert len(stub.episodes) == 0 and len(lines(path)) == 4
    assert [results[prompt][0].is_errored for prompt in ("t0", "t1", "t2", "t3")] == [False, True, True, False]


async def test_errors_are_run_again_when_that_is_asked_for(tmp_path):
    """Row B16."""
    path = tmp_path / "r.jsonl"
    broken = step_result(None, error="reward function: KeyError: 'typo'")
    await evaluator(StubEnvironment(failing(broken)), output_path=path).run(tasks(3))
    down = step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="down")
    run = evaluator(StubEnvironment(failing(down)), output_path=path, retry_errors=True)
    results = await run.run(tasks(3))
    assert run.compute_metrics(results)["errored_samples"] == 3  # nothing better came of it
    run = evaluator(StubEnvironment(), output_path=path, retry_errors=True)
    results = await run.run(tasks(3))
    assert run.compute_metrics(results)["pass@1"] == 1.0 == run.compute_metrics(read_results(path)[1])["pass@1"]


async def test_an_environment_that_cannot_be_made_says_nothing_of_the_policy():
    """Row B16."""

    async def factory(action):
        raise RuntimeError("no sandbox")

    run = Evaluator(factory, show_progress=False)
    metrics = run.compute_metrics(await run.run(tasks(2)))
    assert (metrics["dropped_samples"], metrics["errored_samples"]) == (2, 0)


async def test_who_judges_by_itself_and_leaves_a_reward_out_has_not_taken_the_sample_out():
    """Row B16: an environment of one's own without a reward function, whose step fails to give some rewards."""
    stub = StubEnvironment(lambda action: step_result(1.0 if action.task_context.id == "t0" else None), reward_fn=None)
    run = evaluator(stub)
    metrics = run.compute_metrics(await run.run(tasks(2)))
    assert (metrics["pass@1"], metrics["errored_samples"], metrics["unscored_samples"]) == (0.5, 1, 0)


@pytest.mark.parametrize(
    ("result", "finished"),
    [
        (step_result(None), True),
        (step_result(None, reason=TerminationReason.MAX_TOKENS_REACHED, error="MaxTokensReachedException"), True),
        (step_result(None, reason=TerminationReason.TIMEOUT), True),
        (step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR), False),
    ],
)
async def test_without_a_reward_function_the_end_alone_decides_what_is_finished(result, finished):
    stub = StubEnvironment(lambda action: result, reward_fn=None)
    run = evaluator(stub)
    results = await run.run(tasks(1))
    assert results["t0"][0].is_finished is finished
    metrics = run.compute_metrics(results)
    assert (metrics["unscored_samples"], metrics["dropped_samples"]) == (float(finished), float(not finished))
    assert "pass@1" not in metrics and metrics["pass@1_dropped_prompts"] == 1


async def test_a_cancelled_run_keeps_what_is_finished_and_ends_what_is_not(tmp_path):
    ended = []
    third = asyncio.Event()
    is_hanging = [True]

    async def play(action):
        if is_hanging and action.task_context.id in ("t2", "t3"):
            third.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(action.task_context.id)
        return step_result()

    path = tmp_path / "r.jsonl"
    running = asyncio.ensure_future(evaluator(StubEnvironment(play), max_concurrency=2, output_path=path).run(tasks(9)))
    await third.wait()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "t2" in ended
    assert {("t0", 0), ("t1", 0)} >= set(pairs(path)) >= {("t0", 0)}
    assert not (tmp_path / "r.failures.jsonl").read_bytes()
    is_hanging.clear()
    stub = StubEnvironment(play)
    await evaluator(stub, output_path=path).run(tasks(9))  # the lock was given back
    assert pairs(path) == [(f"t{n}", 0) for n in range(9)]


async def test_a_full_disk_ends_the_run_and_a_later_one_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    pwrite, calls = os.pwrite, []

    def full(fd, data, offset):
        if data.startswith(b'{"key"'):
            calls.append(data)
            if len(calls) > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        await evaluator(StubEnvironment(), max_concurrency=2, output_path=path).run(tasks(40))
    kept = len(pairs(path))
    assert 3 <= kept < 40
    monkeypatch.undo()
    stub = StubEnvironment()
    await evaluator(stub, output_path=path).run(tasks(40))
    assert len(stub.episodes) == 40 - kept and len(pairs(path)) == 40


async def test_what_cannot_be_synced_is_told_kept_by_nobody_and_run_again(tmp_path, monkeypatch):
    path, fsync, synced = tmp_path / "r.jsonl", os.fsync, []

    def failing(fd):
        if os.fstat(fd).st_ino == path.stat().st_ino:
            synced.append(len(lines(path)))
            if len(synced) > 3:
                raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="Input/output error; every result reported as finished is kept, run"):
        await evaluator(StubEnvironment(), max_concurrency=8, output_path=path).run(tasks(40))
    kept = pairs(path)
    assert len(kept) == synced[2] < synced[3]
    monkeypatch.undo()
    stub = StubEnvironment()
    await evaluator(stub, output_path=path).run(tasks(40))
    assert len(stub.episodes) == 40 - len(kept) and len(pairs(path)) == 40


async def test_another_configuration_is_refused_and_told_what_differs(tmp_path):
    path = tmp_path / "r.jsonl"
    await evaluator(StubEnvironment(), output_path=path, config={"model": "a", "temperature": 1.0}).run(tasks(1))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="another configuration: temperature was 1.0 and is 0.5; name another"):
        await evaluator(StubEnvironment(), output_path=path, config={"model": "a", "temperature": 0.5}).run(tasks(1))
    assert path.read_bytes() == before


async def test_two_runs_at_once_on_one_file_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    gate = asyncio.Event()

    async def play(action):
        await gate.wait()
        return step_result()

    first = asyncio.ensure_future(evaluator(StubEnvironment(play), output_path=path).run(tasks(1)))
    await asyncio.sleep(0)
    with pytest.raises(CheckpointError, match="another evaluation"):
        await evaluator(StubEnvironment(), output_path=path).run(tasks(1))
    gate.set()
    await first
    assert len(lines(path)) == 1


async def test_equal_tasks_are_prompts_of_their_own_and_different_ones_with_one_id_are_refused(tmp_path):
    action = Action(message="same", task_context=TaskContext(ground_truth=1))
    stub = StubEnvironment()
    results = await evaluator(stub, output_path=tmp_path / "r.jsonl").run([action, action, action])
    assert len(stub.episodes) == len(results) == len(set(results)) == 3
    await evaluator(stub, output_path=tmp_path / "r.jsonl").run([action, action, action])
    assert len(stub.episodes) == 3
    other = [Action(message=text, task_context=TaskContext(id=7)) for text in "ab"]
    with pytest.raises(DuplicateTaskError, match=r"tasks 0 and 1 \(from 0\) are different tasks with the same id '7'"):
        await evaluator(stub).run(other)


@pytest.mark.parametrize("keep", [False, True])
async def test_tokens_are_kept_if_asked_for_also_over_a_resume(tmp_path, keep):
    tokens = TokenObservation(token_ids=[1, 2, 3], prompt_length=1, loss_mask=[0, 1, 1], logprobs=[None, -0.5, -0.25])

    def play(action):
        result = step_result()
        result.observation.tokens = tokens
        return result

    for _ in range(2):
        run = evaluator(StubEnvironment(play), keep_tokens=keep, output_path=tmp_path / "r.jsonl")
        sample = (await run.run(tasks(1)))["t0"][0]
        assert sample.step_result.observation.tokens == (tokens if keep else None)


async def test_kept_tokens_are_on_the_disk_and_not_in_memory(tmp_path):
    """Row B15: 40 samples of 20,000 tokens, which took 84 bytes each."""
    length = 20_000

    def play(action):
        result = step_result()
        ids = [1000 + int(action.task_context.id[1:])] * length
        result.observation.tokens = TokenObservation(
            token_ids=ids, prompt_length=1, loss_mask=[0] + [1] * (length - 1), logprobs=[n / 7 for n in range(length)]
        )
        return result

    path = tmp_path / "r.jsonl"
    tracemalloc.start()
    try:
        for count in (40, 41):  # resumed, too
            before = tracemalloc.get_traced_memory()[0]
            run = evaluator(StubEnvironment(play), keep_tokens=True, output_path=path)
            results = await run.run(tasks(count))
            assert tracemalloc.get_traced_memory()[0] - before < 6_000_000  # of 67 MB
            run.compute_metrics(results)
    finally:
        tracemalloc.stop()
    _, read = read_results(path)
    for sample in (
        results["t7"][0],
        read["t7"][0],
        copy.deepcopy(read["t7"][0]),
        pickle.loads(pickle.dumps(results))["t7"][0],
    ):
        tokens = sample.step_result.observation.tokens
        assert tokens.rollout_token_ids == [1007] * (length - 1) and tokens.prompt_length == 1
        assert tokens == play(sample.action).observation.tokens == tokens
        assert sample.model_dump()["step_result"]["observation"]["tokens"]["logprobs"][7] == 1.0


async def test_what_json_has_no_form_for_is_no_reason_to_lose_a_result(tmp_path):
    def play(action):
        result = step_result()
        result.reward = RewardResult(reward=1.0, info={"set": {1}, "loop": print, "half": "\ud83d"})
        return result

    path = tmp_path / "r.jsonl"
    action = Action(message="?", task_context=TaskContext(ground_truth={"a", "b"}, image=b"\x00\xff"))
    for _ in range(2):
        results = await evaluator(StubEnvironment(play), output_path=path).run([action])
    assert [sample.reward for samples in results.values() for sample in samples] == [1.0]
    assert path.read_bytes().count(b"\n") == 1


async def test_it_stops_after_so_many_failures_in_a_row(tmp_path):
    down = step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="nobody there")
    stub = StubEnvironment(lambda action: down)
    run = evaluator(stub, max_concurrency=1, stop_after_failures=3, output_path=tmp_path / "r.jsonl")
    with pytest.raises(EvaluationStoppedError, match="3 samples in a row failed.*infrastructure_error: nobody there"):
        await run.run(tasks(50))
    assert len(stub.episodes) == 3
    assert len(lines(tmp_path / "r.failures.jsonl")) == 3


async def test_results_are_read_again_with_the_failures_that_are_left(tmp_path):
    def play(action):
        down = step_result(None, reason=TerminationReason.INFRASTRUCTURE_ERROR, error="down")
        return down if action.task_context.id == "t1" else step_result()

    run = evaluator(StubEnvironment(play), n_samples_per_prompt=2, output_path=tmp_path / "out")
    results = await run.run(tasks(3))
    described, read = read_results(tmp_path / "out")
    assert described.n_samples_per_prompt == 2
    assert run.compute_metrics(read) == run.compute_metrics(results)
    with pytest.raises(CheckpointError, match="no results of an evaluation"):
        read_results(tmp_path / "nowhere")


async def test_metrics_of_ones_own_are_put_beside_the_standard_ones():
    run = evaluator(StubEnvironment(), metrics_fns=[lambda results: {"prompts_seen": len(results)}])
    assert run.compute_metrics(await run.run(tasks(3)))["prompts_seen"] == 3.0


async def test_actions_may_come_from_an_async_generator():
    async def source():
        for action in tasks(3):
            yield action

    assert len(await evaluator(StubEnvironment()).run(source())) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_samples_per_prompt": 0},
        {"max_concurrency": 0},
        {"keep_trajectories": True},
        {"success_threshold": float("nan")},
    ],
)
def test_what_cannot_work_is_refused(arguments):
    with pytest.raises(ValueError):
        Evaluator(StubEnvironment().factory, **arguments)


def test_the_bar_has_rate_remaining_time_running_reward_and_failures(capsys):
    with Progress("sums", 10, [a_sample(1.0), a_sample(0.0)], shown=True) as progress:
        progress.add(a_sample(1.0))
        progress.add(a_sample(None, finished=False))
    shown = capsys.readouterr().err
    assert re.search(
        r"sums: .*3/10 .*<.*sample.*reward=0\.667|sums: .*4/10 .*<.*sample.*reward=0\.667, failed=1", shown
    )


def test_nothing_is_shown_where_nobody_looks_at_a_terminal(capsys):
    with Progress("sums", 2, []) as progress:
        progress.add(a_sample(1.0))
    assert capsys.readouterr().err == ""
