"""How PyTorch uses this machine's cores."""

import os

import torch


def use_all_cores() -> None:
    """Let PyTorch compute with one thread per core.

    The first cosines come from one thread: MKL chooses its implementation in that call, and of two threads that make it
    at the same time, one may get another with errors of 1.5e-4 (4 of 300 processes with torch 2.13). These were
    the angles of the second half of the first sequence, and with them its logprobs.
    """
    torch.cos(torch.zeros(1))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
