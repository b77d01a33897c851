"""Agents that Strands restores continue their recorded tokens, in this process and in another one."""

import asyncio
import gc
import os
import subprocess
import sys

import pytest
from strands import tool
from strands.session import FileSessionManager

from strands_sglang import Journal, SGLangModel, TokenizerMismatchError, Trajectory
from strands_sglang.messages import message_digest
from strands_sglang.testing import ScriptedSGLang
from support.agents import (
    LetterTokenizer,
    ScriptedModel,
    ask,
    build_chatml_tokenizer,
    call,
    has_module,
    make_agent,
    make_tools,
    needs_module,
)

SNAPSHOTS = "strands.session.snapshot_session_manager"
MANAGERS = ["files", pytest.param("snapshots", marks=needs_module(SNAPSHOTS))]


calculator = make_tools()[0][0]


def sampled(request):
    """An answer that depends on the prompt only: a call with reasoning, then a text."""
    _, _, question = request.text.rpartition("<|im_start|>user\n")
    if "<tool_response>" not in question:
        return f"<think>\nHm {len(request.text)}.\n</think>\n\n{call(expression=f'{len(request.text)} * 2')}"
    return f"It was {len(request.text)}."


def manager_of(kind, folder):
    """One of Strands' session managers, for a session in a folder."""
    if kind == "files":
        return FileSessionManager("one", storage_dir=str(folder))
    from strands.session import SnapshotSessionManager
    from strands.storage import LocalFileStorage

    return SnapshotSessionManager("one", storage=LocalFileStorage(str(folder)))


def converse(kind, folder, url, *questions):
    """Ask an agent that continues the session in a folder."""
    model = SGLangModel(tokenizer=build_chatml_tokenizer(), base_url=url, sessions=folder / "tokens")
    manager = None if kind is None else manager_of(kind, folder)
    agent = make_agent(model, [calculator], hooks=[model.hooks], agent_id="agent", session_manager=manager)
    asyncio.run(ask(agent, *questions))
    return model


