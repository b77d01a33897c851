"""A verl agent loop: a calculator agent, scored by its answer.

Put this folder on the PYTHONPATH of verl's workers, and set

    actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/verl/agent_loops.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=calculator

The dataset has a `raw_prompt` (messages) and a `reward_model` with the `ground_truth`, as verl's preprocessing writes
them. See docs/guides/verl.md.
"""

# --8<-- [start:loop]
from strands_env.core import Action, TaskContext
from strands_env.environments import CalculatorEnvironment
from strands_env.rewards import MathReward
from strands_sglang.trainers.verl import agent_loop


@agent_loop("calculator")
async def calculator(model, fields):
    """Run one episode."""
    env = CalculatorEnvironment(
        model_factory=lambda: model,
        reward_fn=MathReward(),
        max_tool_iterations=8,
    )
    task = TaskContext(ground_truth=fields["reward_model"]["ground_truth"])
    result = await env.step(Action(message=list(fields["raw_prompt"]), task_context=task))
    return result.episode(group=None)


# --8<-- [end:loop]
