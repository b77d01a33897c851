"""Clients that a process creates once and shares between environments."""

from strands_sglang import (
    clear_clients,
    get_client as get_cached_client,
    get_client_from_slime_args as get_cached_client_from_slime_args,
)

__all__ = ["clear_clients", "get_cached_client", "get_cached_client_from_slime_args"]