@pytest.fixture(scope="module")
def left_behind(chatml_tokenizer, tmp_path_factory):
    """A folder of sessions, by kind, that another process wrote before it was killed."""
    folder = tmp_path_factory.mktemp("sessions")
    code = "import os, sys, pathlib, test_sessions as t; *kinds, folder, url = sys.argv[1:]\n"
    code += "for kind in kinds: t.converse(kind, pathlib.Path(folder, kind), url, 'First?', 'Second?')\n"
    code += "os.kill(os.getpid(), 9)"
    kinds = ["files", *(["snapshots"] if has_module(SNAPSHOTS) else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    with ScriptedSGLang(chatml_tokenizer, sampled).serve() as url:
        command = [sys.executable, "-c", code, *kinds, str(folder), url]
        assert subprocess.run(command, check=False, timeout=120, env=environment).returncode == -9
    return folder


def tokens(model):
    """The tokens of the main sequence, with mask and logprobs."""
    sequence = model.token_manager
    return sequence.token_ids, sequence.loss_mask, sequence.logprobs


@pytest.mark.parametrize("kind", MANAGERS)
def test_an_agent_restored_in_another_process_continues_its_sequence(kind, left_behind, chatml_tokenizer, tmp_path):
    with ScriptedSGLang(chatml_tokenizer, sampled).serve() as url:
        for question in ("Third?", "Fourth?"):
            restored = converse(kind, left_behind / kind, url, question)
            restored.trajectory.on_record.journal.close()  # as the end of its process does
        whole = converse(None, tmp_path, url, "First?", "Second?", "Third?", "Fourth?")

    assert len(restored.trajectory.sequences()) == 1
    assert tokens(restored) == tokens(whole)
    assert [turn.reason for turn in restored.trajectory.turns] == [turn.reason for turn in whole.trajectory.turns]
    [journal] = (left_behind / kind / "tokens").iterdir()  # continued, not copied
    assert Trajectory.load(journal).sequences()[0].token_ids == tokens(whole)[0]


@pytest.mark.parametrize("kind", MANAGERS)
def test_messages_have_the_same_digests_after_a_session(kind, tmp_path):
    picture = {"image": {"format": "png", "source": {"bytes": bytes(range(256))}}}

    @tool
    def look(at: float, where: str) -> dict:
        """Look at something.

        Args:
            at: When.
            where: Where.
        """
        return {"status": "success", "content": [picture, {"json": {"é": [1.0, 1e-7, None]}}, {"text": "\x00\ud7ff"}]}

    calls = [{"toolUseId": "1", "name": "look", "input": {"at": 1e-7, "where": "Zürich\u2028"}}]
    agents = []
    for answers in ([calls, "Fine."], []):
        manager = manager_of(kind, tmp_path)
        agents.append(make_agent(ScriptedModel(answers), [look], agent_id="a", session_manager=manager))
        if answers:
            asyncio.run(agents[0].invoke_async([picture, {"text": "What is it?"}]))

    before, after = ([message_digest(message) for message in agent.messages] for agent in agents)
    assert len(after) == 4
    assert after == before


@pytest.fixture
def make_model(rollout, tmp_path):
    """Sets up models that keep the tokens of sessions in `tmp_path`, unless told otherwise."""
    return lambda **config: rollout(sampled, **{"sessions": tmp_path, **config})[1]


async def saved_agent(model, *questions):
    """The snapshot of an agent that has asked, and its tokens; what held them is gone."""
    agent = make_agent(model, [calculator])
    await ask(agent, *questions or ["First?", "Second?"])
    before = agent.take_snapshot(preset="session"), model.token_manager.token_ids
    model.trajectory.on_record.journal.close()
    return before


def restored(model, snapshot, **kwargs):
    """An agent of a snapshot."""
    agent = make_agent(model, [calculator], **kwargs)
    agent.load_snapshot(snapshot)
    return agent


@pytest.mark.parametrize("at_once", [False, True])
async def test_agents_of_one_snapshot_continue_it_each_in_a_record_of_its_own(make_model, tmp_path, at_once):
    snapshot, before = await saved_agent(make_model())
    model = make_model()

    async def attempt(question):
        with model.episode() as trajectory:
            await ask(restored(model, snapshot, hooks=[model.hooks]), question, "And then?")
        trajectory.on_record.journal.close()
        return trajectory

    questions = ["Third?", "Another third?", "Yet another?"]
    if at_once:
        trajectories = await asyncio.gather(*map(attempt, questions))
    else:
        trajectories = [await attempt(question) for question in questions]

    for trajectory, question in zip(trajectories, questions, strict=True):
        [sequence] = trajectory.sequences()
        assert sequence.token_ids[: len(before)] == before
        assert question in model.tokenizer.decode(sequence.token_ids)
        assert len(trajectory.turns) == 8
    written = [Trajectory.load(path) for path in tmp_path.iterdir()]
    assert len(written) == 3  # the first one continues the file
    sequences = sorted(trajectory.sequences()[0].token_ids for trajectory in trajectories)
    assert sorted(trajectory.sequences()[0].token_ids for trajectory in written) == sequences


async def test_what_was_sampled_after_a_snapshot_is_not_part_of_it(make_model, tmp_path):
    model = make_model()
    agent = make_agent(model, [calculator])
    await ask(agent, "First?")
    snapshot, before = agent.take_snapshot(preset="session"), model.token_manager.token_ids
    await ask(agent, "Second?")
    later = make_model()
    await ask(restored(later, snapshot), "Another second?")

    assert [len(one.trajectory.turns) for one in (model, later)] == [4, 4]
    assert later.token_manager.token_ids[: len(before)] == before
    await ask(agent, "Third?")  # the first agent has its file still
    assert sorted(len(Trajectory.load(path).turns) for path in tmp_path.iterdir()) == [4, 6]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_other(path):
    path.write_bytes(b"{}" * 100_000)


DAMAGES = {
    "it is gone": (os.remove, "No such file"),
    "it is cut off": (cut, "ends before byte"),
    "it is changed": (flip, "damaged"),
    "it is another file": (replace_by_other, "begins with"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_without_its_file_an_agent_continues_with_a_warning_that_says_why(make_model, tmp_path, caplog, damage):
    snapshot, _ = await saved_agent(make_model())
    [path] = tmp_path.iterdir()
    apply, why = DAMAGES[damage]
    apply(path)
    models = [make_model(), make_model(sessions=None)]
    for model in models:
        await ask(restored(model, snapshot), "Third?", "Fourth?")

    assert tokens(models[0]) == tokens(models[1])  # rendered, as without sessions
    [record] = [record for record in caplog.records if record.name.endswith("sessions")]
    assert why in record.getMessage()
    [new] = {*tmp_path.iterdir()} - {path}
    assert len(Trajectory.load(new).turns) == 4


@pytest.mark.parametrize("name", ["../x-1", "x", 7, None, ["a"], {"journal": "x"}])
async def test_a_state_names_no_other_file(make_model, tmp_path, name):
    snapshot, _ = await saved_agent(make_model(sessions=tmp_path / "a"))
    snapshot.data["model_state"]["strands_sglang_journal"] = name
    model = make_model(sessions=tmp_path / "b")
    await ask(restored(model, snapshot), "Third?")
    assert len(model.trajectory.turns) == 2


async def test_an_edited_history_opens_a_sequence_with_the_reason(make_model):
    snapshot, _ = await saved_agent(make_model())
    model = make_model()
    agent = restored(model, snapshot)
    del agent.messages[:4]
    await ask(agent, "Third?")
    assert [len(sequence) > 0 for sequence in model.trajectory.sequences()] == [True, True]
    assert "message 0 (user) is not the recorded one" in model.trajectory.turns[4].reason


async def test_another_vocabulary_is_an_error(make_model, tmp_path):
    snapshot, _ = await saved_agent(make_model())
    tokenizer = LetterTokenizer()
    server = ScriptedSGLang(tokenizer, sampled)
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), sessions=tmp_path)
    with pytest.raises(TokenizerMismatchError, match="another vocabulary"):
        await ask(restored(model, snapshot), "Third?")


async def test_agents_that_share_a_record_are_restored_together(make_model, caplog):
    model = make_model()
    agents = [make_agent(model, [calculator], system_prompt=prompt) for prompt in ("Be brief.", "Be kind.")]
    for agent in agents * 2:
        await ask(agent, "What?")
    snapshots = [agent.take_snapshot(preset="session") for agent in agents]
    later = make_model()
    for snapshot, prompt in zip(reversed(snapshots), ("Be kind.", "Be brief."), strict=True):
        await ask(restored(later, snapshot, system_prompt=prompt), "Now?")

    assert len(later.trajectory.turns) == 12
    assert len(later.trajectory.sequences()) == 2
    assert not caplog.records


async def test_agents_with_records_of_their_own_need_episodes_of_their_own(make_model, caplog):
    snapshots = [(await saved_agent(make_model(), question))[0] for question in ("First?", "Other?")]
    model = make_model()
    for snapshot in snapshots:
        await ask(restored(model, snapshot), "Second?", "Third?")
    [record] = caplog.records
    assert "use `with model.episode()`" in record.getMessage()
    assert len(model.trajectory.sequences()) == 2

    caplog.clear()
    for snapshot in snapshots:
        with model.episode() as trajectory:
            await ask(restored(model, snapshot), "Second?")
        assert [turn.parent is None for turn in trajectory.turns] == [True, False, False, False]
    assert not caplog.records


async def test_an_episode_without_a_history_begins_empty(make_model):
    model = make_model()
    agent = make_agent(model, [calculator])
    for _ in range(2):
        model.reset()
        agent.messages.clear()
        await ask(agent, "What?")
        assert len(model.trajectory.turns) == 2
    model.reset()
    await ask(agent, "And?")  # with its history, the agent brings its record along
    assert [len(sequence) > 0 for sequence in model.trajectory.sequences()] == [True]
    assert len(model.trajectory.turns) == 4


async def test_a_given_trajectory_is_written_whole(make_model):
    model = make_model(sessions=None)
    agent = make_agent(model, [calculator])
    await ask(agent, "First?")
    later = make_model()
    later.trajectory = Trajectory.from_bytes(model.trajectory.to_bytes())
    agent = restored(later, agent.take_snapshot(preset="session"))
    await ask(agent, "Second?")
    last = make_model()
    await ask(restored(last, agent.take_snapshot(preset="session")), "Third?")

    assert len(last.trajectory.turns) == 6
    assert len(last.trajectory.sequences()) == 1
    assert last.trajectory.pieces.keys() >= set(later.token_manager.token_ids)


async def test_a_folder_that_cannot_be_written_is_a_warning_and_no_lost_answer(make_model, tmp_path, caplog):
    (tmp_path / "file").touch()
    model = make_model(sessions=tmp_path / "file")
    await ask(make_agent(model, [calculator]), "First?", "Second?")
    assert caplog.text.count("from here on a restored agent's tokens are rendered") == 1
    assert len(model.trajectory.sequences()) == 1


async def test_a_trajectory_that_something_else_writes_is_left_to_it(make_model, tmp_path):
    model = make_model()
    written = []
    model.trajectory.on_record = written.append
    await ask(make_agent(model, [calculator]), "First?")
    assert len(written) == 2
    assert not [*tmp_path.iterdir()]


async def test_a_journal_is_closed_with_its_trajectory(make_model):
    model = make_model()
    await ask(make_agent(model, [calculator]), "First?")
    path = model.trajectory.on_record.journal.path
    model.reset()
    for _ in range(3):  # what one round frees may hold more
        gc.collect()
    Journal(path).open()  # free for another writer
