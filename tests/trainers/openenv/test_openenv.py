"""OpenEnv's own trace takes our episodes, trains each sampled token once, and gives the same rows back."""

import json
from dataclasses import replace

import numpy as np
import pytest
from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
from openenv.core.harness.training import TrainingTrace, TrainingTurn

from strands_sglang import TerminationReason, Trajectory
from strands_sglang.credit import Episode, training_rows
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trainers.openenv import from_trace, to_trace
from strands_sglang.viewer import render
from support.agents import assistant, build_chatml_tokenizer, call, user
from support.recorder import Recorder
from trainers import guides

COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions", "advantages", "trained", "episode_trained", "episode")


def columns(rows):
    return [{name: getattr(row, name) for name in COLUMNS} for row in rows]


def through_json(trace):
    return TrainingTrace.model_validate_json(trace.model_dump_json())


def test_the_rows_come_back(episodes):
    episodes = [replace(episodes[0], turn_rewards={0: 0.5}), *episodes[1:]]
    back = [from_trace(through_json(to_trace(episode))) for episode in episodes]
    assert columns(training_rows(back)) == columns(training_rows(episodes))
    assert [one.group for one in back] == ["g"] * 4
    saved = [Trajectory.from_bytes(one.trajectory.to_bytes()) for one in back]  # a file tells the reward, too
    assert [one.end.reward for one in saved] == [episode.reward for episode in episodes]


def test_rewards_may_be_numbers_of_other_libraries(episodes):
    episode = replace(episodes[0], reward=np.float32(0.5), turn_rewards={0: np.int64(1)})
    back = from_trace(through_json(to_trace(episode)))
    assert (back.reward, back.turn_rewards) == (0.5, {0: 1.0})


def test_a_trace_file_is_examined_and_shown(episodes, tmp_path):
    for episode in episodes:
        (tmp_path / f"{episode.id}.json").write_text(to_trace(episode).model_dump_json())
    groups = read(sorted(tmp_path.iterdir()))
    shown = [episode for group in groups for episode in group.episodes]
    assert len(shown) == len(episodes)
    assert not findings(groups)
    assert render(groups, []).startswith("<!doctype html>")


def test_each_sampled_token_is_trained_once(episodes):
    rows = training_rows(episodes)
    for episode in episodes:
        trace = to_trace(episode)
        own = [row for row in rows if row.episode == episode.id]
        assert sum(sum(turn.loss_mask) for turn in trace.turns) == own[0].episode_trained
        assert len(trace.turns) == len(episode.trajectory.turns)


def test_openenvs_graph_has_our_sequences(episodes):
    """Without our metadata, calls are linked by their tokens, there and here."""
    for episode in episodes:
        trace = to_trace(episode)
        graph = RolloutGraph()
        for turn in trace.turns:
            graph.add_turn(
                TurnNode(turn.node_id, turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps)
            )
        bare = TrainingTrace(turns=[turn.model_copy(update={"metadata": {}}) for turn in trace.turns])
        rows = training_rows([from_trace(bare, reward=1.0)], baseline=None)
        assert sorted(row.token_ids for row in rows) == sorted(one.input_ids for one in graph.sequences())
        assert sum(row.trained for row in rows) == sum(sum(turn.loss_mask) for turn in trace.turns)


def test_kinds_of_turns_keep_their_masks():
    q = [user("q")]
    recorder = Recorder()
    recorder.call(q, "a", constrained=True)
    kept = recorder.call([*q, assistant("a"), user("r")], "b")
    recorder.call([*q, assistant("a"), user("r"), assistant("b"), user("s")], "c", kept=1)
    recorder.call([user("helper")], auxiliary=True)
    episode = Episode(recorder.trajectory, 1.0, "g", "e", outcome=TerminationReason.TASK_COMPLETE)
    trace = to_trace(episode)
    assert [sum(turn.loss_mask) for turn in trace.turns] == [0, 2, 2]
    assert [turn.node_id for turn in trace.turns] == ["0", "1", "2"]
    back = from_trace(json.loads(trace.model_dump_json()))
    assert columns(training_rows([back], baseline=None)) == columns(training_rows([episode], baseline=None))
    assert back.outcome is TerminationReason.TASK_COMPLETE
    assert back.trajectory.turns[2].parent_kept == 1 == len(kept.output_ids) - 1


def test_calls_of_helpers_stay_apart_from_the_rollout():
    """Where an agent continues from a helper's answer: with a discount, the advantages depend on which turns count."""
    episodes = []
    for number, rewards in enumerate(({0: 1.0}, {})):
        recorder, q = Recorder(), [user("q")]
        recorder.call(q, "a")
        asked = [*q, assistant("a"), user("h")]
        recorder.call(asked, "b", auxiliary=True)
        recorder.call([*asked, assistant("b"), user("g")], "c")
        episodes.append(Episode(recorder.trajectory, float(number), "g", str(number), turn_rewards=rewards))
    back = [from_trace(json.loads(to_trace(episode).model_dump_json())) for episode in episodes]
    for one, other in zip(episodes, back, strict=True):
        assert [turn.is_auxiliary for turn in other.trajectory.turns] == [False, True, False]
        assert [turn.is_auxiliary for turn in one.trajectory.turns] == [False, True, False]
    given, found = (training_rows(batch, discount=0.5) for batch in (episodes, back))
    assert [row.advantages for row in found] == [row.advantages for row in given]


