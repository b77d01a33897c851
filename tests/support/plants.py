"""Plants faults in healthy files: one function per kind, written from docs/reference/files.md and from what goes wrong.

A function gets a folder, changes one place in one file, and returns what it did, or None if no file there can have the
fault. It knows the file formats and nothing about their readers.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from strands_sglang import Trajectory, Turn
from strands_sglang.protocol.generation import VersionSpan

Plant = Callable[[Path, Random], "str | None"]

TRAJECTORY_FAULTS: dict[str, Plant] = {}
WRITTEN_FAULTS: dict[str, Plant] = {}
"""Faults of a program that records wrongly: the file is written after them, so its checksum fits."""
STEP_FAULTS: dict[str, Plant] = {}
EVALUATION_FAULTS: dict[str, Plant] = {}


def into(table: dict[str, Plant]) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        table[plant.__name__] = plant
        return plant

    return note


class Tensors:
    """A safetensors file that is changed: its tensors, and the JSON in one of them."""

    def __init__(self, path: Path, described: str) -> None:
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        self.path, self.described, self.metadata = path, described, header["__metadata__"]
        self.tensors = {name: values.copy() for name, values in load_file(path).items()}
        self.json = json.loads(self.tensors[described].tobytes())

    def save(self) -> None:
        self.tensors[self.described] = np.frombuffer(json.dumps(self.json).encode(), "uint8")
        save_file(self.tensors, self.path, self.metadata)


class Recorded(Tensors):
    """A trajectory: which entries of the tensors each turn has."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "trajectory")
        self.turns = self.json["turns"]
        self.answered = [turn for turn in self.turns if turn["answer"] and turn["answer"]["sampled_tokens"]]

    def slice(self, name: str, turn: dict[str, Any]) -> slice:
        at = 0
        for other in self.turns:
            answer = other["answer"] or {}
            count = {
                "prompt_ids": other["prompt_tokens"],
                "output_ids": answer.get("sampled_tokens", 0),
                "logprobs": answer.get("sampled_tokens", 0) if answer.get("has_logprobs") else 0,
            }[name]
            if other is turn:
                return slice(at, at + count)
            at += count
        raise ValueError("no such turn")

    def insert(self, name: str, at: int, value: Any) -> None:
        self.tensors[name] = np.insert(self.tensors[name], at, value).astype(self.tensors[name].dtype)

    def remove(self, name: str, at: int) -> None:
        self.tensors[name] = np.delete(self.tensors[name], at)

    def pieces(self) -> dict[int, bytes]:
        ends = np.cumsum(self.tensors["pieces.lengths"])
        data = self.tensors["pieces.bytes"].tobytes()
        starts = ends - self.tensors["pieces.lengths"]
        return {
            int(token): data[start:end]
            for token, start, end in zip(self.tensors["pieces.ids"], starts, ends, strict=True)
        }

    def simple(self, turn: dict[str, Any]) -> bool:
        """Whether tokens can be added to the turn's answer without changing tensors that this class does not know."""
        answer = turn["answer"]
        return not (answer["has_sampling_mask"] or answer.get("has_sampling_logprobs")) and not any(
            name.startswith("routed_experts") for name in self.tensors
        )


def recorded(folder: Path, random: Random) -> list[Recorded]:
    paths = sorted(folder.rglob("*.safetensors"))
    paths = [path for path in paths if path.name != "rows.safetensors"]
    random.shuffle(paths)
    return [Recorded(path) for path in paths]


def in_a_turn(
    folder: Path, random: Random, fits: Callable[[Recorded, dict[str, Any]], bool], change: Callable[..., Any]
) -> str | None:
    """Change one answered turn that fits, of any trajectory in the folder."""
    for file in recorded(folder, random):
        turns = [turn for turn in file.answered if fits(file, turn)]
        if turns:
            turn = random.choice(turns)
            what = change(file, turn)
            file.save()
            return f"{file.path.name}, turn {turn['index']}: {what or ''}"
    return None


