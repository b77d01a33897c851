"""Whatever happens to a history, what is recorded is what the model saw and sampled, and is trained once.

Random episodes (`support.history_plans`) are played against the scripted server and judged from outside of the library
(`support.history_judge`). Every run has the same cases; `HISTORY_CASES=20000 HISTORY_SEED=1` has more and others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strands_sglang import TokenManager, Trajectory
from strands_sglang.templates.chat_template import ChatTemplate
from strands_sglang.trajectory import Place
from strands_sglang.trajectory.export import sequence_of
from strands_sglang.trajectory.tokens import Segment
from support.history_log import Call, ViolationError
from support.history_plans import (
    ANSWERS,
    ARRIVALS,
    ATTEMPTS,
    EDITS,
    ENDS,
    FATES,
    NOBODY,
    Edit,
    Plan,
    Step,
    random_plan,
)
from support.history_runs import Stage
from support.history_templates import MOVING_TEMPLATE

CASES = int(os.environ.get("HISTORY_CASES", "2000"))
SEED = os.environ.get("HISTORY_SEED", "0")
SHARDS = 4  # so that the cases are spread over the cores
COUNTED = ("cases", "extending cases", "forking cases", "calls", "extending calls", "forking calls", "sequences")


@pytest.fixture
def stage(chatml_tokenizer, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Sets up a stage; arguments are those of `Stage`."""
    stages = []

    def make(**config) -> Stage:
        stages.append(Stage(chatml_tokenizer, tmp_path, **config))
        return stages[-1]

    yield make
    for made in stages:
        made.close()


