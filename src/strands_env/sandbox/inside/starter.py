"""Starts worlds: a small process that each owner starts once, and that forks the first process of each world.

To fork a running Python takes a few milliseconds, to start one fifty. A fork goes directly into its namespaces, and
this process, which stays outside, gives it its users there. The owner sends a configuration and one end of the world's
control socket; the rest is between the owner and the world. This process ends with its owner: when the socket closes,
or when the owner's process is gone, however it ended.
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
        is_slow = config["connector"] is not None  # other worlds do not wait for its network
        with socket.socket(fileno=files[0]) as world:
            if not is_slow or os.fork() == 0:
                start(KINDS[config["mode"]], config, world, owner, files[1], control)
                if is_slow:
                    os._exit(0)
        os.close(files[1])
    os._exit(0)
