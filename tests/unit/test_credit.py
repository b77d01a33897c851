"""Who gets which credit: each sampled token once, the episode's advantage undivided, the loss that was asked for."""

import asyncio
import copy
import json
import math
import pickle
import re
from array import array
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save as save_torch

from strands_env.core import Observation, RewardResult, StepResult
from strands_sglang import TerminationReason
from strands_sglang.credit import (
    Episode,
    RowsFileError,
    TrainingRows,
    group_advantages,
    losses,
    training_rows,
    version_number,
)
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.protocol.generation import Generation, VersionSpan
from strands_sglang.reasons import Reason
from support.agents import assistant, user
from support.histories import PLANS, Player
from support.recorder import Recorder

REWARDS = st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5, 0.3]), min_size=2, max_size=8)


def plain(turns=2):
    """One sequence of a few turns, of two sampled tokens each."""
    recorder = Recorder()
    history = []
    for number in range(turns):
        history += [user(f"q{number}")]
        recorder.call(history, f"a{number}")
        history += [assistant(f"a{number}")]
    return recorder.trajectory


def forked():
    """A first turn that two sequences continue, and an opening of its own: three sequences, eight sampled tokens."""
    recorder = Recorder()
    recorder.call([user("q")], "a")
    for question in ("r", "s"):
        recorder.call([user("q"), assistant("a"), user(question)], "b")
    recorder.call([user("summary of q")], "c")
    return recorder.trajectory


def versioned(*versions):
    """One turn for each version of the weights."""
    recorder = Recorder()
    history = []
    for number, version in enumerate(versions):
        history += [user(f"q{number}")]
        answer = Generation(
            output_ids=array("i", recorder.ids()),
            logprobs=array("d", [-0.5, -0.5]),
            finish_type="stop",
            weight_version=version,
            weight_versions=(VersionSpan(version, 0, 2),),
        )
        recorder.trajectory.answer(recorder.ask(history), answer, assistant(f"a{number}"))
        history += [assistant(f"a{number}")]
    return recorder.trajectory


def batch(*rewards, make=plain, group="g", **options):
    """Sibling episodes with these rewards."""
    return [Episode(make(), reward, group, id=f"{group}{i}", **options) for i, reward in enumerate(rewards)]


def test_every_row_has_the_whole_advantage():
    rows = training_rows([*batch(1.0, make=forked), *batch(0.0, 0.5, group="other"), Episode(plain(), 0.0, "g", "x")])
    assert [(row.episode, row.advantage) for row in rows] == [
        *[("g0", 0.5)] * 3,
        ("other0", -0.25),
        ("other1", 0.25),
        ("x", -0.5),
    ]
    assert [(row.trained, row.episode_trained) for row in rows][:3] == [(4, 8), (2, 8), (2, 8)]


def test_a_row_without_trained_tokens_is_left_out():
    recorder = Recorder()
    recorder.call([user("q")], "a")
    recorder.call([user("forced")], "b", constrained=True)
    rows = training_rows([Episode(recorder.trajectory, 1.0, "g"), *batch(0.0)])
    assert len(rows) == 2 and not rows.left_out
    assert all(row.trained for row in rows)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1 / 3, -2 / 3, 1 / 3]),
        ({"baseline": "leave_one_out"}, [0.5, -1.0, 0.5]),
        ({"normalize_std": True}, [0.57735, -1.1547, 0.57735]),
        ({"baseline": "leave_one_out", "normalize_std": True}, [0.86602, -1.73205, 0.86602]),
        ({"baseline": None}, [1.0, 0.0, 1.0]),
    ],
)
def test_baselines_are_over_episodes(options, expected):
    assert group_advantages([1.0, 0.0, 1.0], **options) == pytest.approx(expected, abs=1e-5)
    makers = (plain, forked, plain)
    siblings = [Episode(make(), reward, "g") for make, reward in zip(makers, [1.0, 0.0, 1.0], strict=True)]
    rows = training_rows(siblings, **options)
    assert [row.advantage for row in rows] == pytest.approx([expected[0], *[expected[1]] * 3, expected[2]], abs=1e-5)


