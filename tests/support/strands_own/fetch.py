"""Fetch the source distribution of Strands, which holds its tests, once per machine.

Nothing of it is part of the repository: the version and its checksum are pinned here, pip downloads it from wherever it
is configured to, and the whole goes to `strands-tests/<checksum>` in the project's cache.
"""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from strands_sglang.local.cache import build_once, home, say
from support.families.fetch import FetchError, Source, from_registry

STRANDS = Source(
    name="strands-agents",
    registry="pypi",
    requirement="strands-agents==1.62.0",
    sha256="8732c87f9c1ceb6ef4c5c4bd6d96b4cdf1bbfde095f1537ec2ac6fddb8d5a066",
    build_backend="hatchling.build",
)
_FOLDERS = ("src", "tests", "tests_integ", "pyproject.toml")


def fetch() -> Path:
    """Return the folder with Strands' `src`, `tests` and `tests_integ`, fetching them first if need be.

    Raises:
        FetchError: They could not be downloaded, or are not what is pinned.
    """
    return build_once(home() / "strands-tests" / STRANDS.sha256[:12], _build)


def _build(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = from_registry(STRANDS, Path(folder), say)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != STRANDS.sha256:
            raise FetchError(f"{STRANDS.requirement} has the SHA-256 {found}, and not the pinned {STRANDS.sha256}")
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                content = tar.extractfile(member) if member.isfile() else None
                if content is None or ".." in path.parts or path.parts[:1] not in {(name,) for name in _FOLDERS}:
                    continue
                target = directory / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
