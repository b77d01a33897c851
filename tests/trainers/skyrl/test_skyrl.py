"""SkyRL's own validator, advantages and reductions on our rows: each episode counts once, each sampled token once."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.dataset.preprocess import compute_prompt_boundaries
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from strands_sglang import TerminationReason
from strands_sglang.credit import training_rows
from strands_sglang.trainers.skyrl import generator_output, make_generator
from trainers import paper

REWARDS = (1.0, 0.0, 0.5, 1.0)
IDS = [TrajectoryID("u", number) for number in range(4)]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    made = paper.episodes(paper.tiny_model(tmp_path_factory.mktemp("model")))
    return [replace(episode, reward=reward) for episode, reward in zip(made, REWARDS, strict=True)]


def trainer(**algorithm):
    """SkyRL's trainer without its workers: its constructor starts a Ray cluster."""
    settings = {
        "advantage_estimator": "grpo",
        "gamma": 1.0,
        "lambd": 1.0,
        "grpo_norm_by_std": True,
        "advantage_batch_normalize": False,
        "max_seq_len": paper.CONSTANT,
        **algorithm,
    }
    one = object.__new__(RayPPOTrainer)
    one.cfg = SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=True),
        trainer=SimpleNamespace(algorithm=SimpleNamespace(**settings), micro_train_batch_size_per_gpu=1),
    )
    one.all_metrics = {}
    return one


def batch_of(output):
    """The rows padded to one width, as SkyRL's trainer has them."""
    width = max(map(len, output["response_ids"]))
    pad = lambda columns: torch.tensor([[*one, *[0] * (width - len(one))] for one in columns])  # noqa: E731
    data = TrainingInputBatch(
        {
            "rewards": pad(output["rewards"]),
            "response_mask": pad([[1] * len(ids) for ids in output["response_ids"]]),
            "loss_mask": pad(output["loss_masks"]),
            "values": None,
        }
    )
    data.metadata = {
        "uids": [one.instance_id for one in output["trajectory_ids"]],
        "is_last_step": output["is_last_step"],
        "avg_response_length": 1.0,
    }
    return data


def test_the_rows_are_valid_and_whole(episodes):
    output = generator_output(episodes, IDS)
    validate_generator_output(4, output, step_wise=True)
    rows = training_rows(episodes)
    pairs = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    assert [prompt + response for prompt, response in pairs] == [row.token_ids for row in rows]
    assert sum(map(sum, output["loss_masks"])) == sum(row.trained for row in rows)
    assert [one.repetition_id for one in output["trajectory_ids"]] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert output["is_last_step"] == [True, False, True, False, True, False, False, True]


@pytest.mark.parametrize("by_std", [True, False])
def test_the_advantage_is_over_episodes_on_every_row(episodes, by_std):
    output = generator_output(episodes, IDS)
    done = trainer(grpo_norm_by_std=by_std).compute_advantages_and_returns(batch_of(output))
    for row, mask, advantages in zip(
        training_rows(episodes, normalize_std=by_std), output["loss_masks"], done["advantages"], strict=True
    ):
        found = [float(one) for one, is_trained in zip(advantages, mask, strict=False) if is_trained]
        assert found == pytest.approx([row.advantage] * row.trained, abs=1e-5)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_weights_make_skyrls_loss_the_wanted_one(episodes, reduction):
    output, rows = generator_output(episodes, IDS), training_rows(episodes)
    data = batch_of(output)
    one = trainer(loss_reduction=reduction)
    data = one.compute_advantages_and_returns(data)
    data["advantages"] = torch.ones_like(data["advantages"])
    boundaries = compute_prompt_boundaries(data.metadata["uids"])
    normalized = one._normalize_advantages(data, [(0, len(rows))], boundaries)["advantages"].double()
    for normalizer in paper.NORMALIZERS:
        weights = rows.weights(normalizer, f"skyrl:{reduction}", constant=paper.CONSTANT, max_length=paper.CONSTANT)
        divisors = {"token_mean": sum(row.trained for row in rows) / 4, "constant": paper.CONSTANT}
        for row, own, weight in zip(rows, normalized, weights, strict=True):
            expected = 1 / (4 * divisors.get(normalizer, row.episode_trained))
            assert float(own[0]) * weight == pytest.approx(expected, rel=1e-5)


async def test_the_generator_runs_the_batch(episodes):
    async def run_episode(prompt, extras, sampling):
        assert sampling == {"temperature": 1.0}
        return episodes[extras["number"]]

    generator = make_generator(run_episode, max_tokens=1000)
    output = await generator.generate(
        {
            "prompts": ["q"] * 4,
            "env_extras": [{"number": number} for number in range(4)],
            "sampling_params": {"temperature": 1.0},
            "trajectory_ids": IDS,
        }
    )
    validate_generator_output(4, output, step_wise=True)
    assert output["rollout_metrics"] == {"episodes_left_out": 0.0, "rows_per_episode": 2.0}
    times = output["trajectory_generation_times"]  # one for each row
    assert len(times) == 8 and len(set(times)) == 4


def test_what_skyrl_cannot_train_is_left_out(episodes, caplog):
    failed = replace(episodes[1], outcome=TerminationReason.INFRASTRUCTURE_ERROR)
    output = generator_output([episodes[0], failed, *episodes[2:]], IDS)
    assert {one.repetition_id for one in output["trajectory_ids"]} == {0, 2, 3}
    assert "the outcome infrastructure_error has no reward" in caplog.text
    with pytest.raises(ValueError, match="no episode of the batch can be trained"):
        generator_output([failed], IDS[:1])
    with pytest.raises(ValueError, match="SkyRL takes one reward per episode"):
        generator_output([replace(episodes[0], turn_rewards={0: 1.0})], IDS[:1])
