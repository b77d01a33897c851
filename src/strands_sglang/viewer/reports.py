"""What a page shows of an evaluation, or of two: tables, plots, and a table of tasks whose samples are its episodes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TypedDict

from ..inspection.reading import read
from ..inspection.records import Group, count_tokens, turns_of
from .page import PageTooLargeError, check_size


class Table(TypedDict):
    """A table of text.

    Attributes:
        title: What it shows.
        head: Names of the columns.
        rows: Cells of each row; the first names it.
    """

    title: str
    head: list[str]
    rows: list[list[str]]


class Plot(TypedDict):
    """A picture.

    Attributes:
        title: What it shows.
        says: The same in words, for those who do not see it.
        svg: An SVG document without scripts and `style` attributes.
    """

    title: str
    says: str
    svg: str


class Task(TypedDict):
    """A row of the table of tasks.

    Attributes:
        name: Its id.
        state: One of the states of the report.
        values: For each metric, a value per column; None if unknown.
        facts: A number for each fact of the report; None if unknown.
        samples: For each evaluation, reward and number in the page of each of its episodes.
    """

    name: str
    state: str
    values: dict[str, list[float | None]]
    facts: list[float | None]
    samples: list[list[tuple[str, int]]]


class Report(TypedDict):
    """What a page shows of an evaluation, or of two.

    Attributes:
        name: Name of the view.
        headline: The result in one sentence.
        about: What was evaluated, how and when, as names and texts.
        success_threshold: Minimum reward of a success.
        notes: What the reader should know first.
        tables: Tables.
        plots: Plots that do not depend on the metric.
        metrics: The metrics that a reader can choose, each with its plot or None.
        columns: What the values of a metric are.
        facts: Names of further columns.
        evaluations: Names of the columns with samples.
        states: The states that the table can be filtered by.
        tasks: The rows.
    """

    name: str
    headline: str
    about: list[tuple[str, str]]
    success_threshold: float
    notes: list[str]
    tables: list[Table]
    plots: list[Plot]
    metrics: dict[str, Plot | None]
    columns: list[str]
    facts: list[str]
    evaluations: list[str]
    states: list[str]
    tasks: list[Task]


def read_episodes(paths: Iterable[Path]) -> tuple[list[list[Group]], int]:
    """Read the episodes that one page is to show, such as the samples of two evaluations.

    Args:
        paths: Files and folders, as `strands-sglang view` takes them.

    Returns:
        The groups of each path, and the number of tokens in them if a page has no room for these. Then the episodes
        have their conversations only.

    Raises:
        UnreadableError: A path is damaged, or no episode is in it.
    """
    groups = [read([path]) for path in paths]
    try:
        check_size(list(chain(*groups)))
    except PageTooLargeError:
        tokens = count_tokens(turns_of(chain(*groups)))
        for group in chain(*groups):
            for episode in group.episodes:
                episode.turns, episode.sequences = [], []
        return groups, tokens
    return groups, 0
