"""What a program in the sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run.

    Attributes:
        wall_s: Seconds, from the program's start to its end.
        cpu_s: Seconds of CPU time, per process.
        memory_bytes: What all processes together may hold in memory, looked at 20 times a second: their own pages, page
            tables, pipes and sockets (each as if it were full).
        address_space_bytes: What one process may ask for; beyond it Python raises `MemoryError`.
        disk_bytes: What all files together may take.
        processes: Processes and threads at a time.
        open_files: Open files, per process.
        output_bytes: Output that is kept; a program that writes more is ended.
        source_bytes: The longest program.
    """

    wall_s: float = 30.0
    cpu_s: int = 30
    memory_bytes: int = 2 << 30
    address_space_bytes: int = 4 << 30
    disk_bytes: int = 64 << 20
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 32_000
    source_bytes: int = 1 << 20


DEFAULT_LIMITS = SandboxLimits()
