"""Images of worlds: built from Dockerfiles, read from OCI layouts, pulled from registries; without a daemon.

Layers are kept by content in the folder of worlds, so that the next world on the same image starts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from .dockerfile import ARCHITECTURE, IGNORED, Instruction, ignores, json_list, pairs, read_dockerfile, words
from .inside.file_system import PATH
from .layers import Layer, folder, image_layer, keep, new_layer
from .world import (
    WORLD_LIMITS,
    Change,
    Image,
    ImageError,
    Network,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
    World,
    in_thread,
    of_root,
    pack,
    write_archive,
)

logger = logging.getLogger(__name__)

IMAGE_LIMITS = replace(WORLD_LIMITS, wall_s=3_600.0, disk_bytes=32 << 30, output_bytes=128 << 20)
"""Limits of making an image, unless you pass others: an hour and 128 MB of output for a `RUN`, 32 GB for a layer."""

SHOWN_BYTES = 2_000  # of a failed program's output
WAIT_S = 0.05
_KNOWN: dict[str, Image] = {}
_FAILED: dict[str, ImageError] = {}


class Source(Protocol):
    """Where the parts of an image are: a layout or a registry."""

    async def content(self, descriptor: Mapping[str, Any]) -> bytes:
        """Return a manifest or a configuration, which has the descriptor's digest."""

    async def file(self, descriptor: Mapping[str, Any]) -> Path:
        """Return a file with a layer's archive, which has the descriptor's digest."""


# --- images that exist ---


async def load_image(
    path: str | os.PathLike[str], *, reference: str | None = None, limits: SandboxLimits = IMAGE_LIMITS
) -> Image:
    """Return an image of an OCI layout (`skopeo copy ... oci:FOLDER`), or one with the files of a folder.

    Args:
        path: Folder with an OCI layout, or with the files of a root (`debootstrap`), which are copied.
        reference: Name of the image in a layout that has several.
        limits: Limits; a layer takes at most `disk_bytes`.

    Raises:
        ImageError: It is not there, damaged, of another architecture or not supported.
    """
    path = Path(path)
    if not path.is_dir():
        raise ImageError(f"{path} is not a folder")
    async with _says_what_failed(str(path)):
        if not (path / "oci-layout").exists():
            packs = functools.partial(in_thread, pack, path, _unchanged)
            content = [await in_thread(_digest, path, _unchanged)]
            return await _with_layer(Image(), content, lambda world: world._unpack("/", "", "", packs), limits=limits)
        found = json.loads((path / "index.json").read_bytes())["manifests"]
        names = [each.get("annotations", {}).get("org.opencontainers.image.ref.name") for each in found]
        if reference is not None:
            found = [each for each, name in zip(found, names, strict=True) if name == reference]
        if not found or (len(found) > 1 and reference is None and len(set(names)) > 1):
            raise ImageError(f"{path} has no image {reference or 'without a name'}; it has {names}")
        return await _unpacked(_Layout(path), {"manifests": found}, limits)


async def pull_image(
    reference: str, *, credentials: tuple[str, str] | None = None, limits: SandboxLimits = IMAGE_LIMITS
) -> Image:
    """Pull an image from a registry; only layers that are not there yet are downloaded.

    Each call asks the registry what the name means now, so pull once and give the image to all worlds.

    Args:
        reference: The image, as for `docker pull`. Registries on `localhost` and `127.0.0.1` are asked without TLS.
        credentials: User and password, if the registry wants them.
        limits: Limits; a layer takes at most `disk_bytes`.

    Raises:
        ImageError: There is no such image for this machine, or the registry does not answer.
    """
    from .registry import Reference, Registry  # an HTTP client, which worlds do not need

    async with _says_what_failed(reference):
        where = Reference.read(reference)
        downloads = await in_thread(new_layer)
        registry = Registry(where, credentials, downloads.path)
        try:
            return await _unpacked(registry, json.loads(await registry.manifest()), limits)
        finally:
            await registry.close()
            await in_thread(downloads.discard)


async def once(
    get: Callable[..., Awaitable[Image]], name: str | os.PathLike[str], limits: SandboxLimits = IMAGE_LIMITS
) -> Image:
    """Return an image that this process has pulled or loaded, or do so: it is too much for each episode.

    Registries limit how often they are asked, and the digest of a root needs all its files.

    Raises:
        ImageError: It cannot be had, or could not while this call waited: to try again for each would take too long.
    """
    key = f"{get.__name__} {os.fspath(name)}"  # a folder may be called as an image in a registry
    earlier = _FAILED.get(key)
    async with _alone(image_layer(key)):
        failure = _FAILED.get(key)
        if failure is not None and failure is not earlier:
            raise ImageError(str(failure)) from failure
        image = _KNOWN.get(key)
        if image is None or not all((folder() / layer.name).exists() for layer in image.layers):
            try:
                image = _KNOWN[key] = await get(name, limits=limits)
            except ImageError as error:
                _FAILED[key] = error
                raise
        return image


