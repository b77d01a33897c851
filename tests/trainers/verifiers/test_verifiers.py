"""verifiers' own episodes hold ours: the same branches, each sampled token trained once, and the same rows back."""

import json
from dataclasses import replace

import pytest
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.semantic import ParentLink
from verifiers.v1.types import AssistantMessage

from strands_sglang import TerminationReason
from strands_sglang.credit import Episode, training_rows
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trainers.verifiers import from_record, to_episode
from strands_sglang.viewer import render
from support.agents import assistant, build_chatml_tokenizer, user
from support.recorder import Recorder
from trainers import guides

COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions", "advantages", "trained", "episode_trained", "episode")


def columns(rows):
    return [{name: getattr(row, name) for name in COLUMNS} for row in rows]


def on_disk(episode):
    """The record as verifiers writes and reads it, with all digits."""
    line = json.dumps(episode.to_record(float_decimals=None))
    return WireEpisode.model_validate(json.loads(line)), json.loads(line)


def test_the_rows_come_back(episodes):
    for form in (0, 1):
        back = [one for episode in episodes for one in from_record(on_disk(to_episode(episode))[form])]
        assert columns(training_rows(back)) == columns(training_rows(episodes))


def test_a_results_file_is_examined_and_shown(episodes, tmp_path):
    lines = [json.dumps(to_episode(episode).to_record(float_decimals=None)) for episode in episodes]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    groups = read([tmp_path / "results.jsonl"])
    shown = [episode for group in groups for episode in group.episodes]
    assert [one.end.reward for one in shown] == [episode.reward for episode in episodes]
    assert not [finding for finding in findings(groups) if finding.kind != "flat-group"]
    assert all(episode.id in render(groups, []) for episode in shown)


def test_branches_are_our_rows_and_nodes_train_once(episodes):
    for episode in episodes:
        (trace,) = to_episode(episode).traces
        rows = training_rows([episode], baseline=None)
        branches = sorted(trace.branches, key=lambda branch: branch.token_ids)
        assert [one.token_ids for one in branches] == sorted(row.token_ids for row in rows)
        assert sum(sum(node.mask) for node in trace.nodes) == rows[0].episode_trained
        assert sum(len(node.logprobs) for node in trace.nodes) == rows[0].episode_trained
        assert trace.num_turns == len(episode.trajectory.turns)
        assert trace.reward == episode.reward


def test_a_shared_trunk_is_trained_in_every_branch_of_verifiers(episodes):
    """Why a consumer must train shared nodes once: 14 tokens of the fork have mask True in both branches."""
    (trace,) = to_episode(episodes[1]).traces
    assert sum(sum(branch.sampled_mask) for branch in trace.branches) == 46 + 14
    (back,) = from_record(trace)
    assert sum(row.trained for row in training_rows([back], baseline=None)) == 46


def test_advantages_stand_on_the_nodes_of_each_turn(episodes):
    episodes = [replace(episodes[0], turn_rewards={0: 0.5}), *episodes[1:]]
    rows = training_rows(episodes)
    with pytest.raises(ValueError, match="verifiers has one reward per episode: pass advantages="):
        to_episode(episodes[0])
    for episode in episodes:
        (trace,) = on_disk(to_episode(episode, advantages=rows.advantages[episode.id]))[0].traces
        own = {tuple(row.token_ids): row for row in rows if row.episode == episode.id}
        for branch in trace.branches:
            row = own[tuple(branch.token_ids)]
            found = [one * mask for one, mask in zip(branch.advantages, row.loss_mask, strict=True)]
            assert found == row.advantages


def test_kinds_of_turns_keep_their_masks():
    q = [user("q")]
    recorder = Recorder()
    recorder.call(q, "a", constrained=True)
    recorder.call([*q, assistant("a"), user("r")], "b")
    recorder.call([*q, assistant("a"), user("r"), assistant("b"), user("s")], "c", kept=1)
    recorder.call([user("helper")], auxiliary=True)
    episode = Episode(recorder.trajectory, 1.0, "g", "e", outcome=TerminationReason.TASK_COMPLETE)
    made = to_episode(episode, tokenizer=build_chatml_tokenizer())
    (back,) = from_record(on_disk(made)[1])
    assert columns(training_rows([back], baseline=None)) == columns(training_rows([episode], baseline=None))
    assert back.outcome is TerminationReason.TASK_COMPLETE and back.group == "g"
    assert [node.sampled for node in made.traces[0].nodes] == [False, True, False, True, True, False, True]


