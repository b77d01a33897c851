"""The gradients of TRL's own trainers on our rows equal those on paper, and planted faults change them."""

import asyncio
import base64
import itertools
import json
import math
import pickle
import queue
import re
import sys
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import strands_sglang.trainers.trl as adapter
from strands_sglang import TerminationReason, Trajectory
from strands_sglang.credit import Episode, policy_loss, training_rows
from strands_sglang.protocol.generation import Generation, VersionSpan
from strands_sglang.testing import ScriptedResponse, ScriptedSGLang
from support.agents import assistant, build_chatml_tokenizer, user
from support.recorder import Recorder
from trainers import guides, paper

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "grpo_cpu"))
import cpu

ROOT = Path(__file__).parents[3]
GENERATIONS = 10  # eight rows, and two fillers
TOLERANCE = 1e-5


@pytest.fixture
def common(tmp_path):
    """Arguments that leave the gradient alone: one step of plain SGD with a rate of 0, in float32."""
    return {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "temperature": 1.0,
    }


class Gradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def runner(episodes):
    """A `run_episode` that gives out these episodes in turn."""
    numbers = itertools.count()

    async def run_episode(prompt):
        number = next(numbers)
        return replace(episodes[number % len(episodes)], id=str(number))

    return run_episode


def dataset(rows):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": "x"}]] * rows})


NO_SERVER = SimpleNamespace(**dict.fromkeys(("pause", "resume", "close"), lambda: None), push=lambda *_: None)


@pytest.fixture
def train(folder, common):
    """Runs AsyncGRPOTrainer on rollouts, in steps of so many rows, and returns its first gradients."""
    cpu.enable()

    def run(rollouts, rows, **options):
        own = {name: options.pop(name) for name in ("peft_config",) if name in options}
        config = AsyncGRPOConfig(
            **{**common, **options}, token_budget=0, per_device_train_batch_size=rows, num_generations=2
        )
        gradients = Gradients()
        trainer = AsyncGRPOTrainer(
            model=str(folder),
            args=config,
            processing_class=build_chatml_tokenizer(),
            train_dataset=dataset(4),
            reward_funcs=None,
            rollout_worker=rollouts,
            weight_transfer=rollouts,
            callbacks=[gradients],
            **own,
        )
        trainer.model_version = rollouts.version
        run.loss = trainer.train().training_loss
        return gradients.found

    return run


@pytest.fixture
def async_grpo(train):
    """Runs AsyncGRPOTrainer for one step on groups of these episodes, and returns its gradients."""

    def run(episodes, rows):
        rollouts = adapter.AsyncGRPORollouts(
            runner(episodes), itertools.repeat("x"), NO_SERVER, group_size=len(episodes)
        )
        return train(rollouts, rows)

    return run


@pytest.fixture
def grpo(folder, common):
    """Runs GRPOTrainer for one step and returns its gradients."""

    def run(episodes, *, loss_type="dapo", normalizer="token_mean", micro_batches=1, rollouts=None, **options):
        settings = {"scale_rewards": "none", "beta": 0.0, "num_generations": GENERATIONS, **options}
        own = {name: settings.pop(name) for name in ("reward_funcs", "peft_config") if name in settings}
        config = GRPOConfig(
            **{**common, **settings},
            loss_type=loss_type,
            per_device_train_batch_size=settings["num_generations"] // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_completion_length=paper.CONSTANT,
        )
        gradients = Gradients()
        if rollouts is None:
            rollouts = adapter.GRPORollouts(
                runner(episodes), group_size=len(episodes), normalizer=normalizer, constant=paper.CONSTANT
            )
        GRPOTrainer(
            model=str(folder),
            args=config,
            processing_class=build_chatml_tokenizer(),
            train_dataset=dataset(settings["num_generations"]),
            rollout_func=rollouts,
            callbacks=[gradients],
            **{"reward_funcs": adapter.row_advantages, **own},
        ).train()
        return gradients.found

    return run


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_async_grpo_has_the_gradient_on_paper(async_grpo, reference, noise):
    expected = paper.gradient(reference, paper.rows_of(reference, noise=noise), "token_mean")
    found = async_grpo(paper.episodes(reference, noise=noise), 8)
    assert paper.relative_error(found, expected) < TOLERANCE


