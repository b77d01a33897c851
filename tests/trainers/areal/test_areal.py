"""AReaL's own checks, advantages and loss on our rows have the gradient on paper, and planted faults change it."""

import asyncio
import itertools
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from areal.api.cli_args import GenerationHyperparameters, NormConfig, PPOActorConfig, RejectionSamplingConfig
from areal.api.workflow_api import RolloutWorkflow
from areal.engine.sglang_remote import SGLangBackend
from areal.infra.workflow_executor import check_trajectory_format
from areal.trainer.ppo.actor import PPOActor, grpo_loss_fn
from areal.utils import stats_tracker
from areal.utils.data import Normalization
from transformers import Qwen3ForCausalLM

from strands_sglang import TerminationReason
from strands_sglang.credit import training_rows
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trainers import areal as adapter, records
from support.agents import build_chatml_tokenizer
from trainers import guides, paper

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def expected(reference, episodes):
    return paper.gradient(reference, training_rows(episodes), "token_mean")


@pytest.fixture
def log(caplog):
    """The log of what is left out: AReaL sets up the root's handlers again."""
    records.logger.addHandler(caplog.handler)
    yield caplog
    records.logger.removeHandler(caplog.handler)


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
        ({"importance_sampling_level": "sequence"}, "set actor.importance_sampling_level='token'"),
        ({"m2_threshold": 0.04}, "leave actor.m2_threshold out"),
        ({"use_sapo_loss": True, "log_agent_stats": True}, "leave actor.use_sapo_loss out.*actor.log_agent_stats out"),
        ({"rejection_sampling": RejectionSamplingConfig()}, "leave actor.rejection_sampling out"),
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
    batch = batch_of(sampled_by("4", "3", "3", "odd"))  # the engine's version
    assert sorted(set(batch["versions"].flatten().tolist())) == [-1, 3, 4, 5]


def test_a_push_names_no_version_so_tokens_have_the_engines(reference):
    meta = SimpleNamespace(use_lora=False, nccl_group_name="g", path="p")
    pushes = [
        SGLangBackend().build_distributed_weight_update_requests(meta, []),
        SGLangBackend().build_disk_weight_update_requests(meta),
    ]
    payloads = [request.payload for push in pushes for request in push.requests]
    assert payloads and not any("weight_version" in payload for payload in payloads)
    made = [paper.sampled_by(episode, "default") for episode in paper.episodes(reference)]
    direct = adapter.to_batch(training_rows(made), 5)
    batch = batch_of(made, max_staleness=1)
    for one in (direct, batch):
        assert sorted(set(one["versions"].flatten().tolist())) == [-1, 5]
        assert len(one["input_ids"]) == 8


# What docs/guides/areal.md says, in a process of its own: the settings are checked, AReaL's engine for a server that
# runs imports the workflow by its name, and the actor computes advantages from the batch.
FRESH = """
import asyncio, os, sys
from urllib.parse import urlsplit
from areal.api.cli_args import GRPOConfig, InferenceEngineConfig, PPOActorConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from strands_sglang.trainers.areal import check_config
from types import SimpleNamespace

WORKFLOW = "calculator_workflow.calculator"
names = {"experiment_name": "e", "trial_name": "t"}
actor = PPOActorConfig(**names, kl_ctl=0.0, use_decoupled_loss=False)
config = SimpleNamespace(actor=actor, gconfig=SimpleNamespace(n_samples=1))
check_config(config)
rollout = InferenceEngineConfig(**names, backend="sglang:d1", consumer_batch_size=2, max_head_offpolicyness=9)
engine = RemoteSGLangEngine(rollout)
engine.initialize(addr=urlsplit(os.environ["SGLANG_URL"]).netloc, train_data_parallel_size=1)
try:
    tasks = [{"question": f"What is 6 * {number}?", "answer": str(6 * number)} for number in (7, 8)]
    batch = engine.rollout_batch(tasks, workflow=WORKFLOW)
    for data in PPOActor(actor, engine=None).compute_advantages(batch):
        trained = data["loss_mask"].bool()
        print("advantages", sorted(round(float(own[mask][0]), 3) for own, mask in zip(data["advantages"], trained)))
    print("training", stats_tracker.get("rollout").export()["rollout/reward"])
    engine.submit({"question": "What is 6 * 9?", "answer": "54"}, WORKFLOW, is_eval=True)
    engine.wait(1, timeout=60)
    print("evaluation", stats_tracker.get("eval-rollout").export()["eval-rollout/reward"])
finally:
    engine.destroy()
"""


def test_areal_runs_the_guides_workflow_by_its_name(tmp_path):
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    numbers = itertools.count()

    def answer(request):
        factor = int(re.search(r"What is 6 \* (\d)", request.text)[1])
        is_right = factor == 9 or next(numbers) % 4 == 0  # in the evaluation all are right: nothing to train
        return f"It is \\boxed{{{6 * factor if is_right else 0}}}."

    with ScriptedSGLang(tokenizer, answer).serve() as base_url:
        variables = {"MODEL": str(tmp_path), "SGLANG_URL": base_url}
        printed = guides.run_code(FRESH, path=["examples/areal"], **variables)
    lines = [line.split(maxsplit=1) for line in printed.splitlines()]
    found = {
        name: [float(number) for number in rest.strip("[]").split(",")] for name, rest in lines if name in EXPECTED
    }
    assert found["training"] == [0.25] and found["evaluation"] == [1.0]
    assert len(found["advantages"]) == 8 and found["advantages"][0] < 0 < found["advantages"][-1]


EXPECTED = ("advantages", "training", "evaluation")
