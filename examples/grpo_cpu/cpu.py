"""What TRL 1.16's AsyncGRPOTrainer needs on a CPU: it has kernels and a table of speeds for GPUs only."""

from types import SimpleNamespace

import torch
import trl.experimental.async_grpo.async_grpo_trainer as async_grpo_trainer
import trl.experimental.async_grpo.packing as packing


def _attention(q, k, v, q_starts, k_starts, *_lengths, softmax_scale=None, **_options):
    """Causal attention of packed sequences, `(tokens, heads, size)` each, one sequence after the other."""
    repeats = q.shape[1] // k.shape[1]
    parts = []
    for (q_start, q_end), (k_start, k_end) in zip(
        zip(q_starts[:-1], q_starts[1:], strict=True), zip(k_starts[:-1], k_starts[1:], strict=True), strict=True
    ):
        keys, values = (one[k_start:k_end].transpose(0, 1).repeat_interleave(repeats, 0)[None] for one in (k, v))
        queries = q[q_start:q_end].transpose(0, 1)[None]
        seen = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - queries.shape[2])
        part = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=softmax_scale
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def enable():
    """Replace the flash-attention kernel by plain attention, in float32, and the table's lookup by a constant."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_attention)
    packing.get_target_dtype = lambda query, module: None
    async_grpo_trainer.get_peak_flops_per_device = lambda *_, **__: 1e12
