"""Saved episodes scored with another reward."""

import itertools
import json
from pathlib import Path

import pytest

from strands_env.core import (
    Action,
    Environment,
    Observation,
    RewardError,
    RewardFunction,
    StepResult,
    TaskContext,
    TerminationReason,
    compute_reward,
)
from strands_env.eval import CheckpointError, Evaluator, read_results, score, standard_metrics
from strands_env.eval.metrics import compare, comparison_lines
from strands_env.rewards import MathReward
from strands_sglang import SGLangModel, Trajectory
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.testing import ScriptedSGLang
from support.environments import Contains, Gives, StubEnvironment, answered, lines, step_result, tasks

ANSWERS = [json.loads(line) for line in (Path(__file__).parent / "rewards" / "math_pairs.jsonl").open(encoding="utf-8")]


def facts(sample):
    """What a sample says, without times and ids of messages."""
    result, timed = sample.step_result, ("seconds", "model_seconds", "reward_seconds")
    metrics = {name: value for name, value in result.observation.metrics.items() if name not in timed}
    return (
        *(sample.key, sample.prompt_id, sample.sample_index, sample.is_finished, sample.is_errored, sample.environment),
        *(result.reward, result.termination_reason, result.error, result.reward_error, metrics),
        result.observation.final_response,
    )


async def test_scoring_saved_samples_equals_scoring_them_live(chatml_tokenizer, tmp_path):
    chosen = [one for one in ANSWERS if one["kind"] in ("decimal", "fraction", "unit", "percent", "money")]
    answers = [one["answer"] for one in chosen for _ in range(2)]
    actions = [
        Action(message=f"Task {n}", task_context=TaskContext(id=n, ground_truth=one["truth"]))
        for n, one in enumerate(chosen)
    ]

    async def evaluate(reward_fn, path):
        server = ScriptedSGLang(chatml_tokenizer, answers)
        model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
        evaluator = Evaluator(
            lambda action: Environment(lambda: model, reward_fn), 2, max_concurrency=1, output_path=path
        )
        return await evaluator.run(actions)

    live = await evaluate(MathReward(), tmp_path / "live")
    await evaluate(None, tmp_path / "unscored")
    scored = await score(tmp_path / "unscored", MathReward(), tmp_path / "scored")
    assert [facts(one) for row in scored.values() for one in row] == [
        facts(one) for row in live.values() for one in row
    ]
    assert 0.2 < standard_metrics(scored, n_samples_per_prompt=2)["pass@1"] < 0.8
    assert read_results(tmp_path / "scored")[1] == scored


async def evaluated(path, play=None, count=3, **options):
    """An evaluation in which every second answer is right."""
    numbers = itertools.count()
    stub = StubEnvironment(play or (lambda action: step_result(0.0, text=str(next(numbers)))))
    await Evaluator(stub.factory, 2, output_path=path, config={"reward": "none"}, **options).run(tasks(count))


async def test_the_saved_evaluation_is_only_read(tmp_path):
    await evaluated(tmp_path / "a", keep_tokens=True)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "a").iterdir()}
    reward = Contains()
    scored = await score(tmp_path / "a", reward, tmp_path / "b", config={"reward": "contains"})
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "a").iterdir()} == before
    assert reward.asked == 6 and sum(one.reward for row in scored.values() for one in row) == 3
    with pytest.raises(ValueError, match="write to another folder"):
        await score(tmp_path / "a", reward, tmp_path / "b" / ".." / "a")


async def test_scoring_resumes_and_follows_an_evaluation_that_grows(tmp_path):
    await evaluated(tmp_path / "a", count=2)
    reward = Contains()
    await score(tmp_path / "a", reward, tmp_path / "b", config={})
    await evaluated(tmp_path / "a", count=3)
    for _ in range(2):
        await score(tmp_path / "a", reward, tmp_path / "b", config={})
    assert reward.asked == 6 == len(lines(tmp_path / "b" / "results.jsonl"))
    with pytest.raises(CheckpointError, match="reward was None and is 'other'"):
        await score(tmp_path / "a", reward, tmp_path / "b", config={"reward": "other"})


async def test_a_sample_that_ran_again_is_scored_again(tmp_path):
    async def evaluate(result):
        await Evaluator(
            StubEnvironment(lambda action: result).factory, output_path=tmp_path / "a", retry_errors=True
        ).run(tasks(2))

    reward = Contains()
    await evaluate(step_result(None, "no", TerminationReason.AGENT_ERROR, "ValueError: my tool"))
    first = await score(tmp_path / "a", reward, tmp_path / "b")
    assert all(row[0].is_errored for row in first.values()) and reward.asked == 0
    await evaluate(step_result(0.0, "0 or 2"))
    for _ in range(2):
        again = await score(tmp_path / "a", reward, tmp_path / "b")
        assert [row[0].reward for row in again.values()] == [1.0, 1.0] and reward.asked == 2
    assert read_results(tmp_path / "b")[1] == again


async def test_an_outcome_without_a_reward_keeps_none(tmp_path):
    def play(action):
        text, (reason, error) = action.message, ends[action.task_context.id]
        return step_result(None, text, reason, error)

    ends = {
        "t0": (TerminationReason.TASK_COMPLETE, None),
        "t1": (TerminationReason.INFRASTRUCTURE_ERROR, "the server is down"),
        "t2": (TerminationReason.AGENT_ERROR, "ValueError: my tool"),
    }
    await evaluated(tmp_path / "a", play)
    scored = await score(tmp_path / "a", Gives(1.0), tmp_path / "b")
    told = {name: {(one.reward, one.is_finished, one.is_errored) for one in row} for name, row in scored.items()}
    assert told == {"t0": {(1.0, True, False)}, "t1": {(None, False, False)}, "t2": {(None, True, True)}}
    assert {one.step_result.error for one in read_results(tmp_path / "b")[1]["t1"]} == {"the server is down"}


