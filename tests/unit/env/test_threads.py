"""Functions that block and raise whatever they like."""

from __future__ import annotations

import asyncio

import pytest

from strands_env.core.supervision import called
from support.environments import ANSWER, ASK, CalculatorEnv, Contains
from support.scripted_model import ScriptedModel


async def test_an_error_whose_text_cannot_be_made_leaves_nobody_waiting() -> None:
    """B9."""

    class Speechless(BaseException):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fails() -> None:
        raise Speechless

    with pytest.raises(RuntimeError, match="Speechless"):
        await asyncio.wait_for(called(fails), 5)


@pytest.mark.parametrize("place", ["reset", "compute_metrics"])
async def test_an_error_of_an_environment_whose_text_cannot_be_made_ends_its_own_episode(place: str) -> None:
    """B9."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fails(*args: object) -> None:
        raise MuteError

    env = CalculatorEnv(lambda: ScriptedModel([ANSWER]), Contains())
    setattr(env, place, fails)
    assert "MuteError" in str((await env.step(ASK)).error)
