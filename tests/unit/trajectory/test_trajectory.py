from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_sglang import Trajectory, TurnStatus
from strands_sglang.messages import fingerprint
from strands_sglang.protocol.generation import Generation, VersionSpan
from strands_sglang.trajectory import Caller


def user(text):
    return {"role": "user", "content": [{"text": text}]}


def assistant(text):
    return {"role": "assistant", "content": [{"text": text}]}


def generation(*ids, finish="stop"):
    return Generation(output_ids=array("i", ids), logprobs=array("d", [-0.5] * len(ids)), finish_type=finish)


class Recorder:
    """Makes calls the way the model does, with made-up tokens: each call's prompt and answer are ids of their own."""

    def __init__(self):
        self.trajectory = Trajectory()
        self.next_id = 0

    def ids(self, count=2):
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def ask(self, messages, *, agent=None, kept=None, constrained=False, auxiliary=None, prompt=None, **parts):
        conversation = fingerprint({"system prompt": None, **parts}, messages)
        caller = Caller(agent, auxiliary=auxiliary)
        place = replace(self.trajectory.attach(conversation, messages, caller), kept=kept)
        ids = self.ids() if prompt is None else prompt
        return self.trajectory.ask(place, conversation, ids, caller, constrained=constrained)

    def call(self, messages, answer="ok", *, finish="stop", **options):
        turn = self.ask(messages, **options)
        self.trajectory.answer(turn, generation(*self.ids(), finish=finish), assistant(answer))
        return turn


def test_a_conversation_that_grows_is_one_sequence():
    recorder = Recorder()
    history = []
    for i in range(30):
        history += [user(f"q{i}")]
        turn = recorder.call(history, f"a{i}")
        history += [assistant(f"a{i}")]
        assert turn.reason == ("opens the first sequence" if i == 0 else f"extends call {i - 1} with 1 new message(s)")

    (sequence,) = recorder.trajectory.sequences()
    assert sequence.token_ids == list(range(120))
    assert sequence.loss_mask == [0, 0, 1, 1] * 30
    assert recorder.trajectory.latest_main_sequence().token_ids == sequence.token_ids


def test_the_opening_prompt_can_be_seen_before_there_is_an_answer():
    recorder = Recorder()
    turn = recorder.ask([user("q")])
    assert recorder.trajectory.latest_main_sequence().token_ids == list(turn.prompt_ids)
    recorder.trajectory.fail(turn, ValueError("x"))
    assert recorder.trajectory.latest_main_sequence().segments[0].token_ids == list(turn.prompt_ids)
    assert recorder.trajectory.sequences() == []


def test_an_observation_that_was_never_answered_is_left_out_of_the_sequence():
    recorder = Recorder()
    first = recorder.call([user("q")], "a")
    recorder.trajectory.fail(recorder.ask([user("q"), assistant("a"), user("r")]), ValueError("context is full"))
    assert recorder.trajectory.latest_main_sequence().token_ids == first.token_ids()


def test_a_retry_of_a_failed_call_replaces_it():
    recorder = Recorder()
    for _ in range(3):
        recorder.trajectory.fail(recorder.ask([user("q")]), ConnectionError())
    turn = recorder.call([user("q")])
    assert recorder.trajectory.turns == [turn]
    assert turn.status is TurnStatus.ANSWERED


def test_a_turn_is_committed_once_a_later_call_builds_on_it():
    recorder = Recorder()
    first = recorder.call([user("q")], "a")
    assert first.status is TurnStatus.ANSWERED
    recorder.call([user("q"), assistant("a"), user("r")])
    assert first.status is TurnStatus.COMMITTED


def test_a_cut_turn_keeps_its_tokens_and_is_never_extended():
    recorder = Recorder()
    turn = recorder.ask([user("q")])
    recorder.trajectory.cut(turn, generation(7, 8, finish="abort"), RuntimeError("abort"))
    assert turn.status is TurnStatus.CUT
    assert recorder.trajectory.latest_main_sequence().segments[-1].token_ids == [7, 8]
    assert recorder.call([user("q"), assistant("partial"), user("r")]).parent is None


def cut_turn(recorder, *tokens, agent=None, prompt=(1, 2), messages=None):
    turn = recorder.ask(messages or [user("q")], agent=agent, prompt=list(prompt))
    recorder.trajectory.cut(turn, generation(*tokens, finish="abort"), RuntimeError("abort"))
    return turn


