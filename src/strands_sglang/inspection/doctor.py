"""What is wrong with recorded episodes: each check compares a file with what can be derived from its other parts.

A file of ours holds most facts twice: a token and its text, a mask and the turns that it follows from, an advantage and
the rewards that it is computed from, a fact and the server's own report of it. A finding is a contradiction between two
of them, or an end that no one should train on. What a file cannot tell is not guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..shown import counted, visible
from .records import Finding, Group, count_tokens, turns_of, within

FLAT = "flat-group"

KINDS: Mapping[str, str] = {
    "logprobs-shifted": "logprobs belong to the token before or after",
    "logprobs": "a logprob is missing, is not the recorded one, or cannot be one",
    "mask-not-sampled": "a token is trained that the model did not sample",
    "mask-off-policy": "a token is trained that was constrained, auxiliary or discarded",
    "not-trained": "a sampled token is not trained, although nothing excludes it",
    "trained-twice": "two sequences, or two records of one answer, train one token",
    "id-text": "the id of a token and the recorded text disagree",
    "ids": "a token is not the recorded one",
    "drift": "a text was tokenized again, to other ids than were sampled",
    "re-rendered": "a boundary between turns was rendered again instead of continued",
    "version-missing": "the version of the weights that sampled a token is missing",
    "version-falls": "a later token was sampled by older weights",
    "version": "a version is not the recorded one, or cannot be the right one",
    "reward-sibling": "an episode has the reward of a sibling",
    "reward": "a reward is not the recorded one",
    "reward-failure": "an episode has a reward although the infrastructure failed",
    FLAT: "all episodes of a group have the same reward, so it trains nothing",
    "advantage": "an advantage does not follow from the rewards",
    "weight": "a weight or a count behind it does not follow from the rows",
    "experts-missing": "routed experts lack rows",
    "cut-complete": "an answer that was cut off counts as complete",
    "context-clamped": "the end of the context cut an answer off",
    "left-out": "an episode is missing in the update, or is in it, without a reason",
    "group": "episodes of several prompts are in one group",
    "repeated": "siblings sampled the same tokens, which chance does not do",
    "changed": "a recorded fact was changed later",
    "structure": "the parts of a file do not fit together",
}
"""Kinds of findings, and what each means."""

MOST = 200
"""Most findings of one kind in one file; a further one says how many more there are."""


_CHANGED = "the file is no longer as it was written"


def findings(groups: Iterable[Group]) -> list[Finding]:
    """Check recorded episodes.

    Args:
        groups: What `reading.read` returned.

    Returns:
        What is wrong, in the order of the files, episodes and tokens; empty if all is well.
    """
    from .checks.credit import check_openings, check_rewards
    from .checks.dumps import check_sample
    from .checks.evaluations import check_record
    from .checks.steps import check_step
    from .checks.turns import check_turns
    from .checks.values import check_repeated, check_values, count_certain

    groups = list(groups)
    certain = count_certain(groups)
    found: list[Finding] = []
    steps: dict[str, list[Group]] = {}
    for group in groups:
        if group.kind == "step":
            steps.setdefault(group.file, []).append(group)
        files = {episode.id: episode.file for episode in group.episodes}
        for episode in group.episodes:
            episode_findings: list[Finding] = []
            for check in (
                check_turns(group, episode),
                check_values(group, episode, certain),
                check_sample(group, episode),
                check_record(group, episode),
            ):
                for finding in _guarded(check):
                    file = episode.file if finding.sequence is None else group.file
                    episode_findings.append(finding.inside(file=file, group=group.id, episode=episode.id))
            if not episode_findings and episode.trajectory.is_changed:
                episode_findings.append(Finding("changed", _CHANGED, episode.file, group.id, episode.id))
            found += episode_findings
        for check in (check_repeated(group), check_rewards(group)):
            for finding in _guarded(check):
                is_own = group.kind == "trajectory" or finding.turn is not None
                file = files.get(str(finding.episode), group.file) if is_own else group.file
                found.append(finding.inside(file=file, group=group.id))
    for file, batch in steps.items():
        for check in (check_openings(batch), check_step(batch)):
            found += within(_guarded(check), file=file)
        rows = batch[0].batch
        if rows is not None and rows.is_changed and all(finding.file != file for finding in found):
            found.append(Finding("changed", _CHANGED, file))
    return _bounded(dict.fromkeys(found))


def _guarded(check: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of a check; that it cannot read a damaged value is one, too."""
    try:
        yield from check
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        yield Finding("structure", f"a value has a wrong form: {type(error).__name__}: {str(error)[:200]}")


def _bounded(found: Iterable[Finding]) -> list[Finding]:
    counts: dict[tuple[str, str], int] = {}
    kept: list[Finding] = []
    for finding in found:
        key = (finding.file, finding.kind)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= MOST:
            kept.append(finding)
    for (file, kind), count in counts.items():
        if count > MOST:
            kept.append(Finding(kind, f"{count - MOST} further findings of this kind are not shown", file))
    return kept


def lines(found: Sequence[Finding]) -> Iterator[str]:
    """Return a line per finding: its kind, where it is, and why."""
    for finding in found:
        yield f"{finding.kind}: {visible(finding.where)}: {visible(finding.why)}"


def has_tokens(groups: Sequence[Group]) -> bool:
    """Whether any token is recorded: without one, the doctor has next to nothing to compare."""
    return any(turn.prompt_ids for turn in turns_of(groups))


def summary(groups: Sequence[Group], found: Sequence[Finding]) -> str:
    """Return one line about what was checked."""
    episodes = counted(sum(len(group.episodes) for group in groups), "episode")
    result = counted(len(found), "finding") if found else "nothing is wrong"
    if not has_tokens(groups):
        is_evaluation = any(group.kind == "evaluation" for group in groups)
        hint = ": `strands-env eval --keep-trajectories` records them" if is_evaluation else ""
        problems = f"{result} in" if found else "only"
        return f"{problems} the conversations of {episodes}: no tokens are recorded, so none were checked{hint}"
    turns = list(turns_of(groups))
    tokens = count_tokens(turns)
    texts = "" if any(group.vocabulary for group in groups) else "; ids and texts are not compared without --tokenizer"
    return f"{result} in {episodes}, {counted(len(turns), 'turn')} and {counted(tokens, 'token')}{texts}"
