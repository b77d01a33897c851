"""What a trajectory records, for which agent, and how it is stored."""

import asyncio
import base64
import concurrent.futures
import contextlib
import copy
import dataclasses
import gc
import importlib
import inspect
import json
import math
import multiprocessing
import os
import pickle
import pkgutil
import random
import re
import shutil
import threading
import weakref
import zlib
from array import array
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.numpy import load, load_file, save, save_file
from strands import tool
from strands.types.exceptions import MaxTokensReachedException
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import strands_env
import strands_sglang
from strands_env.cli import main
from strands_env.core import Action, Environment, TaskContext
from strands_env.eval import Evaluator, read_results
from strands_sglang import (
    Rollout,
    Segment,
    SGLangContextLengthError,
    SGLangHTTPError,
    SGLangModel,
    SGLangThrottledError,
    Token,
    TokenizerMismatchError,
    TokenManager,
    Trajectory,
    TurnStatus,
)
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.messages import fingerprint
from strands_sglang.messages.content import Picture
from strands_sglang.protocol.generation import Generation, SamplingMask, VersionSpan, to_json
from strands_sglang.protocol.wire import EncodedIds
from strands_sglang.reasons import Reason
from strands_sglang.templates.image_tokens import ImageInputs
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from strands_sglang.tool_parsers import HermesToolParser
from strands_sglang.trajectory.storage import TrajectoryFileError
from support.agents import LetterTokenizer, assistant, call, make_agent, make_tools, statuses, user
from support.environments import StubEnvironment, lines, tasks
from support.recorder import Recorder, generation

# === trajectory ===


QUESTION = [user("q")]
FOLLOW_UP = [*QUESTION, assistant("a"), user("r")]
AFTER_OK = [*QUESTION, assistant("ok"), user("r")]  # what follows an answer of `Recorder`


@pytest.fixture
def recorder():
    return Recorder()


def test_a_conversation_that_grows_is_one_sequence(recorder):
    history = []
    for i in range(30):
        history += [user(f"q{i}")]
        turn = recorder.call(history, f"a{i}")
        history += [assistant(f"a{i}")]
        assert turn.reason == ("opens the first sequence" if i == 0 else f"extends call {i - 1} with 1 new message(s)")
        assert turn.prompt_tokens == 4 * i + 2

    (sequence,) = recorder.trajectory.sequences()
    assert sequence.token_ids == list(range(120))
    assert sequence.loss_mask == [0, 0, 1, 1] * 30
    assert recorder.trajectory.latest_main_sequence().token_ids == sequence.token_ids


def test_the_opening_prompt_can_be_seen_before_there_is_an_answer(recorder):
    turn = recorder.ask(QUESTION)
    assert recorder.trajectory.latest_main_sequence().token_ids == list(turn.prompt_ids)
    recorder.trajectory.fail(turn, ValueError("x"))
    assert recorder.trajectory.latest_main_sequence().segments[0].token_ids == list(turn.prompt_ids)
    assert recorder.trajectory.sequences() == []


def test_an_unanswered_observation_is_left_out(recorder):
    first = recorder.call(QUESTION, "a")
    recorder.trajectory.fail(recorder.ask(FOLLOW_UP), ValueError("context is full"))
    assert recorder.trajectory.latest_main_sequence().token_ids == first.token_ids()


def test_a_retry_of_a_failed_call_replaces_it(recorder):
    for _ in range(3):
        recorder.trajectory.fail(recorder.ask(QUESTION), ConnectionError())
    turn = recorder.call(QUESTION)
    assert recorder.trajectory.turns == [turn]
    assert turn.status is TurnStatus.ANSWERED


def test_a_cut_turn_keeps_its_tokens_and_is_never_extended(recorder):
    turn = recorder.ask(QUESTION)
    recorder.trajectory.cut(turn, generation(7, 8, finish="abort"), RuntimeError("abort"))
    assert turn.status is TurnStatus.CUT
    assert recorder.trajectory.latest_main_sequence().segments[-1].token_ids == [7, 8]
    assert recorder.call([user("q"), assistant("partial"), user("r")]).parent is None


def cut_turn(recorder, *tokens, agent=None, prompt=(1, 2), messages=None):
    turn = recorder.ask(messages or QUESTION, agent=agent, prompt=list(prompt))
    recorder.trajectory.cut(turn, generation(*tokens, finish="abort"), RuntimeError("abort"))
    return turn


def sampled_in(trajectory):
    """The sampled tokens that are trained, sequence by sequence."""
    return [
        [token_id for token_id, mask in zip(sequence.token_ids, sequence.loss_mask, strict=True) if mask]
        for sequence in trajectory.sequences()
    ]


def test_a_cut_turn_comes_after_the_answered_ones(recorder):
    cut_turn(recorder, 7, 8)
    answered = recorder.call([user("q"), assistant("partial"), user("r")])
    assert sampled_in(recorder.trajectory) == [list(answered.output_ids), [7, 8]]


def test_a_resuming_call_replaces_the_cut_turn(recorder):
    turn = cut_turn(recorder, 7, 8)
    recorder.trajectory.resume(turn)
    recorder.trajectory.resume(turn)  # it waits already
    assert (turn.status, turn.waits_to_go_on) == (TurnStatus.CUT, True)
    assert "[cut, waits to be resumed]" in recorder.trajectory.explain()
    assert sampled_in(recorder.trajectory) == [[7, 8]]  # until it continues, and if it never does
    again = recorder.ask(QUESTION, prompt=[1, 2])
    assert recorder.trajectory.turns == [again]
    assert again.resumes is turn.generation


@pytest.mark.parametrize("call", [{"prompt": [1, 3]}, {"prompt": [1, 2], "constrained": True}])
def test_a_cut_turn_stays_if_a_call_cannot_resume_it(recorder, call):
    """Tokens never follow other tokens than those they were sampled after, and are never lost."""
    turn = cut_turn(recorder, 7, 8)
    recorder.trajectory.resume(turn)
    other = recorder.ask(QUESTION, **call)
    assert other.resumes is None
    assert recorder.trajectory.turns == [turn, other]
    assert sampled_in(recorder.trajectory) == [[7, 8]]


def test_a_resumed_call_that_fails_keeps_its_earlier_tokens(recorder):
    recorder.trajectory.resume(cut_turn(recorder, 7, 8))
    for _ in range(2):
        recorder.trajectory.fail(recorder.ask(QUESTION, prompt=[1, 2]), ConnectionError())
        assert sampled_in(recorder.trajectory) == [[7, 8]]
    assert recorder.ask(QUESTION, prompt=[1, 2]).resumes.output_ids.tolist() == [7, 8]


def test_agents_cut_at_the_same_question_resume_their_tokens(recorder):
    """Agents that are known by earlier answers, in any order."""
    agents = ["one", "two", "three"]
    for agent in agents:
        recorder.call(QUESTION, agent=agent)
    turns = {agent: cut_turn(recorder, 100 + i, agent=agent, messages=AFTER_OK) for i, agent in enumerate(agents)}
    for turn in turns.values():
        recorder.trajectory.resume(turn)
    for agent in reversed(agents):
        again = recorder.ask(AFTER_OK, agent=agent, prompt=[1, 2])
        assert (again.resumes, again.parent) == (turns[agent].generation, turns[agent].parent)


def test_agents_made_again_resume_cut_turns_in_order(recorder):
    """A restarted rollout has new agents, and Strands forgets an agent whose first call fails."""
    for agent in ("one", "two"):
        recorder.call(QUESTION, agent=agent)
    for agent, token in (("one", 100), ("two", 101)):
        recorder.trajectory.resume(cut_turn(recorder, token, agent=agent, messages=AFTER_OK))
    again = [recorder.ask(AFTER_OK, agent=f"another {i}", prompt=[1, 2]) for i in range(2)]
    assert [turn.resumes.output_ids.tolist() for turn in again] == [[100], [101]]
    assert [turn.parent.agent for turn in again] == ["one", "two"]
    assert sampled_in(recorder.trajectory) != []


def test_an_agent_that_was_not_cut_resumes_no_other_turn(recorder):
    for agent in ("one", "two"):
        recorder.call(QUESTION, agent=agent)
    turn = cut_turn(recorder, 100, agent="one", messages=AFTER_OK)
    recorder.trajectory.resume(turn)
    assert recorder.ask(AFTER_OK, agent="two", prompt=[1, 2]).resumes is None
    assert recorder.ask(AFTER_OK, agent="one", prompt=[1, 2]).resumes is turn.generation