async def test_samples_whose_judge_was_down_are_scored(tmp_path):
    def play(action):
        down = {"reward_error": "RewardError: down", "reward_error_is_infrastructure": True, "error": "reward function"}
        return answered("0").model_copy(update=down)

    await evaluated(tmp_path / "a", play)
    assert not any(one.is_finished for row in read_results(tmp_path / "a")[1].values() for one in row)
    scored = await score(tmp_path / "a", Contains(), tmp_path / "b")
    assert [one.reward for one in scored["t0"]] == [1.0, 1.0] and scored["t0"][0].step_result.error is None


@pytest.mark.parametrize("infrastructure", [True, False])
async def test_a_reward_that_fails_drops_or_errors_a_sample(tmp_path, infrastructure):
    await evaluated(tmp_path / "a")
    failing = Gives(RewardError("judge", is_infrastructure=infrastructure))
    scored = await score(tmp_path / "a", failing, tmp_path / "b")
    assert {one.is_finished for row in scored.values() for one in row} == {not infrastructure}
    assert {one.is_errored for row in scored.values() for one in row} == {not infrastructure}


async def test_a_reward_cannot_change_what_is_stored(tmp_path):
    class Rude(RewardFunction):
        async def compute(self, *, action, step_result):
            step_result.observation.messages.clear()
            action.task_context.ground_truth = "gone"
            return 1.0

    await evaluated(tmp_path / "a")
    scored = await score(tmp_path / "a", Rude(), tmp_path / "b")
    first = read_results(tmp_path / "b")[1]["t1"][0]
    assert first.step_result.observation.messages and first.action.task_context.ground_truth == "2"
    assert scored["t1"][0].action == first.action


async def test_a_reward_sees_the_tokens_and_calls_that_were_kept(chatml_tokenizer, tmp_path):
    class Counts(RewardFunction):
        async def compute(self, *, action, step_result):
            observation = step_result.observation
            return len(observation.tokens.token_ids) + len(observation.trajectory.turns) / 10

    server = ScriptedSGLang(chatml_tokenizer, ["yes"])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    evaluator = Evaluator(
        lambda action: Environment(lambda: model, Counts()),
        keep_tokens=True,
        keep_trajectories=True,
        output_path=tmp_path / "a",
    )
    live = await evaluator.run(tasks(1))
    scored = await score(tmp_path / "a", Counts(), tmp_path / "b", config={"other": 1})
    assert scored["t0"][0].reward == live["t0"][0].reward > 1
    tokens = read_results(tmp_path / "b")[1]["t0"][0].step_result.observation.tokens
    assert tokens == live["t0"][0].step_result.observation.tokens
    (file,) = (tmp_path / "b" / "results.trajectories").iterdir()
    assert file.stem == scored["t0"][0].key


async def test_the_doctor_accuses_no_scored_folder(chatml_tokenizer, tmp_path):
    def evaluator(folder, reward_fn):
        server = ScriptedSGLang(chatml_tokenizer, [f"It is {n}." for n in range(6)])
        model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
        options = {"max_concurrency": 1, "keep_trajectories": True, "output_path": tmp_path / folder}
        return Evaluator(lambda action: Environment(lambda: model, reward_fn), 3, **options)

    numbers = iter(range(6))

    async def reward():
        return next(numbers) % 3

    await evaluator("a", Gives(reward)).run(tasks(2))
    files = {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()}
    scored = await score(tmp_path / "a", Contains(), tmp_path / "b")
    assert findings(read([tmp_path / "b"])) == []
    for sample in itertools.chain(*scored.values()):
        end = Trajectory.load(tmp_path / "b" / "results.trajectories" / f"{sample.key}.safetensors").end
        assert (end.outcome, end.reward) == ("task_complete", sample.reward)
    assert {file: file.read_bytes() for file in files} == files and findings(read([tmp_path / "a"])) == []


async def test_a_truth_that_the_reward_cannot_read_is_named_first(tmp_path):
    class Strict(Contains):
        def check_truth(self, truth):
            if truth == "2":
                raise ValueError("two is not allowed")

    await evaluated(tmp_path / "a")
    with pytest.raises(ValueError, match="task t1: two is not allowed"):
        await score(tmp_path / "a", Strict(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


async def test_a_comparison_shows_what_another_reward_changed(tmp_path):
    await evaluated(tmp_path / "a")
    await score(tmp_path / "a", Contains(), tmp_path / "b", config={"reward": "contains"})
    text = comparison_lines(compare(read_results(tmp_path / "a"), read_results(tmp_path / "b")))
    assert "better: t0 0 -> 0.5, t1 0 -> 0.5, t2 0 -> 0.5" in text and not any(
        line.startswith("worse") for line in text
    )
    assert "reward: 'none' -> 'contains'" in text


async def test_compute_reward_leaves_the_episode_unchanged():
    result = answered("4").model_copy(update={"reward_error": "old", "error": "reward function: old"})
    action = Action(message="?", task_context=TaskContext(ground_truth="4"))
    new = await compute_reward(Contains(), action, result)
    assert new.reward.reward == 1.0 and new.error is None and new.observation.metrics["reward_seconds"] >= 0
    assert result.reward_error == "old" and "reward_seconds" not in result.observation.metrics
    empty = StepResult(observation=Observation(), termination_reason=TerminationReason.TIMEOUT)
    assert (await compute_reward(Contains(), action, empty)).reward is None