def test_a_replay_computes_the_loss_that_the_trainer_had(train, reference):
    rows = paper.trained_rows(reference, "trl:async_grpo")
    rollouts = adapter.AsyncGRPORollouts(
        runner(paper.episodes(reference, noise=0.25)), itertools.repeat("x"), NO_SERVER, group_size=4
    )
    train(rollouts, len(rows), epsilon=0.1, epsilon_high=0.3)
    assert policy_loss(rows) == pytest.approx(rows.loss.value, abs=1e-9)
    assert policy_loss(rows) == pytest.approx(train.loss, abs=1e-6)


def test_trials_of_harbor_are_trained(async_grpo, reference):
    paths = sorted((ROOT / "tests/trainers/harbor/trials").glob("*.jsonl"))
    episodes = [Episode(Trajectory.load(path), float(at), "g") for at, path in enumerate(paths)]
    rows = training_rows(episodes)
    found = async_grpo(episodes, len(rows.rows))
    assert paper.relative_error(found, paper.gradient(reference, rows, "token_mean")) < TOLERANCE


@pytest.mark.parametrize("normalizer", paper.NORMALIZERS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_grpo_has_the_gradient_on_paper(grpo, reference, loss_type, normalizer):
    expected = paper.gradient(reference, paper.rows_of(reference), normalizer)
    found = grpo(paper.episodes(reference), loss_type=loss_type, normalizer=normalizer)
    assert paper.relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_micro_batches_do_not_change_the_gradient(grpo, reference, loss_type):
    expected = paper.gradient(reference, paper.rows_of(reference), "episode_mean")
    found = grpo(paper.episodes(reference), loss_type=loss_type, normalizer="episode_mean", micro_batches=5)
    assert paper.relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("fault", paper.FAULTS)
def test_planted_faults_change_the_gradient(async_grpo, reference, monkeypatch, fault):
    expected = paper.gradient(reference, paper.rows_of(reference), "token_mean")
    monkeypatch.setattr(adapter, "training_rows", paper.planted(fault, adapter.training_rows))
    assert paper.relative_error(async_grpo(paper.episodes(reference), 8), expected) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_rewards": "group"}, "set scale_rewards='none' in GRPOConfig"),
        ({"loss_type": "bnpo", "micro_batches": 2}, "loss_type='bnpo' weights a token by its micro-batch"),
        ({"mask_truncated_completions": True}, "set mask_truncated_completions=False"),
        ({"beta": 0.1, "loss_type": "grpo"}, "beta weights all tokens equally, but this loss weights rows"),
        ({"num_generations_eval": 2}, "leave num_generations_eval out"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "leave multi_objective_aggregation="),
        ({"reward_weights": [0.5]}, r"leave reward_weights=\[0.5\]"),
        ({"top_entropy_quantile": 0.5}, "leave top_entropy_quantile=0.5"),
        ({"importance_sampling_level": "sequence"}, "leave importance_sampling_level='sequence'"),
        ({"reward_funcs": [adapter.row_advantages, lambda completions, **_: [0.0] * GENERATIONS]}, "set reward_funcs="),
        ({"num_generations": 8}, "4 episodes made 8 rows, but num_generations=8 has room for 7"),
    ],
)
def test_settings_that_change_the_loss_are_refused(grpo, reference, options, message):
    with pytest.raises(ValueError, match=message):
        grpo(paper.episodes(reference), **options)


def test_rows_with_several_advantages_are_refused(grpo, reference):
    first, *others = paper.episodes(reference)
    with pytest.raises(ValueError, match="this trainer takes one per row"):
        grpo([replace(first, turn_rewards={0: 1.0}), *others])