def test_cut_attempts_of_one_agent_resume_in_order(recorder):
    attempts = [recorder.ask(QUESTION, agent="one", prompt=[1, 2]) for _ in range(3)]
    for i in (2, 0, 1):
        recorder.trajectory.cut(attempts[i], generation(100 + i, finish="abort"), RuntimeError("abort"))
        recorder.trajectory.resume(attempts[i])
    again = [recorder.ask(QUESTION, agent="one", prompt=[1, 2]) for _ in range(3)]
    assert [turn.resumes.output_ids.tolist() for turn in again] == [[100], [101], [102]]


def test_another_agents_call_keeps_a_failed_one_recorded(recorder):
    failed = recorder.ask(QUESTION, agent="one")
    recorder.trajectory.fail(failed, ConnectionError())
    answered = recorder.call(QUESTION, agent="two")
    assert recorder.trajectory.turns == [failed, answered]
    again = recorder.call(QUESTION, agent="one")
    assert recorder.trajectory.turns == [answered, again]


def test_an_abort_before_the_first_token_is_a_failure(recorder):
    turn = recorder.ask(QUESTION)
    recorder.trajectory.cut(turn, generation(finish="abort"), RuntimeError("abort"))
    assert turn.status is TurnStatus.FAILED


@pytest.mark.parametrize(
    ("messages", "parts", "reason"),
    [
        ([user("q"), assistant("b"), user("r")], {}, "message 1 (assistant) is not the recorded one (assistant)"),
        ([user("p"), assistant("a"), user("r")], {}, "message 0 (user) is not the recorded one (user)"),
        ([user("q"), user("r")], {}, "message 1 (user) is not the recorded one (assistant)"),
        (QUESTION, {}, "it stops after message 0, before the recorded answer"),
        (FOLLOW_UP, {"system prompt": "new"}, "the system prompt changed"),
    ],
)
def test_anything_but_an_exact_prefix_opens_a_sequence(recorder, messages, parts, reason):
    recorder.call(QUESTION, "a")
    turn = recorder.call(messages, **parts)
    assert turn.parent is None
    assert reason in turn.reason
    assert "compared with call 0" in turn.reason


def test_forks_share_their_prefix_and_train_it_once(recorder):
    recorder.call(QUESTION, "a")
    recorder.call(FOLLOW_UP)
    recorder.call([user("q"), assistant("a"), user("s")])
    first, second = recorder.trajectory.sequences()
    assert first.token_ids[:4] == second.token_ids[:4]
    assert first.loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]
    assert second.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1]
    # The latest sequence alone, with its own full mask.
    assert recorder.trajectory.latest_main_sequence().loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_fork_names_the_difference_from_the_earlier_call(recorder):
    recorder.call(QUESTION, "a")
    recorder.call(FOLLOW_UP, "b")
    fork = recorder.call([user("q"), assistant("a"), user("EDITED"), assistant("b"), user("s")])
    assert fork.reason.startswith("forks after call 0: message 2 (user) is not the recorded one (user)")


def test_failures_of_two_calls_are_kept_apart(recorder):
    one, two = recorder.ask([user("one")]), recorder.ask([user("two")])
    recorder.trajectory.fail(one, ConnectionError())
    recorder.trajectory.fail(two, ConnectionError())
    again = recorder.call([user("one")])
    assert recorder.trajectory.turns == [two, again]


def test_a_call_from_outside_the_loop_is_left_aside(recorder):
    first = recorder.call(QUESTION, "a")
    recorder.call([user("q"), assistant("a"), user("judge it")], auxiliary=True)
    assert recorder.trajectory.latest_main_sequence().token_ids == first.token_ids()
    assert first.status is TurnStatus.ANSWERED
    assert [sequence.token_ids for sequence in recorder.trajectory.sequences()] == [first.token_ids()]
    main, judge = recorder.trajectory.sequences(auxiliary=True)
    assert (main.loss_mask, judge.loss_mask) == ([0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1])


def test_later_calls_without_an_agent_are_auxiliary(recorder):
    main = recorder.call(QUESTION, agent="A")
    after = recorder.call([user("summarize that")])
    assert [turn.is_auxiliary for turn in (main, after)] == [False, True]
    assert [sequence.token_ids for sequence in recorder.trajectory.sequences()] == [main.token_ids()]
    assert recorder.trajectory.latest_main_sequence().token_ids == main.token_ids()


def test_calls_before_the_first_agent_stay_trained(recorder, caplog):
    history = [user("my own loop"), assistant("a"), user("r")]
    recorder.call(history[:1], "a")
    helper = recorder.call([user("a helper's")], auxiliary=True)
    recorder.call(history)
    (before,) = recorder.trajectory.sequences()
    assert not caplog.records
    for agent in "AB":
        recorder.call(QUESTION, agent=agent)
    assert recorder.trajectory.sequences()[0].loss_mask == before.loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [turn for turn in recorder.trajectory.turns if turn.is_auxiliary] == [helper]
    (record,) = caplog.records
    assert "calls=<2>" in record.getMessage()


def test_a_caller_can_keep_a_call_without_an_agent_trained(recorder):
    recorder.call(QUESTION, agent="A")
    own = recorder.call([user("my own loop")], auxiliary=False)
    assert not own.is_auxiliary
    assert len(recorder.trajectory.sequences()) == 2


# --- settle ---


def test_another_agents_answers_stay_as_they_are(recorder):
    turns = {agent: recorder.call(QUESTION, agent, agent=agent) for agent in "AB"}
    recorder.trajectory.settle([user("q"), assistant("A")])
    assert (turns["A"].status, turns["B"].status) == (TurnStatus.FINAL, TurnStatus.ANSWERED)
    recorder.trajectory.settle([user("q"), assistant("B")])
    assert (turns["A"].status, turns["B"].status) == (TurnStatus.FINAL, TurnStatus.FINAL)


def test_an_answer_continued_by_another_agent_is_not_judged(recorder):
    recorder.call(QUESTION, "a", agent="A")
    history = FOLLOW_UP
    kept = recorder.call(history, "b", agent="A")
    thrown = recorder.call(history, "c", agent="B")
    recorder.trajectory.settle([*history, assistant("Cancelled by user")])  # B's
    assert kept.status is TurnStatus.ANSWERED
    recorder.trajectory.settle([*history, assistant("b")])
    assert (kept.status, thrown.status) == (TurnStatus.FINAL, TurnStatus.ANSWERED)


def test_an_agent_that_ends_takes_no_token_from_another_s_request(recorder, monkeypatch):
    recorder.call([user("a")], agent="one")
    turn = recorder.ask([user("a"), assistant("ok"), user("b")], agent="one")
    encode = EncodedIds.encode

    def encode_while_another_thread_settles(*args):
        recorder.trajectory.settle([user("c")])
        return encode(*args)

    monkeypatch.setattr(EncodedIds, "encode", encode_while_another_thread_settles)
    encoded = turn.encoded_ids(vocab_size=100)
    assert json.loads(b"[" + b",".join(encoded.pieces) + b"]") == turn.token_ids()


def test_shortened_messages_settle_nothing(recorder):
    turn = recorder.call(QUESTION, "a", agent="A")
    recorder.trajectory.settle([user("another"), assistant("a")])
    assert turn.status is TurnStatus.ANSWERED


def test_a_turn_with_a_dropped_token_ends_its_own_sequence(recorder):
    first = recorder.call(QUESTION, "a")
    after = recorder.call(FOLLOW_UP, "b", kept=1)
    assert after.prompt_tokens == len(after.token_ids()) - len(after.output_ids)
    one, other = recorder.trajectory.sequences()
    assert (one.token_ids, one.loss_mask) == (first.token_ids(), [0, 0, 1, 1])
    assert (other.token_ids, other.loss_mask) == ([0, 1, 2, 4, 5, 6, 7], [0, 0, 0, 0, 0, 1, 1])
    assert after.token_ids() == other.token_ids


def test_the_explanation_covers_every_call(recorder):
    recorder.call(QUESTION, "a")
    recorder.call(FOLLOW_UP)
    recorder.call([user("edited")])
    recorder.trajectory.fail(recorder.ask([user("never answered")]), RuntimeError("server gone"))
    lines = recorder.trajectory.explain().splitlines()
    assert lines[0] == "call 0 opens the first sequence (2 prompt and 2 sampled tokens, stop) [committed]"
    assert lines[1].startswith("  call 1 extends call 0 with 1 new message(s)")
    assert "message 0 (user) is not the recorded one" in lines[2]
    assert lines[3].endswith("[failed]: RuntimeError: server gone")


