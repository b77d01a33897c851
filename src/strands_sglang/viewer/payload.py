"""What a page knows: an index of groups, episodes and findings, and per episode its turns and a column per property.

An episode's tokens are stored once, turn after turn: what the prompt added, then what was sampled. A sequence is a list
of turns, each with the number of its sampled tokens that the sequence has. All columns are in that order.
`front/data.mjs` reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..inspection.records import Episode, Finding, Group, SequenceRecord, TurnRecord, Writer
from .audit import advantages_of, audit_credit
from .blocks import Blocks
from .drifting import measure
from .stores import fitted, places_of, short_name, starts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_EXPERTS = 4_000_000
"""Entries of routed experts that a page holds; those of further episodes are left out."""

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
    import numpy as np

    page = _Page(blocks)
    drift = measure(groups)
    entries: list[dict[str, Any]] = []
    listed: list[dict[str, Any]] = []
    numbers: dict[tuple[str, str, str], int] = {}
    named = {group.file for group in groups if group.kind in ("step", "evaluation", "slime")}
    for number, group in enumerate(groups):
        # Groups of several steps have the same names.
        name = f"{group.id} of {short_name(group.file)}" if len(named) > 1 and group.file in named else group.id
        listed.append({"name": name, "file": group.file, "episodes": [], "note": _notes(group.problems)})
        advantages = advantages_of(group)
        for episode in group.episodes:
            numbers[(group.file, group.id, episode.id)] = len(entries)
            listed[-1]["episodes"].append(len(entries))
            marked = None if drift is None else drift.marks.get(len(entries))
            entry = page.episode(group, episode, advantages.get(episode.id), marked)
            entries.append({"group": number, **entry})
    places = _Places(groups)
    located = [places.finding(finding) for finding in findings or ()]
    found = Counter(finding["episode"] for finding in located)
    for number, entry in enumerate(entries):
        entry["found"] = found[number]
    notes = []
    if not any(group.vocabulary for group in groups) and entries:
        notes.append("The files do not contain the text of their tokens, so ids are shown. Use --tokenizer for text.")
    if page.left_out:
        notes.append(f"{page.left_out} images are too large for the page and are only named.")
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
        "episodes": entries,
        "findings": located,
        "credit": audit_credit(groups, numbers),
        "drift": None if drift is None else drift.as_json(),
    }


class _Page:
    """Adds one episode after the other to a page, with the tables that all episodes share."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.vocabulary: dict[tuple[int, bytes | None], int] = {}
        self.versions: dict[str, int] = {}
        self.whys: dict[str, int] = {}
        self.ranges: dict[str, float] = {"advantage": 0.0, "gap": 0.0, "entropy": 0.0}
        self.left_out = 0
        self._experts = 0
        self._image_bytes = 0

    def episode(
        self, group: Group, episode: Episode, advantages: Mapping[int, float] | None, drifted: NDArray[Any] | None
    ) -> dict[str, Any]:
        """Add an episode, and return its entry in the index."""
        import numpy as np

        starts, length = starts_of(episode)
        sequences = [_sequence(episode, sequence, at) for at, sequence in enumerate(episode.sequences)]
        sequences += _other_sequences(episode)
        columns = self._turn_columns(group, episode)
        columns.update(self._sequence_columns(episode, starts, length, advantages))
        columns["why"] = self._whys(episode)
        if drifted is not None:
            columns["drift"] = drifted
        body: dict[str, Any] = {
            "turns": [self._turn(group, turn, start) for turn, start in zip(episode.turns, starts, strict=True)],
            "sequences": sequences,
            "said": [[part.role, part.kind, part.text, part.name] for part in episode.said],
        }
        routed = self._routing(episode, length)
        if routed is not None:
            columns["routed"], rows = routed
            body["routing"] = {"rows": self.blocks.array(rows.reshape(-1)), "width": int(rows.shape[1])}
        trained = int((columns["trains"] > 0).sum())
        packed = {name: self.blocks.array(values) for name, values in columns.items()}
        own = columns["advantage"][columns["trains"] > 0]
        own = own[~np.isnan(own)]
        return {
            "id": episode.id,
            "outcome": episode.outcome,
            "reward": _finite(episode.reward),
            "advantage": _finite(own[0]) if len(own) and (own == own[0]).all() else None,
            "note": "; ".join(
                part
                for part in (
                    episode.left_out and f"left out: {episode.left_out}",
                    episode.reward_error and f"no reward: {episode.reward_error}",
                    episode.error,
                    _notes(episode.problems),
                )
                if part
            ),
            "turns": len(episode.turns),
            "tokens": length,
            "trained": trained,
            "seconds": _finite(episode.seconds),
            "length": length,
            "body": self.blocks.json(body),
            "columns": {name: value for name, value in packed.items() if value is not None},
        }

    def _entries(self, group: Group, ids: NDArray[Any]) -> NDArray[Any]:
        """Return the positions of ids in the table of the vocabulary."""
        import numpy as np

        known, places = np.unique(ids, return_inverse=True)
        table = np.zeros(len(known), np.int64)
        for i, token_id in enumerate(known.tolist()):
            key = (token_id, group.vocabulary.get(token_id))
            table[i] = self.vocabulary.setdefault(key, len(self.vocabulary))
        return table[places]

    def _turn_columns(self, group: Group, episode: Episode) -> dict[str, NDArray[Any]]:
        """Return the columns that the turns record."""
        import numpy as np

        parts = [
            (tokens, is_sampled) for turn in episode.turns for tokens, is_sampled in _halves(turn) if len(tokens.ids)
        ]

        def joined(name: str, fill: float) -> NDArray[Any]:
            column = [getattr(tokens, name) for tokens, _ in parts]
            return np.concatenate(
                [np.zeros(0)]
                + [
                    np.full(len(tokens.ids), fill) if values is None else fitted(values, len(tokens.ids), fill)
                    for (tokens, _), values in zip(parts, column, strict=True)
                ]
            )

        ids = np.concatenate([np.zeros(0, np.int64), *(tokens.ids for tokens, _ in parts)])
        versions = [np.zeros(len(tokens.ids), np.uint32) for tokens, _ in parts]
        for column, (tokens, _) in zip(versions, parts, strict=True):
            for version, start, stop in tokens.versions:
                column[start:stop] = self.versions.setdefault(str(version), len(self.versions)) + 1
        sampled = [np.full(len(tokens.ids), is_sampled, np.uint8) for tokens, is_sampled in parts]
        is_sampled = np.concatenate([np.zeros(0, np.uint8), *sampled])
        writers = joined("writers", np.nan)
        writers = np.where(np.isnan(writers), np.where(is_sampled > 0, Writer.MODEL, Writer.PROMPT), writers)
        columns = {
            "token": self._entries(group, ids),
            "sampled": is_sampled,
            "writer": writers.astype(np.uint8),
            "logprob": joined("logprobs", np.nan),
            "entropy": joined("entropy", np.nan),
            "kept": joined("kept_counts", np.nan),
        }
        if any(tokens.versions for tokens, _ in parts):
            columns["version"] = np.concatenate([np.zeros(0, np.uint32), *versions])
        self.ranges["entropy"] = max(self.ranges["entropy"], _largest(columns["entropy"]))
        return columns

    def _sequence_columns(
        self, episode: Episode, starts: Sequence[tuple[int, int, int]], length: int, given: Mapping[int, float] | None
    ) -> dict[str, NDArray[Any]]:
        """Return the columns that belong to the sequences, each value at the token that it is for."""
        import numpy as np

        floats = {name: np.full(length, np.nan) for name in ("advantage", "weight", "trainer_logprob", "row_logprob")}
        trains = np.zeros(length, np.uint16)
        times = np.zeros(length, np.uint16)
        for number, sequence in enumerate(episode.sequences):
            places = places_of(sequence, starts)
            mask = fitted(np.asarray(sequence.mask), len(places), 0) > 0
            sources = {
                "advantage": sequence.advantages,
                "weight": sequence.weights,
                "trainer_logprob": sequence.trainer_logprobs,
                "row_logprob": sequence.row.get("logprobs"),
            }
            if sequence.advantages is None and given is not None:
                sources["advantage"] = np.concatenate(
                    [np.zeros(0), *(np.full(s.stop - s.start, given.get(s.turn, np.nan)) for s in sequence.steps)]
                )
            chosen = places[mask]
            for name, values in sources.items():
                if values is not None:
                    floats[name][chosen] = fitted(np.asarray(values, np.float64), len(places), np.nan)[mask]
            np.add.at(times, chosen, 1)
            first = chosen[trains[chosen] == 0]
            trains[first] = number + 1
        logprobs = np.concatenate(
            [
                np.zeros(0),
                *(
                    np.full(len(tokens.ids), np.nan)
                    if tokens.logprobs is None
                    else fitted(tokens.logprobs, len(tokens.ids), np.nan)
                    for turn in episode.turns
                    for tokens, _ in _halves(turn)
                ),
            ]
        )
        if (
            np.allclose(floats["row_logprob"], logprobs, rtol=0, atol=1e-6, equal_nan=True)
            or np.isclose(floats["row_logprob"][trains > 0], logprobs[trains > 0], rtol=0, atol=1e-6).all()
        ):
            del floats["row_logprob"]  # as recorded when they were sampled
        self.ranges["advantage"] = max(self.ranges["advantage"], _largest(floats["advantage"]))
        self.ranges["gap"] = max(self.ranges["gap"], _largest(floats["trainer_logprob"] - logprobs))
        columns: dict[str, NDArray[Any]] = {**floats, "trains": trains}
        if times.max(initial=0) > 1:
            columns["times"] = times
        return columns

    def _whys(self, episode: Episode) -> NDArray[Any]:
        """Return why each token would not be trained, as positions in the table of reasons."""
        import numpy as np

        shown = {step.turn for sequence in episode.sequences for step in sequence.steps}
        parts = []
        for position, turn in enumerate(episode.turns):
            reason = _why_untrained(episode, turn, position in shown)
            for tokens, is_sampled in _halves(turn):
                why = reason if is_sampled else "the model did not sample it"
                parts.append(np.full(len(tokens.ids), self.whys.setdefault(why, len(self.whys)), np.uint16))
        return np.concatenate([np.zeros(0, np.uint16), *parts])

    def _routing(self, episode: Episode, length: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return for each token the number of its row of routed experts, from 1, and the rows."""
        import numpy as np

        rows = []
        routed = np.zeros(length, np.uint32)
        at, count, width = 0, 0, None
        for position, turn in enumerate(episode.turns):
            own = len(turn.prompt) + len(turn.sampled)
            experts = turn.sampled.experts
            if experts is not None and experts.ndim == 2 and width in (None, experts.shape[1]):
                before = episode.steps(position)[-1].start
                part = experts[before : before + own]
                routed[at : at + len(part)] = np.arange(count + 1, count + 1 + len(part))
                rows.append(np.maximum(part, 0))
                count, width = count + len(part), experts.shape[1]
            at += own
        if not rows or width is None or self._experts + count * width > MOST_EXPERTS:
            return None
        self._experts += count * width
        return routed, np.concatenate(rows)

    def _turn(self, group: Group, turn: TurnRecord, start: tuple[int, int, int]) -> dict[str, Any]:
        return {
            "number": turn.number,
            "parent": turn.parent,
            "branching": turn.branching.value,
            "reason": turn.reason,
            "status": turn.status,
            "note": "; ".join(part for part in (turn.note, _notes(turn.problems)) if part),
            "failure": turn.failure,
            "agent": turn.agent,
            "auxiliary": turn.is_auxiliary,
            "constrained": turn.is_constrained,
            "resumed": turn.is_resumed,
            "waits": turn.waits_to_go_on,
            "clamped": turn.clamped,
            "finish": turn.finish,
            "prompt": start[:2],
            "sampled": start[1:],
            "cached": turn.cached_tokens,
            "asked": turn.prompt_tokens,
            "seconds": _finite(turn.seconds),
            "reward": _finite(turn.reward),
            "said": _said(group, turn),
            "images": [self._image(image) for image in turn.images],
        }

    def _image(self, image: Any) -> dict[str, Any]:
        kind = str(image.format).lower().removeprefix("image/").replace("jpg", "jpeg")
        if kind not in _IMAGE_FORMATS or self._image_bytes + len(image.data) > MOST_IMAGE_BYTES:
            self.left_out += 1
            return {"format": kind, "where": image.where}
        self._image_bytes += len(image.data)
        return {"at": self.blocks.file(image.data), "format": kind, "where": image.where}


class _Places:
    """Says where in the page a finding is."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups: dict[tuple[str, str], int] = {}
        self._episodes: list[Episode] = []
        self._numbers: dict[tuple[str, str, str], int] = {}
        for number, group in enumerate(groups):
            self._groups.setdefault((group.file, group.id), number)
            for episode in group.episodes:
                for file in (group.file, episode.file):  # a finding names the file that it is in
                    self._groups.setdefault((file, group.id), number)
                    self._numbers.setdefault((file, group.id, episode.id), len(self._episodes))
                self._episodes.append(episode)

    def finding(self, finding: Finding) -> dict[str, Any]:
        """Return a finding with the episode, sequence, turn and token at which the page opens."""
        group = None if finding.group is None else self._groups.get((finding.file, finding.group))
        number = self._numbers.get((finding.file, finding.group or "", finding.episode or ""))
        place: dict[str, Any] = {"sequence": finding.sequence, "position": None, "token": finding.token}
        if number is not None:
            episode = self._episodes[number]
            position = next((i for i, turn in enumerate(episode.turns) if turn.number == finding.turn), None)
            place["position"] = position
            if finding.sequence is None and position is not None:
                steps = [(at, step) for at, one in enumerate(episode.sequences) for step in one.steps]
                steps += [(at, step) for at, step in _other_steps(episode)]
                at, step = next(((at, step) for at, step in steps if step.turn == position), (None, None))
                place["sequence"] = at
                if finding.token is not None and step is not None:
                    place["token"] = step.sampled + finding.token
        return {
            "title": finding.kind.replace("_", " ").replace("-", " "),
            "why": finding.why,
            "where": finding.where.removeprefix(f"{finding.file}, ")
            if finding.episode or finding.group
            else finding.file,
            "group": group,
            "episode": number,
            "turn": finding.turn,
            "count": finding.count,
            **place,
        }


def _halves(turn: TurnRecord) -> tuple[tuple[Any, bool], tuple[Any, bool]]:
    return (turn.prompt, False), (turn.sampled, True)


def _sequence(episode: Episode, sequence: SequenceRecord, at: int) -> dict[str, Any]:
    trained = int((sequence.mask > 0).sum())
    turns = f"{len(sequence.steps)} turn{'s' if len(sequence.steps) != 1 else ''}"
    name = f"Sequence {at}: {turns}, {trained:,} of {len(sequence):,} tokens trained"
    return {"name": name, "steps": [[step.turn, step.stop - step.sampled] for step in sequence.steps]}


def _other_leaves(episode: Episode) -> list[int]:
    """Return the last turns of the paths that no exported sequence shows: discarded, failed and auxiliary calls."""
    shown = {step.turn for sequence in episode.sequences for step in sequence.steps}
    inner = {turn.parent for position, turn in enumerate(episode.turns) if position not in shown}
    return [position for position in range(len(episode.turns)) if position not in shown and position not in inner]


def _other_steps(episode: Episode) -> list[tuple[int, Any]]:
    first = len(episode.sequences)
    return [(first + i, step) for i, leaf in enumerate(_other_leaves(episode)) for step in episode.steps(leaf)]


def _other_sequences(episode: Episode) -> list[dict[str, Any]]:
    others = []
    for leaf in _other_leaves(episode):
        turn = episode.turns[leaf]
        kind = "auxiliary" if turn.is_auxiliary else turn.status or "other"
        steps = episode.steps(leaf)
        name = f"Not trained ({kind}): up to turn {turn.number}, {steps[-1].stop:,} tokens"
        others.append({"name": name, "steps": [[step.turn, step.stop - step.sampled] for step in steps]})
    return others


def _why_untrained(episode: Episode, turn: TurnRecord, is_shown: bool) -> str:
    if turn.is_discarded:
        return f"the agent threw the answer away{f': {turn.note}' if turn.note else ''}"
    if turn.is_constrained:
        return "a grammar constrained it, so it is off-policy"
    if turn.is_auxiliary:
        return "an auxiliary call is not part of the rollout"
    if episode.left_out:
        return f"the episode is left out: {episode.left_out}"
    return "its loss mask is 0" if is_shown else "no exported sequence holds it"


def _largest(values: NDArray[Any]) -> float:
    """Return the size below which nearly all values are, 0.0 without any."""
    import numpy as np

    known = np.abs(values[np.isfinite(values)])
    return float(np.quantile(known, 0.999)) if len(known) else 0.0


def _finite(value: float | None) -> float | None:
    import math

    return float(value) if value is not None and math.isfinite(value) else None


def _notes(problems: Sequence[tuple[str, str]]) -> str:
    return "; ".join(why for _, why in problems)


def _said(group: Group, turn: TurnRecord) -> list[list[str]]:
    """Return the messages of a turn; where the file has none, the text of its tokens."""
    said = [[part.role, part.kind, part.text, part.name] for part in turn.said]
    answered = [[part.role, part.kind, part.text, part.name] for part in turn.answered]
    for role, kind, tokens, parts in (
        ("prompt", "raw", turn.prompt, said),
        ("assistant", "text", turn.sampled, answered),
    ):
        if not parts and group.vocabulary and len(tokens):
            content = b"".join(group.vocabulary.get(token_id, b"") for token_id in tokens.ids.tolist())
            parts.append([role, kind, content.decode("utf-8", "replace"), ""])
    return said + answered


def _text(content: bytes | None) -> str | list[int] | None:
    """Return the text of a token; its bytes if they are part of a character; None if unknown."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)
