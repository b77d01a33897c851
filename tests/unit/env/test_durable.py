"""Journals, resumes and forks of episodes, on the scripted server."""

import asyncio
import json
import os
import resource
from contextlib import contextmanager, suppress

import pytest
from safetensors.numpy import load
from strands import tool
from strands.hooks import HookProvider
from strands.hooks.events import AfterModelCallEvent, BeforeModelCallEvent

from strands_env.core import (
    Action,
    Environment,
    RewardError,
    RewardFunction,
    RewardResult,
    TaskContext,
    TerminationReason,
    has_effect,
)
from strands_env.environments import WorldEnvironment
from strands_env.eval import Evaluator
from strands_env.eval.checkpoint import CheckpointFile
from strands_sglang import Journal, JournalError, SGLangModel, Trajectory
from strands_sglang.credit import training_rows
from strands_sglang.testing import ScriptedFault, ScriptedSGLang
from strands_sglang.trajectory.journal import JournalInUseError
from strands_sglang.trajectory.turn import TurnStatus
from support.agents import Gate, build_chatml_tokenizer, call, make_agent
from support.environments import Contains
from support.worlds import needs_worlds

ASK = Action(message="Count.", task_context={"id": "count", "ground_truth": "done"})


TOKENIZER = build_chatml_tokenizer()


class Killed(BaseException):
    """The process is gone: nothing after it is written."""


