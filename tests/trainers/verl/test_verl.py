"""verl's own post-processing, advantages and loss on our rows: each episode counts once, each sampled token once."""

import asyncio
import contextlib
import itertools
import json
import re
import runpy
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import verl
import verl.trainer.ppo.v1.agent_loop_tq as agent_loop_tq
from omegaconf import OmegaConf
from strands.types.exceptions import MaxTokensReachedException
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, _agent_loop_registry
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss, compute_grpo_outcome_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.rollout.replica import TokenOutput

from strands_sglang.credit import Episode, TrainingRows, training_rows
from strands_sglang.protocol.generation import VersionSpan
from strands_sglang.templates.image_tokens import ImageInputs
from strands_sglang.trainers import verl as adapter
from strands_sglang.trainers.verl import agent_loop, agent_loop_outputs
from support.agents import build_chatml_tokenizer, call, make_agent
from trainers import guides, paper

ROOT = Path(__file__).parents[3]
REWARDS = (1.0, 0.0, 0.5, 1.0)


@pytest.fixture(scope="module")
def episodes(episodes):
    return [replace(episode, reward=reward) for episode, reward in zip(episodes, REWARDS, strict=True)]


@pytest.fixture
def kept(monkeypatch):
    """What verl's worker puts into its queue: fields by key, and the status of each prompt."""
    fields_by_key = {}

    async def put_batch(keys, fields, tags, partition_id):
        fields_by_key.update(zip(keys, fields, strict=True))

    async def put(key, partition_id, tag):
        fields_by_key[key] = tag["status"]

    monkeypatch.setattr(agent_loop_tq, "tq", SimpleNamespace(async_kv_batch_put=put_batch, async_kv_put=put))
    return fields_by_key


@pytest.fixture
def worker():
    """verl's worker for TransferQueue, without servers."""
    actor = agent_loop_tq.AgentLoopWorkerTQ
    worker_class = actor.__ray_metadata__.modified_class if hasattr(actor, "__ray_metadata__") else actor
    worker = object.__new__(worker_class)  # its constructor connects to servers
    worker.reward_loop_worker_handles = worker.teacher_key = worker.processor = None
    worker.distillation_enabled = worker.stream_teacher_with_rollout = False
    return worker


@pytest.fixture
def processed(worker, kept):
    """Runs each episode's outputs through verl's worker; returns fields by key."""

    def run(outputs_by_session):
        for session, outputs in enumerate(outputs_by_session):
            fields = {"uid": "u", "session_id": session, "global_steps": 1}
            asyncio.run(worker._agent_loop_postprocess(outputs, False, **fields))
        return kept

    return run


