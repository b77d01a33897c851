"""Environments under slime: the split functions that people know, and the ready `generate`."""

import asyncio
import textwrap
from types import SimpleNamespace

import pytest
from strands import Agent

from strands_env import slime
from strands_env.core import Action, RewardFunction, TaskContext
from strands_env.utils import clear_clients
from strands_sglang.testing import ScriptedAnswer, ScriptedFault, ScriptedSGLang
from support.environments import ANSWER, ASK, CALL, CalculatorEnv, Contains, Gives
from support.slime import Sample, SlimeState, check_against_server, check_rollouts, slime_args, slime_sampling_params

QUESTION = "What is 25 * 17?"


@pytest.mark.parametrize("chat", [False, True])
async def test_the_documented_split_functions_work_as_they_are(chat, chatml_tokenizer):
    # As the package's page has had them from the start.
    split_functions = """
    from strands_env.core import Action, TaskContext
    from strands_env.core.models import sglang_model_factory
    from strands_env.utils import get_cached_client_from_slime_args

    async def generate(args, sample, sampling_params):
        # Build model factory with cached client
        factory = sglang_model_factory(
            model_id=args.hf_checkpoint,
            tokenizer=tokenizer,
            client=get_cached_client_from_slime_args(args),
            sampling_params=sampling_params,
        )

        # Create environment and run step
        env = YourEnv(model_factory=factory, reward_fn=None)
        action = Action(message=sample.prompt, task_context=TaskContext(ground_truth=sample.label))
        step_result = await env.step(action)

        # Extract TITO data for training
        token_obs = step_result.observation.tokens
        sample.tokens = token_obs.token_ids
        sample.loss_mask = token_obs.rollout_loss_mask
        sample.rollout_log_probs = token_obs.rollout_logprobs
        sample.response_length = len(token_obs.rollout_token_ids)

        # Attach for reward computation
        sample.action = action
        sample.step_result = step_result
        return sample

    async def reward_func(args, sample, **kwargs):
        reward_fn = YourRewardFunction()
        reward_result = await reward_fn.compute(action=sample.action, step_result=sample.step_result)
        return reward_result.reward
"""
    clear_clients()
    server = ScriptedSGLang(chatml_tokenizer, [CALL, ANSWER])
    namespace = {
        "tokenizer": chatml_tokenizer,
        "YourEnv": CalculatorEnv,
        "YourRewardFunction": Contains,
    }
    exec(textwrap.dedent(split_functions), namespace)
    prompt = [{"role": "user", "content": QUESTION}] if chat else QUESTION
    with server.serve() as url:
        args = slime_args(url)
        sample = await namespace["generate"](args, Sample(index=0, prompt=prompt, label="425"), slime_sampling_params())
    clear_clients()
    assert await namespace["reward_func"](args, sample) == 1.0
    # What slime itself says of its ends, the functions above leave to it.
    sample.status, sample.reward = Sample.Status.COMPLETED, 1.0
    sample.response = chatml_tokenizer.decode(sample.tokens[-sample.response_length :])
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    last = server.responses[-1]
    assert last is not None
    assert sample.tokens == server.requests[-1].input_ids + last.body["output_ids"]
    sampled = [logprob for logprob, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if mask]
    told = [pair[0] for response in server.responses for pair in response.body["meta_info"]["output_token_logprobs"]]
    assert sampled == pytest.approx(told)
    assert {lp for lp, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not mask} == {0.0}


class Rollouts:
    """A ready `generate` on a scripted server, with what its environments were."""

    def __init__(self, tokenizer, answers, *, reward_fn=None, **limits):
        self.state = SlimeState(tokenizer)
        self.server = ScriptedSGLang(tokenizer, answers)
        self.environments = []
        self.models = []

        def make_environment(model_factory, sample):
            self.models.append(model_factory())
            self.environments.append(CalculatorEnv(model_factory, reward_fn, **limits))
            return self.environments[-1]

        self.generate = slime.make_generate(
            make_environment,
            client_settings={"transport": self.server.transport(), "max_retries": 0},
            generate_state=lambda args: self.state,
        )

    async def __call__(self, sample=None, **args):
        sample = sample or Sample(index=3, group_index=1, prompt=QUESTION, label="425")
        result = await self.generate(slime_args(**args), sample, slime_sampling_params())
        assert [env.steps for env in self.environments] == [["reset", "cleanup"]] * len(self.environments)
        check_rollouts(result, slime_args(**args), self.state.tokenizer)
        return result


