"""SkyRL's own validator, advantages and reductions on our rows: each episode counts once, each sampled token once."""

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train import evaluate as evaluation
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset.preprocess import compute_prompt_boundaries, compute_prompt_mini_batch_boundaries
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from strands_sglang import Trajectory
from strands_sglang.credit import Episode, training_rows
from strands_sglang.protocol.generation import VersionSpan
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trainers import skyrl as adapter
from strands_sglang.trainers.skyrl import evaluation_output, generator_output, make_generator
from support.agents import build_chatml_tokenizer, call
from trainers import guides, paper

REWARDS = (1.0, 0.0, 0.5, 1.0)
IDS = [TrajectoryID("u", number) for number in range(4)]


@pytest.fixture(scope="module")
def episodes(episodes):
    return [replace(episode, reward=reward) for episode, reward in zip(episodes, REWARDS, strict=True)]


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


def check(output, episodes, by_std=True):
    """Each token has the mask, logprob and advantage that it should, by SkyRL's own validator and estimator."""
    validate_generator_output(4, output, step_wise=True)
    done = trainer(grpo_norm_by_std=by_std).compute_advantages_and_returns(batch_of(output))
    columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    rows = training_rows(episodes, normalize_std=by_std)
    for row, prompt, response, mask, logprobs, advantages in zip(
        rows, *(output[name] for name in columns), done["advantages"], strict=True
    ):
        assert prompt + response == row.token_ids
        assert mask == row.loss_mask[len(prompt) :]
        assert logprobs == row.logprobs[len(prompt) :]
        found = [float(one) for one, is_trained in zip(advantages, mask, strict=False) if is_trained]
        assert found == pytest.approx([row.advantage] * row.trained, abs=1e-5)


@pytest.mark.parametrize("by_std", [True, False])
def test_the_advantage_is_over_episodes_on_every_row(episodes, by_std):
    output = generator_output(episodes, IDS)
    check(output, episodes, by_std)
    assert [one.repetition_id for one in output["trajectory_ids"]] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert output["is_last_step"] == [True, False, True, False, True, False, False, True]


def rewards_divided(output):
    counts = Counter(one.repetition_id for one in output["trajectory_ids"])
    for name, rewards in zip(output["trajectory_ids"], output["rewards"], strict=True):
        rewards[-1] /= counts[name.repetition_id]


def rows_as_episodes(output):
    output["is_last_step"] = [True] * len(output["is_last_step"])


@pytest.mark.parametrize("fault", [rewards_divided, rows_as_episodes])
def test_faults_planted_in_the_output_are_noticed(episodes, fault):
    output = generator_output(episodes, IDS)
    fault(output)
    with pytest.raises(AssertionError):
        check(output, episodes)


@pytest.mark.parametrize("fault", [paper.trained_twice, paper.shifted, paper.last_untrained])
def test_faults_planted_in_the_rows_are_noticed(episodes, monkeypatch, fault):
    monkeypatch.setattr(adapter, "training_rows", paper.planted(fault, training_rows))
    output = generator_output(episodes, IDS)
    with pytest.raises(AssertionError):
        check(output, episodes)


@pytest.mark.parametrize("name", ["skyrl:token_mean"])
def test_a_replay_computes_the_loss(reference, name):
    paper.check_replayed_loss(reference, name)


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
    ended = [asyncio.Event() for _ in range(5)]
    ended[4].set()

    async def run_episode(prompt, extras, sampling):
        assert sampling == {"temperature": 1.0}
        await ended[extras["number"] + 1].wait()  # each takes longer than the next
        ended[extras["number"]].set()
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
    assert times == sorted(times, reverse=True)


def sampled_with(episode, version):
    """The episode, sampled with one version of the weights."""
    episode = replace(episode, trajectory=type(episode.trajectory).from_bytes(episode.trajectory.to_bytes()))
    for turn in episode.trajectory.turns:
        spans = (VersionSpan(version, 0, len(turn.output_ids)),)
        turn.generation = replace(turn.generation, weight_version=version, weight_versions=spans)
    return episode


