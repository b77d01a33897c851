"""What a page knows: an index of groups, episodes and findings, and per episode its turns and a column per property.

An episode's tokens are stored once, turn after turn: what the prompt added, then what was sampled. A sequence is a list
of turns, each with the number of its sampled tokens that the sequence has. All columns are in that order.
`front/data.mjs` reads them.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..credit import version_number
from ..inspection.doctor import KINDS
from ..inspection.formats.evaluations import part_of
from ..inspection.records import Finding, Group, Inspected, Step, Writer, halves, spans_of, steps_to, turns_of
from ..inspection.texts import writers_of
from ..messages.content import Picture
from ..messages.said import Said
from ..reasons import of_turns
from ..shown import counted, one_line
from ..tool_parsers import ToolParseResult
from ..tool_parsers.base import WRITTEN_AS
from ..trajectory.turn import Turn, TurnStatus
from .audit import advantages_of, audit_credit
from .blocks import Blocks
from .drifting import measure
from .stores import Starts, places_of, short_name, starts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_SCORE_CHARS = 4000
"""Characters of each fact of a score that a page holds."""

MOST_SHOWN, MOST_SHARED = 200, 20
"""Characters of a text in a table, and of the beginning that all texts may share there."""

MOST_IMAGE_BYTES = 8_000_000
"""Bytes of images that a page holds; further images are named only."""

_IMAGE_FORMATS = ("png", "jpeg", "webp", "gif")


def page_index(groups: Sequence[Group], findings: Sequence[Finding] | None, blocks: Blocks) -> dict[str, Any]:
    """Return the index of a page, and add what it refers to.

    Args:
        groups: The episodes.
        findings: What the doctor found; None if nothing was examined.
        blocks: Where the values go.
    """
    page = _Page(blocks, groups)
    drift = measure(groups)
    entries: list[dict[str, Any]] = []
    listed: list[dict[str, Any]] = []
    named = {group.file for group in groups if group.kind in ("step", "evaluation", "slime")}
    for number, group in enumerate(groups):
        # Groups of several steps have the same names.
        name = f"{group.id} of {short_name(group.file)}" if len(named) > 1 and group.file in named else group.id
        listed.append({"name": name, "episodes": []})
        advantages = advantages_of(group)
        for episode in group.episodes:
            listed[-1]["episodes"].append(len(entries))
            marked = None if drift is None else drift.marks.get(len(entries))
            entry = page.episode(group, episode, advantages.get(episode.id), marked)
            entries.append({"group": number, **entry})
    places = _Finder(groups)
    located = [places.finding(finding) for finding in findings or ()]
    found = Counter(finding["episode"] for finding in located)
    for number, entry in enumerate(entries):
        entry["found"] = found[number]
    for name in ("question", "answer", "target"):
        _outlined(entries, name)
    notes = []
    if not any(group.vocabulary for group in groups) and any(entry["length"] for entry in entries):
        notes.append("The files do not contain the text of their tokens, so ids are shown. Use --tokenizer for text.")
    return {
        "notes": notes,
        "examined": findings is not None,
        "writers": [writer.name.lower() for writer in Writer],
        "versions": list(page.versions),
        "whys": list(page.whys),
        "ranges": {name: float(value) for name, value in page.ranges.items()},
        "vocabulary": {
            "ids": blocks.array(np.array([token_id for token_id, _ in page.vocabulary], np.int64)),
            "texts": blocks.json([_text(text) for _, text in page.vocabulary]),
        },
        "groups": listed,
        "steps": _steps(groups),
        "episodes": entries,
        "findings": located,
        "credit": audit_credit(groups, places.numbers),
        "drift": None if drift is None else {**vars(drift), "marks": None},
    }


def _outlined(entries: list[dict[str, Any]], name: str) -> None:
    """Cut a text of episodes to a short line, without a long beginning that all have in common."""
    lines = [one_line(entry[name]) for entry in entries]
    known = {*lines} - {""}
    start = os.path.commonprefix([*known]).rfind(" ") + 1
    if start < MOST_SHARED or len(known) < 2:
        start = 0
    for entry, line in zip(entries, lines, strict=True):
        mark = "…" if start and line else ""
        entry[name] = mark + line[start : start + MOST_SHOWN]


class _Page:
    """Adds one episode after the other to a page, with the tables that all episodes share."""

    def __init__(self, blocks: Blocks, groups: Sequence[Group]) -> None:
        self.blocks = blocks
        self._newest: dict[str, int] = {}
        for group in groups:
            versions = [version for version, _ in _versions(turns_of([group]))]
            self._newest[group.file] = max([self._newest.get(group.file, 0), *versions])
        self.vocabulary: dict[tuple[int, bytes | None], int] = {}
        self.versions: dict[str, int] = {}
        self.whys: dict[str, int] = {}
        self.ranges: dict[str, float] = {"advantage": 0.0, "gap": 0.0}
        self._image_bytes = 0

    def episode(
        self, group: Group, episode: Inspected, advantage: float | None, drifted: NDArray[Any] | None
    ) -> dict[str, Any]:
        """Add an episode, and return its entry in the index."""
        starts = starts_of(episode.turns)
        positions = {id(turn): position for position, turn in enumerate(episode.turns)}
        columns = self._turn_columns(group, episode)
        columns.update(self._sequence_columns(episode, starts, columns["logprob"], advantage))
        columns["why"] = self._whys(episode)
        if drifted is not None:
            columns["drift"] = drifted
        branchings = _branchings(episode.turns)
        body: dict[str, Any] = {
            "turns": [
                self._turn(
                    group,
                    turn,
                    starts[id(turn)],
                    positions,
                    branchings[id(turn)],
                    episode.end.turn_rewards.get(turn.index),
                )
                for turn in episode.turns
            ],
            "sequences": [
                {"name": name, "steps": [[positions[id(step.turn)], step.stop - step.sampled] for step in steps]}
                for name, steps in _shown_sequences(episode)
            ],
            "said": list(_as_written(episode.said)),
            "score": _score(episode.record),
        }
        trained = None if episode.record else int((columns["trains"] > 0).sum())
        gaps = np.abs(columns["trainer_logprob"] - columns["logprob"])[columns["trains"] > 0]
        advantages = columns["advantage"][columns["trains"] > 0]
        if episode.record:  # an evaluation trains nothing
            del columns["trains"]
        packed = {name: self.blocks.array(values) for name, values in columns.items()}
        advantages = advantages[np.isfinite(advantages)]
        end = episode.end
        newest = self._newest[group.file]
        stale = sum(count for version, count in _versions(episode.turns) if version < newest)
        notes = [
            stale and f"{counted(stale, 'token')} of older weights",
            episode.left_out and f"left out: {episode.left_out}",
            end.reward_error and f"no reward: {end.reward_error}",
            end.error,
            *(why for _, why in episode.problems),
        ]
        length = len(columns["token"])
        unkept = _unkept(episode)
        question, answer = _outline(episode, body)
        return {
            "id": episode.name,
            "key": episode.record.get("key"),
            "question": question,
            "answer": answer,
            "target": _text_of(_target(episode.record)),
            "gap": float(gaps[np.isfinite(gaps)].max()) if np.isfinite(gaps).any() else None,
            "outcome": end.outcome,
            "reward": _finite(end.reward),
            "advantage": float(advantages[0]) if len(advantages) and (advantages == advantages[0]).all() else None,
            "note": "; ".join(note for note in notes if note),
            "turns": None if unkept else len(episode.turns),
            "tokens": None if unkept else length,
            "trained": trained,
            "unkept": unkept,
            "seconds": _finite(episode.seconds),
            "length": length,
            "body": self.blocks.json(body),
            "columns": {name: value for name, value in packed.items() if value is not None},
        }

    def _entries(self, group: Group, ids: NDArray[Any]) -> NDArray[Any]:
        """Return the positions of ids in the table of the vocabulary."""
        known, places = np.unique(ids, return_inverse=True)
        table = np.zeros(len(known), np.int64)
        for i, token_id in enumerate(known.tolist()):
            key = (token_id, group.vocabulary.get(token_id))
            table[i] = self.vocabulary.setdefault(key, len(self.vocabulary))
        return table[places]

    def _turn_columns(self, group: Group, episode: Inspected) -> dict[str, NDArray[Any]]:
        """Return the columns that the turns record."""
        versions = [np.zeros(0, np.uint32)]
        for turn in episode.turns:
            column = np.zeros(len(turn.prompt_ids) + len(turn.output_ids), np.uint32)
            for version, start, stop in spans_of(turn):
                number = self.versions.setdefault(version, len(self.versions)) + 1
                column[len(turn.prompt_ids) :][start:stop] = number
            versions.append(column)
        writers = [writers_of(turn, group.vocabulary) for turn in episode.turns]
        writer = np.concatenate([np.zeros(0, np.uint8), *writers])
        columns = {
            "token": self._entries(group, _column(episode, "ids").astype(np.int64)),
            "sampled": (writer == Writer.MODEL).astype(np.uint8),
            "writer": writer,
            "logprob": _column(episode, "logprobs"),
            "kept": _column(episode, "kept_counts"),
        }
        if any(column.any() for column in versions):
            columns["version"] = np.concatenate(versions)
        return columns

    def _sequence_columns(
        self, episode: Inspected, starts: Starts, logprobs: NDArray[Any], advantage: float | None
    ) -> dict[str, NDArray[Any]]:
        """Return the columns that belong to the sequences, each value at the token that it is for."""
        length = len(logprobs)
        names = {"advantage": "advantages", "trainer_logprob": "trainer_logprobs"}
        floats = {name: np.full(length, np.nan) for name in (*names, "weight")}
        trains, times = np.zeros(length, np.uint16), np.zeros(length, np.uint16)
        for number, sequence in enumerate(episode.sequences):
            places, mask = places_of(sequence, starts), sequence.mask > 0
            chosen = places[mask]
            for name, of_row in names.items():
                values = sequence.given(of_row)
                if values is not None:
                    floats[name][chosen] = values[mask]
            if sequence.given("advantages") is None and advantage is not None:
                floats["advantage"][chosen] = advantage
            if sequence.row is not None and sequence.row.loss_weight is not None:
                floats["weight"][chosen] = sequence.row.loss_weight
            np.add.at(times, chosen, 1)
            trains[chosen[trains[chosen] == 0]] = number + 1
        self.ranges["advantage"] = max(self.ranges["advantage"], _largest(floats["advantage"]))
        self.ranges["gap"] = max(self.ranges["gap"], _largest(floats["trainer_logprob"] - logprobs))
        columns: dict[str, NDArray[Any]] = {**floats, "trains": trains}
        if times.max(initial=0) > 1:
            columns["times"] = times
        return columns

    def _whys(self, episode: Inspected) -> NDArray[Any]:
        """Return why each token would not be trained, as positions in the table of reasons."""
        shown: set[int] = set()
        for sequence in episode.sequences:
            shown.update(id(step.turn) for step in sequence.steps)
        parts = [np.zeros(0, np.uint16)]
        for turn in episode.turns:
            reason = _why_untrained(episode, turn, id(turn) in shown)
            for why, ids in (("the model did not sample it", turn.prompt_ids), (reason, turn.output_ids)):
                parts.append(np.full(len(ids), self.whys.setdefault(why, len(self.whys)), np.uint16))
        return np.concatenate(parts)

    def _turn(
        self,
        group: Group,
        turn: Turn,
        start: tuple[int, int, int],
        positions: Mapping[int, int],
        branching: str,
        reward: float | None,
    ) -> dict[str, Any]:
        answer = turn.generation
        return {
            "number": turn.index,
            "parent": None if turn.parent is None else positions[id(turn.parent)],
            "branching": branching,
            "reason": of_turns(turn.reason) or "no reason recorded",
            "status": turn.status.value,
            "note": turn.note,
            "failure": turn.failure,
            "agent": turn.agent,
            "auxiliary": turn.is_auxiliary,
            "constrained": turn.constrained,
            "resumed": answer is not None and bool(answer.resumed_ids),
            "waits": turn.waits_to_go_on,
            "clamped": turn.clamped,
            "finish": None if answer is None else answer.finish_type,
            "prompt": start[:2],
            "sampled": start[1:],
            "cached": None if answer is None else answer.cached_tokens,
            "asked": None if answer is None else answer.prompt_tokens,
            "seconds": None if answer is None else _finite(answer.latency_s),
            "reward": _finite(reward),
            "said": _said(group, turn),
            "images": [] if turn.images is None else [self._image(picture) for picture in turn.images.pictures],
        }

    def _image(self, picture: Picture) -> dict[str, Any]:
        kind = str(picture.format).lower().removeprefix("image/").replace("jpg", "jpeg")
        where = str(picture.where)
        if kind not in _IMAGE_FORMATS or self._image_bytes + len(picture.data) > MOST_IMAGE_BYTES:
            return {"format": kind, "where": where}
        self._image_bytes += len(picture.data)
        return {"at": self.blocks.file(picture.data), "format": kind, "where": where}


class _Finder:
    """Says where in the page a finding is."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups: dict[tuple[str, str], int] = {}
        self._episodes: list[Inspected] = []
        self.numbers: dict[tuple[str, str, str], int] = {}
        for number, group in enumerate(groups):
            self._groups.setdefault((group.file, group.id), number)
            for episode in group.episodes:
                for file in (group.file, episode.file):  # a finding names the file that it is in
                    self._groups.setdefault((file, group.id), number)
                    self.numbers.setdefault((file, group.id, episode.id), len(self._episodes))
                self._episodes.append(episode)

    def finding(self, finding: Finding) -> dict[str, Any]:
        """Return a finding with the episode, sequence, turn and token at which the page opens."""
        number = self.numbers.get((finding.file, finding.group or "", finding.episode or ""))
        sequence, position, token = finding.sequence, None, finding.token
        if number is not None:
            episode = self._episodes[number]
            finding = replace(finding, episode=episode.name)
            position = next((at for at, turn in enumerate(episode.turns) if turn.index == finding.turn), None)
            if sequence is None and position is not None:
                turn = episode.turns[position]
                for at, (_, steps) in enumerate(_shown_sequences(episode)):
                    step = next((step for step in steps if step.turn is turn), None)
                    if step is not None:
                        sequence, token = at, None if token is None else step.sampled + token
                        break
        is_placed = finding.episode is not None or finding.group is not None
        return {
            "title": finding.kind.replace("_", " ").replace("-", " "),
            "why": f"{KINDS[finding.kind]}: {finding.why}" if finding.kind in KINDS else finding.why,
            "where": finding.where.removeprefix(f"{finding.file}, ") if is_placed else finding.file,
            "group": None if finding.group is None else self._groups.get((finding.file, finding.group)),
            "episode": number,
            "turn": finding.turn,
            "count": finding.count,
            "sequence": sequence,
            "position": position,
            "token": token,
        }