def test_a_mask_may_change_inside_an_answer():
    trace = TrainingTrace(
        turns=[
            TrainingTurn(
                node_id="a",
                prompt_token_ids=[1, 2],
                completion_token_ids=[3, 4, 5, 6],
                per_token_logps=[-0.1, -0.2, -0.3, -0.4],
                loss_mask=[0, 0, 1, 0, 0, 1],
                metadata={"weight_versions": [["7", 0, 1], ["8", 1, 4]]},
            ),
            TrainingTurn(
                node_id="b",
                prompt_token_ids=[1, 2, 3, 4, 5, 6, 7],
                completion_token_ids=[8],
                per_token_logps=[-0.5],
                loss_mask=[0] * 7 + [1],
                metadata={"weight_version": 9},
            ),
        ]
    )
    (row,) = training_rows([from_trace(trace, group="g", reward=1.0)], baseline=None)
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.loss_mask == [0, 0, 1, 0, 0, 1, 0, 1]
    assert row.logprobs == [0, 0, -0.1, 0, 0, -0.4, 0, -0.5]
    assert row.versions == [None, None, "7", None, None, "8", None, "9"]
    assert row.episode_version == 7


def test_what_cannot_be_trained_has_no_mask(episodes, model_without_logprobs, caplog):
    failed = replace(episodes[1], outcome=TerminationReason.INFRASTRUCTURE_ERROR)
    for episode, options, reason in (
        (failed, {}, "the outcome infrastructure_error has no reward"),
        (replace(episodes[0], reward=float("nan")), {}, "a reward is not finite"),
        (episodes[0], {"max_tokens": 55}, "longer than max_tokens=55"),
        (model_without_logprobs, {}, "a trained token has no logprob"),
    ):
        trace = through_json(to_trace(episode, **options))
        assert not any(any(turn.loss_mask) for turn in trace.turns)
        assert trace.turns[0].metadata["episode"]["left_out"] == reason
        assert reason in caplog.text
        assert not len(training_rows([from_trace(trace, reward=1.0)], baseline=None))
    assert not any("left_out" in one.metadata for one in to_trace(replace(episodes[0], reward=None)).turns[1:])
    assert to_trace(replace(episodes[0], reward=None)).turns[0].loss_mask[-1] == 1  # verify() brings its reward


@pytest.fixture
def model_without_logprobs():
    recorder = Recorder()
    turn = recorder.call([user("q")])
    turn.generation = replace(turn.generation, logprobs=None)
    return Episode(recorder.trajectory, 1.0, "g")


def damaged(trace, place, **changes):
    content = trace.model_dump()
    content["turns"][place] |= changes
    return content


def test_a_faulty_trace_is_refused(episodes):
    trace = to_trace(episodes[0])
    turn = trace.turns[1].model_dump()
    count = len(turn["loss_mask"])
    for changes, message in (
        ({"loss_mask": [1] * count}, "turn 1: prompt token 0 is trained, but the model did not sample it"),
        ({"loss_mask": [0] * (count - 1)}, f"turn 1: {count - 1} masks for 47 prompt and 9 sampled tokens"),
        ({"per_token_logps": turn["per_token_logps"][1:]}, "turn 1: 9 sampled ids with 9 masks and 8 logprobs"),
        ({"per_token_logps": [float("nan")] * 9}, "turn 1: sampled token 0 is trained, but its logprob is nan"),
        ({"metadata": {"parent": "5"}}, "turn 1: its prompt does not begin with the tokens of turn 5"),
        ({"node_id": "0"}, "turn 0: the trace has another turn with this node_id"),
        ({"prompt_token_ids": None}, "turn 1 of the trace is malformed"),
    ):
        with pytest.raises(ValueError, match=message):
            from_trace(damaged(trace, 1, **changes))
    with pytest.raises(ValueError, match="not an OpenEnv TrainingTrace of version 1"):
        from_trace({"schema_version": 2, "turns": []})


SESSION = """
import os
from transformers import AutoTokenizer
from calculator_session import CalculatorSession
from openenv.core.harness import TrainableSession
from strands_env.core.models import sglang_model_factory

tokenizer, url = AutoTokenizer.from_pretrained(os.environ["MODEL"]), os.environ["SGLANG_URL"]
{code}
assert isinstance(session, TrainableSession)
trace = session.fetch_training_trace()
print("found", len(trace.turns), all(turn.loss_mask[-1] == 1 for turn in trace.turns), session.verify([]).env_reward)
"""


def test_the_examples_session_is_trainable(tmp_path):
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    server = ScriptedSGLang(tokenizer, [call("calculator", expression="27 * 43"), "It is \\boxed{1161}."])
    program = SESSION.format(code=guides.code_of("openenv/calculator_session.py"))
    with server.serve() as base_url:
        variables = {"MODEL": str(tmp_path), "SGLANG_URL": base_url}
        assert "found 2 True 1.0" in guides.run_code(program, path=["examples/openenv"], **variables)
