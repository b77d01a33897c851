"""What the doctor finds in files with planted faults, and that it accuses no healthy file."""

import asyncio
import contextlib
import itertools
import json
import math
import random
import shutil
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from safetensors.numpy import load_file, save_file
from strands.types.exceptions import MaxTokensReachedException, ModelThrottledException

from strands_sglang import SGLangConnectionError, SGLangModel, Trajectory, credit
from strands_sglang.cli import main
from strands_sglang.inspection.doctor import KINDS, findings
from strands_sglang.inspection.reading import UnreadableError, read
from strands_sglang.inspection.records import Finding
from strands_sglang.inspection.show import COLORS, episode_lines
from strands_sglang.reasons import Reason, read_reason
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang
from strands_sglang.viewer import render
from strands_sglang.viewer.blocks import Blocks
from strands_sglang.viewer.payload import page_index
from support import specimens
from support.agents import make_agent
from support.histories import PLANS, Player

OLD_STEP = Path(__file__).parents[2] / "fixtures" / "0.5.0-sealed" / "step-000003"
"""Its reasons are sentences."""


def record(tokenizer, number, answers=3):
    """One episode: an agent that forks after its first answer, a summary, and a constrained call."""
    experts = ScriptedExperts(layers=2, top_k=2)
    texts = [f"Answer {number}-{turn}: 5 7 9 11." for turn in range(20)]
    server = ScriptedSGLang(tokenizer, texts, weight_version="3", experts=experts)
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), return_routed_experts=True)
    agent = make_agent(model, callback_handler=None)
    for turn in range(answers):
        server.update_weights(str(3 + turn))
        agent(f"Question {turn} of a kind?")
    other = make_agent(model, callback_handler=None)
    other.messages = [*agent.messages[:2]]
    other("Another way?")
    return model.trajectory


def write_step(folder, played):
    """Write a step of trajectories, each with its reward and its group."""
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    episodes = []
    for number, (trajectory, reward, group) in enumerate(played):
        episodes.append(credit.Episode(trajectory, reward, group, f"e{number}"))
        trajectory.save(folder / "trajectories" / f"e{number}.safetensors")
    credit.training_rows(episodes).save(folder / "rows.safetensors")
    return folder


def write_healthy(folder, tokenizer, rewards):
    """Write a step of groups of three episodes, with two rows each."""
    played = []
    for number, reward in enumerate(rewards):
        trajectory = record(tokenizer, number, answers=2 + number % 2)
        trajectory.note_end(outcome="task_complete", reward=reward)
        played.append((trajectory, reward, f"g{number // 3}"))
    return write_step(folder, played)


@pytest.fixture(scope="module")
def healthy(chatml_tokenizer, tmp_path_factory):
    """The folder of a training step with two groups."""
    folder = tmp_path_factory.mktemp("step") / "step-000003"
    return write_healthy(folder, chatml_tokenizer, (1.0, 0.0, 0.25, 0.5, 2.0, 0.75))


