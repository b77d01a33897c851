"""Which tests need a machine that allows worlds, and the folder of a test's worlds."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from strands_env.sandbox import available_modes

from .processes import running

WHY_NOT = available_modes()["namespaces"]
needs_worlds = pytest.mark.skipif(WHY_NOT is not None, reason=f"no worlds here: {WHY_NOT}")


def worlds_folder(monkeypatch):
    """Provide the folder of a test's worlds; at the end, check that no files and no processes are left."""
    path = tempfile.mkdtemp(prefix="test-world-")
    os.chmod(path, 0o755)
    monkeypatch.setenv("STRANDS_ENV_WORLDS", f"{path}/worlds")
    yield Path(path)
    deadline = time.monotonic() + 60
    while left := running(os.getpid()):
        assert time.monotonic() < deadline, left
    layers = Path(path, "worlds")
    if layers.exists():
        while left := [name for name in os.listdir(layers) if name != "lock" and not name.startswith("i-")]:
            assert time.monotonic() < deadline, left
    shutil.rmtree(path)
