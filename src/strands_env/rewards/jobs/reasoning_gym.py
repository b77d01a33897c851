"""Tasks and verifiers of reasoning-gym, in a worker.

The worker's hash seed is fixed: five families iterate over sets of strings, so their tasks depend on it. And a verifier
may evaluate the answer, which can hang or crash the process.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import reasoning_gym


def handle(request: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    """Make a task, or score an answer to it.

    Args:
        request: `dataset` (arguments of the package's `create_dataset`) and `index`. To score an answer also `answer`,
            and the text that has the `question`.
        stage: Unused.
    """
    dataset = _dataset(json.dumps(request["dataset"]))
    entry = dataset[request["index"]]
    if "answer" not in request:
        return {"question": entry["question"], "truth": entry["answer"]}
    if entry["question"] not in request["question"]:
        raise ValueError("the installed version of reasoning-gym makes another task")
    return {"score": float(dataset.score_answer(request["answer"], entry))}


@functools.lru_cache(maxsize=8)
def _dataset(arguments: str) -> Any:
    return reasoning_gym.create_dataset(**json.loads(arguments))