@pytest.mark.timeout(max(300, CASES))
@pytest.mark.parametrize("shard", range(SHARDS))
def test_what_is_recorded_is_what_was_seen_and_sampled(stage, shard):
    on = stage()
    on.check_all(f"{SEED}/{shard}", CASES // SHARDS)
    tally = on.tally
    print({name: tally[name] for name in COUNTED})  # shown by `-rP`
    assert tally["cases"] == CASES // SHARDS
    # Neither kind may be so rare that the other one hides what goes wrong with it.
    for what in ("extending", "forking"):
        assert tally[f"{what} cases"] >= 0.3 * tally["cases"]
        assert tally[f"{what} calls"] >= 0.3 * tally["calls"]
    kinds = [*EDITS, *ARRIVALS, "injected", "held", "stored"]
    kinds += [f"attempt: {kind}" for kind in ATTEMPTS] + [f"answer: {kind}" for kind in ANSWERS]
    kinds += [f"end: {kind}" for kind in ENDS] + [f"fate: {kind}" for kind in FATES]
    assert CASES < 2000 or [kind for kind in kinds if not tally[kind]] == []


FOUND = {
    "calls from outside the loops go on in one sequence": Plan((Step(), Step(who=NOBODY), Step(who=NOBODY))),
    "an agent goes on from an outside call all but its stop token": Plan(
        (Step(who=NOBODY, end="other stop"), Step(edits=(Edit("copy", at=NOBODY, to=2),)))
    ),
    "an answer was thrown away, and a structured one stands in its place": Plan(
        (Step(who=1, attempt="thrown away", answer="structured"), Step(who=1))
    ),
    "a file knows of agents that were never answered": Plan(
        (Step(attempt="abort", end="error", number=1), Step(stored=True))
    ),
}


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_what_went_wrong_once_stays_right(stage, plan):
    stage().check(plan)


def is_followed_by_text(earlier: Call, call: Call) -> bool:
    """Whether a user says something after an earlier call."""
    said = [message for message in new_messages(earlier, call) if message["role"] == "user"]
    kinds = [{kind for block in message["content"] for kind in block} for message in said]
    return any("text" in kind or "toolResult" not in kind for kind in kinds)


def needs_an_end(earlier: Call, call: Call) -> bool:
    """Whether an earlier call has no stop token, and no tool result follows it."""
    blocks = [block for message in new_messages(earlier, call) for block in message["content"]]
    return earlier.stop_token is None and not any("toolResult" in block for block in blocks)


def new_messages(earlier: Call, call: Call) -> list[dict[str, Any]]:
    return call.messages[len(earlier.full or ()) :]


def test_where_the_template_moves_the_tools_only_what_is_proven_is_extended(stage):
    def provable(earlier: Call, call: Call) -> bool:
        return call.tools == "[]" or not (is_followed_by_text(earlier, call) or needs_an_end(earlier, call))

    on = stage(chat_template=MOVING_TEMPLATE, provable=provable)
    on.check_all("moving tools", 200)
    assert on.tally["extending calls"] > 50


def has_reasoning(call: Call | None) -> bool:
    """Whether the tokens up to a call's answer hold sampled reasoning."""
    while call is not None:
        if any("reasoningContent" in block for block in (call.answer or {}).get("content", ())):
            return True
        call = call.parent
    return False


def test_where_the_template_has_its_way_a_users_text_behind_reasoning_opens_a_sequence(stage):
    def provable(earlier: Call, call: Call) -> bool:
        return not (is_followed_by_text(earlier, call) and has_reasoning(earlier))

    on = stage(history_policy="template", provable=provable)
    on.check_all("template's way", 200)
    assert on.tally["extending calls"] > 50


def test_a_file_gives_back_what_was_recorded(stage, tmp_path):
    on = stage()
    for number in range(100):
        on.play(random_plan(random.Random(number)))
        recorded = on.model.trajectory
        recorded.save(tmp_path / "stored")
        read = Trajectory.load(tmp_path / "stored")
        for shown in ({}, {"discarded": True}, {"discarded": True, "auxiliary": True}):
            sequences = recorded.sequences(**shown)
            assert told(recorded.sequences(**shown)) == told(sequences)
            assert told(read.sequences(**shown)) == told(sequences)
        assert told([read.latest_main_sequence()]) == told([recorded.latest_main_sequence()])
        assert [turn_told(turn) for turn in read.turns] == [turn_told(turn) for turn in recorded.turns]
        assert read.tool_parse_errors == recorded.tool_parse_errors


def told(sequences: list[TokenManager]) -> list[list[tuple[object, ...]]]:
    """Sequences, segment by segment."""
    return [
        [(s.is_response, s.token_ids, s.logprobs, s.loss_mask, s.finish_reason, s.weight_version) for s in one.segments]
        for one in sequences
    ]


def turn_told(turn) -> tuple[object, ...]:
    """What a turn says of itself, tokens aside."""
    parent = None if turn.parent is None else turn.parent.index
    names = ("index", "reason", "key", "agent", "status", "is_auxiliary", "constrained", "tool_calls", "answer_key")
    return (parent, *(getattr(turn, name) for name in names), turn.sampling_params, turn.asked())


# --- mutants: libraries with one mistake, which the judge must find ---

attach, sequences, continuation = Trajectory.attach, Trajectory.sequences, ChatTemplate.continuation


def always_a_fresh_sequence(self, conversation, messages, caller):
    return Place(None, messages, "opens a sequence: always")


def always_after_the_last_turn(self, conversation, messages, caller):
    last = next((turn for turn in reversed(self.turns) if turn.answer_key is not None), None)
    if last is None:
        return Place(None, messages, "opens the first sequence")
    new = messages[len(last.asked()) + 1 :]
    return Place(last, new, f"extends call {last.index} with {len(new)} new message(s)")


def one_turn_too_early(self, conversation, messages, caller):
    place = attach(self, conversation, messages, caller)
    if place.turn is None or place.turn.parent is None:
        return place
    parent = place.turn.parent
    return Place(parent, messages[len(parent.asked()) + 1 :], f"extends call {parent.index} with new message(s)")


def whoever_asks(self, conversation, messages, caller):
    return attach(self, conversation, messages)


def without_the_first_new_message(self, conversation, messages, caller):
    place = attach(self, conversation, messages, caller)
    return replace(place, new_messages=place.new_messages[1:]) if place.turn is not None else place


def all_of_each_sequence(self, **shown):
    def trained(segment):
        return Segment(segment.token_ids, segment.logprobs, is_response=segment.is_response)

    return [TokenManager(map(trained, sequence.segments)) for sequence in sequences(self, **shown)]


def a_sequence_for_each_turn(self, **shown):
    return [sequence_of(turn) for turn in self.turns if turn.is_answered]


def not_what_was_discarded(self, **shown):
    return sequences(self, auxiliary=shown.get("auxiliary", False))


def behind_whatever_stopped_it(self, *arguments, **options):
    prompt = continuation(self, *arguments, **options)
    return prompt if prompt.kept is None else replace(prompt, token_ids=prompt.token_ids[1:], kept=None)


EXTENDED = "what goes on from a call extends its ids"
TOLD = ("no message is missing", "nothing else is in the prompt")
MUTANTS = [
    (Trajectory, "attach", always_a_fresh_sequence, EXTENDED),
    (Trajectory, "attach", always_after_the_last_turn, TOLD),
    (Trajectory, "attach", one_turn_too_early, EXTENDED),
    (Trajectory, "attach", whoever_asks, EXTENDED),
    (Trajectory, "attach", without_the_first_new_message, TOLD),
    (Trajectory, "sequences", all_of_each_sequence, "a sampled token is trained in the first sequence that holds it"),
    (Trajectory, "sequences", a_sequence_for_each_turn, "there are as many sequences as it takes"),
    (Trajectory, "sequences", not_what_was_discarded, "there are as many sequences as it takes"),
    (ChatTemplate, "continuation", behind_whatever_stopped_it, "a prompt is a chat"),
]


@pytest.mark.parametrize(("owner", "name", "mutant", "promises"), MUTANTS, ids=[entry[2].__name__ for entry in MUTANTS])
def test_a_library_that_makes_a_mistake_is_found_out(stage, monkeypatch, owner, name, mutant, promises):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(ViolationError) as found:
        stage().check_all("mutants", 200)
    assert found.value.promise.startswith(promises)
