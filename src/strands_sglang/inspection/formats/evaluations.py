"""From the folder of an evaluation to `Group`s: the samples of each prompt are one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...messages.said import said_in
from ..records import Episode, Group
from .trajectories import episode_of, load_trajectory

FORMAT = "strands-env evaluation 1"

REQUIRED = ("key", "prompt_id", "sample_index", "reward", "termination_reason", "observation")


class EvaluationFileError(ValueError):
    """A file of an evaluation is damaged, or of an unknown version."""


def read_evaluation(results: Path) -> list[Group]:
    """Read an evaluation. It may still be running.

    Args:
        results: Its results file, `*.jsonl`.

    Raises:
        OSError: A file cannot be read.
        EvaluationFileError: A file is damaged.
        TrajectoryFileError: A trajectory is damaged.
    """
    stem = results.name.removesuffix(".jsonl")
    plan_file = results.with_name(f"{stem}.run.json")
    try:
        plan = json.loads(plan_file.read_bytes())
        if plan["format"] != FORMAT:
            raise EvaluationFileError(f"{plan_file}: its format is {plan['format']!r}, not {FORMAT!r}")
        groups = {prompt: Group(prompt, [], kind="evaluation", file=str(results)) for prompt in plan["prompts"]}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, EvaluationFileError):
            raise
        raise EvaluationFileError(f"{plan_file}: damaged: {error}") from error
    failures = results.with_name(f"{stem}.failures.jsonl")
    twice: set[str] = set()
    records: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    for file in (failures, results):
        if file.exists():
            for own in _records(file):
                known_file, known = records.get(own["key"], (None, {}))
                if known_file == file == results and not known.get("is_errored"):  # else it was tried again
                    twice.add(own["key"])
                records[own["key"]] = (file, own)
    vocabulary: dict[int, bytes] = {}
    for key, (file, record) in records.items():
        episode, pieces = _episode(file, record, results.with_name(f"{stem}.trajectories") / f"{key}.safetensors")
        if key in twice:
            episode.problems.append(
                ("structure", f"{results.name} has several records of it; the last one is examined")
            )
        vocabulary.update(pieces)
        prompt = str(record["prompt_id"])
        groups.setdefault(prompt, Group(prompt, [], kind="evaluation", file=str(results))).episodes.append(episode)
    configs = Counter(str(record.get("config")) for _, record in records.values())
    usual = configs.most_common(1)[0][0] if configs else None
    for group in groups.values():
        group.vocabulary = vocabulary
        group.facts = {"benchmark": plan["benchmark"], "plan": plan, "config": usual}
        group.episodes.sort(key=lambda episode: episode.facts["record"]["sample_index"])
    return [group for group in groups.values() if group.episodes]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                missing = {"key", "prompt_id", "sample_index", "reward", "termination_reason", "observation"} - set(
                    record
                )
                if missing:
                    raise ValueError(f"not a record of a sample: {', '.join(sorted(missing))} is missing")
            except (ValueError, TypeError) as error:
                if not line.endswith(b"\n"):  # a killed process left it, or it is being written
                    return
                raise EvaluationFileError(f"{path}, line {number}: damaged: {error}") from error
            yield record


def _episode(file: Path, record: Mapping[str, Any], trajectory_file: Path) -> tuple[Episode, Mapping[int, bytes]]:
    key, pieces = str(record["key"]), {}
    if trajectory_file.is_file():
        trajectory = load_trajectory(trajectory_file)
        pieces = trajectory.pieces
        episode = episode_of(trajectory, key, file=str(trajectory_file))
    else:
        episode = Episode(key, [], [], file=str(file))
        episode.facts["has_no_trajectory"] = True
    reward = record["reward"]
    episode.outcome, episode.error = record["termination_reason"], record.get("error")
    episode.reward = reward
    episode.reward_error, episode.seconds = record.get("reward_error"), record.get("seconds")
    episode.facts |= {"record": record, "records": str(file)}
    messages = record["observation"].get("messages") if isinstance(record["observation"], Mapping) else None
    if isinstance(messages, list):
        episode.messages = messages
        try:
            episode.said = said_in(messages)
        except (KeyError, TypeError, AttributeError) as error:
            episode.problems.append(("structure", f"its messages are no Strands messages: {error!r}"))
    return episode, pieces
