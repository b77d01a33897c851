"""Trees of episodes: each sampled token trained once, values without bias, and where to fork."""

import importlib.util
import pickle
import random
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from strands import tool

from strands_env.core import Action, Environment, has_effect
from strands_sglang import SGLangModel, TerminationReason, Trajectory
from strands_sglang.credit import Episode, TrainingRows, training_rows
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.reasons import Reason
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trees import at_high_entropy, evenly
from support.agents import assistant, call, user
from support.environments import Contains
from support.recorder import Recorder

STUDY = Path(__file__).parents[2] / "examples" / "grpo_cpu" / "tree_values.py"
SPEC = importlib.util.spec_from_file_location("tree_values", STUDY)
study = sys.modules["tree_values"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(study)

rows_of = partial(training_rows, baseline="leave_one_out")


def sampled(*actions, fork_of=None):
    """An episode with these actions; a fork shares the first ones, as many as are equal but the last."""
    if fork_of is None:
        return study.Sampled([*actions], [answer(action) for action in actions])
    source, turn = fork_of
    kept = source.answers[:turn]
    return study.Sampled([*actions], [*kept, *map(answer, actions[turn:])], turn)


def answer(action):
    once = study.sample(random.Random(0)).answers[0]
    return replace(once, output_ids=type(once.output_ids)("i", [action]), request_id=f"request {next(study._requests)}")


def episodes(*branches, group="g"):
    """Episodes of pairs of a sampled episode and a reward, named by their place."""
    return [Episode(one.trajectory, reward, group, f"{group}{n}") for n, (one, reward) in enumerate(branches)]


def tree():
    """An episode of two turns, three forks of it from before the second one, and another episode."""
    first = sampled(1, 1)
    forks = [sampled(1, action, fork_of=(first, 1)) for action in (0, 1, 1)]
    return episodes((first, 1.0), *zip(forks, (0.0, 1.0, 1.0), strict=True), (sampled(0, 0), 0.0))


def trained_once(rows, made):
    """Whether each sampled token of the episodes' turns has loss mask 1 in exactly one row."""
    trained = Counter()
    for row in rows:
        trajectory = next(one.trajectory for one in made if one.id == row.episode)
        requests = {turn.index: turn.generation.request_id for turn in trajectory.turns}
        at = 0
        for span in row.spans:
            at += span.prompt_tokens
            for place, mask in enumerate(row.loss_mask[at : at + span.sampled_tokens]):
                trained[requests[span.turn], place] += mask
            at += span.sampled_tokens
    every = {
        (turn.generation.request_id, place)
        for one in made
        for turn in one.trajectory.turns
        for place in range(len(turn.output_ids))
    }
    return trained == dict.fromkeys(every, 1)


def test_a_turn_is_worth_what_its_forks_are_and_compared_with_its_siblings():
    made = tree()
    rows = rows_of(made)
    assert trained_once(rows, made)
    assert rows.advantages == {
        "g0": {0: pytest.approx(2 / 3), 1: pytest.approx(1 / 3)},  # 2/3 is the forks' mean
        "g1": {0: pytest.approx(2 / 3), 1: -1.0},
        "g2": {0: pytest.approx(2 / 3), 1: 0.5},
        "g3": {0: pytest.approx(2 / 3), 1: 0.5},
        "g4": {0: -1.0, 1: -1.0},
    }
    assert [row.loss_mask for row in rows] == [[0, 1, 0, 1], *[[0, 0, 0, 1]] * 3, [0, 1, 0, 1]]
    assert [row.advantages[1] for row in rows] == [pytest.approx(2 / 3), 0, 0, 0, -1.0]
    assert rows.rewards == {"g0": 1.0, "g1": 0.0, "g2": 1.0, "g3": 1.0, "g4": 0.0}


def test_rewards_of_turns_and_a_discount_count_up_to_the_next_fork():
    first = sampled(1, 1, 1)
    forks = [sampled(1, 1, 0, fork_of=(first, 2)) for _ in range(2)]
    branches = [(first, 1.0), (forks[0], 0.0), (forks[1], 0.5), (sampled(0, 0), 0.0)]
    made = [replace(one, turn_rewards={0: 0.25, 1: 0.5}) for one in episodes(*branches)]
    rows = rows_of(made, discount=0.5)
    other = {0: 0.25 + 0.5 * 0.5, 1: 0.5}
    value = (0.0 + 0.5) / 2
    second = 0.5 + 0.5 * value
    assert rows.advantages["g0"] == {0: 0.25 + 0.5 * second - other[0], 1: second - other[1], 2: 1.0 - value}
    assert rows.advantages["g1"][2] == -0.5


@pytest.mark.parametrize("options", [{}, {"normalize_std": True}, {"baseline": None}, {"baseline": "leave_one_out"}])
def test_turns_without_forks_are_compared_as_in_a_flat_group(options):
    first = sampled(1, 1)
    made = episodes((first, 1.0), (sampled(0, 0), 0.0), (sampled(1, 0, 1), 0.3))
    fork = Episode(sampled(1, 0, fork_of=(first, 1)).trajectory, 0.7, "g", "fork")
    flat, forked = training_rows(made, **options), training_rows([*made, fork], **options)
    assert forked.advantages["g1"] == flat.advantages["g1"] and forked.advantages["g2"] == flat.advantages["g2"]
    assert forked.advantages["g0"] != flat.advantages["g0"]


@st.composite
def forests(draw):
    """Trees of one to three episodes, with forks of forks at any turn."""
    made = [sampled(*draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))) for _ in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 6))):
        source = draw(st.sampled_from(made))
        turn = draw(st.integers(0, len(source.actions) - 1))
        own = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        made.append(sampled(*source.actions[:turn], *own, fork_of=(source, turn)))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, None]), min_size=len(made), max_size=len(made)))
    return episodes(*zip(made, rewards, strict=True))