@pytest.mark.parametrize(
    ("version", "step", "limits", "left_out"),
    [
        ("default", 1, {}, 0),
        ("3", 4, {}, 0),
        ("3", 4, {"max_staleness": 0}, 0),
        ("3", 5, {"max_staleness": 1}, 0),
        ("default", 2, {}, None),
        ("default", 9, {"max_staleness": 0}, None),
        ("3", 5, {}, None),
        ("3", 6, {"max_staleness": 1}, None),
    ],
)
async def test_training_on_a_server_without_the_trainers_weights_is_refused(episodes, version, step, limits, left_out):
    """SkyRL pushes no weights to SGLang: it would train for ever on answers of the first ones."""

    async def run_episode(prompt, extras, sampling):
        return sampled_with(episodes[extras["number"]], version)

    def batch(phase):
        return {
            "prompts": ["q"] * 4,
            "env_extras": [{"number": number} for number in range(4)],
            "trajectory_ids": IDS,
            "batch_metadata": BatchMetadata(global_step=step, training_phase=phase),
        }

    generator = make_generator(run_episode, **limits)
    assert "episodes_dropped" in (await generator.generate(batch("eval")))["rollout_metrics"]
    if left_out is None:
        updates = step - 1
        with pytest.raises(ValueError, match=f"SkyRL has made {updates} updates.*weight_version='{updates}'"):
            await generator.generate(batch("train"))
    else:
        output = await generator.generate(batch("train"))
        assert output["rollout_metrics"]["episodes_left_out"] == left_out


async def test_a_group_that_fails_before_any_token_does_not_end_training():
    """SkyRL's fully async trainer asks for one prompt at a time, so a sandbox that does not start is a whole batch."""

    async def run_episode(prompt, extras, sampling):
        return Episode(Trajectory(), None, None, outcome="infrastructure_error")

    batch = {
        "prompts": ["q"] * 4,
        "trajectory_ids": IDS,
        "batch_metadata": BatchMetadata(global_step=6, training_phase="train"),
    }
    output = await make_generator(run_episode).generate(batch)
    assert sum(map(sum, output["loss_masks"])) == 0


RIGHT, WRONG, LOST = (1.0, "task_complete"), (0.0, "task_complete"), (None, "infrastructure_error")


@pytest.mark.parametrize(
    ("ends", "score", "passed"),
    [
        ({"a": [RIGHT, LOST], "b": [LOST, RIGHT]}, 1.0, 1.0),
        ({"a": [RIGHT, WRONG], "b": [LOST, LOST]}, 0.5, 1.0),
        ({"a": [WRONG, RIGHT], "b": [WRONG, LOST]}, 1 / 3, 0.5),
    ],
)
def test_skyrls_evaluation_counts_each_reward_and_nothing_else(episodes, monkeypatch, ends, score, passed):
    """Rows longer than `max_tokens` and groups of one count as well: nothing is trained."""
    monkeypatch.setattr(evaluation, "get_sampling_params_for_backend", lambda *_: {})
    left = {name: list(own) for name, own in ends.items()}

    async def run_episode(prompt, extras, sampling):
        reward, outcome = left[extras["name"]].pop(0)
        return replace(sampled_with(episodes[1], "default"), reward=reward, outcome=outcome)

    settings = SimpleNamespace(
        generator=SimpleNamespace(
            eval_sampling_params=None,
            eval_n_samples_per_prompt=2,
            inference_engine=SimpleNamespace(backend="sglang"),
        ),
        environment=SimpleNamespace(env_class="x"),
        trainer=SimpleNamespace(print_example_interval=0, dump_eval_results=False, num_logger_eval_samples=0),
    )
    prompts = [
        {"prompt": [], "env_class": None, "env_extras": {"name": name, "data_source": "d"}, "uid": name}
        for name in ends
    ]
    generator = make_generator(run_episode, max_tokens=20)
    found = asyncio.run(evaluation.evaluate_step_wise([prompts], generator, settings, 7, None))
    assert found["eval/all/avg_score"] == pytest.approx(score)
    assert found["eval/all/pass_at_2"] == pytest.approx(passed)


