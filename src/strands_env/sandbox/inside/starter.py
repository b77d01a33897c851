"""Starts worlds: a small process that each owner starts once, and that forks the first process of each world.

To fork a running Python takes a few milliseconds, to start one fifty. The owner sends a configuration and one end of
the world's control socket; the rest is between the owner and the world. This process ends with its owner: when the
socket closes, or when the owner's process is gone, however it ended.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from typing import NoReturn

from . import kernel
from .first_process import FirstProcess, start
from .messages import receive
from .other_user import OtherUser

KINDS = {"namespaces": FirstProcess, "uid": OtherUser}


def main() -> NoReturn:
    """Serve requests until the owner is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    owner = os.pidfd_open(int(sys.argv[2]))
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects worlds that ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    gc.disable()
    gc.freeze()
    events = select.poll()
    events.register(control, select.POLLIN)
    events.register(owner, select.POLLIN)
    while owner not in dict(events.poll()):
        config, files = receive(control)
        if config is None:
            break
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                start(KINDS[config["mode"]], config, socket.socket(fileno=files[0]), owner, files[1:])
            finally:
                os._exit(1)
        for file in files:
            os.close(file)
    os._exit(0)
