"""Worlds as environments of Harbor: `harbor run -e strands_env.harbor:WorldEnvironment`, without Docker."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import NetworkMode
from harbor.models.trial.paths import EnvironmentPaths
from typing_extensions import override

from ..environments.world import exit_status
from ..sandbox import (
    IMAGE_LIMITS,
    WORLD_LIMITS,
    Image,
    Network,
    SandboxError,
    World,
    build_image,
    load_image,
    pull_image,
)
from ..sandbox.images import once

OUTPUT_BYTES = 16 << 20  # of a command


class WorldEnvironment(BaseEnvironment):
    """Runs a task in a [`World`][strands_env.sandbox.World].

    Its image is built from the task's Dockerfile or pulled, once per content. Memory and disk of the task are limits of
    the world. A task that a world cannot run (compose, GPUs, an allowlist of hosts) fails alone when it starts, with
    Harbor's `SandboxBuildFailedError`. An image's entry point is not run.
    """

    def __init__(self, *args: Any, images: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        """Create the environment; Harbor does.

        Args:
            *args: Arguments of Harbor's `BaseEnvironment`.
            images: Folders by the name of an image, for images that are not pulled: OCI layouts, or the files of a
                root. On the command line `--ek 'images={"ubuntu:24.04": "/roots/ubuntu"}'`.
            **kwargs: Arguments of Harbor's `BaseEnvironment`.
        """
        self._folders = dict(images or {})
        self._world: World | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        """Return the name of this kind of environment."""
        return "strands-world"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        """What it can do."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Which resources it limits."""
        return EnvironmentResourceCapabilities(memory_limit=True)

    @override
    def _validate_definition(self) -> None:
        """Accept everything: an error here, in the constructor, would end all other trials of the job."""

    _validate_gpu_support = _validate_tpu_support = _validate_definition
    _validate_network_policy_support = _validate_resource_mode_support = _validate_windows_support = (
        _validate_definition
    )

    def _check(self) -> None:
        """Refuse what a world cannot run.

        Raises:
            RuntimeError: It is a compose task, or the task needs what a world has not.
            ValueError: Its network policy or its resources are not supported.
        """
        if self._uses_compose or (self.environment_dir / "docker-compose.yaml").exists():
            raise RuntimeError("a task with several containers (docker-compose.yaml) is not supported")
        super()._validate_gpu_support()
        super()._validate_tpu_support()
        super()._validate_windows_support()
        super()._validate_resource_mode_support()
        super()._validate_network_policy_support()

    @override
    async def start(self, force_build: bool) -> None:
        """Build or pull the image, and start a world on it.

        Raises:
            SandboxBuildFailedError: A world cannot run the task, or its image cannot be made.
        """
        try:
            self._check()
            image = await self._image()
            image = replace(image, working_dir=self.task_env_config.workdir or image.working_dir)
            limits = replace(WORLD_LIMITS, wall_s=float("inf"), cpu_s=1 << 30, output_bytes=OUTPUT_BYTES)
            if self._effective_memory_mb is not None:
                limits = replace(limits, memory_bytes=self._effective_memory_mb << 20)
            if self._effective_storage_mb is not None:
                limits = replace(limits, disk_bytes=self._effective_storage_mb << 20)
            network: Network = "none" if self._network_policy.network_mode is NetworkMode.NO_NETWORK else "public"
            self._world = await World(image, limits=limits, network=network).start()
        except (SandboxError, RuntimeError, ValueError) as error:
            raise SandboxBuildFailedError(str(error)) from error
        paths = EnvironmentPaths.for_os(self.os)
        folders = [str(path) for path in (paths.agent_dir, paths.verifier_dir, paths.artifacts_dir)]
        await self.ensure_dirs([*folders, *self._mount_targets(writable_only=True)])
        await self._upload_environment_dir_after_start()

    async def _image(self) -> Image:
        name = self.task_env_config.docker_image
        if name is not None and name in self._folders:
            return await once(load_image, self._folders[name])
        if name is not None:
            return await once(pull_image, name)
        images = {each: await once(load_image, folder) for each, folder in self._folders.items()}
        network: Network = "public" if shutil.which("slirp4netns") else "none"
        limits = replace(IMAGE_LIMITS, wall_s=self.task_env_config.build_timeout_sec)
        return await build_image(self.environment_dir, images=images, network=network, limits=limits)

    @property
    def world(self) -> World:
        """The running world.

        Raises:
            RuntimeError: It is not running.
        """
        if self._world is None:
            raise RuntimeError("the environment is not running")
        return self._world

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell command.

        Raises:
            RuntimeError: It ran for longer than `timeout_sec`, as in Harbor's Docker environment. Its whole tree of
                processes has ended.
        """
        resolved = self._resolve_user(user)
        ran = await self.world.execute(
            command,
            user=None if resolved is None else str(resolved),
            working_dir=cwd,
            env=self._merge_env(env),
            timeout_s=timeout_sec,
        )
        if ran.ended == "timeout":
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        code, note = exit_status(ran)
        stdout, stderr = ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace")
        return ExecResult(stdout=stdout, stderr=stderr + note, return_code=code)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file into the world."""
        await self.world.put(source_path, target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy the content of a folder into a folder of the world."""
        await self.world.put(source_dir, target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out of the world."""
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self.world.get(source_path, target_path)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the content of a folder out of the world."""
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        await self.world.get(source_dir, target_dir)

    @override
    async def stop(self, delete: bool) -> None:
        """End the world; its files are gone, whatever `delete` says."""
        world, self._world = self._world, None
        if world is not None:
            await world.stop()