@given(REWARDS, st.sampled_from(["mean", "leave_one_out"]), st.booleans(), st.randoms())
def test_group_advantages_are_centered(rewards, baseline, normalize_std, random):
    found = group_advantages(rewards, baseline=baseline, normalize_std=normalize_std)
    assert math.fsum(found) == pytest.approx(0.0, abs=1e-9)
    assert (len(set(rewards)) == 1) == (not any(found))
    order = random.sample(range(len(rewards)), len(rewards))
    shuffled = group_advantages([rewards[i] for i in order], baseline=baseline, normalize_std=normalize_std)
    assert shuffled == pytest.approx([found[i] for i in order])


def test_rounding_is_no_variance():
    assert group_advantages([0.3, 0.1 + 0.2], normalize_std=True) == [0.0, 0.0]


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = [1.0, 0.25, 3.0, -1.0]
    expected = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert group_advantages(rewards, baseline="leave_one_out") == pytest.approx(expected)


PLAIN = [plain() for _ in range(4)]


@pytest.mark.parametrize("options", [{}, {"normalize_std": True}, {"baseline": "leave_one_out"}, {"discount": 0.5}])
@given(rewards=st.lists(st.floats(), min_size=2, max_size=4), turn=st.floats())
def test_any_rewards_give_advantages_that_float32_holds(options, rewards, turn):
    given_turn = {0: turn} if options.get("discount") else {}
    made = [Episode(one, reward, "g", turn_rewards=given_turn) for one, reward in zip(PLAIN, rewards, strict=False)]
    rows = training_rows(made, **options)
    values = np.array([value for row in rows for value in row.advantages])
    assert np.isfinite(values.astype("float32") ** 2).all()
    assert {row.episode for row in rows} == {one.id for one in made} - rows.left_out.keys()


@pytest.mark.parametrize("reward", [1e308, math.inf, math.nan])
def test_rewards_without_finite_advantages_are_refused(reward):
    with pytest.raises(ValueError, match="rewards must be finite, and at most 1e.18 in size"):
        group_advantages([reward, reward])
    with pytest.raises(ValueError, match="discount=1.5 is not from 0 to 1"):
        training_rows([], discount=1.5)


def test_a_baseline_needs_siblings_and_std_a_baseline():
    with pytest.raises(ValueError, match="a group of one episode has no baseline"):
        group_advantages([1.0])
    with pytest.raises(ValueError, match="normalize_std needs a baseline"):
        group_advantages([1.0, 1.0], baseline=None, normalize_std=True)
    with pytest.raises(ValueError, match="baseline 'median' is not"):
        group_advantages([1.0, 0.0], baseline="median")


def test_rewards_per_turn_become_advantages_per_turn():
    first, second = plain(2), plain(2)
    rows = training_rows(
        [
            Episode(first, 1.0, "g", "a", turn_rewards={0: 0.5}),
            Episode(second, 0.0, "g", "b", turn_rewards={1: 0.25}),
        ],
        discount=0.5,
    )
    # Returns: a 0.5 + 0.5 * 1, 1; b 0 + 0.5 * 0.25, 0.25.
    assert rows.advantages == {"a": {0: 0.4375, 1: 0.375}, "b": {0: -0.4375, 1: -0.375}}
    assert rows[0].advantages == [0, 0, 0.4375, 0.4375, 0, 0, 0.375, 0.375]
    with pytest.raises(ValueError, match="the turns of episode a have different advantages"):
        rows[0].advantage  # noqa: B018


def test_a_shared_turn_has_one_advantage_in_all_rows():
    episode = Episode(forked(), 0.0, "g", "a", turn_rewards={1: 1.0, 2: 3.0})
    rows = training_rows([episode, *batch(0.0)])
    own = rows.advantages["a"]
    assert [set(row.advantages) - {0.0} for row in rows[:3]] == [{own[0], own[1]}, {own[2]}, set()]
    assert own[0] == 2.0  # the return 4 of all turns after it, less half of it


def test_a_helpers_turn_has_no_share_in_the_credit():
    def episode(reward, name, **options):
        recorder, history = Recorder(), []
        for number in range(3):
            history += [user(f"q{number}")]
            recorder.call(history, f"a{number}", auxiliary=number == 1)
            history += [assistant(f"a{number}")]
        return Episode(recorder.trajectory, reward, "g", name, **options)

    rows = training_rows([episode(1.0, "a"), episode(0.0, "b")], discount=0.5)
    assert rows.advantages["a"] == {0: 0.25, 2: 0.5}
    assert [sum(row.loss_mask) for row in rows] == [4, 4]
    with pytest.raises(ValueError, match="names turn 1, which is not part of the rollout"):
        training_rows([episode(1.0, "a", turn_rewards={1: 1.0}), episode(0.0, "b")])