def versioned(*versions, logprob=-0.5, constrained=False):
    """An episode of a turn of two tokens for each version of the weights."""
    recorder, history = Recorder(), []
    for number, version in enumerate(versions):
        history += [user(f"q{number}")]
        answer = Generation(
            output_ids=array("i", recorder.ids()),
            logprobs=array("d", [-0.5, logprob]),
            finish_type="stop",
            weight_version=version,
            weight_versions=(VersionSpan(version, 0, 2),),
        )
        turn = recorder.ask(list(history), constrained=constrained)
        recorder.trajectory.answer(turn, answer, assistant(f"a{number}"))
        history += [assistant(f"a{number}")]
    return Episode(recorder.trajectory, 1.0, "g")


def test_what_cannot_be_trained_is_left_out_by_name(train, reference):
    good, other = versioned("7", "7"), versioned("7", "7")
    died = replace(good, outcome=TerminationReason.INFRASTRUCTURE_ERROR)
    groups = [
        [died, replace(good, reward=math.nan), replace(good, reward=None), good],
        [
            versioned("7", logprob=math.nan),
            versioned("7", constrained=True),
            versioned(*["7"] * 30),
            replace(good, reward=0.0),
        ],
        [versioned("7", "4"), versioned("default", "7"), replace(good, reward=0.0), replace(other, reward=0.5)],
        [replace(good, reward=0.0), other, versioned("7", "7"), versioned("7", "7")],
    ]

    numbers = itertools.count()

    async def run_episode(group):
        number = next(numbers)
        return replace(groups[group][number % 4], id=f"{group}-{number}")

    seen, taken = [], []
    rollouts = adapter.AsyncGRPORollouts(
        run_episode,
        itertools.chain(range(4), itertools.repeat(3)),  # the trainer reads a step ahead
        NO_SERVER,
        group_size=4,
        groups_in_flight=1,
        version=6,
        max_staleness=2,
        max_tokens=50,
        on_group=lambda rows, episodes: seen.append((len(rows), len(episodes))),
        on_taken=lambda sample, row: taken.append(row.episode),
    )
    gradients = train(rollouts, 7)
    assert any(gradient.any() for gradient in gradients.values())
    assert rollouts.left_out == {
        "the outcome infrastructure_error has no reward": 1,
        "a reward is not finite": 1,
        "no reward": 1,
        "the only episode of its group with a reward": 1,
        "a trained token has no logprob": 1,
        "no trained token": 1,
        "longer than max_tokens=50": 1,
        "older than max_staleness=2": 2,
    }
    assert seen[:4] == [(0, 4), (1, 4), (4, 4), (4, 4)]
    assert taken[:7] == ["1-7", "2-10", "2-11", "3-12", "3-13", "3-14", "3-15"]


def test_a_group_with_a_refused_row_trains_none():
    given = [
        versioned("7"),
        replace(versioned("7", "7"), turn_rewards={0: 1.0}),
    ]  # a row with one advantage comes first
    rollouts = adapter.AsyncGRPORollouts(runner(given), ["x"], NO_SERVER, group_size=2)
    run_to_the_end(rollouts)
    with pytest.raises(RuntimeError, match="this trainer takes one per row"):
        rollouts.check_health(60)
    assert rollouts.rollout_buffer.empty()


def test_a_trainer_that_takes_turns_gets_trees_with_their_advantages():
    first, second = versioned("7", "7"), versioned("7")
    calls = iter([[replace(first, turn_rewards={0: 1.0}), second], versioned("7")])

    async def run_episode(prompt):
        return next(calls)

    taken = []
    rollouts = adapter.AsyncGRPORollouts(
        run_episode, ["x"], NO_SERVER, group_size=2, takes_turns=True, on_taken=lambda sample, row: taken.append(row)
    )
    run_to_the_end(rollouts)
    samples = [rollouts.rollout_buffer.get() for _ in range(3)]
    assert all(math.isnan(sample.advantage) for sample in samples)
    assert len({*itertools.compress(taken[0].advantages, taken[0].loss_mask)}) == 2


