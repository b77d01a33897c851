"""Plays and judges random episodes, one after the other, and counts what they were."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

from strands_sglang import SGLangModel, Trajectory
from strands_sglang.testing import ScriptedSGLang

from .history_judge import Judge, Provable
from .history_log import ViolationError
from .history_plans import Plan, kinds_in, random_plan, shrunk
from .history_players import STOP_STRING, Player, as_sent


class Stage:
    """A server and a model on it, set up once for many episodes.

    Attributes:
        model: The model; its trajectory is that of the last episode.
        tally: How many episodes and calls there were, and of which kinds.
    """

    def __init__(self, tokenizer: Any, folder: Path, *, provable: Provable | None = None, **config: Any) -> None:
        """Set up.

        Args:
            tokenizer: The tokenizer.
            folder: For files in between.
            provable: See `Judge`; by default everything is.
            **config: Of the model.
        """
        stops = [tokenizer.convert_tokens_to_ids(stop) for stop in ("<|im_end|>", "<|endoftext|>")]
        self._tokenizer, self._folder = tokenizer, folder
        self._provable = provable if provable is not None else lambda earlier, call: True
        self._answer: Any = None
        self._server = ScriptedSGLang(tokenizer, self._next, stop_token_ids=stops)
        self.model = SGLangModel(
            tokenizer=tokenizer, client=self._server.client(), sampling_params={"stop": [STOP_STRING]}, **config
        )
        self._loop = asyncio.new_event_loop()
        self.tally: Counter[str] = Counter()

    def close(self) -> None:
        """End the event loop."""
        self._loop.run_until_complete(self.model.client.close())
        self._loop.close()

    def _next(self, request: Any) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer(request) if callable(self._answer) else self._answer

    def _script(self, answer: Any) -> None:
        self._answer = answer

    def play(self, plan: Plan) -> Player:
        """Play a plan with an empty trajectory and an empty log."""
        self._server.requests.clear()
        self._server.responses.clear()
        self.model.trajectory = Trajectory()
        player = Player(self._server, self._script, self.model, self._folder)
        self._loop.run_until_complete(player.play(plan))
        return player

    def check(self, plan: Plan) -> None:
        """Play a plan and judge it.

        Raises:
            ViolationError: A promise did not hold.
        """
        player = self.play(plan)
        trajectory = self.model.trajectory
        judge = Judge(player.notebook, self._tokenizer, self._provable)
        self.tally.update(judge.judge(trajectory))
        histories = {one.name: as_sent(one.messages) for one in player.everybody if one.name is not None}
        for messages in histories.values():
            trajectory.settle(messages)
        judge.judge_settled(trajectory, histories)
        self.tally.update(kinds_in(plan))

    def check_all(self, seed: str, count: int) -> None:
        """Play and judge random plans.

        Args:
            seed: Chooses them.
            count: How many.

        Raises:
            ViolationError: A promise did not hold; the message has the shortest plan that was found to break it.
        """
        for number in range(count):
            plan = random_plan(random.Random(f"{seed}/{number}"))
            failure = self._failure(plan)
            if failure is None:
                continue
            shortest = shrunk(plan, lambda shorter, failure=failure: _alike(self._failure(shorter), failure))
            failure = self._failure(shortest) or failure
            raise ViolationError(f"{failure.promise} (case {seed}/{number})", failure.facts, shortest) from failure

    def _failure(self, plan: Plan) -> ViolationError | None:
        try:
            self.check(plan)
        except ViolationError as violation:
            return violation
        except Exception as error:
            violation = ViolationError(f"nothing raises {type(error).__name__}", {"error": error})
            violation.__cause__ = error
            return violation
        return None


def _alike(one: ViolationError | None, other: ViolationError) -> bool:
    return one is not None and one.promise == other.promise
