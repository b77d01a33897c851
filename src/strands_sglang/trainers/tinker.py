"""Tinker: `Datum`s with an advantage per token, for Tinker's service and SkyRL's Tinker server.

Everything in a `Datum` is shifted by one: position t predicts token t + 1. tinker is imported only when used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..credit import Batch, Normalizer, Reduction, TrainingRows, per_row, whole
from .records import refuse_images

if TYPE_CHECKING:
    from tinker import types


def per_target(batch: Batch, index: int) -> float:
    """Mean over all targets of a row, then over the rows."""
    return 1 / (batch.size * (len(batch.rows[index]) - 1))


LOSSES: Mapping[str, Reduction] = {
    "tinker": whole,
    "tinker:skyrl": per_target,
    "tinker:skyrl:weights": per_row,
}
"""Tinker's losses, and those of SkyRL's server for it."""


def to_data(
    rows: TrainingRows, normalizer: Normalizer = "token_mean", *, loss: str = "tinker", constant: float | None = None
) -> list[types.Datum]:
    """Return the rows of one optimizer step, for `forward_backward` with `importance_sampling` or `ppo`.

    Pass all of them to one `forward_backward` before the `optim_step`.

    Args:
        rows: Rows from [`training_rows`][strands_sglang.credit.training_rows]. Turns may have different advantages.
        normalizer: The loss, see [`TrainingRows.weights`][strands_sglang.credit.TrainingRows.weights].
        loss: How the server reduces: `"tinker"` sums over the tokens; SkyRL's server takes the mean over the rows of
            each row's mean, which is `"tinker:skyrl:weights"`.
        constant: The divisor of the normalizer `"constant"`.

    Raises:
        ValueError: The loss is not one of Tinker's, or a row has images.
    """
    refuse_images(rows, "a `Datum` of this adapter")
    from tinker import types

    if not loss.startswith("tinker"):
        raise ValueError(f"loss {loss!r} is not one of Tinker's: pass 'tinker' or 'tinker:skyrl:weights'")
    data = []
    for row, weight in zip(rows, rows.weights(normalizer, loss, constant=constant), strict=True):
        inputs = {
            "target_tokens": row.token_ids[1:],
            "logprobs": row.logprobs[1:],
            "advantages": [weight * advantage for advantage in row.advantages[1:]],
        }
        if loss == "tinker:skyrl:weights":  # without them, its mean is over the prompt's tokens, too
            inputs["weights"] = [float(mask) for mask in row.loss_mask[1:]]
        data.append(types.Datum(model_input=types.ModelInput.from_ints(row.token_ids[:-1]), loss_fn_inputs=inputs))
    return data