def sampled_in(trajectory):
    """The sampled tokens that are trained, sequence by sequence."""
    return [
        [token_id for token_id, mask in zip(sequence.token_ids, sequence.loss_mask, strict=True) if mask]
        for sequence in trajectory.sequences()
    ]


def test_a_call_that_goes_on_from_what_was_cut_takes_its_place():
    recorder = Recorder()
    turn = cut_turn(recorder, 7, 8)
    recorder.trajectory.resume(turn)
    recorder.trajectory.resume(turn)  # it waits already
    assert (turn.status, turn.waits_to_go_on) == (TurnStatus.CUT, True)
    assert "[cut, waits to go on]" in recorder.trajectory.explain()
    assert sampled_in(recorder.trajectory) == [[7, 8]]  # A2: until it goes on, and if it never does
    again = recorder.ask([user("q")], prompt=[1, 2])
    assert recorder.trajectory.turns == [again]
    assert again.resumes is turn.generation


@pytest.mark.parametrize("call", [{"prompt": [1, 3]}, {"prompt": [1, 2], "constrained": True}])
def test_what_was_cut_stays_where_a_call_cannot_go_on_from_it(call):
    """A2: tokens are never put behind other tokens than those before them, and never lost either."""
    recorder = Recorder()
    turn = cut_turn(recorder, 7, 8)
    recorder.trajectory.resume(turn)
    other = recorder.ask([user("q")], **call)
    assert other.resumes is None
    assert recorder.trajectory.turns == [turn, other]
    assert sampled_in(recorder.trajectory) == [[7, 8]]


def test_a_resumed_call_that_fails_keeps_what_was_sampled_before():
    """A2."""
    recorder = Recorder()
    recorder.trajectory.resume(cut_turn(recorder, 7, 8))
    for _ in range(2):
        recorder.trajectory.fail(recorder.ask([user("q")], prompt=[1, 2]), ConnectionError())
        assert sampled_in(recorder.trajectory) == [[7, 8]]
    assert recorder.ask([user("q")], prompt=[1, 2]).resumes.output_ids.tolist() == [7, 8]


def test_agents_that_were_cut_at_the_same_question_go_on_from_their_own_tokens():
    """A2: those that are known by earlier answers, in any order."""
    recorder = Recorder()
    agents = ["one", "two", "three"]
    for agent in agents:
        recorder.call([user("q")], agent=agent)
    history = [user("q"), assistant("ok"), user("r")]
    turns = {agent: cut_turn(recorder, 100 + i, agent=agent, messages=history) for i, agent in enumerate(agents)}
    for turn in turns.values():
        recorder.trajectory.resume(turn)
    for agent in reversed(agents):
        again = recorder.ask(history, agent=agent, prompt=[1, 2])
        assert (again.resumes, again.parent) == (turns[agent].generation, turns[agent].parent)


def test_agents_that_were_made_anew_go_on_from_what_was_cut_in_order():
    """A2: a restarted rollout has new agents, and an agent whose first call fails is not remembered by Strands."""
    recorder = Recorder()
    for agent in ("one", "two"):
        recorder.call([user("q")], agent=agent)
    history = [user("q"), assistant("ok"), user("r")]
    for agent, token in (("one", 100), ("two", 101)):
        recorder.trajectory.resume(cut_turn(recorder, token, agent=agent, messages=history))
    again = [recorder.ask(history, agent=f"another {i}", prompt=[1, 2]) for i in range(2)]
    assert [turn.resumes.output_ids.tolist() for turn in again] == [[100], [101]]
    assert [turn.parent.agent for turn in again] == ["one", "two"]
    assert sampled_in(recorder.trajectory) != []


def test_an_agent_that_was_not_cut_takes_nobody_elses_tokens():
    """A2."""
    recorder = Recorder()
    for agent in ("one", "two"):
        recorder.call([user("q")], agent=agent)
    history = [user("q"), assistant("ok"), user("r")]
    turn = cut_turn(recorder, 100, agent="one", messages=history)
    recorder.trajectory.resume(turn)
    assert recorder.ask(history, agent="two", prompt=[1, 2]).resumes is None
    assert recorder.ask(history, agent="one", prompt=[1, 2]).resumes is turn.generation


