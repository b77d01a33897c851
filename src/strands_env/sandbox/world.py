"""A world for an episode: files and programs in namespaces of their own, without Docker, a daemon or root."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import gzip
import itertools
import json
import os
import shutil
import signal
import socket
import tarfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from .inside.file_system import SYSTEM
from .inside.messages import MOST_BYTES, receive, send, unchanged
from .layers import Layer, folder, new_layer, sweep, users
from .starting import STARTER, in_utf8

Ended = Literal["exited", "timeout", "memory", "processes", "disk", "output"]
"""Why a program ended: it exited, by itself or by a signal, or it exceeded the named limit."""

Network = Literal["none", "public", "host"]
"""The network of a world: none but its own loopback; one that reaches what this machine reaches, but not its loopback;
or, only for programs that you trust, that of this machine."""

Mode = Literal["namespaces", "uid"]
"""Isolation of programs; see [`PythonSandbox`][strands_env.sandbox.PythonSandbox]."""

Stream = Literal["stdout", "stderr"]

START_S = 30.0
GRACE_S = 15.0  # most time beyond its limit that a program may take to end
FILE_S = 600.0
MOST_S = 1e9
CHUNK = 1 << 16
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
OPTIONS_BYTES = 4_000  # of a mount: a page
FIRST_FILES: Mapping[str, str] = {
    "/etc/hosts": "127.0.0.1 localhost world\n::1 localhost\n",
    "/etc/passwd": "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
}
T = TypeVar("T")
Change = Callable[[tarfile.TarInfo], "tarfile.TarInfo | None"]


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a world, or of one run of a [`PythonSandbox`][strands_env.sandbox.PythonSandbox].

    Attributes:
        wall_s: Wall-clock time in seconds of a program, unless `execute` gets another.
        cpu_s: CPU time in seconds, per process.
        memory_bytes: Memory of all processes together in bytes: their pages, page tables, shared memory, files in
            /dev/shm, pipes and sockets, the last two counted as full. It is measured 20 times a second while you wait
            for a program, and twice a second while others run in the background.
        address_space_bytes: Address space in bytes, per process; None for no limit. Beyond it, Python raises
            `MemoryError`.
        disk_bytes: Size in bytes of all files that programs change or make, and of the largest one.
        processes: Processes and threads at a time.
        open_files: Open files, per process.
        output_bytes: Length of a program's output in bytes. A program that writes more is ended.
        source_bytes: Length of a Python program's source in bytes.
    """

    wall_s: float = 30.0
    cpu_s: int = 30
    memory_bytes: int = 2 << 30
    address_space_bytes: int | None = 4 << 30
    disk_bytes: int = 64 << 20
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 32_000
    source_bytes: int = 1 << 20


DEFAULT_LIMITS = SandboxLimits()
"""Limits of a Python program unless you pass others."""

WORLD_LIMITS = SandboxLimits(
    wall_s=120.0, cpu_s=3_600, memory_bytes=4 << 30, address_space_bytes=None, disk_bytes=4 << 30, processes=512,
    open_files=4_096, output_bytes=1 << 20,
)  # fmt: skip
"""Limits of a world unless you pass others."""


class SandboxError(RuntimeError):
    """A program could not be run, for a reason that is not the program's."""


class SandboxUnavailableError(SandboxError):
    """This machine does not allow what was asked for."""


class ImageError(SandboxError):
    """An image is not supported, or could not be read, pulled or built."""


@dataclass(frozen=True)
class Execution:
    """How a program ended.

    Attributes:
        stdout: What it wrote to stdout, cut off at the limit.
        stderr: What it wrote to stderr, cut off at the limit.
        ended: Why it ended.
        exit_code: Its exit code, negative for a signal. None if it exceeded a limit.
    """

    stdout: bytes
    stderr: bytes
    ended: Ended
    exit_code: int | None

    @property
    def output(self) -> str:
        """Both outputs as text, with invalid UTF-8 replaced."""
        return (self.stdout + self.stderr).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Image:
    """Files that worlds begin with, and the settings of their programs.

    A snapshot of a world is an image, too. Its files exist as long as this process has the image or a world on it.

    Attributes:
        layers: Layers, the topmost first.
        shows_machine: Whether programs and libraries of this machine are visible, read-only.
        env: Environment variables.
        working_dir: Working directory.
        user: User of the programs.
    """

    layers: tuple[Layer, ...] = ()
    shows_machine: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "/"
    user: str = "root"