def batch_of(kept):
    """The rows padded to one width, as verl's trainer has them."""
    width = max(len(field["response_mask"]) for field in kept.values())
    pad = lambda column: torch.nn.functional.pad(column, (0, width - len(column)))  # noqa: E731
    tensors = {
        "response_mask": torch.stack([pad(field["response_mask"]) for field in kept.values()]),
        "token_level_rewards": torch.stack([pad(field["rm_scores"]) for field in kept.values()]),
    }
    uids = np.array(["u"] * len(kept), dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def check(kept, episodes, by_std=True):
    """Each token has the mask, logprob and advantage that it should, by verl's own post-processing and estimator."""
    done = compute_advantage_for_multi_trajectories(
        batch_of(kept), list(kept), AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=by_std
    )
    expected = training_rows(episodes, normalize_std=by_std)
    assert len(expected) == len(kept) == 8
    for row, field, advantages in zip(expected, kept.values(), done.batch["advantages"], strict=True):
        first = row.loss_mask.index(1)
        assert field["input_ids"].tolist() == row.token_ids
        assert field["response_mask"].tolist() == row.loss_mask[first:]
        assert field["rollout_log_probs"].tolist() == pytest.approx(row.logprobs[first:], rel=1e-6)
        found = (advantages[: len(row) - first] * field["response_mask"]).tolist()
        assert found == pytest.approx(row.advantages[first:], abs=1e-5)


@pytest.mark.parametrize("by_std", [True, False])
def test_the_advantage_is_over_episodes_on_every_row(episodes, processed, by_std):
    check(processed([agent_loop_outputs(episode) for episode in episodes]), episodes, by_std)


def rewards_divided(outputs):
    for own in outputs:
        own[-1].reward_score /= len(own)
    return outputs


def rows_as_episodes(outputs):
    return [
        [one.model_copy(update={"reward_score": own[-1].reward_score, "extra_fields": own[-1].extra_fields})]
        for own in outputs
        for one in own
    ]


@pytest.mark.parametrize("fault", [rewards_divided, rows_as_episodes])
def test_faults_planted_in_the_outputs_are_noticed(episodes, processed, fault):
    with pytest.raises(AssertionError):
        check(processed(fault([agent_loop_outputs(episode) for episode in episodes])), episodes)


@pytest.mark.parametrize("fault", [paper.trained_twice, paper.shifted, paper.last_untrained])
def test_faults_planted_in_the_rows_are_noticed(episodes, processed, monkeypatch, fault):
    faulty = fault(training_rows(episodes))

    def planted(batch, **options):
        made = training_rows(batch, **options)
        own = [row for row in faulty if row.episode == batch[0].id]
        return TrainingRows(own, made.left_out, made.flat_groups, made.advantages, made.rewards)

    monkeypatch.setattr(adapter, "training_rows", planted)
    with pytest.raises(AssertionError):
        check(processed([agent_loop_outputs(episode) for episode in episodes]), episodes)


@pytest.mark.parametrize("name", ["verl:token-mean", "slime", "slime:per_token"])
def test_a_replay_computes_the_loss(reference, name):
    paper.check_replayed_loss(reference, name)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_weights_make_verls_loss_the_wanted_one(episodes, processed, mode):
    mask = batch_of(processed([agent_loop_outputs(episode) for episode in episodes])).batch["response_mask"]
    rows = training_rows(episodes)
    for normalizer in paper.NORMALIZERS:
        losses = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
        weights = torch.tensor(rows.weights(normalizer, f"verl:{mode}", constant=paper.CONSTANT), dtype=torch.float64)
        agg_loss(losses * weights[:, None], mask, mode).backward()
        divisors = {
            "episode_mean": [row.episode_trained for row in rows],
            "token_mean": [sum(row.trained for row in rows) / len(episodes)] * len(rows),
            "constant": [paper.CONSTANT] * len(rows),
        }
        expected = mask / (len(episodes) * torch.tensor(divisors[normalizer], dtype=torch.float64))[:, None]
        assert torch.allclose(losses.grad, expected, rtol=1e-6, atol=0)


def test_a_last_row_without_trained_tokens_would_lose_the_episode(episodes, processed):
    """What the adapter protects from: verl gives such an episode no advantage at all."""
    outputs = [agent_loop_outputs(episode) for episode in episodes]
    outputs[1][-1].response_mask = [0] * len(outputs[1][-1].response_mask)
    kept = processed(outputs)
    done = compute_advantage_for_multi_trajectories(batch_of(kept), list(kept), AdvantageEstimator.GRPO)
    assert not done.batch["advantages"][1].any()
    for episode in episodes:
        assert sum(agent_loop_outputs(episode)[-1].response_mask) > 0


def test_bad_episodes_are_named_and_left_out(episodes, caplog):
    group, reasons = paper.group_with_bad_ones(episodes)
    limits = {"prompt_length": 49, "max_staleness": paper.LIMITS["max_staleness"]}
    assert [one.id for one in group if agent_loop_outputs(one, **limits)] == ["e0", "e2"]
    reasons["e1"] = "a row's prompt has 50 tokens, and rollout.prompt_length is 49"
    for name, reason in reasons.items():
        assert f"episode=<{name}> | left out of training: {reason}" in caplog.text


def test_rows_longer_than_verls_limits_are_left_out(episodes, caplog):
    first = episodes[0]
    assert agent_loop_outputs(first, response_length=25) == []
    assert "a row's response has 26 tokens, and rollout.response_length is 25" in caplog.text
    assert agent_loop_outputs(first, prompt_length=29) == []
    assert len(agent_loop_outputs(first, prompt_length=30, response_length=26)) == 1


def test_rewards_of_turns_are_refused(episodes):
    with pytest.raises(ValueError, match="verl takes one reward per episode"):
        agent_loop_outputs(replace(episodes[0], turn_rewards={0: 1.0}))


def test_images_are_refused(episodes):
    seen = paper.with_turns(episodes[0])
    seen.trajectory.turns[0].images = ImageInputs((), array("i"), {"pixel_values": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match="has images, but verl's output has token ids only"):
        agent_loop_outputs(seen)


@pytest.mark.parametrize("outcome", [None, "task_complete", "max_tokens_reached"])
def test_an_episode_without_reward_is_scored_by_verl_on_demand(episodes, outcome):
    unscored = replace(episodes[1], reward=None, outcome=outcome)
    assert agent_loop_outputs(unscored) == []
    outputs = agent_loop_outputs(unscored, scored_by_verl=True)
    assert [output.reward_score for output in outputs] == [None, None]


@pytest.mark.parametrize("outcome", ["timeout", "infrastructure_error", "aborted"])
def test_verl_does_not_score_what_did_not_end(episodes, outcome):
    unscored = replace(episodes[1], reward=None, outcome=outcome)
    assert agent_loop_outputs(unscored, scored_by_verl=True) == []


class ServerManager:
    """Generates as verl's `LLMServerClient` does: one answer for each call."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **fields):
        self.calls.append((request_id, prompt_ids, sampling_params))
        ids, stop_reason, steps = self.answers.pop(0)
        extra = {"global_steps": steps, "min_global_steps": steps, "max_global_steps": steps}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason=stop_reason, extra_fields=extra)


async def test_an_agent_runs_on_verls_servers():
    tokenizer = build_chatml_tokenizer()
    end = tokenizer.eos_token_id
    first, second = ([*tokenizer.encode(text), end] for text in ("It is 4.", "Yes."))

    @agent_loop("talker")
    async def talker(model, fields):
        agent = make_agent(model)
        await agent.invoke_async(fields["question"])
        await agent.invoke_async("Sure?")
        return Episode(model.trajectory, 1.0, "g")

    assert _agent_loop_registry["talker"]["_target_"] == f"{__name__}.talker"
    manager = ServerManager((first, "completed", 3), (second, "stop", 4))
    rollout = SimpleNamespace(prompt_length=1000, response_length=1000)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    loop = object.__new__(talker)  # its constructor builds a chat template of verl's own
    loop.server_manager, loop.tokenizer, loop.config = manager, tokenizer, config
    (output,) = await loop.run({"temperature": 1.0, "logprobs": True}, question="What is 2 + 2?")
    ids = [*output.prompt_ids, *output.response_ids]
    (key, prompt, sampling), (other_key, longer, _) = manager.calls
    assert prompt == output.prompt_ids and longer == ids[: len(longer)] and key == other_key
    assert sampling["temperature"] == 1.0 and sampling["logprobs"] is True
    assert sum(output.response_mask) == len(first) + len(second)
    assert output.extra_fields == {"min_global_steps": 3, "max_global_steps": 4, "reward_extra_info": {}}
    assert output.reward_score == 1.0


def test_estimators_other_than_grpo_count_rows(episodes, processed):
    """Why the guide says `grpo`: RLOO's baseline is over the rows of the batch."""
    kept = processed([agent_loop_outputs(episode) for episode in episodes])
    done = compute_advantage_for_multi_trajectories(batch_of(kept), list(kept), AdvantageEstimator.RLOO)
    rewards = [episodes[int(key.split("_")[1])].reward for key in kept]
    expected = [len(kept) / (len(kept) - 1) * (reward - sum(rewards) / len(kept)) for reward in rewards]
    found = [float(one[0]) for one in done.batch["advantages"]]
    assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(AssertionError):
        compute_advantage_for_multi_trajectories(batch_of(kept), list(kept), AdvantageEstimator.GRPO_PASSK)


def test_a_group_of_one_would_have_its_reward_as_advantage(episodes, processed):
    """What the agent loop protects from: verl trains an episode whose siblings are left out with a baseline of 0."""
    kept = processed([agent_loop_outputs(replace(episodes[1], reward=0.5))])
    data = batch_of(kept)
    done = compute_advantage_for_multi_trajectories(data, list(kept), AdvantageEstimator.GRPO)
    found = done.batch["advantages"][data.batch["response_mask"].bool()].tolist()
    assert found == pytest.approx([0.5] * 46, abs=1e-5)


@pytest.mark.parametrize(
    ("failed", "trained"), [((0,), [1, 2]), ((0, 2), []), ((1, 2), []), ((0, 1, 2), []), ((), [0, 1, 2])]
)
@pytest.mark.parametrize("validate", [False, True])
def test_the_last_episode_of_a_group_is_left_out(worker, kept, episodes, caplog, failed, trained, validate):
    """verl's own worker runs the group, whose first episode ends last. Validation counts every answer."""
    started = itertools.count()
    order = asyncio.Event()

    @agent_loop("grouped")
    async def grouped(model, fields):
        number = next(started)
        if number == 0:  # the first ends last
            await order.wait()
        elif number == 2:
            order.set()
        assert number == fields["session_id"]
        return replace(episodes[number], outcome="infrastructure_error" if number in failed else None)

    configure(worker, n=3, val_kwargs={"n": 3})
    place("grouped", grouped)
    prompt = {"uid": "u", "agent_name": "grouped", "global_steps": 1, "index": 0}
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": validate}
    asyncio.run(worker._run_prompt(prompt, {"temperature": 1.0}, trajectory))
    is_lost = len(failed) == 3 and not validate
    assert kept.pop("u") == ("failure" if is_lost else "finished")
    assert ("no episode of prompt 'u' can be trained" in caplog.text) == is_lost
    if validate:
        trained = sorted({0, 1, 2} - set(failed))
    assert sorted({int(key.split("_")[1]) for key in kept}) == trained
    withheld = len(failed) == 2 and not validate
    assert ("the only episode of its group that can be trained" in caplog.text) == withheld


@pytest.mark.parametrize("limit", [1000, 30])
def test_validation_counts_every_episode_with_a_reward(worker, kept, episodes, limit):
    """Two of these have rows that are longer than 30 tokens: without them, the mean would be that of the others."""
    numbers = itertools.count()

    @agent_loop("validated")
    async def validated(model, fields):
        number = next(numbers)
        return replace(episodes[number], reward=float(number == 0))

    configure(worker, n=4, val_kwargs={"n": 4}, response_length=limit)
    place("validated", validated)
    prompt = {"uid": "u", "agent_name": "validated", "global_steps": 1, "index": 0}
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": True}
    asyncio.run(worker._run_prompt(prompt, {"temperature": 1.0}, trajectory))
    kept.pop("u")
    scores = {key.rpartition("_")[0]: float(fields["rm_scores"].sum()) for key, fields in kept.items()}
    assert sorted(scores.values()) == [0.0, 0.0, 0.0, 1.0]


def configure(worker, **rollout):
    """Give one of verl's workers what its constructor would: settings and a tokenizer, but no servers."""
    settings = OmegaConf.create({"prompt_length": 1000, "response_length": 1000, **rollout})
    worker.config = OmegaConf.create({"actor_rollout_ref": {"rollout": settings}, "data": {}})
    worker.rollout_config, worker.mm_processor_kwargs = settings, {}
    worker.llm_client, worker.tokenizer, worker.hf_model_type = ServerManager(), build_chatml_tokenizer(), "qwen3"
    worker.dataset_cls, worker.tools = None, []


def place(name, loop):
    """Let verl find an agent loop that a test defines."""
    _agent_loop_registry[name]["_target_"] = f"{__name__}.{name.upper()}"
    globals()[name.upper()] = loop


def other_worker(**rollout):
    """verl's `AgentLoopWorker`, without servers."""
    worker = object.__new__(AgentLoopWorker)
    worker.reward_loop_worker_handles = worker.teacher_key = worker.processor = None
    worker.distillation_enabled = False
    configure(worker, **rollout)
    return worker


@pytest.mark.parametrize(
    ("failed", "expected"),
    [((), [1.0, -1.0]), ((0,), [None, 0.0]), ((0, 1), [None, None]), ((2,), [None, 0.0])],
)
def test_verls_other_worker_gets_one_row_per_episode(episodes, caplog, failed, expected):
    """`AgentLoopWorker`, of fully async and one-step-off training: `expected` is the advantage of each episode."""
    worker = other_worker(n=2)
    pair = [replace(episodes[0], reward=1.0), replace(episodes[0], id="second", reward=0.0)]
    pair = [replace(one, outcome="infrastructure_error" if at in failed else None) for at, one in enumerate(pair)]
    if failed == (2,):  # nothing failed, but the first has two rows
        pair[0] = episodes[1]
    numbers = itertools.count()

    @agent_loop("single_rows")
    async def single_rows(model, fields):
        return pair[next(numbers)]

    place("single_rows", single_rows)
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    fields = {"agent_name": "single_rows", "uid": "u", "raw_prompt": [{"role": "user", "content": "q"}]}

    async def run():
        return await asyncio.gather(
            *(asyncio.create_task(worker._run_agent_loop({"temperature": 1.0}, trajectory, **fields)) for _ in range(2))
        )

    batch = worker._postprocess(asyncio.run(run()))
    assert batch.batch["response_mask"].any(dim=1).tolist() == [one is not None for one in expected]
    advantages, _ = compute_grpo_outcome_advantage(
        batch.batch["rm_scores"], batch.batch["response_mask"], np.array(["u", "u"]), norm_adv_by_std_in_grpo=True
    )
    for row, mask, one in zip(advantages, batch.batch["response_mask"].bool(), expected, strict=True):
        assert row[mask].tolist() == pytest.approx([0.0 if one is None else one / 2**0.5] * int(mask.sum()), abs=1e-4)
    assert ("takes one" in caplog.text) == (failed == (2,))


def run_alone(loop, episode, validate, **rollout):
    """Run one episode in verl's `AgentLoopWorker`, and return what it hands over."""
    worker = other_worker(**rollout)

    @agent_loop(loop)
    async def alone(model, fields):
        return episode

    place(loop, alone)
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": validate}
    fields = {"agent_name": loop, "uid": "u", "raw_prompt": [{"role": "user", "content": "q"}]}
    return worker._postprocess([asyncio.run(worker._run_agent_loop({"temperature": 0}, trajectory, **fields))])


def test_validation_in_the_other_worker_counts_episodes_of_several_rows(episodes):
    batch = run_alone("validated_alone", replace(episodes[1], reward=1.0), True, n=1)
    assert batch.batch["rm_scores"].sum().item() == 1.0


def test_a_group_in_two_workers_is_refused(episodes):
    """The rewards of siblings in another process are unknown here, so that a filler would move their baseline."""
    with pytest.raises(ValueError, match=r"num_workers to a divisor of data\.train_batch_size"):
        run_alone("halved", replace(episodes[0], outcome="infrastructure_error"), False, n=4)


@pytest.mark.parametrize("reason", ["completed", "stop", "length"])
@pytest.mark.parametrize("asked", [None, 12])
async def test_an_answer_that_verl_cuts_never_looks_complete(reason, asked):
    """verl's vLLM server names the end of every answer "completed", and chooses the limit itself."""
    tokenizer = build_chatml_tokenizer()
    manager = ServerManager((tokenizer.encode("one two three four five six seven eight nine ten ")[:12], reason, 1))

    @agent_loop("cut")
    async def cut(model, fields):
        with pytest.raises(MaxTokensReachedException) if reason != "stop" else contextlib.nullcontext():
            await make_agent(model).invoke_async("Tell me.")
        return Episode(model.trajectory, 1.0, "g")

    loop = object.__new__(cut)
    loop.server_manager, loop.tokenizer = manager, tokenizer
    rollout = SimpleNamespace(prompt_length=1000, response_length=12)
    loop.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    await loop.run({"temperature": 1.0} if asked is None else {"max_new_tokens": asked})
    assert [sampling["max_new_tokens"] for _, _, sampling in manager.calls] == [12]


async def test_the_model_knows_the_context_of_verls_servers(caplog):
    """They report neither their context nor their tokenizer, and an answer must leave room for the row."""
    tokenizer = build_chatml_tokenizer()
    manager = ServerManager(([*tokenizer.encode("Yes."), tokenizer.eos_token_id], "completed", 1))

    @agent_loop("short")
    async def short(model, fields):
        await make_agent(model).invoke_async("Tell me.")
        assert model.context_window_limit == 50
        return Episode(model.trajectory, 1.0, "g")

    loop = object.__new__(short)
    loop.server_manager, loop.tokenizer = manager, tokenizer
    rollout = SimpleNamespace(prompt_length=10, response_length=40, max_model_len=1000)
    loop.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    await loop.run({"temperature": 1.0})
    ((_, prompt, sampling),) = manager.calls
    assert 10 < len(prompt) and sampling["max_new_tokens"] == 50 - len(prompt)
    assert "does not report" not in caplog.text and "unproven" not in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algorithm.adv_estimator", "rloo"),
        ("algorithm.use_kl_in_reward", True),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-mean"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"),
        ("algorithm.rollout_correction.rollout_is", "sequence"),
        ("algorithm.rollout_correction.rollout_rs", "geometric"),
    ],
)
def test_settings_that_would_count_rows_as_episodes_are_refused(name, value):
    """The others of verl's own defaults are as they should be."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    OmegaConf.update(config, "algorithm.adv_estimator", "grpo")
    adapter.check_config(config)
    OmegaConf.update(config, name, value)
    with pytest.raises(ValueError, match=name):
        adapter.check_config(config)


async def test_an_episode_alone_by_the_settings_is_trained(episodes):
    @agent_loop("single")
    async def single(model, fields):
        return episodes[0]

    rollout = SimpleNamespace(prompt_length=1000, response_length=1000)
    loop = object.__new__(single)
    loop.server_manager, loop.tokenizer = ServerManager(), build_chatml_tokenizer()
    loop.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    assert len(await loop.run({}, uid="u", session_id=0)) == 1


def test_the_example_is_an_agent_loop():
    path = ROOT / "examples/verl/calculator_loop.py"
    tokenizer = build_chatml_tokenizer()
    end = tokenizer.eos_token_id
    answers = [
        [*tokenizer.encode(text), end] for text in (call("calculator", expression="6 * 7"), "It is \\boxed{42}.")
    ]
    loop = object.__new__(runpy.run_path(str(path))["calculator"])
    loop.server_manager = ServerManager(*((answer, "stop", 1) for answer in answers))
    rollout = SimpleNamespace(prompt_length=2000, response_length=2000)
    loop.tokenizer, loop.config = tokenizer, SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    task = {"raw_prompt": [{"role": "user", "content": "What is 6 * 7?"}], "reward_model": {"ground_truth": "42"}}
    (output,) = asyncio.run(loop.run({"temperature": 1.0}, **task))
    assert output.reward_score == 1.0 and sum(output.response_mask) == sum(map(len, answers))


def test_mixed_versions_above_the_limit_are_left_out(episodes, caplog):
    trajectory = type(episodes[1].trajectory).from_bytes(episodes[1].trajectory.to_bytes())
    for version, turn in zip(("3", "4", "6"), trajectory.turns, strict=True):
        spans = (VersionSpan(version, 0, len(turn.output_ids)),)
        turn.generation = replace(turn.generation, weight_versions=spans)
    mixed = replace(episodes[1], trajectory=trajectory)
    first, second = agent_loop_outputs(mixed, max_staleness=3)
    assert first.extra_fields == {"min_global_steps": 3, "max_global_steps": 4}
    assert agent_loop_outputs(mixed, max_staleness=2) == []
    assert "older than max_staleness=2" in caplog.text


@pytest.mark.parametrize("worker", ["AgentLoopWorkerTQ", "AgentLoopWorker"])
def test_the_guides_settings_train_the_loop_in_verls_workers(reference, folder, worker):
    """The settings as the guide lists them, up to the batch of the loss, in processes of their own."""
    build_chatml_tokenizer().save_pretrained(folder)
    guide = (ROOT / "docs/guides/verl.md").read_text()
    (settings,) = re.findall(r"```bash\n.*?verl\.trainer\.main_ppo(.*?)```", guide, re.DOTALL)
    overrides = [one for one in settings.replace("\\", " ").split() if "=" in one and "..." not in one]
    assert len(overrides) >= 4
    command = ["python", str(Path(__file__).parent / "rollouts.py"), worker, "MODEL", *overrides]
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}  # no file at home, and no slow start
    output = guides.run(command, folder, path=["examples/verl"], **variables)
    batch = json.loads(re.search(r"^{.*}$", output, re.MULTILINE)[0])
    assert sorted(batch["advantages"]) == [[pytest.approx(one, abs=1e-4)] for one in (-0.866, -0.866, 0.866, 0.866)]
    answers = [call("calculator", expression="6 * 7"), "It is \\boxed{42}."]
    assert batch["trained"] == [sum(len(build_chatml_tokenizer().encode(text)) + 1 for text in answers)] * 4
