"""Names of SGLang's compiled CPU kernels, which are not published as a package.

With `SGLANG_USE_CPU_ENGINE=1`, SGLang imports some `*_cpu` functions from here while it loads. It calls them only if
`torch.ops.sgl_kernel` has the compiled operators. Without them, as here, every layer runs in plain torch.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled CPU kernels, which are not installed")

    absent.__name__ = name
    return absent
