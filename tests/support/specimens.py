"""Healthy files of every kind of ours, made by real calls on a scripted server, for checks that must accuse none."""

import asyncio
import random
from array import array

import numpy as np
from pydantic import BaseModel
from strands.hooks import AfterModelCallEvent

from strands_env.core import Action, Environment, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.eval import Evaluator
from strands_sglang import SGLangAbortedError, SGLangModel, TerminationReason, credit, termination_reason
from strands_sglang.messages.content import Picture
from strands_sglang.templates.image_tokens import ImageInputs
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang

from .agents import call, make_agent, make_tools
from .environments import Gives

WORDS = "one two three four five six seven eight nine ten eleven twelve red green blue".split()


class Verdict(BaseModel):
    """The output of a structured call."""

    verdict: str


class Writer:
    """The scripted model: answers of random words, calls of tools, and answers that end early."""

    def __init__(self, rng):
        self.rng, self.next = rng, []

    def __call__(self, request):
        """Return what was ordered, or something random."""
        if self.next:
            return self.next.pop(0)
        if self.rng.random() < 0.25:
            return call(expression=f"{self.rng.randrange(90)}+{self.rng.randrange(90)}")
        return self.text()

    def cut(self):
        """Return an answer that ends early: in a text, in a tool call, or after one."""
        said = self.rng.choice(("", self.text()))
        cut_call = call(expression=f"{self.rng.randrange(90)}+1")[: self.rng.choice((-16, None))]
        return ScriptedAnswer(self.rng.choice((self.text(), said + cut_call)), finish_reason="length")

    def text(self):
        """Return a sentence."""
        return " ".join(self.rng.choices(WORDS, k=self.rng.randrange(2, 9))) + "."


async def episode(tokenizer, seed, *, experts=False):
    """Play a random episode with constrained, auxiliary, discarded, cut, resumed and image turns.

    Returns:
        Its trajectory, and how the main agent's last call ended.
    """
    rng = random.Random(seed)
    writer = Writer(rng)
    version = rng.randrange(1, 9)
    server = ScriptedSGLang(
        tokenizer, writer, weight_version=str(version), experts=ScriptedExperts(layers=2, top_k=2) if experts else None
    )
    resumes = rng.random() < 0.5
    model = SGLangModel(
        tokenizer=tokenizer,
        client=server.client(),
        on_abort="resume" if resumes else "raise",
        return_routed_experts=experts,
        sampling_params={"max_new_tokens": rng.choice((64, 512))},
    )
    agent = make_agent(model, tools=make_tools(), system_prompt=rng.choice((None, "Be brief.", "Answer in words.")))
    retries = [rng.random() < 0.3]

    def retry(event):
        event.retry = bool(retries.pop()) if retries else False

    agent.add_hook(retry, AfterModelCallEvent)
    end = None
    for _ in range(rng.randrange(1, 5)):
        if rng.random() < 0.3:
            server.update_weights(str(version := version + 1))
        kind = rng.choice(
            ("plain", "plain", "plain", "constrained", "auxiliary", "cut", "short", "sub-agent", "rewind")
        )
        if kind == "constrained":
            writer.next = ['{"verdict": "' + rng.choice(WORDS) + '"}']
            messages = [{"role": "user", "content": [{"text": writer.text()}]}]
            async for _ in model.structured_output(Verdict, messages):
                pass
            writer.next = []
        elif kind == "auxiliary":
            await make_agent(model.auxiliary).invoke_async("Sum up: " + writer.text())
        elif kind == "sub-agent":
            await make_agent(model, tools=make_tools()).invoke_async(writer.text())
        elif kind == "rewind" and len(agent.messages) > 2:
            agent.messages[:] = agent.messages[:2]
        elif kind == "short":
            writer.next = [writer.cut()]
        elif kind == "cut":
            writer.next = [ScriptedAnswer(writer.text(), finish_reason="abort"), writer.text()]
        try:
            end = await agent.invoke_async(writer.text())
        except Exception as error:  # the agent's way to tell of an end
            end = error
            break
        writer.next = []
    trajectory = model.trajectory
    trajectory.settle(agent.messages)
    opened = [turn for turn in trajectory.turns if turn.is_answered]
    if opened and rng.random() < 0.3:
        turn = rng.choice(opened)
        turn.images = ImageInputs(
            (Picture(b"\x89PNG made up", "png", "messages[0].content[0]"),),
            array("i", turn.prompt_ids),
            {"pixel_values": np.ones((4, 3), np.float32)},
        )
    return trajectory, end