def test_several_cut_attempts_of_one_agent_go_on_in_order():
    """A2."""
    recorder = Recorder()
    attempts = [recorder.ask([user("q")], agent="one", prompt=[1, 2]) for _ in range(3)]
    for i in (2, 0, 1):
        recorder.trajectory.cut(attempts[i], generation(100 + i, finish="abort"), RuntimeError("abort"))
        recorder.trajectory.resume(attempts[i])
    again = [recorder.ask([user("q")], agent="one", prompt=[1, 2]) for _ in range(3)]
    assert [turn.resumes.output_ids.tolist() for turn in again] == [[100], [101], [102]]


def test_another_agents_call_leaves_a_failed_one_on_record():
    """A2."""
    recorder = Recorder()
    failed = recorder.ask([user("q")], agent="one")
    recorder.trajectory.fail(failed, ConnectionError())
    answered = recorder.call([user("q")], agent="two")
    assert recorder.trajectory.turns == [failed, answered]
    again = recorder.call([user("q")], agent="one")
    assert recorder.trajectory.turns == [answered, again]


def test_an_abort_before_the_first_token_is_a_failure():
    recorder = Recorder()
    turn = recorder.ask([user("q")])
    recorder.trajectory.cut(turn, generation(finish="abort"), RuntimeError("abort"))
    assert turn.status is TurnStatus.FAILED


@pytest.mark.parametrize(
    ("messages", "parts", "reason"),
    [
        ([user("q"), assistant("b"), user("r")], {}, "message 1 (assistant) is not the recorded one (assistant)"),
        ([user("p"), assistant("a"), user("r")], {}, "message 0 (user) is not the recorded one (user)"),
        ([user("q"), user("r")], {}, "message 1 (user) is not the recorded one (assistant)"),
        ([user("q")], {}, "it stops after message 0, before the recorded answer"),
        ([user("q"), assistant("a"), user("r")], {"system prompt": "new"}, "the system prompt changed"),
    ],
)
def test_anything_else_than_an_exact_prefix_opens_a_sequence_and_says_why(messages, parts, reason):
    recorder = Recorder()
    recorder.call([user("q")], "a")
    turn = recorder.call(messages, **parts)
    assert turn.parent is None
    assert reason in turn.reason
    assert "compared with call 0" in turn.reason


def test_forks_share_their_prefix_and_train_it_once():
    recorder = Recorder()
    recorder.call([user("q")], "a")
    recorder.call([user("q"), assistant("a"), user("r")])
    recorder.call([user("q"), assistant("a"), user("s")])
    first, second = recorder.trajectory.sequences()
    assert first.token_ids[:4] == second.token_ids[:4]
    assert first.loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]
    assert second.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1]
    # The latest sequence stands alone with its own full mask.
    assert recorder.trajectory.latest_main_sequence().loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_fork_names_what_differs_from_the_call_that_went_on_before():
    recorder = Recorder()
    recorder.call([user("q")], "a")
    recorder.call([user("q"), assistant("a"), user("r")], "b")
    fork = recorder.call([user("q"), assistant("a"), user("EDITED"), assistant("b"), user("s")])
    assert fork.reason.startswith("forks after call 0: message 2 (user) is not the recorded one (user)")


def test_failures_of_two_calls_are_kept_apart():
    recorder = Recorder()
    one, two = recorder.ask([user("one")]), recorder.ask([user("two")])
    recorder.trajectory.fail(one, ConnectionError())
    recorder.trajectory.fail(two, ConnectionError())
    again = recorder.call([user("one")])
    assert recorder.trajectory.turns == [two, again]


def test_tokens_sampled_under_a_grammar_are_never_trained():
    recorder = Recorder()
    recorder.call([user("q")], "a", constrained=True)
    after = recorder.call([user("q"), assistant("a"), user("r")])
    (sequence,) = recorder.trajectory.sequences()
    assert sequence.token_ids == after.token_ids()
    assert sequence.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1]


def test_a_call_from_outside_the_loop_is_left_aside():
    recorder = Recorder()
    first = recorder.call([user("q")], "a")
    recorder.call([user("q"), assistant("a"), user("judge it")], auxiliary=True)
    assert recorder.trajectory.latest_main_sequence().token_ids == first.token_ids()
    assert first.status is TurnStatus.ANSWERED
    assert [sequence.token_ids for sequence in recorder.trajectory.sequences()] == [first.token_ids()]
    main, judge = recorder.trajectory.sequences(auxiliary=True)
    assert (main.loss_mask, judge.loss_mask) == ([0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1])