def _column(episode: Inspected, name: str) -> NDArray[Any]:
    """Return a column of all turns."""
    parts = [np.zeros(0)]
    for turn in episode.turns:
        parts += halves(turn, name)
    return np.concatenate(parts)


def _branchings(turns: Sequence[Turn]) -> dict[int, str]:
    """Return how each turn is attached, by its `id`: it opens a sequence, extends one, or forks."""
    extended: set[int] = set()
    names = {}
    for turn in turns:
        if turn.parent is None:
            names[id(turn)] = "opens"
            continue
        is_fork = turn.parent_kept is not None or id(turn.parent) in extended
        names[id(turn)] = "forks" if is_fork else "extends"
        if turn.is_answered:
            extended.add(id(turn.parent))
    return names


def _steps(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the mean reward of each training step; nothing if there are no two."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        if group.kind in ("step", "slime"):
            known = (_finite(episode.end.reward) for episode in group.episodes)
            rewards.setdefault(group.file, []).extend(reward for reward in known if reward is not None)
    steps = [
        {"name": short_name(file), "reward": sum(values) / len(values), "rewards": len(values)}
        for file, values in rewards.items()
        if values
    ]
    return steps if len(steps) > 1 else []


def _versions(turns: Iterable[Turn]) -> Iterator[tuple[int, int]]:
    """Yield the versions that sampled turns, with their numbers of tokens; without those that are no integers."""
    for turn in turns:
        for version, start, stop in spans_of(turn):
            number = version_number(version)
            if number is not None:
                yield number, stop - start


def _outline(episode: Inspected, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return what was asked, and the last answer."""
    turns = [turn["said"] for turn in body["turns"] if not turn["auxiliary"]] or [body["said"]]
    asked = [part[2] for part in turns[0] if part[:2] == ["user", "text"]]
    answers = [part[2] for part in chain.from_iterable(turns) if part[:2] == ["assistant", "text"]]
    question = "".join(asked[-1:] if body["turns"] else asked[:1])
    message = episode.record.get("message")
    return message if isinstance(message, str) else question, "".join(answers[-1:])


def _target(record: Mapping[str, Any]) -> Any:
    """Return what the reward of an evaluation's record compares with; None if unknown."""
    given = part_of(record, "task_context").get("ground_truth")
    return part_of(record, "reward_info").get("ground_truth") if given is None else given


def _text_of(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _score(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a reward was computed from, and what went wrong, as names and texts; nothing without a record."""
    if not record:
        return []
    known = dict(part_of(record, "reward_info"))
    known.pop("ground_truth", None)
    facts = [("target", _target(record))]
    found = known.pop("extracted", ...)
    if found in (None, ""):
        facts.append(("extracted", "nothing: the reward function found no answer"))
    elif found is not ...:
        facts.append(("extracted", found))
    if found in (None, "", ...):
        facts.append(("final answer", record.get("final_response")))
    facts.append(("verdict", known.pop("verdict", None)))
    facts += [(f"info: {name}", value) for name, value in known.items()]
    facts += [("no reward", record.get("reward_error")), ("error", record.get("error"))]
    shown = []
    for name, value in facts:
        if value not in (None, ""):
            shown.append((name.replace("_", " "), _text_of(value)[:MOST_SCORE_CHARS]))
    return shown


def _unkept(episode: Inspected) -> str | None:
    """Return in words what an evaluation's record counts of calls that the page does not have; None if it has them."""
    if episode.turns or not episode.record:
        return None
    known = part_of(part_of(episode.record, "observation"), "metrics")
    counts = [
        counted(known[name], word)
        for name, word in (("model_calls", "model call"), ("sampled_tokens", "sampled token"))
        if isinstance(known.get(name), int)
    ]
    missing = ", ".join(counts) or "turns and tokens"
    is_there = episode.has_trajectory or episode.problems  # but too long for a page, or not readable
    return missing if is_there else f"{missing} (not kept: evaluate with --keep-trajectories)"


def _shown_sequences(episode: Inspected) -> list[tuple[str, Sequence[Step]]]:
    """Return the names and steps of the exported sequences, then those of the other paths."""
    shown: list[tuple[str, Sequence[Step]]] = []
    for at, sequence in enumerate(episode.sequences):
        trained = int((sequence.mask > 0).sum())
        turns = counted(len(sequence.steps), "turn")
        verb = "sampled" if episode.record else "trained"
        name = f"Sequence {at}: {turns}, {trained:,} of {len(sequence):,} tokens {verb}"
        shown.append((name, sequence.steps))
    for leaf in episode.other_leaves():
        kind = "auxiliary" if leaf.is_auxiliary else leaf.status.value
        steps = steps_to(leaf)
        shown.append((f"Not trained ({kind}): up to turn {leaf.index}, {steps[-1].stop:,} tokens", steps))
    return shown


def _why_untrained(episode: Inspected, turn: Turn, is_shown: bool) -> str:
    if episode.record:
        return "an evaluation trains nothing"
    if turn.status is TurnStatus.DISCARDED:
        return "the agent threw the answer away" + (f": {turn.note}" if turn.note else "")
    if turn.constrained:
        return "a grammar constrained it, so it is off-policy"
    if turn.is_auxiliary:
        return "an auxiliary call is not part of the rollout"
    if episode.left_out is not None:
        return f"the episode is left out: {episode.left_out}"
    return "its loss mask is 0" if is_shown else "no exported sequence holds it"


def _largest(values: NDArray[Any]) -> float:
    """Return the size below which nearly all values are, 0.0 without any."""
    known = np.abs(values[np.isfinite(values)])
    return float(np.quantile(known, 0.999)) if len(known) else 0.0


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _said(group: Group, turn: Turn) -> list[list[str]]:
    """Return the messages of a turn; where the file has none or a tool call could not be read, its tokens' text."""
    shown: list[list[str]] = []
    for role, kind, ids, parts in (
        ("prompt", "raw", turn.prompt_ids, turn.said),
        ("assistant", "text", turn.output_ids, turn.answered),
    ):
        is_unread = not parts or any(part.name == ToolParseResult.UNKNOWN_NAME for part in parts)
        if not (is_unread and group.vocabulary and ids):
            shown += [list(part[:4]) for part in parts]
        else:
            content = b"".join(group.vocabulary.get(token_id, b"") for token_id in ids)
            shown.append([role, kind, content.decode("utf-8", "surrogateescape"), ""])
    return shown


def _as_written(said: Sequence[Said]) -> Iterator[list[str]]:
    """Yield messages; in place of the empty input of a call that could not be read, what its result says of it."""
    results = {part.id: part.text for part in said if part.kind == "result"}
    for role, kind, text, name, call_id in said:
        if name == ToolParseResult.UNKNOWN_NAME:
            text = results.get(call_id, "").partition(WRITTEN_AS)[2] or text
        yield [role, kind, text, name]


def _text(content: bytes | None) -> str | list[int] | None:
    """Return the text of a token; its bytes if they are part of a character; None if unknown."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)
