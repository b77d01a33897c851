"""Bodies as SGLang 0.5.23 sends them."""

from __future__ import annotations

from typing import Any


def generation(output_ids: list[int] | None = None, *, rid: str = "r", finish: str = "stop") -> dict[str, Any]:
    """A `/generate` response."""
    ids = [7, 2] if output_ids is None else output_ids
    reason = {"type": finish, "matched": 2} if finish == "stop" else {"type": finish}
    meta_info = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "default",
    }
    return {"text": "hi", "output_ids": ids, "meta_info": meta_info}
