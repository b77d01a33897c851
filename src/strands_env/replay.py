"""Replay: recorded episodes run again without a server, stage by stage, up to the first difference.

The stages are those of the way from a record to a gradient: the record itself, the agent, its tools, the outcome, the
reward, the advantages and masks (credit), and the loss. What was sampled is fixed; the rest is code, which may have
changed since. A stage that a file does not hold is named, never assumed to be the same.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product, zip_longest
from os import PathLike
from pathlib import Path
from typing import Any, cast

from strands_sglang import Journal, JournalError, TerminationReason, Trajectory
from strands_sglang.credit import RowsFileError, TrainingRow, TrainingRows, losses, policy_loss
from strands_sglang.shown import counted, first_difference, one_line, visible
from strands_sglang.trajectory.recording import Difference, Recording
from strands_sglang.viewer import Finding, Group, UnreadableError, as_group, findings, read_episodes, render

from .core import Action, Environment, Observation, TokenObservation
from .core.durable import checkpoint
from .core.environment import read_conversation
from .core.rerun import RecordedEpisode, Rerun, Tools
from .core.supervision import maybe_await
from .eval import CheckpointError, EvalSample
from .eval.checkpoint import encode, read_record, read_records, read_run, results_file, trajectory_file
from .eval.episodes import EnvironmentFactory

STAGES = ("record", "agent", "tools", "outcome", "reward", "credit", "loss")
"""The stages, in order."""

SAME, DIFFERS, MISSING = "same", "differs", "not in the file"

ROWS = "rows.safetensors"


@dataclass
class Replayed:
    """What came of one recorded episode.

    Attributes:
        name: Task and sample, or the file.
        stages: Per stage `"same"`, `"differs"`, or why it was not compared.
        difference: Where the record and the run part; None if they do not.
        changed: What of the environment's identity is another one now, such as `system_prompt`.
        recorded: The recorded model calls; None if the file has none.
        now: Those of the run; None if there was none.
    """

    name: str
    stages: dict[str, str] = field(default_factory=dict)
    difference: Difference | None = None
    changed: list[str] = field(default_factory=list)
    recorded: Trajectory | None = field(default=None, repr=False)
    now: Trajectory | None = field(default=None, repr=False)

    @property
    def is_same(self) -> bool:
        """Whether the agent ran as recorded, or the rows of a training step are the recorded ones."""
        return self.difference is None and SAME in (self.stages.get("agent"), self.stages.get("credit"))

    def differs(self, difference: Difference) -> Replayed:
        """Note the difference, at its stage."""
        self.stages[difference.stage] = DIFFERS
        self.difference = difference
        return self

    def __str__(self) -> str:
        """One line: the name, and what differs where."""
        if self.difference is not None:
            return f"{self.name}: {described(self.difference)}"
        if self.is_same:
            return f"{self.name}: {SAME}"
        reasons = (f"{stage}: {why}" for stage, why in self.stages.items() if why != SAME)
        return f"{self.name}: not compared ({'; '.join(reasons)})"


class NotEnoughError(Exception):
    """A recorded episode cannot be read, or is not enough to run it again; says why."""


def described(difference: Difference) -> str:
    """Return where a difference is, and what it is, in one line."""
    where = [difference.stage]
    if difference.turn is not None:
        where.append(f"turn {difference.turn}")
    if difference.token is not None:
        where.append(f"token {difference.token}")
    then, now = map(_shown, (difference.recorded, difference.now))
    values = "" if then == now == "nothing" else f": {then} in the record, {now} now"
    return f"{', '.join(where)}: {difference.what}{values}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return visible(repr(value))[:120]


# --- what files hold ---


def recorded_in(path: Path) -> list[Path]:
    """Return the evaluations, journals and training steps in a folder and the folders in it; what is one, by itself."""
    if is_step(path) or is_evaluation(path) or not path.is_dir():
        return [path]
    found = {*path.rglob("*.run.json"), *path.rglob("*.journal"), *path.rglob(ROWS)}
    # Those in a folder of journals are of samples that have not ended.
    inner = sorted(file for file in found if file.parent.suffix != ".journals") or sorted(path.glob("*.safetensors"))
    return [Path(re.sub(r"\.run\.json$", ".jsonl", str(file))) for file in inner]


def is_step(path: Path) -> bool:
    """Whether a path is that of a training step: its folder, or the file of its rows."""
    return path.name == ROWS or (path / ROWS).is_file()


def is_evaluation(path: Path) -> bool:
    """Whether a path is that of an evaluation: its folder, or its results file."""
    return results_file(path).with_suffix(".run.json").is_file()


def recorded_episodes(path: str | PathLike[str]) -> Iterator[RecordedEpisode | Path | tuple[str, Exception]]:
    """Yield the episodes of a file or folder, one at a time.

    Args:
        path: The folder of an evaluation or its results file, a journal, the folder of a training step, or a folder of
            these.

    Yields:
        Episodes; the folders of training steps; and the name of what cannot be read, with the reason.
    """
    path = Path(path)
    if is_step(path):
        yield path if path.is_dir() else path.parent
    elif is_evaluation(path):
        yield from _samples(path)
    elif path.is_dir():
        inner = recorded_in(path)
        if not inner:
            yield str(path), NotEnoughError("no recorded episodes: no evaluation, journal, trajectory or training step")
        for inner_path in inner:
            yield from recorded_episodes(inner_path)
    else:
        try:
            path.stat()
            if path.suffix != ".journal":
                raise NotEnoughError("it does not hold the task: name the evaluation or the journal that it is from")
            yield _of_journal(path)
        except (NotEnoughError, JournalError, OSError, LookupError, TypeError, ValueError) as error:
            yield str(path), error


def _samples(path: Path) -> Iterator[RecordedEpisode | tuple[str, Exception]]:
    try:
        run = read_run(path)
        keys = run.sample_keys
        places = {record["key"]: place for place, record in read_records(results_file(path))}
    except CheckpointError as error:
        yield str(path), error
        return
    for key in keys:
        name = "{} #{}".format(*keys[key])
        file = trajectory_file(results_file(path), key)
        if key not in places and not file.is_file():  # it has not ended
            continue
        try:
            if key not in places:
                raise NotEnoughError("its model calls are kept, but not its result")
            sample = EvalSample.from_record(read_record(places[key]))
            if not file.is_file():
                raise NotEnoughError("its model calls are not kept: evaluate with --keep-trajectories")
            sample.action.message = _with_bytes(sample.action.message)
            context, observation = sample.action.task_context, sample.step_result.observation
            context.conversation_history = _with_bytes(context.conversation_history)
            observation.messages = _with_bytes(observation.messages)
            yield RecordedEpisode(name, sample.action, sample.step_result, _trajectory(file), sample.environment)
        except (NotEnoughError, CheckpointError, OSError, ValueError) as error:
            yield name, error


def _with_bytes(value: Any) -> Any:
    """Return messages as they were before they were written as JSON, where bytes are base64."""
    if isinstance(value, list):
        return [*map(_with_bytes, value)]
    if not isinstance(value, Mapping):
        return value
    match value.get("bytes"):
        case {"base64": str(text)}:
            return {**value, "bytes": base64.b64decode(text)}
    return {name: _with_bytes(item) for name, item in value.items()}


def _trajectory(file: Path) -> Trajectory:
    return Trajectory.from_bytes(file.read_bytes(), name=str(file), changed_too=True)


def _of_journal(path: Path) -> RecordedEpisode:
    point = checkpoint(Journal(path))
    if point.result is None:
        raise NotEnoughError("the episode has not ended: resume it first")
    action = Action(**point.action)
    result = point.step_result(read_conversation(action).history_length)
    return RecordedEpisode(path.stem, action, result, point.trajectory, point.environment)


# --- to run them again ---


async def replay(
    paths: Iterable[str | PathLike[str]],
    make_environment: EnvironmentFactory | None,
    *,
    tools: Tools = "recorded",
) -> AsyncIterator[Replayed]:
    """Run recorded episodes again, and compare each stage with the record, up to the first difference.

    No server is asked. Tools return what they returned then, and a simulated user says what it said; with
    `tools="live"` the tools run, and their results are compared. A reward that asks a model is not computed again.

    Args:
        paths: Evaluations with `keep_trajectories`, journals, folders of training steps, or folders of these.
        make_environment: Function that returns the environment of a task; its model must be an `SGLangModel`, whose
            server need not exist. None if only training steps are replayed.
        tools: Whether tools return what they returned then, or run.

    Yields:
        What came of each episode, in the order of the files.
    """
    for path in paths:
        for found in recorded_episodes(path):
            if isinstance(found, Path):
                for replayed in replay_step(found):
                    yield replayed
            elif isinstance(found, RecordedEpisode):
                yield await _replay_episode(found, make_environment, tools)
            else:
                yield Replayed(found[0], {"record": f"cannot be read: {one_line(found[1])}"})


async def _replay_episode(
    episode: RecordedEpisode, make_environment: EnvironmentFactory | None, tools: Tools
) -> Replayed:
    replayed = Replayed(episode.name, recorded=episode.trajectory)
    group = as_group(episode.name, {episode.name: episode.trajectory})
    if not _check_record(replayed, group, findings([group])):
        return replayed
    if make_environment is None:
        replayed.stages["agent"] = "no environment is given"
        return replayed
    try:
        env: Any = await maybe_await(make_environment(episode.action.model_copy(deep=True)))
        if not isinstance(env, Environment):
            raise TypeError(f"it must be an Environment, not {type(env).__name__}")
    except Exception as error:
        replayed.stages["agent"] = f"the environment cannot be made: {one_line(error)}"
        return replayed
    kept = {name: getattr(env, name) for name in _REPLACED}  # it may serve the other episodes, too
    try:
        await _run_again(replayed, episode, env, tools)
    except Exception as error:
        replayed.stages["agent"] = f"it cannot run: {type(error).__name__}: {one_line(error)}"
    finally:
        vars(env).update(kept)
    return replayed


_REPLACED = ("journal", "retries", "reward_fn", "rerun")


def _check_record(replayed: Replayed, group: Group, found: Iterable[Finding]) -> bool:
    """Note the first finding that no recorder makes by mistake; return whether there is none.

    Args:
        replayed: The episode.
        group: The group with the episode.
        found: What the doctor found in it.
    """
    known = (*_CONTRADICTIONS, *_CREDIT, *(_NOT_TRAINED if group.kind == "step" else ()))
    first = next((finding for finding in found if finding.kind in known), None)
    if first is None:
        replayed.stages["record"] = SAME
        return True
    turn, token = first.turn, first.token
    if turn is None and first.sequence is not None and token is not None:
        episode = next(episode for episode in group.episodes if episode.id == first.episode)
        steps = episode.sequences[first.sequence].steps
        turn = next((step.turn.index for step in steps if token < step.stop), None)
    stage = "credit" if first.kind in _CREDIT and group.kind == "step" else "record"
    replayed.differs(Difference(f"{first.kind}: {first.why}", turn, token, stage=stage))
    return False


# Kinds of findings that mean that a file is not what was recorded; others tell how the episode went.
_CONTRADICTIONS = (
    *("logprobs-shifted", "logprobs", "id-text", "ids", "version-falls", "version"),
    *("version-missing", "experts-missing", "changed", "structure", "reward"),
)
_CREDIT = (
    *("mask-not-sampled", "mask-off-policy", "not-trained", "trained-twice", "advantage", "weight"),
    *("reward-sibling", "group", "left-out"),
)
_NOT_TRAINED = ("cut-complete", "reward-failure")  # of episodes that do not become rows


async def _run_again(replayed: Replayed, episode: RecordedEpisode, env: Environment, tools: Tools) -> None:
    replayed.changed = _changed(episode.identity or {}, json.loads(json.dumps(env.identity(), default=str)))
    reward = _why_no_reward(env, tools, episode.result.reward)
    env.journal, env.retries, env.rerun = None, 0, Rerun(episode, tools)
    if reward is not None:
        env.reward_fn = None
    recording = env.rerun.recording
    result = await env.step(episode.action.model_copy(deep=True))
    replayed.now = recording.trajectory
    then, now = episode.result, result.termination_reason
    if now is TerminationReason.TIMEOUT and recording.difference is None and not recording.has_ended:
        replayed.stages["agent"] = f"the run took more than {env.episode_timeout} s"
        return
    if not recording.has_ended:
        recording.check_end(of_all=tools == "live")
    difference = recording.difference
    if difference is None and not recording.has_ended:
        difference = _other_message(recording, then.observation, result.observation)
    if difference is not None:
        replayed.differs(replace(difference, now=result.error) if difference.now is None else difference)
        return
    replayed.stages |= {"agent": SAME, "tools": SAME if tools == "live" else "recorded only"}
    now = episode.outcome if recording.has_ended else now
    if then.termination_reason is not now:
        last = max((turn.index for turn in episode.trajectory.turns), default=None)
        reason = now.value if result.error is None or recording.has_ended else f"{now.value} ({result.error})"
        replayed.differs(Difference("outcome", last, None, then.termination_reason.value, reason, "outcome"))
        return
    replayed.stages |= {"outcome": SAME, "reward": reward or SAME, "credit": MISSING, "loss": MISSING}
    if recording.has_ended:
        replayed.stages |= dict.fromkeys(("outcome", "reward"), "recorded only: the run ended where the record ends")
        return
    values = [None if step.reward is None else step.reward.reward for step in (then, result)]
    if reward is None and values[0] != values[1]:
        why = values[1] if result.reward_error is None else result.reward_error
        replayed.differs(Difference("reward", None, None, values[0], why, "reward"))
    elif then.observation.tokens is not None and result.observation.tokens is not None:
        replayed.stages["credit"] = SAME
        difference = _other_token(recording, then.observation.tokens, result.observation.tokens)
        if difference is not None:
            replayed.differs(difference)


def _other_message(recording: Recording, then: Observation, now: Observation) -> Difference | None:
    """Return the first message that differs although no prompt does; it belongs to the answer that it is or follows."""
    for at, pair in enumerate(zip_longest(then.messages, now.messages)):
        first, second = (None if message is None else [message["role"], message["content"]] for message in pair)
        if encode(first) != encode(second):
            longer = max(then.messages, now.messages, key=len)
            count = sum(message["role"] == "assistant" for message in longer[: at + 1])
            answers = recording.answers()[: max(count, 1)]
            turn = answers[-1].index if answers else None
            return Difference("the messages", turn, None, first and first[1], second and second[1])
    return None


def _other_token(recording: Recording, then: TokenObservation, now: TokenObservation) -> Difference | None:
    """Return the first value that differs in the columns that a result has besides the model calls."""
    for name in ("token_ids", "loss_mask", "logprobs"):
        first, second = getattr(then, name), getattr(now, name)
        if first != second:
            at = first_difference(first, second)
            paths = ((turn.index, turn.token_ids()) for turn in recording.answers())
            turn = next((turn for turn, ids in paths if at < len(ids) and ids[:at] == now.token_ids[:at]), None)
            return Difference(name, turn, at, first[at : at + 1], second[at : at + 1], "credit")
    return None


def _why_no_reward(env: Environment, tools: Tools, recorded: Any) -> str | None:
    """Return why a reward is not computed again; None if it is."""
    if env.reward_fn is None and recorded is None:
        return "there is no reward function"
    if getattr(env.reward_fn, "asks_a_model", False):
        return "recorded only: it asks a model"
    if tools == "recorded" and type(env).reset is not Environment.reset:
        return "recorded only: the environment has a state, which recorded tools do not change"
    return None


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return which entries of two descriptions differ, by name."""
    names = []
    for name in {**then, **now}:
        first, second = then.get(name), now.get(name)
        if name == "model_factory" or name == "served" or not then or first == second:  # where the model is
            continue
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            names += _changed(first, second, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


# --- training steps ---


def replay_step(folder: Path) -> Iterator[Replayed]:
    """Compute the rows of a training step again from its trajectories and rewards; yield an entry per episode."""
    try:
        rows = TrainingRows.load(folder / ROWS, changed_too=True)
        [groups], _ = read_episodes([folder])
    except (OSError, RowsFileError, UnreadableError) as error:
        yield Replayed(str(folder / ROWS), {"record": f"cannot be read: {one_line(error)}"})
        return
    found = findings(groups)
    trained = {row.episode for row in rows}
    episodes = chain.from_iterable(group.episodes for group in groups)
    is_whole = bool(rows.settings) and all(episode.has_trajectory for episode in episodes)
    loss, now = _loss_again(rows)
    weights = zip(rows, _weights(rows), strict=True) if is_whole else ()
    wrong = {row.episode: (row, weight) for row, weight in weights if not _fits(row, weight)}
    for group in groups:
        for inspected in group.episodes:
            replayed = Replayed(f"{folder.name}/{inspected.id}", recorded=inspected.trajectory)
            episode_findings = (
                finding
                for finding in found
                if finding.episode in (inspected.id, None) and finding.group in (group.id, None)
            )
            if not inspected.has_trajectory:
                replayed.stages["record"] = "its trajectory is not in the folder"
            elif _check_record(replayed, group, episode_findings):  # the doctor makes the rows again
                replayed.stages |= dict.fromkeys(("agent", "tools", "outcome", "reward"), "the task is not in the file")
                replayed.stages["credit"] = (
                    SAME if is_whole else "not all of the batch, or its settings, is in the file"
                )
                replayed.stages["loss"] = loss if inspected.id in trained else MISSING
                if inspected.id in wrong:
                    row, weight = wrong[inspected.id]
                    at = row.spans[-1].turn
                    replayed.differs(Difference("loss_weight", at, None, row.loss_weight, weight, "credit"))
                elif replayed.stages["loss"] == DIFFERS and rows.loss is not None:
                    what = f"the loss {rows.loss.name}"
                    replayed.differs(Difference(what, None, None, rows.loss.value, now, "loss"))
            yield replayed


def _fits(row: TrainingRow, weight: float | None) -> bool:
    """Whether a row has a weight, or none is known."""
    known = row.loss_weight
    return known is None or weight is None or math.isclose(known, weight, rel_tol=1e-6)


def _loss_again(rows: TrainingRows) -> tuple[str, float | None]:
    """Return what the loss stage says, and the trainer's loss on the rows now; None if it is not computed."""
    if rows.loss is None:
        return MISSING, None
    try:
        now, then = policy_loss(rows), float(rows.loss.value)
    except ImportError as error:
        return f"recorded only: {one_line(error)}", None
    except Exception as error:
        return f"it cannot be computed: {one_line(error)}", None
    is_same = math.isclose(then, now, rel_tol=1e-6, abs_tol=1e-6) or (math.isnan(then) and math.isnan(now))
    return SAME if is_same else DIFFERS, now


def _weights(rows: TrainingRows) -> list[float | None]:
    """Return the weights that the rows have in the loss that most of them fit; the recorded ones if there is none."""
    best: list[Any] = [row.loss_weight for row in rows]
    most = len(rows) // 2
    for normalizer, loss in product(("episode_mean", "token_mean"), losses()):
        try:
            weights = rows.weights(cast(Any, normalizer), loss, micro_batches=[range(len(rows))])
        except ValueError:  # it needs what the file does not have
            continue
        fitting = sum(map(_fits, rows, weights))
        if fitting > most:
            best, most = weights, fitting
    return best


# --- what people read ---


def summary(replayed: Sequence[Replayed]) -> Iterator[str]:
    """Yield lines that say how many episodes are the same, and by which cause the others differ."""
    same = sum(episode.is_same for episode in replayed)
    yield f"{same} of {counted(len(replayed), 'episode')} replayed without a difference"
    causes = Counter(
        (episode.difference.stage, episode.difference.what) for episode in replayed if episode.difference is not None
    )
    for (stage, what), count in causes.most_common():
        yield f"{count:6}  {stage}: {what}"
    left = len(replayed) - same - causes.total()
    if left:
        yield f"{left:6}  not compared"
    for why, count in Counter(episode.stages.get("loss", MISSING) for episode in replayed).items():
        if why not in (SAME, DIFFERS, MISSING):
            yield f"{count:6}  loss: {why}"
    changed = Counter(chain.from_iterable(episode.changed for episode in replayed))
    if changed:
        yield f"the environment has another {', '.join(changed)} than in the record"


def as_data(replayed: Replayed) -> dict[str, Any]:
    """Return what came of an episode as JSON-like data."""
    difference = replayed.difference
    difference_data = None
    if difference is not None:
        place = {"stage": difference.stage, "turn": difference.turn, "token": difference.token}
        difference_data = {**place, "what": difference.what, "told": described(difference)}
    return {
        "name": replayed.name,
        "stages": replayed.stages,
        "difference": difference_data,
        "changed": replayed.changed,
    }


def replay_page(replayed: Iterable[Replayed]) -> str:
    """Return a page with the record and the run of each episode that differs side by side.

    Raises:
        PageTooLargeError: They hold more tokens than a page can show.
    """
    groups, found = [], []
    for episode in replayed:
        difference = episode.difference
        if difference is None or episode.recorded is None:
            continue
        pair = {"recorded": episode.recorded} | ({} if episode.now is None else {"now": episode.now})
        group = as_group(episode.name, pair)
        sequence = None if difference.token is None else _sequence_with(group, difference.turn)
        explanation = described(difference)
        place = (difference.turn, sequence, difference.token)
        found.append(Finding(difference.stage, explanation, group.file, episode.name, "recorded", *place))
        groups.append(group)
    return render(groups, found, title="Replay")


def _sequence_with(group: Group, turn: int | None) -> int | None:
    for at, sequence in enumerate(group.episodes[0].sequences):
        if any(step.turn.index == turn for step in sequence.steps):
            return at
    return None


def assert_replays(
    path: str | PathLike[str], make_environment: EnvironmentFactory | None = None, *, tools: Tools = "recorded"
) -> None:
    """Fail unless recorded episodes run again without a difference; for regression tests of your own.

    Args:
        path: What `replay` takes.
        make_environment: Function that returns the environment of a task.
        tools: Whether tools return what they returned then, or run.

    Raises:
        AssertionError: An episode differs, cannot be read, or cannot run; each has a line.

    Examples:
        ```python
        def test_recorded_episodes_replay():
            assert_replays("tests/episodes", lambda action: MyEnvironment(model_factory, MyReward()))
        ```
    """

    async def run() -> list[Replayed]:
        return [episode async for episode in replay([path], make_environment, tools=tools)]

    replayed = asyncio.run(run())
    wrong = [str(episode) for episode in replayed if not episode.is_same]
    assert replayed, f"{path}: no recorded episodes"
    assert not wrong, "\n".join([*summary(replayed), *wrong])
