"""`EvaluatorReward`, with the published strands-agents-evals."""

import sys
from pathlib import Path

import pytest
from strands.types.exceptions import ModelThrottledException
from strands_evals.evaluators import Contains, Equals, Evaluator, HelpfulnessEvaluator, OutputEvaluator, ToolCalled
from strands_evals.types.evaluation import NOT_APPLICABLE, EvaluationOutput

from strands_env.core import Action, TaskContext, TerminationReason
from strands_env.core.models import sglang_model_factory
from strands_env.rewards import EvaluatorReward
from strands_sglang import SGLangClient
from strands_sglang.testing import ScriptedSGLang
from support.agents import build_chatml_tokenizer, call
from support.environments import ANSWER, ASK, CALL, CalculatorEnv

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "evaluators"))
from session import SessionReward  # noqa: E402


def models_of(answers):
    """A scripted server, and a factory of models on it."""
    tokenizer = build_chatml_tokenizer()
    server = ScriptedSGLang(tokenizer, answers)
    client = server.client(max_retries=0)
    return server, sglang_model_factory(tokenizer=tokenizer, client=client)


async def run(reward, answers=(CALL, ANSWER), task=ASK):
    _, factory = models_of(list(answers))
    return await CalculatorEnv(model_factory=factory, reward_fn=reward).step(task)


@pytest.mark.parametrize(
    ("evaluator", "score"),
    [(Contains("425"), 1.0), (Contains("426"), 0.0), (ToolCalled("calculator"), 1.0), (ToolCalled("broken"), 0.0)],
)
async def test_an_evaluators_score_is_the_reward(evaluator, score):
    for reward in (EvaluatorReward(evaluator), SessionReward(evaluator)):
        result = await run(reward)
        assert result.reward.reward == score and result.reward.info["verdict"] == "judged"
        assert result.reward.info["reasons"][0]


@pytest.mark.parametrize(("truth", "score"), [(ANSWER, 1.0), ("425", 0.0)])
async def test_the_ground_truth_is_the_expected_output(truth, score):
    task = Action(message=ASK.message, task_context=TaskContext(ground_truth=truth))
    assert (await run(EvaluatorReward(Equals()), task=task)).reward.reward == score


class Gives(Evaluator):
    """Returns what it is given, or raises it; keeps the case."""

    def __init__(self, outcome):
        super().__init__()
        self.outcome = outcome

    def evaluate(self, evaluation_case):
        self.case = evaluation_case
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def row(score, **more):
    return EvaluationOutput(score=score, test_pass=True, **more)


async def test_rows_are_averaged_without_those_that_judge_nothing():
    rows = [row(1.0), row(0.25), row(0.0, label=NOT_APPLICABLE)]
    task = Action(message=ASK.message, task_context=TaskContext(id=3, expected_assertion="It calls the calculator."))
    evaluator = Gives(rows)
    assert (await run(EvaluatorReward(evaluator), task=task)).reward.reward == 0.625
    assert evaluator.case.input == ASK.message and evaluator.case.expected_assertion == "It calls the calculator."
    assert evaluator.case.actual_output == ANSWER and evaluator.case.actual_trajectory == ["calculator"]


@pytest.mark.parametrize(
    ("outcome", "is_infrastructure"),
    [
        (ConnectionError("refused"), True),
        (ModelThrottledException("busy"), True),
        (ValueError("what the judge wrote cannot be read"), False),
        ([], False),
        ([None], False),
        ([row(0.0, label=NOT_APPLICABLE)], False),
        ([row(float("nan"))], False),
    ],
)
async def test_an_evaluator_that_fails_gives_no_reward(outcome, is_infrastructure):
    result = await run(EvaluatorReward(Gives(outcome)))
    assert result.reward is None and result.reward_error
    assert result.reward_error_is_infrastructure == is_infrastructure
    assert result.termination_reason is TerminationReason.TASK_COMPLETE


async def test_an_episode_without_an_answer_gets_0_and_no_evaluator_is_asked():
    result = await run(EvaluatorReward(Gives(ConnectionError("not asked"))), ["<think>Hm.</think>"])
    assert result.reward.reward == 0.0 and result.reward.info == {"verdict": "no_answer"}


VERDICT = call("EvaluationOutput", score=0.75, test_pass=True, reason="polite")


async def test_a_judge_on_sglang_gives_a_score_and_is_not_trained():
    judge, factory = models_of([VERDICT])
    result = await run(EvaluatorReward(OutputEvaluator("It is polite.", model=factory())))
    assert result.reward.reward == 0.75 and result.reward.info["reasons"] == ["polite"]
    assert ANSWER in judge.requests[0].text and "It is polite." in judge.requests[0].text
    (tokens,) = result.observation.trajectory.sequences()
    assert "polite" not in build_chatml_tokenizer().decode(tokens.token_ids)


async def test_a_judge_whose_server_is_down_is_infrastructure():
    unreachable = sglang_model_factory(
        tokenizer=build_chatml_tokenizer(), client=SGLangClient("http://localhost:9", max_retries=0)
    )
    result = await run(EvaluatorReward(OutputEvaluator("It is polite.", model=unreachable())))
    assert result.reward is None and result.reward_error_is_infrastructure


async def test_a_judge_that_gives_no_verdict_is_an_error_of_the_answer():
    _, factory = models_of(["I would rather not."] * 8)
    result = await run(EvaluatorReward(OutputEvaluator("It is polite.", model=factory())))
    assert result.reward is None and not result.reward_error_is_infrastructure


async def test_evaluators_of_traces_read_the_session():
    judge, factory = models_of([call("HelpfulnessRating", reasoning="right", score="Very helpful")])
    result = await run(SessionReward(HelpfulnessEvaluator(model=factory())))
    assert result.reward.reward == pytest.approx(0.833)
    for text in (ASK.message, "calculator", "425", ANSWER):
        assert text in judge.requests[0].text


def test_rewards_of_different_rubrics_are_different():
    one, other = (EvaluatorReward(OutputEvaluator(rubric)).identity() for rubric in ("polite", "rude"))
    assert one != other and one == EvaluatorReward(OutputEvaluator("polite")).identity()
