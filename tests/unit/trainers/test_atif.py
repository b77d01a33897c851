"""ATIF documents: every token as it was recorded, and back."""

import copy
import json
from dataclasses import replace

import pytest

from strands_sglang import Trajectory
from strands_sglang.credit import Episode, training_rows
from strands_sglang.inspection.reading import read
from strands_sglang.trainers.atif import from_atif, to_atif
from support import written_episodes as written


def episodes():
    return [
        Episode(one.trajectory, 1.0, "jars", id=one.id)
        for group in written.groups_of_jars()
        for one in group.episodes
        if any(turn.is_answered for turn in one.trajectory.turns)
    ]


def rows_of(episode):
    return [
        (list(row.tokens.token_ids), list(row.tokens.loss_mask), row.tokens.policy_versions)
        for row in training_rows([episode], baseline=None).rows
    ]


@pytest.mark.parametrize("episode", episodes(), ids=lambda episode: episode.id)
def test_a_document_gives_the_rows_of_its_episode(episode, tmp_path):
    document = json.loads(json.dumps(to_atif(episode)))
    again = from_atif(document)
    assert again.id == episode.id and again.reward == 1.0 and again.group == episode.group
    assert rows_of(again) == rows_of(episode)
    assert sum(map(sum, (mask for _, mask, _ in rows_of(again)))) > 0
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(document))
    [group] = read([path])
    assert len(group.episodes[0].trajectory.turns) == len(again.trajectory.turns)


def test_an_episode_without_a_reward_yet_keeps_its_trained_tokens():
    """Harbor's verifier scores an episode after its document is written."""
    episode = episodes()[0]
    unscored = from_atif(to_atif(replace(episode, reward=None)))
    assert unscored.reward is None
    assert rows_of(replace(unscored, reward=1.0)) == rows_of(episode)


def test_trained_tokens_without_logprobs_are_named():
    document = to_atif(episodes()[0])
    for step in document["steps"]:
        step.get("metrics", {}).pop("logprobs", None)
    with pytest.raises(ValueError, match="turn 0: sampled token 0 is trained, but its logprob is nan"):
        from_atif(document)


def test_a_document_reads_as_a_conversation():
    document = to_atif(episodes()[0], model="Qwen/Qwen3-8B", version="1")
    assert document["agent"] == {"name": "strands-sglang", "version": "1", "model_name": "Qwen/Qwen3-8B"}
    sources = [step["source"] for step in document["steps"]]
    assert sources[:3] == ["system", "user", "agent"] and [step["step_id"] for step in document["steps"]] == list(
        range(1, len(sources) + 1)
    )
    step = next(step for step in document["steps"] if "tool_calls" in step)
    [call] = step["tool_calls"]
    assert call["function_name"] == "calculator" and isinstance(call["arguments"], dict)
    assert step["observation"]["results"][0]["source_call_id"] == call["tool_call_id"]
    metrics = step["metrics"]
    assert len(metrics["completion_token_ids"]) == len(metrics["logprobs"]) == metrics["completion_tokens"]


def test_what_is_no_document_of_tokens_is_named():
    document = to_atif(episodes()[0])
    without = copy.deepcopy(document)
    step = next(step for step in without["steps"] if "metrics" in step)
    del step["metrics"]["prompt_token_ids"]
    with pytest.raises(ValueError, match=f"step {step['step_id']} has no token ids"):
        from_atif(without)
    with pytest.raises(ValueError, match="malformed"):
        from_atif({"schema_version": "ATIF-v1.7", "steps": [{}]})
    with pytest.raises(ValueError, match="no model call"):
        from_atif({"schema_version": "ATIF-v1.7", "steps": []})
    with pytest.raises(ValueError, match="no answered model call"):
        to_atif(Episode(Trajectory(), None, None))
