"""Recorded episodes as one HTML page that explains every token; nothing in it is ever requested from elsewhere.

`read_episodes`, `render` and the parts of a `Report` are what other packages use of it.
"""

from ..inspection.reading import UnreadableError
from .page import PageTooLargeError, check_size, render
from .reports import Plot, Report, Table, Task, read_episodes

__all__ = [
    "PageTooLargeError",
    "Plot",
    "Report",
    "Table",
    "Task",
    "UnreadableError",
    "check_size",
    "read_episodes",
    "render",
]
