"""The process that starts worlds, one for each process that owns some."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from .inside.messages import send

END_S = 5.0
INSIDE = str(Path(__file__).parent / "inside")
# Builds the package by hand: an import by its full name would import the parent packages.
BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('inside'); package.__path__ = [sys.argv.pop(1)]; "
    "sys.modules['inside'] = package; from inside.{module} import main; main()"
)


def inside_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs the `main` of a module of `inside`."""
    return [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", BOOTSTRAP.format(module=module), INSIDE, *arguments]


def environment() -> dict[str, str]:
    """Return the variables that Python may need to start, and no others."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def in_utf8(path: str) -> str:
    """Return a path as the Python inside decodes it, whatever the locale of this process."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


class Starter:
    """Starts worlds through a process that it starts when needed, and again if it ended or if this process forked."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._owner: int | None = None

    def start(self, config: dict[str, Any], control: socket.socket, layers: int) -> None:
        """Start a world that answers on its control socket.

        Args:
            config: What `inside.first_process` needs.
            control: The world's end of its control socket.
            layers: Descriptor of the folder of layers.

        Raises:
            OSError: No process can be started.
        """
        files = (control.fileno(), layers)
        with self._lock:
            if self._control is not None and self._owner == os.getpid():
                with contextlib.suppress(OSError):  # it ended
                    send(self._control, config, files)
                    return
            self._control = self._launched()
            send(self._control, config, files)

    def _launched(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                inside_command("starter", str(theirs.fileno()), str(os.getpid())),
                env=environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._owner = os.getpid()
        return ours

    def close(self) -> None:
        """End the process, as the interpreter ends; worlds end by themselves."""
        if self._control is not None and self._owner == os.getpid():
            self._control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)


STARTER = Starter()
atexit.register(STARTER.close)
