"""A prefix cache like SGLang's radix cache: the part of a prompt that an earlier request has already computed."""

from __future__ import annotations

from bisect import bisect_left, insort

_BYTES_PER_ID = 4


class PrefixCache:
    """Sequences of packed 32-bit token ids, sorted: the nearest ones share the longest prefix with a new one."""

    def __init__(self) -> None:
        """Start empty."""
        self._sequences: dict[object, list[bytes]] = {}

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()

    def find(self, packed: bytes, key: object = None) -> int:
        """Return how many leading ids of a sequence are cached.

        Args:
            packed: 32-bit ids, 4 bytes each.
            key: Namespace of the sequence, such as SGLang's `extra_key`; namespaces share nothing.

        Returns:
            Length of the longest common prefix with all sequences of the key, in tokens.
        """
        sequences = self._sequences.get(key, [])
        at = bisect_left(sequences, packed)
        nearest = sequences[max(at - 1, 0) : at + 1]
        return max((_shared(packed, other) for other in nearest), default=0) // _BYTES_PER_ID

    def insert(self, packed: bytes, key: object = None) -> None:
        """Store a sequence, in place of one that it continues."""
        sequences = self._sequences.setdefault(key, [])
        at = bisect_left(sequences, packed)
        if at < len(sequences) and sequences[at].startswith(packed):
            return
        if at and packed.startswith(sequences[at - 1]):
            sequences[at - 1] = packed
        else:
            insort(sequences, packed)


def _shared(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix of two byte strings."""
    length = min(len(first), len(second))
    difference = int.from_bytes(first[:length], "little") ^ int.from_bytes(second[:length], "little")
    if not difference:
        return length
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // 8
