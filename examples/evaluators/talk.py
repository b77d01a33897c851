"""A conversation with a simulated user, judged by an evaluator; both are Strands' own, of strands-agents-evals.

    env = Conversation(agent_models, make_reward(judge_models()), user_models=user_models)
    result = asyncio.run(env.step(Action(message="Hello!", task_context=TaskContext(goal="Know what 25 * 17 is."))))

See docs/guides/rewards.md.
"""

from __future__ import annotations

from typing import Any

from strands_evals.evaluators import OutputEvaluator
from strands_evals.simulation import ActorSimulator
from strands_evals.types.simulation import ActorProfile

from strands_env.core import Action, ModelFactory
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import EvaluatorReward


# --8<-- [start:reward]
def make_reward(judge):
    """A judge's score from 0 to 1; `judge` is any Strands model."""
    return EvaluatorReward(OutputEvaluator("The answer is right and polite.", model=judge))


# --8<-- [end:reward]


# --8<-- [start:user]
class Conversation(CalculatorEnvironment):
    """The user has a goal, and answers the agent until it is reached. Make one environment per episode."""

    def __init__(self, *args: Any, user_models: ModelFactory, **kwargs: Any) -> None:
        """Keep what makes the user's model."""
        super().__init__(*args, **kwargs)
        self.user_models = user_models
        self.user: ActorSimulator | None = None

    async def reset(self) -> None:
        """Forget an attempt that failed. What the user remembers is in no journal: such an episode starts again."""
        self.user = None

    def next_user_message(self, action: Action, messages: Any) -> str | None:
        """Return what the user answers; None ends the episode."""
        if self.user is None:
            profile = ActorProfile(traits={}, context="", actor_goal=action.task_context.goal)
            self.user = ActorSimulator(profile, action.message, model=self.user_models(), max_turns=5)
        said = "\n".join(block["text"] for block in messages[-1]["content"] if "text" in block)
        reply = self.user.act(said).structured_output
        return None if reply.stop else reply.message


# --8<-- [end:user]