@into(TRAJECTORY_FAULTS)
def encoded_again(folder: Path, random: Random) -> str | None:
    """A sampled token becomes two others of the same text, as when text is encoded again."""

    def splits(file: Recorded, turn: dict[str, Any]) -> list[tuple[int, int, int]]:
        pieces = file.pieces()
        ids = {piece: token for token, piece in pieces.items() if piece}
        where = file.slice("output_ids", turn)
        return [
            (at, ids[piece[:cut]], ids[piece[cut:]])
            for at in range(where.start, where.stop)
            if (piece := pieces.get(int(file.tensors["output_ids"][at]), b""))
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ]

    def change(file: Recorded, turn: dict[str, Any]) -> None:
        at, left, right = random.choice(splits(file, turn))
        inside = at - file.slice("output_ids", turn).start
        where = file.slice("logprobs", turn)
        if where.stop > where.start:
            file.insert("logprobs", where.start + inside, file.tensors["logprobs"][where.start + inside])
        file.tensors["output_ids"][at] = right
        file.insert("output_ids", at, left)
        turn["answer"]["sampled_tokens"] += 1

    return in_a_turn(folder, random, lambda file, turn: file.simple(turn) and bool(splits(file, turn)), change)


@into(TRAJECTORY_FAULTS)
def untrained_answer_called_trained(folder: Path, random: Random) -> str | None:
    def change(file: Recorded, turn: dict[str, Any]) -> str:
        if turn["status"] == "discarded":
            turn["status"] = "final"
            return "discarded"
        name = "constrained" if turn["constrained"] else "is_auxiliary"
        turn[name] = False
        return name

    def fits(file: Recorded, turn: dict[str, Any]) -> bool:
        return turn["constrained"] or turn["is_auxiliary"] or turn["status"] == "discarded"

    return in_a_turn(folder, random, fits, change)


@into(TRAJECTORY_FAULTS)
def any_byte_changed(folder: Path, random: Random) -> str | None:
    """A tensor that no other check knows has another value."""
    file = random.choice(recorded(folder, random))
    name = random.choice(sorted(name for name, values in file.tensors.items() if len(values) and name != "trajectory"))
    values = file.tensors[name].view("uint8").reshape(-1)
    values[random.randrange(len(values))] ^= 1
    file.save()
    return f"{file.path.name}: {name}"


@into(TRAJECTORY_FAULTS)
def fact_changed(folder: Path, random: Random) -> str | None:
    def change(file: Recorded, turn: dict[str, Any]) -> str:
        name = random.choice(["reason", "note", "latency_s"])
        of = turn["answer"] if name == "latency_s" else turn
        of[name] = -3.0 if name == "latency_s" else "another reason"
        return name

    return in_a_turn(folder, random, lambda file, turn: True, change)


def written(change: Callable[[Turn, Random], bool | None]) -> Callable[[Turn, Random], bool | None]:
    """Register a change of one trained answer of at least 8 tokens; it returns False where it cannot be made."""

    def plant(folder: Path, random: Random) -> str | None:
        paths = sorted(folder.rglob("*.safetensors"))
        for path in random.sample(paths, len(paths)):
            trajectory = Trajectory.load(path)
            turns = [
                turn
                for turn in trajectory.turns
                if len(turn.output_ids) > 8 and not (turn.is_auxiliary or turn.constrained or turn.image_inputs())
                if turn.status in ("answered", "committed", "final")
            ]
            for turn in random.sample(turns, len(turns)):
                if change(turn, random) is False:
                    continue
                for other in paths:
                    other.unlink()
                trajectory.save(path)
                return f"{path.name}, turn {turn.index}"
        return None

    plant.__name__ = change.__name__
    WRITTEN_FAULTS[change.__name__] = plant
    return change


def answer_with(turn: Turn, **changed: Any) -> None:
    turn.generation = replace(turn.generation, **changed)  # type: ignore[type-var]


def other_turn(turn: Turn) -> Turn | None:
    turns = turn.trajectory.turns if turn.trajectory is not None else []
    fits = (one for one in turns if one is not turn and len(one.output_ids) > 8 and one.output_ids != turn.output_ids)
    return next(fits, None)


@written
def logprobs_all_equal(turn: Turn, random: Random) -> None:
    answer_with(turn, logprobs=array("d", [random.choice((0.0, -1.25))] * len(turn.output_ids)))


@written
def logprob_impossible(turn: Turn, random: Random) -> None:
    logprobs = array("d", turn.generation.logprobs)  # type: ignore[union-attr,arg-type]
    logprobs[random.randrange(len(logprobs))] = random.choice((0.7, math.nan, math.inf, -math.inf))
    answer_with(turn, logprobs=logprobs)


@written
def logprobs_of_another_answer(turn: Turn, random: Random) -> bool | None:
    other = other_turn(turn)
    if other is None:
        return False
    values = list(other.generation.logprobs) * 99  # type: ignore[union-attr,arg-type]
    answer_with(turn, logprobs=array("d", values[: len(turn.output_ids)]))
    return None


