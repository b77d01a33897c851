"""Fetch and run Strands' own tests: `python tests/support/strands_own [arguments of pytest]`.

They are not part of the repository. The version and the checksum of their source distribution are pinned here; pip
downloads it from its configured index to `strands-tests/<checksum>` in the project's cache.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# The package can also be run by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from strands_sglang.local.install import build_once, home
from strands_sglang.local.process import LocalServerError
from support.families.fetch import Source, from_registry, verified_archive

STRANDS = Source(
    name="strands-agents",
    registry="pypi",
    requirement="strands-agents==1.62.0",
    sha256="8732c87f9c1ceb6ef4c5c4bd6d96b4cdf1bbfde095f1537ec2ac6fddb8d5a066",
    build_backend="hatchling.build",
)


def unpack(directory):
    """Extract Strands' `src`, `tests` and `tests_integ` to a folder."""
    with (
        tempfile.TemporaryDirectory() as downloads,
        tarfile.open(verified_archive(STRANDS, Path(downloads), from_registry)) as archive,
    ):
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.name.startswith(("src/", "tests/", "tests_integ/", "pyproject.toml")):
                archive.extract(member, directory, filter="data")


def main(arguments):
    """Run pytest and return its exit status."""
    folder = build_once(home() / "strands-tests" / STRANDS.sha256[:12], unpack)
    # The pinned version of Strands, not the installed one.
    paths = [folder / "src", Path(__file__).resolve().parents[2], *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-p", "support.strands_own.plugin", "-p", "no:cacheprovider"]
    # Native tracebacks: pytest's own compare local variables, which fails for some mocks.
    command += ["--override-ini=addopts=", "--tb=native", "-q", "-rf", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:] or ["-n", "2", "tests"]))
    except LocalServerError as failure:
        sys.exit(f"error: {failure}")
