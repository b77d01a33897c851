"""Response bodies of SGLang 0.5.23, key for key.

Source: bodies of a real server. The exceptions are `/server_info`, which has over 500 keys, nearly all of them launch
arguments, `/model_info` and `/v1/loads`; these have the keys about the model, its limits and its requests.
"""

from __future__ import annotations

import math
import time
from array import array
from datetime import datetime, timezone
from typing import Any

from .sampling import Sampled
from .validation import INPUT_RESERVE, CheckedRequest

SGLANG_VERSION = "0.5.23"
TOKEN_CAPACITY = 1 << 20
"""Tokens that the key-value cache reports room for."""
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
FLUSH_FAILED = "Flush cache failed.\n"


def generation(
    request: CheckedRequest,
    sampled: Sampled,
    *,
    rid: str,
    cached_tokens: int,
    weight_version: str,
    latency_s: float,
    routed_experts: str | None,
) -> dict[str, Any]:
    """Return the body of a `/generate` response."""
    length = len(sampled.output_ids)
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": sampled.finish_reason,
        "prompt_tokens": len(request.input_ids),
        "weight_version": weight_version,
        "num_retractions": 0,
    }
    if request.asks_for("return_logprob"):
        logprobs = zip(sampled.logprobs, sampled.output_ids, strict=True)
        meta |= {
            "input_token_logprobs": sampled.prompt_logprobs,
            "output_token_logprobs": [[logprob, token_id, None] for logprob, token_id in logprobs],
            "output_token_logprobs_length": length,
        }
    if (masks := sampled.sampling_masks) is not None:
        # All ids are equally likely.
        selected = [array("f", [-math.log(len(mask))])[0] for mask in masks]
        support = [[logprob] * len(mask) for logprob, mask in zip(selected, masks, strict=True)]
        meta |= {
            "output_token_sampling_mask": masks,
            "output_token_sampling_logprobs": (
                support if request.body.get("sampling_logprobs_mode") == "support" else selected
            ),
            "output_token_sampling_mask_length": length,
        }
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": length,
        "cached_tokens": cached_tokens,
        "weight_versions": [{"version": weight_version, "start": 0, "end": length}],
        "cached_tokens_details": {"device": cached_tokens, "host": 0} if cached_tokens else None,
        "dp_rank": None,
        "e2e_latency": latency_s,
        "response_sent_to_client_ts": time.time(),
    }
    if routed_experts is not None:
        meta["routed_experts"] = routed_experts
    body: dict[str, Any] = {"text": sampled.text, "output_ids": sampled.output_ids, "meta_info": meta}
    if request.asks_for("return_prompt_token_ids"):
        body["prompt_token_ids"] = request.input_ids
    return body


def aborted_in_queue(request: CheckedRequest, rid: str, weight_version: str, latency_s: float) -> dict[str, Any]:
    """Return the body of a `/generate` response to a request that was aborted before it ran."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": weight_version,
        "e2e_latency": latency_s,
        "weight_versions": [{"version": weight_version, "start": 0, "end": 0}],
        "completion_tokens": 0,
        "response_sent_to_client_ts": time.time(),
    }
    if request.asks_for("return_logprob"):
        meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
    body: dict[str, Any] = {"text": "", "output_ids": [], "meta_info": meta}
    if request.asks_for("return_prompt_token_ids"):
        body["prompt_token_ids"] = request.input_ids
    return body


def model_info(model_path: str, weight_version: str) -> dict[str, Any]:
    """Return the body of `/model_info`, a part of the real one."""
    return {
        "model_path": model_path,
        "served_model_name": model_path,
        "tokenizer_path": model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "scripted",
        "architectures": ["ScriptedForCausalLM"],
    }


def server_info(model_path: str, weight_version: str, context_length: int) -> dict[str, Any]:
    """Return the body of `/server_info`, a part of the real one."""
    return {
        "model_path": model_path,
        "tokenizer_path": model_path,
        "served_model_name": model_path,
        "context_length": context_length,
        "weight_version": weight_version,
        "status": "ready",
        "max_req_input_len": context_length - INPUT_RESERVE,
        "internal_states": [],
        "version": SGLANG_VERSION,
    }


def models(model_path: str, context_length: int) -> dict[str, Any]:
    """Return the body of `/v1/models`."""
    model = {
        "id": model_path,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": model_path,
        "parent": None,
        "max_model_len": context_length,
    }
    return {"object": "list", "data": [model]}


def loads(running: int, waiting: int, used_tokens: int, queued_tokens: int, max_running: int) -> dict[str, Any]:
    """Return the body of `/v1/loads`, a part of the real one.

    Args:
        running: Number of running requests.
        waiting: Number of requests in the queue.
        used_tokens: Tokens of the running requests in the key-value cache.
        queued_tokens: Tokens of the requests in the queue.
        max_running: Maximum number of running requests.
    """
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": queued_tokens,
        "num_used_tokens": used_tokens,
        "num_total_tokens": used_tokens + queued_tokens,
        "num_active_tokens": used_tokens + queued_tokens,
        "max_total_num_tokens": TOKEN_CAPACITY,
        "max_running_requests": max_running,
        "token_usage": round(used_tokens / TOKEN_CAPACITY, 4),
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
    return {
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "version": SGLANG_VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [load],
    }