@written
def logprobs_missing_in_one_turn(turn: Turn, random: Random) -> bool | None:
    if other_turn(turn) is None:
        return False
    answer_with(turn, logprobs=None)
    return None


@written
def version_of_another_kind(turn: Turn, random: Random) -> bool | None:
    if other_turn(turn) is None:
        return False
    answer_with(turn, weight_versions=(VersionSpan("step-7", 0, len(turn.output_ids)),))
    return None


@written
def prompt_cut(turn: Turn, random: Random) -> bool | None:
    if len(turn.prompt_ids) < 8:
        return False
    turn.prompt_ids = turn.prompt_ids[random.randrange(1, 6) :]
    return None


@written
def answers_exchanged(turn: Turn, random: Random) -> bool | None:
    other = other_turn(turn)
    if other is None:
        return False
    turn.generation, other.generation = other.generation, turn.generation
    return None


@written
def end_of_the_parent_lost(turn: Turn, random: Random) -> bool | None:
    if turn.parent is None or len(turn.parent.output_ids) < 4 or turn.parent_kept is not None:
        return False
    turn.parent_kept = len(turn.parent.output_ids) - random.randrange(2, 4)
    return None


@written
def call_recorded_twice(turn: Turn, random: Random) -> None:
    names = [name for name in Turn.__slots__ if not name.startswith("_")]
    turns = turn.trajectory._turns  # type: ignore[union-attr]
    turns.append(Turn(**{**{name: getattr(turn, name) for name in names}, "index": turns[-1].index + 1}))


@written
def reward_of_a_turn_that_is_none(turn: Turn, random: Random) -> None:
    turn.trajectory.note_end(turn_rewards={999: 0.5})  # type: ignore[union-attr]