def test_weights_of_before_the_first_push_are_version_0():
    rollouts = adapter.AsyncGRPORollouts(
        runner([versioned("default", "3"), versioned("2", "3"), versioned(None)]),
        ["x"],
        NO_SERVER,
        group_size=3,
        baseline=None,
        version=3,
    )
    run_to_the_end(rollouts)
    assert [rollouts.rollout_buffer.get().model_version for _ in range(3)] == [0, 2, 3]


def test_rollouts_start_again_after_a_stop(reference):
    started = queue.Queue()
    give = runner(paper.episodes(reference))

    async def run_episode(prompt):
        started.put(prompt)
        if prompt == "b" and started.qsize() <= 8:
            await asyncio.Event().wait()
        return await give(prompt)

    rollouts = adapter.AsyncGRPORollouts(run_episode, iter("abc"), NO_SERVER, group_size=4, groups_in_flight=1)
    rollouts.start()
    while started.qsize() < 8:
        rollouts.check_health(60)
    rollouts.stop()
    with pytest.raises(queue.Empty):
        while True:
            rollouts.rollout_buffer.get(block=False)
    with pytest.raises(RuntimeError, match="the rollouts are stopped: call start"):
        rollouts.check_health(60)
    run_to_the_end(rollouts)
    assert list(started.queue) == [*"aaaa", *"bbbb", *"bbbb", *"cccc"]
    assert rollouts.rollout_buffer.qsize() == 16
    with pytest.raises(queue.Empty):
        while True:
            rollouts.rollout_buffer.get(block=False)
    with pytest.raises(RuntimeError, match="there are no prompts left"):
        rollouts.check_health(60)


def test_the_same_rollouts_train_a_second_time(train, reference):
    rollouts = adapter.AsyncGRPORollouts(
        runner(paper.episodes(reference)), itertools.repeat("x"), NO_SERVER, group_size=4, version=2
    )
    first = train(rollouts, 8)
    assert any(gradient.any() for gradient in first.values())
    second = train(rollouts, 8)
    assert any(gradient.any() for gradient in second.values())


def test_no_more_is_sampled_than_a_step_needs():
    started = []

    async def run_episode(prompt):
        started.append(rollouts.version)
        return replace(versioned("1"), reward=len(started) % 2, id=str(len(started)))

    rollouts = adapter.AsyncGRPORollouts(
        run_episode, itertools.repeat("x"), NO_SERVER, group_size=4, groups_in_flight=9, rows_per_step=8
    )

    def wait_for(rows):
        while rollouts.rollout_buffer.qsize() < rows:
            rollouts.check_health(60)

    rollouts.start()
    for _ in range(8):
        rollouts.rollout_buffer.get(timeout=60)
    rollouts.next_step(groups=1)
    wait_for(4)
    rollouts.update_model_version(1)
    wait_for(8)
    rollouts.stop()
    assert started == [0] * 12 + [1] * 4


@pytest.mark.parametrize("options", [{}, {"weight_sync_steps": 2}, {"max_staleness": 0}])
def test_the_trainers_own_loader_reads_a_step_ahead(train, reference, options):
    """The stock trainer wants a second step's rows before it pushes the first, and rows that it drops are missing."""
    numbers = itertools.count()

    async def run_episode(prompt):
        number = next(numbers)
        return replace(paper.episodes(reference)[0], id=str(number), reward=float(number % 2))

    rollouts = adapter.AsyncGRPORollouts(run_episode, itertools.repeat("x"), NO_SERVER, group_size=4, rows_per_step=8)
    train(rollouts, 8, max_steps=3, heartbeat_stale_after_s=60, **options)
    assert rollouts.version >= 1