class World:
    """Files and programs of an episode, apart from this machine.

    A world has its own users, processes, mounts and network, and its own layer of files over an image. Programs run as
    its root or as one of its users, and none of them is a user of this machine. Without an image, they see the
    machine's programs and libraries read-only, and otherwise empty folders. A world ends with this process, however
    that ends. It belongs to the event loop that started it.

    Examples:
        ```python
        async with World() as world:
            await world.write("/task/main.py", b"print(6 * 7)")
            execution = await world.execute("python3 main.py", working_dir="/task")
            print(execution.output)
        ```
    """

    def __init__(
        self,
        image: Image | None = None,
        *,
        limits: SandboxLimits = WORLD_LIMITS,
        network: Network = "none",
        env: Mapping[str, str] | None = None,
        visible_paths: Sequence[str | os.PathLike[str]] = (),
        mode: Mode = "namespaces",
    ) -> None:
        """Describe a world; `start` or `async with` starts it.

        Args:
            image: Files to begin with; None for the programs of this machine.
            limits: Limits of all its programs together.
            network: `none`, `public` or `host`. `public` needs slirp4netns. With `host`, programs also reach servers
                that listen on this machine's loopback only, so use it for programs that you trust.
            env: Environment variables in addition to those of the image.
            visible_paths: Files and folders of this machine that programs may read, at the same path.
            mode: Isolation. With `uid`, for root where there are no namespaces, a world has no image and no snapshots,
                and its files are the folder in which its programs run.

        Raises:
            ValueError: A path does not exist, or there is no such network.
        """
        if network not in get_args(Network):
            raise ValueError(f"network={network!r} is not one of {', '.join(get_args(Network))}")
        self._visible = existing(visible_paths)
        self._mode = mode
        self.image = image or Image(shows_machine=True)
        self.limits = limits
        self.network = network
        self.env = {**self.image.env, **(env or {})}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._outputs: set[_Output] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()  # while it starts, stops or continues on a snapshot
        self._control: socket.socket | None = None
        self._own: Layer | None = None
        self._was_started = False

    async def __aenter__(self) -> World:
        """Start the world."""
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        """End the world."""
        await self.stop()

    async def start(self) -> World:
        """Start the world, once.

        Returns:
            This world.

        Raises:
            SandboxUnavailableError: The machine does not allow it; the message says which step was refused.
            SandboxError: It was started already.
        """
        if self._was_started:
            raise SandboxError("a world starts once: make another")
        self._was_started = True
        self._loop = asyncio.get_running_loop()
        try:
            async with self._changing:
                self._own = await in_thread(_first_layer)
                await self._launch()
        except OSError as error:
            await self.stop()
            raise SandboxError(f"a world could not be started: {error}") from error
        except BaseException:
            await self.stop()
            raise
        return self

    async def _launch(self) -> None:
        """Start the first process on the image's layers and the world's own."""
        assert self._own is not None
        layers = _names((self._own, *self.image.layers))
        shown = (*(SYSTEM if self.image.shows_machine else ()), *self._visible)
        config = {
            "mode": self._mode,
            "layers": layers,
            "users": users(),
            "network": self.network,
            "shown": [in_utf8(path) for path in shown],
            "files": {**FIRST_FILES, **_settings(self.network)},
            "connector": _connector() if self.network == "public" else None,
            "limits": asdict(self.limits),
            "environment": self.env,
            "working_dir": self.image.working_dir,
        }
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._process: int | None = None
        self._is_ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._receive)
        with theirs:
            await in_thread(_start, config, theirs)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), START_S)
        except asyncio.TimeoutError:
            raise SandboxError(f"a world had not started after {START_S:g} seconds") from None

    async def stop(self) -> None:
        """End all programs and remove the world's files. Images and snapshots stay."""
        await asyncio.shield(self._stop())

    async def _stop(self) -> None:
        async with self._changing:
            await self._discard()

    async def _discard(self) -> None:
        await self._end_processes()
        self.image = replace(self.image, layers=())  # lets go of them
        layer, self._own = self._own, None
        if layer is not None:
            await in_thread(layer.discard)

    async def _end_processes(self) -> None:
        control, self._control = self._control, None
        if control is None:
            return
        self._loop.remove_reader(control)
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)  # a fork of this process may have it, too
        control.close()
        self._fail(SandboxError("the world was stopped"))
        if self._process is not None:
            process, self._process = self._process, None
            gone = asyncio.Event()
            self._loop.add_reader(process, gone.set)
            try:
                await asyncio.wait_for(gone.wait(), GRACE_S)
            except asyncio.TimeoutError:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                self._loop.remove_reader(process)
                os.close(process)
        for output in self._outputs:
            output.close()
        self._outputs.clear()

    def _fail(self, error: SandboxError) -> None:
        waited_for: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
        for waiting in waited_for:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # perhaps no one waits for it
        self._waiting.clear()

    # --- messages ---

    def _receive(self) -> None:
        assert self._control is not None
        try:
            message, files = receive(self._control)
        except BlockingIOError:
            return
        except OSError:
            message, files = None, []
        if message is None:
            self._loop.remove_reader(self._control)
            self._fail(SandboxError("the world's first process ended: the machine may have run out of memory"))
        elif "refused" in message and self._is_ready:
            self._fail(SandboxError(f"the world's first process failed: {message['refused']}"))
        elif "refused" in message:
            self._fail(SandboxUnavailableError(f"this machine starts no world: {message['refused']}"))
        elif "number" in message:
            waiting = self._waiting.pop(message["number"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        else:
            if files:
                self._process = files[0]
            self._is_ready = self._is_ready or "ready" in message
            if self._is_ready and self._process is not None and not self._ready.done():
                self._ready.set_result(None)

    async def _begin(self, request: dict[str, Any], files: Sequence[int], timeout_s: float) -> int:
        """Send a request; return its number."""
        if self._control is None:
            raise SandboxError("the world is not running")
        if asyncio.get_running_loop() is not self._loop:
            raise SandboxError("a world belongs to the event loop that started it")
        number = next(self._numbers)
        message = {**request, "number": number, "timeout_s": min(timeout_s, MOST_S)}
        if len(json.dumps(message)) > MOST_BYTES:
            raise ValueError("the command, its variables or the path are longer than Linux allows")
        self._waiting[number] = self._loop.create_future()
        try:
            await self._send(message, files)
        except BaseException:
            del self._waiting[number]
            raise
        return number

    async def _end(self, number: int, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request. If this task is cancelled, what was asked for ends first."""
        answer = self._waiting[number]
        try:
            return await asyncio.wait_for(asyncio.shield(answer), timeout_s + GRACE_S)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await self._send({"do": "stop", "number": number}, ())
            await asyncio.wait({answer}, timeout=GRACE_S)
            raise
        except asyncio.TimeoutError:
            await self._end_processes()
            raise SandboxError(f"the world did not end a program {GRACE_S:g} seconds after its time limit") from None
        finally:
            self._waiting.pop(number, None)

    async def _send(self, message: dict[str, Any], files: Sequence[int]) -> None:
        while self._control is not None:
            try:
                send(self._control, message, files)
                return
            except BlockingIOError:  # it has many requests to read
                await asyncio.sleep(0.001)
            except OSError as error:
                raise SandboxError(f"the world does not answer: {error}") from error
        raise SandboxError("the world was stopped")

    # --- programs ---

    async def execute(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        on_output: Callable[[Stream, bytes], None] | None = None,
        is_merged: bool = False,
        privileges: bool = True,
        script: str | None = None,
    ) -> Execution:
        """Run a program and wait for it; programs that it leaves in the background live on.

        A program that fails or exceeds a limit is an ordinary result. If the task is cancelled, the program and all
        that it started end before the cancellation continues.

        Args:
            command: A shell command, or a program with its arguments.
            user: User by name or number, as `user` or `user:group`; None for the image's.
            working_dir: Working directory; None for the image's.
            env: Environment variables in addition to those of the world.
            timeout_s: Time limit in seconds; None for `limits.wall_s`. Beyond it, the whole tree of processes ends.
            stdin: Standard input.
            on_output: Called with each piece of output, on the event loop.
            is_merged: Whether stdout gets both outputs, in the order in which they were written.
            privileges: Whether root may act as root, for example to change owners; otherwise no program can become
                another user.
            script: File that gets `stdin` before the program starts, such as the source that it runs. It is root's, in
                mode `uid` the programs' user's.

        Raises:
            SandboxError: The world is not running, or does not answer.
            SandboxUnavailableError: This machine's user may not run programs as other users.
            ValueError: The command is longer than Linux allows.
        """
        user = user or self.image.user
        if len(users()) == 1 and user.partition(":")[0] not in ("", "0", "root"):
            raise SandboxUnavailableError(
                f"a program cannot run as {user}: worlds of user {os.geteuid()} have a single user, root. "
                "Run as this machine's root, or pass user='root'"
            )
        timeout_s = min(self.limits.wall_s if timeout_s is None else timeout_s, MOST_S)
        request = {
            "do": "execute",
            "command": command if isinstance(command, str) else list(command),
            "user": user,
            "folder": working_dir,
            "environment": dict(env or {}),
            "privileges": privileges,
            "path": script,
        }
        outputs: list[_Output] = []
        streams: tuple[Stream, ...] = ("stdout",) if is_merged else ("stdout", "stderr")
        with contextlib.ExitStack() as given:
            try:
                for stream in streams:
                    outputs.append(_Output(self._loop, stream, self.limits.output_bytes, on_output))
                    given.callback(outputs[-1].close_writes)
                files = (_in_memory(stdin), outputs[0].writes, outputs[-1].writes)
                given.callback(os.close, files[0])
            except OSError as error:
                raise SandboxError(f"a program could not be started: {error}") from error
            self._outputs.update(outputs)
            number = await self._begin(request, files, timeout_s)
        for output in outputs:
            output.when_full = lambda: self._stop_soon(number)
        try:
            answer = await self._end(number, timeout_s)
        finally:
            self._outputs -= {output for output in outputs if output.is_drained()}
        ended: Ended = "output" if any(output.is_full for output in outputs) else answer["ended"]
        return Execution(
            stdout=bytes(outputs[0].data),
            stderr=b"" if is_merged else bytes(outputs[1].data),
            ended=ended,
            exit_code=answer["code"] if ended == "exited" else None,
        )

    def _stop_soon(self, number: int) -> None:
        stopping = self._loop.create_task(self._send({"do": "stop", "number": number}, ()))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    # --- files ---

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Return the content of a file.

        Args:
            path: Absolute path in the world.
            max_bytes: Size in bytes beyond which the file is not read.

        Raises:
            OSError: It does not exist, is no file or is too large (`EFBIG`), as for `open`; or a program of the world
                ended this (`EINTR`), as for `write`, `put` and `get`.
            SandboxError: The world is not running, or does not answer.
        """
        content = _Output(self._loop, "stdout", max_bytes + 1, None)
        await self._with_files({"do": "read", "path": path, "most": max_bytes}, content.writes)
        content.is_drained()
        return bytes(content.data)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, and the folders that it needs.

        Args:
            path: Absolute path in the world.
            content: Its new content.

        Raises:
            OSError: It cannot be written.
            SandboxError: The world is not running, or does not answer.
        """
        await self._with_files({"do": "write", "path": path}, _in_memory(content))

    async def put(self, source: str | os.PathLike[str], target: str, *, owner: str = "root") -> None:
        """Copy a file or a folder of this machine to the world.

        Args:
            source: File or folder of this machine.
            target: Absolute path of the copy, or of a folder that gets the file. What is there already stays, unless
                the source has it, too.
            owner: User in the world, as `user` or `user:group`, who owns the copy.

        Raises:
            OSError: The source cannot be read, or the target cannot be written.
            SandboxError: The world is not running, or does not answer.
        """
        os.stat(source)
        await self._unpack(target, owner, os.path.basename(source), functools.partial(in_thread, pack, source, of_root))

    async def _unpack(self, target: str, owner: str, name: str, packs: Callable[[int], Awaitable[None]]) -> None:
        """Unpack what `packs` writes to a pipe and closes; a file is called `name` if the target is a folder."""
        request = {"do": "unpack", "path": target, "owner": owner, "name": name}
        reads, writes = os.pipe()
        packing = asyncio.ensure_future(packs(writes))
        try:
            await self._with_files(request, reads)
        finally:
            await packing

    async def _copy_from(self, other: World, source: str, target: str, owner: str) -> None:
        """Copy a file or a folder of another world."""

        async def packs(pipe: int) -> None:
            with contextlib.suppress(BrokenPipeError):  # the other side tells why
                await other._with_files({"do": "pack", "path": source, "name": ".", "follows": True}, pipe)

        await self._unpack(target, owner, os.path.basename(source), packs)

    async def _unpack_layer(self, archive: int) -> None:
        """Unpack a layer of an image, a file, which is closed."""
        await self._with_files({"do": "layer", "path": "/", "is_first": not self.image.layers}, archive)

    async def get(self, source: str, target: str | os.PathLike[str]) -> None:
        """Copy a file or a folder of the world to this machine, without links that lead out of it and without devices.

        Args:
            source: Absolute path in the world.
            target: Path of the copy.

        Raises:
            OSError: The source cannot be read or is larger than `limits.disk_bytes`, or the target cannot be written.
            SandboxError: The world is not running, or does not answer.
        """
        reads, writes = os.pipe()
        target = os.path.abspath(target)
        unpacking = self._loop.run_in_executor(None, _unpack, reads, target, self.limits.disk_bytes)
        try:
            await self._with_files({"do": "pack", "path": source, "name": os.path.basename(target)}, writes)
        finally:
            await unpacking

    async def _with_files(self, request: dict[str, Any], *files: int) -> None:
        """Have the world read or write files or pipes, which are closed."""
        try:
            number = await self._begin(request, files, max(FILE_S, self.limits.wall_s))
        finally:
            for file in files:
                os.close(file)
        answer = await self._end(number, max(FILE_S, self.limits.wall_s))
        if answer["ended"] != "exited" or answer["code"] < 0:  # programs can cause both
            why = f"a program or a limit of the world ended this: {answer['ended']}"
            raise OSError(errno.EINTR, why, request["path"])
        if answer["code"] != 0:
            raise OSError(answer["code"], os.strerror(answer["code"]), request["path"])

    # --- snapshots ---

    async def snapshot(self, *, keep_programs: bool = False) -> Image:
        """Return the world's files as they are, for other worlds to begin with.

        Processes are not part of it. The world's own layer becomes read-only and it continues with a new one, which
        ends programs in the background.

        Args:
            keep_programs: Whether programs continue; then the layer is copied, which takes as long as its size demands.

        Raises:
            SandboxError: The world is not running, or a program runs that would be ended; or its mode is `uid`.
        """
        if self._mode == "uid":
            raise SandboxError("a world of mode uid has no snapshots: it has one folder and no layers")
        if keep_programs:
            copy = await in_thread(new_layer)
            target = os.open(copy.path / "u", os.O_RDONLY | os.O_DIRECTORY)
            try:
                await self._with_files({"do": "copy", "path": "its files"}, target)
            except BaseException:
                await in_thread(copy.discard)
                raise
            return replace(self.image, layers=(copy, *self.image.layers))
        async with self._changing:
            following = await in_thread(new_layer)
            if self._own is None or self._control is None:
                raise SandboxError("the world is not running")
            if self._waiting:
                raise SandboxError("a program is running: wait for it, or pass keep_programs=True")
            layers = (self._own, *self.image.layers)
            _names((following, *layers))
            await self._end_processes()
            self.image = replace(self.image, layers=layers)
            self._own = following
            try:
                await self._launch()
            except BaseException:
                await asyncio.shield(self._discard())
                raise
            return self.image

    async def changes(self) -> bytes:
        """Return what differs from the image's files: a compressed archive, in the form of an image's layer.

        Raises:
            OSError: It is larger than `limits.disk_bytes`.
            SandboxError: The world is not running, or does not answer.
        """
        reads, writes = os.pipe()
        packing = self._loop.run_in_executor(None, _read_all, reads, self.limits.disk_bytes)
        try:
            await self._with_files({"do": "pack_layer", "path": "its files"}, writes)
        finally:
            content = await packing
        return await in_thread(gzip.compress, content, 1)

    async def apply(self, changes: bytes) -> None:
        """Make the changes of another world with the same image; see `changes`.

        Raises:
            OSError: They cannot be written.
            SandboxError: The world is not running, or does not answer.
        """
        await self._with_files({"do": "layer", "path": "/", "is_first": False}, _in_memory(changes))

    async def fork(self, count: int = 1, *, keep_programs: bool = False) -> list[World]:
        """Start worlds with the files, limits and settings of this one; processes are not copied.

        Args:
            count: Number of worlds.
            keep_programs: Whether this world's programs continue, as for `snapshot`.

        Raises:
            SandboxError: As for `snapshot` and `start`.
        """
        image = await self.snapshot(keep_programs=keep_programs)
        worlds = [
            World(image, limits=self.limits, network=self.network, env=self.env, visible_paths=self._visible)
            for _ in range(count)
        ]
        try:
            await asyncio.gather(*(world.start() for world in worlds))
        except BaseException:
            await asyncio.gather(*(world.stop() for world in worlds))
            raise
        return worlds


class _Output:
    """What programs write to a pipe: kept up to a limit; after the program ended, as much again is read and forgotten.

    To close the pipe instead would end programs in the background that still write to it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: Stream,
        most: int,
        on_output: Callable[[Stream, bytes], None] | None,
    ) -> None:
        self._loop = loop
        self._stream = stream
        self._most = most
        self._on_output = on_output
        self._is_kept = True
        self._reads, self.writes = os.pipe()
        os.set_blocking(self._reads, False)
        loop.add_reader(self._reads, self._read)
        self.data = bytearray()
        self.is_full = False
        self.when_full: Callable[[], None] | None = None

    def _read(self) -> bool:
        """Read what is there; return whether there may be more."""
        try:
            piece = os.read(self._reads, CHUNK)
        except BlockingIOError:
            return False
        if not piece:
            self.close()
        elif not self._is_kept:
            self._most -= len(piece)
            if self._most < 0:  # who writes so much without a reader waits
                self._loop.remove_reader(self._reads)
        elif not self.is_full:
            kept = piece[: self._most - len(self.data)]
            self.data += kept
            if self._on_output is not None:
                self._on_output(self._stream, kept)
            if len(kept) < len(piece):
                self.is_full = True
                if self.when_full is not None:
                    self.when_full()
        return bool(piece)

    def is_drained(self) -> bool:
        """Read the rest, once the program ended; return whether no other program still has the pipe."""
        while self._reads >= 0 and not self.is_full and self._read():
            pass
        self._is_kept = False
        return self._reads < 0

    def close_writes(self) -> None:
        """Leave the pipe to its programs."""
        os.close(self.writes)

    def close(self) -> None:
        """Stop reading."""
        if self._reads >= 0:
            self._loop.remove_reader(self._reads)
            os.close(self._reads)
            self._reads = -1


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that waits, in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def existing(visible_paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return them as absolute paths.

    Raises:
        ValueError: One does not exist.
    """
    paths = tuple(os.path.abspath(path) for path in visible_paths)
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"visible_paths: {path} does not exist")
    return paths


def _names(layers: Sequence[Layer]) -> list[str]:
    """Return the names of layers, if the kernel mounts so many."""
    names = [layer.name for layer in layers]
    if sum(len(name) + 3 for name in names) > OPTIONS_BYTES:
        raise SandboxError(f"the kernel does not mount {len(names)} layers at once: begin with a shorter history")
    return names


def _first_layer() -> Layer:
    _sweep_once(folder(), os.getpid())
    return new_layer()


@functools.lru_cache(maxsize=8)
def _sweep_once(path: Path, pid: int) -> None:
    sweep()


def _connector() -> str:
    found = shutil.which("slirp4netns")
    if found is None:
        raise SandboxUnavailableError(
            'network="public" needs slirp4netns: install it (apt-get install slirp4netns), or pass network="none"'
        )
    return found


def _settings(network: Network) -> dict[str, str]:
    """Return the files of a world that tell how its network is."""
    names = {"public": "nameserver 10.0.2.3\n", "none": ""}
    with contextlib.suppress(OSError):
        names["host"] = Path("/etc/resolv.conf").read_text()
    return {"/etc/resolv.conf": names.get(network, "")}


def _start(config: dict[str, Any], control: socket.socket) -> None:
    layers = os.open(folder(), os.O_PATH | os.O_DIRECTORY)
    try:
        STARTER.start(config, control, layers)
    finally:
        os.close(layers)


def _read_all(pipe: int, most: int) -> bytes:
    with open(pipe, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"the changes are larger than {most} bytes")
    return content


def _in_memory(content: bytes) -> int:
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writes:
        writes.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file


def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of an archive that belongs to root."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def pack(source: str | os.PathLike[str], change: Change, pipe: int) -> None:
    """Write the file or folder `.` to a pipe as an archive; `change` leaves out members for which it returns None."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "wb") as stream:
        write_archive(source, change, stream)


def write_archive(source: str | os.PathLike[str], change: Change, stream: Any) -> None:
    """Write the file or folder `.` to a stream, as for `pack`."""

    def changed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        kept = change(member)
        if kept is None:
            archive.inodes.clear()  # type: ignore[attr-defined] # so that no later member is a link to this one
        return kept

    with tarfile.open(fileobj=stream, mode="w|") as archive:
        archive.members = deque(maxlen=0)  # type: ignore[attr-defined] # a million of them would fill the memory
        archive.add(os.path.realpath(source), arcname=".", filter=changed)


def _unpack(pipe: int, target: str, most: int) -> None:
    """Read an archive from a pipe to a file or folder of this machine."""
    folder = os.path.dirname(target)
    left = most
    with os.fdopen(pipe, "rb") as stream, contextlib.suppress(tarfile.ReadError):  # empty if there is no source
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extraction_filter = unchanged
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined] # a million of them would fill the memory
                left -= member.size
                if left < 0:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), target)
                path = os.path.join(folder, member.name)
                if _is_harmless(member, folder, target):
                    if os.path.islink(path) or os.path.isfile(path):  # to write through a link would change its target
                        os.unlink(path)
                    member.mode &= 0o777
                    archive.extract(member, folder, set_attrs=not member.issym())
        stream.read(tarfile.RECORDSIZE)  # what follows the end of an archive, which the other side still writes


def _is_harmless(member: tarfile.TarInfo, folder: str, target: str) -> bool:
    """Return whether a member of an archive stays below the target, as does what it links to."""
    path = os.path.join(folder, member.name)
    reached = [os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))]
    if member.issym():
        names = member.linkname.split("/")
        if any(name == ".." and before != ".." for before, name in zip(names, names[1:], strict=False)):
            return False  # where it leads depends on links that may come later
        reached.append(os.path.realpath(os.path.join(os.path.dirname(path), member.linkname)))
    elif member.islnk():
        reached.append(os.path.realpath(os.path.join(folder, member.linkname)))
    top = os.path.join(os.path.realpath(folder), os.path.basename(target))
    return not member.isdev() and all(each == top or each.startswith(f"{top}/") for each in reached)