def test_turn_rewards_must_name_turns_of_the_rollout():
    with pytest.raises(ValueError, match="turn_rewards of episode a names turn 7, which is not part of the rollout"):
        training_rows([Episode(plain(), 1.0, "g", "a", turn_rewards={7: 1.0}), *batch(0.0)])
    with pytest.raises(ValueError, match="names turn '0'"):  # as JSON has it
        training_rows([Episode(plain(), 1.0, "g", "a", turn_rewards={"0": 1.0, 7: 1.0}), *batch(0.0)])


def without_logprobs(value=None):
    recorder = Recorder()
    logprobs = None if value is None else array("d", [-0.5, value])
    answer = Generation(output_ids=array("i", [1, 2]), logprobs=logprobs, finish_type="stop")
    recorder.trajectory.answer(recorder.ask([user("q")]), answer, assistant("a"))
    return recorder.trajectory


def unsampled():
    recorder = Recorder()
    recorder.call([user("forced")], "b", constrained=True)
    return recorder.trajectory


def named(reward, trajectory=None, group="g", **options):
    """An episode with the id "x"."""
    return Episode(plain() if trajectory is None else trajectory, reward, group, "x", **options)


@pytest.mark.parametrize(
    ("episode", "reason", "in_baseline"),
    [
        (named(None), "no reward", False),
        (named(math.nan), "a reward is not finite", False),
        (named(1.0, turn_rewards={0: math.inf}), "a reward is not finite", False),
        (named(10**400), "a reward is not finite", False),
        (named(torch.tensor([math.nan])), "a reward is not finite", False),
        (named("1.0"), "a reward is not a number", False),
        (named(np.array(["1.0"])), "a reward is not a number", False),
        (named(np.ones(2)), "a reward is not a number", False),
        (named(torch.ones(2)), "a reward is not a number", False),
        (named(1.0, turn_rewards={0: None}), "a reward is not a number", False),
        (named(1e308, turn_rewards={0: -1e308}), "its rewards exceed 1e+18", False),
        (named(None, turn_rewards={0: 1.0}), "turn_rewards need a reward of the episode, which may be 0.0", False),
        (
            named(1.0, outcome=TerminationReason.INFRASTRUCTURE_ERROR),
            "the outcome infrastructure_error has no reward",
            False,
        ),
        (named(1.0, group="alone"), "the only episode of its group with a reward", False),
        (named(1.0, unsampled()), "no trained token", True),
        (named(1.0, without_logprobs()), "a trained token has no logprob", True),
        (named(1.0, without_logprobs(math.nan)), "a trained token has no logprob", True),
        (named(1.0, without_logprobs(-math.inf)), "a logprob is not finite", True),
        (named(1.0, plain(9)), "longer than max_tokens=30", True),
    ],
)
def test_what_cannot_be_trained_is_named_and_left_out(tmp_path, episode, reason, in_baseline):
    rows = training_rows([episode, *batch(0.0, 0.5)], max_tokens=30)
    rows.save(tmp_path / "rows.safetensors")
    assert str(rows.left_out["x"]) == reason and rows.counts == {reason: 1}
    assert [row.episode for row in rows] == ["g0", "g1"]
    assert [row.advantage for row in rows] == ([-0.5, 0.0] if in_baseline else [-0.25, 0.25])


