"""Episodes of several sequences, and the gradient that docs/understand/credit.md defines for them, in float64."""

import copy
import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from strands_sglang.credit import Episode, Loss, TrainingRows, policy_loss, training_rows
from strands_sglang.protocol.generation import Generation, VersionSpan
from strands_sglang.reasons import Reason
from strands_sglang.trajectory.trajectory import Trajectory
from support.agents import assistant, user
from support.recorder import Recorder

torch.set_num_threads(1)  # the model is tiny, and two threads wait for each other on a busy machine

VOCABULARY = 1600
NORMALIZERS = ("episode_mean", "token_mean", "constant")
CONSTANT = 64
CLIP = 0.2


def tiny_model(folder):
    """Save a random Qwen3 of two layers to a folder, and return it in float64."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    reference = copy.deepcopy(model).double()
    reference.set_attn_implementation("eager")
    return reference


def logprobs_of(model, ids):
    """Logprob of each id after those before it; 0 for the first. Differentiable."""
    x = torch.tensor([ids])
    logprobs = torch.log_softmax(model(input_ids=x).logits[0, :-1], -1)
    return torch.cat([logprobs.new_zeros(1), logprobs.gather(1, x[0, 1:, None])[:, 0]])


class Sampler(Recorder):
    """Records random tokens with the model's logprobs, or with ones that are off by a random amount."""

    def __init__(self, model, random, noise):
        super().__init__()
        self.model, self.random, self.noise = model, random, noise

    def ids(self, count=2):
        return self.random.integers(10, VOCABULARY - 10, count).tolist()

    def sample(self, messages, answer, prompt, count, **options):
        turn = self.ask(messages, prompt=self.ids(prompt), **options)
        ids = self.ids(count)
        with torch.no_grad():
            known = logprobs_of(self.model, [*turn.token_ids(), *ids])[-count:].numpy()
        logprobs = known + self.random.normal(0, self.noise, count) if self.noise else known
        generation = Generation(output_ids=array("i", ids), logprobs=array("d", logprobs), finish_type="stop")
        self.trajectory.answer(turn, generation, assistant(answer))


def episodes(model, *, noise=0.0):
    """One plain episode, and ones with a fork, a compaction and sub-agents: 1, 2, 2 and 3 rows."""
    random = np.random.default_rng(0)
    q, r = user("q"), user("r")
    plain, fork, compaction, agents = (Sampler(model, random, noise) for _ in range(4))
    plain.sample([q], "a", 30, 12)
    plain.sample([q, assistant("a"), r], "b", 5, 9)
    fork.sample([q], "a", 30, 14)
    fork.sample([q, assistant("a"), r], "b", 4, 7)
    fork.sample([q, assistant("a"), user("s")], "c", 6, 25)
    compaction.sample([q], "a", 30, 8)
    compaction.sample([q, assistant("a"), r], "b", 3, 6)
    compaction.sample([user("summary")], "c", 20, 40)
    agents.sample([q], "a", 30, 5)
    agents.sample([q, assistant("a"), r], "b", 30, 4)
    agents.sample([user("sub-agent 1")], "c", 11, 3)
    agents.sample([user("sub-agent 2")], "d", 17, 33)
    agents.sample([user("sub-agent 2"), assistant("d"), r], "e", 2, 6)
    rewards = zip((plain, fork, compaction, agents), (1.3, -0.7, 0.4, -1.0), strict=True)
    return [Episode(one.trajectory, reward, "g", f"e{number}") for number, (one, reward) in enumerate(rewards)]


def rows_of(model, **options):
    """The rows of `episodes`, as a trainer gets them."""
    return training_rows(episodes(model, **options))


def gradient(model, rows, normalizer):
    """The gradient on paper, by parameter: each sampled token of an episode once."""
    model.zero_grad()
    count = len({row.episode for row in rows})
    total = sum(row.trained for row in rows)
    for row in rows:
        divisors = {"episode_mean": row.episode_trained, "token_mean": total / count, "constant": CONSTANT}
        ratio = torch.exp(logprobs_of(model, row.token_ids) - torch.tensor(row.logprobs, dtype=torch.float64))
        advantage = torch.tensor(row.advantages, dtype=torch.float64)
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        mask = torch.tensor(row.loss_mask)
        ((loss * mask).sum() / (count * divisors[normalizer])).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def trained_rows(model, name, clip=(0.1, 0.3)):
    """Rows with the trainer's logprobs, the weights of a loss, and the loss on paper: the clipped token mean."""
    rows = rows_of(model, noise=0.25)
    rows.left_out["gone"] = Reason("no_reward")  # slime counts it
    weights = rows.weights("token_mean", name, micro_batches=[range(len(rows))])
    total = sum(row.trained for row in rows)
    known, loss = [], 0.0
    for row, weight in zip(rows, weights, strict=True):
        own = logprobs_of(model, row.token_ids).tolist()  # also where nothing is trained
        known.append(replace(row, trainer_logprobs=own, loss_weight=weight))
        for old, new, advantage, mask in zip(row.logprobs, own, row.advantages, row.loss_mask, strict=True):
            ratio = math.exp(new - old)
            loss -= mask * min(ratio * advantage, min(max(ratio, 1 - clip[0]), 1 + clip[1]) * advantage) / total
    rows.rows, rows.loss = known, Loss(name, loss, clip)
    return rows