def test_explanations_indent_only_forks(recorder):
    history = []
    for i in range(100):
        history.append(user(f"q{i}"))
        recorder.call(history, f"a{i}")
        history.append(assistant(f"a{i}"))
    recorder.call([*history[:4], user("another way")])
    recorder.call([user("something else")])
    lines = recorder.trajectory.explain().splitlines()
    steps = [len(line) - len(line.lstrip()) for line in lines]
    assert steps == [0, *[2] * 99, 4, 0]


def test_the_explanation_has_the_reasons_of_discards(recorder):
    for messages in (QUESTION, QUESTION, [user("q"), user("Think again.")]):
        recorder.call(messages, "a", agent="A")
    recorder.trajectory.settle([user("q"), user("Think again.")])
    notes = [turn.note for turn in recorder.trajectory.turns]
    assert notes == [
        "the agent asked the same again",
        "message 1 (user) replaced it",
        "the agent's messages end before it",
    ]
    assert all(note in line for note, line in zip(notes, recorder.trajectory.explain().splitlines(), strict=True))


@pytest.mark.parametrize("first_end", ["cut", "discarded"])
def test_the_main_sequence_is_the_attempt_that_the_agent_kept(recorder, first_end):
    if first_end == "cut":
        recorder.trajectory.cut(recorder.ask(QUESTION), generation(90, 91, finish="abort"), RuntimeError("abort"))
    else:
        recorder.call(QUESTION, "thrown away by a hook")
    kept = recorder.call(QUESTION, "kept")
    assert recorder.trajectory.latest_main_sequence().token_ids == kept.token_ids()
    after = recorder.call([user("q"), assistant("kept"), user("r")])
    assert recorder.trajectory.latest_main_sequence().token_ids == after.token_ids()


@pytest.mark.parametrize("kept", "abc")
def test_the_main_sequence_ends_with_the_kept_answer(recorder, kept):
    tries = {answer: recorder.call(QUESTION, answer, agent="A") for answer in "abc"}
    recorder.trajectory.settle([user("q"), assistant(kept)])
    main = recorder.trajectory.latest_main_sequence()
    assert (main.token_ids, main.loss_mask) == (tries[kept].token_ids(), [0, 0, 1, 1])


def test_without_kept_answers_the_main_sequence_trains_nothing(recorder):
    turn = recorder.call(QUESTION, "a", agent="A")
    recorder.trajectory.settle([user("q"), assistant("Cancelled by user")])
    main = recorder.trajectory.latest_main_sequence()
    assert (main.token_ids, main.loss_mask) == (turn.token_ids(), [0, 0, 0, 0])
    assert recorder.trajectory.sequences() == []


def test_an_aborted_attempt_does_not_claim_shared_history(recorder):
    recorder.call(QUESTION, "a")
    history = FOLLOW_UP
    recorder.trajectory.cut(recorder.ask(history), generation(90, 91, finish="abort"), RuntimeError("abort"))
    recorder.call(history, "b")
    kept, aborted = recorder.trajectory.sequences()
    assert kept.loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]
    assert aborted.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1]


def test_segments_keep_weight_version_and_finish_reason(recorder):
    turn = recorder.ask(QUESTION)
    versions = (VersionSpan("v6", 0, 2), VersionSpan("v7", 2, 3))
    answer = Generation(
        array("i", [1, 2, 3]), None, finish_type="length", weight_version="v7", weight_versions=versions
    )
    recorder.trajectory.answer(turn, answer, assistant("a"))
    sequence = recorder.trajectory.latest_main_sequence()
    prompt, response = sequence.segments
    assert (response.weight_version, response.finish_reason) == ("v7", "length")
    assert (prompt.weight_version, prompt.finish_reason) == (None, None)
    assert response.weight_versions == versions
    assert sequence.policy_versions == [*[None] * len(prompt), "v6", "v6", "v7"]


def test_tokens_kept_by_a_fork_keep_their_versions(recorder):
    turn = recorder.ask(QUESTION)
    versions = (VersionSpan("v6", 0, 2), VersionSpan("v7", 2, 3))
    answer = Generation(array("i", [1, 2, 3]), None, finish_type="stop", weight_versions=versions)
    recorder.trajectory.answer(turn, answer, assistant("a"))
    kept = recorder.ask(FOLLOW_UP, kept=2)
    recorder.trajectory.answer(kept, Generation(array("i", [4]), None, finish_type="stop"), assistant("b"))
    forked = recorder.trajectory.sequences()[-1]
    assert [version for version in forked.policy_versions if version] == ["v6", "v6"]


def test_observations_have_logprob_zero_and_the_opening_none(recorder):
    recorder.call(QUESTION, "a")
    recorder.call(FOLLOW_UP)
    sequence = recorder.trajectory.latest_main_sequence()
    assert sequence.logprobs == [None, None, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xyz"), st.sampled_from("ab")), max_size=12))
def test_any_rewriting_trains_each_token_once(calls):
    recorder = Recorder()
    history = []
    for kept, question, answer in calls:
        history = [*history[: 2 * kept], user(question)]
        turn = recorder.call(history, answer)
        # What the model is given is what was recorded for the conversation that it extends.
        known = turn.parent.token_ids() if turn.parent is not None else []
        assert turn.token_ids()[: len(known)] == known
        history.append(assistant(answer))

    trained = [
        token.token_id for sequence in recorder.trajectory.sequences() for token in sequence.tokens if token.loss_mask
    ]
    sampled = [token_id for turn in recorder.trajectory.turns for token_id in turn.output_ids]
    assert sorted(trained) == sorted(sampled)


# === episodes on one model object: each has a trajectory of its own ===


async def test_a_task_that_outlives_its_episode_joins_the_running_one(rollout, caplog):
    """A worker that a tool starts in the first episode serves later ones."""

    def answer(request):
        is_first = "question" in request.text and "An answer." not in request.text
        return call("ask_expert", q="x") if is_first else "An answer."

    _, model = rollout(answer)
    queue = asyncio.Queue()
    workers = []

    async def work():
        while True:
            question, answered = await queue.get()
            expert = make_agent(model, system_prompt="You know.")
            answered.set_result(str(await expert.invoke_async(question)))

    @tool
    async def ask_expert(q: str) -> str:
        """Ask.

        Args:
            q: What.
        """
        if not workers:
            workers.append(asyncio.create_task(work()))
        answered = asyncio.get_running_loop().create_future()
        await queue.put((q, answered))
        return await answered

    trajectories = []
    for number in range(3):
        with model.episode() as trajectory:
            await make_agent(model, [ask_expert]).invoke_async(f"question {number}")
        trajectories.append(trajectory)
    workers[0].cancel()
    assert [len(trajectory) for trajectory in trajectories] == [3, 3, 3]
    assert len(model.trajectory) == 0
    assert not caplog.records


@pytest.mark.parametrize("running", [0, 2])
async def test_an_orphaned_task_is_recorded_outside_if_ambiguous(rollout, caplog, running):
    """The warning is logged once."""
    _, model = rollout(lambda request: "ok")
    may_ask = asyncio.Event()

    async def late():
        await may_ask.wait()
        for _ in range(2):
            await make_agent(model).invoke_async("late")

    with model.episode() as ended:
        task = asyncio.create_task(late())
        await make_agent(model).invoke_async("in time")
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(model.episode()) for _ in range(running)]
        may_ask.set()
        await task
    assert [len(trajectory) for trajectory in (ended, *others, model.trajectory)] == [1, *[0] * running, 2]
    (record,) = caplog.records
    assert "after its own had ended" in record.getMessage()


async def test_a_task_that_outlives_an_inner_episode_joins_the_outer(rollout, caplog):
    _, model = rollout(lambda request: "ok")
    may_ask = asyncio.Event()

    async def late():
        await may_ask.wait()
        assert model.trajectory is outer
        await make_agent(model).invoke_async("late")

    with model.episode() as outer:
        with model.episode() as inner:
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        with model.episode() as third:
            may_ask.set()
            await task
    assert [len(trajectory) for trajectory in (outer, inner, third)] == [1, 0, 0]
    assert not caplog.records