def test_versions_are_per_token_and_stale_episodes_stay_out():
    episodes = [
        Episode(versioned(*versions), i, "g", str(i)) for i, versions in enumerate([("3", "4"), ("4", "5"), ("1",)])
    ]
    rows = training_rows(episodes, version=5, max_staleness=2)
    assert rows.left_out == {"2": Reason("too_old", detail=("2",))}
    assert [row.episode_version for row in rows] == [3, 4]
    assert rows[0].versions == [None, None, "3", "3", None, None, "4", "4"]
    named = training_rows([Episode(versioned("3", "main"), 1.0, "g", "a"), *episodes[:1]])
    assert [row.episode_version for row in named] == [None, 3]
    with pytest.raises(ValueError, match="needs integers as weight versions, but tokens of episode a have 'main'"):
        training_rows([Episode(versioned("main"), 1.0, "g", "a"), *batch(0.0)], version=1, max_staleness=0)
    with pytest.raises(ValueError, match="but tokens of episode a have 'main', none$"):
        mixed = versioned("3", "main")
        mixed.turns[0].generation = replace(mixed.turns[0].generation, weight_versions=())
        training_rows([Episode(mixed, 1.0, "g", "a"), *batch(0.0)], version=3, max_staleness=1)
    with pytest.raises(ValueError, match="max_staleness and version belong together"):
        training_rows(episodes, version=5)


def test_groups_without_variance_are_reported():
    episodes = [*batch(1.0, 1.0, group="flat"), *batch(1.0, 0.0)]
    rows = training_rows(episodes)
    assert rows.flat_groups == ["flat"] and len(rows) == 4
    rows = training_rows(episodes, skip_flat_groups=True)
    assert rows.counts == {"its group has no variance": 2} and [row.group for row in rows] == ["g", "g"]


def test_episodes_have_ids_of_their_own():
    with pytest.raises(ValueError, match="2 episodes have the id 'a'"):
        training_rows([Episode(plain(), 1.0, "g", "a"), Episode(plain(), 1.0, "g", "a")])
    assert len({episode.id for episode in (Episode(plain(), 1.0, "g"), Episode(plain(), 1.0, "g"))}) == 2


def test_one_trajectory_is_trained_in_one_episode():
    shared = plain()  # one model for several episodes, without a reset
    siblings = [Episode(shared, 1.0, "g", "a"), Episode(shared, 0.0, "g", "b")]
    with pytest.raises(ValueError, match="episodes 'a' and 'b' have one trajectory, .* call `model.reset"):
        training_rows(siblings)
    rows = training_rows([siblings[0], replace(siblings[1], reward=None), *batch(0.0)])
    assert [row.episode for row in rows] == ["a", "g0"]


def test_batches_are_joined_episode_by_episode():
    first, second = (
        training_rows([Episode(plain(), reward, group, f"{group}{reward}") for reward in (0.0, 1.0, None)])
        for group in "ab"
    )
    joined = TrainingRows.joined([first, second])
    assert [row.episode for row in joined] == ["a0.0", "a1.0", "b0.0", "b1.0"]
    assert joined.left_out == {"aNone": Reason("no_reward"), "bNone": Reason("no_reward")}
    with pytest.raises(ValueError, match="2 batches have an episode with the id 'a[01].0'"):
        TrainingRows.joined([first, first])


def test_an_empty_batch_has_no_rows():
    rows = training_rows([])
    assert (list(rows), rows.left_out, rows.flat_groups, rows.weights("token_mean", "trl:dapo")) == ([], {}, [], [])


# How the published losses reduce the tokens' terms; docs/understand/credit.md names the sources.


def trainer_loss(loss, terms, rows, *, fillers=0, micro_batches=None, max_length=None):
    """Reduce one number per row, the sum over its trained tokens, the way a trainer does."""
    sizes = [row.trained for row in rows]
    size = len(rows) + fillers
    if loss in ("trl:async_grpo", "trl:bnpo"):
        means = [sum(terms[i] for i in one) / sum(sizes[i] for i in one) for one in micro_batches]
        return sum(means) / len(means)
    if loss in ("trl:grpo", "verl:seq-mean-token-mean", "skyrl:sequence_mean", "tinker:skyrl:weights"):
        return sum(term / n for term, n in zip(terms, sizes, strict=True)) / size
    if loss in ("trl:dr_grpo", "skyrl:seq_mean_token_sum_norm"):
        return sum(terms) / size / max_length
    if loss == "tinker:skyrl":
        return sum(term / (len(row) - 1) for term, row in zip(terms, rows, strict=True)) / size
    if loss == "slime":
        rollouts = len({row.episode for row in rows}) + len(rows.left_out)  # slime counts those that it removes
        return sum(term / row.episode_trained for term, row in zip(terms, rows, strict=True)) / rollouts
    if loss in ("tinker", "verl:token-sum"):
        return sum(terms)
    return sum(terms) / (size if loss == "verl:seq-mean-token-sum" else sum(sizes))


