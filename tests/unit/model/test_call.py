"""A call whose request the server aborts: with `on_abort="resume"` it goes on from the tokens that it has."""

import asyncio
import base64
import copy
import json
import threading
from array import array

import httpx
import pytest
from pydantic import BaseModel
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from strands_sglang import (
    SGLangAbortedError,
    SGLangCancelledError,
    SGLangClient,
    SGLangConnectionError,
    SGLangDeadlineError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangModel,
    TerminationReason,
    TokenizerMismatchError,
    Trajectory,
    TurnStatus,
    outcome_of,
    termination_reason,
)
from strands_sglang.model.call import check_answer
from strands_sglang.model.config import ModelConfig
from strands_sglang.protocol.generation import Generation
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedFault, ScriptedSGLang, bodies
from support.agents import advance, call, make_agent, make_tools
from support.fake_server import FakeServer


def aborted(text):
    return ScriptedAnswer(text, finish_reason="abort")


class Endless:
    """An answer that goes on until it is aborted, and then is what was sampled until then."""

    def __init__(self, sampled="The beginning of"):
        self.sampled = sampled
        self.started = asyncio.Event()

    async def __call__(self, request):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return self.sampled


async def cancelled_task(model, endless, **kwargs):
    task = asyncio.create_task(make_agent(model, **kwargs).invoke_async("go"))
    await endless.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def resuming(chatml_tokenizer):
    def make(answers, *, client=None, experts=None, **config):
        server = ScriptedSGLang(chatml_tokenizer, answers, experts=experts)
        client = server.client(**{"max_retries": 3, "retry_delay": 0.0, **(client or {})})
        config = {"on_abort": "resume", **config}
        return server, SGLangModel(tokenizer=chatml_tokenizer, client=client, **config)

    return make


def sent(server):
    return [request.input_ids for request in server.requests]


def sampled(server, index):
    return server.responses[index].body["output_ids"]


async def test_the_call_goes_on_from_its_tokens_and_the_agent_notices_nothing(resuming):
    server, model = resuming([aborted("The answer "), aborted(""), aborted("is "), "4."])
    result = await make_agent(model).invoke_async("2+2?")
    assert str(result).strip() == "The answer is 4."
    first, second, third, fourth = sent(server)
    assert second == third == first + sampled(server, 0)
    assert fourth == third + sampled(server, 2)
    (turn,) = model.trajectory.turns
    assert turn.token_ids() == fourth + sampled(server, 3)
    (sequence,) = model.trajectory.sequences()
    told = [entry[0] for response in server.responses for entry in response.body["meta_info"]["output_token_logprobs"]]
    assert sequence.logprobs[len(first) :] == told
    assert sequence.loss_mask == [0] * len(first) + [1] * len(told)
    rids = [request.rid for request in server.requests]
    assert (*turn.generation.resumed_ids, turn.generation.request_id) == tuple(rids)


async def test_an_abort_raises_by_default_with_what_was_sampled_kept_as_a_cut_turn(resuming):
    server, model = resuming([aborted("The answer "), "never asked"], on_abort=None)
    with pytest.raises(Exception, match="aborted the request") as failure:
        await make_agent(model).invoke_async("2+2?")
    assert termination_reason(failure.value) is TerminationReason.ABORTED
    (turn,) = model.trajectory.turns
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", sampled(server, 0))
    assert len(server.requests) == 1


async def test_every_token_has_the_version_of_the_weights_that_sampled_it(resuming):
    def update(request):
        server.weight_version = "2"
        return "New."

    server, model = resuming([aborted("Old. "), update])
    await make_agent(model).invoke_async("go")
    (sequence,) = model.trajectory.sequences()
    old, new = len(sampled(server, 0)), len(sampled(server, 1))
    assert sequence.policy_versions[-old - new :] == ["default"] * old + ["2"] * new
    assert [tuple(span) for span in sequence.segments[1].weight_versions] == [
        ("default", 0, old),
        ("2", old, old + new),
    ]


async def test_all_parts_together_have_the_budget_of_one_call(resuming):
    server, model = resuming(
        [aborted("One two three"), "four five six seven eight"], sampling_params={"max_new_tokens": 20}
    )
    with pytest.raises(Exception, match="max_tokens|MaxTokens|maximum"):
        await make_agent(model).invoke_async("Count.")
    first = len(sampled(server, 0))
    assert [request.sampling_params["max_new_tokens"] for request in server.requests] == [20, 20 - first]
    (turn,) = model.trajectory.turns
    assert len(turn.output_ids) == 20
    assert turn.sampling_params["max_new_tokens"] == 20


