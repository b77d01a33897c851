"""A real SGLang server on a machine without a GPU: for the demo, for tests, and for experiments.

Requires the extra `local` (`pip install -e ".[local]"`). The rest of the package never imports this module.

Example:
    python = ensure_sglang()
    with start_server(python, ensure_smollm2(python)) as server:
        print(server.base_url)
"""

from .install import (
    CHATML_TOOLS_TEMPLATE,
    UnsupportedPlatformError,
    ensure_sglang,
    ensure_smollm2,
    ensure_tiny_qwen2_5_vl,
    ensure_tiny_qwen3,
    ensure_tiny_qwen3_moe,
    home,
    require_platform,
)
from .process import LocalServerError
from .server import LocalServer, ServerSettings, launch_server, start_server

__all__ = [
    "CHATML_TOOLS_TEMPLATE",
    "LocalServer",
    "LocalServerError",
    "ServerSettings",
    "UnsupportedPlatformError",
    "ensure_sglang",
    "ensure_smollm2",
    "ensure_tiny_qwen2_5_vl",
    "ensure_tiny_qwen3",
    "ensure_tiny_qwen3_moe",
    "home",
    "launch_server",
    "require_platform",
    "start_server",
]
