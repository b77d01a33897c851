"""Faults that are planted by the formats of the files alone: the doctor finds each, and accuses no healthy specimen."""

import asyncio
import contextlib
import shutil
from random import Random

import pytest
from pydantic import BaseModel
from strands.types.exceptions import MaxTokensReachedException

from strands_env.core import Action, Environment, RewardFunction, RewardResult, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.eval import Evaluator
from strands_sglang import SGLangModel, credit
from strands_sglang.cli import main
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang
from support.agents import make_agent
from support.plants import EVALUATION_FAULTS, STEP_FAULTS, TRAJECTORY_FAULTS

PLACES = 10
"""How often each fault is planted, every time in another place."""


class Note(BaseModel):
    """The answer of a constrained call."""

    value: int


def played(tokenizer, number, *, experts):
    """One episode: turns under new weights, a fork, a constrained call, and for some an answer that is cut off."""
    random, texts = Random(number), iter(range(100))

    def answer(request):
        if "json_schema" in request.body["sampling_params"]:
            return '{"value": 3}'
        text = f"Episode {number} says {next(texts)}: " + " ".join(str(random.randrange(50)) for _ in range(8))
        is_last = "the last question" in tokenizer.decode(request.input_ids[-30:])
        return ScriptedAnswer(text, finish_reason="length" if is_last else "stop")

    layers = ScriptedExperts(layers=2, top_k=2) if experts else None
    server = ScriptedSGLang(tokenizer, answer, weight_version="3", experts=layers)
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), return_routed_experts=experts)
    agent = make_agent(model, callback_handler=None)
    for turn in range(2 + number % 3):
        server.update_weights(str(3 + turn))
        agent(f"Question {turn} of a kind?")
    if number % 3 != 1:
        other = make_agent(model, callback_handler=None)
        other.messages = [*agent.messages[:2]]
        other("Another way?")
    agent.structured_output(Note, "Which number?")
    if number % 2:
        with contextlib.suppress(MaxTokensReachedException):
            agent("Now the last question")
    return model.trajectory


def write_step(folder, tokenizer, *, experts):
    """Write a training step of two groups of three episodes, most of two rows."""
    (folder / "trajectories").mkdir(parents=True)
    episodes = []
    for number, reward in enumerate((1.0, 0.0, 0.25, 0.5, 1.0, 0.75)):
        trajectory = played(tokenizer, number, experts=experts)
        outcome = "max_tokens_reached" if number % 2 else "task_complete"
        trajectory.note_end(outcome=outcome, reward=reward)
        episodes.append(credit.Episode(trajectory, reward, f"g{number // 3}", f"e{number}", outcome=outcome))
        trajectory.save(folder / "trajectories" / f"e{number}.safetensors")
    credit.training_rows(episodes).save(folder / "rows.safetensors")


class LengthReward(RewardFunction):
    """Rewards by the last digit of the answer."""

    async def compute(self, action, step_result):
        return RewardResult(reward=int(step_result.observation.final_response[-1]) / 10)


def write_evaluation(folder, tokenizer):
    """Write an evaluation of two tasks with four samples each."""
    numbers = iter(range(100))
    server = ScriptedSGLang(tokenizer, lambda request: f"The answer is {next(numbers)}")

    def environment(action):
        return Environment(
            model_factory=sglang_model_factory(client=server.client(), tokenizer=tokenizer), reward_fn=LengthReward()
        )

    evaluator = Evaluator(environment, 4, output_path=folder, keep_trajectories=True)
    tasks = [Action(message=f"What is {n}?", task_context=TaskContext(id=f"t{n}")) for n in (1, 2)]
    asyncio.run(evaluator.run(tasks))


@pytest.fixture(scope="module")
def healthy(chatml_tokenizer, tmp_path_factory):
    """A folder per specimen: two training steps, one of them with experts; an evaluation."""
    folder = tmp_path_factory.mktemp("healthy")
    write_step(folder / "dense" / "step-000003", chatml_tokenizer, experts=False)
    write_step(folder / "experts" / "step-000003", chatml_tokenizer, experts=True)
    write_evaluation(folder / "evaluation", chatml_tokenizer)
    return folder


def examined(path, capsys):
    """Return the doctor's exit code and what it printed."""
    code = main(["doctor", str(path)])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("specimen", ["dense", "experts", "evaluation"])
def test_healthy_specimens_are_not_accused(healthy, capsys, specimen):
    code, told = examined(healthy / specimen, capsys)
    assert code == 0, told


CASES = [
    *(("dense", plant) for plant in (*TRAJECTORY_FAULTS.values(), *STEP_FAULTS.values())),
    *(("experts", plant) for plant in TRAJECTORY_FAULTS.values()),
    *(("evaluation", plant) for plant in EVALUATION_FAULTS.values()),
]


@pytest.mark.parametrize("specimen, plant", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_planted_fault_is_found(healthy, tmp_path, capsys, specimen, plant):
    random, missed, planted = Random(plant.__name__), [], 0
    for place in range(3 * PLACES):
        if planted == PLACES:
            break
        folder = tmp_path / str(place)
        shutil.copytree(healthy / specimen, folder)
        what = plant(folder, random)
        if what is None:
            continue
        planted += 1
        code, told = examined(folder, capsys)
        if code != 1:
            missed.append((what, code, told))
    assert not missed
    assert planted == PLACES or specimen == "experts" or plant.__name__ in NOT_HERE


NOT_HERE = {"rows_of_experts_missing"}
"""What a specimen without experts cannot have."""
