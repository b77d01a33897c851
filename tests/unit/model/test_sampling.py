"""A call whose request the server aborts: with `on_abort="resume"` it goes on from the tokens that it has."""

import asyncio
import json

import httpx
import pytest
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from strands_sglang import (
    SGLangAbortedError,
    SGLangClient,
    SGLangHTTPError,
    SGLangModel,
    TerminationReason,
    Trajectory,
    termination_reason,
)
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedFault, ScriptedSGLang, bodies
from support.agents import call, make_agent, make_tools
from support.clock import advance
from support.fake_server import FakeServer


def aborted(text):
    return ScriptedAnswer(text, finish_reason="abort")


def hanging():
    """An answer that samples until its request is aborted, and an event that says when it has begun."""
    asked = asyncio.Event()

    async def hang(request):
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "more "

    return asked, hang


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


async def cancelled_turn(model, asked):
    """The only turn of an agent that is cancelled once `asked` is set."""
    running = asyncio.ensure_future(make_agent(model).invoke_async("go"))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (turn,) = model.trajectory.turns
    return turn


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
    asked, hang = hanging()
    server, model = resuming([aborted("Half "), hang])
    turn = await cancelled_turn(model, asked)
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
    asked, hang = hanging()
    server, model = resuming([hang], on_abort=on_abort)
    running = asyncio.ensure_future(make_agent(model).invoke_async("go"))
    await asked.wait()
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
    asked, hang = hanging()
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
    turn = await cancelled_turn(model, asked)
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", sampled(server, 0) + sampled(server, 1))


async def test_a_client_that_is_closed_between_two_requests_does_not_go_on(resuming):
    server, model = resuming([aborted(""), "never asked"], client={"retry_delay": 0.05})
    pausing = asyncio.Event()
    server._script = type(server._script)([lambda request: pausing.set() or aborted(""), "never asked"])
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