def test_an_evaluation_without_a_reward_is_refused(episodes):
    with pytest.raises(ValueError, match="no episode of this batch of the evaluation has a reward"):
        evaluation_output([replace(episodes[0], reward=None)], IDS[:1])


def test_an_answer_without_tokens_has_its_reward(episodes):
    empty = replace(episodes[0], trajectory=type(episodes[0].trajectory)(), reward=0.25)
    output = evaluation_output([empty, episodes[1]], IDS[:2])
    validate_generator_output(2, output, step_wise=True)
    assert [rewards[-1] for rewards in output["rewards"]] == [0.25, 0.0, 0.0]


def test_rewards_of_turns_are_refused(episodes):
    with pytest.raises(ValueError, match="SkyRL takes one reward per episode"):
        generator_output([replace(episodes[0], turn_rewards={0: 1.0})], IDS[:1])


def test_bad_episodes_are_named_counted_and_left_out(episodes, caplog):
    group, reasons = paper.group_with_bad_ones(episodes)
    output = generator_output(group, [TrajectoryID("u", number) for number in range(len(group))], **paper.LIMITS)
    validate_generator_output(len(group), output, step_wise=True)
    assert [group[one.repetition_id].id for one in output["trajectory_ids"]] == ["e0", "e2", "e2"]
    assert output["rollout_metrics"] == {"episodes_left_out": float(len(reasons)), "rows_per_episode": 1.5}
    for number, episode in enumerate(group):
        if episode.id in reasons:
            name = TrajectoryID("u", number)
            assert f"trajectory_id=<{name}> | left out of training: {reasons[episode.id]}" in caplog.text


def test_a_prompt_without_an_episode_to_train_keeps_its_place(episodes):
    """SkyRL's trainer fails if a prompt of the batch is missing; a row with a mask of 0 changes no token's weight."""
    ids = [TrajectoryID(name, number) for name in "uvw" for number in range(2)]
    failed = replace(episodes[0], reward=None)
    output = generator_output([failed, failed, *episodes[:2], failed, episodes[3]], ids)
    validate_generator_output(6, output, step_wise=True)
    uids = [one.instance_id for one in output["trajectory_ids"]]
    assert uids == ["u", "v", "v", "v", "w"] and [sum(mask) > 0 for mask in output["loss_masks"]] == [0, 1, 1, 1, 0]
    assert len(compute_prompt_mini_batch_boundaries(uids, 1, 3, True, 2)) == 3
    data = batch_of(output)
    one = trainer(loss_reduction="token_mean")
    data = one._normalize_advantages(one.compute_advantages_and_returns(data), [(0, 5)])
    rows = training_rows(episodes[:2], normalize_std=True)
    expected = [0.0, *(row.advantage / sum(each.trained for each in rows) for row in rows), 0.0]
    pairs = zip(data["advantages"], data["loss_mask"], strict=True)
    found = [float((own * mask).sum() / mask.sum().clamp(min=1)) for own, mask in pairs]
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_batch_without_an_episode_to_train_changes_nothing(episodes):
    output = generator_output([replace(one, reward=None) for one in episodes], IDS)
    validate_generator_output(4, output, step_wise=True)
    data = batch_of(output)
    one = trainer(loss_reduction="token_mean")
    data = one._normalize_advantages(one.compute_advantages_and_returns(data), [(0, 1)])
    assert data["advantages"].tolist() == [[0.0]] and output["loss_masks"] == [[0]]
    assert output["rollout_metrics"]["episodes_left_out"] == 4