async def test_an_abort_right_at_the_end_of_the_budget_ends_the_call(resuming):
    server, model = resuming([aborted("One two three")], sampling_params={"max_new_tokens": 5})
    with pytest.raises(Exception, match="max_tokens|MaxTokens|maximum") as failure:
        await make_agent(model).invoke_async("Count.")
    assert termination_reason(failure.value) is TerminationReason.MAX_TOKENS_REACHED
    assert len(server.requests) == 1


async def test_a_tool_call_in_two_parts_runs(resuming):
    text = call(expression="2 * 3")
    server, model = resuming([aborted(text[:30]), text[30:], "6."])
    calculator, ran = make_tools()
    await make_agent(model, calculator).invoke_async("2 times 3?")
    assert ran == ["2 * 3"]
    (sequence,) = model.trajectory.sequences()
    assert sequence.token_ids == sent(server)[-1] + sampled(server, 2)


async def test_routed_experts_are_those_that_each_token_was_sampled_with(resuming):
    experts = ScriptedExperts(layers=2, top_k=1)
    server, model = resuming([aborted("Half "), "whole."], experts=experts, return_routed_experts=True)
    await make_agent(model).invoke_async("go")
    generation = model.trajectory.turns[0].generation
    assert generation.expert_ids().shape == (len(model.token_manager) - 1, 2)


async def test_a_constrained_answer_begins_anew(resuming):
    from pydantic import BaseModel

    class Sum(BaseModel):
        total: int

    server, model = resuming([aborted('{"tot'), '{"total": 4}'])
    events = [event async for event in model.structured_output(Sum, [{"role": "user", "content": [{"text": "2+2?"}]}])]
    assert events[-1]["output"] == Sum(total=4)
    assert sent(server)[0] == sent(server)[1]


async def test_a_server_that_only_aborts_is_given_up_in_the_end(resuming):
    server, model = resuming(lambda request: aborted(""))
    with pytest.raises(Exception, match="aborted the request") as failure:
        await make_agent(model).invoke_async("go")
    assert termination_reason(failure.value) is TerminationReason.ABORTED
    assert len(server.requests) == 1 + 3  # the client's retries
    assert model.trajectory.turns[0].status.value == "failed"


async def test_what_was_sampled_before_a_failure_is_kept(resuming):
    server, model = resuming([aborted("Half "), *[ScriptedFault(status=500)] * 9])
    with pytest.raises(Exception, match="500"):
        await make_agent(model).invoke_async("go")
    (turn,) = model.trajectory.turns
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", sampled(server, 0))


async def test_a_cancel_keeps_all_parts(resuming):
    hang = Endless("more ")
    server, model = resuming([aborted("Half "), hang])
    await cancelled_task(model, hang)
    (turn,) = model.trajectory.turns
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", sampled(server, 0) + sampled(server, 1))


async def test_a_closed_client_does_not_go_on(resuming):
    client_box = []

    async def closed(request):
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(client_box[0].close()))
        await asyncio.Event().wait()

    server, model = resuming([closed, "never asked"])
    client_box.append(model.client)
    with pytest.raises(Exception) as failure:  # noqa: PT011
        await make_agent(model).invoke_async("go")
    assert termination_reason(failure.value) in (TerminationReason.ABORTED, TerminationReason.INFRASTRUCTURE_ERROR)
    assert len(server.requests) == 1


@pytest.mark.parametrize("on_abort", ["raise", "resume"])
async def test_a_call_that_a_closed_client_aborts_says_so(on_abort, resuming):
    """A15 (p33): nobody looks for a weight update where the own process has closed the client."""
    hang = Endless("more ")
    server, model = resuming([hang], on_abort=on_abort)
    running = asyncio.ensure_future(make_agent(model).invoke_async("go"))
    await hang.started.wait()
    await model.client.close()
    with pytest.raises(SGLangAbortedError, match="client was closed while the request ran") as failure:
        await running
    assert "weight" not in str(failure.value)
    (turn,) = model.trajectory.turns
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", sampled(server, 0))