class Folder:
    """A copy of a step folder that faults are planted in; a place is chosen by a number."""

    def __init__(self, path, number):
        self.path, self.random = path, random.Random(number)
        self.number = number
        self.episode = f"e{number % 6}"

    def edit(self, change, name=None):
        path = self.path / (name or "rows.safetensors")
        content = path.read_bytes()
        metadata = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])["__metadata__"]
        tensors = {key: value.copy() for key, value in load_file(path).items()}
        key = "trajectory" if "trajectory" in tensors else "description"
        facts = json.loads(tensors[key].tobytes())
        result = change(tensors, facts)
        tensors[key] = np.frombuffer(json.dumps(facts).encode(), "uint8")
        save_file(tensors, path, metadata=metadata)
        return result

    def edit_trajectory(self, change):
        return self.edit(change, f"trajectories/{self.episode}.safetensors")

    def row(self, facts):
        """Return the number of a row of the episode."""
        own = [number for number, row in enumerate(facts["rows"]) if row["episode"] == self.episode]
        return own[self.number % len(own)]

    def range(self, tensors, facts):
        """Return where the tokens of that row are in the tensors."""
        return tensors["row_offsets"][self.row(facts) :][:2]

    def turn(self, facts):
        """Return the position of an answered turn: the first, a later, or the last one, in another sequence."""
        answered = [n for n, turn in enumerate(facts["turns"]) if turn["answer"]]
        return answered[self.number // 2 % len(answered)]


@pytest.fixture
def copied(healthy, tmp_path):
    """Copies the healthy step into a folder that faults are planted in."""
    return lambda number=0: Folder(shutil.copytree(healthy, tmp_path / f"copy-{number}"), number)


PLANTED = {}
"""How each fault is planted, and the kinds of which one is found."""


def planted(edit, *kinds):
    """Register a fault: a function that gets the folder, and the tensors and facts of the file that it changes."""

    def note(change):
        def plant(folder):
            edit(folder, partial(change, folder))

        PLANTED[change.__name__.removeprefix("plant_")] = plant, set(kinds)
        return plant

    return note


in_rows = partial(planted, Folder.edit)
in_trajectory = partial(planted, Folder.edit_trajectory)
on_disk = partial(planted, lambda folder, change: change(None, None))


def sampled_range(facts, position):
    """Return where a turn's sampled tokens are in the tensors."""
    counts = [turn["answer"]["sampled_tokens"] if turn["answer"] else 0 for turn in facts["turns"]]
    start = sum(counts[:position])
    return start, start + counts[position]


@in_rows("logprobs-shifted")
def plant_shifted_rows(folder, tensors, facts):
    start, stop = folder.range(tensors, facts)
    by = 1 if folder.number % 2 else -1
    tensors["logprobs"][start:stop] = np.roll(tensors["logprobs"][start:stop], by)


@in_trajectory("logprobs-shifted")
def plant_shifted_turn(folder, tensors, facts):
    start, stop = sampled_range(facts, folder.turn(facts))
    own = tensors["logprobs"][start:stop]
    tensors["logprobs"][start:stop] = [*own[1:], own[-1]] if folder.number % 2 else [0.0, *own[:-1]]


def choose(folder, mask, value):
    return int(folder.random.choice(np.flatnonzero(mask == value).tolist()))


@in_rows("mask-not-sampled")
def plant_mask_on_prompt(folder, tensors, facts):
    start, stop = folder.range(tensors, facts)
    row = facts["rows"][folder.row(facts)]
    prompts, at = [], 0
    for _, prompt, sampled, _ in row["spans"]:
        prompts += range(at, at + prompt)
        at += prompt + sampled
    tensors["loss_mask"][start + folder.random.choice(prompts)] = 1


@in_rows("not-trained")
def plant_no_mask(folder, tensors, facts):
    start, stop = folder.range(tensors, facts)
    tensors["loss_mask"][start + choose(folder, tensors["loss_mask"][start:stop], 1)] = 0


@in_trajectory("id-text")
def plant_other_id(folder, tensors, facts):
    start, stop = sampled_range(facts, folder.turn(facts))
    at = folder.random.randrange(start, stop)
    tensors["output_ids"][at] = (tensors["output_ids"][at] + 1 + folder.number) % 300


@in_rows("id-text")
def plant_other_id_in_row(folder, tensors, facts):
    start, stop = folder.range(tensors, facts)
    at = start + choose(folder, tensors["loss_mask"][start:stop], 1)
    tensors["token_ids"][at] = (tensors["token_ids"][at] + 1 + folder.number) % 300


@in_trajectory("id-text")
def plant_other_text(folder, tensors, facts):
    answer = facts["turns"][folder.turn(facts)]["answer"]
    at = folder.random.randrange(len(answer["text"]))
    answer["text"] = answer["text"][:at] + "~" + answer["text"][at + 1 :]


@in_trajectory("version-missing")
def plant_no_version(folder, tensors, facts):
    answer = facts["turns"][folder.turn(facts)]["answer"]
    answer["weight_versions"], answer["weight_version"] = [], None


@in_rows("version-missing")
def plant_no_version_in_row(folder, tensors, facts):
    start, stop = folder.range(tensors, facts)
    tensors["versions"][start + choose(folder, tensors["loss_mask"][start:stop], 1)] = -1


@in_trajectory("version-falls")
def plant_falling_version(folder, tensors, facts):
    children = [turn for turn in facts["turns"] if turn["parent"] is not None]
    answer = folder.random.choice(children)["answer"]
    answer["weight_versions"] = [["1", start, end] for _, start, end in answer["weight_versions"]]
    answer["weight_version"] = answer["meta_info"]["weight_version"] = "1"
    answer["meta_info"].pop("weight_versions", None)


@in_rows("trained-twice")
def plant_trained_twice(folder, tensors, facts):
    own = [number for number, row in enumerate(facts["rows"]) if row["episode"] == folder.episode]
    start, stop = tensors["row_offsets"][own[-1] :][:2]
    span = facts["rows"][own[-1]]["spans"][0]
    tensors["loss_mask"][start + span[1] + folder.number % span[2]] = 1


@in_rows("reward-sibling")
def plant_swapped_rewards(folder, tensors, facts):
    base = 3 * (folder.number % 2)
    one, other = f"e{base + folder.number % 3}", f"e{base + (folder.number + 1) % 3}"
    for table in (facts["rewards"],) if folder.number % 3 == 0 else (facts["rewards"], facts["advantages"]):
        table[one], table[other] = table[other], table[one]
    if folder.number % 3 == 2:
        first, second = facts["episodes"][one], facts["episodes"][other]
        first["reward"], second["reward"] = second["reward"], first["reward"]


@in_trajectory("reward")
def plant_reward_of_sibling(folder, tensors, facts):
    facts["end"]["reward"] = [0.0, 0.25, 1.0, 0.75, 0.5, 2.0][int(folder.episode[1:])]


@in_rows("flat-group")
def plant_flat_group(folder, tensors, facts):
    group = f"g{folder.number % 2}"
    for name, own in facts["episodes"].items():
        if own["group"] == group:
            own["reward"] = facts["rewards"][name] = folder.number / 4
            facts["advantages"][name] = dict.fromkeys(facts["advantages"][name], 0.0)
    for number, row in enumerate(facts["rows"]):
        if row["group"] == group:
            start, stop = tensors["row_offsets"][number:][:2]
            tensors["advantages"][start:stop] = 0.0


@in_rows("reward-failure")
def plant_failed_reward(folder, tensors, facts):
    facts["episodes"][folder.episode]["outcome"] = ("infrastructure_error", "aborted", "agent_error")[folder.number % 3]


@in_trajectory("reward-failure")
def plant_failed_end(folder, tensors, facts):
    facts["end"].update(outcome="infrastructure_error")


@in_trajectory("re-rendered")
def plant_new_root(folder, tensors, facts):
    """The last turn of a conversation opens a sequence, with everything before it as its prompt."""
    positions = [n for n, turn in enumerate(facts["turns"]) if turn["parent"] == 0]
    at = positions[folder.number % len(positions)]
    turn = facts["turns"][at]
    sizes = [one["prompt_tokens"] for one in facts["turns"]]
    before = sum(sizes[:at])
    ids = [*tensors["prompt_ids"][: sizes[0]], *tensors["output_ids"][: sampled_range(facts, 0)[1]]]
    tensors["prompt_ids"] = np.array(
        [*tensors["prompt_ids"][:before], *ids, *tensors["prompt_ids"][before:]], tensors["prompt_ids"].dtype
    )
    turn["parent"], turn["prompt_tokens"] = None, turn["prompt_tokens"] + len(ids)
    first = facts["turns"][0]
    turn["digests"] = [*first["digests"], first["answer_digest"], *turn["digests"]]
    turn["roles"] = [*first["roles"], "assistant", *turn["roles"]]
    if folder.number % 2:
        turn["reason"] = "opens a sequence: the history was rendered again"


@in_rows("re-rendered", "id-text")
def plant_boundary(folder, tensors, facts):
    """A row whose boundary holds other tokens of the same text."""
    pieces = load_file(folder.path / f"trajectories/{folder.episode}.safetensors")
    lengths = pieces["pieces.lengths"]
    ends = np.cumsum(lengths)
    content = pieces["pieces.bytes"].tobytes()
    texts = {
        int(i): content[end - length : end] for i, length, end in zip(pieces["pieces.ids"], lengths, ends, strict=True)
    }
    number = folder.row(facts)
    start, _ = tensors["row_offsets"][number:][:2]
    span = facts["rows"][number]["spans"][0]
    at = start + span[1] + span[2]  # the first prompt token of the second turn
    assert texts[int(tensors["token_ids"][at])] == b"\n"
    ids = tensors["token_ids"]
    ids[at - 1], ids[at] = ids[at], ids[at - 1]


@in_rows("advantage")
def plant_normalized_over_rows(folder, tensors, facts):
    group = f"g{folder.number % 2}"
    rows = [number for number, row in enumerate(facts["rows"]) if row["group"] == group]
    # Episodes with more rows weigh more.
    rewards = [facts["rewards"][facts["rows"][number]["episode"]] for number in rows]
    mean, std = np.mean(rewards), np.std(rewards, ddof=1)
    for number, reward in zip(rows, rewards, strict=True):
        start, stop = tensors["row_offsets"][number:][:2]
        value = (reward - mean) / (std + 1e-6) if folder.number % 3 else (reward - mean) / 2
        tensors["advantages"][start:stop] = np.where(tensors["loss_mask"][start:stop], value, 0.0)


@in_rows("advantage")
def plant_other_advantage(folder, tensors, facts):
    start, stop = folder.range(tensors, facts)
    tensors["advantages"][start:stop] *= 1.5 + folder.number


@in_trajectory("experts-missing")
def plant_missing_experts(folder, tensors, facts):
    name = f"routed_experts.{folder.turn(facts)}"
    if folder.number % 2:
        del tensors[name]
    else:
        tensors[name] = np.ascontiguousarray(tensors[name][: -1 - folder.number])


@in_trajectory("cut-complete")
def plant_cut_as_complete(folder, tensors, facts):
    last = facts["turns"][-1]["answer"]
    last["finish_type"], last["stop_token_id"] = "length", None
    last["meta_info"]["finish_reason"] = {"type": "length", "length": 40}


@in_trajectory("changed")
def plant_clamped(folder, tensors, facts):
    facts["turns"][folder.turn(facts)].update(clamped=False)


@in_trajectory("context-clamped")
def plant_clamped_answer(folder, tensors, facts):
    turn = facts["turns"][folder.turn(facts)]
    turn["clamped"] = True
    turn["answer"].update(finish_type="length", stop_token_id=None)
    turn["sampling_params"]["max_new_tokens"] = turn["answer"]["sampled_tokens"]
    turn["answer"]["meta_info"]["finish_reason"] = {"type": "length"}


@in_trajectory("not-trained", "mask-off-policy")
def plant_constrained(folder, tensors, facts):
    facts["turns"][folder.turn(facts)].update(constrained=True)


@in_trajectory("mask-off-policy")
def plant_discarded(folder, tensors, facts):
    facts["turns"][-1].update(status="discarded")


@in_rows("weight")
def plant_weight(folder, tensors, facts):
    tensors["loss_weights"] = np.array([1 / row["episode_trained"] for row in facts["rows"]], "<f8")
    tensors["loss_weights"][folder.row(facts)] *= -1


@in_rows("not-trained")
def plant_missing_row(folder, tensors, facts):
    number = folder.row(facts)
    start, stop = tensors["row_offsets"][number:][:2]
    for name in ("token_ids", "loss_mask", "logprobs", "versions", "advantages"):
        tensors[name] = np.delete(tensors[name], np.s_[start:stop])
    offsets = np.delete(tensors["row_offsets"], number)
    offsets[number:] = tensors["row_offsets"][number + 1 :] - (stop - start)
    tensors["row_offsets"] = offsets
    del facts["rows"][number]


@in_rows("group")
def plant_other_group(folder, tensors, facts):
    row = facts["rows"][folder.row(facts)]
    row["group"] = "g1" if row["group"] == "g0" else "g0"


@on_disk("structure")
def plant_lost_file(folder, tensors, facts):
    (folder.path / "trajectories" / f"{folder.episode}.safetensors").unlink()


@on_disk("left-out")
def plant_two_files(folder, tensors, facts):
    own = folder.path / "trajectories" / f"{folder.episode}.safetensors"
    shutil.copy(own, own.with_name("again.safetensors"))


@in_rows("left-out")
def plant_too_old(folder, tensors, facts):
    facts["settings"].update(version=9, max_staleness=1)


@in_rows("structure")
def plant_unknown_left_out(folder, tensors, facts):
    facts["left_out"].update(e77="no reward")


@in_rows("logprobs")
def plant_no_trainer_logprobs(folder, tensors, facts):
    tensors.update(trainer_logprobs=np.zeros(len(tensors["token_ids"])))


@in_trajectory("structure")
def plant_turn_again(folder, tensors, facts):
    facts["turns"][1]["index"] = facts["turns"][0]["index"]


def kinds_in(path):
    """The kinds of the findings in a file or a folder."""
    return [finding.kind for finding in findings(read([path]))]


def test_a_healthy_step_has_no_finding(healthy):
    assert kinds_in(healthy) == []


def test_a_step_of_an_earlier_release_has_no_finding():
    (group, other) = read([OLD_STEP])
    assert findings([group, other]) == []
    assert {str(one.left_out) for one in (*group.episodes, *other.episodes) if one.left_out} == {
        "the outcome aborted has no reward"
    }


def step_of_groups(tokenizer, folder, *names):
    """Write a step with two episodes of each group, of rewards that differ."""
    rewards = (1.0, 0.0, 0.25, 0.5, 3.0, 4.5)
    groups = [name for name in names for _ in range(2)]
    played = [(record(tokenizer, n, answers=1), rewards[n], group) for n, group in enumerate(groups)]
    return write_step(folder, played)


def test_a_group_may_be_a_tuple(chatml_tokenizer, tmp_path):
    assert findings(read([step_of_groups(chatml_tokenizer, tmp_path, ("a", 1), "b")])) == []


def test_groups_of_one_spelling_are_several(chatml_tokenizer, tmp_path):
    groups = read([step_of_groups(chatml_tokenizer, tmp_path, 1, "1", "2")])
    assert [len(group.episodes) for group in groups] == [2, 2, 2]
    assert [group.id for group in groups] == ["1", "1 (str)", "2"]
    assert findings(groups) == []


def test_a_finding_of_joined_trajectories_names_the_file_of_its_episode(chatml_tokenizer, tmp_path):
    files = [tmp_path / name / "same.safetensors" for name in ("a", "b", "c")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        trajectory = record(chatml_tokenizer, 0, answers=1)
        trajectory.turns[0].generation = replace(trajectory.turns[0].generation, request_id=f"{number % 2}")
        trajectory.note_end(outcome="aborted" if number == 1 else "task_complete", reward=1.0)
        trajectory.save(file)
    groups = read(files)
    found = findings(groups)
    assert [(one.kind, one.file) for one in found if one.kind in ("trained-twice", "reward-failure")] == [
        ("trained-twice", str(files[2])),
        ("reward-failure", str(files[1])),
    ]
    placed = page_index(groups, found, Blocks())["findings"]
    assert [one["episode"] for one in placed if "aborted" in one["why"] or "request" in one["why"]] == [2, 1]


class RouterError(SGLangConnectionError):
    """An infrastructure failure of another name."""


class SGLangHTTPErrorInATool(ValueError):  # noqa: N818
    """No infrastructure failure, whatever its name begins with."""


def write_failed(rollout, path, error):
    """Write a trajectory with a reward whose last call failed."""

    def on_request(turn, plan):
        if turn.index == 1:
            raise error
        return plan

    _, model = rollout(["a"])
    model.on_request = on_request
    agent = make_agent(model, callback_handler=None)
    agent("a")
    with contextlib.suppress(Exception):
        agent("b")
    model.trajectory.note_end(outcome="timeout", reward=1.0)
    model.trajectory.save(path)


@pytest.mark.parametrize("error", [RouterError("gone"), ModelThrottledException("busy"), TimeoutError("late")])
@pytest.mark.parametrize("copied", [False, True])
def test_a_reward_after_a_failure_of_the_infrastructure_is_found(rollout, tmp_path, error, copied):
    path = tmp_path / "failed.safetensors"
    write_failed(rollout, path, error)
    if copied:
        Trajectory.load(path).save(path)
    found = [(one.kind, one.turn) for one in findings(read([path]))]
    assert found == ([] if isinstance(error, TimeoutError) else [("reward-failure", 1)])


def test_the_name_of_an_error_tells_nothing_of_the_infrastructure(rollout, tmp_path):
    path = tmp_path / "failed.safetensors"
    write_failed(rollout, path, SGLangHTTPErrorInATool("oops"))
    assert kinds_in(path) == []


@pytest.mark.parametrize("outcome", ["no_outcome", 3])
def test_an_unknown_kind_of_failure_is_refused(rollout, tmp_path, outcome):
    folder = Folder(tmp_path, 0)
    write_failed(rollout, tmp_path / "failed.safetensors", RouterError("gone"))
    folder.edit(lambda tensors, facts: facts["turns"][1].update(cause_outcome=outcome), "failed.safetensors")
    (found,) = findings(read([tmp_path / "failed.safetensors"]))
    assert found.kind == "structure" and repr(outcome) in found.why


def in_sentences(path):
    """Write a trajectory as earlier releases did: its reasons are sentences."""
    tensors = load_file(path)
    facts = json.loads(tensors["trajectory"].tobytes())
    for turn in facts["turns"]:
        for name in ("reason", "note"):
            turn[name] = str(read_reason(turn[name])) if turn[name] else ""
    tensors["trajectory"] = np.frombuffer(json.dumps(facts).encode(), "uint8")
    save_file(tensors, path, {"format": "strands-sglang trajectory", "version": "2"})


def test_the_template_policy_of_an_earlier_release_is_no_finding(rollout, tmp_path):
    reasoning = "<think>\nHidden thought.\n</think>\n\nAnswer"
    _, model = rollout([reasoning, reasoning], history_policy="template")
    agent = make_agent(model, callback_handler=None)
    agent("a")
    agent("b")
    path = tmp_path / "old.safetensors"
    model.trajectory.save(path)
    in_sentences(path)
    groups = read([path])
    assert [turn.why.kind for turn in groups[0].episodes[0].turns] == ["first", "opens_because"]
    assert findings(groups) == []


@pytest.mark.parametrize(("plant", "kinds"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(copied, plant, kinds):
    for number in range(6):  # each episode once, in every way that a fault has
        folder = copied(number)
        plant(folder)

        found = set(kinds_in(folder.path))

        assert found & kinds, (number, found)
        assert found <= KINDS.keys()


@given(PLANS)
@settings(max_examples=60, database=None, phases=[Phase.generate])
def test_no_random_episode_is_accused(chatml_tokenizer, tmp_path_factory, plan):
    folder = tmp_path_factory.mktemp("healthy")
    player = Player(chatml_tokenizer, folder)
    asyncio.run(player.play(plan))
    trajectory = player.model.trajectory
    if trajectory.turns:
        trajectory.save(folder / "episode.safetensors")
        assert kinds_in(folder / "episode.safetensors") == []


def doctor(capsys, *arguments):
    code = main(["doctor", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_command_tells_each_finding_in_a_line(healthy, copied, capsys):
    assert doctor(capsys, healthy)[0] == 0
    folder = copied(1)
    plant_mask_on_prompt(folder)

    code, out, err = doctor(capsys, folder.path)

    assert code == 1 and err == f"next: strands-sglang view {folder.path} --open\n"
    first = out.splitlines()[0]
    assert first.startswith("mask-not-sampled: ") and "rows.safetensors, episode e1, sequence " in first
    assert "it is part of a prompt, which the model did not sample" in first
    code, out, _ = doctor(capsys, folder.path, "--json")
    assert code == 1 and json.loads(out)[0]["kind"] == "mask-not-sampled"


def test_a_flat_group_is_told_and_is_no_error(chatml_tokenizer, tmp_path, capsys):
    write_step(tmp_path, [(record(chatml_tokenizer, n, answers=1), 0.5, "g") for n in range(2)])
    code, out, err = doctor(capsys, tmp_path)
    assert code == 0 and out.startswith("flat-group: ") and "1 finding in 2 episodes" in out and not err


def test_an_evaluation_without_trajectories_is_not_called_right(capsys):
    folder = Path(__file__).parents[2] / "fixtures" / "0.5.0" / "command" / "out"
    assert main(["doctor", str(folder)]) == 1
    told = "only the conversations of 4 episodes: no tokens are recorded, so none were checked: "
    assert capsys.readouterr().out == f"{told}`strands-env eval --keep-trajectories` records them\n"
    assert main(["doctor", str(folder), "--json"]) == 1 and capsys.readouterr().out == "[]\n"


def test_what_cannot_be_read_is_one_clear_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    for name in ("empty", "cut.safetensors", "missing"):
        code, out, err = doctor(capsys, tmp_path / name)
        assert (code, out) == (2, "") and err.count("\n") == 1 and name in err


HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\r\x1b[2J",
    "\u202egnp.exe",
    "<script>alert(1)</script>",
    "\x9b5n",
]


@pytest.mark.parametrize("command", ["doctor", "show"])
def test_nothing_of_an_episode_is_interpreted_by_a_terminal(chatml_tokenizer, tmp_path, capsys, command):
    model = SGLangModel(
        tokenizer=chatml_tokenizer, client=ScriptedSGLang(chatml_tokenizer, [" ".join(HOSTILE), "ok"]).client()
    )
    agent = make_agent(model, callback_handler=None)
    agent(" ".join(HOSTILE))
    agent("again")
    model.trajectory.turns[0].fate = Reason("in_words", detail=(HOSTILE[1],))
    path = tmp_path / "a\x1b[31m.safetensors"
    model.trajectory.save(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"red\\u001b", b"rod\\u001b"))  # so that the doctor quotes it

    main([command, str(path)])

    told = capsys.readouterr()
    assert "\\u{1b}" in told.out
    assert all(character.isprintable() or character == "\n" for character in told.out + told.err)


# === other kinds of files ===


@pytest.fixture(scope="module")
def evaluated(chatml_tokenizer, tmp_path_factory):
    """The folder of an evaluation with two prompts of three samples."""
    return specimens.write_evaluation(tmp_path_factory.mktemp("evaluation"), chatml_tokenizer, prompts=2, samples=3)


def change_records(folder, change):
    path = folder / "results.jsonl"
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def swap_rewards(records):
    one, other = [record for record in records if record["prompt_id"] == records[0]["prompt_id"]][:2]
    one["reward"], other["reward"] = other["reward"], one["reward"]


def fail_infrastructure(records):
    records[1]["termination_reason"] = "infrastructure_error"


def fail_scoring(records):
    records[1]["reward_error_is_infrastructure"] = True


def change_answer(records):
    records[2]["observation"]["messages"][-1]["content"][0]["text"] = "Something else."


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (swap_rewards, "reward-sibling"),
        (fail_infrastructure, "reward-failure"),
        (fail_scoring, "reward-failure"),
        (change_answer, "id-text"),
    ],
)
def test_a_fault_in_an_evaluation_is_found(evaluated, tmp_path, change, kind):
    assert kinds_in(evaluated) == []
    shutil.copytree(evaluated, tmp_path / "evaluation")
    change_records(tmp_path / "evaluation", change)
    assert kind in (kinds_in(tmp_path / "evaluation"))


def slime_samples():
    """Two rollouts of one prompt, as slime dumps them; the first has two samples, which share their start."""
    ours = {"strands_sglang": {"outcome": "task_complete"}}
    first = {"group_index": 0, "index": 1, "rollout_id": 1, "reward": 1.0, "status": "completed", "metadata": ours}
    first["weight_versions"] = ["1"]
    long = {"tokens": [*range(12)], "response_length": 8, "loss_mask": [1, 1, 0, 0, 1, 1, 1, 1]}
    long["rollout_log_probs"] = [-1.0, -2.0, 0.0, 0.0, -3.0, -4.0, -5.0, -6.0]
    short = {"tokens": [0, 1, 2, 3, 4, 5, 20, 21], "response_length": 4, "loss_mask": [0, 0, 0, 1]}
    short["rollout_log_probs"] = [0.0, 0.0, 0.0, -2.5]
    other = {**first, **long, "index": 2, "rollout_id": 2, "reward": 0.0, "weight_versions": ["1", "2"]}
    return [{**first, **long}, {**first, **short}, other]


@pytest.mark.parametrize(
    ("number", "changed", "kind"),
    [
        (1, {"loss_mask": [1, 0, 0, 1], "rollout_log_probs": [-1.0, 0.0, 0.0, -2.5]}, "trained-twice"),
        (2, {"weight_versions": ["2", "1"]}, "version-falls"),
        (2, {"reward": 1.0}, "flat-group"),
        (2, {"status": "failed"}, "reward-failure"),
        (2, {"rollout_routed_experts": [[1]] * 10}, "experts-missing"),
        (2, {"metadata": {"strands_sglang": {"outcome": "max_tokens_reached"}}}, "cut-complete"),
        (2, {"loss_mask": [1, 1]}, "structure"),
        (2, {"loss_mask": [2, 1, 0, 0, 1, 1, 1, 1]}, "structure"),
        (2, {"rollout_log_probs": None}, "logprobs"),
        (2, {"rollout_log_probs": [-1.0, math.nan, 0.0, 0.0, -3.0, -4.0, -5.0, -6.0]}, "logprobs"),
        (2, {"weight_versions": []}, "version-missing"),
        (2, {"status": "aborted"}, "reward-failure"),
    ],
)
def test_a_fault_in_a_dump_of_slime_is_found(tmp_path, number, changed, kind):
    torch = pytest.importorskip("torch")
    samples = slime_samples()
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "healthy.pt")
    assert kinds_in(tmp_path / "healthy.pt") == []
    samples[number] |= changed
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    assert kind in (kinds_in(tmp_path / "0.pt"))


def test_a_finding_names_its_place_from_the_file_to_the_tokens():
    finding = Finding("kind", "why", "rows.safetensors", group="g", episode="e", turn=2, token=3, count=4)
    assert finding.where == "rows.safetensors, episode e, turn 2, token 3 to 6"


def test_what_an_importer_refuses_is_a_finding(tmp_path):
    turn = {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3],
        "loss_mask": [0, 1, 1],
        "logprobs": [0.0, 0.0, -1.0],
    }
    trace = {"schema_version": 1, "turns": [turn]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    found = findings(read([tmp_path / "trace.json"]))
    assert {finding.kind for finding in found} <= {"mask-not-sampled", "structure"} and found


@pytest.mark.parametrize("name", ["step", "trajectories", "evaluation"])
def test_random_healthy_folders_have_no_finding(chatml_tokenizer, tmp_path, name):
    if name == "step":
        folder = specimens.write_step(tmp_path / name, chatml_tokenizer, seed=4)
    elif name == "evaluation":
        folder = specimens.write_evaluation(tmp_path / name, chatml_tokenizer, prompts=8, samples=6)
    else:
        folder = specimens.write_trajectories(tmp_path / name, chatml_tokenizer, 40)
    assert [finding.where + finding.why for finding in findings(read([folder]))] == []


def broken(value, rng):
    """Change one random place of a JSON value, or remove it."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if rng.random() < 0.1:
            value.pop(key)
        else:
            value[key] = broken(value[key], rng)
        return value
    return rng.choice([None, -1, 2**40, 1.5, float("nan"), "x", "", [], {}, True, [1, 2], {"a": 1}])


def test_no_damage_to_a_file_is_an_exception(chatml_tokenizer, tmp_path):
    write_healthy(tmp_path, chatml_tokenizer, (1.0, 0.0, 0.25))
    for number in range(150):
        folder = Folder(tmp_path, number)
        name = "rows.safetensors" if number % 2 else f"trajectories/e{number % 3}.safetensors"
        before = (folder.path / name).read_bytes()
        if number % 5 == 0:
            (folder.path / name).write_bytes(before[: folder.random.randrange(len(before))])
        elif number % 5 == 1:
            folder.edit(lambda tensors, facts: tensors.pop(folder.random.choice(sorted(tensors))), name)  # noqa: B023
        else:
            folder.edit(lambda tensors, facts: broken(facts, folder.random), name)  # noqa: B023
        try:
            groups = read([folder.path])
            render(groups, findings(groups))
            for color in COLORS:
                list(episode_lines(groups, color=color))
        except UnreadableError as error:
            assert "\n" not in str(error)
        (folder.path / name).write_bytes(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("constrained", math.nan),
        ("latency_s", []),
        ("weight_versions", [["3", 0.5, 2**40]]),
    ],
)
def test_a_trajectory_with_a_wrong_value_is_a_finding(copied, name, value):
    folder = copied()

    def plant(tensors, facts):
        turn = facts["turns"][1]
        (turn if name in turn else turn["answer"])[name] = value

    folder.edit_trajectory(plant)
    groups = read([folder.path])
    found = findings(groups)
    assert [one.kind for one in found if name in one.why] == ["structure"]
    render(groups, found)


def test_any_text_and_number_of_a_call_is_healthy(rollout, tmp_path):
    _, model = rollout(["ok"], sampling_params={"temperature": 1, "logit_bias": {7: 0.5, 11: 1e-9}})
    agent = make_agent(model)
    agent("half of a pair: \ud800 and 1e400")
    model.trajectory.note_end(outcome="task_complete", reward=np.float32(0.1), turn_rewards={0: 1})
    model.trajectory.save(tmp_path / "one.safetensors")
    assert kinds_in(tmp_path / "one.safetensors") == []


def test_an_episode_that_goes_on_after_its_end_is_healthy(rollout, tmp_path):
    _, model = rollout(["one", "two"])
    agent = make_agent(model)
    agent("q")
    model.trajectory.note_end(outcome="task_complete", reward=0.5)
    model.trajectory.save(tmp_path / "one.safetensors")
    agent("r")
    model.trajectory.save(tmp_path / "one.safetensors")
    assert kinds_in(tmp_path / "one.safetensors") == []


@pytest.mark.parametrize("loss", ["trl:bnpo", "verl:token-mean"])
def test_weights_of_a_smaller_micro_batch_are_healthy(healthy, tmp_path, loss):
    rows = credit.TrainingRows.load(healthy / "rows.safetensors")
    split = [list(range(len(rows) - 1)), [len(rows) - 1]]
    for row, weight in zip(rows, rows.weights("token_mean", loss, micro_batches=split), strict=True):
        object.__setattr__(row, "loss_weight", weight)
    rows.save(tmp_path / "rows.safetensors")
    assert kinds_in(tmp_path) == []  # also without the trajectories, which hold the versions of shared tokens


def write_asked(folder, rollout, asked):
    """Write a step of episodes, each with its question and its group."""
    played = []
    for number, (question, group) in enumerate(asked):
        _, model = rollout([f"answer {number}"])
        make_agent(model)(question)
        played.append((model.trajectory, number / 8, group))
    write_step(folder, played)


@pytest.mark.parametrize(
    ("asked", "group", "episode"),
    [
        ([("first", "g0")] * 2 + [("first", "g1")] + [("second", "g1")] * 3, "g1", "e2"),
        ([("first", "g")] * 2 + [("second", "g")] * 2, "g", "e2"),
    ],
    ids=["an episode", "two prompts"],
)
def test_an_episode_in_another_prompts_group_is_found(rollout, tmp_path, asked, group, episode):
    write_asked(tmp_path, rollout, asked)
    found = findings(read([tmp_path]))
    assert [(finding.kind, finding.group, finding.episode) for finding in found] == [("group", group, episode)]


def test_one_trajectory_under_two_names_is_found(rollout, tmp_path):
    _, model = rollout(["one answer of several words"])
    make_agent(model)("q")
    for name in ("a", "b"):
        model.trajectory.save(tmp_path / f"{name}.safetensors")
    assert kinds_in(tmp_path) == ["trained-twice"]


def graph():
    """A trace of verifiers with one call."""
    asked = {"parent": None, "sampled": False, "token_ids": [1, 2], "mask": [False, False]}
    said = {"parent": 0, "sampled": True, "token_ids": [3, 4], "mask": [True, True], "logprobs": [-1.0, -2.0]}
    about = {"id": "e", "ok": True, "task": {"key": "g"}, "agent": {}, "rewards": {"r": {"score": 1.0}}}
    return {**about, "nodes": [asked, said], "calls": [{"node": 1, "finish_reason": "stop"}]}


@pytest.mark.parametrize("copies, kinds", [(1, []), (2, ["trained-twice"])])
def test_a_trace_of_verifiers_that_is_there_twice_is_found(tmp_path, copies, kinds):
    (tmp_path / "traces.json").write_text(json.dumps([graph()] * copies))
    assert kinds_in(tmp_path / "traces.json") == kinds


def test_a_run_is_read_by_its_folder(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "run" / "steps" / "step-000003")
    assert len(read([tmp_path / "run"])) == 2


def sample(tokenizer, path, text, logprobs, params):
    """Write a trajectory of one answer, whose tokens have the next logprobs."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer = ScriptedAnswer(token_ids=ids, logprobs=list(itertools.islice(logprobs, len(ids))), finish_reason="length")
    server = ScriptedSGLang(tokenizer, [answer])
    params = {**params, "max_new_tokens": len(ids)}
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), sampling_params=params)
    with contextlib.suppress(MaxTokensReachedException):
        make_agent(model)("q")
    model.trajectory.save(path.with_suffix(".safetensors"))


