"""An OpenEnv session whose agent is a Strands agent: a calculator, its trace for the trainer, and its reward.

    session = CalculatorSession(sglang_model_factory(tokenizer=tokenizer, base_url=url), "What is 27 * 43?", "1161")
    session.wait_for_completion()
    session.fetch_training_trace(), session.verify([])

A trainer that takes OpenEnv's `TrainableSession` makes these calls itself. See docs/guides/openenv.md.
"""

import asyncio

from openenv.core.harness import ResourceSession, ToolResult, VerifyResult

from strands_env.core import Action, TaskContext
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import MathReward
from strands_sglang.trainers.openenv import to_trace


# --8<-- [start:loop]
class CalculatorSession(ResourceSession):
    """One episode. The agent owns its loop, so OpenEnv sends no messages and calls no tools."""

    def __init__(self, model_factory, question, answer):
        """Keep the task."""
        self.env = CalculatorEnvironment(
            model_factory=model_factory,
            reward_fn=MathReward(),
            max_tool_iterations=8,
        )
        self.action = Action(message=question, task_context=TaskContext(ground_truth=answer))
        self.result = None

    def wait_for_completion(self, timeout_s=None):
        """Run the episode."""
        self.result = asyncio.run(asyncio.wait_for(self.env.step(self.action), timeout_s))
        return 0

    def fetch_training_trace(self):
        """Return what to train."""
        return to_trace(self.result.episode(group=self.action.message))

    def verify(self, transcript, final_state=None):
        """Return the reward; None if the episode says nothing about the policy."""
        reward = self.result.reward
        return VerifyResult(env_reward=None if reward is None else reward.reward, done=True)

    # --8<-- [end:loop]
    def initial_messages(self):
        """Return the question."""
        return [{"role": "user", "content": self.action.message}]

    def list_tools(self):
        """Return nothing: the agent has its own tools."""
        return []

    def call_tool(self, name, arguments):
        """Refuse: the agent calls its tools itself."""
        return ToolResult(error=f"{name}: the agent has its own tools")

    def close(self):
        """Nothing to close."""
