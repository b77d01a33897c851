"""What can go wrong with the local server, as two errors whose message alone is enough to act on."""

from __future__ import annotations


class LocalServerError(RuntimeError):
    """The local SGLang server could not be installed, started or kept running."""


class UnsupportedPlatformError(LocalServerError):
    """SGLang's CPU mode cannot run on this machine; a running server elsewhere still can be used."""