async def test_the_deadline_is_for_all_parts_together(resuming):
    async def forever(request):
        advance(25)
        if len(server.requests) == 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
        return aborted("more ")

    server, model = resuming(forever, client={"deadline": 60})
    with pytest.raises(Exception, match="deadline") as failure:
        await make_agent(model).invoke_async("go")
    assert termination_reason(failure.value) is TerminationReason.TIMEOUT
    (turn,) = model.trajectory.turns
    assert turn.status.value == "cut"
    assert turn.output_ids.tolist() == [token for i in range(3) for token in sampled(server, i)]


async def test_an_answer_under_a_grammar_of_the_users_own_begins_anew_and_is_not_trained(resuming):
    server, model = resuming([aborted('{"tot'), '{"total": 4}'], sampling_params={"json_schema": '{"type": "object"}'})
    assert str(await make_agent(model).invoke_async("2+2?")).strip() == '{"total": 4}'
    assert sent(server)[0] == sent(server)[1]
    assert not any(model.token_manager.loss_mask)


@pytest.mark.parametrize("split", [5, 9, 12])
async def test_a_stop_string_that_an_abort_has_split_still_ends_the_answer(resuming, split):
    text = "Yes.</answer> and so on"
    server, model = resuming([aborted(text[:split]), text[split:]], sampling_params={"stop": ["</answer>"]})
    assert str(await make_agent(model).invoke_async("2+2?")).strip() == "Yes."
    generation = model.trajectory.turns[0].generation
    assert (generation.finish_type, generation.stop_string) == ("stop", "</answer>")


async def test_what_only_looks_like_the_rest_of_a_stop_string_does_not_end_the_answer(resuming):
    answers = [aborted("a </answ"), "ing and lower>", " and more.</answer> and so on"]
    server, model = resuming(answers, sampling_params={"stop": "</answer>"})
    assert str(await make_agent(model).invoke_async("2+2?")).strip() == "a </answing and lower> and more."
    generation = model.trajectory.turns[0].generation
    assert generation.stop_string == "</answer>"
    assert generation.output_ids.tolist() == [
        token for i in range(len(server.requests)) for token in sampled(server, i)
    ]


async def test_a_cancel_stays_one_where_the_parts_do_not_fit_together(resuming, monkeypatch):
    hang = Endless("more ")
    server, model = resuming(
        [aborted("Half "), hang], experts=ScriptedExperts(layers=2, top_k=1), return_routed_experts=True
    )
    body_of = bodies.generation

    def without_experts_of_the_first(request, *args, **kwargs):
        body = body_of(request, *args, **kwargs)
        if len(server.requests) == 1:
            del body["meta_info"]["routed_experts"]
        return body

    monkeypatch.setattr(bodies, "generation", without_experts_of_the_first)
    await cancelled_task(model, hang)
    (turn,) = model.trajectory.turns
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", sampled(server, 0) + sampled(server, 1))


async def test_a_client_that_is_closed_between_two_requests_does_not_go_on(resuming):
    pausing = asyncio.Event()
    answers = [lambda request: pausing.set() or aborted(""), "never asked"]
    server, model = resuming(answers, client={"retry_delay": 0.05})
    running = asyncio.ensure_future(make_agent(model).invoke_async("go"))
    await pausing.wait()
    while server.responses[0] is None:
        await asyncio.sleep(0)
    await model.client.close()
    with pytest.raises(Exception, match="aborted the request|was closed"):
        await running
    assert len(server.requests) == 1


class ReservesAToken(httpx.AsyncBaseTransport):
    """A server as of SGLang 0.5.10, which refuses what fills its context to the last token."""

    def __init__(self, server):
        self.inner, self.context_length, self.refused = server.transport(), server.context_length, 0

    async def handle_async_request(self, request):
        if request.url.path == "/generate":
            body = json.loads(request.content)
            if len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] >= self.context_length:
                self.refused += 1
                message = "Requested token count exceeds the model's maximum context length of 300 tokens."
                return httpx.Response(400, json={"error": {"message": message}})
        return await self.inner.handle_async_request(request)


