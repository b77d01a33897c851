"""slime's published formulas on our samples have the gradient on paper, and planted faults change it.

slime cannot be installed without CUDA and Megatron. `reduced` and `advantages` are written from its `cp_utils.py` and
`ppo_utils.py` (624b824a8).
"""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from strands_sglang import TerminationReason
from strands_sglang.credit import training_rows
from strands_sglang.trainers.slime import grpo_rewards_by_group, to_slime_samples
from support.slime import Sample, slime_args
from trainers import conftest, paper

TOLERANCE = 1e-5
ARGS = slime_args(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False)


folder, reference, episodes = conftest.folder, conftest.reference, conftest.episodes  # fixtures


@pytest.fixture(scope="module")
def model(folder, reference):
    """The model that slime trains, in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def on_paper(reference, episodes):
    """The gradient of all episodes on paper, by how it is normalized."""
    rows = training_rows(episodes)
    return {normalizer: paper.gradient(reference, rows, normalizer) for normalizer in ("episode_mean", "token_mean")}


@pytest.fixture
def samples(episodes, chatml_tokenizer):
    """The samples of all episodes, as slime has them after a rollout."""
    return samples_of(episodes, chatml_tokenizer)


def samples_of(episodes, tokenizer, sample_class=Sample):
    nested = [
        to_slime_samples(
            episode.trajectory,
            sample_class(index=number, group_index=0, prompt="q"),
            TerminationReason.TASK_COMPLETE,
            tokenizer=tokenizer,
            args=ARGS,
            reward=episode.reward,
            fan_out=True,
        )
        for number, episode in enumerate(episodes)
    ]
    return [sample for rollout in nested for sample in rollout]


def advantages(rewards, lengths):
    """A sample's reward, as post-processed, stands on all tokens of its response."""
    return [torch.full((length,), reward) for reward, length in zip(rewards, lengths, strict=True)]


def reduced(losses, masks, rollouts, per_token):
    """The mean over the tokens of a rollout, summed over rollouts; or the sum over tokens."""
    totals = {one: sum(mask.sum() for mask, own in zip(masks, rollouts, strict=True) if own == one) for one in rollouts}
    parts = [(loss * mask).sum() for loss, mask in zip(losses, masks, strict=True)]
    return sum(
        parts if per_token else [part / totals[one].clamp_min(1) for part, one in zip(parts, rollouts, strict=True)]
    )


def gradient_of(model, samples, rewards, *, per_token=False):
    """The gradient of slime's clipped policy loss."""
    model.zero_grad()
    masks = [torch.tensor(sample.loss_mask, dtype=torch.float32) for sample in samples]
    losses = []
    for sample, advantage in zip(samples, advantages(rewards, [len(mask) for mask in masks]), strict=True):
        logprobs = paper.logprobs_of(model, sample.tokens)[-sample.response_length :]
        ratio = torch.exp(logprobs - torch.tensor(sample.rollout_log_probs))
        losses.append(torch.maximum(-ratio * advantage, -ratio.clamp(1 - paper.CLIP, 1 + paper.CLIP) * advantage))
    rollouts = [sample.rollout_id for sample in samples]
    count = sum(mask.sum() for mask in masks) if per_token else len(set(rollouts))  # global_batch_size counts rollouts
    (reduced(losses, masks, rollouts, per_token) / count).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(("per_token", "normalizer"), [(False, "episode_mean"), (True, "token_mean")])
def test_slimes_formulas_have_the_gradient_on_paper(model, on_paper, samples, per_token, normalizer):
    _, rewards = grpo_rewards_by_group(ARGS, samples)
    found = gradient_of(model, samples, rewards, per_token=per_token)
    assert paper.relative_error(found, on_paper[normalizer]) < TOLERANCE


def divided(samples, rewards):
    return [
        reward / sum(other.index == one.index for other in samples)
        for one, reward in zip(samples, rewards, strict=True)
    ]


def trained_twice(samples, rewards):
    """The trunk of the fork: both samples of the second rollout train it."""
    first, second = (sample for sample in samples if sample.index == 1)
    both = min(first.response_length, second.response_length)
    for at in range(both):
        for one, other in ((first, second), (second, first)):
            is_common = (
                one.tokens[: len(one.tokens) - one.response_length + at + 1]
                == other.tokens[: len(other.tokens) - other.response_length + at + 1]
            )
            if is_common and other.loss_mask[at]:
                one.loss_mask[at], one.rollout_log_probs[at] = 1, other.rollout_log_probs[at]
    return rewards


def over_rows(samples, rewards):
    """slime's own normalization where samples are not equally many per prompt: one group of all samples."""
    own = [sample.reward for sample in samples]
    return [reward - sum(own) / len(own) for reward in own]


def shifted(samples, rewards):
    for sample in samples:
        sample.rollout_log_probs = [*sample.rollout_log_probs[1:], 0.0]
    return rewards


def last_untrained(samples, rewards):
    samples[-1].loss_mask = [0] * samples[-1].response_length
    return rewards


@pytest.mark.parametrize("fault", [divided, trained_twice, over_rows, shifted, last_untrained])
def test_planted_faults_change_slimes_gradient(model, on_paper, samples, fault):
    _, rewards = grpo_rewards_by_group(ARGS, samples)
    found = gradient_of(model, samples, fault(samples, rewards))
    assert paper.relative_error(found, on_paper["episode_mean"]) > 100 * TOLERANCE


def test_a_rollout_without_reward_leaves_slimes_baseline(model, reference, episodes, chatml_tokenizer):
    kept = [replace(episodes[0], reward=None), *episodes[1:]]
    samples = samples_of(kept, chatml_tokenizer)
    _, rewards = grpo_rewards_by_group(ARGS, samples)
    for sample in samples:  # slime zeroes the masks of removed samples after the post-process
        sample.loss_mask = [0] * sample.response_length if sample.remove_sample else sample.loss_mask
    trained = [one for one, _ in zip(samples, rewards, strict=True) if not one.remove_sample]
    own = [reward for sample, reward in zip(samples, rewards, strict=True) if not sample.remove_sample]
    expected = paper.gradient(reference, training_rows(kept), "episode_mean")
    assert paper.relative_error(gradient_of(model, trained, own), expected) < TOLERANCE
    assert {reward for sample, reward in zip(samples, rewards, strict=True) if sample.remove_sample} == {0.0}
