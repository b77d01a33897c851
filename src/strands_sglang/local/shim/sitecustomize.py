"""Three adjustments that let the published `sglang` wheel run beside a CPU build of torch.

Python imports a module of this name at start-up when it finds one, so this directory on
`PYTHONPATH` is all it takes, also in the processes that the server spawns. Nothing is imported here
until the module that needs the adjustment is.

- torchvision's wheel is built for CUDA. Its compiled part does not load beside a CPU torch, and its Python part then
  fails to describe two operators that were never declared. They are declared first; nothing ever calls them.
- The host buffers in which a mixture-of-experts model collects its routing
  (`--enable-return-routed-experts`) are allocated through the CUDA runtime even with `--device cpu`.
  The allocator for "cpu" is replaced by a plain one.
- The module of Qwen3.5's models names compiled CPU operators while it loads, and with it goes all that takes images
  for any of Qwen's models. The operators are declared first; nothing of the models that are served here calls them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

KEPT_ALIVE: list[object] = []  # operator declarations last as long as the library object that made them


def declare(namespace: str, operators: Sequence[str]) -> None:
    """Declare operators that nothing calls, by their signatures."""
    import torch

    library = torch.library.Library(namespace, "FRAGMENT")
    for operator in operators:
        library.define(operator)
    KEPT_ALIVE.append(library)


def declare_torchvision_operators() -> None:
    """Declare what torchvision's Python part describes, if its compiled part cannot do so."""
    import torch

    if torch.version.cuda is None:
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        declare("torchvision", [f"nms{boxes}", f"qnms{boxes}"])


def declare_qwen_operators() -> None:
    """Declare the compiled operators that Qwen3.5's models look up when they are imported."""
    operators = (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    )
    declare("sgl_kernel", [f"{operator}(Tensor x) -> Tensor" for operator in operators])


def use_plain_host_memory(pools: ModuleType) -> None:
    """Replace the allocator for "cpu" in SGLang's table of host memory allocators."""
    import torch

    def allocate(shape: Sequence[int], dtype: torch.dtype, device: str, **unused: object) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    pools.ALLOC_MEMORY_FUNCS["cpu"] = allocate


BEFORE_IMPORT: dict[str, Callable[[], None]] = {
    "torchvision": declare_torchvision_operators,
    "sglang.srt.models.qwen3_5": declare_qwen_operators,
}
AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {"sglang.srt.mem_cache.pool_host.common": use_plain_host_memory}


class Adjuster(importlib.abc.MetaPathFinder):
    """Sees every import first and acts once on each module of the two tables above."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return None for every module but those to be adjusted after their import."""
        if before := BEFORE_IMPORT.pop(fullname, None):
            before()
        after = AFTER_IMPORT.pop(fullname, None)
        if after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_adjust(module: ModuleType) -> None:
            execute(module)
            after(module)

        spec.loader.exec_module = execute_and_adjust  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Adjuster())
