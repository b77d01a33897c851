"""Records of other libraries with values that do not belong there: refused by name, or harmless."""

import copy

import pytest
from hypothesis import given, settings, strategies as st

from strands_sglang import Trajectory
from strands_sglang.credit import TrainingRows, training_rows
from strands_sglang.trainers.atif import from_atif, to_atif
from strands_sglang.trainers.openenv import from_trace
from strands_sglang.trainers.verifiers import from_record

TRACE = {
    "schema_version": 1,
    "turns": [
        {
            "node_id": "0",
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3, 4],
            "per_token_logps": [-0.5, -0.25],
            "loss_mask": [0, 0, 1, 0],
            "metadata": {
                "weight_versions": [["1", 0, 1], ["2", 1, 2]],
                "finish_reason": "stop",
                "parent": None,
                "agent": "a",
                "reward": 0.5,
                "episode": {"id": "e", "group": "g", "reward": 1.0, "outcome": "task_complete"},
            },
        },
        {
            "node_id": "1",
            "prompt_token_ids": [1, 2, 3, 9],
            "completion_token_ids": [5],
            "per_token_logps": [-0.5],
            "loss_mask": [0, 0, 0, 0, 1],
            "metadata": {"parent": "0", "parent_kept": 1, "weight_version": 3},
        },
    ],
}

RECORD = {
    "group": {"id": "g"},
    "traces": [
        {
            "id": "t",
            "ok": True,
            "agent": {"trainable": True},
            "task": {"key": "k"},
            "rewards": {"right": {"score": 1.0, "weight": 0.5}},
            "errors": [{"type": "E", "message": "m"}],
            "calls": [{"node": 1, "finish_reason": "length"}],
            "info": {
                "strands_sglang": {"weight_versions": {"1": [["1", 0, 2]]}, "agents": {"1": "a"}, "outcome": "timeout"}
            },
            "nodes": [
                {"parent": None, "sampled": False, "token_ids": [1, 2], "mask": [False, False], "logprobs": []},
                {"parent": 0, "sampled": True, "token_ids": [3, 4], "mask": [True, False], "logprobs": [-0.5]},
                {
                    "parent": 1,
                    "sampled": True,
                    "token_ids": [5],
                    "mask": [True],
                    "logprobs": [-0.5],
                    "semantic_parents": [{"type": "compaction", "node": 0}],
                },
            ],
        }
    ],
}

READERS = {
    "openenv": (TRACE, lambda content: [from_trace(content)]),
    "verifiers": (RECORD, from_record),
    "atif": (to_atif(from_trace(TRACE)), lambda content: [from_atif(content)]),
}

ODD = st.sampled_from(
    [None, True, -1, 0, 2, 2**31, 10**400, 1.5, float("nan"), 1e308, "", "x", "1", [], [1], [[]], {}, {"a": 1}]
) | st.just("removed")


def places(content, path=()):
    """All places in JSON content."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def with_odd_value(content, place, value):
    changed = copy.deepcopy(content)
    owner = changed
    for key in place[:-1]:
        owner = owner[key]
    if value == "removed":
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    return changed


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(max_examples=200)
def test_an_odd_value_is_refused_or_harmless(kind, tmp_path_factory, data):
    content, read = READERS[kind]
    changed = with_odd_value(content, data.draw(st.sampled_from(list(places(content)))), data.draw(ODD))
    try:
        episodes = read(changed)
    except ValueError:
        return
    path = tmp_path_factory.getbasetemp() / "rows"
    rows = training_rows(episodes, baseline=None)
    rows.save(path)
    assert len(TrainingRows.load(path)) == len(rows)
    for episode in episodes:
        saved = Trajectory.from_bytes(episode.trajectory.to_bytes())
        assert [turn.output_ids for turn in saved.turns] == [turn.output_ids for turn in episode.trajectory.turns]


@pytest.mark.parametrize(("said", "kept"), [("length", "length"), ("abort", "abort"), ("tool_calls", "stop")])
def test_an_end_in_another_librarys_words_is_a_stop(said, kept):
    trace = copy.deepcopy(TRACE)
    trace["turns"][0]["metadata"]["finish_reason"] = said
    turn = Trajectory.from_bytes(from_trace(trace).trajectory.to_bytes()).turns[0]
    assert turn.generation.finish_type == kept


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        ("openenv", ("turns", 0, "prompt_token_ids", 0), 2**31, "turn 0 of the trace is malformed: OverflowError"),
        ("openenv", ("turns", 0, "prompt_token_ids", 0), -1, "turn 0: a token id is below 0"),
        ("openenv", ("turns", 1, "metadata", "parent_kept"), -1, "turn 1: it keeps -1 of the 2 sampled tokens of turn"),
        ("openenv", ("turns", 0, "metadata", "weight_versions", 0), ["1", 0, 9], "turn 0: .* a range of 2 tokens"),
        (
            "openenv",
            ("turns", 0, "metadata", "weight_versions"),
            [["1", 0, 2], ["2", 1, 2]],
            r"turn 0: the versions \[\['1', 0, 2\], \['2', 1, 2\]\] of its tokens overlap or are out of order",
        ),
        ("openenv", ("turns", 0, "metadata", "episode"), "e", "turn 0: the metadata of the episode is 'e'"),
        ("openenv", ("turns", 0, "metadata", "episode", "reward"), "1", "the reward of the episode is '1', not a num"),
        ("openenv", ("turns", 0, "metadata", "reward"), [1], r"turn 0: its reward is \[1\], not a number"),
        ("openenv", ("turns", 0, "metadata", "auxiliary"), True, "turn 0: it has a reward, but as a helper's call"),
        (
            "openenv",
            ("turns", 0, "metadata", "agent"),
            ["a"],
            r"turn 0: the finish reason 'stop' and the agent \['a'\] must be strings",
        ),
        ("openenv", ("turns", 0, "prompt_token_ids"), [], "turn 0: 4 masks for 0 prompt and 2 sampled tokens"),
        (
            "verifiers",
            ("traces", 0, "nodes", 1, "parent"),
            None,
            "node 1: it opens a sequence, but has no prompt token",
        ),
        ("verifiers", ("traces", 0), [], "not a record of verifiers"),
        ("verifiers", ("traces", 0, "nodes", 1, "token_ids", 0), 2**31, "trace 't' is malformed: OverflowError"),
        ("verifiers", ("traces", 0, "nodes", 1, "mask", 0), 2, "node 1: its mask has a value that is not 0 or 1"),
        ("verifiers", ("group", "id"), ["g"], r"the group of the episode is \['g'\], not str \| int \| float \| None"),
        ("verifiers", ("traces", 0, "id"), 7, "the id of the trace is 7, not str"),
        ("openenv", ("turns", 0, "metadata", "episode", "id"), 7, r"the id of the episode is 7, not str \| None"),
    ],
)
def test_an_odd_value_is_named(kind, place, value, message):
    content, read = READERS[kind]
    with pytest.raises(ValueError, match=message):
        read(with_odd_value(content, place, value))


@pytest.mark.parametrize("kind", READERS)
def test_the_records_themselves_are_read(kind):
    content, read = READERS[kind]
    assert [row.trained for row in training_rows(read(content), baseline=None)] in ([1, 1], [2])
