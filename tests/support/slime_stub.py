"""As much of slime as a `generate` function touches: `Sample`, `GenerateState`, and arguments.

Source: slime's `utils/types.py` and `rollout/sglang_rollout.py`; names and types only.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class Sample:
    """One rollout, as slime hands it to `generate` and reads it afterwards."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    label: str | None = None
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    reward: float | dict[str, Any] | None = None
    status: Status = Status.PENDING
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


def slime_args(base_url: str = "http://127.0.0.1:30000", **overrides: Any) -> SimpleNamespace:
    """The parsed arguments that name a router, and what else the documented functions read."""
    ip, _, port = base_url.removeprefix("http://").rpartition(":")
    arguments = {
        "sglang_router_ip": ip,
        "sglang_router_port": int(port),
        "sglang_server_concurrency": 512,
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 1,
        "hf_checkpoint": "/models/Qwen3-8B",
        "partial_rollout": False,
    }
    return SimpleNamespace(**{**arguments, **overrides})


def slime_sampling_params(**overrides: Any) -> dict[str, Any]:
    """The sampling parameters that slime gives to `generate` in training."""
    parameters = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 256,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    return {**parameters, **overrides}


def install_slime(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, *, aborted: bool = False) -> None:
    """Make `slime.utils.types.Sample` and `slime.rollout.sglang_rollout.GenerateState` importable for one test."""

    class GenerateState:
        def __init__(self, args: Any) -> None:
            self.args = args
            self.tokenizer = tokenizer
            self.aborted = aborted

    modules = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
    }
    for name, names in modules.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)


def check_sample(sample: Sample, tokenizer: Any) -> None:
    """Assert what slime's conversion to training data relies on, for a sample with a response.

    Prompt and response have at least one token each; mask and logprobs are as long as the response; logprobs are finite
    floats, 0.0 where the mask is 0; the response's text is that of its tokens.
    """
    length = sample.response_length
    assert len(sample.tokens) > length >= 1
    assert all(type(token) is int for token in sample.tokens)
    assert sample.loss_mask is not None and sample.rollout_log_probs is not None
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == length
    assert set(sample.loss_mask) <= {0, 1}
    assert all(isinstance(logprob, float) and math.isfinite(logprob) for logprob in sample.rollout_log_probs)
    masked = [logprob for logprob, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not mask]
    assert all(logprob == 0.0 for logprob in masked)
    assert sample.response == tokenizer.decode(sample.tokens[-length:], skip_special_tokens=False)