async def test_a_server_that_reserves_the_last_token_of_its_context_is_asked_for_one_less(chatml_tokenizer):
    """Item 9: what the oldest supported SGLang does, found out by the first call and remembered."""
    server = ScriptedSGLang(chatml_tokenizer, ["One.", "Two.", "long " * 300], context_length=300)
    older = ReservesAToken(server)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=SGLangClient("http://x", transport=older, max_retries=0))
    agent = make_agent(model)
    for question in "ab":
        await agent.invoke_async(question)
    assert older.refused == 1
    asked = [len(r.input_ids) + r.sampling_params["max_new_tokens"] for r in server.requests]
    assert asked == [299, 299]
    assert [turn.sampling_params for turn in model.trajectory.turns] == [r.sampling_params for r in server.requests]
    with pytest.raises(MaxTokensReachedException) as end:
        await agent.invoke_async("c")
    assert termination_reason(end.value, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    with pytest.raises(ContextWindowOverflowException):
        await make_agent(model).invoke_async("much too long " * 300)
    assert older.refused == 1


async def test_calls_that_find_out_together_about_a_reserved_token_are_all_answered(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=300)
    client = SGLangClient("http://x", transport=ReservesAToken(server), max_retries=0)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client)
    await asyncio.gather(*(make_agent(model).invoke_async(question) for question in "abcdefgh"))
    assert len(server.requests) == 8


async def test_the_deadline_is_for_what_is_asked_of_the_server_first_too(chatml_tokenizer):
    busy = FakeServer(httpx.Response(503), paths={"/v1/models": httpx.Response(503)})
    model = SGLangModel(tokenizer=chatml_tokenizer, client=busy.client(max_retries=10**6, deadline=0.1))
    with pytest.raises(Exception, match="deadline") as failure:
        await make_agent(model).invoke_async("go")
    assert termination_reason(failure.value) is TerminationReason.INFRASTRUCTURE_ERROR
    assert model.trajectory.turns[0].status.value == "failed"


@pytest.mark.parametrize("name", ["on_abort", "history_policy"])
def test_an_unknown_policy_is_refused(chatml_tokenizer, name):
    with pytest.raises(ValueError, match=f"{name} must be '.*' or '.*', not 'maybe'"):
        SGLangModel(tokenizer=chatml_tokenizer, base_url="http://localhost:1", **{name: "maybe"})


# --- going on with a cut turn later ---


async def cut(resuming, answers, **config):
    """A server, a model and an agent whose first call was aborted."""
    server, model = resuming(answers, on_abort="raise", **config)
    agent = make_agent(model)
    with pytest.raises(Exception, match="aborted the request"):
        await agent.invoke_async("2+2?")
    return server, model, agent


async def test_a_partial_rollout_goes_on_from_its_tokens_after_save_and_load(resuming, tmp_path):
    server, model, agent = await cut(resuming, [aborted("The answer "), "is 4."])
    model.trajectory.save(tmp_path / "part")
    model.trajectory = Trajectory.load(tmp_path / "part")
    model.trajectory.resume(model.trajectory.turns[0])
    result = await agent.invoke_async()
    assert str(result).strip() == "The answer is 4."
    first, second = sent(server)
    assert second == first + sampled(server, 0)
    (sequence,) = model.trajectory.sequences()
    assert sequence.token_ids == second + sampled(server, 1)
    assert sum(sequence.loss_mask) == len(sampled(server, 0)) + len(sampled(server, 1))


async def test_agents_that_a_weight_update_cut_at_their_first_call_each_go_on_from_tokens_of_their_own(resuming):
    """A2: Strands forgets the ids of agents whose first call fails."""
    parts = ["ALPHA alpha", "BETA beta", "GAMMA gamma"]
    answers = [*map(aborted, parts), " end", " end", " end"]
    server, model = resuming(answers, on_abort="raise")
    agents = [make_agent(model) for _ in parts]
    ends = await asyncio.gather(*(agent.invoke_async("q") for agent in agents), return_exceptions=True)
    assert all("aborted" in str(end) for end in ends)
    for turn in model.trajectory.turns:
        model.trajectory.resume(turn)
    results = await asyncio.gather(*(agent.invoke_async() for agent in agents))
    assert [str(result).strip() for result in results] == [f"{part} end" for part in parts]
    assert len(model.trajectory) == len(model.trajectory.sequences()) == 3
    trained = sum(sum(sequence.loss_mask) for sequence in model.trajectory.sequences())
    assert trained == sum(len(sampled(server, i)) for i in range(6))


async def test_a_failed_first_call_stays_on_record_beside_another_agents(rollout):
    """A2."""
    _, model = rollout([ScriptedFault("status", 400), "fine"])
    with pytest.raises(SGLangHTTPError):
        await make_agent(model).invoke_async("q")
    await make_agent(model).invoke_async("q")
    assert [turn.status.value for turn in model.trajectory.turns] == ["failed", "answered"]