@given(forests(), st.sampled_from(["mean", "leave_one_out", None]), st.booleans(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_each_sampled_token_of_any_tree_is_trained_once(made, baseline, normalize_std, rng):
    if rng.random() < 0.3:
        rng.shuffle(made)  # the order of forks matters for values only
    rows = training_rows(made, baseline=baseline, normalize_std=normalize_std and baseline is not None)
    kept = [one for one in made if one.id not in rows.left_out or str(rows.left_out[one.id]) == "no trained token"]
    assert trained_once(rows, kept)
    for row in rows:
        own = rows.advantages[row.episode]
        for span, value in zip(row.spans, row.advantages[1::2], strict=True):
            assert value in (0.0, own[span.turn])
    shared = {}
    for one in made:
        for turn in one.trajectory.turns if one.id in rows.advantages else ():
            value = rows.advantages[one.id][turn.index]
            assert shared.setdefault(turn.generation.request_id, value) == pytest.approx(value)  # the same in each copy


@pytest.mark.parametrize("normalizer", ["token_mean", "episode_mean"])
def test_the_gradient_is_that_of_each_sampled_token_once(normalizer):
    """The judge computes each turn by itself, from its conversation."""
    first = sampled(1, 1, 1)
    forks = [sampled(1, 0, 1, fork_of=(first, 1)), sampled(1, 1, fork_of=(first, 1))]
    deeper = sampled(1, 0, 0, fork_of=(forks[0], 2))
    branches = [(first, 1.0), (forks[0], 0.0), (forks[1], 1.0), (deeper, 0.3), (sampled(0, 1, 1), 0.0)]
    made = episodes(*branches)
    rows = rows_of(made)
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Embedding(3, 8), torch.nn.GRU(8, 8), torch.nn.Linear(8, 3)]).double()

    def logprob(ids):
        hidden, _ = model[1](model[0](torch.tensor(ids)))
        return torch.log_softmax(model[2](hidden[:-1]), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    loss = 0.0
    for row, weight in zip(rows, rows.weights(normalizer, "tinker"), strict=True):
        loss = loss - weight * (logprob(row.token_ids) * torch.tensor(row.advantages[1:])).sum()
    found = gradient(loss)
    own = {one.id: sum(row.trained for row in rows if row.episode == one.id) for one in made}
    loss, seen = 0.0, set()
    for one in made:
        for turn in one.trajectory.turns:
            request = turn.generation.request_id
            if request not in seen:
                seen.add(request)
                weight = 1 / sum(own.values()) if normalizer == "token_mean" else 1 / (len(made) * own[one.id])
                loss = loss - weight * rows.advantages[one.id][turn.index] * logprob(turn.token_ids())[-1]
    for left, right in zip(found, gradient(loss), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("policy", [evenly, at_high_entropy])
def test_values_have_no_bias_however_the_turn_is_chosen(policy):
    found = study.study(study.Design(4, policy), runs=1000, seed=0)
    for kind in study.KINDS:
        assert found.turns[kind] > 1000
        assert abs(found.standard_errors(kind)) < 3, kind
    # Where the turn is chosen by what it sampled, the episode's own return has a bias, and must not count.
    assert (study.in_standard_errors(found.with_source) < -3) == (policy is at_high_entropy)


def test_the_study_prints_bias_and_variance(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tree_values.py", "--runs", "5"])
    study.main()
    printed = capsys.readouterr().out
    assert printed.count("squared error of an advantage, by sampled token") == len(study.DESIGNS)


# --- input that is not as one would wish ---


def test_a_fork_without_a_reward_has_no_part_in_values():
    made = tree()
    made[1] = replace(made[1], reward=None)
    made[3] = replace(made[3], outcome=TerminationReason.INFRASTRUCTURE_ERROR)
    rows = rows_of(made)
    assert rows.left_out.keys() == {"g1", "g3"}
    assert rows.advantages["g0"] == {0: 1.0, 1: 0.0}
    assert rows.advantages["g2"] == {0: 1.0, 1: 0.0}  # no other fork: compared with the episode


def test_forks_of_an_episode_without_a_reward_train_its_turns():
    made = tree()
    made[0] = replace(made[0], reward=None)
    made.append(Episode(sampled(1, 0).trajectory, 0.5, "g", "g5"))
    rows = rows_of(made)
    assert rows[0].loss_mask == [0, 1, 0, 1] and [row.episode for row in rows] == ["g1", "g2", "g3", "g4", "g5"]
    assert rows.advantages["g1"] == {0: pytest.approx(2 / 3 - 0.25), 1: -1.0}
    assert trained_once(rows, made[1:])


def test_one_tree_has_nothing_to_compare_its_first_turns_with():
    first, *forks, _ = tree()
    rows = rows_of([first, *forks])
    assert rows.advantages["g0"] == {0: 0.0, 1: pytest.approx(1 / 3)}
    assert rows_of([first]).left_out == {"g0": Reason("only_scored")}
    rows = rows_of([first, forks[0]])
    assert rows.advantages == {"g0": {0: 0.0, 1: 1.0}, "g1": {0: 0.0, 1: -1.0}}


def test_equal_returns_train_nothing():
    made = [replace(one, reward=0.1 + 0.2) for one in tree()]
    rows = training_rows(made, normalize_std=True)
    assert rows.flat_groups == ["g"] and not any(any(row.advantages) for row in rows)
    assert len(training_rows(made, skip_flat_groups=True)) == 0


def test_episodes_of_other_trees_and_groups_share_nothing():
    made = [*tree(), *(replace(one, id=f"h{n}", group="h") for n, one in enumerate(tree()))]
    rows = rows_of(made)
    assert trained_once(rows, made)
    assert [*rows.advantages["g0"].values()] == [*rows.advantages["h0"].values()]
    source = study.Sampled([1, 1], [turn.generation for turn in made[0].trajectory.turns])
    moved = Episode(sampled(1, 0, fork_of=(source, 1)).trajectory, 1.0, "h", "moved")
    rows = rows_of([*made, moved])
    assert rows[-1].loss_mask == [0, 0, 0, 1]  # of another group, and still trained once


def test_a_row_that_is_too_long_leaves_its_turns_to_the_forks():
    first = sampled(1, 1, 1, 1)
    made = episodes((first, 1.0), (sampled(1, 0, fork_of=(first, 1)), 0.0), (sampled(0, 0), 0.0))
    rows = rows_of(made, max_tokens=6)
    assert rows.left_out.keys() == {"g0"} and [row.loss_mask for row in rows] == [[0, 1, 0, 1]] * 2


def test_copies_through_files_and_pickles_are_known(tmp_path):
    made = [replace(one, trajectory=pickle.loads(pickle.dumps(one.trajectory))) for one in tree()]
    rows = rows_of(made)
    assert trained_once(rows, made) and rows.advantages == rows_of(tree()).advantages
    rows.save(tmp_path / "rows.safetensors")
    assert [row.loss_mask for row in TrainingRows.load(tmp_path / "rows.safetensors")] == [r.loss_mask for r in rows]


def test_the_doctor_finds_nothing_wrong_with_a_tree_but_a_token_that_two_rows_train(tmp_path):
    made = tree()
    rows = rows_of(made)
    for one in made:
        (tmp_path / "trajectories").mkdir(exist_ok=True)
        one.trajectory.save(tmp_path / "trajectories" / f"{one.id}.safetensors")
    rows.save(tmp_path / "rows.safetensors")
    assert findings(read([tmp_path])) == []
    rows.rows[1] = replace(rows[1], loss_mask=[0, 1, 0, 1], logprobs=rows[0].logprobs, trained=2)
    rows.save(tmp_path / "rows.safetensors")
    assert "trained-twice" in {found.kind for found in findings(read([tmp_path]))}


# --- where to fork ---


def conversation():
    """Six turns of an agent, one of which is discarded, a helper's turn, and one of a sub-agent."""
    recorder, history = Recorder(), []
    for number in range(6):
        history += [user(f"q{number}")]
        recorder.call(history, f"a{number}", agent="main")
        history += [assistant(f"a{number}")]
    recorder.call([user("summary")], "s", auxiliary=True)
    recorder.call([user("sub")], "b", agent="sub")
    recorder.trajectory.throw_away([recorder.trajectory.turns[5]], Reason("first"))
    return recorder.trajectory


@pytest.mark.parametrize(("n", "turns"), [(1, [3]), (2, [2, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4]), (0, [])])
def test_forks_are_spread_evenly(n, turns):
    assert evenly(conversation(), n) == turns


def test_forks_are_where_the_model_was_least_sure():
    trajectory = conversation()
    for turn, logprob in zip(trajectory.turns, (-9, -1, -3, -2, None, -9, -9, -9), strict=True):
        column = None if logprob is None else type(turn.generation.logprobs)("d", [logprob, logprob])
        turn.generation = replace(turn.generation, logprobs=column)
    assert at_high_entropy(trajectory, 2) == [2, 3]
    assert at_high_entropy(trajectory, 9) == [1, 2, 3, 4]


@pytest.mark.parametrize("policy", [evenly, at_high_entropy])
def test_an_episode_of_one_turn_has_no_turn_to_fork_at(policy):
    assert policy(sampled(1).trajectory, 2) == policy(Trajectory(), 2) == []


@has_effect("pure")
@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


class Doubling(Environment):
    def get_tools(self):
        return [double]


async def test_forks_of_an_environment_are_one_tree(chatml_tokenizer, tmp_path):
    answers = iter([call("double", number=2), call("double", number=4), "done", "done", "no", call("double", number=5)])
    server = ScriptedSGLang(chatml_tokenizer, lambda request: next(answers, "done"))
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    environment = Doubling(lambda: model, Contains(), journal=tmp_path)
    results = [await environment.step(Action(message="Double 2 twice.", task_context={"ground_truth": "done"}))]
    (turn,) = at_high_entropy(results[0].observation.trajectory, 1)
    results += await environment.fork(results[0], turn, 2)
    results += await environment.fork(results[1], evenly(results[1].observation.trajectory, 1)[0], 1)
    made = [result.episode("g", id=str(place)) for place, result in enumerate(results)]
    rows = rows_of(made)
    assert trained_once(rows, made)
    assert len({turn.generation.request_id for one in made for turn in one.trajectory.turns}) == len(server.requests)
