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


@pytest.mark.parametrize(
    "value",
    [
        ["no_such_kind", None, None, []],
        ["first"],
        7,
        None,
        {"kind": "first"},
        ["opens_because", None, None, []],
        ["forks", "x", {}, "ab"],
        ["forks", 1, None, "ab"],
        ["forks", 1, None, [7]],
        ["forks", "1", None, ["the end"]],
        ["stops", 1, 2.5, []],
        [["first"], None, None, []],
    ],
)
def test_what_is_no_reason_is_refused(value):
    with pytest.raises(ValueError, match="is not a reason that this release knows"):
        read_reason(value)


INNER = Reason("message_changed", 3, 2, ("user", "assistant"))
DETAILS = {
    **dict.fromkeys(("opens_because", "forks", "forks_inside"), (INNER,)),
    **dict.fromkeys(("message_changed", "other_stop"), ("user", "a text: (in words)")),
}


@pytest.mark.parametrize("kind", sorted(SENTENCES.keys() - {"in_words", "unproven"}))
def test_sentences_of_earlier_releases_are_read(kind):
    sentence = SENTENCES[kind]
    turn, position = (12 if f"{{{name}}}" in sentence else None for name in ("turn", "position"))
    detail = DETAILS.get(kind, ("0",)) if "{0}" in sentence else ()
    reason = Reason(kind, turn, position, detail)
    assert read_reason(str(reason)) == reason


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        (
            "opens a sequence: it goes on after message 3 (compared with call 2)",  # as released
            Reason("opens_because", detail=(Reason("goes_on", 2, 3),)),
        ),
        (
            "opens a sequence: the chat template writes earlier turns anew behind a user message",  # as released
            Reason("opens_because", detail=(Reason("policy", detail=("user",)),)),
        ),
        (
            "forks inside call 1: the model stopped with '<a>' where the chat template puts '<b>'",
            Reason("forks_inside", 1, detail=(Reason("other_stop", detail=("'<a>'", "'<b>'")),)),
        ),
        ("message 1 (user) stands in its place", Reason("replaced", None, 1, ("user",))),  # as released
        (
            "message 1 (assistant) stands in its place, with other text",  # as released
            Reason("replaced_with", None, 1, ("other text",)),
        ),
        (
            "forks after call 0: message 3 (assistant) is not the recorded one (assistant): \n) (compared with call 0)",
            Reason("forks", 0, detail=(Reason("answer_changed", 0, 3, ("\n)",)),)),
        ),
        ("extends call x with 1 new message(s)", Reason("continues", detail=("call x with 1 new message(s)",))),
        ("another sentence", Reason("in_words", detail=("another sentence",))),
    ],
)
def test_other_sentences_of_earlier_releases_are_read(sentence, reason):
    assert read_reason(sentence) == reason


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


def test_a_recorded_call_is_a_turn_for_those_who_look_at_it():
    assert reasons.of_turns("extends call 0 with 1 new message(s)") == "extends turn 0 with 1 new message"
    told = Reason("forks", 12, detail=(Reason("stops", 3, 2),))
    assert reasons.of_turns(str(told)) == (
        "forks after turn 12: it stops after message 2, before the recorded answer (compared with turn 3)"
    )