@pytest.mark.parametrize("config", [{}, {"return_prompt_logprobs": True}])
async def test_a_turn_that_is_to_go_on_can_be_saved_and_loaded(resuming, config, tmp_path):
    server, model, agent = await cut(resuming, [aborted("The answer "), "is 4."], **config)
    model.trajectory.resume(model.trajectory.turns[0])
    model.trajectory.save(tmp_path / "part")
    model.trajectory = Trajectory.load(tmp_path / "part")
    assert str(await agent.invoke_async()).strip() == "The answer is 4."
    assert sent(server)[1] == sent(server)[0] + sampled(server, 0)
    known = [logprob is not None for logprob in model.token_manager.logprobs[1:]]
    assert all(known) is bool(config)


async def test_a_resumed_call_that_is_aborted_again_keeps_all_of_its_tokens(resuming):
    server, model, agent = await cut(resuming, [aborted("The "), aborted("answer "), "is 4."])
    model.trajectory.resume(model.trajectory.turns[0])
    with pytest.raises(Exception, match="aborted the request"):
        await agent.invoke_async()
    (turn,) = model.trajectory.turns
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", sampled(server, 0) + sampled(server, 1))
    model.trajectory.resume(turn)
    assert str(await agent.invoke_async()).strip() == "The answer is 4."


async def test_a_resumed_call_without_a_budget_ends_by_length(resuming):
    server, model, agent = await cut(resuming, [aborted("One two three")], sampling_params={"max_new_tokens": 20})
    model.update_config(sampling_params={"max_new_tokens": 2})
    model.trajectory.resume(model.trajectory.turns[0])
    with pytest.raises(Exception, match="max_tokens|MaxTokens|maximum"):
        await agent.invoke_async()
    assert len(server.requests) == 1
    (turn,) = model.trajectory.turns
    assert (turn.generation.finish_type, turn.output_ids.tolist()) == ("length", sampled(server, 0))


# --- what a model records of calls that were cut short from outside: cancelled tasks, `agent.cancel()`, deadlines ---


QUESTION = [{"role": "user", "content": [{"text": "hi"}]}]


async def test_a_cancelled_task_leaves_a_cut_turn_with_what_was_sampled(rollout):
    endless = Endless()
    server, model = rollout([endless])
    await cancelled_task(model, endless)
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert isinstance(turn.cause, asyncio.CancelledError)
    assert list(turn.output_ids) == server.responses[0].body["output_ids"] != []
    assert len(turn.generation.logprobs) == len(turn.output_ids)
    assert server.running == []
    [sequence] = model.trajectory.sequences()
    assert sum(sequence.loss_mask) == len(turn.output_ids)


async def test_a_cancelled_task_with_nothing_sampled_leaves_a_failed_turn(rollout):
    endless = Endless("")
    _, model = rollout([endless])
    await cancelled_task(model, endless)
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.FAILED
    assert isinstance(turn.cause, asyncio.CancelledError)


async def test_the_same_call_after_a_cancelled_one_starts_anew(rollout):
    endless = Endless()
    server, model = rollout([endless, "The whole answer."])
    await cancelled_task(model, endless)
    await make_agent(model).invoke_async("go")
    cut, answered = model.trajectory.turns
    assert server.requests[0].input_ids == server.requests[1].input_ids
    assert (cut.status, answered.status) == (TurnStatus.CUT, TurnStatus.ANSWERED)


async def test_agent_cancel_aborts_the_request_and_the_agent_ends_as_cancelled(rollout):
    endless = Endless()
    server, model = rollout([call(expression="2 * 3"), endless])
    tools, _ = make_tools()
    agent = make_agent(model, tools)
    task = asyncio.create_task(agent.invoke_async("go"))
    await endless.started.wait()
    agent.cancel()
    result = await task
    assert result.stop_reason == "cancelled"
    assert server.running == [] and len(server.aborted) == 1
    first, turn = model.trajectory.turns
    assert turn.parent is first
    assert turn.status is TurnStatus.CUT
    assert isinstance(turn.cause, SGLangCancelledError)
    assert list(turn.output_ids) == server.responses[1].body["output_ids"] != []
    assert termination_reason(result, trajectory=model.trajectory) is TerminationReason.CANCELLED


async def test_an_agent_goes_on_after_a_cancel(rollout):
    endless = Endless()
    server, model = rollout([endless, "Better."])
    agent = make_agent(model)
    task = asyncio.create_task(agent.invoke_async("go"))
    await endless.started.wait()
    agent.cancel()
    await task
    assert str(await agent.invoke_async("once more")).strip() == "Better."
    assert "Cancelled by user" in server.requests[1].text


