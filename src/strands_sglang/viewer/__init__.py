"""Recorded episodes as one HTML page that explains every token; nothing in it is ever requested from elsewhere.

`read_episodes`, `render` and the parts of a `Report` are what other packages use of it.
"""

from ..inspection.doctor import findings
from ..inspection.formats.trajectories import as_group
from ..inspection.records import Finding, Group, UnreadableError
from .page import PageTooLargeError, check_size, render
from .reports import Plot, Report, Table, Task, read_episodes

__all__ = [
    "Finding",
    "Group",
    "PageTooLargeError",
    "Plot",
    "Report",
    "Table",
    "Task",
    "UnreadableError",
    "as_group",
    "check_size",
    "findings",
    "read_episodes",
    "render",
]