async def test_copied_agents_in_threads_stay_in_their_episodes(rollout):
    """Agents that are restored from one snapshot have one state."""
    _, model = rollout(lambda request: "ok")
    saved = make_agent(model)
    await saved.invoke_async("hello")
    snapshot = saved.take_snapshot(preset="session")
    outside = len(model.trajectory)

    async def episode(number, begun, others):
        with model.episode() as trajectory:
            copy = make_agent(model)
            copy.load_snapshot(snapshot)
            await copy.invoke_async(f"first of {number}")
            begun.set()
            await asyncio.gather(*(other.wait() for other in others))
            await asyncio.get_running_loop().run_in_executor(None, copy, f"second of {number}")
        return trajectory

    begun = [asyncio.Event() for _ in range(3)]
    trajectories = await asyncio.gather(*(episode(i, event, begun) for i, event in enumerate(begun)))
    assert [[turn.parent is None for turn in trajectory.turns] for trajectory in trajectories] == [[True, False]] * 3
    assert len({turn.agent for trajectory in trajectories for turn in trajectory.turns}) == 3
    assert len(model.trajectory) == outside


async def test_an_ended_episode_is_not_kept_alive(rollout):
    """Contexts of tasks that were started inside it must not keep it alive."""
    _, model = rollout(lambda request: "ok")
    with model.episode() as trajectory:
        await make_agent(model).invoke_async("hi")
        alive = asyncio.create_task(asyncio.Event().wait())
        await asyncio.sleep(0)
    ended = weakref.ref(trajectory)
    del trajectory
    gc.collect()
    assert ended() is None
    alive.cancel()


async def test_an_episode_can_be_left_in_another_task(rollout):
    """Asynchronous fixtures and generators do this."""
    _, model = rollout(lambda request: "ok")

    async def fixture():
        with model.episode() as trajectory:
            await make_agent(model).invoke_async("hi")
            yield trajectory

    begun = fixture()
    trajectory = await asyncio.create_task(anext(begun))
    await asyncio.create_task(begun.aclose())
    with model.episode() as other:
        await make_agent(model).invoke_async("hi")
    assert (len(trajectory), len(other), len(model.trajectory)) == (1, 1, 0)


def test_episodes_may_end_in_another_order_than_they_began(rollout):
    _, model = rollout(lambda request: "ok")
    first, second = model.episode(), model.episode()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    make_agent(model)("hi")
    second.__exit__(None, None, None)
    make_agent(model)("hi")
    assert (len(one), len(two), len(model.trajectory)) == (0, 1, 1)


async def test_calls_without_agent_or_context_are_recorded_outside(rollout, caplog):
    """The agent whose history it begins with would be a guess."""
    _, model = rollout(lambda request: f"answer {request.index}")

    async def summary(messages):
        async for _ in model.stream([*messages, user("Summarize.")]):
            pass

    with model.episode() as trajectory:
        agent = make_agent(model)
        await agent.invoke_async("the same question")
        thread = threading.Thread(target=lambda: asyncio.run(summary(agent.messages)))
        thread.start()
        thread.join()
    assert (len(trajectory), len(model.trajectory)) == (1, 1)
    assert len(caplog.records) == 1


async def test_agents_without_context_are_recorded_outside(rollout, caplog):
    _, model = rollout(lambda request: "ok")
    with model.episode() as trajectory:
        await asyncio.to_thread(make_agent(model), "with the context")
        assert not caplog.records
        for _ in range(2):
            await asyncio.get_running_loop().run_in_executor(None, make_agent(model), "without it")
    assert (len(trajectory), len(model.trajectory)) == (1, 2)
    (record,) = caplog.records
    assert "asyncio.to_thread" in record.getMessage()


async def test_a_reset_inside_an_episode_is_rejected(rollout):
    _, model = rollout(["ok"])
    with model.episode() as trajectory:
        with pytest.raises(RuntimeError, match="inside `with model.episode"):
            model.reset()
        await make_agent(model).invoke_async("hi")
    assert len(trajectory) == 1


async def test_an_episodes_record_stays_readable(rollout):
    server, model = rollout(["ok", "fine"])
    with model.episode() as trajectory:
        await make_agent(model).invoke_async("hi")
    await make_agent(model).invoke_async("outside")
    assert (len(trajectory), len(model.trajectory)) == (1, 1)
    (sequence,) = trajectory.sequences()
    assert sequence.token_ids == server.requests[0].input_ids + server.responses[0].body["output_ids"]


# === tokens ===


token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)


def test_segments_are_sequences_of_tokens():
    tm = TokenManager()
    tm.add_prompt([1, 2])
    tm.add_response([3], [-0.5])

    assert len(tm.segments[0]) == 2
    assert list(tm.segments[1]) == [Token(3, -0.5, True)]
    assert tm.segments[1] == [Token(3, -0.5, True)]
    assert tm.segments[0][1] == Token(2, None, False)
    assert tm.segments[0][0:2] == [Token(1, None, False), Token(2, None, False)]
    assert tm.segment_info == [(False, 2), (True, 1)]
    assert tm.tokens == [Token(1, None, False), Token(2, None, False), Token(3, -0.5, True)]


def test_the_opening_prompt_is_the_first_segment():
    tm = TokenManager()
    assert (tm.initial_prompt, tm.initial_prompt_length, tm.segments) == ([], 0, [])
    tm.add_prompt([7, 8])
    assert tm.initial_prompt_length == 2
    assert [token.token_id for token in tm.initial_prompt] == [7, 8]


def test_a_sequence_cannot_begin_with_a_response():
    with pytest.raises(RuntimeError, match="first segment"):
        TokenManager().add_response([1], [-0.1])


def test_logprobs_of_another_length_are_rejected():
    tm = TokenManager()
    tm.add_prompt([1])
    with pytest.raises(ValueError, match="2 token ids came with 1 logprobs"):
        tm.add_response([2, 3], [-0.1])
    assert len(tm) == 1


def test_a_prompt_cannot_be_trained_on():
    with pytest.raises(ValueError, match="did not sample"):
        Segment([1], is_response=False, loss_mask=1)


def test_empty_segments_are_ignored():
    tm = TokenManager()
    tm.add_prompt([])
    assert tm.segments == []
    tm.add_prompt([1])
    tm.add_response([], [])
    assert tm.segment_info == [(False, 1)]


def test_reset_forgets_everything():
    tm = TokenManager()
    tm.add_prompt([1])
    tm.reset()
    assert (len(tm), tm.token_ids, tm.segments) == (0, [], [])


def test_tokens_are_frozen():
    token = Token(1, -0.5, True)
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        token.logprob = 0.0
    assert (token.token_id, token.logprob, token.loss_mask) == (1, -0.5, True)


def test_returned_lists_are_copies():
    tm = TokenManager()
    tm.add_prompt([1, 2])
    tm.token_ids.append(9)
    tm.segments.clear()
    tm.segments[0].token_ids.append(9)
    assert tm.token_ids == [1, 2]


def test_rollout_is_a_second_name():
    assert Rollout is TokenManager


@pytest.mark.parametrize("bad", [["1"], [1.5], [None]])
def test_ids_that_are_not_ints_are_rejected(bad):
    with pytest.raises(TypeError):
        TokenManager().add_prompt(bad)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 2**31 - 1), logprobs), min_size=1, max_size=6)))
)
def test_everything_added_is_read_back_exactly(parts):
    tm = TokenManager()
    tm.add_prompt([0])
    expected = [(0, None, 0)]
    for is_response, tokens in parts:
        ids, values = [token for token, _ in tokens], [value for _, value in tokens]
        if is_response:
            tm.add_response(ids, values)
            expected += [(token, value, 1) for token, value in tokens]
        else:
            tm.add_prompt(ids)
            expected += [(token, None, 0) for token in ids]

    assert list(zip(tm.token_ids, tm.logprobs, tm.loss_mask, strict=True)) == expected
    assert [tuple(token) for token in tm.tokens] == [(i, lp, bool(mask)) for i, lp, mask in expected]
    assert sum(length for _, length in tm.segment_info) == len(tm)


# === on disk and in other processes: bit-equal, readable by others, never half written; errors too ===


# --- Trajectories on disk: bit-equal, readable by others, never half written ---


async def play(model):
    """An episode with a tool call, a call that did not parse, a fork, and a failure."""
    agent = make_agent(model, make_tools()[0])
    await agent.invoke_async("2 times 3?")
    agent.messages[0]["content"][0]["text"] = "edited"
    await agent.invoke_async("again")
    with pytest.raises(Exception, match="501"):
        await agent.invoke_async("the script has run out")


@pytest.fixture(scope="module")
def recorded(chatml_tokenizer):
    """What `play` recorded, with prompt logprobs; no test changes it."""
    server = ScriptedSGLang(
        chatml_tokenizer, [call(expression="2 * 3"), "<tool_call>oops</tool_call>", "Six.", "Edited."]
    )
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client(), return_prompt_logprobs=True)
    asyncio.run(play(model))
    return model.trajectory


