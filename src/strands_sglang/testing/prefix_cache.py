"""A prefix cache like SGLang's radix cache: the part of a prompt that an earlier request has already computed.

A lookup returns the longest common prefix with all earlier sequences. Its cost is linear in the prompt's length,
however many prompts there were. Each branch is stored once.
"""

from __future__ import annotations

_BYTES_PER_ID = 4
_BLOCK = 4096  # bytes compared at once while looking for the first difference


class _Node:
    """A run of ids and what follows it; children are keyed by their first id."""

    __slots__ = ("children", "run")

    def __init__(self, run: bytes) -> None:
        self.run = run
        self.children: dict[bytes, _Node] = {}


class PrefixCache:
    """A radix tree over packed 32-bit token ids."""

    def __init__(self) -> None:
        """Start empty."""
        self._roots: dict[object, _Node] = {}

    def clear(self) -> None:
        """Remove all sequences."""
        self._roots.clear()

    def insert(self, packed: bytes, key: object = None, *, store: bool = True) -> int:
        """Store a sequence and return how many of its leading ids were already cached.

        Args:
            packed: 32-bit ids, 4 bytes each.
            key: Namespace of the sequence, such as SGLang's `extra_key`; namespaces share nothing.
            store: Whether to store it; otherwise it is only looked up.

        Returns:
            Length of the longest common prefix with all earlier sequences of the key, in tokens.
        """
        node = self._roots.setdefault(key, _Node(b""))
        position = 0
        while position < len(packed):
            first = packed[position : position + _BYTES_PER_ID]
            child = node.children.get(first)
            if child is None:
                if store:
                    node.children[first] = _Node(packed[position:])
                break
            if not packed.startswith(child.run, position):
                common = _common_prefix(child.run, packed, position)
                position += common
                if store and position < len(packed):
                    upper = _split(node, child, common)
                    upper.children[packed[position : position + _BYTES_PER_ID]] = _Node(packed[position:])
                break
            position += len(child.run)
            node = child
        return position // _BYTES_PER_ID


def _split(parent: _Node, child: _Node, at: int) -> _Node:
    """Split a child's run in two and return the upper part."""
    upper = _Node(child.run[:at])
    parent.children[child.run[:_BYTES_PER_ID]] = upper
    child.run = child.run[at:]
    upper.children[child.run[:_BYTES_PER_ID]] = child
    return upper


def _common_prefix(run: bytes, packed: bytes, position: int) -> int:
    """Return the number of bytes, in whole ids, in which `run` and `packed[position:]` agree."""
    length = min(len(run), len(packed) - position)
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        ours, theirs = run[start:stop], packed[position + start : position + stop]
        if ours != theirs:
            difference = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
            first_bit = (difference & -difference).bit_length() - 1
            return start + first_bit // (8 * _BYTES_PER_ID) * _BYTES_PER_ID
    return length