@pytest.mark.parametrize(
    ("params", "logprob", "kinds"),
    [
        ({"temperature": 1.0}, -1.0, ["repeated"]),
        ({}, -1.0, ["repeated"]),
        ({"temperature": 0}, -1.0, []),
        ({"top_k": 1}, -1.0, []),
        ({"top_p": 0.2}, -1.0, []),
        ({"temperature": 1.0}, -0.1, []),  # an answer that is likely to come again
    ],
)
def test_siblings_that_one_seed_made_equal_are_named(chatml_tokenizer, tmp_path, params, logprob, kinds):
    for name in ("a", "b"):
        noise = random.Random(name)  # batches differ, so logprobs do in their last digits
        logprobs = (logprob - noise.random() / 1e6 for _ in itertools.count())
        answer = "an answer that comes once and never again, word by word"
        sample(chatml_tokenizer, tmp_path / name, answer, logprobs, params)
    found = findings(read([tmp_path]))
    assert [one.kind for one in found] == kinds
    assert all("tokens are those of episode a: " in one.why for one in found)


@pytest.mark.parametrize(
    ("params", "suspicious", "usual", "kinds"),
    [
        ({}, 0.0, 0.0, []),
        ({}, 0.0, -1.5, ["logprobs"]),
        ({"temperature": 0}, 0.0, -1.5, []),
        ({"temperature": 0.1}, 0.0, -1.5, []),
        ({"temperature": 0}, -1.0, -1.5, ["logprobs"]),
    ],
)
def test_a_policy_without_entropy_is_not_accused(chatml_tokenizer, tmp_path, params, suspicious, usual, kinds):
    """Tokens that are always certain are no fault; certain ones where no others are, are one."""
    for number, logprob in enumerate((suspicious, usual)):
        noise = random.Random(number)
        logprobs = (logprob * (1 + noise.random() * number) for _ in itertools.count())
        sample(chatml_tokenizer, tmp_path / f"{number}", "one and the same answer to all of it", logprobs, params)
    assert kinds_in(tmp_path) == kinds
