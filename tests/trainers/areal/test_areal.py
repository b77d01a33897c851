"""AReaL's own checks, advantages and loss on our rows have the gradient on paper, and planted faults change it."""

import asyncio
import logging
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from areal.api.cli_args import GenerationHyperparameters, NormConfig, PPOActorConfig
from areal.api.workflow_api import RolloutWorkflow
from areal.infra.workflow_executor import check_trajectory_format
from areal.trainer.ppo.actor import PPOActor, grpo_loss_fn
from areal.utils import stats_tracker
from areal.utils.data import Normalization
from transformers import Qwen3ForCausalLM

from strands_sglang import TerminationReason
from strands_sglang.credit import training_rows
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trainers import areal as adapter
from support.agents import build_chatml_tokenizer, call
from trainers import paper

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def expected(reference, episodes):
    return paper.gradient(reference, training_rows(episodes), "token_mean")


@pytest.fixture
def log(caplog):
    """The adapter's log: AReaL sets up the root's handlers again."""
    adapter.logger.addHandler(caplog.handler)
    yield caplog
    adapter.logger.removeHandler(caplog.handler)


def config(**actor):
    settings = {"kl_ctl": 0.0, "use_decoupled_loss": False, "eps_clip": paper.CLIP, **actor}
    return SimpleNamespace(
        actor=PPOActorConfig(experiment_name="e", trial_name="t", **settings),
        gconfig=GenerationHyperparameters(n_samples=1),
    )


def workflow_of(episodes, **credit):
    """Our workflow, which runs these episodes."""
    left = iter(episodes)

    @adapter.workflow(group_size=len(episodes), **credit)
    async def run_episode(engine, data):
        return next(left)

    return run_episode


def batch_of(episodes, **credit):
    return asyncio.run(workflow_of(episodes, **credit).arun_episode(SimpleNamespace(get_version=lambda: 5), {}))


def advantages_of(batch):
    """AReaL's own advantages."""
    one = config()
    adapter.check_config(one)
    (data,) = PPOActor(one.actor, engine=None).compute_advantages([batch])
    return data


def gradient_of(folder, batch):
    """The gradient of AReaL's own loss, in float32."""
    data = advantages_of(batch)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = []
    for ids in data["input_ids"]:
        own = paper.logprobs_of(model, ids.tolist())
        logprobs.append(torch.roll(own, -1))  # AReaL keeps a token's logprob at the position before it
    logprobs = torch.stack(logprobs)
    loss = grpo_loss_fn(
        logprobs,
        torch.zeros_like(logprobs),
        data,
        eps_clip=paper.CLIP,
        eps_clip_higher=None,
        c_clip=None,
        current_version=0,
    )
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_areal_has_the_gradient_on_paper(folder, episodes, expected):
    assert paper.relative_error(gradient_of(folder, batch_of(episodes)), expected) < TOLERANCE


def test_areal_has_the_gradient_on_paper_off_policy(folder, reference):
    episodes = paper.episodes(reference, noise=0.25)
    expected = paper.gradient(reference, training_rows(episodes), "token_mean")
    assert paper.relative_error(gradient_of(folder, batch_of(episodes)), expected) < TOLERANCE


@pytest.mark.parametrize("fault", paper.FAULTS)
def test_planted_faults_change_the_gradient(folder, episodes, expected, monkeypatch, fault):
    monkeypatch.setattr(adapter, "training_rows", paper.planted(fault, adapter.training_rows))
    assert paper.relative_error(gradient_of(folder, batch_of(episodes)), expected) > 100 * TOLERANCE


def test_the_batch_passes_areals_check(episodes, caplog):
    batch = batch_of(episodes)
    assert isinstance(workflow_of(episodes), RolloutWorkflow)
    with caplog.at_level(logging.WARNING):
        assert check_trajectory_format(batch, batch_size=8, expected_keys=set(batch), logger=logging.getLogger())
    assert not caplog.records  # a column of another shape is only a warning
    rows = training_rows(episodes)
    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
        assert ids[mask].tolist() == row.token_ids[: int(mask.sum())]
    assert int(batch["loss_mask"].sum()) == sum(row.trained for row in rows)
    assert batch["rewards"].tolist() == pytest.approx([row.advantage for row in rows], rel=1e-6)


def test_a_row_that_ends_untrained_would_lose_its_advantage(episodes):
    """What the adapter protects from: AReaL places the reward before a row's last token."""
    batch = batch_of(episodes)
    length = int(batch["attention_mask"][0].sum())
    batch["loss_mask"][0, length - 1] = 0
    assert not (advantages_of(batch)["advantages"] * batch["loss_mask"])[0].any()


