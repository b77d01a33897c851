"""Run a command, and end its whole process group with it, on SIGTERM, or when a given process is gone.

Usage: guard.py WATCHED_PID SCRATCH_DIRECTORY COMMAND [ARGUMENT ...]

Must be the leader of its process group and a child of WATCHED_PID. Removes SCRATCH_DIRECTORY at the end. Needs only the
standard library. Checking the parent's id works however the parent died. Unlike a parent-death signal, it covers
grandchildren and does not depend on a thread.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

POLL_INTERVAL = 0.2
LEAVE_WITHIN = 1.0  # seconds for the rest of the group to exit once the command is dead


def main() -> int:
    """Run the command of the command line and return its exit code, 128 + number if a signal ended it."""
    watched, scratch, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    code = run(command, watched)
    end_group()
    shutil.rmtree(scratch, ignore_errors=True)
    return code if code >= 0 else 128 - code


def run(command: list[str], watched: int) -> int:
    """Run a command until it ends, this process gets a signal to stop, or its parent is no longer `watched`."""
    stop_requested = False

    def stop(signum: int, frame: object) -> None:
        nonlocal stop_requested
        stop_requested = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        server = subprocess.Popen(command)
    except OSError as error:
        print(f"could not start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    while server.poll() is None and not stop_requested and os.getppid() == watched:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(POLL_INTERVAL)
    # Kill at once: a server has nothing to save, and SGLang takes five seconds to notice SIGTERM. Its helpers notice
    # that it is gone and exit, and free their shared memory.
    server.kill()
    return server.wait()


def end_group() -> None:
    """Wait for the rest of the group to exit, then kill those that remain."""
    give_up = time.monotonic() + LEAVE_WITHIN
    while others := group_members(os.getpgrp()) - {os.getpid()}:
        if time.monotonic() > give_up:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def group_members(group: int) -> set[int]:
    """Return the ids of all running processes of a process group, from /proc."""
    members = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                # The second field is the name in parentheses, which may itself contain parentheses.
                state, _, process_group = stat.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state not in "ZX":
            members.add(int(entry))
    return members


if __name__ == "__main__":
    sys.exit(main())
