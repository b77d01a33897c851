"""Whatever happens to a history, the record is what the model saw and sampled, and is trained once.

Random episodes (`support.histories`) are played against the scripted server and judged from outside of the library.
The seed is fixed; `HISTORY_CASES=20000 HISTORY_SEED=1` runs more cases, and others.
"""

import asyncio
import logging
import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from strands_sglang import TokenManager, Trajectory
from strands_sglang.reasons import Reason
from strands_sglang.templates.chat_template import ChatTemplate
from strands_sglang.trajectory import Place
from strands_sglang.trajectory.export import sequence_of
from strands_sglang.trajectory.tokens import Segment
from support.histories import ANSWERS, ARRIVALS, ATTEMPTS, EDITS, ENDS, FATES, OUTSIDE, PLANS, Edit, Plan, Player, Step
from support.judge import ViolationError

CASES = int(os.environ.get("HISTORY_CASES", "1000"))
# ChatML that shows the tools in front of the last question, wherever that is, as Mistral's first templates do.
SHARDS = 2  # so that the cases are spread over the cores


@pytest.fixture
def play(chatml_tokenizer, tmp_path, caplog):
    """Plays a plan; arguments are the model's."""
    caplog.set_level(logging.CRITICAL)  # warnings hold on to what they are about

    def run(plan, **config):
        player = Player(chatml_tokenizer, tmp_path, **config)
        asyncio.run(player.play(plan))
        return player

    return run