def wanted_loss(normalizer, terms, rows, constant):
    """The loss of the docs' mathematics, from the same terms."""
    totals = Counter()
    for term, row in zip(terms, rows, strict=True):
        totals[row.episode] += term
    lengths = {row.episode: row.episode_trained for row in rows}
    divisors = {"episode_mean": lengths, "constant": dict.fromkeys(lengths, constant)}
    if normalizer == "token_mean":
        return sum(totals.values()) / sum(lengths.values())
    return sum(total / divisors[normalizer][name] for name, total in totals.items()) / len(lengths)


@pytest.fixture(scope="module")
def many_rows():
    longer = [Episode(plain(4), reward, "i") for reward in (0.0, 1.0, None)]
    rows = training_rows([*batch(1.0, 0.0, make=forked), *batch(0.3, 0.9, 0.1, group="h"), *longer])
    assert len(rows.left_out) == 1
    return rows


@pytest.mark.parametrize("normalizer", ["episode_mean", "token_mean", "constant"])
@pytest.mark.parametrize("loss", losses())
def test_weights_make_a_trainers_loss_the_wanted_one(many_rows, loss, normalizer):
    rows = many_rows
    options = {"fillers": 2, "micro_batches": [[0, 3, 5], [1, 2], list(range(6, len(rows))), [4]], "max_length": 77}
    terms = [Fraction(number * number + 1, 7) for number in range(len(rows))]
    weights = rows.weights(normalizer, loss, constant=64, **options)
    assert all(weight > 0 for weight in weights)
    weighted = [term * Fraction(weight) for term, weight in zip(terms, weights, strict=True)]
    assert float(trainer_loss(loss, weighted, rows, **options)) == pytest.approx(
        float(wanted_loss(normalizer, terms, rows, 64)), rel=1e-12
    )


