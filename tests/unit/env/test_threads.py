"""Functions that block and raise whatever they like."""

from __future__ import annotations

import asyncio

import pytest

from strands_env.utils.threads import called


class Speechless(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text")


async def test_an_error_whose_text_cannot_be_made_leaves_nobody_waiting() -> None:
    """B9."""

    def fails() -> None:
        raise Speechless

    with pytest.raises(RuntimeError, match="Speechless"):
        await asyncio.wait_for(called(fails), 5)
