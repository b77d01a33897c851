"""`strands-env check`: whether an environment rewards what it should, tried by playing agents in it.

Environments may have two methods for it: `solve()` does a task as its solution does, and `plant_reward()` writes a
reward where the agent could.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from strands.models.model import Model
from strands.types.content import Messages
from typing_extensions import override

from strands_sglang import TerminationReason

from .core import Action, Environment, ModelFactory, StepResult
from .core.supervision import invoke, maybe_await

Verdict = Literal["ok", "failed", "not tried"]
MakeEnvironment = Callable[[ModelFactory, Action], Environment]
Move = Callable[[Environment], Awaitable[None]]

HANGING_S = 2
MOST_S = 60.0


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        name: What should hold.
        verdict: Whether it does.
        detail: What happened.
    """

    name: str
    verdict: Verdict
    detail: str = ""


class Player(Model):
    """Plays an agent: each time it is asked, it does the same, and then says that it is done.

    Attributes:
        move: What it does.
        call: A tool and its input, which it calls first.
    """

    def __init__(self, move: Callable[[], Awaitable[None]] | None = None, call: tuple[str, Any] | None = None) -> None:
        """Choose what it does."""
        self.move = move
        self.call = call

    @override
    def update_config(self, **model_config: Any) -> None:
        """Ignore it."""

    @override
    def get_config(self) -> Any:
        """Return nothing."""
        return {}

    @override
    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it."""
        raise NotImplementedError

    @override
    async def stream(self, messages: Messages, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Play one answer."""
        call, self.call = self.call, None
        start: dict[str, Any] = {}
        delta: dict[str, Any] = {"text": "It is done."}
        if call is not None:
            start = {"toolUse": {"toolUseId": "call", "name": call[0]}}
            delta = {"toolUse": {"input": json.dumps(call[1])}}
        elif self.move is not None:
            await self.move()
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": start}}
        yield {"contentBlockDelta": {"delta": delta}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if start else "end_turn"}}


async def check_environment(make: MakeEnvironment, action: Action, *, success_threshold: float = 1.0) -> list[Finding]:
    """Play agents in an environment, and return what was found.

    Args:
        make: Function that returns a new environment for a model factory and an action.
        action: The task.
        success_threshold: An episode with at least this reward is a success.
    """
    check = _Check(make, action, success_threshold)
    sample = make(Player, action)
    nothing = await asyncio.gather(check.play(), check.play())
    if nothing[0].termination_reason is not TerminationReason.TASK_COMPLETE:
        return [Finding("an episode runs", "failed", str(nothing[0].error))]
    findings = [check.fails("doing nothing is no success", nothing[0])]
    runs = [nothing]
    if hasattr(sample, "solve"):
        solved = await asyncio.gather(check.play(_call("solve")), check.play(_call("solve")))
        findings.append(check.finding("the solution succeeds", check.succeeded(solved[0]), solved[0]))
        runs.append(solved)
    else:
        findings.append(Finding("the solution succeeds", "not tried", "the environment has no solve()"))
    agree = all(_shown(first) == _shown(second) for first, second in runs)
    findings.append(check.finding("two runs agree", agree, *chain.from_iterable(runs)))
    if type(sample).get_sandbox is not Environment.get_sandbox:
        findings.append(await check.siblings())
        findings.append(await check.hangs())
    if hasattr(sample, "plant_reward"):
        planted = await check.play(_call("plant_reward"))
        findings.append(check.fails("a planted reward does not count", planted))
    return findings


@dataclass(frozen=True)
class _Check:
    """An environment and a task that are checked."""

    make: MakeEnvironment
    action: Action
    success_threshold: float

    async def play(self, move: Move | None = None, call: tuple[str, Any] | None = None) -> StepResult:
        """Run an episode of a player."""
        player = Player(call=call)
        environment = self.make(lambda: player, self.action)
        if move is not None:
            player.move = functools.partial(move, environment)
        return await environment.step(self.action.model_copy(deep=True))

    def succeeded(self, result: StepResult) -> bool:
        """Return whether an episode is a success."""
        return result.reward is not None and result.reward.reward >= self.success_threshold

    def finding(self, name: str, holds: bool, *results: StepResult) -> Finding:
        """Return what some episodes show."""
        return Finding(name, "ok" if holds else "failed", "; ".join(dict.fromkeys(map(_shown, results))))

    def fails(self, name: str, result: StepResult) -> Finding:
        """Return whether an episode is graded, and no success."""
        is_graded = result.reward is not None or (
            result.reward_error is not None and not result.reward_error_is_infrastructure
        )
        return self.finding(name, is_graded and not self.succeeded(result), result)

    async def hangs(self) -> Finding:
        """Let the tool `shell` hang."""
        name = "a tool that hangs ends"
        hanging = self.play(call=("shell", {"command": "sleep 100000", "timeout": HANGING_S}))
        try:
            result = await asyncio.wait_for(hanging, MOST_S)
        except asyncio.TimeoutError:
            return Finding(name, "failed", f"it runs for {MOST_S:g} seconds")
        if result.observation.metrics["tools"].get("shell", {}).get("seconds", 0.0) < 0.5 * HANGING_S:
            return Finding(name, "not tried", "no tool `shell` has run")
        return self.finding(name, result.termination_reason is TerminationReason.TASK_COMPLETE, result)

    async def siblings(self) -> Finding:
        """Let an episode write files, and meanwhile another one look for them."""
        results: list[StepResult] = []
        seen: list[str] = []

        async def look(environment: Environment) -> None:
            sandbox = await maybe_await(environment.get_sandbox())
            seen.append((await sandbox.execute("ls . /tmp")).stdout)

        async def write(environment: Environment) -> None:
            sandbox = await maybe_await(environment.get_sandbox())
            await sandbox.execute("touch /tmp/of-a-sibling of-a-sibling")
            results.append(await asyncio.wait_for(self.play(look), MOST_S))

        results.append(await self.play(write))
        have_run = all(result.termination_reason is TerminationReason.TASK_COMPLETE for result in results)
        holds = have_run and not any("of-a-sibling" in files for files in seen)
        return self.finding("siblings do not see each other", holds, *results)


def _call(name: str) -> Move:
    """Return a move that calls a method of the environment."""
    return lambda environment: invoke(getattr(environment, name))


def _shown(result: StepResult) -> str:
    if result.reward is not None:
        return f"reward {result.reward.reward:g}"
    return result.reward_error or result.error or f"{result.termination_reason.value}, without a reward"
