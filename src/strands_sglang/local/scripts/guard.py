"""Runs a command and ends its whole process group with it, on SIGTERM, or when a given process is gone.

Usage: guard.py WATCHED_PID SCRATCH_DIRECTORY COMMAND [ARGUMENT ...]

Must be the leader of its process group and a child of WATCHED_PID; removes SCRATCH_DIRECTORY at the
end. Needs the standard library only. Looking at the parent's id works however the parent died, and
unlike a parent-death signal it covers grandchildren and does not depend on a thread.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

POLL_INTERVAL = 0.2
LEAVE_WITHIN = 1.0  # seconds that the rest of the group has to leave by itself once the command is dead


def main() -> int:
    """Run the command given on the command line and return its exit code, 128 + number if a signal ended it."""
    watched, scratch, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    code = run(command, watched)
    end_group()
    shutil.rmtree(scratch, ignore_errors=True)
    return code if code >= 0 else 128 - code


def run(command: list[str], watched: int) -> int:
    """Run a command until it ends, this process is told to stop, or its parent is not `watched` any more."""
    told_to_stop = False

    def stop(signum: int, frame: object) -> None:
        nonlocal told_to_stop
        told_to_stop = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        server = subprocess.Popen(command)
    except OSError as error:
        print(f"could not start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    while server.poll() is None and not told_to_stop and os.getppid() == watched:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(POLL_INTERVAL)
    # At once and without asking: a server that is told to end has nothing to keep, and SGLang takes five seconds
    # to notice a SIGTERM. Its helpers then see it gone and leave by themselves, taking their shared memory along.
    server.kill()
    return server.wait()


def end_group() -> None:
    """Wait for the rest of the group to leave, then kill those that stay."""
    give_up = time.monotonic() + LEAVE_WITHIN
    while others := group_members(os.getpgrp()) - {os.getpid()}:
        if time.monotonic() > give_up:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def group_members(group: int) -> set[int]:
    """Return the ids of all processes of a process group that still run, read from /proc."""
    members = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                # The second field is the name in parentheses and may hold anything, parentheses included.
                state, _, process_group = stat.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state not in "ZX":
            members.add(int(entry))
    return members


if __name__ == "__main__":
    sys.exit(main())