async def test_a_loaded_trajectory_equals_the_saved_one(recorded, tmp_path):
    recorded.save(tmp_path / "episode.safetensors")
    loaded = Trajectory.load(tmp_path / "episode.safetensors")
    assert loaded.explain() == recorded.explain()
    assert loaded.tool_parse_errors == recorded.tool_parse_errors == {"unknown_tool": 1}
    assert len(loaded.sequences()) == 2
    for ours, theirs in zip(loaded.sequences(), recorded.sequences(), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.segment_info == theirs.segment_info
        assert [s.weight_versions for s in ours.segments] == [s.weight_versions for s in theirs.segments]
        assert ours.policy_versions == theirs.policy_versions
    for ours, theirs in zip(loaded.turns, recorded.turns, strict=True):
        assert (ours.status, ours.reason, ours.key) == (theirs.status, theirs.reason, theirs.key)
        assert (ours.tool_calls, ours.sampling_params) == (theirs.tool_calls, theirs.sampling_params)
        if theirs.generation is not None:
            assert ours.generation.meta_info == theirs.generation.meta_info
            assert np.array_equal(ours.prompt_logprobs, theirs.prompt_logprobs, equal_nan=True)


async def test_saving_a_loaded_trajectory_gives_the_same_bytes(recorded, tmp_path):
    recorded.save(tmp_path / "one")
    Trajectory.load(tmp_path / "one").save(tmp_path / "two")
    files = [safe_open(tmp_path / name, framework="numpy") for name in ("one", "two")]
    first, second = ((file.metadata(), {n: file.get_tensor(n).tobytes() for n in file.keys()}) for file in files)
    assert first == second


async def test_a_loaded_trajectory_knows_and_judges_answers(rollout, tmp_path):
    _, model = rollout(lambda request: f"answer {request.index}")
    agent = make_agent(model)
    for question in "ab":
        await agent.invoke_async(question)
        agent.messages[-1]["content"] = [{"text": f"REPLACED-{question}"}]
    model.trajectory.save(tmp_path / "t")
    model.trajectory = loaded = Trajectory.load(tmp_path / "t")
    loaded.settle(agent.messages)
    assert statuses(loaded) == ["discarded", "discarded"]
    assert [turn.note for turn in loaded.turns] == [
        f"message {i} (assistant) replaced it, with other text" for i in (1, 3)
    ]


def with_another_id(tokenizer, token_id):
    """A tokenizer in whose vocabulary this id is "!"."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab, piece = state["model"]["vocab"], tokenizer.convert_ids_to_tokens(token_id)
    vocab[piece], vocab["!"] = vocab["!"], vocab[piece]
    other = copy.deepcopy(tokenizer)
    other._tokenizer = Tokenizer.from_str(json.dumps(state))
    return other


@pytest.mark.parametrize("is_saved", [True, False])
async def test_a_trajectory_of_another_vocabulary_is_refused(rollout, tmp_path, is_saved):
    server, model = rollout(["One.", "Two."])
    agent = make_agent(model)
    await agent.invoke_async("a")
    recorded = model.trajectory
    if is_saved:
        recorded.save(tmp_path / "t")
        recorded = Trajectory.load(tmp_path / "t")
    before = recorded.explain()
    tokenizer = with_another_id(model.tokenizer, recorded.turns[0].output_ids[0])
    other = SGLangModel(tokenizer=tokenizer, client=server.client())
    other.trajectory = recorded
    with pytest.raises(TokenizerMismatchError, match="recorded with another vocabulary: its id .* use the tokenizer"):
        await make_agent(other, messages=agent.messages).invoke_async("b")
    assert recorded.explain() == before
    assert len(server.requests) == 1
    model.trajectory = recorded  # its own model continues it
    await agent.invoke_async("b")
    assert len(recorded.sequences()) == 1


@pytest.mark.parametrize("differs_in", ["first question", "second question"])
async def test_of_two_first_calls_with_different_vocabularies_the_second_is_refused(chatml_tokenizer, differs_in):
    """The first call is made while the second one is about to ask."""
    meanwhile = []

    class Parser(HermesToolParser):
        def __getattribute__(self, name):
            if name == "think_start_token" and meanwhile:
                thread = threading.Thread(target=meanwhile.pop())
                thread.start()
                thread.join()
            return super().__getattribute__(name)

    (first_id, *_), (second_id, *_) = (chatml_tokenizer.encode(text) for text in ("first", "second"))
    assert first_id != second_id
    tokenizer = with_another_id(chatml_tokenizer, first_id if differs_in == "first question" else second_id)
    servers = [ScriptedSGLang(one, ["x", "y"]) for one in (chatml_tokenizer, tokenizer)]
    first = SGLangModel(tokenizer=chatml_tokenizer, client=servers[0].client())
    second = SGLangModel(tokenizer=tokenizer, client=servers[1].client(), tool_parser=Parser())
    first.trajectory = second.trajectory
    meanwhile.append(lambda: make_agent(first)("first"))
    with pytest.raises(TokenizerMismatchError, match="recorded with another vocabulary"):
        await make_agent(second).invoke_async("second")
    assert [len(server.requests) for server in servers] == [1, 0]
    (turn,) = second.trajectory.turns
    assert turn.token_ids() == servers[0].requests[0].input_ids + servers[0].responses[0].body["output_ids"]


async def test_a_tokenizer_in_python_refuses_a_trajectory_with_ids_that_it_lacks(rollout):
    server, model = rollout(["One.", "Two."])
    agent = make_agent(model)
    await agent.invoke_async("a")
    other = SGLangModel(tokenizer=LetterTokenizer(), client=server.client())
    other.trajectory = model.trajectory
    with pytest.raises(TokenizerMismatchError, match="recorded with another vocabulary"):
        await make_agent(other, messages=agent.messages).invoke_async("b")
    assert len(server.requests) == 1


async def test_an_id_that_a_tokenizer_in_python_lacks_is_recorded_and_saved(tmp_path):
    class Servers(LetterTokenizer):
        def _convert_id_to_token(self, index):
            return self.letters[index] if index < len(self.letters) else ""

    tokenizer = LetterTokenizer()
    padding = len(tokenizer) + 5
    answer = ScriptedAnswer(token_ids=[*tokenizer.encode("ab"), padding], finish_reason="length")
    server = ScriptedSGLang(Servers(), [answer], vocab_size=padding + 1)
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), sampling_params={"max_new_tokens": 3})
    with pytest.raises(MaxTokensReachedException):
        await make_agent(model).invoke_async("q")
    model.trajectory.save(tmp_path / "t")
    loaded = Trajectory.load(tmp_path / "t")
    assert (loaded.turns[0].output_ids[-1], loaded.turns[0].text) == (padding, "ab")
    assert loaded.pieces[padding] == b""


async def test_the_file_can_be_read_without_this_library(recorded, tmp_path):
    recorded.save(tmp_path / "t.safetensors")
    tensors = load_file(tmp_path / "t.safetensors")
    turns = json.loads(tensors["trajectory"].tobytes())["turns"]
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "prompt_ids": "int32",
        "output_ids": "int32",
        "logprobs": "float64",
        "prompt_logprobs": "float64",
        "pieces.ids": "int32",
        "pieces.lengths": "int32",
        "pieces.bytes": "uint8",
        "trajectory": "uint8",
    }
    sampled = [turn["answer"]["sampled_tokens"] for turn in turns if turn["answer"]]
    assert tensors["output_ids"].tolist() == [i for turn in recorded.turns for i in turn.output_ids]
    assert sum(sampled) == len(tensors["output_ids"]) == len(tensors["logprobs"])
    assert [turn["parent"] for turn in turns][:3] == [None, 0, 1]


async def test_routed_experts_come_back_bit_by_bit(recorded, tmp_path):
    changed = copy.deepcopy(recorded)
    turn = changed.turns[0]
    experts = base64.b64encode(np.arange(turn.generation.routed_rows * 6, dtype="<i4").tobytes()).decode()
    turn.generation = replace(turn.generation, routed_experts=experts)
    changed.save(tmp_path / "t")
    assert Trajectory.load(tmp_path / "t").turns[0].generation.routed_experts == experts


async def test_server_reports_may_have_any_size(recorded):
    """All but the tokens was in the header, which safetensors limits to 100 MB."""
    changed = copy.deepcopy(recorded)
    generation = changed.turns[0].generation
    headers = []
    for size in (1, 1_000_000):
        changed.turns[0].generation = replace(
            generation, meta_json=to_json({**generation.meta_info, "told": "x" * size})
        )
        content = changed.to_bytes()
        assert len(Trajectory.from_bytes(content).turns[0].generation.meta_info["told"]) == size
        headers.append(int.from_bytes(content[:8], "little"))
    assert headers[1] - headers[0] < 100  # room for longer numbers


async def test_sampling_masks_come_back_token_by_token(recorded, tmp_path):
    recorded = copy.deepcopy(recorded)
    first, _, third, *_ = recorded.turns
    for turn in (first, third):
        rows = [[token_id, *range(token_id % 4)] for token_id in turn.output_ids]
        mask = SamplingMask(array("i", sum(rows, [])), array("i", map(len, rows)))
        logprobs = array("d", [-0.5] * len(rows))
        turn.generation = replace(turn.generation, sampling_mask=mask, sampling_logprobs=logprobs)
    recorded.save(tmp_path / "t")
    loaded = Trajectory.load(tmp_path / "t")
    for ours, theirs in zip(loaded.turns, recorded.turns, strict=True):
        if theirs.generation is not None:
            assert ours.generation.sampling_mask == theirs.generation.sampling_mask
            assert ours.generation.sampling_logprobs == theirs.generation.sampling_logprobs
    tensors = load_file(tmp_path / "t")
    assert len(tensors["sampling_mask.lengths"]) == len(first.output_ids) + len(third.output_ids)
    assert str(tensors["sampling_mask.ids"].dtype) == "int32"


def test_images_come_back_bit_by_bit(tmp_path):
    torch = pytest.importorskip("torch")
    pixels = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()  # not contiguous
    pictures = (Picture(b"\x00first", "png", "messages[0]"), Picture(b"second", "jpeg", "messages[2]"))
    halves = torch.tensor([[0.5, -1.25]], dtype=torch.bfloat16)  # a type that numpy lacks
    tensors = {"pixel_values": pixels, "grid": torch.tensor([[1, 2, 3]]), "halves": halves}
    images = ImageInputs(pictures, array("i", [5, 6]), tensors)
    messages = [user("What is that?")]
    recorded = Trajectory()
    asked = fingerprint({}, messages)
    turn = recorded.ask(recorded.attach(asked, messages), asked, [5, 5, 5, 6], images=images)
    generation = Generation(array("i", [7]), array("d", [-1.0]), "stop")
    recorded.answer(turn, generation, assistant("a"))
    recorded.save(tmp_path / "t")
    loaded = Trajectory.load(tmp_path / "t")
    assert loaded.turns[0].images.pictures == pictures
    assert loaded.turns[0].sent_ids() == turn.sent_ids() == [5, 6, 7]
    ours, theirs = (trajectory.sequences()[0].multimodal_train_inputs for trajectory in (loaded, recorded))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)


async def test_an_error_while_writing_leaves_the_old_file(recorded, tmp_path, monkeypatch):
    path = tmp_path / "t"
    path.write_bytes(b"old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        recorded.save(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["t"]


def test_other_files_are_rejected_by_name(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(TrajectoryFileError, match="text: not a safetensors file"):
        Trajectory.load(tmp_path / "text")
    save_file({"x": np.zeros(1)}, tmp_path / "weights")
    with pytest.raises(TrajectoryFileError, match="weights: holds None"):
        Trajectory.load(tmp_path / "weights")
    header = b'{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "half").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(TrajectoryFileError, match="half: not .strands-sglang trajectory."):
        Trajectory.load(tmp_path / "half")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Trajectory.load(tmp_path / "nowhere")


def header_of(content):
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def rewritten(content, change, *, version="3", checked=True):
    """Return a file as another program would write it: with other values, and with the checksum of these."""
    tensors = load(content)
    described = json.loads(tensors["trajectory"].tobytes())
    change(tensors, described)
    tensors["trajectory"] = np.frombuffer(json.dumps(described).encode(), "uint8")
    checksum = 0
    for name in sorted(tensors):
        values = tensors[name]
        head = name if version == "2" else f"{name} {values.dtype.str} {values.shape}"
        checksum = zlib.crc32(head.encode() + values.tobytes(), checksum)
    metadata = {"format": "strands-sglang trajectory", "version": version}
    return save(tensors, metadata={**metadata, "checksum": f"{checksum:08x}"} if checked else metadata)


async def test_no_file_with_a_flipped_bit_is_loaded(recorded, tmp_path):
    content = recorded.to_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(0)
    places = [*range(8 * length), *(rng.randrange(8 * length, 8 * len(content)) for _ in range(1000))]
    loaded = []
    for place in places:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        try:
            Trajectory.from_bytes(bytes(changed), name="episode 7")
            loaded.append(place)
        except TrajectoryFileError as error:
            assert str(error).startswith("episode 7: ")
    assert loaded == []


async def test_a_changed_file_is_only_shown(recorded, tmp_path):
    path = tmp_path / "t.safetensors"
    recorded.save(path)
    content = bytearray(path.read_bytes())
    header = header_of(content)
    content[-header["trajectory"]["data_offsets"][1] + header["output_ids"]["data_offsets"][0]] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrajectoryFileError, match=r"t\.safetensors: changed since it was written"):
        Trajectory.load(path)
    shown = Trajectory.from_bytes(bytes(content), changed_too=True)
    assert shown.is_changed and not recorded.is_changed
    assert list(shown.turns[0].output_ids) != list(recorded.turns[0].output_ids)
    assert findings(read([path])) != []


async def test_a_changed_trajectory_never_becomes_a_valid_one(recorded, tmp_path):
    content = recorded.to_bytes().replace(b'"latency_s": ', b'"latency_s":9')
    shown = Trajectory.from_bytes(content, changed_too=True)
    for keep in (copy.deepcopy, copy.copy, pickle.dumps, lambda it: it.save(tmp_path / "t"), Trajectory.to_bytes):
        with pytest.raises(TrajectoryFileError, match="read from bytes that were changed since they were written"):
            keep(shown)
    assert not (tmp_path / "t").exists()


def column(name, change):
    return lambda tensors, facts: tensors.update({name: change(tensors[name])})


def fact(name, value, turn=1):
    return lambda tensors, facts: facts["turns"][turn].update({name: value})


def answer_fact(name, value, **more):
    return lambda tensors, facts: facts["turns"][1]["answer"].update({name: value, **more})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (column("output_ids", lambda ids: ids.astype("<i8")), "output_ids has the type int64"),
        (column("prompt_ids", lambda ids: ids.reshape(1, -1)), "prompt_ids has the type int32 and the shape (1, "),
        (column("output_ids", lambda ids: -ids), "output_ids holds -"),
        (column("logprobs", lambda values: values * math.nan), "a logprob that is not a number"),
        (column("logprobs", lambda values: values[:-1]), "entries of logprobs, and"),
        (lambda tensors, facts: tensors.pop("output_ids"), "output_ids"),
        (fact("parent", -1), "the parent of turn 1 is -1"),
        (fact("parent", 1), "the parent of turn 1 is 1"),
        (fact("parent_kept", 2**31), "keeps 2147483648 of the"),
        (fact("index", 0), "comes after call 0"),
        (fact("prompt_tokens", 10**9), "a turn describes 1000000000 entries of prompt_ids"),
        (fact("prompt_tokens", -3), "a turn describes -3 entries of prompt_ids"),
        (fact("tool_calls", [{"toolUseId": "x"}]), "a tool call without an id or a name"),
        (fact("is_auxiliary", "no"), "Turn.is_auxiliary is 'no'"),
        (fact("status", "lost"), "'lost' is not a valid TurnStatus"),
        (fact("answered", [["assistant", "text", 5]]), "Turn.answered is "),
        (fact("answered", [["assistant", "text", "t", "", "", "more"]]), "Turn.answered is "),
        (fact("answer_blocks", [["text", "00", "01"]]), "Turn.answer_blocks is "),
        (fact("answer_blocks", [["text"]]), "Turn.answer_blocks is "),
        (lambda tensors, facts: facts["turns"][1].pop("answer_key"), "KeyError: 'answer_key'"),
        (answer_fact("finish_type", None), "Generation.finish_type is None"),
        (answer_fact("finish_type", "tool_calls"), "call 1 ended with 'tool_calls'"),
        (answer_fact("weight_versions", [["1", 0, 99]]), "call 1 has versions that do not fit its"),
        (answer_fact("weight_versions", [["1", 2, 1]]), "call 1 has versions that do not fit its"),
        (answer_fact("weight_versions", [["1", 0, 2], ["2", 1, 2]]), "call 1 has versions that do not fit its"),
        (answer_fact("weight_versions", [["1", -1, 2]]), "call 1 has versions that do not fit its"),
        (lambda tensors, facts: facts.update(end={"outcome": "done"}), "'done' is not a valid TerminationReason"),
        (lambda tensors, facts: facts.update(end={"turn_rewards": {"a": 1}}), "invalid literal for int"),
        (lambda tensors, facts: facts.update(end={"turn_rewards": [1.0]}), "EpisodeEnd.turn_rewards is [1.0]"),
        (lambda tensors, facts: facts.update(end={"reward": "1"}), "EpisodeEnd.reward is '1'"),
        (answer_fact("weight_versions", [["1", 0.5, 2]]), "Generation.weight_versions is "),
        (answer_fact("sampled_tokens", 1, weight_versions=[]), "output_ids has "),
        (lambda tensors, facts: facts.pop("turns"), "KeyError: 'turns'"),
        (lambda tensors, facts: facts.update(result_notices=7), "TypeError: "),
        (lambda tensors, facts: facts.update(end={"outcome": 3, "turn_rewards": {}}), "EpisodeEnd.outcome is 3"),
    ],
    ids=lambda told: told if isinstance(told, str) else "",
)
async def test_values_that_no_trajectory_has_are_refused(recorded, tmp_path, change, told):
    (tmp_path / "t").write_bytes(rewritten(recorded.to_bytes(), change))
    with pytest.raises(TrajectoryFileError, match=f"^{re.escape(str(tmp_path))}/t: damaged: .*{re.escape(told)}"):
        Trajectory.load(tmp_path / "t")


async def test_a_description_that_is_no_json_is_refused(recorded):
    for description in (b"[" * 200_000, b"\xff{}", b'{"turns": [], "x": ' + b"9" * 10_000 + b"}", b"[]"):
        tensors = {"trajectory": np.frombuffer(description, "uint8")}
        metadata = {"format": "strands-sglang trajectory", "version": "2"}
        with pytest.raises(TrajectoryFileError, match="^sample 3: damaged: "):
            Trajectory.from_bytes(save(tensors, metadata=metadata), name="sample 3")


@pytest.mark.parametrize("checked", [True, False])
async def test_files_of_version_2_are_loaded_with_and_without_a_checksum(recorded, checked):
    older = rewritten(recorded.to_bytes(), lambda tensors, facts: None, version="2", checked=checked)
    loaded = Trajectory.from_bytes(older)
    assert loaded.sequences()[0].tokens == recorded.sequences()[0].tokens
    assert not loaded.is_changed
    newer = rewritten(recorded.to_bytes(), lambda tensors, facts: None, checked=checked)
    with contextlib.nullcontext() if checked else pytest.raises(TrajectoryFileError, match="changed since"):
        Trajectory.from_bytes(newer)


def test_an_empty_trajectory_is_saved_and_loaded(tmp_path):
    Trajectory().save(tmp_path / "t")
    assert Trajectory.load(tmp_path / "t").sequences() == []


async def test_bytes_equal_the_files_content(recorded, tmp_path):
    recorded.save(tmp_path / "t")
    content = recorded.to_bytes()
    assert Trajectory.from_bytes(content).sequences()[0].tokens == recorded.sequences()[0].tokens
    assert len(content) == (tmp_path / "t").stat().st_size
    with pytest.raises(TrajectoryFileError, match="a sample: not a safetensors file"):
        Trajectory.from_bytes(content[:-1], name="a sample")


# --- Results and errors cross process boundaries: pickle, cloudpickle, `copy.deepcopy`, a real worker process ---


@pytest.fixture(
    params=[
        lambda value: pickle.loads(pickle.dumps(value)),
        lambda value: pickle.loads(cloudpickle.dumps(value)),
        copy.deepcopy,
    ],
    ids=["pickle", "cloudpickle", "deepcopy"],
)
def cross(request):
    return request.param


@pytest.fixture(scope="module")
def public_errors():
    """Every public error of both packages: those whose names and modules have no leading underscore."""
    found = set()
    for package in (strands_sglang, strands_env):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if re.search(r"\._|\.scripts|\.shim", info.name):
                continue
            try:
                module = importlib.import_module(info.name)
            except ImportError:  # an extra that is not installed
                continue
            found |= {
                kind
                for name, kind in vars(module).items()
                if inspect.isclass(kind) and issubclass(kind, BaseException) and not name.startswith("_")
                if kind.__module__.startswith(("strands_sglang", "strands_env"))
            }
    assert len(found) > 20
    return found


def made(kind):
    """An error of a kind, with a made-up value for every argument that has to be given."""
    values = {"int": 418, "str": "told", "bool": True, "dict[str, Any]": {"a": 1}}
    if not inspect.isfunction(kind.__init__):  # it takes what any exception takes
        return kind("told")
    positional, keywords = [], {}
    for parameter in inspect.signature(kind).parameters.values():
        value = values.get(str(parameter.annotation), "told")
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            keywords[parameter.name] = value
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty:
            positional.append(value)
    return kind(*positional or ["told"], **keywords)


def test_every_error_pickles_with_all_its_facts(public_errors, cross):
    for kind in public_errors:
        error = made(kind)
        there = cross(error)
        assert type(there) is kind
        assert (str(there), there.args, vars(there)) == (str(error), error.args, vars(error))


def raise_http_error(kind):
    raise kind("POST http://x/generate: HTTP 418", status=418, body="tea")


def test_a_workers_errors_reach_its_parent_and_break_no_pool():
    """Such an error broke a process pool, and `multiprocessing.Pool` waited forever."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for kind in (SGLangHTTPError, SGLangContextLengthError, SGLangThrottledError):
            with pytest.raises(kind) as caught:
                pool.submit(raise_http_error, kind).result(timeout=120)
            assert type(caught.value) is kind
            assert (caught.value.status, caught.value.body) == (418, "tea")
            assert pool.submit(int, "1").result(timeout=120) == 1


def facts_of(trajectory):
    return [
        (
            turn.index,
            turn.status,
            turn.reason,
            list(turn.prompt_ids),
            list(turn.output_ids),
            turn.failure,
            turn.tool_calls,
        )
        for turn in trajectory.turns
    ]


async def test_a_trajectory_crosses_whole(recorded, cross):
    there = cross(recorded)
    assert isinstance(there, Trajectory) and there is not recorded
    assert facts_of(there) == facts_of(recorded)
    assert [s.tokens for s in there.sequences()] == [s.tokens for s in recorded.sequences()]
    assert there.explain() == recorded.explain()


def parents(turns):
    return [None if turn.parent is None else turns.index(turn.parent) for turn in turns]


async def test_turns_stay_parts_of_one_trajectory(recorded, cross):
    turns = cross(recorded.turns)
    assert facts_of(turns[0].trajectory) == facts_of(recorded)
    assert all(turn.trajectory is turns[0].trajectory for turn in turns)
    assert parents(turns) == parents(recorded.turns)


async def test_sequences_cross_with_every_token(recorded, cross):
    for sequence in [*recorded.sequences(), recorded.latest_main_sequence()]:
        there = cross(sequence)
        assert there.tokens == sequence.tokens and there.segment_info == sequence.segment_info
        assert there.policy_versions == sequence.policy_versions


async def test_a_copy_is_extended_and_leaves_the_original_alone(rollout, cross):
    server, model = rollout(["One.", "Two."])
    agent = make_agent(model)
    await agent.invoke_async("a")
    original, model.trajectory = model.trajectory, cross(model.trajectory)
    await agent.invoke_async("b")
    assert (len(original), len(model.trajectory)) == (1, 2)
    assert len(model.trajectory.sequences()) == 1


async def test_the_result_of_a_step_crosses(rollout, cross):
    _, model = rollout(["hello"])
    result = await Environment(model_factory=lambda: model).step(
        Action(message="hi", task_context=TaskContext(id="1", extra={"a": 1}))
    )
    there = cross(result)
    assert there.model_dump() == result.model_dump()
    assert facts_of(there.observation.trajectory) == facts_of(result.observation.trajectory)


async def test_results_of_an_evaluation_cross(tmp_path, cross):
    results = await Evaluator(StubEnvironment().factory, show_progress=False).run(tasks(2))
    there = cross(results)
    assert {key: [s.model_dump() for s in row] for key, row in there.items()} == {
        key: [s.model_dump() for s in row] for key, row in results.items()
    }


@pytest.fixture(scope="module")
def long_episodes():
    """The turns of episodes of 200 and of 400 of them."""
    recorder, history, episodes = Recorder(), [], []
    for number in range(1, 401):
        history += [user("q")]
        recorder.call(history)
        history += [assistant("ok")]
        if number in (200, 400):
            episodes.append(copy.deepcopy(recorder.trajectory).turns)
    return episodes


def test_a_long_episode_crosses_in_a_size_linear_in_its_tokens(long_episodes, cross):
    """A chain of 400 turns was a RecursionError."""
    half, turns = long_episodes
    there = cross(turns)
    assert len(there) == 400 and there[-1].token_ids() == turns[-1].token_ids()
    assert cross(turns[-1]).token_ids() == there[-1].token_ids()
    assert len(pickle.dumps(turns)) < 2.2 * len(pickle.dumps(half))


def test_a_turn_without_a_trajectory_cannot_be_pickled(rollout, cross):
    turn = strands_sglang.Turn(0, None, Reason("first"), b"", {}, (), (), [])
    with pytest.raises(TypeError, match="belongs to no trajectory"):
        cross(turn)


# --- files that earlier releases wrote (tests/fixtures, by `support.write_fixtures`) still load, extend and resume ---


RELEASES = sorted(path for path in (Path(__file__).parents[2] / "fixtures").iterdir() if path.is_dir())
of_each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


def recorded_facts(path):
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "path",
    [path for release in RELEASES for path in sorted(release.glob("trajectories/*.safetensors"))],
    ids=lambda path: f"{path.parent.parent.name}-{path.stem}",
)
def test_an_old_trajectory_reads_as_it_did_when_it_was_written(path, tmp_path):
    def facts(trajectory):
        """What this code reads from a trajectory."""
        return {
            "statuses": statuses(trajectory),
            "auxiliary": [turn.is_auxiliary for turn in trajectory.turns],
            "sent_ids": [turn.sent_ids() for turn in trajectory.turns],
            "policy_versions": [list(sequence.policy_versions) for sequence in trajectory.sequences()],
            "sequences": [
                {"token_ids": s.token_ids, "loss_mask": s.loss_mask, "logprobs": s.logprobs}
                for s in trajectory.sequences(discarded=True, auxiliary=True)
            ],
            "trained": [sum(sequence.loss_mask) for sequence in trajectory.sequences()],
            "main": trajectory.latest_main_sequence().token_ids,
            "tool_parse_errors": trajectory.tool_parse_errors,
        }

    def as_text(facts):
        return json.dumps(facts, sort_keys=True)  # NaN equals itself here

    expected = recorded_facts(path)
    del expected["messages"]
    loaded = Trajectory.load(path)
    assert as_text(facts(loaded)) == as_text(expected)
    loaded.save(tmp_path / "again")
    assert as_text(facts(Trajectory.load(tmp_path / "again"))) == as_text(expected)