class Rows(Tensors):
    """The rows of a training step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(next(iter(sorted(folder.rglob("rows.safetensors")))), "description")
        self.offsets = [int(at) for at in self.tensors["row_offsets"]]
        self.rows = self.json["rows"]

    def slice(self, number: int) -> slice:
        return slice(self.offsets[number], self.offsets[number + 1])

    def of_episode(self, name: str) -> list[int]:
        return [number for number, row in enumerate(self.rows) if row["episode"] == name]

    def positions(self, number: int, mask: int | None = None) -> list[int]:
        where = self.slice(number)
        return [at for at in range(where.start, where.stop) if mask in (None, self.tensors["loss_mask"][at])]

    def several(self) -> list[str]:
        """Episodes of several rows."""
        names = list(dict.fromkeys(row["episode"] for row in self.rows))
        return [name for name in names if len(self.of_episode(name)) > 1]


def row_fault(change: Callable[[Rows, Random], str | None]) -> Plant:
    def plant(folder: Path, random: Random) -> str | None:
        file = Rows(folder)
        what = change(file, random)
        if what is not None:
            file.save()
        return what

    plant.__name__ = change.__name__
    return into(STEP_FAULTS)(plant)


@row_fault
def trained_logprobs_shifted_by_one(file: Rows, random: Random) -> str | None:
    number = random.randrange(len(file.rows))
    at = file.positions(number, 1)
    if len(set(file.tensors["logprobs"][at])) < 2:
        return None
    file.tensors["logprobs"][at] = np.roll(file.tensors["logprobs"][at], 1)
    return f"row {number}"


@row_fault
def mask_on_a_prompt_token(file: Rows, random: Random) -> str | None:
    """A token of the prompt or of a tool result is trained."""
    number = random.randrange(len(file.rows))
    free = file.positions(number, 0)
    at = random.choice(free)
    file.tensors["loss_mask"][at] = 1
    file.tensors["logprobs"][at] = -0.5
    file.tensors["advantages"][at] = file.tensors["advantages"][file.positions(number, 1)[0]]
    file.tensors["versions"][at] = file.tensors["versions"][file.positions(number, 1)[-1]]
    return f"row {number}, token {at - file.offsets[number]}"


@row_fault
def row_version_falls(file: Rows, random: Random) -> str | None:
    number = random.randrange(len(file.rows))
    at = file.positions(number, 1)
    if len(at) < 2:
        return None
    file.json["versions"] += ["90", "80"]
    file.tensors["versions"][at] = len(file.json["versions"]) - 2
    file.tensors["versions"][at[random.randrange(1, len(at)) :]] += 1
    return f"row {number}"


@row_fault
def trained_twice(file: Rows, random: Random) -> str | None:
    """Two rows train the tokens that they share."""
    ids, mask = file.tensors["token_ids"], file.tensors["loss_mask"]
    pairs = [pair for name in file.several() for pair in combinations(file.of_episode(name), 2)]
    for first, second in random.sample(pairs, len(pairs)):
        for mine, other in zip(file.positions(first), file.positions(second), strict=False):
            if ids[mine] != ids[other]:
                break
            if mask[mine] != mask[other]:
                source, target = (mine, other) if mask[mine] else (other, mine)
                for column in ("loss_mask", "logprobs", "advantages", "versions"):
                    file.tensors[column][target] = file.tensors[column][source]
                return f"rows {first} and {second}, token {mine - file.offsets[first]}"
    return None


def siblings(file: Rows, random: Random) -> tuple[str, str] | None:
    """Two episodes of a group with different rewards."""
    by_group: dict[str, list[str]] = {}
    for name, facts in file.json["episodes"].items():
        if facts["reward"] is not None and name in file.json["rewards"]:
            by_group.setdefault(json.dumps(facts["group"]), []).append(name)
    pairs = [
        (left, right)
        for names in by_group.values()
        for left in names
        for right in names
        if file.json["rewards"][left] != file.json["rewards"][right]
    ]
    return random.choice(pairs) if pairs else None


@row_fault
def reward_on_the_wrong_sibling(file: Rows, random: Random) -> str | None:
    pair = siblings(file, random)
    if pair is None:
        return None
    left, right = pair
    rewards, facts = file.json["rewards"], file.json["episodes"]
    rewards[left], rewards[right] = rewards[right], rewards[left]
    facts[left]["reward"], facts[right]["reward"] = facts[right]["reward"], facts[left]["reward"]
    return f"{left} and {right}"


@row_fault
def advantages_on_the_wrong_sibling(file: Rows, random: Random) -> str | None:
    pair = siblings(file, random)
    if pair is None or not all(file.of_episode(name) for name in pair):
        return None
    values = [file.tensors["advantages"][file.positions(file.of_episode(name)[0], 1)[0]] for name in pair]
    if values[0] == values[1]:
        return None
    for name, value in zip(pair, reversed(values), strict=True):
        for number in file.of_episode(name):
            file.tensors["advantages"][file.positions(number, 1)] = value
    return f"{pair}"


@row_fault
def advantage_divided_by_rows(file: Rows, random: Random) -> str | None:
    names = [
        name for name in file.several() if file.tensors["advantages"][file.positions(file.of_episode(name)[0], 1)].any()
    ]
    if not names:
        return None
    name = random.choice(names)
    for number in file.of_episode(name):
        file.tensors["advantages"][file.slice(number)] /= len(file.of_episode(name))
    return name


@row_fault
def advantage_of_the_other_sign(file: Rows, random: Random) -> str | None:
    numbers = [
        number for number in range(len(file.rows)) if file.tensors["advantages"][file.positions(number, 1)].any()
    ]
    if not numbers:
        return None
    number = random.choice(numbers)
    file.tensors["advantages"][file.slice(number)] *= -1
    return f"row {number}"


@row_fault
def row_untrained(file: Rows, random: Random) -> str | None:
    name = random.choice([row["episode"] for row in file.rows])
    number = file.of_episode(name)[-1]
    for column in ("loss_mask", "logprobs", "advantages"):
        file.tensors[column][file.slice(number)] = 0
    return f"row {number}, the last of {name}"


@row_fault
def row_missing(file: Rows, random: Random) -> str | None:
    if len(file.rows) < 2:
        return None
    number = random.randrange(len(file.rows))
    where = file.slice(number)
    for column, values in list(file.tensors.items()):
        if len(values) == file.offsets[-1] and column not in ("row_offsets", "description"):
            file.tensors[column] = np.delete(values, where)
    if "loss_weights" in file.tensors:
        file.tensors["loss_weights"] = np.delete(file.tensors["loss_weights"], number)
    lengths = np.delete(np.diff(file.offsets), number)
    file.tensors["row_offsets"] = np.asarray([0, *np.cumsum(lengths)], "int64")
    return f"row {number} of {file.rows.pop(number)['episode']}"


@row_fault
def row_logprob_not_a_logprob(file: Rows, random: Random) -> str | None:
    number = random.randrange(len(file.rows))
    file.tensors["logprobs"][random.choice(file.positions(number, 1))] = random.choice([float("nan"), 0.3])
    return f"row {number}"


@row_fault
def cut_turn_called_complete(file: Rows, random: Random) -> str | None:
    spans = [span for row in file.rows for span in row["spans"] if span[3] in ("length", "abort")]
    if not spans:
        return None
    random.choice(spans)[3] = "stop"
    return "a span"


@row_fault
def turn_of_another_call(file: Rows, random: Random) -> str | None:
    rows = [row for row in file.rows if len(row["spans"]) > 1]
    if not rows:
        return None
    row = random.choice(rows)
    row["spans"][-1][1] += 1
    row["spans"][-1][2] -= 1
    return row["episode"]


@row_fault
def trainer_logprobs_of_other_tokens(file: Rows, random: Random) -> str | None:
    """The trainer computed them over a row in another order."""
    known = file.tensors["trainer_logprobs"]
    for number in random.sample(range(len(file.rows)), len(file.rows)):
        trained = file.positions(number, 1)
        if len(trained) >= 16:
            known[trained] = np.roll(known[trained], len(trained) // 2)
            return f"row {number}"
    return None


@row_fault
def version_where_nothing_is_trained(file: Rows, random: Random) -> str | None:
    place = int(random.choice(np.flatnonzero(file.tensors["loss_mask"] == 0)))
    file.tensors["versions"][place] = 0
    return f"token {place}"


@row_fault
def newer_than_the_update(file: Rows, random: Random) -> str | None:
    file.json["settings"] |= {"version": 0, "max_staleness": random.randrange(3)}
    return "version 0"


@into(STEP_FAULTS)
def trajectories_exchanged(folder: Path, random: Random) -> str | None:
    file = Rows(folder)
    pair = siblings(file, random)
    if pair is None:
        return None
    left, right = (next(folder.rglob(f"trajectories/{name}.safetensors")) for name in pair)
    ours, theirs = left.read_bytes(), right.read_bytes()
    left.write_bytes(theirs)
    right.write_bytes(ours)
    return f"{left.name} and {right.name}"


def records(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    path = next(iter(sorted(folder.rglob("results.jsonl"))))
    return path, [json.loads(line) for line in path.read_bytes().splitlines()]


def save_records(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@into(EVALUATION_FAULTS)
def rewards_exchanged(folder: Path, random: Random) -> str | None:
    path, lines = records(folder)
    pairs = [
        (left, right)
        for left in lines
        for right in lines
        if left["prompt_id"] == right["prompt_id"] and left["reward"] != right["reward"] and left["reward"] is not None
    ]
    if not pairs:
        return None
    left, right = random.choice(pairs)
    for name in ("reward", "reward_info"):
        left[name], right[name] = right[name], left[name]
    save_records(path, lines)
    return f"{left['key']} and {right['key']}"


@into(EVALUATION_FAULTS)
def infrastructure_counted(folder: Path, random: Random) -> str | None:
    path, lines = records(folder)
    line = random.choice([line for line in lines if line["reward"] is not None])
    line["termination_reason"] = "infrastructure_error"
    save_records(path, lines)
    return str(line["key"])


@into(EVALUATION_FAULTS)
def files_exchanged(folder: Path, random: Random) -> str | None:
    paths = sorted(folder.rglob("*.safetensors"))
    if len(paths) < 2:
        return None
    left, right = random.sample(paths, 2)
    ours, theirs = left.read_bytes(), right.read_bytes()
    if ours == theirs:
        return None
    left.write_bytes(theirs)
    right.write_bytes(ours)
    return f"{left.name} and {right.name}"


def record_fault(change: Callable[[dict[str, Any]], None]) -> Plant:
    """Register a change of one record of an evaluation."""

    def plant(folder: Path, random: Random) -> str | None:
        path, lines = records(folder)
        line = random.choice(lines)
        change(line)
        save_records(path, lines)
        return str(line["key"])

    plant.__name__ = change.__name__
    return into(EVALUATION_FAULTS)(plant)


@into(EVALUATION_FAULTS)
def record_twice(folder: Path, random: Random) -> str | None:
    path, lines = records(folder)
    save_records(path, [*lines, random.choice(lines)])
    return "the last line"


@record_fault
def result_of_another_model(record: dict[str, Any]) -> None:
    record["config"] = "0" * 32


@record_fault
def question_changed(record: dict[str, Any]) -> None:
    record["observation"]["messages"][0]["content"][0]["text"] += " Please."


@record_fault
def answer_missing(record: dict[str, Any]) -> None:
    record["observation"]["messages"].pop()


@record_fault
def rewarded_as_an_error(record: dict[str, Any]) -> None:
    record["is_errored"] = True