async def test_a_signal_that_is_set_already_sends_nothing_and_records_nothing(rollout):
    server, model = rollout(["never"])
    signal = threading.Event()
    signal.set()
    events = [event async for event in model.stream(QUESTION, cancel_signal=signal)]
    assert events[-1] == {"messageStop": {"stopReason": "cancelled"}}
    assert server.requests == [] and len(model.trajectory) == 0


async def test_structured_output_can_be_cancelled(rollout):
    class Answer(BaseModel):
        number: int

    server, model = rollout(["never"])
    signal = threading.Event()
    signal.set()
    with pytest.raises(SGLangCancelledError):
        [event async for event in model.structured_output(Answer, QUESTION, cancel_signal=signal)]
    assert server.requests == []


async def test_a_call_past_its_deadline_is_a_cut_turn_and_a_timeout(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [Endless()])
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client(deadline=0.2))
    with pytest.raises(SGLangDeadlineError) as caught:
        await make_agent(model).invoke_async("go")
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    reason = termination_reason(caught.value, trajectory=model.trajectory)
    assert reason is TerminationReason.TIMEOUT
    assert outcome_of(reason, sampled_tokens=len(turn.output_ids)).slime_status == "TRUNCATED"


async def test_a_deadline_with_no_server_at_work_is_an_infrastructure_error():
    assert termination_reason(SGLangDeadlineError("late")) is TerminationReason.INFRASTRUCTURE_ERROR


async def test_a_cancelled_call_is_a_cancelled_episode():
    assert termination_reason(SGLangCancelledError("cancelled")) is TerminationReason.CANCELLED


# --- routing keys ---


def keys(server):
    return [request.headers["x-smg-routing-key"] for request in server.requests]


async def test_all_calls_of_a_conversation_and_its_forks_have_one_key(rollout):
    server, model = rollout([call(expression="2 * 3"), "6", "six", "again"])
    tools, _ = make_tools()
    agent = make_agent(model, tools)
    await agent.invoke_async("go")
    fork = make_agent(model, tools, messages=agent.messages[:2])
    await fork.invoke_async("and now?")
    await agent.invoke_async("more")
    assert len(server.requests) == 4
    assert len(set(keys(server))) == 1
    assert server.requests[0].body["routing_key"] == keys(server)[0]


async def test_other_conversations_and_other_episodes_have_other_keys(rollout):
    server, model = rollout(lambda request: "ok")
    await make_agent(model).invoke_async("go")
    await make_agent(model).invoke_async("something else")
    model.reset()
    await make_agent(model).invoke_async("go")
    assert len(set(keys(server))) == 3


async def test_a_retried_first_call_has_the_key_that_it_had(rollout):
    server, model = rollout([ScriptedAnswer("cut", finish_reason="abort"), "ok"])
    for _ in range(2):
        await asyncio.gather(make_agent(model).invoke_async("go"), return_exceptions=True)
    assert len(server.requests) == 2 and len(set(keys(server))) == 1


async def test_a_configured_key_is_used_for_everything_and_can_be_changed(rollout):
    server, model = rollout(lambda request: "ok", routing_key="episode-7")
    await make_agent(model).invoke_async("go")
    await make_agent(model).invoke_async("something else")
    model.update_config(routing_key="episode-8")
    await make_agent(model).invoke_async("go")
    assert keys(server) == ["episode-7", "episode-7", "episode-8"]
    with pytest.raises(ValueError, match="routing_key"):
        model.update_config(routing_key="a\nb")


# --- None ---


def behind(server, seen, *, missing=()):
    """A client of the server that notes every path, through something that lacks some of them."""

    async def pass_on(request):
        seen.append(request.url.path)
        if request.url.path in missing:
            return httpx.Response(404, json={"detail": "Not Found"})
        return await server.transport().handle_async_request(request)

    return SGLangClient("http://x", transport=httpx.MockTransport(pass_on), max_retries=0)


async def test_many_models_that_start_together_ask_the_server_once(chatml_tokenizer):
    seen = []
    client = behind(ScriptedSGLang(chatml_tokenizer, lambda request: "ok"), seen)
    models = [SGLangModel(tokenizer=chatml_tokenizer, client=client) for _ in range(20)]
    await asyncio.gather(*(make_agent(model).invoke_async("hi") for model in models))
    assert (seen.count("/tokenize"), seen.count("/v1/models"), seen.count("/generate")) == (1, 1, 20)