def test_weights_are_one_where_the_loss_is_already_exact():
    rows = training_rows([*batch(1.0, make=forked), Episode(plain(), 0.0, "g", "b")])
    for normalizer, loss in (("token_mean", "trl:dapo"), ("token_mean", "verl:token-mean"), ("episode_mean", "slime")):
        assert rows.weights(normalizer, loss) == pytest.approx([1.0] * len(rows))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("token_mean", "trl:ppo"), {}, "loss 'trl:ppo' is not one of"),
        (("median", "trl:dapo"), {}, "normalizer 'median' is not one of"),
        (("constant", "trl:dapo"), {}, "needs constant="),
        (("token_mean", "trl:bnpo"), {}, "normalizes each micro-batch: pass micro_batches="),
        (("token_mean", "trl:bnpo"), {"micro_batches": [[0]]}, "must hold each of the 2 rows once"),
        (("token_mean", "trl:dr_grpo"), {}, "divides by a fixed length: pass max_length="),
    ],
)
def test_weights_say_what_they_lack(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        training_rows(batch(1.0, 0.0)).weights(*arguments, **options)


def test_a_step_result_is_an_episode():
    trajectory = plain()
    result = StepResult(
        observation=Observation(trajectory=trajectory),
        reward=RewardResult(reward=0.5),
        termination_reason=TerminationReason.TASK_COMPLETE,
    )
    episode = result.episode("g", id="a", turn_rewards={0: 1.0})
    assert (episode.trajectory, episode.reward, episode.group, episode.id) == (trajectory, 0.5, "g", "a")
    assert training_rows([episode, *batch(0.0)]).advantages["a"] == {0: 0.75, 1: 0.25}
    failed = result.model_copy(update={"reward": None, "termination_reason": TerminationReason.AGENT_ERROR})
    assert training_rows([failed.episode("g")]).counts == {"the outcome agent_error has no reward": 1}
    with pytest.raises(ValueError, match="its model records no tokens"):
        StepResult(observation=Observation(), termination_reason=TerminationReason.TIMEOUT).episode("g")


def facts(rows):
    """Everything that a file of rows holds, floats as they are printed: NaN equals itself."""
    own = [
        {name: getattr(row, name) for name in row.__dataclass_fields__ if name != "tokens"}
        | {"segments": [(part.token_ids, part.loss_mask, part.finish_reason) for part in row.tokens.segments]}
        for row in rows
    ]
    return repr((own, rows.left_out, rows.flat_groups, rows.advantages, rows.rewards))


def check_trained_once(trajectory):
    """Require that the rows of an episode hold its exported sequences, and train their sampled tokens only."""
    rows = training_rows([Episode(trajectory, 1.0, "g", "a"), *batch(0.0)])
    own = [row for row in rows if row.episode == "a"]
    exported = [tokens for tokens in trajectory.sequences() if any(tokens.loss_mask)]
    assert [row.token_ids for row in own] == [tokens.token_ids for tokens in exported] or "a" in rows.left_out
    assert sum(row.trained for row in own) in (0, sum(sum(tokens.loss_mask) for tokens in exported))
    for row in own:
        assert row.trained == sum(row.loss_mask) > 0 and row.episode_trained == sum(one.trained for one in own)
        assert len(row) == len(row.token_ids) == len(row.versions) == len(row.tokens)
        assert row.advantages == [0.5 * mask for mask in row.loss_mask]
        known = zip(row.tokens.logprobs, row.loss_mask, strict=True)
        assert row.logprobs == [value if mask else 0.0 for value, mask in known]


@given(PLANS, st.floats(allow_nan=False, allow_infinity=False), st.booleans())
@settings(max_examples=100, database=None)
def test_any_history_is_trained_once_and_its_saved_rows_are_bit_equal(
    chatml_tokenizer, tmp_path_factory, plan, reward, is_trained
):
    folder = tmp_path_factory.mktemp("rows")
    player = Player(chatml_tokenizer, folder)
    asyncio.run(player.play(plan))
    trajectory = player.model.trajectory
    check_trained_once(trajectory)
    rows = training_rows(
        [
            Episode(trajectory, reward, ("g", 1, None), "ä"),
            *batch(0.1, group=("g", 1, None), make=forked),
            *batch(0.1, 1 / 3, group="versions", make=lambda: versioned("3", "default", "4")),
            *batch(1.0, 1.0, group=7),
            Episode(plain(), None, 7),
        ]
    )
    if is_trained:
        trained = [replace(row, trainer_logprobs=[-reward / 3] * len(row), loss_weight=1 / 3) for row in rows]
        rows = TrainingRows(trained, rows.left_out, rows.flat_groups, rows.advantages, rows.rewards)
    rows.save(folder / "rows.safetensors")
    assert facts(TrainingRows.load(folder / "rows.safetensors")) == facts(rows)


def test_a_row_knows_the_turns_of_its_tokens():
    [first, *_, last] = training_rows(batch(1.0, 0.0, make=forked))
    assert [tuple(span) for span in first.spans] == [(0, 2, 2, "stop"), (1, 2, 2, "stop")]
    assert [span.turn for span in last.spans] == [3]


def test_a_batch_without_rows_is_saved_too(tmp_path):
    rows = training_rows(batch(None, None))
    rows.save(tmp_path / "rows.safetensors")
    loaded = TrainingRows.load(tmp_path / "rows.safetensors")
    assert len(loaded) == 0 and loaded.left_out == rows.left_out
    assert loaded.settings == rows.settings and loaded.episodes == rows.episodes


def change_rows(path, change):
    """Change the tensors and the description of a file, which then has an earlier version, without a checksum."""
    tensors = load_file(path)
    description = json.loads(tensors["description"].tobytes())
    change(tensors, description)
    tensors["description"] = np.frombuffer(json.dumps(description).encode(), "uint8")
    save_file(tensors, path, {"format": "strands-sglang training rows", "version": "2"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda known: known["left_out"].update(c=["no_rewart", None, None, []]), "'no_rewart'.* is not a reason"),
        (lambda known: known["left_out"].update(c=["forks", "x", {}, "ab"]), "is not a reason that this release knows"),
        (lambda known: known.update(left_out=[]), r"TrainingRows.left_out is \[\]"),
        (lambda known: known.update(flat_groups="g"), "TrainingRows.flat_groups is 'g'"),
        (lambda known: known.update(flat_groups=[{}]), r"TrainingRows.flat_groups is \[{}\]"),
        (lambda known: known["rewards"].update(g0="high"), "TrainingRows.rewards is {'g0': 'high'"),
        (lambda known: known["advantages"].update(g0={"0": None}), "TrainingRows.advantages is {'g0': {'0': None}"),
        (lambda known: known.update(settings=None), "TrainingRows.settings is None"),
        (lambda known: known["episodes"]["g0"].update(reward="1"), "Episode.reward is '1'"),
        (lambda known: known["episodes"]["g0"].update(turn_rewards=[1]), r"Episode.turn_rewards is \[1\]"),
        (lambda known: known["episodes"]["g0"].update(group={}), "Episode.group is {}"),
        (lambda known: known["episodes"]["g0"].update(outcome="done"), "'done' is not a valid TerminationReason"),
        (lambda known: known["rows"][1].update(prompt_length="2"), "row 1: TrainingRow.prompt_length is '2'"),
        (lambda known: known["rows"][1].update(episode=7), "row 1: TrainingRow.episode is 7"),
        (lambda known: known["rows"][1].update(spans=[[0, 2, 2.5, "stop"]]), r"row 1: TrainingRow.spans is \[\[0, 2"),
        (lambda known: known["rows"][1].update(spams=[]), "spams"),
        (lambda known: known.update(versions=[3]), r"TrainingRow.versions is \[3\]"),
    ],
)
def test_a_description_of_wrong_types_is_refused(tmp_path, change, told):
    path = tmp_path / "rows.safetensors"
    training_rows(batch(1.0, 0.0)).save(path)
    change_rows(path, lambda tensors, known: change(known))
    with pytest.raises(RowsFileError, match=f"^{re.escape(str(path))}: damaged: .*{told}"):
        TrainingRows.load(path)


