"""As much of slime as a `generate` function touches: `Sample`, `GenerateState`, and arguments.

Source: slime's `utils/types.py` and `rollout/sglang_rollout.py`; names and types only.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class Sample:
    """One rollout, as slime hands it to `generate` and reads it afterwards."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    label: str | None = None
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    teacher_log_probs: list[float] | None = None
    reward: float | dict[str, Any] | None = None
    status: Status = Status.PENDING
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "status": self.status.value,
            "spec_info": asdict(self.spec_info),
            "prefix_cache_info": asdict(self.prefix_cache_info),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        known = {
            **data,
            "status": Sample.Status(data["status"]),
            "spec_info": SpecInfo(**data["spec_info"]),
            "prefix_cache_info": PrefixCacheInfo(**data["prefix_cache_info"]),
        }
        names = {one.name for one in fields(Sample)}
        sample = Sample(**{name: value for name, value in known.items() if name in names})
        for name, value in known.items():
            if name not in names:
                setattr(sample, name, value)
        return sample


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


def install_slime(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, *, aborted: bool = False) -> type:
    """Make `slime.utils.types.Sample` and `slime.rollout.sglang_rollout.GenerateState` importable for one test.

    `aborted` of the class that is returned is the flag of every state, as slime's state is a singleton.
    """

    class GenerateState:
        def __init__(self, args: Any) -> None:
            self.args = args
            self.tokenizer = tokenizer

    GenerateState.aborted = aborted  # type: ignore[attr-defined]

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
    return GenerateState
