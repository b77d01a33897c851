"""Processes that are to be gone."""

from __future__ import annotations

import os
import select

PATIENCE_S = 60


def has_ended(pid: int) -> bool:
    """Whether a process ends: the kernel delivers a SIGKILL in its own time. One that nobody has reaped has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], PATIENCE_S)[0])
    finally:
        os.close(process)