def test_where_agents_have_a_loop_later_calls_without_an_agent_are_left_aside():
    recorder = Recorder()
    main = recorder.call([user("q")], agent="A")
    after = recorder.call([user("summarise that")])
    assert [turn.is_auxiliary for turn in (main, after)] == [False, True]
    assert [sequence.token_ids for sequence in recorder.trajectory.sequences()] == [main.token_ids()]
    assert recorder.trajectory.latest_main_sequence().token_ids == main.token_ids()


def test_what_was_recorded_before_the_first_agent_asked_stays_trained_and_that_is_said(caplog):
    """A10."""
    recorder = Recorder()
    history = [user("my own loop"), assistant("a"), user("r")]
    recorder.call(history[:1], "a")
    helper = recorder.call([user("a helper's")], auxiliary=True)
    recorder.call(history)
    (before,) = recorder.trajectory.sequences()
    assert not caplog.records
    for agent in "AB":
        recorder.call([user("q")], agent=agent)
    assert recorder.trajectory.sequences()[0].loss_mask == before.loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [turn for turn in recorder.trajectory.turns if turn.is_auxiliary] == [helper]
    (record,) = caplog.records
    assert "calls=<2>" in record.getMessage()


def test_a_caller_may_say_that_a_call_beside_agents_is_the_rollouts_own():
    """A10."""
    recorder = Recorder()
    recorder.call([user("q")], agent="A")
    own = recorder.call([user("my own loop")], auxiliary=False)
    assert not own.is_auxiliary
    assert len(recorder.trajectory.sequences()) == 2


def test_two_agents_that_said_the_same_are_told_apart():
    recorder = Recorder()
    turns = {agent: recorder.call([user("q")], "a", agent=agent) for agent in "AB"}
    assert turns["A"].answer_key == turns["B"].answer_key
    for agent in "AB":
        after = recorder.call([user("q"), assistant("a"), user("r")], agent=agent)
        assert after.parent is turns[agent]


def test_an_agent_without_a_turn_of_its_own_extends_the_one_that_is_there():
    recorder = Recorder()
    turn = recorder.call([user("q")], "a", agent="A")
    assert recorder.call([user("q"), assistant("a"), user("r")], agent="restored").parent is turn


THROWN_AWAY = {
    "the call is retried": [user("q")],
    "a guide follows instead": [user("q"), user("Think again.")],
    "another answer stands there": [user("q"), assistant("Cancelled by user"), user("r")],
}


@pytest.mark.parametrize("what", THROWN_AWAY)
def test_an_answer_that_its_agent_goes_on_without_is_discarded(what):
    recorder = Recorder()
    thrown = recorder.call([user("q")], "a", agent="A")
    kept = recorder.call(THROWN_AWAY[what], "b", agent="A")
    assert thrown.status is TurnStatus.DISCARDED
    assert [sequence.token_ids for sequence in recorder.trajectory.sequences()] == [kept.token_ids()]
    everything = recorder.trajectory.sequences(discarded=True)
    assert [sequence.token_ids for sequence in everything] == [thrown.token_ids(), kept.token_ids()]


def test_the_answer_of_another_agent_to_the_same_question_is_not_discarded():
    recorder = Recorder()
    turns = [recorder.call([user("q")], "a", agent=agent) for agent in "AB"]
    assert [turn.status for turn in turns] == [TurnStatus.ANSWERED] * 2


def test_a_cut_answer_that_is_rewritten_is_not_discarded():
    recorder = Recorder()
    cut = recorder.call([user("q")], "half a call", finish="length", agent="A")
    recorder.call([user("q"), assistant("it was incomplete"), user("r")], agent="A")
    assert cut.status is TurnStatus.ANSWERED
    assert len(recorder.trajectory.sequences()) == 2


def test_an_answer_in_a_history_that_was_shortened_before_it_is_not_discarded():
    recorder = Recorder()
    turn = recorder.call([user("long ago"), assistant("old"), user("q")], "a", agent="A")
    recorder.call([user("q"), assistant("a"), user("r")], agent="A")
    assert turn.status is TurnStatus.ANSWERED


# --- settle ---


def test_the_answer_that_the_messages_end_with_is_final():
    recorder = Recorder()
    first = recorder.call([user("q")], "a", agent="A")
    last = recorder.call([user("q"), assistant("a"), user("r")], "b", agent="A")
    recorder.trajectory.settle([user("q"), assistant("a"), user("r"), assistant("b")])
    assert (first.status, last.status) == (TurnStatus.COMMITTED, TurnStatus.FINAL)


