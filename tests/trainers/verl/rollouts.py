"""Runs the loop of docs/guides/verl.md in one of verl's workers up to the batch of the loss: `WORKER MODEL SETTING...`.

Servers and the actor's update need GPUs: answers are scripted, and their logprobs are also the actor's. The rest is
verl's own, for TransferQueue with Ray, a worker in a process of its own, the queue and the replay buffer.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

import numpy as np
import ray
import transfer_queue
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopWorker
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from support.agents import call

EPISODES = 4
CALL = call("calculator", expression="6 * 7")
ANSWERS = ["It is \\boxed{42}.", "It is \\boxed{41}."]


class Client(LLMServerClient):
    """verl's client of servers that answer each episode with a call, then with the right or a wrong result."""

    def __init__(self, config, tokenizer):
        super().__init__(config)
        self.tokenizer, self.answers = tokenizer, {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, **fields):
        """Return the next answer of an episode, which verl knows by its request id."""
        own = self.answers.setdefault(request_id, [CALL, ANSWERS[len(self.answers) % 2]])
        ids = [*self.tokenizer.encode(own.pop(0)), self.tokenizer.eos_token_id]
        steps = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="stop", extra_fields=steps)


def prompts(count):
    """Return rows of a dataset as verl's dataloader gives them."""
    columns = {
        "raw_prompt": [[{"role": "user", "content": "What is 6 * 7?"}]],
        "reward_model": [{"ground_truth": "42"}],
        "uid": ["u"],
        "index": [0],
    }
    made = {name: np.empty(count, dtype=object) for name in columns}
    for name, [value] in columns.items():
        made[name][:] = [value] * count
    return made


def with_transfer_queue(config, client):
    """Return the batch as verl's synchronous trainer makes it."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    transfer_queue.init(config.transfer_queue)
    manager = AgentLoopManagerTQ.create(config, client)
    buffer = ReplayBuffer("sync", {}, None, "drop", {}, poll_interval=0.1)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1}]
    transfer_queue.kv_batch_put(keys=["u"], partition_id="train", tags=tags)
    batch = tensordict_utils.get_tensordict(prompts(1))
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 1)
    manager.generate_sequences(batch)
    rows, _ = buffer.sample(1, "train", 1)
    where = {"keys": rows.keys, "partition_id": "train"}
    data = transfer_queue.kv_batch_get(**where, select_fields=["rollout_log_probs"])
    data["old_log_probs"] = data.pop("rollout_log_probs")
    transfer_queue.kv_batch_put(**where, fields=data)
    PPOTrainer._compute_advantage(SimpleNamespace(config=config), rows, {})
    return transfer_queue.kv_batch_get(**where, select_fields=["advantages", "response_mask"]).to_padded_tensor()


def without(config, client):
    """Return the batch as the trainers that use `AgentLoopWorker` make it."""
    batch = DataProto.from_dict(non_tensors=prompts(EPISODES), meta_info={"global_steps": 1})
    batch = asyncio.run(AgentLoopWorker(config, client).generate_sequences(batch))
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    return compute_advantage(batch, config.algorithm.adv_estimator).batch


def main(worker, model, *settings):
    """Print the advantages of each row's trained tokens, and how many these are."""
    own = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.n": EPISODES,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*settings, *(f"{name}={value}" for name, value in own.items())])
    client = Client(config, AutoTokenizer.from_pretrained(model))
    batch = {"AgentLoopWorkerTQ": with_transfer_queue, "AgentLoopWorker": without}[worker](config, client)
    masks = batch["response_mask"].bool()
    advantages = [sorted(set(row[mask].tolist())) for row, mask in zip(batch["advantages"], masks, strict=True)]
    print(json.dumps({"advantages": advantages, "trained": masks.sum(dim=1).tolist()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
