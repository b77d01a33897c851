"""Routed experts of a scripted mixture-of-experts model.

Source of the format: meta_info["routed_experts"] of a real SGLang 0.5.23.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from .sampling import mixed_bits


@dataclass(frozen=True)
class ScriptedExperts:
    """The experts that a scripted model has, if it is to have any.

    Attributes:
        layers: Number of layers.
        experts: Experts in each layer.
        top_k: How many of them compute a token.
    """

    layers: int = 3
    experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ValueError: A number below 1, or more experts per token than there are.
        """
        if min(self.layers, self.top_k) < 1 or self.top_k > self.experts:
            raise ValueError(f"{self!r} is no model: at least one layer, and 1 <= top_k <= experts")

    def chosen(self, position: int, token_id: int) -> list[int]:
        """The experts of one token, shape (layers * top_k,): pseudo-random, different ones within a layer.

        They depend on nothing but where the token stands and which it is, so a test can tell shifted or foreign rows.

        Args:
            position: Index in prompt plus answer, from 0.
            token_id: The token.
        """
        ids: list[int] = []
        for layer in range(self.layers):
            first = mixed_bits(position * self.layers + layer, token_id) % self.experts
            ids += [(first + i) % self.experts for i in range(self.top_k)]
        return ids

    def encoded(self, token_ids: Sequence[int], start: int) -> str:
        """What a response carries: base64 of the rows of all tokens from `start` on but the last.

        Args:
            token_ids: Prompt and answer, shape (T,).
            start: First row.
        """
        rows = array("i")
        for position in range(start, len(token_ids) - 1):
            rows.extend(self.chosen(position, token_ids[position]))
        return base64.b64encode(rows.tobytes()).decode("ascii")