async def test_behind_a_router_the_match_is_unproven_and_said_so_once(chatml_tokenizer, caplog):
    seen = []
    server = ScriptedSGLang(chatml_tokenizer, lambda request: "ok")
    client = behind(server, seen, missing=("/tokenize", "/v1/models"))
    for _ in range(3):
        await make_agent(SGLangModel(tokenizer=chatml_tokenizer, client=client)).invoke_async("hi")
    assert sum("unproven" in record.getMessage() for record in caplog.records) == 1
    assert sum("context_window_limit" in record.getMessage() for record in caplog.records) == 1
    assert "max_new_tokens" not in server.requests[0].sampling_params


async def test_a_tokenizer_that_lacks_only_a_mark_is_noticed(chatml_tokenizer):
    other = copy.deepcopy(chatml_tokenizer)
    other.add_tokens(["<observation>"])
    server = ScriptedSGLang(chatml_tokenizer, ["never"])
    with pytest.raises(TokenizerMismatchError, match="<observation>"):
        await make_agent(SGLangModel(tokenizer=other, client=server.client())).invoke_async("hi")
    assert server.requests == []


async def test_a_failed_check_is_made_again(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, ["ok"])
    down = True

    async def pass_on(request):
        if down:
            raise httpx.ConnectError("refused")
        return await server.transport().handle_async_request(request)

    client = SGLangClient("http://x", transport=httpx.MockTransport(pass_on), max_retries=0)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=client)
    with pytest.raises(SGLangConnectionError):
        await make_agent(model).invoke_async("hi")
    down = False
    assert str(await make_agent(model).invoke_async("hi")).strip() == "ok"


# --- several servers ---


class Pair:
    """Two servers behind one client; either may be down."""

    def __init__(self, **servers):
        self.servers, self.down, self.seen = servers, set(), []

    async def __call__(self, request):
        self.seen.append((request.url.host, request.url.path))
        if request.url.host in self.down:
            raise httpx.ConnectError("refused")
        return await self.servers[request.url.host].transport().handle_async_request(request)

    def client(self, **settings):
        urls = [f"http://{host}" for host in self.servers]
        settings = {"max_retries": 5, "retry_delay": 0.0, **settings}
        return SGLangClient(urls, transport=httpx.MockTransport(self), **settings)


async def test_every_one_of_several_servers_is_asked_once(chatml_tokenizer):
    servers = {name: ScriptedSGLang(chatml_tokenizer, lambda request: "ok") for name in ("one", "two")}
    pair = Pair(**servers)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=pair.client())
    for _ in range(4):
        await make_agent(model).invoke_async("hi")
    assert sorted(host for host, path in pair.seen if path == "/tokenize") == ["one", "two"]


async def test_one_server_with_another_tokenizer_is_an_error_that_names_it(chatml_tokenizer):
    other = copy.deepcopy(chatml_tokenizer)
    other.add_tokens(["<observation>"])
    pair = Pair(one=ScriptedSGLang(other, ["ok"]), two=ScriptedSGLang(chatml_tokenizer, ["ok"]))
    model = SGLangModel(tokenizer=other, client=pair.client())
    with pytest.raises(TokenizerMismatchError, match="http://two"):
        await make_agent(model).invoke_async("hi")
    assert not any(server.requests for server in pair.servers.values())


async def test_the_shortest_context_of_several_servers_counts(chatml_tokenizer):
    short = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=500)
    long = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=900)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=Pair(one=long, two=short).client())
    await make_agent(model).invoke_async("hi")
    [request] = [*short.requests, *long.requests]
    assert request.sampling_params["max_new_tokens"] + len(request.input_ids) == 500


async def test_a_server_that_is_down_is_asked_when_it_gets_requests(chatml_tokenizer, monkeypatch):
    monkeypatch.setattr("strands_sglang.client.balancer.FIRST_PROBE_S", 0.0)
    monkeypatch.setattr("strands_sglang.client.balancer.MAX_PROBE_S", 0.0)
    other = copy.deepcopy(chatml_tokenizer)
    other.add_tokens(["<observation>"])
    good = ScriptedSGLang(other, lambda request: "ok")
    pair = Pair(one=good, two=ScriptedSGLang(chatml_tokenizer, lambda request: "wrong"))
    pair.down = {"two"}
    model = SGLangModel(tokenizer=other, client=pair.client())
    for _ in range(3):
        assert str(await make_agent(model).invoke_async("hi")).strip() == "ok"
    pair.down = set()
    with pytest.raises(TokenizerMismatchError, match="http://two"):
        for _ in range(100):
            await make_agent(model).invoke_async("hi")


