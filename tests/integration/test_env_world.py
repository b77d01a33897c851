"""An agent on a real server that edits a file in a world and runs it."""

from strands_env.core import Action, RewardResult, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import WorldEnvironment
from strands_sglang import SGLangClient
from support.worlds import needs_worlds

pytestmark = needs_worlds


CREATED = "File created successfully at: /task/main.sh"


class Ran:
    """1.0 if the program that the agent wrote prints the ground truth."""

    def __init__(self, environment):
        self.environment = environment

    async def compute(self, *, action, step_result):
        ran = await self.environment.world.execute("sh /task/main.sh")
        is_right = ran.output.split() == [action.task_context.ground_truth]
        return RewardResult(reward=float(is_right), info={"ran": ran.output})


def worked(*words):
    """Return conversations in which an agent writes a program that prints a word, and runs it."""
    messages = []
    for word in words:
        calls = [
            ("file_editor", {"command": "create", "path": "/task/main.sh", "file_text": f"echo {word}\n"}, CREATED),
            ("shell", {"command": "sh /task/main.sh"}, f"{word}\n"),
        ]
        messages.append({"role": "user", "content": [{"text": f"Write a program that prints {word}, and run it."}]})
        for number, (name, given, output) in enumerate(calls):
            use = {"toolUseId": f"{word}-{number}", "name": name, "input": given}
            result = {"toolUseId": f"{word}-{number}", "status": "success", "content": [{"text": output}]}
            messages.append({"role": "assistant", "content": [{"toolUse": use}]})
            messages.append({"role": "user", "content": [{"toolResult": result}]})
        messages.append({"role": "assistant", "content": [{"text": f"It prints {word}."}]})
    return messages


async def test_an_agent_writes_a_program_and_runs_it(smollm_server):
    config = {"chat_template": smollm_server.chat_template} if smollm_server.chat_template else {}
    async with SGLangClient(smollm_server.base_url, max_retries=3) as client:
        factory = sglang_model_factory(
            tokenizer=smollm_server.model_path,
            client=client,
            sampling_params={"temperature": 0.0, "max_new_tokens": 100},
            **config,
        )
        environment = WorldEnvironment(factory, system_prompt="You are a helpful assistant.", max_turns=4)
        environment.reward_fn = Ran(environment)
        context = TaskContext(id="echo", ground_truth="river", conversation_history=worked("stone", "cloud", "apple"))
        action = Action(message="Write a program that prints river, and run it.", task_context=context)
        result = await environment.step(action)
    assert result.error is None
    assert result.reward == RewardResult(reward=1.0, info={"ran": "river\n"})
    tokens, trajectory = result.observation.tokens, result.observation.trajectory
    sampled = [token for turn in trajectory.turns for token in turn.output_ids]
    assert [token for token, mask in zip(tokens.token_ids, tokens.loss_mask, strict=True) if mask] == sampled
    assert result.observation.metrics["tool_calls"] == 2