class _Layout:
    """An OCI layout (https://github.com/opencontainers/image-spec/blob/main/image-layout.md)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def content(self, descriptor: Mapping[str, Any]) -> bytes:
        return (await self.file(descriptor)).read_bytes()

    async def file(self, descriptor: Mapping[str, Any]) -> Path:
        kind, _, digest = descriptor["digest"].partition(":")
        path = self._path / "blobs" / kind / digest
        is_fine = kind == "sha256" and re.fullmatch("[0-9a-f]{64}", digest) and path.is_file()
        if not is_fine or await in_thread(_sha256, path) != digest:
            raise ImageError(f"{path} is not what its name says: the layout is damaged")
        return path


async def _unpacked(source: Source, manifest: Mapping[str, Any], limits: SandboxLimits) -> Image:
    """Return the image that a manifest, or an index of manifests, describes.

    Raises:
        ImageError: It is not for this machine, or not supported.
    """
    while "manifests" in manifest:
        found = [each for each in manifest["manifests"] if _fits(each.get("platform", {}))]
        if not found:
            raise ImageError(f"the image is not for linux/{ARCHITECTURE}")
        manifest = json.loads(await source.content(found[0]))
    described = json.loads(await source.content(manifest["config"]))
    if not _fits(described):
        raise ImageError(f"the image is for {described['architecture']}, and this machine is {ARCHITECTURE}")
    for each in manifest["layers"]:
        if not each["mediaType"].endswith(("tar", "tar+gzip", "tar.gzip")):
            raise ImageError(f"layers of {each['mediaType']} are not supported")
        if each["size"] > limits.disk_bytes:
            raise ImageError(f"a layer has {each['size']} bytes, which is more than the limit on disk")
    settings = described.get("config", {})
    image = Image(
        env=dict(text.partition("=")[::2] for text in settings.get("Env") or ()),
        working_dir=settings.get("WorkingDir") or "/",
        user=settings.get("User") or "root",
    )
    for each in manifest["layers"]:

        async def make(world: World, each: Mapping[str, Any] = each) -> None:
            await world._unpack_layer(os.open(await source.file(each), os.O_RDONLY))

        image = await _with_layer(image, [each["digest"]], make, limits=limits)
    return image


async def _with_layer(
    image: Image, content: Sequence[object], make: Callable[[World], Awaitable[None]], **settings: Any
) -> Image:
    """Return an image with another layer, which `make` makes in a world if it is not there yet."""
    layer = image_layer([each.name for each in image.layers], *content)
    async with _alone(layer):
        if not layer.path.exists():
            async with World(image, **settings) as world:
                await make(world)
                made = await world.snapshot()
            await in_thread(keep, made.layers[0], layer)
    return replace(image, layers=(layer, *image.layers))


def _fits(platform: Mapping[str, Any]) -> bool:
    return platform.get("os", "linux") == "linux" and platform.get("architecture", ARCHITECTURE) == ARCHITECTURE


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --- Dockerfiles ---


async def build_image(
    context: str | os.PathLike[str],
    *,
    dockerfile: str | os.PathLike[str] | None = None,
    args: Mapping[str, str] | None = None,
    images: Mapping[str, Image] | None = None,
    network: Network = "public",
    limits: SandboxLimits = IMAGE_LIMITS,
    on_output: Callable[[str, bytes], None] | None = None,
) -> Image:
    """Build an image from a Dockerfile; each instruction that changes files makes a layer, once.

    FROM, RUN (also with here-documents), COPY, ADD of files, ENV, ARG, WORKDIR, USER and SHELL do what they do in
    Docker. Instructions about a container's main process or ports have no effect here. Everything else is refused
    before anything runs.

    Args:
        context: Folder whose files COPY may copy.
        dockerfile: The Dockerfile; None for `Dockerfile` in the context.
        args: Values for its ARGs.
        images: Images by the name that FROM has; others are pulled.
        network: Network of RUN.
        limits: Limits of each RUN.
        on_output: Called with each piece of output, as for `World.execute`.

    Raises:
        ImageError: The Dockerfile has what is not supported, an instruction failed, or a base cannot be pulled.
        SandboxUnavailableError: The machine does not allow worlds with this network.
    """
    context = Path(context)
    is_inside = dockerfile is None
    dockerfile = Path(dockerfile or context / "Dockerfile")
    async with _says_what_failed(str(dockerfile)):
        for path in (*([dockerfile] if is_inside else []), context / ".dockerignore"):
            if not path.resolve().is_relative_to(context.resolve()):
                raise ImageError(f"{path} leads out of the context")
        text = dockerfile.read_text("utf-8-sig")
        build = _Build(text, context, args or {}, dict(images or {}), network, limits, on_output)
        return await build.stage(len(build.stages) - 1)


class _Build:
    """A build: its stages are built when they are needed, once."""

    def __init__(
        self,
        text: str,
        context: Path,
        args: Mapping[str, str],
        images: dict[str, Image],
        network: Network,
        limits: SandboxLimits,
        on_output: Callable[[str, bytes], None] | None,
    ) -> None:
        first, self.stages = read_dockerfile(text)
        self.context = context
        self.network = network
        self.limits = limits
        self.on_output = on_output
        ignored = context / ".dockerignore"
        self.is_ignored = ignores(ignored.read_text() if ignored.exists() else "")
        self._args = args
        self._images = images
        platform = f"linux/{ARCHITECTURE}"
        self._arguments = {"TARGETARCH": ARCHITECTURE, "TARGETOS": "linux"}
        self._arguments |= {"TARGETPLATFORM": platform, "BUILDPLATFORM": platform}
        for each in first:
            self._arguments |= self.arguments(each, self._arguments)

    def arguments(self, each: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the values of an ARG: given, its default, or as before the first stage."""
        names = [word.partition("=")[0] for word in words(each.text, variables)]
        known = {**self._arguments, **pairs(each, variables), **self._args}
        return {name: known[name] for name in names if name in known}

    async def stage(self, number: int) -> Image:
        """Return the image of a stage."""
        each = self.stages[number].begin
        base, *name = each.values(self._arguments)
        key = f"stage {number}"
        if key not in self._images:
            stage = _Stage(self, number, await self.image(base, number))
            for instruction in self.stages[number].instructions:
                if instruction.name not in IGNORED:
                    await getattr(stage, instruction.name.lower())(instruction)
            self._images[key] = stage.image
        return self._images[key]

    async def image(self, name: str, before: int) -> Image:
        """Return the image of an earlier stage, by name or number, or another one."""
        for number in reversed(range(before)):
            _, *words = self.stages[number].begin.values(self._arguments)
            if name == str(number) or [word.lower() for word in words[:2]] == ["as", name.lower()]:
                return await self.stage(number)
        if name == "scratch":
            return Image()
        if name not in self._images:
            self._images[name] = await once(pull_image, name, self.limits)
        return self._images[name]


