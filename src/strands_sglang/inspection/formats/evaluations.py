"""From the folder of an evaluation to `Group`s: the samples of each prompt are one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...messages.said import said_in
from ...trajectory.trajectory import EpisodeEnd, Trajectory
from ..records import Group, Inspected, UnreadableError, group_of
from .trajectories import inspect_file

FORMAT = "strands-env evaluation 1"

REQUIRED = {"key", "prompt_id", "sample_index", "reward", "termination_reason", "observation"}


def read_evaluation(results: Path) -> list[Group]:
    """Read an evaluation. It may still be running.

    Args:
        results: Its results file, `*.jsonl`.

    Raises:
        OSError: A file cannot be read.
        UnreadableError: A file is damaged.
        TrajectoryFileError: A file among its trajectories is none.
    """
    stem = results.name.removesuffix(".jsonl")
    plan_file = results.with_name(f"{stem}.run.json")
    try:
        plan = json.loads(plan_file.read_bytes())
        version = plan["format"]
        groups: dict[Hashable, Group] = {}
        if version == FORMAT:
            for prompt in plan["prompts"]:
                group_of(groups, prompt, "evaluation", results)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableError(f"{plan_file}: damaged: {error}") from error
    if version != FORMAT:
        raise UnreadableError(f"{plan_file}: its format is {version!r}, not {FORMAT!r}")
    twice: set[str] = set()
    records: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    for file in (results.with_name(f"{stem}.failures.jsonl"), results):
        for saved in _records(file) if file.exists() else ():
            known_file, known = records.get(saved["key"], (None, {}))
            if known_file == file == results and not known.get("is_errored"):  # else it was tried again
                twice.add(saved["key"])
            records[saved["key"]] = (file, saved)
    vocabulary: dict[int, bytes] = {}
    names: set[str] = set()
    for key, (file, record) in records.items():
        episode = _episode(file, record, results.with_name(f"{stem}.trajectories") / f"{key}.safetensors")
        if episode.id in names:  # a record of another configuration
            episode.id += f" ({key})"
        names.add(episode.id)
        if key in twice:
            why = f"{results.name} has several records of it; the last one is examined"
            episode.problems.append(("structure", why))
        vocabulary.update(episode.trajectory.pieces)
        group_of(groups, str(record["prompt_id"]), "evaluation", results).episodes.append(episode)
    configs = Counter(str(record.get("config")) for _, record in records.values())
    for group in groups.values():
        group.vocabulary = vocabulary
        group.config = next((name for name, _ in configs.most_common(1)), None)
        group.episodes.sort(key=lambda episode: episode.record["sample_index"])
    return [group for group in groups.values() if group.episodes]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                missing = REQUIRED.difference(record)
                if missing:
                    raise ValueError(f"not a record of a sample: {', '.join(sorted(missing))} is missing")
            except (ValueError, TypeError) as error:
                if not line.endswith(b"\n"):  # a killed process left it, or it is being written
                    return
                raise UnreadableError(f"{path}, line {number}: damaged: {error}") from error
            yield record


def _episode(file: Path, record: Mapping[str, Any], trajectory_file: Path) -> Inspected:
    name = f"{record['prompt_id']} #{record['sample_index']}"
    if trajectory_file.is_file():
        episode = inspect_file(trajectory_file, name)
    else:
        episode = Inspected(name, Trajectory(), str(file), has_trajectory=False)
    wanted = {"reward": int | float, "seconds": int | float, "termination_reason": str, "error": str}
    for name, kind in {**wanted, "reward_error": str}.items():
        if record.get(name) is not None and not isinstance(record[name], kind):
            episode.problems.append(("structure", f"its {name} is {record[name]!r:.60}"))
            record = {**record, name: None}
    episode.end = EpisodeEnd(
        record["termination_reason"],
        record["reward"],
        episode.end.turn_rewards,
        record.get("error"),
        record.get("reward_error"),
    )
    episode.seconds = record.get("seconds")
    episode.record = record
    messages = part_of(record, "observation").get("messages")
    if isinstance(messages, list):
        episode.messages = messages
        try:
            episode.said = said_in([*_history(record), *messages], _system(record))
        except (KeyError, TypeError, AttributeError) as error:
            episode.problems.append(("structure", f"its messages are no Strands messages: {error!r}"))
    return episode


def part_of(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of a record, an empty one if it has none."""
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}


def _history(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages before the task's own as Strands messages."""
    messages = []
    for message in part_of(record, "task_context").get("conversation_history") or []:
        content = message.get("content") or []
        blocks = [{"text": content}] if isinstance(content, str) else content
        messages.append({"role": message["role"], "content": blocks})
    return messages


def _system(record: Mapping[str, Any]) -> str | None:
    system = part_of(record, "environment").get("system_prompt")
    return system if isinstance(system, str) else None