def test_of_several_answers_to_one_question_the_others_are_discarded():
    recorder = Recorder()
    tries = []
    for answer in "abc":  # best of three: the middleware asks with one state
        tries.append(recorder.call([user("q")], answer, agent="A"))
    recorder.trajectory.settle([user("q"), assistant("b")])
    assert [turn.status.value for turn in tries] == ["discarded", "final", "discarded"]
    assert [sequence.token_ids for sequence in recorder.trajectory.sequences()] == [tries[1].token_ids()]


def test_another_agents_answers_stay_as_they_are():
    recorder = Recorder()
    turns = {agent: recorder.call([user("q")], agent, agent=agent) for agent in "AB"}
    recorder.trajectory.settle([user("q"), assistant("A")])
    assert (turns["A"].status, turns["B"].status) == (TurnStatus.FINAL, TurnStatus.ANSWERED)
    recorder.trajectory.settle([user("q"), assistant("B")])
    assert (turns["A"].status, turns["B"].status) == (TurnStatus.FINAL, TurnStatus.FINAL)


def test_an_answer_of_the_agent_that_another_one_goes_on_from_is_not_judged_by_the_messages_of_that_one():
    recorder = Recorder()
    recorder.call([user("q")], "a", agent="A")
    history = [user("q"), assistant("a"), user("r")]
    kept = recorder.call(history, "b", agent="A")
    thrown = recorder.call(history, "c", agent="B")
    recorder.trajectory.settle([*history, assistant("Cancelled by user")])  # B's
    assert kept.status is TurnStatus.ANSWERED
    recorder.trajectory.settle([*history, assistant("b")])
    assert (kept.status, thrown.status) == (TurnStatus.FINAL, TurnStatus.ANSWERED)


def test_messages_that_were_shortened_tell_nothing():
    recorder = Recorder()
    turn = recorder.call([user("q")], "a", agent="A")
    recorder.trajectory.settle([user("another"), assistant("a")])
    assert turn.status is TurnStatus.ANSWERED


def test_the_last_answer_that_was_cancelled_is_discarded():
    recorder = Recorder()
    first = recorder.call([user("q")], "a", agent="A")
    last = recorder.call([user("q"), assistant("a"), user("r")], "b", agent="A")
    recorder.trajectory.settle([user("q"), assistant("a"), user("r"), assistant("Cancelled by user")])
    assert (first.status, last.status) == (TurnStatus.COMMITTED, TurnStatus.DISCARDED)


def test_a_turn_whose_last_token_was_not_kept_ends_a_sequence_of_its_own():
    recorder = Recorder()
    first = recorder.call([user("q")], "a")
    after = recorder.call([user("q"), assistant("a"), user("r")], "b", kept=1)
    one, other = recorder.trajectory.sequences()
    assert (one.token_ids, one.loss_mask) == (first.token_ids(), [0, 0, 1, 1])
    assert (other.token_ids, other.loss_mask) == ([0, 1, 2, 4, 5, 6, 7], [0, 0, 0, 0, 0, 1, 1])
    assert after.token_ids() == other.token_ids


def test_the_explanation_says_what_became_of_every_call():
    recorder = Recorder()
    recorder.call([user("q")], "a")
    recorder.call([user("q"), assistant("a"), user("r")])
    recorder.call([user("edited")])
    recorder.trajectory.fail(recorder.ask([user("never answered")]), RuntimeError("server gone"))
    lines = recorder.trajectory.explain().splitlines()
    assert lines[0] == "call 0 opens the first sequence (2 prompt and 2 sampled tokens, stop) [committed]"
    assert lines[1].startswith("  call 1 extends call 0 with 1 new message(s)")
    assert "message 0 (user) is not the recorded one" in lines[2]
    assert lines[3].endswith("[failed]: RuntimeError: server gone")


def test_the_explanation_of_a_long_conversation_stays_at_the_left_and_forks_stand_further_in():
    recorder = Recorder()
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


