"""Messages between an owner and its worlds: JSON and descriptors over SOCK_SEQPACKET sockets; archives of files."""

from __future__ import annotations

import array
import json
import socket
import tarfile
from collections.abc import Sequence
from typing import Any

MOST_BYTES = 200_000  # a message must fit the socket's default buffer
_MOST_FILES = 8


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and the descriptors that come with it; no message if the other end is closed."""
    data, ancillary, _, _ = control.recvmsg(MOST_BYTES, socket.CMSG_SPACE(_MOST_FILES * 4), socket.MSG_CMSG_CLOEXEC)
    files = array.array("i")
    for _, _, content in ancillary:
        files.frombytes(content)
    return (json.loads(data) if data else None), list(files)


def send(control: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send a message with descriptors."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    control.sendmsg([json.dumps(message).encode()], rights)


def unchanged(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """Extract a member as it is: the default of Python 3.14 refuses absolute links, which a world's files may be."""
    return member