def test_rows_of_an_earlier_release_are_read(tmp_path):
    path = tmp_path / "rows.safetensors"
    rows = training_rows([*batch(1.0, 0.0, make=forked, group=("g", 1)), Episode(plain(), None, "h", "a")])
    rows.save(path)
    change_rows(path, lambda tensors, known: known.update(left_out={"a": "no reward"}))
    loaded = TrainingRows.load(path)
    assert facts(loaded) == facts(rows) and not loaded.is_changed
    assert loaded.episodes == rows.episodes


def test_changed_rows_are_only_shown(tmp_path):
    path = tmp_path / "step" / "rows.safetensors"
    path.parent.mkdir()
    rows = training_rows(batch(1.0, 0.0))
    rows.save(path)
    path.write_bytes(path.read_bytes().replace(b'"normalize_std": false', b'"normalize_std" :false'))
    with pytest.raises(RowsFileError, match=r"rows\.safetensors: changed since it was written"):
        TrainingRows.load(path)
    shown = TrainingRows.load(path, changed_too=True)
    assert shown.is_changed and facts(shown) == facts(rows)
    for kept in (
        shown,
        TrainingRows.joined([shown]),
        replace(shown),
        copy.copy(shown),
        pickle.loads(pickle.dumps(shown)),
    ):
        with pytest.raises(RowsFileError, match="read from a file that was changed"):
            kept.save(path)
    assert [(one.kind, one.file) for one in findings(read([path.parent]))] == [("changed", str(path))]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content[:-7], "not a safetensors file, or truncated"),
        (lambda content: b"{}", "not a safetensors file"),
        (
            lambda content: save_torch({"weight": torch.zeros(2, dtype=torch.bfloat16)}),
            "not 'strands-sglang training rows'",
        ),
        (lambda content: content.replace(b'"version":"3"', b'"version":"9"'), "version '9', not"),
        (lambda content: plain().to_bytes(), "'strands-sglang trajectory'"),
        (lambda content: content.replace(b'"spans"', b'"spams"', 1), "changed since"),
    ],
    ids=["torn", "foreign", "weights", "newer", "a trajectory", "mixed up"],
)
def test_a_file_without_rows_is_named(tmp_path, change, told):
    path = tmp_path / "rows.safetensors"
    training_rows(batch(1.0, 0.0)).save(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RowsFileError, match=f"rows.safetensors: .*{told}"):
        TrainingRows.load(path)


def test_a_file_of_rows_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="rows.safetensors"):
        TrainingRows.load(tmp_path / "rows.safetensors")