def some(count, *phases):
    """Settings of a property for this many plans."""
    return settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=phases or (Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(max(300, CASES))
@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_record_is_what_was_seen_and_sampled(play, shard):
    seed_text = os.environ.get("HISTORY_SEED", "0")
    tally = Counter()

    @seed(f"{seed_text}/{shard}")
    @some(CASES // SHARDS)
    @given(PLANS)
    def check(plan):
        tally.update(play(plan).check())
        tally.update(kind for step in plan.steps for kind in step.kinds())

    check()
    # Neither kind may be so rare that the other one hides what goes wrong with it.
    for what in ("extending", "forking"):
        assert tally[f"cases {what}"] >= 0.3 * tally["cases"]
        assert tally[what] >= 0.3 * tally["answers"]
    kinds = [*EDITS, *ARRIVALS, "injected", "held", "stored", *(f"attempt: {kind}" for kind in ATTEMPTS)]
    for name, weights in {"answer": ANSWERS, "end": ENDS, "fate": FATES}.items():
        kinds += [f"{name}: {kind}" for kind in weights]
    assert CASES < 1000 or [kind for kind in kinds if not tally[kind]] == []


FOUND = {
    "calls from outside the loops share one sequence": Plan((Step(), Step(who=OUTSIDE), Step(who=OUTSIDE))),
    "an agent continues from an outside call all but its stop token": Plan(
        (Step(who=OUTSIDE, end="other stop"), Step(edits=(Edit("copy", at=OUTSIDE, to=2),)))
    ),
    "a structured answer replaces a discarded one": Plan(
        (Step(who=1, attempt="thrown away", answer="structured"), Step(who=1))
    ),
    "a repeated answer is shown as words, and then as sampled": Plan(
        (
            Step(answer="reasoning"),
            Step(answer="call"),
            Step(edits=(Edit("duplicate", at=1, to=3),), number=1),
            Step(who=1),
            Step(who=1, arrives="same question"),
            Step(),
            Step(who=1, edits=(Edit("insert", at=0, to=0),), arrives="again"),
        )
    ),
    "two agents get the same tokens, and one continues": Plan(
        (Step(), Step(), Step(), Step(who=1, arrives="same question"), Step())
    ),
    "two calls share a long opening, and one waits for it": Plan(
        (
            *(Step() for _ in range(4)),
            Step(edits=(Edit("insert", at=0, to=0),), arrives="again", held=True),
            Step(who=1, arrives="same question"),
        ),
        True,
    ),
    "a file knows of agents that were never answered": Plan(
        (Step(attempt="abort", end="error", number=1), Step(stored=True))
    ),
}


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_earlier_failures_stay_fixed(play, plan):
    play(plan).check()


def check_where(play, provable, **config):
    """200 plans where only some continuations can be proven; a fair number of calls still extends others."""
    tally = Counter()

    @seed(0)
    @some(200)
    @given(PLANS)
    def check(plan):
        tally.update(play(plan, **config).check(provable))

    check()
    assert tally["extending"] > 50


def new_messages(earlier, one):
    return one.call.messages[len(earlier.call.messages) + 1 :]


def is_followed_by_text(earlier, one):
    """Whether a user says something after an earlier call."""
    said = [message for message in new_messages(earlier, one) if message["role"] == "user"]
    kinds = [{kind for block in message["content"] for kind in block} for message in said]
    return any("text" in kind or "toolResult" not in kind for kind in kinds)


def test_moved_tools_are_extended_only_where_proven(play):
    moving_template = """\
{%- set state = namespace(last_question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set state.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- macro show_tools() %}
    {%- if tools %}
        {{- '<|im_start|>system\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson + '\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endmacro %}
{%- if state.last_question < 0 %}
    {{- show_tools() }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.index0 == state.last_question %}
        {{- show_tools() }}
    {%- endif %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

    def provable(earlier, one):
        blocks = [block for message in new_messages(earlier, one) for block in message["content"]]
        is_whole = isinstance(earlier.finish_reason.get("matched"), int)
        needs_an_end = not is_whole and not any("toolResult" in block for block in blocks)
        return one.call.before[1] is None or not (is_followed_by_text(earlier, one) or needs_an_end)

    check_where(play, provable, chat_template=moving_template)


def test_template_policy_opens_a_sequence_after_reasoning(play):
    def provable(earlier, one):
        blocks = [block for step in earlier.path() for block in step.call.blocks]
        return not (is_followed_by_text(earlier, one) and any("reasoningContent" in block for block in blocks))

    check_where(play, provable, history_policy="template")


def test_a_file_restores_the_record(play, tmp_path):
    def facts_of(sequences):
        """Sequences, segment by segment."""
        names = ("is_response", "token_ids", "logprobs", "loss_mask", "finish_reason", "weight_version")
        return [[[getattr(segment, name) for name in names] for segment in one.segments] for one in sequences]

    def turn_facts(turn):
        """The facts of a turn, tokens aside."""
        parent = None if turn.parent is None else turn.parent.index
        names = "index reason key agent status is_auxiliary constrained tool_calls answer_key sampling_params".split()
        return (parent, turn.asked(), *(getattr(turn, name) for name in names))

    @seed(0)
    @some(100)
    @given(PLANS)
    def check(plan):
        recorded = play(plan).model.trajectory
        recorded.save(tmp_path / "stored")
        read = Trajectory.load(tmp_path / "stored")
        for shown in ({}, {"discarded": True}, {"discarded": True, "auxiliary": True}):
            sequences = recorded.sequences(**shown)
            assert facts_of(recorded.sequences(**shown)) == facts_of(sequences)
            assert facts_of(read.sequences(**shown)) == facts_of(sequences)
        assert facts_of([read.latest_main_sequence()]) == facts_of([recorded.latest_main_sequence()])
        assert [turn_facts(turn) for turn in read.turns] == [turn_facts(turn) for turn in recorded.turns]
        assert read.tool_parse_errors == recorded.tool_parse_errors

    check()


# --- mutants: libraries with one mistake, which the judge must find ---

attach, sequences, continuation = Trajectory.attach, Trajectory.sequences, ChatTemplate.continuation


def always_a_fresh_sequence(self, conversation, messages, caller):
    return Place(None, messages, Reason("opens"))


def always_after_the_last_turn(self, conversation, messages, caller):
    last = next((turn for turn in reversed(self.turns) if turn.answer_key is not None), None)
    if last is None:
        return Place(None, messages, Reason("first"))
    new = messages[len(last.asked()) + 1 :]
    return Place(last, new, Reason("extends", last.index, detail=(str(len(new)),)))


def one_turn_too_early(self, conversation, messages, caller):
    place = attach(self, conversation, messages, caller)
    if place.turn is None or place.turn.parent is None:
        return place
    parent = place.turn.parent
    return Place(parent, messages[len(parent.asked()) + 1 :], Reason("extends", parent.index, detail=("",)))


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


def after_any_stop_token(self, *arguments, **options):
    prompt = continuation(self, *arguments, **options)
    return prompt if prompt.kept is None else replace(prompt, token_ids=prompt.token_ids[1:], kept=None)


EXTENDED = "a call extends the longest conversation that it continues"
TOLD = ("no message is missing", "nothing else is in the prompt")
ONCE = "a sampled token is trained in the first sequence that holds it"
ALL = ("there are as many sequences as it takes", "each sampled token is in a sequence")
MUTANTS = [
    (Trajectory, "attach", always_a_fresh_sequence, EXTENDED),
    (Trajectory, "attach", always_after_the_last_turn, (EXTENDED, *TOLD)),
    (Trajectory, "attach", one_turn_too_early, EXTENDED),
    (Trajectory, "attach", whoever_asks, (EXTENDED, *TOLD)),
    (Trajectory, "attach", without_the_first_new_message, TOLD),
    (Trajectory, "sequences", all_of_each_sequence, ONCE),
    (Trajectory, "sequences", a_sequence_for_each_turn, (ONCE, *ALL)),
    (Trajectory, "sequences", not_what_was_discarded, ALL),
    (ChatTemplate, "continuation", after_any_stop_token, "a prompt is a chat"),
]


@pytest.mark.parametrize(("owner", "name", "mutant", "promises"), MUTANTS, ids=[entry[2].__name__ for entry in MUTANTS])
def test_a_library_that_makes_a_mistake_is_found_out(play, monkeypatch, owner, name, mutant, promises):
    monkeypatch.setattr(owner, name, mutant)

    @seed(0)
    @some(200, Phase.generate)
    @given(PLANS)
    def check(plan):
        play(plan).check()

    with pytest.raises(ViolationError) as found:
        check()
    assert found.value.promise.startswith(promises)
