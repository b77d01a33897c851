"""Random programs of turns, kills, resumes, forks and edited messages, against runs that nothing interrupts.

DURABLE_PROGRAMS=10000 python -m pytest tests/property/test_durable_programs.py
"""

import asyncio
import copy
import os
import re
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from strands import tool
from strands.hooks import HookProvider
from strands.hooks.events import BeforeModelCallEvent

from strands_env.core import Action, Environment, TerminationReason, has_effect
from strands_sglang import Journal, JournalError, SGLangModel
from strands_sglang.testing import ScriptedSGLang
from support.agents import build_chatml_tokenizer, call

PROGRAMS = int(os.environ.get("DURABLE_PROGRAMS", "500"))
ASK = Action(message="Keep a list.", task_context={"id": "list"})
TOKENIZER = build_chatml_tokenizer()


class Killed(BaseException):
    """The process is gone: nothing after it is written."""


@contextmanager
def killed_after(writes):
    """Let the process die after a number of writes to its journals; None for never."""
    left, append = [writes], Journal.append

    def counted(journal, *args):
        if left[0] == 0:
            raise Killed
        append(journal, *args)
        if left[0] is not None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    with patch.object(Journal, "append", counted):
        yield


class Edits(HookProvider):
    """Changes the messages before model calls, by their number. Made twice, an edit changes nothing more."""

    def __init__(self, edits):
        self.edits = edits

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(BeforeModelCallEvent, self.edit)

    def edit(self, event):
        messages = event.agent.messages
        number = next_answer(str(messages))
        kind, mark, first = self.edits.get(number), f"edit {number}.", messages[0]["content"][0]
        if kind is None or mark in first["text"]:
            return
        first["text"] += f" {mark}"
        last = messages[-1]["content"][0]
        if kind == "in place" and "toolResult" in last:
            last["toolResult"]["content"][0]["text"] += f" {mark}"
        elif kind == "replaced" and "toolResult" in last:
            messages[-1] = copy.deepcopy(messages[-1])
            messages[-1]["content"][0]["toolResult"]["content"] = [{"text": mark}]
        elif kind == "shortened" and len(messages) >= 5:
            del messages[1:3]


class Lists(Environment):
    """Its state is a dictionary of lists; what tools return depends on it."""

    def __init__(self, model, edits, **kwargs):
        super().__init__(lambda: model, None, **kwargs)
        self.edits, self.world = edits, None

    async def reset(self):
        self.world = {"items": [], "named": {}}

    async def save_state(self):
        return copy.deepcopy(self.world)

    async def load_state(self, state):
        self.world = copy.deepcopy(state)

    def identity(self):
        return {"class": "Lists"}

    def get_hooks(self):
        return [Edits(self.edits)]

    def get_tools(self):
        @tool
        async def push(item: int) -> str:
            """Append an item.

            Args:
                item: The item.
            """
            self.world["items"].append(item)
            return f"items {self.world['items']}"

        @has_effect("idempotent")
        @tool
        async def put(label: str, item: int) -> str:
            """Name an item.

            Args:
                label: The name.
                item: The item.
            """
            self.world["named"][label] = item
            return f"named {label}"

        @has_effect("pure")
        @tool
        async def look() -> str:
            """Look at all items."""
            return str(self.world)

        return [push, put, look]


def next_answer(text):
    """Return the number of the next answer: each begins with its own."""
    return max(map(int, re.findall(r"Answer (\d+)\.", text)), default=-1) + 1


class Runner:
    """Runs episodes whose answers depend on their number, and on the variant from which they were forked."""

    def __init__(self, program):
        self.program = program
        self.variants = {0: 0}  # from which number on, by number

    def answer(self, request):
        number = next_answer(request.text)
        variant = max((first, variant) for first, variant in self.variants.items() if first <= number)[1]
        turns = self.program["turns"]
        if number >= len(turns):
            return f"Answer {number}. Done {variant}."
        calls = []
        for kind, item in turns[number]:
            arguments = {"push": {"item": item + variant}, "put": {"label": f"n{item % 2}", "item": item + variant}}
            calls.append(call(kind, **arguments.get(kind, {})))
        return f"Answer {number}. " + "".join(calls)

    def environment(self, folder):
        server = ScriptedSGLang(TOKENIZER, self.answer)
        model = SGLangModel(tokenizer=TOKENIZER, client=server.client(), sampling_params={"max_new_tokens": 200})
        return Lists(model, self.program["edits"], journal=folder, **self.program["settings"])


def facts_of(result):
    """What two runs of the same program have in common."""
    trajectory = result.observation.trajectory
    rows = [(row.token_ids, row.loss_mask, row.logprobs) for row in trajectory.sequences()]
    counts = [result.observation.metrics[name] for name in ("model_calls", "tool_iterations", "tool_calls")]
    texts = [
        (
            next(iter(block)),
            block.get("text"),
            block.get("toolResult", {}).get("content"),
            block.get("toolUse", {}).get("input"),
        )
        for message in result.observation.messages
        for block in message["content"]
    ]
    return result.termination_reason, rows, counts, texts


