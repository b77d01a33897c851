"""Reasons: what code decides by is data, and files keep it."""

import asyncio
import json
import random

import pytest

from strands_sglang import SGLangModel, TerminationReason, reasons
from strands_sglang.check import check_model
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.reading import read
from strands_sglang.reasons import SENTENCES, Reason, read_reason
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trainers.slime import to_slime_samples
from strands_sglang.viewer.blocks import Blocks
from strands_sglang.viewer.payload import page_index
from support import specimens
from support.agents import make_agent
from support.plants import STEP_FAULTS, TRAJECTORY_FAULTS
from support.slime import Sample


def test_a_file_keeps_a_reason():
    inner = Reason("message_changed", 3, 2, ("user", "assistant"))
    for kind in SENTENCES:
        reason = Reason(kind, 1, 2, (inner, "more"))
        assert read_reason(json.loads(json.dumps(reason))) == reason
        assert str(reason) and "{" not in str(reason)


@pytest.mark.parametrize("value", [["no_such_kind", None, None, []], ["first"], 7, ["opens_because", None, None, []]])
def test_what_is_no_reason_is_refused(value):
    with pytest.raises((ValueError, TypeError, IndexError)):
        read_reason(value)


def test_sentences_of_earlier_releases_are_read():
    assert read_reason("the agent asked the same again") == Reason("asked_again")
    assert str(read_reason("another sentence")) == "another sentence"


def judged(groups):
    """What the doctor and the page decide about some files."""
    index = page_index(groups, findings(groups), Blocks())
    found = [(one.kind, one.group, one.episode, one.turn, one.sequence, one.token) for one in findings(groups)]
    return found, [(entry["trained"], entry["columns"].keys()) for entry in index["episodes"]], len(index["whys"])


async def decided(folder, chatml_tokenizer):
    """What doctor, page, slime and `check` decide, without their sentences."""
    groups = read([folder])
    exported = []
    for group in groups:
        for episode in group.episodes:
            samples = to_slime_samples(
                episode.trajectory, Sample(), TerminationReason.TASK_COMPLETE, tokenizer=chatml_tokenizer, fan_out=True
            )
            exported += [(one.status, one.tokens, one.loss_mask, one.remove_sample) for one in samples]
    server = ScriptedSGLang(chatml_tokenizer, ["Hello.", "Hello again."])
    with server.serve() as base_url:
        report = await check_model(chatml_tokenizer, "a-model", server=base_url)
    return judged(groups), exported, report.is_proven, report.server.forks_inside


@pytest.mark.parametrize("fault", [None, "untrained_answer_called_trained", "encoded_again", "row_missing"])
def test_nothing_decides_by_a_sentence(chatml_tokenizer, tmp_path, monkeypatch, fault):
    folder = tmp_path / "step-000003"
    specimens.write_step(folder, chatml_tokenizer, experts=False)
    if fault is not None:
        assert {**TRAJECTORY_FAULTS, **STEP_FAULTS}[fault](folder, random.Random(3))
    in_words = asyncio.run(decided(folder, chatml_tokenizer))
    monkeypatch.setattr(Reason, "__str__", lambda self: self.kind)
    monkeypatch.setattr(reasons, "SENTENCES", {kind: kind for kind in SENTENCES})
    assert asyncio.run(decided(folder, chatml_tokenizer)) == in_words


async def test_an_answer_is_judged_without_sentences(chatml_tokenizer, monkeypatch):
    monkeypatch.setattr(Reason, "__str__", lambda self: self.kind)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=ScriptedSGLang(chatml_tokenizer, ["one", "two"]).client())
    agent = make_agent(model)
    await agent.invoke_async("q")
    agent.messages[-1]["content"] = [{"text": "another"}]
    await agent.invoke_async("r")
    assert [turn.status.value for turn in model.trajectory.turns] == ["discarded", "answered"]
    assert model.trajectory.turns[0].fate == Reason("replaced_with", None, 1, ("other text",))