ENDS = {
    "an answer": ([CALL, ANSWER], {"reward_fn": Contains()}, "COMPLETED", 1.0, False),
    "an answer for slime's function": ([CALL, ANSWER], {}, "COMPLETED", None, False),
    "a limit": ([CALL] * 3, {"max_tool_iterations": 2, "reward_fn": Contains()}, "TRUNCATED", 0.0, False),
    "the response's budget": (["long " * 400], {"reward_fn": Contains()}, "TRUNCATED", 0.0, False),
    "the response's budget, by a later turn": ([CALL] * 9, {"reward_fn": Contains()}, "TRUNCATED", 0.0, False),
    "an error of the server": ([CALL, ScriptedFault(status=500)], {"reward_fn": Contains()}, "FAILED", 0.0, True),
    "an error at once": ([ScriptedFault(status=500)], {"reward_fn": Contains()}, "FAILED", 0.0, True),
    "an abort that nobody asked for": (
        [CALL, ScriptedAnswer("25", finish_reason="abort")],
        {"reward_fn": Contains()},
        "TRUNCATED",
        0.0,
        True,
    ),
    "a reward function that fails": (
        [ANSWER],
        {"reward_fn": Gives(LookupError("no such answer"))},
        "COMPLETED",
        0.0,
        True,
    ),
}


@pytest.mark.parametrize("name", ENDS)
async def test_whatever_becomes_of_an_episode_is_a_sample_that_slime_can_use(name, chatml_tokenizer):
    answers, settings, status, reward, removed = ENDS[name]
    rollouts = Rollouts(chatml_tokenizer, answers, **settings)
    sample = await rollouts()
    assert (sample.status.name, sample.reward, sample.remove_sample) == (status, reward, removed)
    assert sample.response_length <= 256
    facts = sample.metadata["strands_sglang"]
    if name == "an answer":
        assert (facts["outcome"], facts["tool_calls"]) == ("task_complete", 1)
        check_against_server(sample, rollouts.server)


async def test_nothing_is_asked_once_slime_aborts(chatml_tokenizer):
    def abort(request):
        rollouts.state.aborted = True
        return CALL

    rollouts = Rollouts(chatml_tokenizer, [abort, ANSWER], reward_fn=Contains())
    sample = await rollouts()
    assert (sample.status.name, sample.reward, len(rollouts.server.requests)) == ("ABORTED", None, 1)


async def test_a_reward_is_put_where_slime_looks_for_it(chatml_tokenizer):
    rollouts = Rollouts(chatml_tokenizer, [ANSWER], reward_fn=Contains())
    assert (await rollouts(reward_key="score")).reward == {"score": 1.0}


async def test_an_environment_that_cannot_be_made_is_a_failed_sample(chatml_tokenizer):
    async def make_environment(model_factory, sample):
        raise OSError("no room")

    state = SlimeState(chatml_tokenizer)
    generate = slime.make_generate(make_environment, generate_state=lambda args: state)
    sample = await generate(slime_args(), Sample(index=0, prompt=QUESTION), slime_sampling_params())
    assert (sample.status.name, sample.remove_sample) == ("FAILED", True)
    check_rollouts(sample, slime_args(), chatml_tokenizer)


async def test_a_cancelled_generate_goes_on_being_cancelled(chatml_tokenizer):
    asked = asyncio.Event()

    async def wait(request):
        asked.set()
        await asyncio.Event().wait()
        return ANSWER

    rollouts = Rollouts(chatml_tokenizer, [wait])
    task = asyncio.ensure_future(rollouts())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rollouts.environments[0].steps == ["reset", "cleanup"]


def test_a_samples_task_has_its_label_and_its_metadata():
    sample = SimpleNamespace(
        prompt=QUESTION, label="425", index=7, metadata={"level": 3, "id": "x", "strands_sglang": {}}
    )
    assert slime.action_of(sample) == Action(
        message=QUESTION, task_context=TaskContext(id=7, ground_truth="425", level=3)
    )
    assert slime.action_of(SimpleNamespace(**{**vars(sample), "metadata": None})).message == ASK.message


def test_an_episode_is_run_by_one_side_only():
    from strands_sglang.trainers.slime import make_generate

    with pytest.raises(ValueError, match="runs everything by itself"):
        make_generate(episode=lambda model, sample: None, max_turns=3)


async def test_a_judge_on_the_sampled_model_is_not_in_the_sample(chatml_tokenizer):
    class Judge(RewardFunction):
        async def compute(self, **kwargs):
            agent = Agent(model=rollouts.models[0], callback_handler=None)
            return float("425" in str(await agent.invoke_async("Is it right?")))

    rollouts = Rollouts(chatml_tokenizer, [ANSWER, ANSWER], reward_fn=Judge())
    sample = await rollouts()
    assert (sample.reward, len(rollouts.server.requests)) == (1.0, 2)
    assert sample.metadata["strands_sglang"]["other_sequences"] == 0
    assert sum(sample.loss_mask) == len(rollouts.server.responses[0].body["output_ids"])


async def test_metadata_that_are_no_task_context_are_named(chatml_tokenizer):
    """C7: every sample failed, and nothing said why."""
    generate = Rollouts(chatml_tokenizer, []).generate
    given = Sample(index=7, prompt="2 + 2?", label="4", metadata={"conversation_history": "abc"})
    sample = await generate(slime_args(), given, slime_sampling_params())
    assert sample.status.name == "FAILED"
    error = sample.metadata["strands_sglang"]["error"]
    assert "sample 7" in error and "conversation_history" in error and "abc" in error