class PushedWeights(adapter.SGLangWeights):
    """Keeps what would be sent."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9")
        self.pushed = []

    def pause(self):
        pass

    resume = pause

    def push(self, named_tensors, version):
        self.pushed.append({name: tensor.detach().clone() for name, tensor in named_tensors})


@pytest.mark.parametrize("trainer", ["grpo", "async_grpo"])
def test_adapters_are_merged_into_the_weights_that_are_pushed(train, grpo, folder, reference, trainer):
    """SGLang serves the base model: names of adapters kill it. Training continues with the base as it was."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    weights, episodes = PushedWeights(), paper.episodes(reference)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options = {"max_steps": 3, "learning_rate": 0.1, "peft_config": lora}
    if trainer == "grpo":
        rollouts = adapter.GRPORollouts(runner(episodes), group_size=len(episodes), weights=weights)
        grpo(episodes, rollouts=rollouts, **options)
    else:
        rollouts = adapter.AsyncGRPORollouts(runner(episodes), itertools.repeat("x"), weights, group_size=len(episodes))
        train(rollouts, 8, **options)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict()
    assert len(weights.pushed) >= 2
    assert all(set(served) - {"lm_head.weight"} <= set(one) <= set(served) for one in weights.pushed)
    changed = {name for name, tensor in weights.pushed[-1].items() if not tensor.allclose(served[name], atol=1e-4)}
    assert changed == {name for name in served if ".q_proj." in name or ".v_proj." in name}


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="a group of one episode has no baseline: set group_size"):
        adapter.AsyncGRPORollouts(None, [], NO_SERVER, group_size=1)
    with pytest.raises(ValueError, match="a group of one episode has no baseline: set group_size"):
        adapter.GRPORollouts(None, group_size=1)


def run_to_the_end(rollouts):
    rollouts.start()
    for thread in threading.enumerate():
        if thread.name == "rollouts":
            thread.join()


def test_a_failing_episode_ends_training():
    async def failing(prompt):
        raise KeyError("no such tool")

    rollouts = adapter.AsyncGRPORollouts(failing, ["x"], SimpleNamespace())
    run_to_the_end(rollouts)
    with pytest.raises(RuntimeError, match="the rollouts failed") as caught:
        rollouts.check_health(60)
    assert isinstance(caught.value.__cause__, KeyError)


def test_rollouts_say_when_nothing_is_left_to_train(reference):
    rollouts = adapter.AsyncGRPORollouts(
        runner([replace(one, reward=None) for one in paper.episodes(reference)]), ["x"], SimpleNamespace(), group_size=4
    )
    run_to_the_end(rollouts)
    with pytest.raises(RuntimeError, match="there are no prompts left"):
        rollouts.check_health(60)
    assert rollouts.left_out == {"no reward": 4}


def test_a_batch_that_cannot_be_trained_changes_nothing(grpo, reference):
    found = grpo([replace(one, reward=None) for one in paper.episodes(reference)])
    assert not any(gradient.any() for gradient in found.values())


def test_grpo_trains_the_good_episodes_of_a_group_with_bad_ones(grpo, reference, caplog):
    group, reasons = paper.group_with_bad_ones(paper.episodes(reference))
    rows = training_rows(group, version=paper.NEWEST, **paper.LIMITS)
    assert {row.episode for row in rows} == {one.id for one in group} - reasons.keys()
    in_turn = iter(group)

    async def run_episode(prompt):
        return next(in_turn)

    rollouts = adapter.GRPORollouts(run_episode, group_size=len(group), **paper.LIMITS)
    found = grpo(group, rollouts=rollouts)
    assert paper.relative_error(found, paper.gradient(reference, rows, "token_mean")) < TOLERANCE
    assert rollouts.left_out == dict.fromkeys(reasons.values(), 1)
    assert all(f"episode=<{name}> | left out of training: {reason}" in caplog.text for name, reason in reasons.items())


