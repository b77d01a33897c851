"""What goes into the page: the data, its size, where findings lead, the credit audit, and the command."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import zlib
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from strands import Agent

from strands_sglang import cli
from strands_sglang.credit import losses
from strands_sglang.inspection.formats.trajectories import inspect
from strands_sglang.inspection.reading import read
from strands_sglang.inspection.records import Finding, Group, Inspected, halves
from strands_sglang.messages.said import said_in
from strands_sglang.protocol.generation import Generation
from strands_sglang.reasons import Reason
from strands_sglang.templates.encoder import get_encoder
from strands_sglang.trajectory.trajectory import EpisodeEnd, Trajectory
from strands_sglang.trajectory.turn import Turn, TurnStatus
from strands_sglang.viewer import PageTooLargeError, page as page_module, render
from support import written_episodes as written
from support.agents import make_tools

TYPES = {"u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "f4": np.float32}


class Page:
    """A page read as its own script reads it."""

    def __init__(self, html):
        self.html = html
        self.blocks = dict(re.findall(r'<script type="application/octet-stream" id="(\w+)">([^<]*)</script>', html))
        self.index = self.read({"at": "index", "type": "json"})
        ids, texts = (self.read(self.index["vocabulary"][name]) for name in ("ids", "texts"))
        self.vocabulary = list(zip(ids.tolist(), texts, strict=True))

    def read(self, packed):
        content = zlib.decompress(base64.b64decode(self.blocks[packed["at"]]))
        if packed["type"] == "json":
            return json.loads(content)
        kind = np.dtype(TYPES[packed["type"]])
        planes = np.frombuffer(content, np.uint8).reshape(kind.itemsize, -1)
        return np.ascontiguousarray(planes.T).view(kind).reshape(-1)

    def column(self, episode, name):
        return self.read(self.index["episodes"][episode]["columns"][name])

    def body(self, episode):
        return self.read(self.index["episodes"][episode]["body"])


@pytest.fixture(scope="module")
def jars():
    return Page(render(written.groups_of_jars(), written.findings_of_jars()))


def test_the_logic_of_the_front_end():
    assert shutil.which("node"), "node is needed: apt-get install nodejs"
    run = subprocess.run(["node", "--test", str(Path(__file__).parent)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert re.search(r"^# pass [1-9]", run.stdout, re.MULTILINE), run.stdout


def test_every_token_has_its_text_and_values(jars):
    group = written.group_of_jars()
    for number, episode in enumerate(group.episodes):
        ids, logprobs = (
            np.concatenate([half for turn in episode.turns for half in halves(turn, name)])
            for name in ("ids", "logprobs")
        )
        shown = [jars.vocabulary[entry] for entry in jars.column(number, "token")]
        assert [token_id for token_id, _ in shown] == ids.tolist()
        assert "".join(text for _, text in shown).encode() == b"".join(group.vocabulary[i] for i in ids.tolist())
        np.testing.assert_allclose(jars.column(number, "logprob"), logprobs, rtol=2**-15, equal_nan=True)


def test_each_trained_token_names_its_one_sequence(jars):
    for number, episode in enumerate(written.group_of_jars().episodes):
        trained = sum(int(sequence.mask.sum()) for sequence in episode.sequences)
        assert (jars.column(number, "trains") > 0).sum() == trained == jars.index["episodes"][number]["trained"]
        assert "times" not in jars.index["episodes"][number]["columns"]


def test_a_token_trained_twice_is_counted():
    group = written.group_of_jars()
    for sequence in group.episodes[3].sequences[:2]:
        sequence.mask[sequence.steps[0].sampled : sequence.steps[0].stop] = 1
    page = Page(render([group], []))
    first = group.episodes[3].turns[0]
    times = page.column(3, "times")
    assert set(times[len(first.prompt_ids) :][: len(first.output_ids)]) == {2}
    assert times.max() == 2


def test_untrained_tokens_say_why(jars):
    whys = {jars.index["whys"][code] for number in (1, 3) for code in jars.column(number, "why")}
    assert "the agent threw the answer away: the agent asked the same again" in whys
    assert "a grammar constrained it, so it is off-policy" in whys
    assert "the model did not sample it" in whys


def test_turns_outside_the_sequences_are_shown_too(jars):
    for number in (1, 3):
        body = jars.body(number)
        shown = {turn for sequence in body["sequences"] for turn, _ in sequence["steps"]}
        assert shown == set(range(len(body["turns"])))


def test_a_finding_leads_to_its_token():
    group = written.group_of_jars()
    where = {"file": group.file, "group": group.id}
    [episode] = [episode for episode in group.episodes if episode.id == "jars-3"]
    findings = [
        Finding("a", "", **where, episode="jars-3", turn=1, sequence=0, token=140),
        Finding("b", "", **where, episode="jars-3", turn=3, token=2),
        Finding("c", "", **where, episode="jars-3", turn=5, token=4),
        Finding("d", "", **where, episode="jars-3"),
        Finding("e", "", **where),
        Finding("f", "", "another"),
    ]
    page = Page(render([group], findings))
    a, b, c, d, e, f = page.index["findings"]
    assert (a["episode"], a["sequence"], a["token"]) == (3, 0, 140)
    for one, turn, token in ((b, 3, 2), (c, 5, 4)):
        steps = page.body(3)["sequences"][one["sequence"]]["steps"]
        before = 0
        for at, kept in steps:
            if at == turn:
                break
            before += len(episode.turns[at].prompt_ids) + kept
        assert one["token"] == before + len(episode.turns[turn].prompt_ids) + token
    assert (d["episode"], d["token"]) == (3, None)
    assert (e["episode"], e["group"]) == (None, 0)
    assert (f["episode"], f["group"]) == (None, None)
    page = Page(render([group], [Finding("mask-not-sampled", "it is part of a prompt", group.file)]))
    assert (
        page.index["findings"][0]["why"] == "a token is trained that the model did not sample: it is part of a prompt"
    )


def test_every_trainer_reduces_to_the_exact_credit(jars):
    [audit] = jars.index["credit"]
    for normalized in audit["normalizers"].values():
        assert sorted(name for loss in normalized["losses"] for name in loss["names"]) == list(losses())
        for loss in normalized["losses"]:
            np.testing.assert_allclose(np.multiply(loss["weights"], loss["reductions"]), normalized["exact"])
    exact = audit["normalizers"]["episode_mean"]["exact"]
    for episode in audit["episodes"]:
        for row in episode["rows"]:
            assert row["recorded"] == pytest.approx(row["abs"] * exact[row["row"]])
            assert row["abs"] == pytest.approx(sum(turn["abs"] for turn in row["turns"]))


def test_the_loss_of_a_file_is_known_by_its_weights(jars):
    [audit] = jars.index["credit"]
    assert audit["trainer"]["normalizer"] == "episode_mean"
    groups = written.groups_of_jars()
    sequences = [one for group in groups for episode in group.episodes for one in episode.sequences if one.row]
    for number, sequence in enumerate(sequences):
        sequence.row = replace(sequence.row, loss_weight=sequence.row.loss_weight / (number + 2))
        if number == 0:  # the others tell
            assert Page(render(groups, [])).index["credit"][0]["trainer"] == audit["trainer"]
    [audit] = Page(render(groups, [])).index["credit"]
    assert audit["trainer"] is None


def test_an_episode_is_outlined_by_its_question_answer_and_doubts(jars):
    entry = jars.index["episodes"][0]
    assert entry["question"].startswith("A crate holds 48 jars") and "12,096" in entry["answer"]
    gaps = np.abs(jars.column(0, "trainer_logprob") - jars.column(0, "logprob"))[jars.column(0, "trains") > 0]
    assert entry["gap"] == pytest.approx(np.nanmax(gaps), rel=1e-2)
    version = jars.column(0, "version")
    newest = max(int(name) for name in jars.index["versions"])
    old = [number for number, name in enumerate(jars.index["versions"], 1) if int(name) < newest]
    assert entry["note"] == f"{int(np.isin(version, old).sum())} tokens of older weights"


def test_texts_of_tables_begin_where_they_differ():
    same, long = "You are a careful clerk. " * 40, "word " * 100
    texts = [f"{same}What is {n} times 7,\n please?" + " x" * 200 for n in (25, 26)]
    assert [one[:22] for one in shown(texts)] == ["…25 times 7, please? x", "…26 times 7, please? x"]
    assert {len(one) for one in shown(texts)} == {201}
    for others in (["What is it?", "What is that?", ""], [same[:90].strip()] * 2, [""]):
        assert shown(others) == others
    assert shown([long, long, ""]) == [long[:200], long[:200], ""]  # one task alone
    assert shown([same, f"{same}Be brief.", ""]) == ["…clerk.", "…clerk. Be brief.", ""]


def shown(questions):
    """What a page shows of samples with these questions."""
    episodes = [Inspected(f"e{at}", Trajectory(), record={"message": one}) for at, one in enumerate(questions)]
    return [one["question"] for one in Page(render([Group("g", episodes)], [])).index["episodes"]]


def test_rewards_are_summed_up_by_step():
    groups = []
    for number, rewards in enumerate([(0.0, 1.0), (1.0, 1.0)]):
        episodes = [one_turn([1], [0]) for _ in rewards]
        for at, (episode, reward) in enumerate(zip(episodes, rewards, strict=True)):
            episode.id, episode.end = f"e{at}", EpisodeEnd(None, reward)
        groups.append(Group("g", episodes, kind="step", file=f"runs/step-00000{number}/rows.safetensors"))
    assert [(one["name"], one["reward"]) for one in Page(render(groups, [])).index["steps"]] == [
        ("step-000000", 0.5),
        ("step-000001", 1.0),
    ]
    assert Page(render(groups[:1], [])).index["steps"] == []


def test_a_page_has_the_name_of_its_run(tmp_path):
    files = [tmp_path / "grpo" / "steps" / f"step-00000{n}" / "rows.safetensors" for n in range(3)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    groups = [Group("g", [], kind="step", file=str(file)) for file in files]
    assert Page(render(groups, [])).index["title"] == "grpo"
    assert Page(render(groups[:1], [])).index["title"] == "step-000000"


def test_rewards_alone_give_advantages():
    group = written.group_of_jars()
    for episode in group.episodes:
        for sequence in episode.sequences:
            sequence.row = None
    page = Page(render([group], []))
    assert [entry["advantage"] for entry in page.index["episodes"]][:3] == pytest.approx([0.375, 0.375, -0.625])


def one_turn(prompt, sampled):
    """An episode of one turn with these ids."""
    answer = Generation(array("i", sampled), None, "stop")
    turn = Turn(0, None, Reason("first"), b"", {}, (), (), array("i", prompt), generation=answer)
    turn.status = TurnStatus.FINAL
    episode = inspect(Trajectory.of_turns([turn]), "e")
    episode.end = EpisodeEnd(None, 1.0)
    return episode


def test_drift_lists_both_ways_to_encode(chatml_tokenizer):
    whole = chatml_tokenizer.encode("hello world", add_special_tokens=False)
    apart = [token for letter in "hello world" for token in chatml_tokenizer.encode(letter, add_special_tokens=False)]
    group = Group("g", [one_turn(whole, apart)], encoder=get_encoder(chatml_tokenizer))
    page = Page(render([group], []))
    drift = page.index["drift"]
    assert drift["all"] == len(whole) + len(apart)
    assert (drift["tokens"] > 0) == (whole != apart)
    assert sum(len(row["recorded"]) for row in drift["rows"]) == drift["tokens"]
    assert page.column(0, "drift").sum() == drift["tokens"]


def test_the_page_allows_no_request_and_only_its_own_script():
    html = render([written.hostile_group()], [Finding(kind, kind, kind) for kind in written.HOSTILE])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    [script] = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy
    # Of the files only the title is in clear text, and it is escaped.
    clear = re.sub(r"<script.*?</script>|<style>.*?</style>", "", html, flags=re.DOTALL)
    assert "pwned" not in re.sub(r"<title>[^<]*</title>", "", clear)


def test_the_markdown_library_is_the_published_one_with_its_notice():
    library = (page_module.FRONT / "markdown-it.min.js").read_bytes()
    published = "391f2aa638e75e6c7859d0a5c5650ef0956722a45998f17e05b83bc655778e1e"
    assert hashlib.sha256(library).hexdigest() == published  # markdown-it@15.0.3, dist/browser/markdown-it.umd.min.js
    script = page_module.bundle()
    assert "Copyright (c) 2014 Vitaly Puzrin" in script and "sourceMappingURL" not in script


def test_values_that_are_no_numbers_are_left_out():
    group = written.group_of_jars()
    for episode, value in zip(group.episodes, (float("nan"), float("inf"), -float("inf")), strict=False):
        episode.end, episode.seconds = EpisodeEnd(None, value), value
        for sequence in episode.sequences:
            sequence.row = replace(sequence.row, advantages=[value] * len(sequence), loss_weight=value)
    group.episodes.append(one_turn([1], [0]))
    page = Page(render([group], []))
    assert [entry["reward"] for entry in page.index["episodes"]][:4] == [None, None, None, 1.0]
    assert len(page.index["credit"]) == 1


def test_nothing_recorded_is_a_page_too():
    empty = Group("none", [Inspected("e", Trajectory())], file="f")
    assert Page(render([], [])).index["episodes"] == []
    assert Page(render([empty], [])).index["episodes"][0]["tokens"] == 0


def test_ten_million_tokens_are_a_clear_line():
    with pytest.raises(PageTooLargeError, match="10,000,000 tokens, more than the 2,000,000"):
        render([Group("g", [one_turn([1], [0] * (10_000_000 - 1))])], [])


def test_modules_come_after_those_they_import():
    names = [path.stem for path in page_module.FRONT.glob("*.mjs")]
    assert sorted(names) == sorted(page_module.MODULES)
    for position, name in enumerate(page_module.MODULES):
        source = (page_module.FRONT / f"{name}.mjs").read_text(encoding="utf-8")
        assert set(re.findall(r'from "\./(\w+)\.mjs"', source)) <= set(page_module.MODULES[:position]), name


async def test_the_command_makes_a_page_of_a_trajectory(rollout, tmp_path, monkeypatch, capsys):
    _, model = rollout(["Hello there."])
    async for _ in model.stream([{"role": "user", "content": [{"text": "Hi"}]}]):
        pass
    model.trajectory.save(tmp_path / "one.safetensors")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["view", "one.safetensors", "-o", "page.html"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.index["title"] == "one.safetensors"
    assert page.index["episodes"][0]["trained"] == len(model.trajectory.turns[0].output_ids)


async def test_both_sides_of_a_conversation_are_shown(rollout, tmp_path):
    _, model = rollout(["Hello there."])
    async for _ in model.stream([{"role": "user", "content": [{"text": "Hi"}]}]):
        pass
    model.trajectory.save(tmp_path / "one.safetensors")
    groups = read([tmp_path / "one.safetensors"])
    [turn] = Page(render(groups, [])).body(0)["turns"]
    assert [part[:3] for part in turn["said"]] == [["user", "text", "Hi"], ["assistant", "text", "Hello there."]]
    groups[0].episodes[0].turns[0].said = groups[0].episodes[0].turns[0].answered = ()
    [turn] = Page(render(groups, [])).body(0)["turns"]
    assert [part[:2] for part in turn["said"]] == [["prompt", "raw"], ["assistant", "text"]]
    assert turn["said"][1][2].startswith("Hello there.")


async def test_a_call_that_cannot_be_read_is_shown_as_the_model_wrote_it(rollout, tmp_path):
    [calculator, _], _ = make_tools()
    wrote = '<tool_call>{"name": "calculator", </tool_call>'
    _, model = rollout([wrote])
    async for _ in model.stream([{"role": "user", "content": [{"text": "Hi"}]}], [calculator.tool_spec]):
        pass
    model.trajectory.save(tmp_path / "one.safetensors")
    [turn] = Page(render(read([tmp_path / "one.safetensors"]))).body(0)["turns"]
    assert wrote in turn["said"][-1][2]


async def test_without_tokens_too_a_call_that_cannot_be_read_is_shown_as_the_model_wrote_it(rollout):
    [calculator, _], _ = make_tools()
    wrote = '{"name": "calculator", '
    server, model = rollout([f"<tool_call>{wrote}</tool_call>", "Sorry."])
    agent = Agent(model=model, tools=[calculator], hooks=[model.hooks], callback_handler=None)
    await agent.invoke_async("Hi")
    episode = Inspected("e", Trajectory())
    episode.said = said_in(agent.messages)
    said = Page(render([Group("g", [episode])])).body(0)["said"]
    [call] = [text for _, kind, text, _ in said if kind == "call"]
    assert wrote.strip() in call and "was not run" not in call


@pytest.mark.parametrize("name", ["missing.safetensors", "torn.safetensors", "other.txt", "empty"])
def test_what_cannot_be_read_is_a_clear_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.safetensors").write_bytes(b"\x80\x00\x00\x00\x00\x00\x00\x00{")
    (tmp_path / "other.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    assert cli.main(["view", name]) == cli.WRONG_USAGE
    told = capsys.readouterr()
    assert name in told.err and "Traceback" not in told.err
    assert not (tmp_path / "view.html").exists()


async def test_a_page_that_cannot_be_written_is_a_clear_line(rollout, tmp_path, capsys):
    _, model = rollout(["Hello."])
    async for _ in model.stream([{"role": "user", "content": [{"text": "Hi"}]}]):
        pass
    model.trajectory.save(tmp_path / "one.safetensors")
    assert cli.main(["view", str(tmp_path / "one.safetensors"), "-o", str(tmp_path / "no" / "page.html")]) == cli.FAILED
    assert "page.html" in capsys.readouterr().err


def test_groups_of_several_steps_name_their_step():
    groups = [Group("g0", [], kind="step", file=f"runs/step-00000{n}/rows.safetensors") for n in (1, 2)]
    names = [group["name"] for group in Page(render(groups, [])).index["groups"]]
    assert names == ["g0 of step-000001", "g0 of step-000002"]
    assert Page(render(groups[:1], [])).index["groups"][0]["name"] == "g0"
