"""The gradients of TRL's own trainers on our rows equal those on paper, and planted faults change them."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import strands_sglang.trainers.trl as adapter
from support.agents import build_chatml_tokenizer
from trainers import paper

from . import cpu

GENERATIONS = 10  # eight rows, and two fillers
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="session")
def reference(folder):
    return paper.tiny_model(folder)


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


@pytest.fixture
def async_grpo(folder, common):
    """Runs AsyncGRPOTrainer for one step and returns its gradients."""
    cpu.enable()

    def run(episodes, rows):
        weights = SimpleNamespace(**dict.fromkeys(("pause", "resume", "close"), lambda: None), push=lambda *_: None)
        rollouts = adapter.AsyncGRPORollouts(runner(episodes), itertools.repeat("x"), weights, group_size=len(episodes))
        config = AsyncGRPOConfig(**common, token_budget=0, per_device_train_batch_size=rows, num_generations=2)
        gradients = Gradients()
        AsyncGRPOTrainer(
            model=str(folder),
            args=config,
            processing_class=build_chatml_tokenizer(),
            train_dataset=dataset(4),
            reward_funcs=None,
            rollout_worker=rollouts,
            weight_transfer=rollouts,
            callbacks=[gradients],
        ).train()
        return gradients.found

    return run


@pytest.fixture
def grpo(folder, common):
    """Runs GRPOTrainer for one step and returns its gradients."""

    def run(episodes, *, loss_type="dapo", normalizer="token_mean", micro_batches=1, **options):
        settings = {"scale_rewards": "none", "beta": 0.0, "num_generations": GENERATIONS, **options}
        config = GRPOConfig(
            **common,
            **settings,
            loss_type=loss_type,
            per_device_train_batch_size=settings["num_generations"] // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_completion_length=paper.CONSTANT,
        )
        gradients = Gradients()
        rollouts = adapter.GRPORollouts(
            runner(episodes), group_size=len(episodes), normalizer=normalizer, constant=paper.CONSTANT
        )
        GRPOTrainer(
            model=str(folder),
            args=config,
            processing_class=build_chatml_tokenizer(),
            train_dataset=dataset(settings["num_generations"]),
            reward_funcs=adapter.row_advantages,
            rollout_func=rollouts,
            callbacks=[gradients],
        ).train()
        return gradients.found

    return run


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_async_grpo_has_the_gradient_on_paper(async_grpo, reference, noise):
    expected = paper.gradient(reference, paper.rows_of(reference, noise=noise), "token_mean")
    found = async_grpo(paper.episodes(reference, noise=noise), 8)
    assert paper.relative_error(found, expected) < TOLERANCE


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
        ({"loss_type": "bnpo", "micro_batches": 2}, "loss_type='bnpo' weighs a token by its micro-batch"),
        ({"num_generations_eval": 2}, "leave num_generations_eval out"),
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