class _Stage:
    """The image of a stage as its instructions change it; the methods are the instructions."""

    def __init__(self, build: _Build, number: int, image: Image) -> None:
        self.image = replace(image, env={"PATH": PATH, **image.env})
        self._build = build
        self._number = number
        self._arguments: dict[str, str] = {}
        self._shell = ["/bin/sh", "-c"]

    @property
    def _variables(self) -> dict[str, str]:
        return {**self._arguments, **self.image.env}

    async def arg(self, each: Instruction) -> None:
        self._arguments |= self._build.arguments(each, self._variables)

    async def env(self, each: Instruction) -> None:
        self.image = replace(self.image, env={**self.image.env, **pairs(each, self._variables)})

    async def workdir(self, each: Instruction) -> None:
        path = os.path.normpath(os.path.join(self.image.working_dir, *each.values(self._variables)))

        async def make(world: World) -> None:  # to have it only as working directory would make it root's
            await world._unpack(path, self.image.user, "", _pack_empty_folder)

        await self._layer(each, [path], make)
        self.image = replace(self.image, working_dir=path)

    async def user(self, each: Instruction) -> None:
        self.image = replace(self.image, user=each.values(self._variables)[0])

    async def shell(self, each: Instruction) -> None:
        shell = json_list(each.text)
        if not shell:
            raise each.error("it is not a list in JSON")
        self._shell = shell

    async def run(self, each: Instruction) -> None:
        command = json_list(each.text) or [*self._shell, each.text]
        arguments = {name: value for name, value in self._arguments.items() if name not in self.image.env}

        async def make(world: World) -> None:
            ran = await world.execute(command, env=arguments, is_merged=True, on_output=self._build.on_output)
            if ran.exit_code != 0:
                why = f"exit code {ran.exit_code}" if ran.ended == "exited" else f"it exceeded the limit on {ran.ended}"
                raise each.error(f"{why}\n{ran.output[-SHOWN_BYTES:]}")

        await self._layer(each, [command, arguments, self._build.network], make, self._build.network)

    async def add(self, each: Instruction) -> None:
        for path in self._in_context(each, each.values(self._variables)[:-1]):
            if path.is_file() and tarfile.is_tarfile(path):
                raise each.error("archives are not supported: COPY it, and unpack it with RUN")
        await self.copy(each)

    async def copy(self, each: Instruction) -> None:
        *sources, target = each.values(self._variables)
        is_folder = len(sources) > 1 or os.path.basename(target) in ("", ".", "..")
        target = os.path.normpath(os.path.join(self.image.working_dir, target))
        target = f"{target.rstrip('/')}/" if is_folder else target
        owner = each.flag("chown", self._variables)
        origin = each.flag("from", self._variables)
        if origin:
            await self._copy_from(each, await self._build.image(origin, self._number), sources, target, owner)
            return
        changes = {path: self._change(each, path) for path in self._in_context(each, sources)}

        async def make(world: World) -> None:
            for path, change in changes.items():
                packs = functools.partial(in_thread, pack, path.resolve(), change)
                await world._unpack(target, owner or "root", path.name, packs)
            if await digests() != before:
                raise each.error("a file changed while it was copied")

        async def digests() -> list[list[str]]:
            return [[path.name, await in_thread(_digest, path.resolve(), change)] for path, change in changes.items()]

        before = await digests()
        await self._layer(each, [before, target, owner], make)

    async def _copy_from(self, each: Instruction, image: Image, sources: list[str], target: str, owner: str) -> None:
        async def make(world: World) -> None:
            async with World(replace(image, user="root"), limits=world.limits) as origin:
                for source in sources:
                    await world._copy_from(origin, os.path.join("/", source), target, owner)

        await self._layer(each, [[layer.name for layer in image.layers], sources, target, owner], make)

    async def _layer(
        self,
        each: Instruction,
        content: Any,
        make: Callable[[World], Awaitable[None]],
        network: Network = "none",
    ) -> None:
        """Put the layer on top that `make` makes in a world, or that was kept."""

        async def make_or_say(world: World) -> None:
            logger.info("line %d: %s %s", each.line, each.name, each.text)
            try:
                await make(world)
            except OSError as error:
                raise each.error(str(error)) from error

        image = self.image
        settings = [each.name, dict(image.env), image.working_dir, image.user, content]
        self.image = await _with_layer(image, settings, make_or_say, limits=self._build.limits, network=network)

    def _in_context(self, each: Instruction, patterns: list[str]) -> list[Path]:
        """Return files and folders of the context."""
        context = self._build.context.resolve()
        found: list[Path] = []
        for pattern in patterns:
            name = os.path.normpath(pattern).lstrip("/") or "."
            is_pattern = bool(set(name) & set("*?["))
            paths = sorted(context.glob(name)) if is_pattern else [context / name]
            kept = [path for path in paths if not self._build.is_ignored(os.path.relpath(path, context), path.is_dir())]
            if not (kept or is_pattern) or not all(path.exists() for path in kept):
                raise each.error(f"the context has no {pattern}")
            if not all(path.resolve().is_relative_to(context) for path in kept):
                raise each.error(f"{pattern} is outside of the context")
            found += kept
        return found

    def _change(self, each: Instruction, path: Path) -> Change:
        """Return the change to members of an archive of a file or folder of the context."""
        inner = os.path.relpath(path, self._build.context.resolve())

        def change(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            if self._build.is_ignored(os.path.normpath(os.path.join(inner, member.name)), member.isdir()):
                return None
            if "chmod" in each.flags:
                member.mode = int(each.flags["chmod"], 8)
            return of_root(member)

        return change


def _unchanged(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member


async def _pack_empty_folder(pipe: int) -> None:
    member = tarfile.TarInfo(".")
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    with os.fdopen(pipe, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        archive.addfile(member)


def _digest(path: Path, change: Change) -> str:
    """Return a digest of what `pack` packs, but for times."""
    digest = hashlib.sha256()

    def without_time(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.mtime = 0
        return change(member)

    write_archive(path, without_time, SimpleNamespace(write=digest.update))
    return digest.hexdigest()


@contextlib.asynccontextmanager
async def _alone(layer: Layer) -> AsyncIterator[None]:
    """Wait until no other task or process makes this layer."""
    lock = os.open(f"{layer.path}.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(WAIT_S)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a fork of this process may have it, too
        os.close(lock)


@contextlib.asynccontextmanager
async def _says_what_failed(what: str) -> AsyncIterator[None]:
    try:
        yield
    except SandboxUnavailableError:
        raise
    except SandboxError as error:
        raise ImageError(f"{what}: {error}") from error.__cause__
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(f"{what}: {type(error).__name__}: {error}") from error