@pytest.mark.parametrize("name", ["tool_loop", "aborts", "helpers"])
@of_each_release
async def test_an_old_trajectory_is_extended(release, name):
    path = release / "trajectories" / f"{name}.safetensors"
    tokenizer = AutoTokenizer.from_pretrained(release / "tokenizer")
    server = ScriptedSGLang(tokenizer, ["More."])
    model = SGLangModel(tokenizer=tokenizer, client=server.client())
    model.trajectory = Trajectory.load(path)
    tools = make_tools()[0] if name == "tool_loop" else None
    await make_agent(model, tools, messages=recorded_facts(path)["messages"]).invoke_async("And more?")
    turn = model.trajectory.turns[-1]
    assert turn.parent is not None
    assert server.requests[0].input_ids[: len(turn.parent.token_ids())] == turn.parent.token_ids()


@pytest.mark.parametrize("release", [path for path in RELEASES if (path / "library").is_dir()])
async def test_an_old_evaluation_by_the_library_is_resumed(release, tmp_path):
    path = shutil.copytree(release / "library", tmp_path / "out") / "results.jsonl"
    before = {sample["key"]: sample for sample in map(json.loads, path.read_bytes().splitlines()[:-1])}
    stub = StubEnvironment()
    evaluator = Evaluator(stub.factory, show_progress=False, n_samples_per_prompt=2, output_path=path)
    results = await evaluator.run(tasks(4))
    assert {action.task_context.id for action in stub.episodes} <= {"t3"}  # its reward had failed
    for n in range(3):
        assert [sample.step_result.reward.reward for sample in results[f"t{n}"]] == [n % 2] * 2
    assert {key: sample for sample in lines(path) if (key := sample["key"]) in before} == before


