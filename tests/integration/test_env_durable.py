"""Forks and resumes of episodes on a real server: the same prefix, served from its cache."""

from strands_env.core import Action, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.environments import CalculatorEnvironment
from strands_sglang import Journal, SGLangClient
from support.environments import Contains, worked_examples

HISTORY = worked_examples({"15 * 12": 180, "31 * 8": 248, "22 * 19": 418})
ASK = Action(
    message="What is 27 * 43?",
    task_context=TaskContext(id="product", ground_truth="1161", conversation_history=HISTORY),
)


def environment(server, client, journal):
    config = {"chat_template": server.chat_template} if server.chat_template else {}
    factory = sglang_model_factory(
        tokenizer=server.model_path,
        client=client,
        sampling_params={"temperature": 0.0, "max_new_tokens": 60},
        **config,
    )
    return CalculatorEnvironment(factory, Contains(), journal=journal, max_turns=4)


async def test_forks_have_the_prefix_of_the_episode_and_the_server_has_it_in_its_cache(smollm_server, tmp_path):
    async with SGLangClient(smollm_server.base_url, max_retries=3) as client:
        env = environment(smollm_server, client, tmp_path / "journals")
        result = await env.step(ASK)
        turns = result.observation.trajectory.turns
        assert len(turns) > 1, result.observation.messages
        forks = await environment(smollm_server, client, tmp_path / "forks").fork(result, 1, 4)
    prompt = [*turns[0].prompt_ids, *turns[0].output_ids, *turns[1].prompt_ids]
    shares = []
    for fork in forks:
        branch = fork.observation.trajectory.turns[1]
        assert branch.token_ids()[: branch.prompt_tokens] == prompt
        shares.append(branch.generation.cached_tokens / branch.prompt_tokens)
    assert min(shares) >= 0.9, shares
    assert len(forks) == len({fork.journal.path for fork in forks}) == 4


async def test_an_episode_continues_with_another_process_of_the_client(smollm_server, tmp_path):
    async with SGLangClient(smollm_server.base_url, max_retries=3) as client:
        whole = await environment(smollm_server, client, tmp_path / "whole").step(ASK)
    entries = whole.journal.entries()
    first = next(number for number, entry in enumerate(entries) if entry.kind == "turn")
    cut = Journal(tmp_path / "cut.journal")
    cut.begin_with(whole.journal.content()[: entries[first].end])
    async with SGLangClient(smollm_server.base_url, max_retries=3) as client:
        (resumed,) = await environment(smollm_server, client, tmp_path).resume(cut.path)
    assert resumed.termination_reason is whole.termination_reason
    assert resumed.observation.tokens.loss_mask == whole.observation.tokens.loss_mask
    assert resumed.observation.tokens.token_ids == whole.observation.tokens.token_ids
