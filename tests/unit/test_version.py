import subprocess
import sys
from importlib import metadata

import pytest

import strands_sglang


def test_importing_says_nothing_and_knows_its_version():
    code = "import strands_sglang\nprint(strands_sglang.__version__)"
    importing = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert importing.stderr == ""
    assert importing.stdout.strip() == metadata.version("strands-sglang")


def test_a_checkout_without_metadata_has_no_known_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.delitem(vars(strands_sglang), "__version__", raising=False)
    try:
        assert strands_sglang.__version__ == "0+unknown"
    finally:
        vars(strands_sglang).pop("__version__", None)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        strands_sglang.no_such_name  # noqa: B018