def test_areals_groups_are_slices_of_rows():
    """What `check_config` protects from: rewards 1 0 | 1 0, and the first episode has a second row."""
    slices = Normalization(NormConfig(mean_level="group", std_level="group", group_size=2))
    assert slices(torch.tensor([1.0, 0.0, 1.0, 0.0])).tolist() == pytest.approx(
        [0.707, -0.707, 0.707, -0.707], abs=1e-3
    )
    assert slices(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])).tolist() == pytest.approx([0, 0, -0.707, 0.707, 0], abs=1e-3)
    assert slices(torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0]))[-1] > 1e4  # a row that no slice covers
    rows = Normalization(NormConfig(mean_level="batch", std_level=None))
    assert rows(torch.tensor([1.0, 1.0, 0.0]))[2] == pytest.approx(-2 / 3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"reward_norm": NormConfig(mean_level="group", group_size=4)}, "set actor.reward_norm=None .AReaL's normal"),
        ({"adv_norm": NormConfig()}, "set actor.adv_norm=None"),
        ({"reward_scaling": 0.5, "reward_bias": -0.5}, "set actor.reward_scaling=1.0.*; set actor.reward_bias=0.0"),
        ({"kl_ctl": 0.1}, "set actor.kl_ctl=0.0"),
        ({"gae_lambda": 0.9, "discount": 0.9}, "set actor.discount=1.0.*; set actor.gae_lambda=1.0"),
        ({"mask_no_eos_with_zero": True}, "set actor.mask_no_eos_with_zero=False"),
        ({"overlong_reward_penalty": True}, "set actor.overlong_reward_penalty=False"),
    ],
)
def test_settings_that_change_the_advantages_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        adapter.check_config(config(**setting))


def test_groups_are_the_workflows():
    several = config()
    several.gconfig.n_samples = 4
    with pytest.raises(ValueError, match="set gconfig.n_samples=1"):
        adapter.check_config(several)


def test_what_areal_cannot_train_is_left_out(episodes, log):
    first, second, *others = episodes
    failed = replace(second, outcome=TerminationReason.INFRASTRUCTURE_ERROR)
    batch = batch_of([first, failed, *others])
    assert len(batch["input_ids"]) == 6
    assert "the outcome infrastructure_error has no reward" in log.text
    assert len(batch_of([first, second, *others], max_tokens=74)["input_ids"]) == 6
    assert "longer than max_tokens=74" in log.text
    assert batch_of([first, failed]) is None  # a group of one
    assert batch_of([replace(one, reward=1.0) for one in (first, second)]) is None  # without variance
    with pytest.raises(ValueError, match="this trainer takes one per row"):
        batch_of([replace(first, turn_rewards={0: 1.0}), second])


def test_bad_episodes_are_named_counted_and_left_out(folder, reference, episodes, log):
    group, reasons = paper.group_with_bad_ones(episodes)
    rows = training_rows(group, version=paper.NEWEST, **paper.LIMITS)
    workflow, engine = workflow_of(group, **paper.LIMITS), SimpleNamespace(get_version=lambda: paper.NEWEST)
    stats_tracker.get("rollout").export()
    batch = asyncio.run(workflow.arun_episode(engine, {}))
    assert {row.episode for row in rows} == {one.id for one in group} - reasons.keys()
    assert stats_tracker.get("rollout").export()["rollout/episodes_left_out"] == len(reasons)
    assert all(f"episode=<{name}> | left out of training: {reason}" in log.text for name, reason in reasons.items())
    expected = paper.gradient(reference, rows, "token_mean")
    assert paper.relative_error(gradient_of(folder, batch), expected) < TOLERANCE


def test_versions_are_integers_and_stale_episodes_left_out(reference):
    def sampled_by(*versions):
        made = zip(paper.episodes(reference), versions, strict=True)
        return [paper.sampled_by(episode, version) for episode, version in made]

    batch = batch_of(sampled_by("3", "4", "5", "5"), max_staleness=1)
    assert len(batch["input_ids"]) == 7
    assert len(batch_of(sampled_by("3", "4", "5", "5"), max_staleness=None)["input_ids"]) == 8
    assert sorted(set(batch["versions"].flatten().tolist())) == [-1, 4, 5]
    assert (batch["versions"] >= 0).equal(batch["loss_mask"].bool())
    batch = batch_of(sampled_by("default", "3", "3", "odd"))  # SGLang's name before any update; the engine's version
    assert sorted(set(batch["versions"].flatten().tolist())) == [-1, 0, 3, 5]


def test_the_example_is_a_workflow(tmp_path, monkeypatch):
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    answers = [call("calculator", expression="6 * 7")] * 8 + ["It is \\boxed{42}.", "It is \\boxed{41}."] * 4
    with ScriptedSGLang(tokenizer, answers).serve() as base_url:
        monkeypatch.setenv("MODEL", str(tmp_path))
        monkeypatch.setenv("SGLANG_URL", base_url)
        example = runpy.run_path(str(Path(__file__).parents[3] / "examples/areal/calculator_workflow.py"))
        task = {"question": "What is 6 * 7?", "answer": "42"}
        batch = asyncio.run(example["calculator"].arun_episode(SimpleNamespace(get_version=lambda: 0), task))
    assert isinstance(example["calculator"], RolloutWorkflow)
    assert sorted(batch["rewards"].tolist()) == pytest.approx([-0.935] * 4 + [0.935] * 4, abs=1e-3)