@of_each_release
def test_an_old_evaluation_by_the_command_is_resumed(release, tmp_path, monkeypatch):
    # The evaluation in `command/`, run in a folder with `sums.jsonl` and `tokenizer`; `--base-url` comes on top.
    questions = [{"id": f"s{n}", "question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    command = [
        *("eval", "--dataset", "sums.jsonl", "--env", "calculator", "--backend", "sglang", "--tokenizer", "tokenizer"),
        *("--n-samples", "2", "--concurrency", "1", "--keep-tokens", "--output", "out"),
    ]

    def solve(request):
        """A policy that asks the calculator and is right about every sum but those divisible by three."""
        left, right = map(int, re.findall(r"What is (\d+) \+ (\d+)", request.text)[-1])
        if "<tool_response>" not in request.text:
            return ScriptedAnswer(call("calculator", expression=f"{left} + {right}"))
        return ScriptedAnswer(rf"\boxed{{{left + right if (left + right) % 3 else 0}}}")

    folder = shutil.copytree(release / "command", tmp_path / "run")
    os.symlink(release / "tokenizer", folder / "tokenizer")
    monkeypatch.chdir(folder)
    before = lines(folder / "out" / "results.jsonl")
    server = ScriptedSGLang(AutoTokenizer.from_pretrained(release / "tokenizer"), solve)
    with server.serve() as base_url:
        assert main([*command, "--base-url", base_url]) == 0
    asked = {row["id"] for row in questions for request in server.requests if row["question"] in request.text}
    assert asked == {"s2", "s3"}
    records = lines(folder / "out" / "results.jsonl")
    assert records[: len(before)] == before and len(records) == 2 * len(questions)
    _, results = read_results(folder / "out" / "results.jsonl")
    assert {prompt: len(samples) for prompt, samples in results.items()} == {row["id"]: 2 for row in questions}


# === what a file tells without its makers ===


async def test_a_file_has_the_text_of_its_tokens_and_who_said_what(recorded, tmp_path, chatml_tokenizer):
    recorded.save(tmp_path / "t.safetensors")
    tensors = load_file(tmp_path / "t.safetensors")
    turns = json.loads(tensors["trajectory"].tobytes())["turns"]

    ends = np.cumsum(tensors["pieces.lengths"])
    content = tensors["pieces.bytes"].tobytes()
    pieces = {
        token_id: content[end - length : end]
        for token_id, length, end in zip(tensors["pieces.ids"], tensors["pieces.lengths"], ends, strict=True)
    }
    sampled = b"".join(pieces[token_id] for token_id in tensors["output_ids"]).decode()
    assert sampled == "".join(turn["answer"]["text"] for turn in turns if turn["answer"])
    assert sampled == chatml_tokenizer.decode(tensors["output_ids"])
    assert [part[0] for part in turns[0]["said"]][-1] == "user"


def test_the_end_of_an_episode_is_in_its_file(recorder, tmp_path):
    recorder.call(QUESTION)
    recorder.trajectory.note_end(
        outcome=strands_sglang.TerminationReason.TASK_COMPLETE, reward=0.5, turn_rewards={np.int64(0): np.float32(1)}
    )
    recorder.trajectory.save(tmp_path / "t.safetensors")

    end = Trajectory.load(tmp_path / "t.safetensors").end
    assert (end.outcome, end.reward, end.turn_rewards) == ("task_complete", 0.5, {0: 1})
    assert end == recorder.trajectory.end == pickle.loads(pickle.dumps(recorder.trajectory)).end


def test_no_episode_ends_with_an_unknown_outcome():
    with pytest.raises(ValueError, match="typo"):
        Trajectory().note_end(outcome="typo")


def test_a_file_can_be_read_by_whom_the_umask_allows(tmp_path):
    usual = tmp_path / "usual"
    usual.touch()
    Trajectory().save(tmp_path / "episode.safetensors")
    assert (tmp_path / "episode.safetensors").stat().st_mode == usual.stat().st_mode


def test_saving_to_a_pipe_writes_to_it(recorder, tmp_path):
    recorder.call(QUESTION)
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        content = pool.submit(pipe.read_bytes)
        recorder.trajectory.save(pipe)
        assert len(Trajectory.from_bytes(content.result()).turns) == 1