@pytest.mark.parametrize("rows", [GENERATIONS - 1, GENERATIONS + 1])
def test_grpo_takes_no_other_number_of_rows(grpo, reference, rows):
    """What the fillers are for: TRL wants `num_generations` rows per prompt."""
    rollouts = adapter.GRPORollouts(runner(paper.episodes(reference)), group_size=4)

    def with_other_rows(prompts, trainer):
        return {name: [*column, *column][:rows] for name, column in rollouts(prompts, trainer).items()}

    with pytest.raises((ValueError, LookupError)):
        grpo([], rollouts=with_other_rows)


def test_grpos_own_baseline_is_over_rows(grpo, reference):
    """What the reward function of advantages is for: TRL subtracts the mean over all rows of a prompt."""
    rollouts = adapter.GRPORollouts(runner(paper.episodes(reference)), group_size=4, baseline=None)
    rows = list(training_rows(paper.episodes(reference), baseline=None))
    rewards = [row.advantage for row in rows]
    rewards += [1.0] * (GENERATIONS - len(rows))

    def with_rewards(prompts, trainer):
        return {**rollouts(prompts, trainer), "row_advantage": rewards}

    found = grpo([], rollouts=with_rewards)
    mean = sum(rewards) / GENERATIONS
    as_trl = [replace(row, advantages=[row.advantage - mean for _ in row.advantages]) for row in rows]
    assert paper.relative_error(found, paper.gradient(reference, as_trl, "token_mean")) < TOLERANCE


# === the commands of docs/guides/trl.md, in processes of their own ===

ON_A_CPU = f"sys.path.insert(0, {str(ROOT / 'examples' / 'grpo_cpu')!r})\nimport cpu\ncpu.enable()"  # see there
SMALL = """--max_steps 2 --token_budget 2048 --use_cpu --bf16 false --report_to none --save_strategy no
--learning_rate 0.1 --optim sgd --gradient_checkpointing false --model_init_kwargs {"dtype":"float32"}"""


@pytest.mark.parametrize("words", guides.commands("trl"), ids=" ".join)
def test_the_guides_commands_train_a_step_and_push_what_the_server_serves(folder, reference, tmp_path, words):
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(folder)
    numbers = itertools.count()
    server = ScriptedSGLang(tokenizer, lambda request: "It is \\boxed{1}." if next(numbers) % 2 else right(request))
    for path in ("pause_generation", "continue_generation", "begin_weight_update", "end_weight_update"):
        server.overrides[f"/{path}"] = ScriptedResponse()
    server.overrides["/update_weights_from_tensor"] = ScriptedResponse(content=b'{"success": true}')
    is_async = "async_grpo" in words[1]
    more = [word for word in SMALL.split() if is_async or word not in ("--token_budget", "2048")]
    with server.serve() as base_url:
        output = guides.run(
            words,
            folder,
            replace={"http://localhost:30000": base_url},
            more=["--output_dir", tmp_path, *more],
            before=ON_A_CPU if is_async else "",
        )
    assert re.search(r"'train_loss': '?-?[0-9.e-]+", output), output
    pushes = [json.loads(content) for path, content in server.calls if path == "/update_weights_from_tensor"]
    assert [push["weight_version"] for push in pushes] == (["1", "2", "3"] if is_async else ["0", "1"])
    served = reference.state_dict()
    for push in pushes:
        weights = dict(pickle.loads(base64.b64decode(push["serialized_named_tensors"][0])))
        assert weights.keys() == served.keys()
    changed = {name for name, tensor in weights.items() if not torch.equal(tensor, served[name].float())}
    targets = {name for name in served if "--lora_r" not in words or ".q_proj." in name or ".v_proj." in name}
    assert changed and changed <= targets, output


def right(request):
    """The right answer to an example's question."""
    a, b = re.search(r"What is (\d+) \* (\d+)", request.text).groups()
    return f"It is \\boxed{{{int(a) * int(b)}}}."