def test_the_explanation_says_why_answers_were_discarded():
    recorder = Recorder()
    for messages in ([user("q")], [user("q")], [user("q"), user("Think again.")]):
        recorder.call(messages, "a", agent="A")
    recorder.trajectory.settle([user("q"), user("Think again.")])
    notes = [turn.note for turn in recorder.trajectory.turns]
    assert notes == [
        "the agent asked the same again",
        "message 1 (user) stands in its place",
        "the agent's messages end before it",
    ]
    assert all(note in line for note, line in zip(notes, recorder.trajectory.explain().splitlines(), strict=True))


@pytest.mark.parametrize("first_end", ["cut", "discarded"])
def test_the_main_sequence_is_the_attempt_that_the_agent_kept(first_end):
    recorder = Recorder()
    if first_end == "cut":
        recorder.trajectory.cut(recorder.ask([user("q")]), generation(90, 91, finish="abort"), RuntimeError("abort"))
    else:
        recorder.call([user("q")], "thrown away by a hook")
    kept = recorder.call([user("q")], "kept")
    assert recorder.trajectory.latest_main_sequence().token_ids == kept.token_ids()
    after = recorder.call([user("q"), assistant("kept"), user("r")])
    assert recorder.trajectory.latest_main_sequence().token_ids == after.token_ids()


@pytest.mark.parametrize("kept", "abc")
def test_the_main_sequence_ends_with_the_answer_that_was_kept_and_not_with_the_latest(kept):
    recorder = Recorder()
    tries = {answer: recorder.call([user("q")], answer, agent="A") for answer in "abc"}
    recorder.trajectory.settle([user("q"), assistant(kept)])
    main = recorder.trajectory.latest_main_sequence()
    assert (main.token_ids, main.loss_mask) == (tries[kept].token_ids(), [0, 0, 1, 1])


def test_where_every_answer_was_thrown_away_the_main_sequence_trains_nothing():
    recorder = Recorder()
    turn = recorder.call([user("q")], "a", agent="A")
    recorder.trajectory.settle([user("q"), assistant("Cancelled by user")])
    main = recorder.trajectory.latest_main_sequence()
    assert (main.token_ids, main.loss_mask) == (turn.token_ids(), [0, 0, 0, 0])
    assert recorder.trajectory.sequences() == []


def test_an_aborted_attempt_does_not_claim_the_history_that_it_shares():
    recorder = Recorder()
    recorder.call([user("q")], "a")
    history = [user("q"), assistant("a"), user("r")]
    recorder.trajectory.cut(recorder.ask(history), generation(90, 91, finish="abort"), RuntimeError("abort"))
    recorder.call(history, "b")
    kept, aborted = recorder.trajectory.sequences()
    assert kept.loss_mask == [0, 0, 1, 1, 0, 0, 1, 1]
    assert aborted.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1]


def test_the_weight_version_and_the_finish_reason_stay_with_their_segment():
    recorder = Recorder()
    turn = recorder.ask([user("q")])
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


def test_the_tokens_that_a_fork_keeps_have_the_versions_that_sampled_them():
    recorder = Recorder()
    turn = recorder.ask([user("q")])
    versions = (VersionSpan("v6", 0, 2), VersionSpan("v7", 2, 3))
    answer = Generation(array("i", [1, 2, 3]), None, finish_type="stop", weight_versions=versions)
    recorder.trajectory.answer(turn, answer, assistant("a"))
    kept = recorder.ask([user("q"), assistant("a"), user("r")], kept=2)
    recorder.trajectory.answer(kept, Generation(array("i", [4]), None, finish_type="stop"), assistant("b"))
    forked = recorder.trajectory.sequences()[-1]
    assert [version for version in forked.policy_versions if version] == ["v6", "v6"]


def test_the_main_sequence_stays_with_the_conversation_that_came_first():
    recorder = Recorder()
    recorder.call([user("q")], "a")
    recorder.call([user("sub-agent")], "b", **{"system prompt": "sub"})
    recorder.call([user("q"), assistant("a"), user("r")])
    assert recorder.trajectory.latest_main_sequence().token_ids == [0, 1, 2, 3, 8, 9, 10, 11]


def test_observations_have_logprob_zero_and_the_opening_prompt_none():
    recorder = Recorder()
    recorder.call([user("q")], "a")
    recorder.call([user("q"), assistant("a"), user("r")])
    sequence = recorder.trajectory.latest_main_sequence()
    assert sequence.logprobs == [None, None, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xyz"), st.sampled_from("ab")), max_size=12))
def test_under_any_rewriting_of_the_history_each_sampled_token_is_trained_once(calls):
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
