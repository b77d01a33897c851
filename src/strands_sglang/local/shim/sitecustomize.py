"""Four adjustments that let the published `sglang` wheel run with a CPU build of torch.

Python imports a module of this name at startup, so this directory only has to be on `PYTHONPATH`, which the server's
child processes inherit. Nothing is imported here before the module that needs an adjustment.

- torchvision's wheel is built for CUDA. With a CPU torch its compiled part does not load, and its Python part then
  fails to describe two operators that were never declared. They are declared first; nothing ever calls them.
- The host buffers for the routing of a mixture-of-experts model (`--enable-return-routed-experts`) are allocated
  through the CUDA runtime even with `--device cpu`. The allocator for "cpu" is replaced by a plain one.
- The module of Qwen3.5's models refers to compiled CPU operators while it loads. Without them, no Qwen model accepts
  images. The operators are declared first; the models that are served here never call them.
- The server's other processes would import all of SGLang again, which is two thirds of what a start costs. They are
  forked: no other thread runs at that time, and without a GPU nothing is lost by it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

LIBRARIES: list[object] = []  # operator declarations live as long as their library object


def declare(namespace: str, operators: Sequence[str]) -> None:
    """Declare operators that are never called, by their signatures."""
    import torch

    library = torch.library.Library(namespace, "FRAGMENT")
    for operator in operators:
        library.define(operator)
    LIBRARIES.append(library)


def declare_torchvision_operators() -> None:
    """Declare the operators that torchvision's Python part describes, if its compiled part does not load."""
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


def fork_processes(engine: ModuleType) -> None:
    """Let SGLang fork its processes: it sets the start method for all of Python."""
    choose = engine.mp.set_start_method
    engine.mp.set_start_method = lambda method, force=False: choose("fork", force=force)


BEFORE_IMPORT: dict[str, Callable[[], None]] = {
    "torchvision": declare_torchvision_operators,
    "sglang.srt.models.qwen3_5": declare_qwen_operators,
}
AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": use_plain_host_memory,
    "sglang.srt.entrypoints.engine": fork_processes,
}


class Adjuster(importlib.abc.MetaPathFinder):
    """Import hook that adjusts each module of the two tables above once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return None, except for modules to adjust after their import."""
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