def test_nodes_of_other_producers():
    """The generation prompt is on the assistant's node, logprobs are those of trained tokens, versions are unknown."""
    made = to_episode(Episode(Recorder().trajectory, None, "g", "e"))
    (trace,) = made.traces
    trace.nodes = [
        MessageNode(message={"role": "user", "content": "q"}, token_ids=[1, 2], mask=[False] * 2),
        MessageNode(
            message=AssistantMessage(content="a"),
            parent=0,
            sampled=True,
            token_ids=[3, 4, 5, 6, 7],
            mask=[False, True, False, True, False],
            logprobs=[-0.5, -0.25],
        ),
        MessageNode(message={"role": "user", "content": "r"}, parent=1, token_ids=[8], mask=[False]),
        MessageNode(
            message=AssistantMessage(content="b"),
            parent=2,
            sampled=True,
            token_ids=[9, 10],
            mask=[False, True],
            logprobs=[-1.0],
        ),
        MessageNode(  # a compaction that nothing resumes from
            message=AssistantMessage(content="summary"),
            parent=1,
            sampled=True,
            token_ids=[11],
            mask=[True],
            logprobs=[-2.0],
            semantic_parents=[ParentLink(node=1, type="compaction_attempt")],
        ),
    ]
    trace.ok = trace.agent.trainable = True
    trace.record_reward("right", 0.5)
    trace.record_reward("short", 0.25, weight=2.0)
    assert [branch.trainable for branch in trace.branches] == [True, False]
    (episode,) = from_record(made)
    assert episode.reward == 1.0
    (row,) = training_rows([episode], baseline=None)
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert row.loss_mask == [0, 0, 0, 1, 0, 1, 0, 0, 0, 1]
    assert row.logprobs == [0, 0, 0, -0.5, 0, -0.25, 0, 0, 0, -1.0]
    trace.agent.trainable = False  # a judge
    assert from_record(made)[0].reward is None


def test_what_cannot_be_trained_is_marked(episodes, caplog):
    failed = replace(episodes[1], reward=None, outcome=TerminationReason.INFRASTRUCTURE_ERROR)
    recorder = Recorder()
    turn = recorder.call([user("q")])
    turn.generation = replace(turn.generation, logprobs=None)
    for episode, options, reason in (
        (failed, {}, "the outcome infrastructure_error has no reward"),
        (replace(episodes[0], reward=float("nan")), {}, "a reward is not finite"),
        (replace(episodes[0], reward=None), {}, "no reward"),
        (episodes[0], {"max_tokens": 55}, "longer than max_tokens=55"),
        (Episode(recorder.trajectory, 1.0, "g"), {}, "a trained token has no logprob"),
        (Episode(Recorder().trajectory, 1.0, "g"), {}, "no trained token"),
    ):
        made = to_episode(episode, **options)
        (trace,) = made.traces
        assert not made.ok and not trace.ok and not trace.agent.trainable
        assert trace.last_error.message == reason and reason in caplog.text
        assert not any(any(node.mask) for node in trace.nodes)
        assert not len(training_rows(from_record(on_disk(made)[1]), baseline=None))


def test_a_faulty_record_is_refused(episodes):
    def damaged(**changes):
        content = on_disk(to_episode(episodes[0]))[1]
        content["traces"][0]["nodes"][0] |= changes
        return content

    for changes, message in (
        ({"mask": [True] * 30}, "node 0: token 0 is trained, but the model did not sample it"),
        ({"mask": [False]}, "node 0: 30 tokens with 1 masks"),
        ({"sampled": True, "mask": [True] * 30}, "node 0: 30 trained tokens with 0 logprobs"),
        ({"parent": 3}, "node 0: its parent 3 is not an earlier node"),
        ({"token_ids": 7}, "is malformed"),
    ):
        with pytest.raises(ValueError, match=message):
            from_record(damaged(**changes))
    with pytest.raises(ValueError, match="not a record of verifiers"):
        from_record({"turns": []})


def test_the_guides_command_writes_results(tmp_path):
    tokenizer = build_chatml_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    server = ScriptedSGLang(tokenizer, ["It is \\boxed{1161}.", "It is \\boxed{1}."] * 4)
    [words] = guides.commands("verifiers")
    with server.serve() as base_url:
        given = {"http://localhost:30000": base_url, "results.jsonl": str(tmp_path / "results.jsonl")}
        assert "8 episodes, 8 rows, left out: {}" in guides.run(words, tmp_path / "model", replace=given)
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_bytes().splitlines()]
    rewards = [WireEpisode.model_validate(record).traces[0].reward for record in records]
    assert sorted(rewards) == [0.0] * 4 + [1.0] * 4
    rows = training_rows([episode for record in records for episode in from_record(record)])
    assert sorted(row.advantage for row in rows) == [-0.5] * 4 + [0.5] * 4
