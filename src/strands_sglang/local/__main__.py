"""`python -m strands_sglang.local`: install everything that a local server needs in advance.

Exit code 0 on success, 1 if a step failed, 3 if this machine cannot run SGLang on its CPU.
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