steps = st.one_of(
    st.tuples(st.just("kill"), st.integers(1, 30)),
    st.tuples(st.just("fork"), st.integers(0, 5), st.integers(1, 3), st.none() | st.integers(1, 25)),
)
programs = st.fixed_dictionaries(
    {
        "turns": st.lists(
            st.lists(st.tuples(st.sampled_from(["push", "put", "look"]), st.integers(0, 9)), min_size=1, max_size=3),
            max_size=4,
        ),
        "edits": st.dictionaries(st.integers(0, 4), st.sampled_from(["in place", "replaced", "shortened"]), max_size=2),
        "settings": st.fixed_dictionaries(
            {
                "fork_points": st.sampled_from(["all", "all", 2, "none"]),
                "max_tool_iterations": st.sampled_from([None, None, 2]),
                "max_tool_calls": st.sampled_from([None, None, 3]),
                "max_turns": st.sampled_from([None, None, 3]),
            }
        ),
        "steps": st.lists(steps, min_size=1, max_size=4),
    }
)


class Oracle:
    """What is left of runs without journals, which nothing interrupts."""

    def __init__(self, program):
        self.program, self.known = program, {}

    async def run(self, variants):
        key = str(variants)
        if key not in self.known:
            runner = Runner(self.program)
            runner.variants = dict(variants)
            environment = runner.environment(None)
            result = await environment.step(ASK)
            self.known[key] = facts_of(result), environment.world
        return self.known[key]


async def check(program, folder):
    """Run a program, and compare all that it leaves with the oracle."""
    oracle, runner = Oracle(program), Runner(program)
    keeps_all = program["settings"]["fork_points"] == "all"
    runs = []  # result and variants of each finished run
    number = 0

    async def finish(path, variants):
        """Resume a run until it ends, and compare it."""
        runner.variants = dict(variants)
        environment = runner.environment(folder)
        try:
            (result,) = await environment.resume(path)
        except JournalError as error:
            assert "no episode has begun" in str(error)
            return
        await compare(result, environment, variants)

    async def compare(result, environment, variants):
        if result.termination_reason is TerminationReason.INTERRUPTED:
            assert "must not run twice" in result.error
            return
        assert result.reward is None and result.error is None, result.error
        facts, world = await oracle.run(variants)
        found = facts_of(result)
        for name, one, other in zip(("outcome", "rows", "counts", "texts"), found, facts, strict=True):
            assert one == other, name
        if environment.world is not None:  # None if it had ended
            assert environment.world == world
        runs.append((result, variants))

    kills = [step for step in program["steps"] if step[0] == "kill"]
    path = folder / "first.journal"
    environment = runner.environment(path)
    with killed_after(kills[0][1] if kills else None), suppress(Killed):
        result = await environment.step(ASK)
        await compare(result, environment, {0: 0})
    for kill in kills[1:]:
        environment = runner.environment(path)
        with killed_after(kill[1]), suppress(Killed, JournalError):
            await environment.resume(path)
    if path.exists():
        await finish(path, {0: 0})
    for kind, *arguments in program["steps"]:
        if kind != "fork" or not runs:
            continue
        at, k, kill = arguments
        result, variants = runs[at % len(runs)]
        number += 1
        turns = result.observation.trajectory.turns
        position = at % len(turns)
        forked = {first: variant for first, variant in variants.items() if first < position} | {position: number}
        runner.variants = dict(forked)
        environment, before = runner.environment(folder), set(folder.glob("*.journal"))
        source = result if at % 2 else result.journal.path
        try:
            with killed_after(kill), suppress(Killed):
                results = await environment.fork(source, turns[position].index, k)
                assert len(results) == k
                facts, _ = await oracle.run(forked)
                assert [facts_of(sibling) for sibling in results] == [facts] * k
                await compare(results[-1], environment, forked)
                continue
        except JournalError as error:
            assert "must not run twice" in str(error) and not keeps_all
            continue
        for path in sorted(set(folder.glob("*.journal")) - before):
            await finish(path, forked)


@pytest.mark.timeout(max(600, PROGRAMS))
@settings(max_examples=PROGRAMS, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(program=programs)
@example(
    program={  # a hook removes the message of a call that runs again
        "edits": {0: "in place", 4: "shortened"},
        "settings": {"fork_points": "none", "max_tool_iterations": None, "max_tool_calls": None, "max_turns": None},
        "steps": [("kill", 22), ("kill", 16), ("fork", 4, 3, 7), ("fork", 0, 2, None)],
        "turns": [[("put", 0), ("put", 0)], [("look", 0)], [("put", 0)], [("look", 0), ("look", 0)]],
    }
)
def test_programs_of_turns_kills_forks_and_edits_leave_what_uninterrupted_runs_leave(program):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(program, Path(folder)))
