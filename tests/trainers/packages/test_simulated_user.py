"""An environment with a user: the `ActorSimulator` of the published strands-agents-evals, on a second model."""

import sys
from pathlib import Path

import pytest

from strands_env.core import Action, TaskContext, TerminationReason
from strands_env.core.models import sglang_model_factory
from strands_sglang import SGLangClient
from strands_sglang.credit import training_rows
from strands_sglang.testing import ScriptedFault, ScriptedSGLang
from support.agents import build_chatml_tokenizer, call
from support.environments import CALL, Contains

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "evaluators"))
from talk import Conversation, make_reward  # noqa: E402

TOKENIZER = build_chatml_tokenizer()
TASK = Action(
    message="Hello, can you compute?", task_context=TaskContext(id="talk", ground_truth="425", goal="Know 25 * 17.")
)


def says(message=None, stop=False):
    return call("ActorResponse", reasoning="-", stop=stop, message=message)


def models_of(answers):
    server = ScriptedSGLang(TOKENIZER, answers)
    return server, sglang_model_factory(tokenizer=TOKENIZER, client=server.client(max_retries=0))


async def talk(agent_answers, user_answers):
    server, models = models_of(agent_answers)
    user_server, user_models = models_of(user_answers)
    env = Conversation(model_factory=models, reward_fn=Contains(), user_models=user_models)
    return server, user_server, env, await env.step(TASK)


AGENT = ["Yes, I can.", CALL, "25 * 17 is 425."]
USER = [says("What is 25 * 17?"), says(stop=True)]


async def test_the_user_answers_until_the_goal_is_reached():
    _, user_server, env, result = await talk(AGENT, USER)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE and result.reward.reward == 1.0
    texts = [
        (message["role"], block["text"])
        for message in result.observation.messages
        for block in message["content"]
        if "text" in block
    ]
    assert texts == [
        ("user", TASK.message),
        ("assistant", "Yes, I can."),
        ("user", "What is 25 * 17?"),
        ("assistant", "25 * 17 is 425."),
    ]
    assert "Know 25 * 17." in user_server.requests[0].text and "Yes, I can." in user_server.requests[0].text
    assert result.observation.metrics["tool_calls"] == 1 and env.user.stop


async def test_a_user_forgets_an_attempt_that_failed():
    _, models = models_of(["I try.", ScriptedFault("drop"), *AGENT])
    user_server, user_models = models_of([says("Please do."), *USER])
    env = Conversation(models, Contains(), user_models=user_models, retries=1, retry_delay=0.01)
    result = await env.step(TASK)
    assert result.observation.metrics["attempts"] == 2 and result.reward.reward == 1.0
    assert "I try." not in user_server.requests[1].text


async def test_exactly_what_the_agent_sampled_is_trained():
    server, _, _, result = await talk(AGENT, USER)
    (row,) = training_rows([result.episode(group="talk")], baseline=None)
    sampled = [token for response in server.responses for token in response.body["output_ids"]]
    assert [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask] == sampled
    prompt = TOKENIZER.decode([token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if not mask])
    assert "What is 25 * 17?" in prompt
    assert len(server.requests) == 3 and row.token_ids[: len(server.requests[-1].input_ids)] == list(
        server.requests[-1].input_ids
    )


async def test_a_user_that_is_the_agents_own_model_is_not_trained():
    server, models = models_of([AGENT[0], USER[0], *AGENT[1:], USER[1]])
    model = models()
    env = Conversation(model_factory=lambda: model, reward_fn=Contains(), user_models=lambda: model)
    result = await env.step(TASK)
    assert result.reward.reward == 1.0
    (row,) = training_rows([result.episode(group="talk")], baseline=None)
    trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert trained == [token for at in (0, 2, 3) for token in server.responses[at].body["output_ids"]]


@pytest.mark.parametrize(
    ("limits", "turns", "outcome"),
    [({"max_turns": 2}, 2, TerminationReason.MAX_TURNS_REACHED), ({}, 5, TerminationReason.TASK_COMPLETE)],
)
async def test_a_conversation_ends_at_the_agents_limit_or_the_users(limits, turns, outcome):
    server, models = models_of(["Yes."] * 5)
    _, user_models = models_of([says("And now?")] * 5)
    result = await Conversation(models, user_models=user_models, **limits).step(TASK)
    assert len(server.requests) == turns and result.termination_reason is outcome


async def test_a_conversation_is_judged_by_an_evaluator():
    _, models = models_of(AGENT)
    _, user_models = models_of(USER)
    judge, judges = models_of([call("EvaluationOutput", score=0.5, test_pass=True, reason="right, but curt")])
    result = await Conversation(models, make_reward(judges()), user_models=user_models).step(TASK)
    assert result.reward.reward == 0.5 and "25 * 17 is 425." in judge.requests[0].text


async def test_a_user_whose_server_is_down_is_an_infrastructure_error():
    _, models = models_of(AGENT)
    unreachable = sglang_model_factory(tokenizer=TOKENIZER, client=SGLangClient("http://localhost:9", max_retries=0))
    env = Conversation(model_factory=models, reward_fn=Contains(), user_models=unreachable)
    result = await env.step(TASK)
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR and result.reward is None


async def test_a_user_that_fails_otherwise_is_an_agent_error():
    _, models = models_of(AGENT)
    env = Conversation(model_factory=models, reward_fn=Contains(), user_models=lambda: "no model")
    result = await env.step(TASK)
    assert result.termination_reason is TerminationReason.AGENT_ERROR and result.reward is None