def check_replayed_loss(model, name):
    """A replay computes the loss on paper, and with the trainer as the old policy the one of ratios of 1."""
    rows = trained_rows(model, name)
    assert policy_loss(rows) == pytest.approx(rows.loss.value, abs=1e-9)
    rows.loss = rows.loss._replace(from_sampler=False)
    total = sum(row.trained for row in rows)
    assert policy_loss(rows) == pytest.approx(-sum(sum(row.advantages) for row in rows) / total, abs=1e-9)


def relative_error(found, expected):
    """Distance of two gradients, relative to the expected one."""
    assert found.keys() >= expected.keys()
    distance = sum(float(((found[name].double() - expected[name]) ** 2).sum()) for name in expected)
    return (distance / sum(float((one**2).sum()) for one in expected.values())) ** 0.5


# === what must be kept out of an update ===


def with_turns(episode, **changes):
    """The episode, with changes of what its turns sampled; each is a function of the turn."""
    trajectory = Trajectory.from_bytes(episode.trajectory.to_bytes())
    for turn in trajectory.turns:
        turn.generation = replace(turn.generation, **{name: make(turn) for name, make in changes.items()})
    return replace(episode, trajectory=trajectory)


def sampled_by(episode, *versions):
    """The episode, with the version of the weights that sampled each turn; the last one for all further turns."""
    name = lambda turn: versions[min(turn.index, len(versions) - 1)]  # noqa: E731
    return with_turns(
        episode,
        weight_version=name,
        weight_versions=lambda turn: (VersionSpan(name(turn), 0, len(turn.output_ids)),),
    )


LIMITS = {"max_tokens": 74, "max_staleness": 2}
NEWEST = 9


def group_with_bad_ones(made):
    """A group of `episodes`: two can be trained, the others cannot, with `LIMITS` and weights of version `NEWEST`.

    Returns:
        The episodes, and the reason for which each of the others is kept out, by its id.
    """
    good, long, other, _ = (sampled_by(episode, str(NEWEST)) for episode in made)
    untrained = replace(good, id="untrained", trajectory=Trajectory.from_bytes(good.trajectory.to_bytes()))
    for turn in untrained.trajectory.turns:
        turn.constrained = True
    bad = {
        "the outcome infrastructure_error has no reward": replace(good, id="failed", outcome="infrastructure_error"),
        "a reward is not finite": replace(good, id="odd", reward=math.nan),
        "no trained token": untrained,
        "a trained token has no logprob": with_turns(
            replace(good, id="nan"), logprobs=lambda turn: array("d", [math.nan] * len(turn.output_ids))
        ),
        f"longer than max_tokens={LIMITS['max_tokens']}": long,
        f"older than max_staleness={LIMITS['max_staleness']}": sampled_by(replace(good, id="stale"), "6", str(NEWEST)),
    }
    return [good, *bad.values(), other], {episode.id: reason for reason, episode in bad.items()}


# === faults that trainers' adapters have had: what a test of ours must notice ===


def divided(rows):
    """The advantage of an episode is divided by its number of rows."""
    counts = {name: sum(row.episode == name for row in rows) for name in rows.rewards}
    return [replace(row, advantages=[one / counts[row.episode] for one in row.advantages]) for row in rows]


def trained_twice(rows):
    """The trunk of the fork, sampled tokens 30 to 44 of its second row."""
    row = rows[2]
    advantage, start, end = row.advantage, 30, 44
    twice = replace(
        row,
        loss_mask=[int(start <= at < end) or mask for at, mask in enumerate(row.loss_mask)],
        logprobs=[rows[1].logprobs[at] if start <= at < end else one for at, one in enumerate(row.logprobs)],
        advantages=[advantage if start <= at < end else one for at, one in enumerate(row.advantages)],
    )
    return [*rows[:2], twice, *rows[3:]]


def over_rows(rows):
    """The baseline counts rows, not episodes."""
    rewards = [rows.rewards[row.episode] for row in rows]
    mean = sum(rewards) / len(rewards)
    return [
        replace(row, advantages=[(reward - mean) * mask for mask in row.loss_mask])
        for row, reward in zip(rows, rewards, strict=True)
    ]


def shifted(rows):
    """Logprobs are those of the next token."""
    return [replace(row, logprobs=[*row.logprobs[1:], 0.0]) for row in rows]


def last_untrained(rows):
    """Of the last row, only the first sampled token is trained."""
    row = rows[-1]
    first = row.loss_mask.index(1)
    return [*rows[:-1], replace(row, loss_mask=[int(at == first) for at in range(len(row))])]


FAULTS = [divided, trained_twice, over_rows, shifted, last_untrained]


def planted(fault, made):
    """`training_rows`, with a fault in the rows that it makes."""

    def faulty(episodes, **options):
        rows = made(episodes, **options)
        return TrainingRows(fault(rows), rows.left_out, rows.flat_groups, rows.advantages, rows.rewards)

    return faulty