def outcome_of(trajectory, end):
    """Return how an episode ended; what a scripted server cuts off is not the end of the context."""
    reason = termination_reason(end)
    return TerminationReason.ABORTED if isinstance(end, SGLangAbortedError) else reason


def write_trajectories(folder, tokenizer, count, *, first=0):
    """Write random trajectories, each with its outcome and a reward where that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(first, first + count):
        trajectory, end = asyncio.run(episode(tokenizer, seed, experts=seed % 4 == 0))
        reason = outcome_of(trajectory, end)
        rewarded = reason in (TerminationReason.TASK_COMPLETE, TerminationReason.MAX_TOKENS_REACHED)
        trajectory.note_end(outcome=reason, reward=(seed % 7) / 4 if rewarded else None)
        trajectory.save(folder / f"episode-{seed}.safetensors")
    return folder


def write_step(folder, tokenizer, *, seed=0, groups=2, size=4, experts=True, **settings):
    """Write the folder of a training step with random episodes: `rows.safetensors` and `trajectories/`."""
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    episodes = []
    for number in range(groups * size):
        trajectory, end = asyncio.run(episode(tokenizer, seed * 1000 + number, experts=experts))
        reason = outcome_of(trajectory, end)
        failed = reason in (TerminationReason.ABORTED, TerminationReason.AGENT_ERROR)
        reward = None if failed else (number % size) / 4 + number / 100  # no two are equal
        trajectory.note_end(outcome=reason, reward=reward)
        name = f"g{number // size}-e{number % size}"
        episodes.append(credit.Episode(trajectory, reward, f"g{number // size}", name, outcome=reason))
        trajectory.save(folder / "trajectories" / f"{name}.safetensors")
    rows = credit.training_rows(episodes, **settings)
    if len(rows):
        weights = rows.weights("episode_mean", "trl:grpo")
        rng = random.Random(seed)
        for row, weight in zip(rows, weights, strict=True):
            pairs = zip(row.logprobs, row.loss_mask, strict=True)
            gap = [logprob + rng.gauss(0, 0.01) if mask else 0.0 for logprob, mask in pairs]
            object.__setattr__(row, "trainer_logprobs", [min(value, 0.0) for value in gap])
            object.__setattr__(row, "loss_weight", weight)
    rows.save(folder / "rows.safetensors")
    return folder


def write_evaluation(folder, tokenizer, *, prompts=3, samples=4):
    """Write the folder of an evaluation that keeps its trajectories and tokens."""

    async def run():
        rng = random.Random(prompts)
        writer = Writer(rng)
        server = ScriptedSGLang(tokenizer, lambda request: writer.cut() if rng.random() < 0.4 else writer.text())
        rewards = iter([n / 8 for n in range(prompts * samples)])

        async def reward():
            return next(rewards)

        def environment(action):
            factory = sglang_model_factory(client=server.client(), tokenizer=tokenizer)
            return Environment(model_factory=factory, reward_fn=Gives(reward))

        tasks = [Action(message=f"Say {WORDS[n]}.", task_context=TaskContext(id=f"p{n}")) for n in range(prompts)]
        evaluator = Evaluator(
            environment, samples, 2, True, output_path=folder, keep_trajectories=True, show_progress=False
        )
        await evaluator.run(tasks)

    asyncio.run(run())
    return folder