@pytest.mark.parametrize(("column", "value"), [("loss_mask", 2), ("versions", -2)])
def test_a_file_with_impossible_values_is_named(tmp_path, column, value):
    path = tmp_path / "rows.safetensors"
    training_rows(batch(1.0, 0.0)).save(path)
    change_rows(path, lambda tensors, known: tensors[column].put(1, value))
    with pytest.raises(RowsFileError, match="a loss mask is not 0 or 1, or a version is below -1"):
        TrainingRows.load(path)


def one_in(library):
    return lambda value: library([value])


@pytest.mark.parametrize("number", [np.float32, np.int64, torch.tensor, one_in(np.array), one_in(torch.tensor)])
def test_rewards_may_be_numbers_of_other_libraries(tmp_path, number):
    rows = training_rows([*batch(number(1)), *batch(number(0), group="other")], baseline=None)
    turns = training_rows([Episode(plain(), 0.0, "g", "a", turn_rewards={0: number(1)})], baseline=None)
    for place, made in enumerate((rows, turns)):
        made.save(tmp_path / str(place))
        loaded = TrainingRows.load(tmp_path / str(place))
        assert type(made[0].advantages[2]) is float and loaded[0].advantages == made[0].advantages
        assert loaded.advantages == made.advantages and loaded.rewards == made.rewards
    assert [type(value) for value in group_advantages([number(1), number(0)], baseline=None)] == [float, float]
    assert group_advantages([number(1), number(0)], normalize_std=True) == group_advantages([1, 0], normalize_std=True)


@pytest.mark.parametrize("number", [np.float32, np.int64, torch.tensor])
def test_settings_may_be_numbers_of_other_libraries(tmp_path, number):
    given = {name: number(value) for name, value in {"discount": 1, "max_tokens": 9, "version": 3}.items()}
    episodes = batch(1.0, 0.0, make=lambda: versioned("3", "3"))
    rows = training_rows(episodes, **given, max_staleness=number(0), normalize_std=np.bool_(True))
    rows.save(tmp_path / "rows.safetensors")
    loaded = TrainingRows.load(tmp_path / "rows.safetensors")
    assert loaded.settings == rows.settings and rows.settings.items() >= given.items()
    assert type(rows[0].advantages[2]) is float and loaded[0].advantages == rows[0].advantages


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "versions", "advantages", "trainer_logprobs"])
def test_a_column_of_another_length_is_not_saved(tmp_path, name):
    rows = list(training_rows(batch(1.0, 0.0)))
    column = getattr(rows[1], name) or [0.0] * len(rows[1])
    shorter = TrainingRows([rows[0], replace(rows[1], **{name: column[:-1]})], {}, [], {}, {})
    with pytest.raises(ValueError, match=f"row 1, of episode g1, has 8 tokens, but 7 {name}"):
        shorter.save(tmp_path / "rows.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", [np.int64(3), np.float64(3.0), np.bool_(True), (np.int64(3), "a")])
def test_groups_of_numpy_are_saved(tmp_path, group):
    training_rows(batch(1.0, 0.0, group=group)).save(tmp_path / "rows.safetensors")
    assert {row.group for row in TrainingRows.load(tmp_path / "rows.safetensors")} == {group}


def test_a_group_that_is_no_data_is_refused(tmp_path):
    with pytest.raises(TypeError, match="the group <object .*> cannot be saved"):
        training_rows(batch(1.0, 0.0, group=object())).save(tmp_path / "rows.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("version", "number"), [("default", 0), ("3", 3), ("v3", None), (None, None)])
def test_versions_of_the_weights_count_from_the_servers_default(version, number):
    assert version_number(version) == number


def test_an_outcome_may_be_the_text_that_files_have():
    assert Episode(plain(), 1.0, "g", outcome="infrastructure_error").outcome is TerminationReason.INFRASTRUCTURE_ERROR
    with pytest.raises(ValueError, match="'tired' is not a valid TerminationReason"):
        Episode(plain(), 1.0, "g", outcome="tired")


@pytest.mark.parametrize("name", [7, None, b"e"])
def test_an_id_that_is_no_string_is_refused(name):
    with pytest.raises(TypeError, match=re.escape(f"the id of an episode must be a string, not {name!r}")):
        Episode(plain(), 1.0, "g", name)


def test_a_group_that_cannot_be_a_key_is_refused():
    with pytest.raises(TypeError, match=r"episode 'e' has the group \['a', 1\]; use a hashable value"):
        Episode(plain(), 1.0, ["a", 1], "e")