async def test_with_all_servers_down_the_check_fails_as_for_one(chatml_tokenizer):
    pair = Pair(**{name: ScriptedSGLang(chatml_tokenizer, ["ok"]) for name in ("one", "two")})
    pair.down = {"one", "two"}
    model = SGLangModel(tokenizer=chatml_tokenizer, client=pair.client(max_retries=2))
    with pytest.raises(SGLangConnectionError, match="could not connect"):
        await make_agent(model).invoke_async("hi")
    pair.down = set()
    assert str(await make_agent(model).invoke_async("hi")).strip() == "ok"


async def test_a_cancelled_agent_does_not_wait_for_the_check_of_a_server_that_is_down(chatml_tokenizer):
    pair = Pair(one=ScriptedSGLang(chatml_tokenizer, ["never"]))
    pair.down = {"one"}
    model = SGLangModel(tokenizer=chatml_tokenizer, client=pair.client(retry_delay=8.0))
    signal = threading.Event()

    async def ask():
        messages = [{"role": "user", "content": [{"text": "hi"}]}]
        return [event async for event in model.stream(messages, cancel_signal=signal)]

    task = asyncio.create_task(ask())
    while not pair.seen:
        await asyncio.sleep(0)
    signal.set()
    events = await asyncio.wait_for(task, 5)
    assert events[-1] == {"messageStop": {"stopReason": "cancelled"}}


# --- test_request ---


ASKED = ModelConfig(return_routed_experts=True)


def generation(*, prompt_tokens=5, rows=8, width=6, finish_type="stop", **fields):
    experts = base64.b64encode(bytes(4 * rows * width)).decode()
    fields = {"routed_experts": experts, **fields}
    return Generation(array("i", [7, 8, 9, 2]), None, finish_type, prompt_tokens=prompt_tokens, **fields)


def test_routed_experts_that_fit_are_taken():
    check_answer(generation(), ASKED, 5, 5)
    check_answer(generation(prompt_tokens=15, rows=18), ASKED, 15, 6, parent=generation())


def test_routed_experts_that_are_missing_are_an_error():
    with pytest.raises(SGLangDecodingError, match="not returned.*--enable-return-routed-experts.*router drops"):
        check_answer(generation(routed_experts=None), ASKED, 5, 5)


@pytest.mark.parametrize("given", [{}, {"return_routed_experts": False}, {"return_routed_experts": None}])
def test_routed_experts_that_nobody_asked_for_may_be_missing(given):
    config, _ = ModelConfig.read(given)
    check_answer(generation(routed_experts=None), config, 5, 5)


def test_an_aborted_request_may_lack_them():
    check_answer(generation(routed_experts=None, finish_type="abort"), ASKED, 5, 5)


def test_another_number_of_ids_per_token_than_in_the_turn_before_is_an_error():
    with pytest.raises(SGLangDecodingError, match="3 ids .* per token and 6 for the turn before.* 18 tokens"):
        check_answer(generation(prompt_tokens=15, rows=18, width=3), ASKED, 15, 6, parent=generation())


@pytest.mark.parametrize("config", [ASKED, ModelConfig()])
def test_a_turn_before_that_told_nothing_is_no_measure(config):
    check_answer(generation(), config, 5, 5, parent=generation(routed_experts=None))


@pytest.mark.parametrize("details", [None, {"device": 4, "host": 0}, {"device": 4, "host": 0, "storage": 0}])
def test_rows_of_tokens_from_the_first_tier_of_the_cache_are_taken(details):
    check_answer(generation(meta_info={"cached_tokens_details": details}), ASKED, 5, 5)


@pytest.mark.parametrize("tiers", [{"host": 4}, {"host": 0, "storage": 4, "storage_backend": "file"}])
def test_rows_of_tokens_from_other_tiers_of_the_cache_are_an_error(tiers):
    answer = generation(meta_info={"cached_tokens_details": {"device": 0, **tiers}})
    with pytest.raises(SGLangDecodingError, match="tiers.*: 4.*--enable-hierarchical-cache"):
        check_answer(answer, ASKED, 5, 5)
    check_answer(answer, ModelConfig(), 5, 5)
