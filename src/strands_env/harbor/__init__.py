"""Harbor's tasks as environments, worlds that Harbor runs tasks in, and agents with exact tokens for Harbor.

It needs Python 3.12 and the extra `harbor`. Set `HARBOR_TELEMETRY=0` if `harbor run` should report nothing.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.24", "0.25")  # the interfaces change between minor versions

if sys.version_info < (3, 12):
    raise ImportError(f"strands_env.harbor needs Python 3.12, as Harbor does; this is {sys.version.split()[0]}")
try:
    _found = version("harbor")
except PackageNotFoundError:
    raise ImportError("harbor is not installed: pip install -e '.[harbor]'") from None
if not _found.startswith(tuple(f"{each}." for each in SUPPORTED)):
    raise ImportError(f"harbor {_found} is not supported, only {' and '.join(SUPPORTED)}: pip install -e '.[harbor]'")

from .agent import HarborSandbox, StrandsAgent, rollout_details  # noqa: E402
from .environment import HarborEnvironment, HarborReward, harbor_tasks  # noqa: E402
from .world import WorldEnvironment  # noqa: E402

__all__ = [
    "HarborEnvironment",
    "HarborReward",
    "HarborSandbox",
    "StrandsAgent",
    "WorldEnvironment",
    "harbor_tasks",
    "rollout_details",
]