class Counter(Environment):
    """Counts in its own state; a service outside of the process counts the effects of `send`."""

    def __init__(self, *args, effects=None, user=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.user = list(user)
        self.effects = effects if effects is not None else []
        self.total = None

    async def reset(self):
        self.total = 0

    async def save_state(self):
        return {"total": self.total}

    async def load_state(self, state):
        self.total = state["total"]

    async def next_user_message(self, action, messages):
        said = sum("text" in message["content"][0] for message in messages if message["role"] == "user")
        return self.user[said - 1] if said <= len(self.user) else None

    def identity(self):
        return {"class": "Counter"}

    def get_tools(self):
        @has_effect("idempotent")
        @tool
        def add(number: int) -> str:
            """Add a number.

            Args:
                number: The number.
            """
            self.total += number
            return f"total {self.total}"

        @tool
        def send(text: str) -> str:
            """Send a text.

            Args:
                text: The text.
            """
            self.effects.append(text)
            return "sent"

        return [add, send]


SCRIPT = [
    call("add", number=2),
    call("send", text="two"),
    call("add", number=3) + call("add", number=4),
    call("send", text="nine"),
    "All done.",
]


def answer_of(request, script):
    """Answer by the number of answers in the prompt, so that a restarted server continues."""
    position = request.text.count("<|im_start|>assistant") - 1
    return script[min(position, len(script) - 1)]


def answer_by_position(request):
    return answer_of(request, SCRIPT)


def counter(folder, effects=None, answers=answer_by_position, model=None, tokenizer=TOKENIZER, **settings):
    scripted = ScriptedSGLang(tokenizer, answers)
    sampling = {"max_new_tokens": 200, **(model or {})}
    shared = SGLangModel(tokenizer=tokenizer, client=scripted.client(), sampling_params=sampling)
    return Counter(lambda: shared, effects=effects, reward_fn=Contains(), journal=folder, **settings), scripted


def tokens_of(result):
    sequences = result.observation.trajectory.sequences()
    return [(s.token_ids, s.loss_mask, s.logprobs) for s in sequences]


def record_of(trajectory):
    """Everything that a trajectory's file holds, without the order in which it does."""
    tensors = load(trajectory.to_bytes())
    pieces = {name: tensors.pop(f"pieces.{name}").tolist() for name in ("ids", "lengths", "bytes")}
    described = json.loads(tensors.pop("trajectory").tobytes())
    return (
        described,
        sorted(zip(pieces["ids"], pieces["lengths"], strict=True)),
        {k: v.tolist() for k, v in tensors.items()},
    )


async def test_a_finished_episode_has_its_whole_record_in_the_journal(tmp_path):
    environment, _ = counter(tmp_path)
    result = await environment.step(ASK)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE, result.error
    (path,) = tmp_path.glob("*.journal")
    loaded = Trajectory.load(path)
    saved = Trajectory.from_bytes(result.observation.trajectory.to_bytes())
    assert [turn.status for turn in loaded.turns] == [turn.status for turn in saved.turns]
    assert [s.token_ids for s in loaded.sequences()] == [s.token_ids for s in saved.sequences()]
    assert record_of(loaded) == record_of(saved)
    again, _ = counter(tmp_path)
    (resumed,) = await again.resume(tmp_path)
    assert resumed.reward == result.reward
    assert resumed.observation.messages == result.observation.messages
    assert tokens_of(resumed) == tokens_of(result)
    result.journal.acknowledge()
    assert not list(tmp_path.iterdir())


class Dying:
    """A process that dies after a number of writes to its journal; counts the writes."""

    def __init__(self):
        self.left, self.writes = None, 0

    @contextmanager
    def at(self, write):
        """Let the process die at a write of the block."""
        self.left = write
        with suppress(Killed):
            yield
        self.left = None


@pytest.fixture
def dying(monkeypatch):
    process, append = Dying(), Journal.append

    def counted(journal, *args, **kwargs):
        if process.left == 0:
            raise Killed
        append(journal, *args, **kwargs)
        process.writes += 1
        if process.left is not None:
            process.left -= 1
            if process.left == 0:
                raise Killed

    monkeypatch.setattr(Journal, "append", counted)
    return process


SETTINGS = {
    "plain": {},
    "tool iterations": {"max_tool_iterations": 2},
    "tool calls": {"max_tool_calls": 3},
    "parallel tool calls": {"max_parallel_tool_calls": 1},
    "turns": {"max_turns": 3},
    "sampled tokens": {"max_sampled_tokens": 60},
    "states kept seldom": {"fork_points": 2},
    "cut answer": {"model": {"max_new_tokens": 12}},
    "user": {"user": ["Thanks. Again?"]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_an_episode_killed_at_any_write_ends_as_an_uninterrupted_one(tmp_path, dying, settings):
    environment, _ = counter(tmp_path / "whole", **settings)
    whole = await environment.step(ASK)
    total = environment.total
    writes, interrupted = dying.writes, 0
    for count in range(1, writes + 1):
        folder, effects = tmp_path / str(count), []
        environment, _ = counter(folder, effects, **settings)
        with dying.at(count):
            await environment.step(ASK)
        before = list(effects)
        environment, _ = counter(folder, effects, **settings)
        (resumed,) = await environment.resume(folder)
        assert sorted(set(effects)) == sorted(effects), count
        if resumed.termination_reason is TerminationReason.INTERRUPTED:
            interrupted += 1
            assert resumed.reward is None and effects == before
            continue
        assert facts_of(resumed) == facts_of(whole), count
        kept = Trajectory.from_bytes(resumed.observation.trajectory.to_bytes())
        written, live = record_of(Trajectory.load(resumed.journal.path)), record_of(kept)
        assert (written[0]["turns"], written[1:]) == (live[0]["turns"], live[1:]), count
        assert environment.total in (total, None), count  # None if the episode had ended
    assert interrupted < writes / 4


def facts_of(result):
    """What is the same in a resumed episode and in one that was not interrupted."""
    metrics = result.observation.metrics
    counts = {name: metrics[name] for name in ("model_calls", "tool_iterations", "tool_calls", "sampled_tokens")}
    said = [list(map(said_in, message["content"])) for message in result.observation.messages]
    turns = [(turn.status, len(turn.output_ids)) for turn in result.observation.trajectory.turns]
    return result.termination_reason, result.reward, counts, said, tokens_of(result), turns


def said_in(block):
    """A block of a message without the ids of its calls."""
    kind = next(iter(block))
    return kind, {**block[kind], "toolUseId": None} if kind in ("toolUse", "toolResult") else block[kind]


WORLD_SCRIPT = [
    call("shell", command="mkdir -p /task && echo one >> /task/notes"),
    call("shell", command="echo two >> /task/notes; rm -f /etc/hostname"),
    call("shell", command="cat /task/notes; ls /etc/hostname"),
    "All done.",
]


@needs_worlds
async def test_a_world_continues_with_its_files_and_forks_them(tmp_path, dying):
    def environment(folder):
        scripted = ScriptedSGLang(TOKENIZER, lambda request: answer_of(request, WORLD_SCRIPT))
        model = SGLangModel(tokenizer=TOKENIZER, client=scripted.client())
        return WorldEnvironment(lambda: model, Contains(), journal=folder)

    whole = await environment(tmp_path / "whole").step(ASK)
    for count in range(3, dying.writes):
        folder = tmp_path / str(count)
        with dying.at(count):
            await environment(folder).step(ASK)
        (resumed,) = await environment(folder).resume(folder)
        assert facts_of(resumed) == facts_of(whole), count
    (forked,) = await environment(tmp_path / "forks").fork(whole, 2)
    assert facts_of(forked)[3] == facts_of(whole)[3]


@needs_worlds
async def test_a_world_whose_files_went_into_a_snapshot_is_not_forked_without_them(tmp_path, caplog):
    class Trying(WorldEnvironment):
        async def reset(self):
            await super().reset()
            await self.world.execute("echo ready > /etc/state")
            await self.world.snapshot()  # is made again by each `reset`

        def get_tools(self):
            @has_effect("idempotent")
            @tool
            async def attempt(keep_programs: bool) -> str:
                """Try something in a copy of the world.

                Args:
                    keep_programs: As for `World.fork`.
                """
                (copy,) = await self.world.fork(keep_programs=keep_programs)
                await copy.stop()
                return "tried"

            return [*super().get_tools(), attempt]

    script = list(WORLD_SCRIPT)

    def environment(folder):
        scripted = ScriptedSGLang(TOKENIZER, lambda request: answer_of(request, script))
        model = SGLangModel(tokenizer=TOKENIZER, client=scripted.client())
        return Trying(lambda: model, Contains(), journal=folder)

    plain = await environment(tmp_path / "plain").step(ASK)
    script.insert(1, call("attempt", keep_programs=True))
    whole = await environment(tmp_path / "kept").step(ASK)
    (forked,) = await environment(tmp_path / "forks").fork(whole, 3)
    assert facts_of(forked)[3] == facts_of(whole)[3]
    assert caplog.text == ""

    script[1] = call("attempt", keep_programs=False)
    lost = await environment(tmp_path / "lost").step(ASK)
    with pytest.raises(JournalError, match="no journal to fork"):
        await environment(tmp_path / "forks").fork(lost, 3)
    assert caplog.text.count("without keep_programs=True") == 1
    await environment(tmp_path / "forks").fork(plain, 1)
    assert caplog.text.count("without keep_programs=True") == 2


class Judge(RewardFunction):
    """A judge that raises its error, if it has one."""

    error: Exception | None = None

    async def compute(self, *, action, step_result):
        if self.error is not None:
            raise self.error
        return RewardResult(reward=1.0)


async def judged_twice(folder, error, run_first, **second):
    """Run an evaluation with a judge that fails, and another with one that works.

    Returns:
        The second one's sample, and the number of model calls of the first and of both.
    """
    judge = Judge()
    judge.error = error
    scripted = ScriptedSGLang(TOKENIZER, answer_by_position)
    model = SGLangModel(tokenizer=TOKENIZER, client=scripted.client())

    def evaluator(**more):
        return Evaluator(lambda action: Counter(lambda: model, judge), output_path=folder, journal=True, **more)

    await run_first(evaluator().run([ASK]))
    calls = len(scripted.requests)
    judge.error = None
    ((sample,),) = (await evaluator(**second).run([ASK])).values()
    assert not list((folder / "results.journals").iterdir())
    return sample, calls, len(scripted.requests)


async def test_an_episode_is_kept_for_a_judge_that_is_out_of_reach(tmp_path):
    async def run(work):
        return await work

    error = RewardError("the judge refuses connections", is_infrastructure=True)
    sample, calls, both = await judged_twice(tmp_path, error, run)
    assert sample.reward == 1.0 and calls == both == len(SCRIPT)


async def test_a_sample_whose_journal_a_stop_left_behind_runs_again(tmp_path, monkeypatch):
    """A stop between the record and the removal of the journal."""
    append = CheckpointFile.append

    async def stopped(work):
        async def append_last(file, line):
            await append(file, line)
            running.cancel()
            await asyncio.sleep(0)

        running = asyncio.ensure_future(work)
        with monkeypatch.context() as patch, suppress(asyncio.CancelledError):
            patch.setattr(CheckpointFile, "append", append_last)
            await running

    sample, calls, both = await judged_twice(tmp_path, OSError("the disk is full"), stopped, retry_errors=True)
    assert sample.reward == 1.0 and 2 * calls == both


async def test_an_evaluation_started_again_continues_its_episodes(tmp_path):
    tasks = [Action(message=f"Count {n}.", task_context={"id": f"t{n}", "ground_truth": "done"}) for n in range(3)]
    effects, requests = [], []
    stop_at = {"count": 7}

    def answers(request):
        requests.append(request)
        if len(requests) == stop_at["count"]:
            running.cancel()
        return answer_by_position(request)

    def evaluator():
        def environment(action):
            made, _ = counter(None, effects, answers)
            return made

        path = tmp_path / "results.jsonl"
        return Evaluator(environment, 2, 3, output_path=path, keep_trajectories=True, journal=True)

    running = asyncio.ensure_future(evaluator().run(tasks))
    with suppress(asyncio.CancelledError):
        await running
    left = list((tmp_path / "results.journals").iterdir())
    assert left
    stop_at["count"] = None
    results = await evaluator().run(tasks)

    samples = [sample for group in results.values() for sample in group]
    interrupted = [s for s in samples if s.step_result.termination_reason is TerminationReason.INTERRUPTED]
    assert len(samples) == 6 and all(sample.reward == 1.0 for sample in samples if sample not in interrupted)
    assert len(requests) <= 6 * len(SCRIPT) + len(left)  # only calls under way were made again
    assert not list((tmp_path / "results.journals").iterdir())
    for path in (tmp_path / "results.trajectories").iterdir():
        assert len(Trajectory.load(path).sequences()) == 1


async def test_a_step_of_the_trainer_deletes_the_journals_of_its_batch(tmp_path):
    environment, _ = counter(tmp_path)
    results = [await environment.step(ASK) for _ in range(2)]
    rows = training_rows([result.episode("group") for result in results], baseline=None)
    assert len(list(tmp_path.iterdir())) == 2
    rows.acknowledge()
    assert not list(tmp_path.iterdir())


# --- what cannot continue, and why ---


async def killed_at(write, folder, dying, effects=None, **settings):
    """Kill an episode at a write; return the path of its journal."""
    environment, _ = counter(folder, effects, **settings)
    with dying.at(write):
        await environment.step(ASK)
    (path,) = folder.glob("*.journal")
    return path


async def test_a_journal_of_another_environment_names_what_differs(tmp_path, dying):
    path = await killed_at(7, tmp_path, dying)
    content = path.read_bytes()
    environment, _ = counter(tmp_path)
    environment.identity = lambda: {"class": "Other"}
    for use in (environment.resume(path), environment.fork(path, 0)):
        with pytest.raises(JournalError, match=r"of another environment: its class is 'Counter', and here 'Other'"):
            await use
    assert path.read_bytes() == content


async def test_an_environment_that_cannot_keep_its_state_can_only_start_again(tmp_path, dying):
    class Restarted(Counter):
        restart_only = "Restarted holds a socket"

    path = await killed_at(7, tmp_path, dying)
    model = SGLangModel(tokenizer=TOKENIZER, client=ScriptedSGLang(TOKENIZER, ["4"]).client())
    environment = Restarted(lambda: model, journal=tmp_path)
    for use in (environment.resume(path), environment.fork(path, 0)):
        with pytest.raises(JournalError, match="the episode can only start again: Restarted holds a socket"):
            await use


async def test_another_tokenizer_is_refused_and_the_right_one_continues(chatml_tokenizer, tmp_path, dying):
    whole, _ = counter(tmp_path / "whole")
    whole = await whole.step(ASK)
    path = await killed_at(9, tmp_path / "killed", dying)
    other = build_chatml_tokenizer(with_marks=False)
    environment, scripted = counter(tmp_path, tokenizer=other)
    (result,) = await environment.resume(path)
    assert "recorded with another vocabulary" in result.error and not scripted.requests
    environment, _ = counter(tmp_path)
    (resumed,) = await environment.resume(path)
    assert facts_of(resumed) == facts_of(whole)


class RetryOnce(HookProvider):
    """Throws the first answer away."""

    def register_hooks(self, registry, **kwargs):
        registry.add_callback(AfterModelCallEvent, self.retry)
        self.is_done = False

    def retry(self, event):
        event.retry, self.is_done = not self.is_done, True


async def test_a_fork_says_which_turns_it_cannot_continue_before(tmp_path):
    environment, _ = counter(tmp_path)
    environment.get_hooks = lambda: [RetryOnce()]
    result = await environment.step(ASK)
    with pytest.raises(JournalError, match="turn 0 was discarded: a hook retried the call; fork at one that was kept"):
        await environment.fork(result, 0)
    with pytest.raises(JournalError, match="there is no turn 77 to continue before; its turns: 0, 1, 2, 3, 4, 5"):
        await environment.fork(result, 77)
    with pytest.raises(JournalError, match="there is no turn -1"):
        await environment.fork(result, -1)
    result.journal = None
    with pytest.raises(JournalError, match="has no journal to fork"):
        await environment.fork(result, 0)


async def test_a_second_resume_is_told_who_runs_the_episode(tmp_path, dying):
    path = await killed_at(7, tmp_path, dying)
    running = Journal(path)
    running.open()
    environment, _ = counter(tmp_path)
    with pytest.raises(JournalInUseError, match=rf"the journal is written by .*, process {os.getpid()}"):
        await environment.resume(path)
    running.close()
    (result,) = await environment.resume(path)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE


@contextmanager
def largest_file(size):
    """Let no file of this process grow beyond a size, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_an_episode_continues_on_a_full_disk_and_says_once_that_it_is_not_protected(tmp_path, caplog):
    environment, _ = counter(tmp_path)
    with largest_file(4000):
        result = await environment.step(ASK)
    assert (result.termination_reason, result.reward.reward) == (TerminationReason.TASK_COMPLETE, 1.0)
    said = [record.message for record in caplog.records if "not protected" in record.message]
    assert len(said) == 1 and "the journal cannot be written" in said[0]
    assert result.journal is None
    (left,) = tmp_path.iterdir()  # no one resumes it: what happened since would happen twice
    assert left.suffix == ".lost" and Journal(left).entries()
    assert await environment.resume(tmp_path) == []


async def test_a_fork_continues_on_a_full_disk_unless_it_must_be_protected(tmp_path, caplog):
    environment, _ = counter(tmp_path / "kept")
    whole = await environment.step(ASK)
    for is_required in (False, True):
        environment, _ = counter(tmp_path / "full", journal_required=is_required)
        with largest_file(10):
            if is_required:
                with pytest.raises(JournalError, match="the journal cannot be written"):
                    await environment.fork(whole, turn=2)
            else:
                (fork,) = await environment.fork(whole, turn=2)
    assert (fork.termination_reason, fork.reward.reward) == (TerminationReason.TASK_COMPLETE, 1.0)
    assert tokens_of(fork) == tokens_of(whole) and fork.journal is None
    assert sum("not protected" in record.message for record in caplog.records) == 1
    assert not list((tmp_path / "full").iterdir())


async def test_an_episode_that_must_be_protected_ends_on_a_full_disk(tmp_path):
    for size in (10, 4000):
        environment, _ = counter(tmp_path / str(size), journal_required=True)
        with largest_file(size):
            result = await environment.step(ASK)
        assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
        assert result.reward is None and "the episode cannot be protected" in result.error
    environment, _ = counter(tmp_path / str(size))
    (resumed,) = await environment.resume(result.journal.path)
    assert resumed.termination_reason is TerminationReason.TASK_COMPLETE


async def test_a_folder_is_resumed_without_journals_that_have_not_begun(tmp_path, dying):
    path = await killed_at(7, tmp_path, dying)
    (tmp_path / "0.journal").touch()
    environment, _ = counter(tmp_path)
    (result,) = await environment.resume(tmp_path)
    assert result.journal.path == path
    with pytest.raises(JournalError, match=r"0\.journal: no episode has begun in it"):
        await environment.resume(tmp_path / "0.journal")


async def test_a_cancelled_episode_is_resumed(tmp_path):
    whole, _ = counter(tmp_path / "whole")
    whole = await whole.step(ASK)
    gate = Gate(on_abort="All")

    def wait_at_the_end(request):
        answer = answer_by_position(request)
        return gate(request) if answer == SCRIPT[-1] else answer

    environment, _ = counter(tmp_path / "cancelled", answers=wait_at_the_end)
    running = asyncio.ensure_future(environment.step(ASK))
    await gate.reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert environment.last_result.termination_reason is TerminationReason.CANCELLED
    environment, _ = counter(
        tmp_path,
        answers=lambda request: " done." if request.text.endswith("All") else answer_by_position(request),
    )
    (resumed,) = await environment.resume(tmp_path / "cancelled")
    assert resumed.termination_reason is TerminationReason.TASK_COMPLETE
    assert resumed.observation.final_response == "All done."
    assert environment.total == 9


async def test_a_later_attempt_is_resumed_as_such(tmp_path, dying):
    failing = {"left": 1}

    def fail_first(request):
        answer = answer_by_position(request)
        if answer == SCRIPT[2] and failing["left"]:
            failing["left"] -= 1
            return ScriptedFault(status=500)
        return answer

    settings = {"retries": 1, "retry_delay": 0.0, "answers": fail_first}
    environment, _ = counter(tmp_path / "whole", **settings)
    whole = await environment.step(ASK)
    assert whole.observation.metrics["attempts"] == 2
    writes = dying.writes
    for write in range(writes // 3, writes):
        failing["left"] = 1
        path = await killed_at(write, tmp_path / str(write), dying, **settings)
        environment, _ = counter(tmp_path, **settings)
        (resumed,) = await environment.resume(path)
        if resumed.termination_reason is TerminationReason.INTERRUPTED:
            continue
        assert facts_of(resumed) == facts_of(whole), write
        assert resumed.observation.metrics["attempts"] == 2 or failing["left"] == 0, write


async def test_a_message_that_a_hook_changes_in_place_is_resumed_as_changed(tmp_path, dying):
    class Redacts(HookProvider):
        def register_hooks(self, registry, **kwargs):
            registry.add_callback(BeforeModelCallEvent, self.redact)

        def redact(self, event):
            for message in event.agent.messages:
                for block in message["content"]:
                    if "toolResult" in block:
                        block["toolResult"]["content"] = [{"text": "redacted"}]

    class Redacting(Counter):
        def get_hooks(self):
            return [Redacts()]

    def environment(folder):
        scripted = ScriptedSGLang(TOKENIZER, answer_by_position)
        model = SGLangModel(tokenizer=TOKENIZER, client=scripted.client())
        return Redacting(lambda: model, reward_fn=Contains(), journal=folder)

    whole = await environment(tmp_path / "whole").step(ASK)
    for write in range(4, dying.writes, 3):
        with dying.at(write):
            await environment(tmp_path / str(write)).step(ASK)
        (resumed,) = await environment(tmp_path / str(write)).resume(tmp_path / str(write))
        if resumed.termination_reason is not TerminationReason.INTERRUPTED:
            assert facts_of(resumed) == facts_of(whole), write


async def test_a_fork_of_a_fork_is_resumed_and_forked_like_any_episode(tmp_path, dying):
    environment, _ = counter(tmp_path)
    whole = await environment.step(ASK)
    (fork,) = await environment.fork(whole, 1)
    later = fork.observation.trajectory.turns[3].index
    for again in await environment.fork(fork, later, 2):
        assert facts_of(again) == facts_of(whole)
    known = set(tmp_path.glob("*.journal"))
    with dying.at(6):
        await environment.fork(fork, later)
    (killed,) = set(tmp_path.glob("*.journal")) - known
    (resumed,) = await environment.resume(killed)
    assert facts_of(resumed) == facts_of(whole)


@pytest.mark.parametrize("state", [b"", b"\0\xff", {"picture": b"\0\xff"}, [b"a", {"b": [b""]}], "text", 0, []])
async def test_a_state_is_loaded_as_it_was_saved(tmp_path, dying, state):
    loaded = []

    def environment():
        made, _ = counter(tmp_path)

        async def save_state():
            return state

        async def load_state(given):
            loaded.append(given)

        made.save_state, made.load_state = save_state, load_state
        return made

    with dying.at(5):
        await environment().step(ASK)
    await environment().resume(tmp_path)
    assert loaded == [state]


async def test_a_state_that_no_file_can_hold_is_said_once_and_ends_nothing(tmp_path, caplog):
    for state in (object(), {"numbers": {1, 2}}):
        caplog.clear()
        environment, _ = counter(tmp_path)

        async def save_state(state=state):
            return state

        environment.save_state = save_state
        result = await environment.step(ASK)
        assert result.termination_reason is TerminationReason.TASK_COMPLETE
        assert sum("not protected" in record.message for record in caplog.records) == 1


async def test_a_file_that_is_no_journal_is_not_written_and_a_missing_one_is_not_made(tmp_path):
    path = tmp_path / "a.journal"
    path.write_bytes(b"something else")
    environment, _ = counter(path)
    with pytest.raises(JournalError, match="the journal holds an episode"):
        await environment.step(ASK)
    assert path.read_bytes() == b"something else"
    with pytest.raises(FileNotFoundError):
        await environment.resume(tmp_path / "missing.journal")
    assert not (tmp_path / "missing.journal").exists()


LONG = {
    "to its end": {},
    "turns": {"max_turns": 33},
    "tool iterations": {"max_tool_iterations": 32},
    "tool calls": {"max_tool_calls": 17},
    "tokens": {"max_total_tokens": 12_000},
}


@pytest.mark.parametrize("limits", LONG.values(), ids=LONG)
async def test_an_episode_of_several_invocations_keeps_its_budgets(tmp_path, dying, limits):
    def answer(request):
        position = request.text.count("<|im_start|>assistant") - 1
        return call("add", number=position) if position < 35 else "All done."

    settings = {"max_tool_iterations": None, "answers": answer, "fork_points": 5, **limits}
    environment, _ = counter(tmp_path / "whole", **settings)
    whole = await environment.step(ASK)
    writes = dying.writes
    for write in range(7, writes, writes // 4):
        path = await killed_at(write, tmp_path / str(write), dying, **settings)
        again, _ = counter(tmp_path, **settings)
        (resumed,) = await again.resume(path)
        assert facts_of(resumed) == facts_of(whole), write
        assert again.total == environment.total, write


async def test_a_call_that_a_hook_retries_is_trained_once_after_any_kill(tmp_path, dying):
    def made(folder):
        environment, _ = counter(folder)
        environment.get_hooks = lambda: [RetryOnce()]
        return environment

    whole = await made(tmp_path / "whole").step(ASK)
    for write in range(4, dying.writes):
        with dying.at(write):
            await made(tmp_path / str(write)).step(ASK)
        (resumed,) = await made(tmp_path / str(write)).resume(tmp_path / str(write))
        if resumed.termination_reason is not TerminationReason.INTERRUPTED:
            assert tokens_of(resumed) == tokens_of(whole), write


class Helped(Environment):
    """Without a state; its tool asks another agent on the same model."""

    def __init__(self, model, **kwargs):
        super().__init__(lambda: model, Contains(), "You lead.", **kwargs)
        self.model = model

    def identity(self):
        return {"class": "Helped"}

    def get_tools(self):
        @has_effect("pure")
        @tool
        async def ask(question: str) -> str:
            """Ask a helper.

            Args:
                question: The question.
            """
            return str(await make_agent(self.model, system_prompt="You help.").invoke_async(question))

        return [ask]


def helped(folder):
    def answer(request):
        if "You help." in request.text:
            return "It is so."
        position = request.text.count("<|im_start|>assistant") - 1
        return [call("ask", question="Is it?"), call("ask", question="Why?") * 2, "All done."][position]

    scripted = ScriptedSGLang(TOKENIZER, answer)
    return Helped(SGLangModel(tokenizer=TOKENIZER, client=scripted.client()), journal=folder)


async def test_what_a_sub_agent_was_answered_is_kept_and_trained_once_if_its_call_runs_again(tmp_path, dying):
    whole = await helped(tmp_path / "whole").step(ASK)
    again = []
    for write in range(4, dying.writes):
        with dying.at(write):
            await helped(tmp_path / str(write)).step(ASK)
        (path,) = (tmp_path / str(write)).glob("*.journal")
        received = [turn.output_ids for turn in Trajectory.load(path).turns]
        (resumed,) = await helped(tmp_path).resume(path)
        assert sorted(tokens_of(resumed), key=str) == sorted(tokens_of(whole), key=str), write
        turns = resumed.observation.trajectory.turns
        assert len([turn for turn in turns if turn.output_ids in received]) >= len(received)
        again += [turn.note for turn in turns if turn.status is TurnStatus.DISCARDED]
        assert record_of(Trajectory.load(path)) == record_of(
            Trajectory.from_bytes(resumed.observation.trajectory.to_bytes())
        )
    assert set(again) == {"the process died inside the tool call that asked, which ran again"}


async def test_forks_that_run_at_the_same_time_are_each_their_own(tmp_path):
    environment = helped(tmp_path)
    whole = await environment.step(ASK)
    main = [turn.index for turn in whole.observation.trajectory.turns if not turn.is_auxiliary and turn.tool_calls]
    forks = await environment.fork(whole, main[1], 3)
    assert len({id(fork.observation.trajectory) for fork in forks}) == 3
    for fork in forks:
        assert sorted(tokens_of(fork), key=str) == sorted(tokens_of(whole), key=str)
        (again,) = await environment.fork(fork, fork.observation.trajectory.main_leaf().index)
        assert sorted(tokens_of(again), key=str) == sorted(tokens_of(whole), key=str)
    with pytest.raises(JournalError, match="turn 1 is a helper's or a sub-agent's; fork at one of the main agent"):
        await environment.fork(whole, 1)


async def test_a_call_with_a_recorded_result_is_not_open_after_a_second_kill(tmp_path, dying):
    def answer(request):
        position = request.text.count("<|im_start|>assistant") - 1
        return [call("send", text="one") + call("add", number=1) * 2, "All done."][position]

    def made(folder, effects):
        environment, _ = counter(folder, effects, answers=answer)
        environment.save_state = no_state
        return environment

    async def no_state():
        return None

    await made(tmp_path / "whole", []).step(ASK)
    for first in range(6, dying.writes):
        for second in range(1, 8):
            folder, effects = tmp_path / f"{first} {second}", []
            with dying.at(first):
                await made(folder, effects).step(ASK)
            with dying.at(second):
                await made(folder, effects).resume(folder)
            (path,) = folder.glob("*.journal")
            entries = Journal(path).entries()
            begun = {entry.data["call"] for entry in entries if entry.kind == "tool" and entry.data["effect"] == "once"}
            ended = {entry.data["call"] for entry in entries if entry.kind == "result"}
            (resumed,) = await made(folder, effects).resume(path)
            is_interrupted = resumed.termination_reason is TerminationReason.INTERRUPTED
            assert is_interrupted == bool(begun - ended), (first, second)
            assert len(effects) <= 1


# --- what an environment's own code breaks ---


async def test_a_state_that_cannot_be_saved_costs_the_protection_and_not_the_result_of_the_tool(tmp_path):
    environment, _ = counter(tmp_path)
    plain, _ = counter(None)
    saved = []

    async def save_state():
        saved.append(1)
        if len(saved) > 1:
            raise OSError("no room")
        return {"total": 0}

    environment.save_state = save_state
    result = await environment.step(ASK)
    assert facts_of(result) == facts_of(await plain.step(ASK))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lost"]


@pytest.mark.parametrize("value", [b"\xff", object()], ids=["bytes", "object"])
async def test_metrics_of_any_kind_end_the_episode_as_without_a_journal(tmp_path, value):
    environment, _ = counter(tmp_path)
    environment.compute_metrics = lambda observation: {"mine": value}
    result = await environment.step(ASK)
    assert result.reward.reward == 1.0
    (again,) = await environment.resume(tmp_path)
    assert again.reward == result.reward


async def test_each_attempt_is_protected_although_one_was_not(tmp_path):
    environment, _ = counter(tmp_path, retries=1, retry_delay=0.001, journal_required=True)
    failing, append = iter([True]), Journal.append

    def once(journal, kind, *arguments):
        if kind == "result" and next(failing, False):
            raise JournalError("no room")
        append(journal, kind, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Journal, "append", once)
        result = await environment.step(ASK)
    assert result.observation.metrics["attempts"] == 2
    kinds = [entry.kind for entry in result.journal.entries()]
    assert (kinds.count("attempt"), kinds[-1]) == (2, "end")


async def test_a_state_that_cannot_be_loaded_leaves_the_episode_to_be_resumed(tmp_path, dying):
    whole = await counter(tmp_path / "whole")[0].step(ASK)
    path = await killed_at(6, tmp_path / "killed", dying)
    environment, _ = counter(tmp_path)
    load_state, environment.load_state = environment.load_state, None
    (failed,) = await environment.resume(path)
    assert failed.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert "the environment's state cannot be restored" in failed.error
    environment.load_state = load_state
    (resumed,) = await environment.resume(path)
    assert facts_of(resumed) == facts_of(whole)


async def test_the_result_of_an_ended_episode_is_as_it_was(tmp_path):
    class Secret(TaskContext):
        secret: str = ""

    history = [{"role": "user", "content": "Before?"}, {"role": "assistant", "content": "Yes."}]
    context = Secret(id="count", ground_truth="done", conversation_history=history, secret="kept")
    environment, _ = counter(tmp_path, answers=["All done."])
    result = await environment.step(Action(message="Count.", task_context=context))
    (again,) = await environment.resume(tmp_path)
    assert again.observation.messages == result.observation.messages
    begun = next(entry for entry in result.journal.entries() if entry.kind == "attempt")
    assert begun.data["action"]["task_context"]["secret"] == "kept"


async def test_a_folder_is_resumed_around_journals_that_cannot_be(tmp_path, dying, caplog):
    path = await killed_at(6, tmp_path, dying)
    (tmp_path / "0.journal").write_bytes(b"something else")
    (tmp_path / "1.journal").symlink_to("acknowledged meanwhile")
    foreign = Journal(tmp_path / "2.journal")
    foreign.append("attempt", [1])
    foreign.close()
    environment, _ = counter(tmp_path)
    (result,) = await environment.resume(tmp_path)
    assert result.journal.path == path and "a journal is left as it is" in caplog.text


def test_a_state_of_a_base_class_is_not_that_of_a_subclass_with_its_own_reset():
    class Further(Counter):
        async def reset(self):
            await super().reset()

    class Whole(Further):
        async def save_state(self):
            return None

        async def load_state(self, state):
            pass

    assert "has a reset, but no save_state" in Further(None).restart_only
    assert Counter(None).restart_only is Whole(None).restart_only is Environment(None).restart_only is None


class Listener(Counter):
    """Its user remembers the answers that it has heard."""

    async def reset(self):
        self.heard = []

    async def save_state(self):
        return list(self.heard)

    async def load_state(self, state):
        self.heard = list(state)

    async def next_user_message(self, action, messages):
        self.heard.append(messages[-1]["content"][0]["text"])
        return f"Heard {self.heard}." if len(self.heard) < 4 else None

    def get_tools(self):
        return []


async def test_a_user_remembers_in_a_resumed_and_a_forked_episode_what_it_has_heard(tmp_path, dying):
    def environment(folder):
        scripted = ScriptedSGLang(TOKENIZER, lambda request: f"Answer {request.text.count('<|im_start|>assistant')}.")
        model = SGLangModel(tokenizer=TOKENIZER, client=scripted.client())
        return Listener(lambda: model, Contains(), journal=folder)

    whole = await environment(tmp_path / "whole").step(ASK)
    assert len(whole.observation.messages) == 8
    for count in range(2, dying.writes):
        with dying.at(count):
            await environment(tmp_path / str(count)).step(ASK)
        (resumed,) = await environment(tmp_path).resume(tmp_path / str(count))
        assert facts_of(resumed) == facts_of(whole), count
    for turn in range(4):
        (forked,) = await environment(tmp_path / "forks").fork(whole, turn)
        assert facts_of(forked)[3] == facts_of(whole)[3], turn


async def test_a_tool_that_has_ended_the_episode_has_ended_it_when_a_judge_is_asked_again(tmp_path):
    @tool(context=True)
    def submit(answer: str, tool_context) -> str:
        """Submit.

        Args:
            answer: The answer.
        """
        tool_context.invocation_state["request_state"]["stop_event_loop"] = True
        return "submitted"

    judge = Judge()
    judge.error = RewardError("the judge refuses connections", is_infrastructure=True)

    def environment():
        env, scripted = counter(tmp_path, answers=lambda request: call("submit", answer="4"))
        env.reward_fn, env.get_tools = judge, lambda: [submit]
        return env, scripted

    env, _ = environment()
    first = await env.step(ASK)
    judge.error = None
    env, scripted = environment()
    (resumed,) = await env.resume(tmp_path)
    assert resumed.reward == RewardResult(reward=1.0) and not scripted.requests
    assert facts_of(resumed)[2:] == facts_of(first)[2:]