def test_the_last_episode_of_a_group_is_left_out(episodes, caplog):
    failed = replace(episodes[0], reward=None)
    ids = [TrajectoryID("u", 0), TrajectoryID("u", 1), TrajectoryID("v", 0), TrajectoryID("v", 1)]
    output = generator_output([failed, *episodes[1:]], ids)
    assert [one.instance_id for one in output["trajectory_ids"]] == [*"u", *"vvvvv"]
    assert not any(output["loss_masks"][0])
    assert "the only episode of its group that can be trained" in caplog.text
    assert output["rollout_metrics"]["episodes_left_out"] == 2
    one_each = [TrajectoryID(name, 0) for name in "abcd"]  # a setting without groups
    assert len(generator_output(episodes, one_each)["response_ids"]) == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generator.step_wise_trajectories", False),
        ("generator.merge_stepwise_output", True),
        ("trainer.algorithm.advantage_estimator", "gae"),
        ("trainer.algorithm.loss_reduction", "sequence_mean"),
        ("trainer.algorithm.policy_loss_type", "gspo"),
        ("trainer.algorithm.advantage_batch_normalize", True),
        ("trainer.algorithm.use_kl_loss", True),
        ("trainer.algorithm.use_entropy_loss", True),
        ("trainer.algorithm.dynamic_sampling.type", "filter"),
        ("trainer.algorithm.off_policy_correction.tis_ratio_type", "sequence"),
        ("trainer.algorithm.off_policy_correction.sequence_mask_metric", "product"),
    ],
)
def test_settings_that_count_rows_in_another_way_are_refused(name, value):
    config = SkyRLTrainConfig()
    config.generator.step_wise_trajectories = True
    config.trainer.algorithm.use_kl_loss = False
    adapter.check_config(config)
    *parts, last = name.split(".")
    owner = config
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, last, value)
    with pytest.raises(ValueError, match=f"SkyRL's {name} is {value!r}"):
        adapter.check_config(config)


# What docs/guides/skyrl.md says, in a process of its own: SkyRL's entry point gets the generator, and its trainer turns
# what that generates into the batch of the loss. The trainer's workers need GPUs: it has none here.
FRESH = """
import asyncio, sys, typing, typing_extensions
if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
from types import SimpleNamespace
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.utils import prepare_generator_input
from transformers import AutoTokenizer
from calculator_generator import generator
from strands_sglang.trainers.skyrl import check_config
{code}
cfg = SkyRLTrainConfig()
cfg.trainer.algorithm.use_kl_loss = False
cfg.generator.step_wise_trajectories = True
cfg.generator.inference_engine.enable_ray_prometheus_stats = cfg.trainer.enable_ray_gpu_monitor = False  # need Ray
cfg.generator.n_samples_per_prompt, cfg.trainer.train_batch_size, cfg.trainer.policy_mini_batch_size = 4, 1, 1
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
own = Experiment.get_generator(None, cfg, tokenizer, None)
trainer = Experiment.get_trainer(None, cfg, None, tokenizer, None, None, None, own, None)
trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
prompt = {{"prompt": [{{"role": "user", "content": "What is 6 * 7?"}}], "env_class": None, "uid": "u"}}
prompt["env_extras"] = {{"answer": "42"}}
given, uids = prepare_generator_input([prompt], 4, {{"temperature": 1.0}}, "x", "train", 1)
output = asyncio.run(trainer.generate(given))
output, uids = trainer.postprocess_generator_output(output, [one.instance_id for one in output["trajectory_ids"]])
batch = trainer.convert_to_training_input(output, uids)
batch["values"] = None  # what the workers add, without a critic
batch = trainer.compute_advantages_and_returns(batch)
rows = zip(batch["advantages"], batch["loss_mask"].bool())
print("advantages", *sorted(round(float(own[mask][0]), 3) for own, mask in rows))
print("reward", trainer.all_metrics["reward/avg_raw_reward"])
"""


def test_skyrls_entry_point_and_trainer_make_the_batch_of_the_guide(tmp_path):
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    answers = [call("calculator", expression="6 * 7")] * 4 + ["It is \\boxed{42}.", "It is \\boxed{41}."] * 2
    program = FRESH.format(code=guides.code_of("skyrl/calculator_generator.py"))
    with ScriptedSGLang(tokenizer, answers).serve() as base_url:
        variables = {"MODEL": str(tmp_path), "SGLANG_URL": base_url}
        output = guides.run_code(program, tmp_path, path=["examples/skyrl"], **variables)
    assert "advantages -0.866 -0.866 0.866 0.866" in output and "reward 0.5" in output, output
