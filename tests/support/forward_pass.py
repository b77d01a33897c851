"""The judge of what a real server computed: a forward pass of its model in float32."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load_reference(model_path: Any) -> Any:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def scored(reference: Any, token_ids: list[int]) -> tuple[list[float], torch.Tensor]:
    """Logprob of each token after the first, shape (T - 1,), and the router's logits, (T - 1, layers, experts)."""
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        output = reference(ids[None, :-1], output_router_logits=True)
    logprobs = torch.log_softmax(output.logits[0].float(), dim=-1).gather(1, ids[1:, None])[:, 0]
    return logprobs.tolist(), torch.stack(output.router_logits, dim=1)


def rescored(model_path: Any, sequence: Any, temperature: float) -> list[float]:
    """Logprob of each token after the first given those before it, shape (T - 1,).

    The server scales the logits of sampled tokens by the temperature, those of prompt tokens never.
    """
    ids = torch.tensor(sequence.token_ids)
    with torch.no_grad():
        logits = load_reference(model_path)(ids[None, :-1]).logits[0].float()
    scale = torch.where(torch.tensor(sequence.loss_mask[1:]) == 1, temperature, 1.0)
    logprobs: list[float] = torch.log_softmax(logits / scale[:, None], dim=-1).gather(1, ids[1:, None])[:, 0].tolist()
    return logprobs


def assert_same_experts(routed: Any, router_logits: torch.Tensor, top_k: int) -> None:
    """The routed experts, shape (T - 1, layers, top_k), are the router's best ones."""
    best = router_logits.topk(top_k + 1)
    # Float noise may order two experts otherwise that are this close.
    clear = best.values.diff(dim=-1).abs().min(dim=-1).values > 1e-4
    assert clear.float().mean() > 0.95
    assert (torch.as_tensor(routed) == best.indices[..., :top_k])[clear].all()
