"""`python -m strands_sglang.local`: make everything that a local server needs, so that later starts only start.

Exit code 0 when all of it is there, 1 when a step failed, 3 when this machine cannot run SGLang on its CPU.
"""

from __future__ import annotations

import sys

from . import (
    LocalServerError,
    UnsupportedPlatformError,
    ensure_sglang,
    ensure_smollm2,
    ensure_tiny_qwen2_5_vl,
    ensure_tiny_qwen3,
    ensure_tiny_qwen3_moe,
)


def main() -> int:
    """Install SGLang and make the models; return the exit code."""
    try:
        python = ensure_sglang()
        for ensure_model in (ensure_tiny_qwen3, ensure_tiny_qwen3_moe, ensure_tiny_qwen2_5_vl, ensure_smollm2):
            ensure_model(python)
    except LocalServerError as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, UnsupportedPlatformError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
