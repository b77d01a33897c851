"""What is read from recorded episodes of every kind."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from strands_env.core import Action, Environment, TaskContext
from strands_env.core.models import sglang_model_factory
from strands_env.eval import Evaluator
from strands_sglang import credit
from strands_sglang.cli import main
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import UnreadableError, read
from strands_sglang.inspection.records import Writer
from strands_sglang.inspection.show import episode_lines
from strands_sglang.inspection.texts import writers_of
from strands_sglang.terminal import SHADES
from strands_sglang.testing import ScriptedSGLang
from support.agents import call, make_agent
from support.environments import Gives, StubEnvironment, tasks


def test_a_trajectory_is_read_with_its_turns_and_sequences(rollout, tmp_path):
    _, model = rollout([call(expression="2+2"), "The answer is 4."])
    make_agent(model)("What is 2+2?")
    model.trajectory.save(tmp_path / "one.safetensors")

    (group,) = read([tmp_path / "one.safetensors"])

    (episode,) = group.episodes
    (sequence,) = episode.sequences
    (exact,) = model.trajectory.sequences()
    assert sequence.column("ids").tolist() == exact.token_ids
    assert sequence.mask.tolist() == exact.loss_mask
    assert [step.turn for step in sequence.steps] == episode.turns
    sampled = [
        pair for *pair, mask in zip(sequence.column("logprobs"), exact.logprobs, exact.loss_mask, strict=True) if mask
    ]
    assert sampled and all(recorded == own for recorded, own in sampled)


def save(rollout, folder):
    """Record an episode of one call in a folder; return the model."""
    _, model = rollout(["4"])
    make_agent(model)("What is 2+2?")
    folder.mkdir(exist_ok=True)
    model.trajectory.save(folder / "one.safetensors")
    return model


def test_the_only_folder_with_episodes_below_a_folder_is_read_and_named(rollout, tmp_path, capsys):
    (tmp_path / "run" / "empty").mkdir(parents=True)
    save(rollout, tmp_path / "run" / "trajectories")

    for command in (["show"], ["doctor"], ["view", "-o", str(tmp_path / "page.html")]):
        assert main([*command, str(tmp_path / "run")]) == 0
        told = capsys.readouterr()
        assert told.err == f"reading {tmp_path}/run/trajectories\n" and told.out


def test_several_folders_with_episodes_are_named(rollout, tmp_path, capsys):
    for name in ("before", "after"):
        save(rollout, tmp_path / name)

    assert main(["view", str(tmp_path)]) == 2
    assert f"these folders in it have some: {tmp_path}/after, {tmp_path}/before\n" in capsys.readouterr().err


def test_logprobs_are_shades_or_numbers(rollout, tmp_path, monkeypatch, capsys):
    model = save(rollout, tmp_path)
    (turn,) = model.trajectory.turns
    sampled = model.trajectory.sequences()[0].logprobs[-len(turn.output_ids) :]

    assert main(["show", str(tmp_path), "--color", "logprob"]) == 0
    shown = capsys.readouterr().out
    assert f"4({sampled[0]:.2f})" in shown and "\x1b" not in shown

    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["show", str(tmp_path), "--color", "logprob"]) == 0
    shown = capsys.readouterr().out
    shade = next(shade for least, shade in SHADES if sampled[0] >= least)
    assert f"\x1b[38;2;0;0;0;48;2;{shade}m4\x1b[0m" in shown and "(-" not in shown.splitlines()[-1]
    for least, shade in SHADES:
        assert f"48;2;{shade}m {least:g} \x1b[0m" in shown


def test_trained_tokens_are_shown(rollout, tmp_path, capsys):
    save(rollout, tmp_path)
    assert main(["show", str(tmp_path), "--color", "mask"]) == 0
    shown = capsys.readouterr().out
    assert "\ntrained   4·<|im_end|>\n" in shown and "\nmask 0    <|im_start|>·system" in shown


def test_findings_are_red_and_are_followed_by_the_next_command(rollout, tmp_path, monkeypatch, capsys):
    save(rollout, tmp_path)
    file = tmp_path / "one.safetensors"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["doctor", str(file)]) == 0
    assert capsys.readouterr().out.startswith("\x1b[32mnothing is wrong")

    content = file.read_bytes()
    file.write_bytes(content.replace(b"What is 2+2?", b"What is 2-2?"))
    assert main(["doctor", str(file)]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("\x1b[31m") and told.out.splitlines()[-1].startswith("\x1b[31m")
    assert told.err == f"next: strands-sglang view {file} --open\n"


def test_a_file_of_another_kind_is_named_in_one_line(tmp_path):
    (tmp_path / "notes.safetensors").write_bytes(b"hello")

    with pytest.raises(UnreadableError, match=r"notes\.safetensors: not a safetensors file"):
        read([tmp_path / "notes.safetensors"])


def steps_of(tmp_path, rollout, rewards=(1.0, 0.0)):
    """Write the folder of a training step with one group of calculator episodes; return it and its rows."""
    episodes = []
    for number, reward in enumerate(rewards):
        _, model = rollout([call(expression="2+2"), f"The answer is {number}."])
        make_agent(model)("What is 2+2?")
        model.trajectory.note_end(outcome="task_complete", reward=reward)
        episodes.append(credit.Episode(model.trajectory, reward, "g", f"e{number}"))
    rows = credit.training_rows(episodes)
    (tmp_path / "trajectories").mkdir(parents=True)
    for episode in episodes:
        episode.trajectory.save(tmp_path / "trajectories" / f"{episode.id}.safetensors")
    rows.save(tmp_path / "rows.safetensors")
    return rows


def test_a_training_step_is_read_with_its_rows(rollout, tmp_path):
    rows = steps_of(tmp_path, rollout)

    (group,) = read([tmp_path])

    assert [episode.id for episode in group.episodes] == ["e0", "e1"]
    assert [episode.end.reward for episode in group.episodes] == [1.0, 0.0]
    for episode, row in zip(group.episodes, rows, strict=True):
        (sequence,) = episode.sequences
        assert sequence.column("ids").tolist() == row.token_ids
        assert sequence.mask.tolist() == row.loss_mask
        assert sequence.given("advantages").tolist() == row.advantages


def test_an_episode_of_a_step_is_called_by_its_step_too(rollout, tmp_path, monkeypatch, capsys):
    """Every step has an e1; only its id is in the files."""
    for number in (1, 2):
        steps_of(tmp_path / "steps" / f"step-00000{number}", rollout)

    names = [episode.name for group in read([tmp_path]) for episode in group.episodes]

    assert names == [f"e{at} of step-00000{number}" for number in (1, 2) for at in (0, 1)]
    assert main(["show", str(tmp_path), "--episode", "e1 of step-000002"]) == 0
    told = capsys.readouterr().out
    assert told.count("episode e1 of step-000002") == 2 and "step-000001" not in told
    assert main(["show", str(tmp_path), "--episode", "e1"]) == 0
    assert "episode e1 of step-000001:" in capsys.readouterr().out
    assert main(["show", str(tmp_path), "--episode", "e2"]) == 2
    assert "some are 'e0 of step-000001', 'e1 of step-000001', 'e0 of step-000002'" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "steps" / "step-000001")
    [group] = read(["."])
    assert group.episodes[0].name == "e0 of step-000001"
    group.episodes[0].record = {"key": 7}  # of another program
    with pytest.raises(UnreadableError, match="'e9': there is none of this name"):
        list(episode_lines([group], episode="e9"))


def test_each_token_of_a_prompt_has_its_writer(rollout, tmp_path):
    _, model = rollout([call(expression="2+2"), "The answer is 4."])
    make_agent(model, system_prompt="Be brief.")("What is 2+2?")
    model.trajectory.save(tmp_path / "one.safetensors")

    (group,) = read([tmp_path / "one.safetensors"])

    (episode,) = group.episodes
    written = {writer: b"" for writer in Writer}
    for turn in episode.turns:
        for token_id, writer in zip(turn.prompt_ids, writers_of(turn, group.vocabulary).tolist(), strict=False):
            written[Writer(writer)] += group.vocabulary[token_id]
    assert b"Be brief." in written[Writer.SYSTEM] and b"What is 2+2?" in written[Writer.USER]
    assert written[Writer.TOOL].strip() == b"Unknown tool: calculator" and b"<|im_start|>" in written[Writer.TEMPLATE]
    assert not written[Writer.PROMPT]


async def test_an_evaluation_is_read_by_prompt(tmp_path, chatml_tokenizer):
    scripted = ScriptedSGLang(chatml_tokenizer, lambda request: "four")

    def environment(action):
        return Environment(
            model_factory=sglang_model_factory(client=scripted.client(), tokenizer=chatml_tokenizer),
            reward_fn=Gives(0.5),
        )

    evaluator = Evaluator(environment, 2, output_path=tmp_path, keep_trajectories=True)
    await evaluator.run([Action(message="What is 2+2?", task_context=TaskContext(id="sum"))])

    (group,) = read([tmp_path])

    assert (group.id, group.kind, len(group.episodes)) == ("sum", "evaluation", 2)
    for episode in group.episodes:
        assert (episode.end.reward, episode.end.outcome) == (0.5, "task_complete")
        assert [part.text for part in episode.said] == ["What is 2+2?", "four"]
        assert episode.turns[0].text.startswith("four")


async def test_an_evaluation_without_trajectories_is_shown(tmp_path, capsys):
    await Evaluator(StubEnvironment().factory, output_path=tmp_path).run(tasks(1))
    assert main(["show", str(tmp_path)]) == 0
    assert "reward 1, " in capsys.readouterr().out
    assert main(["show", str(tmp_path), "--turn", "0"]) == 2


@pytest.mark.parametrize("is_errored", [True, False])
async def test_an_errored_sample_may_be_tried_again(tmp_path, is_errored):
    await Evaluator(StubEnvironment().factory, output_path=tmp_path).run(tasks(1))
    results = tmp_path / "results.jsonl"
    first = {**json.loads(results.read_bytes()), "is_errored": is_errored}
    results.write_bytes(json.dumps(first).encode() + b"\n" + results.read_bytes())
    assert bool(findings(read([tmp_path]))) != is_errored


def test_a_rollout_dump_of_slime_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    sample = {
        "group_index": 3,
        "index": 7,
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "response_length": 5,
        "loss_mask": [1, 1, 0, 1, 1],
        "rollout_log_probs": [-1.0, -2.0, 0.0, -3.0, -4.0],
        "reward": 1.0,
        "status": "completed",
    }
    torch.save({"rollout_id": 0, "samples": [sample]}, tmp_path / "0.pt")

    (group,) = read([tmp_path / "0.pt"])

    (episode,) = group.episodes
    (sequence,) = episode.sequences
    assert (group.id, episode.id, episode.end.reward) == ("3", "7", 1.0)
    assert [turn.output_ids.tolist() for turn in episode.turns] == [[3, 4], [6, 7]]
    assert sequence.mask.tolist() == [0, 0, 1, 1, 0, 1, 1]


class Hostile:
    def __reduce__(self):
        return print, ("code of the file ran",)


def test_a_dump_that_would_run_code_is_refused(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"samples": [Hostile()]}, tmp_path / "0.pt")

    with pytest.raises(UnreadableError, match=r"0\.pt: not a slime rollout dump"):
        read([tmp_path / "0.pt"])
    assert not capsys.readouterr().out


def test_what_holds_no_episode_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "cut.jsonl").write_text('{"schema_version": 1, "tur')
    newer = {"format": "strands-sglang trajectory", "version": "99"}
    save_file({"prompt_ids": np.zeros(1, "int32")}, tmp_path / "newer.safetensors", metadata=newer)

    for name, why in {
        "empty": "it is empty",
        "notes.txt": "not one of",
        "other.json": "no OpenEnv TrainingTrace",
        "cut.jsonl": "line 1: not JSON, or truncated",
        "newer.safetensors": "version '99'",
        "missing.pt": "no such file",
    }.items():
        with pytest.raises(UnreadableError) as caught:
            read([tmp_path / name])
        assert why in str(caught.value) and name in str(caught.value)
        assert "\n" not in str(caught.value)


# --- journals ---


async def run_with_journal(tokenizer, folder):
    """Run an episode of two turns; return the path of its journal."""
    server = ScriptedSGLang(tokenizer, [call("missing", x=1), "The answer is 4."])
    factory = sglang_model_factory(tokenizer=tokenizer, client=server.client())
    environment = Environment(factory, Gives(1.0), journal=folder)
    result = await environment.step(Action(message="What is 2+2?", task_context=TaskContext(id="sum")))
    return result.journal.path


async def test_a_journal_is_read_like_the_trajectory_of_its_episode(chatml_tokenizer, tmp_path, capsys):
    path = await run_with_journal(chatml_tokenizer, tmp_path / "journals")
    for source in (path, path.parent):
        (group,) = read([source])
        (episode,) = group.episodes
        assert (len(episode.turns), episode.end.outcome, episode.end.reward) == (2, "task_complete", 1.0)
        assert findings([group]) == []
        for command in (["show"], ["doctor"], ["view", "-o", str(tmp_path / "page.html")]):
            assert main([*command, str(source)]) == 0, command
    assert "nothing is wrong in 1 episode" in capsys.readouterr().out


async def test_a_journal_that_still_grows_or_is_torn_has_nothing_wrong(chatml_tokenizer, tmp_path):
    path = await run_with_journal(chatml_tokenizer, tmp_path)
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        assert findings(read([path])) == [], length


async def test_a_damaged_journal_is_a_finding_and_another_file_is_named(chatml_tokenizer, tmp_path):
    path = await run_with_journal(chatml_tokenizer, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (finding,) = findings(read([path]))
    assert finding.kind == "structure" and "damaged: entry" in finding.why
    path.write_bytes(b"not a journal")
    with pytest.raises(UnreadableError, match=re.escape(str(path))):
        read([path])
