"""SGLangModel under a real Strands agent, on the scripted server: what is sent, recorded, seen and resumed."""

import asyncio
import base64
import copy
import gc
import json
import math
import pathlib
import threading
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from pydantic import BaseModel
from strands import tool
from strands.hooks import (
    AfterModelCallEvent,
    AfterToolCallEvent,
    BeforeModelCallEvent,
    MessageAddedEvent,
)
from strands.types.exceptions import (
    ContextWindowOverflowException,
    MaxTokensReachedException,
    ModelThrottledException,
)

from strands_env.core import Action, Environment
from strands_sglang import (
    SGLangAbortedError,
    SGLangCancelledError,
    SGLangClient,
    SGLangClientError,
    SGLangConnectionError,
    SGLangDeadlineError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangModel,
    SGLangThrottledError,
    TerminationReason,
    TokenizerMismatchError,
    TokenManager,
    Trajectory,
    TurnStatus,
    outcome_of,
    termination_reason,
)
from strands_sglang.messages import UnsupportedContentError
from strands_sglang.model.call import check_answer
from strands_sglang.model.config import ModelConfig
from strands_sglang.protocol.generation import Generation, to_json
from strands_sglang.templates.chat_template import ChatTemplate, ChatTemplateError
from strands_sglang.testing import (
    ScriptedAnswer,
    ScriptedExperts,
    ScriptedFault,
    ScriptedResponse,
    ScriptedSGLang,
    bodies,
)
from strands_sglang.tool_parsers import HermesToolParser, ToolParser, ToolParseResult
from support.agents import (
    CHATML_TEMPLATE,
    Gate,
    advance,
    ask,
    assistant,
    build_chatml_tokenizer,
    call,
    make_agent,
    make_tools,
    needs_module,
    numbered,
    statuses,
    user,
)
from support.servers import client_in, client_to, hosts_of, network_of, plug, scripted, until_aborted

TOOLS = make_tools()[0]


def model_on(client, **config):
    return SGLangModel(tokenizer=build_chatml_tokenizer(), client=client, **config)


def through(respond):
    """A client whose requests this function answers, without retries."""
    return SGLangClient("http://x", transport=httpx.MockTransport(respond), max_retries=0)


async def asked(model, question, tools=None):
    """The result of an agent that answers one question."""
    return await make_agent(model, tools).invoke_async(question)


def sent(server):
    """The prompts that a server received."""
    return [request.input_ids for request in server.requests]


def sampled(server, index):
    """The ids that it returned for one of them."""
    return server.responses[index].body["output_ids"]


def altering(server, alter):
    """A client of a server that changes the decoded body of each answer in place."""

    async def respond(request):
        response = await server.transport().handle_async_request(request)
        body = json.loads(await response.aread())
        if request.url.path == "/generate":
            alter(body)
        return httpx.Response(response.status_code, json=body)

    return through(respond)


# Writes every message as it is: no tools, no calls, no reasoning that is stripped.
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def other_tokenizer(chatml_tokenizer):
    """One that differs from the usual one by one token."""
    other = copy.deepcopy(chatml_tokenizer)
    other.add_tokens(["<observation>"])
    return other


# === SGLangModel under a real Strands agent, against the scripted server: what is sent, recorded, and seen ===


def assert_exact(server, model):
    """Require that the latest sequence holds what the server received and returned, token by token."""
    tm = model.token_manager
    recorded, position = tm.token_ids, 0
    for request, response in zip(server.requests, server.responses, strict=True):
        prompt, output = request.input_ids, response.body["output_ids"]
        logprobs = [entry[0] for entry in response.body["meta_info"]["output_token_logprobs"]]
        assert recorded[: len(prompt)] == prompt
        assert recorded[len(prompt) : len(prompt) + len(output)] == output
        assert tm.logprobs[len(prompt) : len(prompt) + len(output)] == logprobs
        assert tm.loss_mask[position : len(prompt)] == [0] * (len(prompt) - position)
        assert tm.loss_mask[len(prompt) : len(prompt) + len(output)] == [1] * len(output)
        position = len(prompt) + len(output)
    assert len(tm) == position


# --- exactness ---


async def test_a_conversation_of_30_tool_turns_is_one_sequence(rollout):
    answers = [f"Step {i}: " + call(expression=f"{i} * 7") for i in range(30)]
    server, model = rollout([*answers, "Done."])
    tools, ran = make_tools()
    result = await asked(model, "Compute a lot.", tools)
    assert str(result).strip() == "Done."
    assert ran == [f"{i} * 7" for i in range(30)]
    assert len(model.trajectory.sequences()) == 1
    assert_exact(server, model)


async def test_tokens_that_do_not_survive_decoding_are_kept(rollout, chatml_tokenizer):
    # "17" as two single-digit tokens, which encoding its text would never give.
    odd = [chatml_tokenizer.encode(digit)[0] for digit in "17"]
    assert chatml_tokenizer.encode(chatml_tokenizer.decode(odd)) != odd
    server, model = rollout([ScriptedAnswer(token_ids=odd), "Right."])
    agent = make_agent(model)
    await ask(agent, "Say 17.", "Again.")
    prompt = sent(server)[1]
    start = len(sent(server)[0])
    assert prompt[start : start + 2] == odd
    assert_exact(server, model)


async def test_the_prompt_is_what_the_template_writes(rollout, chatml_tokenizer):
    server, model = rollout([call(expression="2 * 3"), "6"])
    await asked(model, "2 times 3?", TOOLS)
    assert server.requests[1].text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_usage_names_prompt_output_and_cached_tokens(rollout):
    server, model = rollout(["One.", "Two."])
    agent = make_agent(model)
    await agent.invoke_async("a")
    result = await agent.invoke_async("b")
    usage = result.metrics.accumulated_usage
    prompts = [len(request.input_ids) for request in server.requests]
    outputs = [len(response.body["output_ids"]) for response in server.responses]
    assert usage["inputTokens"] == sum(prompts)
    assert usage["outputTokens"] == sum(outputs)
    assert usage["totalTokens"] == sum(prompts) + sum(outputs)
    assert usage["cacheReadInputTokens"] == sum(request.cached_tokens for request in server.requests) > 0
    assert "logprob_start_len" not in server.requests[0].body  # it would keep the server from using its prefix cache


async def test_prompt_logprobs_are_recorded_when_asked_for(rollout):
    server, model = rollout(["One.", "Two."], return_prompt_logprobs=True)
    agent = make_agent(model)
    await ask(agent, "a", "b")
    tm = model.token_manager
    assert tm.logprobs[0] is None
    assert all(isinstance(logprob, float) and logprob < 0 for logprob in tm.logprobs[1:])
    assert server.requests[1].body["logprob_start_len"] == len(sent(server)[0]) + len(sampled(server, 0)) - 1


async def test_without_logprobs_everything_else_is_recorded(rollout):
    server, model = rollout(["x"], return_logprob=False)
    await asked(model, "a")
    tm = model.token_manager
    assert tm.segments[1].token_ids == sampled(server, 0)
    assert set(tm.logprobs) == {None}


async def test_reset_starts_an_episode_and_keeps_old_records_valid(rollout):
    _, model = rollout(["One.", "Two."])
    await asked(model, "a")
    old = model.token_manager
    ids = old.token_ids
    model.reset()
    assert model.token_manager.token_ids == []
    await asked(model, "b")
    assert old.token_ids == ids
    assert len(model.trajectory) == 1


async def test_a_reset_while_a_call_is_running_does_not_split_it(rollout):
    arrived = asyncio.Event()
    go_on = asyncio.Event()

    async def slow(request):
        arrived.set()
        await go_on.wait()
        return "late"

    _, model = rollout(slow)
    old = model.trajectory
    running = asyncio.ensure_future(asked(model, "a"))
    await arrived.wait()
    model.reset()
    go_on.set()
    await running
    assert [turn.status for turn in old.turns] == [TurnStatus.ANSWERED]
    assert len(model.trajectory) == 0


async def test_rollout_and_token_manager_are_the_same(rollout):
    _, model = rollout(["x"])
    await asked(model, "a")
    assert isinstance(model.rollout, TokenManager)
    assert model.rollout.tokens == model.token_manager.tokens


# --- tool calls ---


async def test_parallel_calls_run_and_their_results_come_in_order(rollout):
    answer = "".join(call(expression=f"{i} * 10") for i in range(12))
    server, model = rollout([answer, "Done."])
    tools, ran = make_tools()
    await asked(model, "go", tools)
    assert sorted(ran) == sorted(f"{i} * 10" for i in range(12))
    results = server.requests[1].text.rpartition("assistant\n<tool_call>")[2].split("<tool_response>\n")[1:]
    assert [int(result.partition("\n")[0]) for result in results] == [i * 10 for i in range(12)]
    assert_exact(server, model)


async def test_the_model_reads_the_error_of_a_failing_tool(rollout):
    server, model = rollout([call("broken", reason="no luck"), "Sorry."])
    result = await asked(model, "go", TOOLS)
    assert result.stop_reason == "end_turn"
    assert "no luck" in server.requests[1].text
    assert_exact(server, model)


@pytest.mark.parametrize("with_marks", [True, False])
@pytest.mark.parametrize("by", ["string", "token"])
async def test_stopping_at_the_end_mark_of_a_call_keeps_the_call(with_marks, by):
    tokenizer = build_chatml_tokenizer(with_marks=with_marks)
    if by == "token" and not with_marks:
        return  # the end mark is not one token there
    stop = {"stop": ["</tool_call>"]}
    if by == "token":
        stop = {"stop_token_ids": [tokenizer.convert_tokens_to_ids("</tool_call>")]}
    server = ScriptedSGLang(tokenizer, [call(expression="2 * 3"), "6"])
    model = SGLangModel(tokenizer=tokenizer, client=server.client(), sampling_params=stop)
    tools, ran = make_tools()
    await asked(model, "go", tools)
    assert ran == ["2 * 3"]
    assert len(model.trajectory.sequences()) == 1
    assert_exact(server, model)


async def test_the_parser_knows_that_a_turn_was_cut(rollout):
    seen = []

    class Watching(HermesToolParser):
        def parse_turn(self, text, **context):
            seen.append((context["truncated"], context["token_ids"]))
            return super().parse_turn(text, **context)

    server, model = rollout(["A long answer that does not fit."], sampling_params={"max_new_tokens": 3})
    model.tool_parser = Watching()
    with pytest.raises(MaxTokensReachedException):
        await asked(model, "go")
    assert seen == [(True, sampled(server, 0))]


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 * 3"\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": "2 * 3"}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 * 3"}}',
        "<tool_call>\ncalculator(2 * 3)\n</tool_call>",
    ],
)
async def test_an_unparsed_call_runs_nothing_and_the_model_sees_why(rollout, broken):
    server, model = rollout([broken, call(expression="2 * 3"), "6"])
    tools, ran = make_tools()
    agent = make_agent(model, tools)
    await agent.invoke_async("go")
    assert ran == ["2 * 3"]
    shown = server.requests[1].text.rpartition("<tool_response>")[2]
    assert broken.removeprefix("<tool_call>").removesuffix("</tool_call>").strip() in shown
    assert "Unknown tool" not in shown
    assert sum(model.tool_parse_errors.values()) == 1
    use = agent.messages[1]["content"][-1]["toolUse"]
    assert (use["name"], use["input"]) == ("unknown_tool", {})
    assert len(model.trajectory.sequences()) == 1
    assert_exact(server, model)


async def test_good_calls_next_to_a_broken_one_run(rollout):
    server, model = rollout([call(expression="2 * 3") + "<tool_call>oops</tool_call>", "ok"])
    tools, ran = make_tools()
    await asked(model, "go", tools)
    assert ran == ["2 * 3"]
    first, second = server.requests[1].text.split("<tool_response>\n")[-2:]
    assert first.startswith("6\n")
    assert "oops" in second


async def test_tool_use_ids_are_unique_across_models(rollout):
    ids = set()
    for _ in range(3):
        _, model = rollout([call(expression="1 * 1") * 2, "ok"])
        agent = make_agent(model, TOOLS)
        await agent.invoke_async("go")
        ids |= {block["toolUse"]["toolUseId"] for block in agent.messages[1]["content"]}
    assert len(ids) == 6


async def test_the_agent_sees_reasoning_text_and_calls_apart(rollout):
    draft = call(expression="6 * 6")
    _, model = rollout([f"<think>\nmaybe {draft}\n</think>\n\nLet me see.\n{call(expression='2 * 3')}", "ok"])
    tools, ran = make_tools()
    agent = make_agent(model, tools)
    await agent.invoke_async("go")
    reasoning, text, use = agent.messages[1]["content"]
    assert draft in reasoning["reasoningContent"]["reasoningText"]["text"]
    assert text == {"text": "Let me see."}
    assert use["toolUse"]["input"] == {"expression": "2 * 3"}
    assert ran == ["2 * 3"]
    assert len(model.trajectory.sequences()) == 1


async def test_a_call_in_reasoning_that_the_prompt_opened_never_runs(rollout, chatml_tokenizer):
    template = chatml_tokenizer.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    answers = [f"draft {call(expression='6 * 6')}</think>" + call(expression="2 * 3"), f"never closed {call()}"]
    _, model = rollout(answers, chat_template=template)
    tools, ran = make_tools()
    await asked(model, "go", tools)
    assert ran == ["2 * 3"]


async def test_a_parse_error_with_a_real_tool_name_runs_nothing(chatml_tokenizer):
    class Naming(ToolParser):
        def parse(self, text):
            return [ToolParseResult.from_parse_error("c1", text, "calculator")] if "calculator" in text else []

    server = ScriptedSGLang(chatml_tokenizer, ["calculator(", "Sorry."])
    model = model_on(server.client(), tool_parser=Naming())
    tools, ran = make_tools()
    result = await asked(model, "go", tools)
    assert (ran, result.stop_reason) == ([], "end_turn")
    assert model.tool_parse_errors == {"calculator": 1}


async def test_a_tool_named_like_unparsed_calls_is_rejected(rollout):
    server, model = rollout(["never"])

    @tool
    def unknown_tool() -> str:
        """Take over."""
        return "x"

    with pytest.raises(ValueError, match="'unknown_tool'.*rename the tool"):
        await make_agent(model, [unknown_tool]).invoke_async("go")
    assert server.requests == []


async def test_a_parser_that_raises_loses_no_tokens(rollout, chatml_tokenizer):
    class Broken(ToolParser):
        def parse(self, text):
            raise ZeroDivisionError("bug in the parser")

    server = ScriptedSGLang(chatml_tokenizer, ["Hello."])
    model = model_on(server.client(), tool_parser=Broken())
    with pytest.raises(ZeroDivisionError):
        await asked(model, "go")
    assert model.token_manager.segments[1].token_ids == sampled(server, 0)


# --- ends ---


async def test_an_answer_cut_by_max_new_tokens_can_be_continued(rollout, chatml_tokenizer):
    server, model = rollout(
        ["A long answer that does not fit.", "And on."], sampling_params={"max_new_tokens": 4, "temperature": 1.0}
    )
    agent = make_agent(model)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("a")
    assert len(model.token_manager.segments[1]) == 4
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("continue")
    # The missing end of turn is part of the next prompt, with mask 0.
    end = chatml_tokenizer.convert_tokens_to_ids("<|im_end|>")
    observation = model.token_manager.segments[2]
    assert (observation[0].token_id, observation[0].loss_mask) == (end, False)
    assert_exact(server, model)


async def test_an_abort_keeps_the_partial_answer_and_raises(rollout):
    server, model = rollout([ScriptedAnswer("A partial", finish_reason="abort")])
    with pytest.raises(SGLangAbortedError, match="weight updates") as caught:
        await asked(model, "a")
    assert caught.value.response == server.responses[0].body
    assert termination_reason(caught.value) is TerminationReason.ABORTED
    assert statuses(model.trajectory) == ["cut"]
    assert_exact(server, model)


async def test_retrying_a_failed_call_duplicates_nothing(rollout):
    server, model = rollout([call(expression="2 * 3")])  # the script runs out: HTTP 501
    agent = make_agent(model, TOOLS)
    for _ in range(3):
        with pytest.raises(Exception, match="501"):
            await agent.invoke_async("go" if not agent.messages else None)
    assert statuses(model.trajectory) == ["answered", "failed"]
    assert sum(model.token_manager.loss_mask) == len(sampled(server, 0))


async def test_a_stop_string_is_cut_from_text_and_kept_in_tokens(rollout, chatml_tokenizer):
    server, model = rollout(["One END two", "ok"], sampling_params={"stop": ["END"]})
    agent = make_agent(model)
    result = await agent.invoke_async("a")
    assert str(result).strip() == "One"
    assert "END" in chatml_tokenizer.decode(model.token_manager.segments[1].token_ids)
    await agent.invoke_async("b")
    assert_exact(server, model)


async def test_a_turn_with_another_stop_token_forks_before_it(rollout, chatml_tokenizer):
    other, end = chatml_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    server, model = rollout(
        [ScriptedAnswer("Hm.", stop_token_id=other), "ok", "fine"],
        server={"stop_token_ids": [chatml_tokenizer.eos_token_id, other]},
    )
    agent = make_agent(model)
    for text in ("a", "b", "c"):
        await agent.invoke_async(text)
    reasons = [turn.reason for turn in model.trajectory.turns]
    assert "forks inside call 0: the model stopped with '<|endoftext|>'" in reasons[1]
    assert reasons[2] == "extends call 1 with 1 new message(s)"

    opening = sent(server)[0]
    outputs = [response.body["output_ids"] for response in server.responses]
    assert outputs[0][-1] == other
    assert sent(server)[1][: len(opening) + len(outputs[0])] == [*opening, *outputs[0][:-1], end]
    first, second = model.trajectory.sequences()
    assert first.token_ids == opening + outputs[0]
    assert first.loss_mask == [0] * len(opening) + [1] * len(outputs[0])
    assert second.token_ids == sent(server)[2] + outputs[2]
    assert sum(second.loss_mask) == len(outputs[1]) + len(outputs[2])
    assert sum(model.token_manager.loss_mask) == sum(map(len, outputs)) - 1


async def test_cut_off_reasoning_is_closed_before_the_next_message(rollout):
    server, model = rollout([ScriptedAnswer("<think>\nLet me see", finish_reason="length"), "ok"], sampling_params=None)
    agent = make_agent(model)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("a")
    await agent.invoke_async("continue")
    assert "<think>\nLet me see\n</think>\n\n<|im_end|>\n<|im_start|>user\ncontinue" in server.requests[1].text
    assert len(model.trajectory.sequences()) == 1
    assert_exact(server, model)


async def test_calls_are_numbered_from_the_start_of_a_restored_history(rollout):
    use = {"toolUse": {"toolUseId": "a", "name": "unknown_tool", "input": {}}}
    result = {"toolResult": {"toolUseId": "a", "status": "error", "content": [{"text": "Unknown tool: unknown_tool"}]}}
    broken = "<tool_call>\n{oops\n</tool_call>"
    _, model = rollout([broken, "done"], family="kimi_k2", tool_parser="hermes")
    agent = make_agent(model, TOOLS, messages=[user("a"), assistant(use), user(result)])
    await agent.invoke_async(None)
    assert [call["id"] for call in model.trajectory.turns[0].tool_calls] == ["functions.unknown_tool:1"]


# --- history policy ---


REASONING = "<think>\nHidden thought.\n</think>\n\nAnswer"


async def test_template_policy_starts_a_sequence_per_user_message(rollout):
    server, model = rollout([REASONING, REASONING + call(expression="2 * 3"), REASONING], history_policy="template")
    agent = make_agent(model, TOOLS)
    await ask(agent, "a", "b")
    assert "Hidden thought" not in server.requests[1].text
    assert "Hidden thought" in server.requests[2].text  # the tool result comes inside the turn
    assert "rewrites earlier turns after a user message" in model.trajectory.turns[1].reason
    first, second = model.trajectory.sequences()
    assert second.token_ids == sent(server)[2] + sampled(server, 2)
    assert sum(first.loss_mask) + sum(second.loss_mask) == sum(
        len(response.body["output_ids"]) for response in server.responses
    )


@pytest.mark.parametrize("answer", ["<think>\n\n</think>\n\nAnswer", "<think></think>Answer", "</think>Answer"])
async def test_template_policy_strips_empty_reasoning(rollout, answer):
    server, model = rollout([answer, "b"], history_policy="template")
    agent = make_agent(model)
    await ask(agent, "a", "b")
    assert "think>" not in server.requests[1].text
    assert "rewrites earlier turns after a user message" in model.trajectory.turns[1].reason


async def test_template_policy_strips_empty_reasoning_before_a_tool_result(rollout):
    empty, full = "<think>\n\n</think>\n\n", REASONING
    server, model = rollout([empty + call(expression="2 * 3"), "6", full + call(expression="2 * 4"), "8"])
    model.update_config(history_policy="template")
    agent = make_agent(model, TOOLS)
    await agent.invoke_async("a")
    assert "think>" not in server.requests[1].text
    await agent.invoke_async("b")
    assert "Hidden thought" in server.requests[3].text
    assert model.trajectory.turns[3].parent is model.trajectory.turns[2]


async def test_template_policy_keeps_a_quoted_mark(rollout):
    quoting = call(expression="'<think></think>'")
    server, model = rollout([quoting, "Done.", "b"], history_policy="template")
    agent = make_agent(model, TOOLS)
    await ask(agent, "a", "b")
    assert "'<think></think>'" in server.requests[2].text
    assert len(model.trajectory.sequences()) == 1


async def test_template_policy_strips_reasoning_of_a_restored_history(rollout):
    server, model = rollout(["It is 6.", "Bye.", "Yes."], history_policy="template")
    thought = {"reasoningContent": {"reasoningText": {"text": "Hidden thought."}}}
    use = {"toolUse": {"toolUseId": "a", "name": "calculator", "input": {"expression": "2 * 3"}}}
    result = {"toolResult": {"toolUseId": "a", "status": "success", "content": [{"text": "6"}]}}
    agent = make_agent(model, TOOLS, messages=[user("a"), assistant(thought, use), user(result)])
    await agent.invoke_async(None)
    await agent.invoke_async("b")
    assert "Hidden thought" in server.requests[0].text
    assert "Hidden thought" not in server.requests[1].text
    assert "rewrites earlier turns after a user message" in model.trajectory.turns[1].reason
    await agent.invoke_async("c")
    assert model.trajectory.turns[2].parent is model.trajectory.turns[1]  # nothing is left to strip


async def test_a_template_that_keeps_history_has_one_sequence(rollout):
    _, model = rollout(["a", "b"], history_policy="template", chat_template=PLAIN_TEMPLATE)
    agent = make_agent(model)
    await ask(agent, "a", "b")
    assert len(model.trajectory.sequences()) == 1


# --- update config ---


OTHER_FORMAT = CHATML_TEMPLATE + "{# <function= #}"


async def test_only_a_parser_that_was_not_named_goes_with_the_chat_template(rollout):
    (_, model), (_, named) = rollout([]), rollout([], tool_parser="glm")
    assert isinstance(model.tool_parser, HermesToolParser)
    model.update_config(chat_template=OTHER_FORMAT)
    assert type(model.tool_parser).__name__ == "QwenXMLToolParser"
    parser = named.tool_parser
    named.update_config(chat_template=OTHER_FORMAT)
    assert named.tool_parser is parser


async def test_a_call_under_way_keeps_its_configuration(rollout):
    def answer(request):
        model.update_config(chat_template=OTHER_FORMAT)
        return call(expression="2 * 3")

    _, model = rollout([answer, "ok"])
    tools, ran = make_tools()
    await asked(model, "2 times 3?", tools)
    assert ran == ["2 * 3"]


async def test_an_answer_that_breaks_the_parser_is_a_cut_turn(rollout):
    class Mute(HermesToolParser):
        def render_error(self, result):
            raise RuntimeError("no words")

    server, model = rollout(["<tool_call>oops</tool_call>"], tool_parser=Mute())
    with pytest.raises(RuntimeError, match="no words"):
        await asked(model, "go")
    (turn,) = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert turn.output_ids.tolist() == sampled(server, 0)


async def test_a_template_without_calls_refuses_them_in_history(rollout):
    answers = [call(expression="2 * 3"), "It is 6."]
    _, model = rollout(answers, chat_template=PLAIN_TEMPLATE, tool_parser="hermes")
    agent = make_agent(model, TOOLS)
    await agent.invoke_async("2 times 3?")
    (sequence,) = model.trajectory.sequences()
    assert model.chat_template.decode(sequence.segments[2].token_ids) == (
        "\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    )
    model.reset()
    with pytest.raises(Exception, match=r"messages\[1\]: the chat template drops the tool calls"):
        await agent.invoke_async("And 3 times 3?")


# --- native call ids ---


async def test_results_and_history_show_the_familys_ids(rollout):
    ids = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}{{ c.id }}="
        "{{ c.function.arguments }}{% endfor %}{% if m.tool_call_id %}{{ m.tool_call_id }}:{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <|tool_calls_section_begin|> #}"
    )
    server, model = rollout(
        [call(expression="1") + call(expression="2"), "ok", "ok"], chat_template=ids, tool_parser="hermes"
    )
    agent = make_agent(model, TOOLS)
    await agent.invoke_async("a")
    assert "functions.calculator:0:" in server.requests[1].text
    assert "functions.calculator:1:" in server.requests[1].text
    agent.messages[0]["content"][0]["text"] = "edited"  # everything is rendered again
    await agent.invoke_async("b")
    assert "functions.calculator:0=" in server.requests[2].text
    assert "functions.calculator:1=" in server.requests[2].text
    assert "call_" not in server.requests[2].text


# --- kept answers ---


async def test_parse_errors_are_rendered_again_with_the_history(rollout):
    server, model = rollout(["<tool_call>oops</tool_call>", "ok", "ok"])
    agent = make_agent(model, TOOLS)
    await agent.invoke_async("first question")
    agent.messages[0]["content"][0]["text"] = "edited question"
    await agent.invoke_async("second question")
    assert "oops" in server.requests[2].text
    assert "Unknown tool" not in server.requests[2].text


async def test_a_reset_during_a_call_keeps_episodes_errors_apart(rollout):
    def answer(request):
        if request.index == 0:
            model.reset()
            return "<tool_call>oops</tool_call>"
        return "ok"

    _, model = rollout(answer)
    old = model.trajectory
    model_errors = []
    agent = make_agent(model, TOOLS)
    await agent.invoke_async("go")
    model_errors.append(dict(model.tool_parse_errors))
    assert (old.tool_parse_errors, model_errors) == ({"unknown_tool": 1}, [{}])


async def test_no_tools_and_an_empty_list_are_the_same_conversation(rollout):
    _, model = rollout(["a", "b"])
    history = [user("q")]
    events = [event async for event in model.stream(history, None)]
    history += [assistant("a"), user("r")]
    assert events
    assert [event async for event in model.stream(history, [])]
    assert len(model.trajectory.sequences()) == 1


async def test_a_system_prompt_of_content_blocks_is_in_the_prompt(rollout):
    server, model = rollout(["a"])
    question = [user("q")]
    async for _ in model.stream(question, None, system_prompt_content=[{"text": "RULES"}]):
        pass
    assert "RULES" in server.requests[0].text


# --- rewritten histories ---


async def test_several_sequences_to_train_are_warned_of_once(rollout, caplog):
    _, model = rollout(["One.", "Two."])
    await asked(model, "a")
    assert model.token_manager
    assert caplog.records == []
    await make_agent(model, system_prompt="another").invoke_async("b")
    assert model.token_manager and model.token_manager
    (record,) = caplog.records
    assert "trajectory.sequences()" in record.getMessage()


def test_one_model_serves_agents_in_several_threads(rollout):
    server, model = rollout(lambda request: "fine")

    def run(name):
        agent = make_agent(model, system_prompt=name)
        for i in range(3):
            agent(f"{name} {i}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, [f"agent {number}" for number in range(4)]))
    assert len(model.trajectory.sequences()) == 4
    assert sum(sum(sequence.loss_mask) for sequence in model.trajectory.sequences()) == sum(
        len(response.body["output_ids"]) for response in server.responses
    )


def test_the_synchronous_agent_works_twice_in_a_row(rollout):
    server, model = rollout(["One.", "Two."])
    with server.serve() as base_url:
        model.client = SGLangClient(base_url, max_retries=0)
        agent = make_agent(model)
        assert str(agent("a")).strip() == "One."
        assert str(agent("b")).strip() == "Two."
    assert_exact(server, model)


async def test_long_messages_are_encoded_beside_the_event_loop(rollout, monkeypatch):
    continuation, began, loop_runs = ChatTemplate.continuation, threading.Event(), threading.Event()
    waited = []

    def slow(self, *args, **options):
        began.set()
        waited.append(loop_runs.wait(2))
        return continuation(self, *args, **options)

    async def run_the_loop():
        while not began.is_set():
            await asyncio.sleep(0.001)
        loop_runs.set()

    monkeypatch.setattr(ChatTemplate, "continuation", slow)

    @tool
    def calculator(expression: str) -> str:
        """Return a long text."""
        return "x y " * 30_000

    server, model = rollout([call(expression="1"), "Done."], server={"context_length": 1_000_000})
    running = asyncio.ensure_future(run_the_loop())
    await make_agent(model, [calculator]).invoke_async("Compute.")
    assert waited and all(waited)
    await running
    assert len(model.trajectory.sequences()) == 1
    assert_exact(server, model)


# --- structured output ---


class Sum(BaseModel):
    total: int


async def test_it_is_constrained_by_the_schema_and_never_trained(rollout):
    server, model = rollout(['{"total": 4}', "plain"])
    events = [event async for event in model.structured_output(Sum, [user("2+2")])]
    assert events[-1] == {"output": Sum(total=4)}
    assert json.loads(server.requests[0].sampling_params["json_schema"])["properties"]["total"]["type"] == "integer"
    assert model.trajectory.sequences() == []
    assert [sum(sequence.loss_mask) for sequence in model.trajectory.sequences(auxiliary=True)] == [0]
    # It is not the main conversation either.
    await asked(model, "a")
    assert "2+2" not in model.tokenizer.decode(model.token_manager.token_ids)


@pytest.mark.parametrize("opened", [True, False])
async def test_marks_and_opened_reasoning_do_not_hide_the_json(rollout, chatml_tokenizer, opened):
    class Note(BaseModel):
        text: str

    thinks = "{% if add_generation_prompt %}<think>\n{% endif %}" if opened else ""
    answer = '{"text": "write <tool_call> like so"}'
    _, model = rollout([answer], chat_template=chatml_tokenizer.chat_template + thinks)
    question = [user("note")]
    (event,) = [event async for event in model.structured_output(Note, question)]
    assert event["output"] == Note(text="write <tool_call> like so")


async def test_invalid_text_raises_with_the_finish_reason(rollout):
    _, model = rollout(['{"total": '], sampling_params={"max_new_tokens": 3})
    with pytest.raises(ValueError, match=r"not a valid Sum \(finish reason length\)"):
        async for _ in model.structured_output(Sum, [user("2+2")]):
            pass


# --- tool choice ---


SPECS = [
    {
        "name": "calculator",
        "description": "Computes.",
        "inputSchema": {
            "json": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
        },
    }
]


async def stream(model, history, **options):
    return [event async for event in model.stream(history, SPECS, **options)]


async def test_a_forced_call_is_constrained_and_never_trained(rollout):
    server, model = rollout([call(expression="2 * 3"), "Six."])
    history = [user("2 times 3?")]
    events = await stream(model, history, tool_choice={"any": {}})
    assert "calculator" in server.requests[0].sampling_params["structural_tag"]
    (start,) = [event["contentBlockStart"]["start"]["toolUse"] for event in events if "contentBlockStart" in event]
    use = {"toolUseId": start["toolUseId"], "name": "calculator", "input": {"expression": "2 * 3"}}
    result = {"toolUseId": start["toolUseId"], "status": "success", "content": [{"text": "6"}]}
    history += [
        assistant({"toolUse": use}),
        user({"toolResult": result}),
    ]
    await stream(model, history)
    assert "structural_tag" not in server.requests[1].sampling_params
    (sequence,) = model.trajectory.sequences()
    assert sequence.token_ids == sent(server)[1] + sampled(server, 1)
    assert sum(sequence.loss_mask) == len(sampled(server, 1))
    assert model.token_manager.token_ids == sequence.token_ids


async def test_a_tool_that_is_not_there_cannot_be_forced(rollout):
    server, model = rollout([])
    with pytest.raises(ValueError, match="asks for 'search', but the tools are: calculator"):
        question = [user("q")]
        await stream(model, question, tool_choice={"tool": {"name": "search"}})
    assert len(model.trajectory) == 0


async def test_a_format_without_a_grammar_is_unforced_with_a_warning(rollout):
    class Lines(ToolParser):
        def parse(self, text, **context):
            return []

    server, model = rollout(["no call"], tool_parser=Lines())
    with pytest.warns(UserWarning, match="the tool choice is not forced, and the model may ignore it"):
        await stream(model, [user("q")], tool_choice={"any": {}})
    assert "structural_tag" not in server.requests[0].sampling_params
    assert sum(model.token_manager.loss_mask) > 0


# --- sampling parameters ---


async def test_a_prompt_needs_room_for_one_token(rollout):
    server, model = rollout(["ok", "ok"])
    await asked(model, "a")
    length = len(sent(server)[0])
    model.update_config(max_context_tokens=length + 1)
    with pytest.raises(MaxTokensReachedException):
        await asked(model, "a")
    assert server.requests[1].sampling_params["max_new_tokens"] == 1
    model.update_config(max_context_tokens=length)
    with pytest.raises(ContextWindowOverflowException, match="no room"):
        await asked(model, "a")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("config", "served", "limit"),
    [
        ({}, 1000, 1000),
        ({"sampling_params": {"max_new_tokens": 4096}}, 100, 100),
        ({"max_context_tokens": 64}, 1000, 64),
        ({"max_context_tokens": 1000}, 64, 64),
        ({"context_window_limit": 5}, 1000, 1000),  # guidance, which ends no call
    ],
)
async def test_an_answer_may_fill_the_least_limit(rollout, config, served, limit):
    given = copy.deepcopy(config)
    server, model = rollout(["ok"], server={"context_length": served}, **config)
    await asked(model, "a question of more than five tokens")
    request = server.requests[0]
    assert request.sampling_params["max_new_tokens"] == limit - len(request.input_ids)
    assert config == given


async def test_params_is_the_earlier_spelling(rollout):
    server, model = rollout(["ok"], params={"temperature": 0.25})
    await asked(model, "a")
    assert server.requests[0].sampling_params["temperature"] == 0.25
    assert model.get_config()["sampling_params"] == {"temperature": 0.25}


async def test_in_place_changes_of_the_configuration_take_effect(rollout):
    server, model = rollout(["ok"], sampling_params={"max_new_tokens": 9}, context_window_limit=100)
    model.config["sampling_params"] = {"max_new_tokens": 4}
    model.get_config()["context_window_limit"] = 50
    await asked(model, "a")
    assert server.requests[0].sampling_params["max_new_tokens"] == 4
    assert model.context_window_limit == 50


async def test_in_place_changes_of_the_rendering_take_effect(rollout):
    greeting = "{% if names %}Users: {{ names | join(', ') }}\n{% endif %}"
    server, model = rollout(["ok"] * 3, chat_template=greeting + CHATML_TEMPLATE, chat_template_kwargs={"names": []})
    model.config["enable_thinking"] = False
    await asked(model, "a")
    assert server.requests[0].text.endswith("<think>\n\n</think>\n\n")
    model.config["chat_template_kwargs"]["names"].append("Ada")
    await asked(model, "b")
    assert server.requests[1].text.startswith("Users: Ada\n")
    model.config["chat_template"] = CHATML_TEMPLATE
    await asked(model, "c")
    assert server.requests[2].text.startswith("<|im_start|>")


async def test_template_arguments_that_their_owner_changes(rollout):
    """Models share what they found out about a template; an argument that changes must not change it for all."""
    shared = {"chat_template": "{{ names | join(' and ') }}: " + CHATML_TEMPLATE}
    names = ["Ada"]
    rollout([], **shared, chat_template_kwargs={"names": names})
    names.append("Bob")
    server, model = rollout(["ok"], **shared, chat_template_kwargs={"names": ["Ada"]})
    await asked(model, "a")
    assert server.requests[0].text.startswith("Ada:<")


async def test_a_configuration_update_affects_the_next_call(rollout):
    server, model = rollout(["ok", "ok"], enable_thinking=True)
    await asked(model, "a")
    model.update_config(enable_thinking=False, sampling_params={"temperature": 0.0})
    await asked(model, "b")
    assert "<think>" not in server.requests[0].text
    assert server.requests[1].text.endswith("<think>\n\n</think>\n\n")
    assert server.requests[1].sampling_params["temperature"] == 0.0


async def test_a_call_sees_all_of_a_configuration_update_or_nothing(rollout, monkeypatch):
    """The other thread may finish while the update is under way, or wait for it."""
    server, model = rollout(["ok", "ok"], enable_thinking=True)
    under_way, finished = threading.Event(), threading.Event()
    read, reads = ModelConfig.read, []

    def paused(given):
        if threading.current_thread() is updating:
            reads.append(given)
            if len(reads) == 2:
                under_way.set()
                finished.wait(0.5)
        return read(given)

    def ask():
        under_way.wait(30)
        model.update_config(model_id="other")
        asyncio.run(make_agent(model).invoke_async("a"))
        finished.set()

    update = {"enable_thinking": False, "sampling_params": {"temperature": 0.0}}
    updating = threading.Thread(target=model.update_config, kwargs=update)
    asking = threading.Thread(target=ask)
    monkeypatch.setattr(ModelConfig, "read", paused)
    for thread in (asking, updating):
        thread.start()
    for thread in (asking, updating):
        await asyncio.to_thread(thread.join)
    is_thinking = not server.requests[0].text.endswith("<think>\n\n</think>\n\n")
    assert is_thinking == ("temperature" not in server.requests[0].sampling_params)
    assert model.get_config()["model_id"] == "other"
    assert model.get_config()["sampling_params"] == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lora_path", "unknown configuration: 'lora_path'"),
        ("temperature", "'temperature'.*sampling_params"),
        ("sampling_parms", "did you mean 'sampling_params' instead of 'sampling_parms'"),
        ("context_window_limits", "did you mean 'context_window_limit' instead of 'context_window_limits'"),
    ],
)
def test_unknown_configuration_is_rejected(rollout, key, message):
    """A key without effect makes a different run than intended."""
    with pytest.raises(ValueError, match=message):
        rollout(["never"], **{key: "a"})
    _, model = rollout(["never"])
    before = dict(model.get_config())
    with pytest.raises(ValueError, match=message):
        model.update_config(sampling_params={"temperature": 0.5}, **{key: "a"})
    assert model.get_config() == before


# --- bad input ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sampling_params": [1]}, "sampling_params must be a dict"),
        ({"sampling_params": {"max_new_tokens": "12"}}, "max_new_tokens.*whole number"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens.*at least 1"),
        ({"sampling_params": {"stop": ""}}, "'stop'. has an empty text"),
        ({"sampling_params": {"stop": ["END", ""]}}, "'stop'. has an empty text"),
        ({"sampling_params": {"stop_regex": ["a+", "("]}}, "stop_regex'. has the invalid pattern '\\('"),
        ({"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids'. has -1"),
        ({"context_window_limit": 0}, "context_window_limit.*at least 1"),
        ({"context_window_limit": -5}, "context_window_limit.*at least 1"),
        ({"max_context_tokens": -5}, "max_context_tokens.*at least 1"),
        ({"max_context_tokens": 2.5}, "max_context_tokens.*at least 1"),
    ],
)
def test_configuration_that_could_only_fail_later(rollout, config, message):
    with pytest.raises(ValueError, match=message):
        rollout([], **config)


def test_a_path_in_place_of_a_tokenizer():
    with pytest.raises(ChatTemplateError, match="must be a Hugging Face tokenizer, not 'Qwen/Qwen3-4B'.*get_tokenizer"):
        SGLangModel(tokenizer="Qwen/Qwen3-4B", base_url="http://127.0.0.1:1")


async def test_a_sampled_id_that_no_text_has_is_sent_back(chatml_tokenizer):
    # Embeddings have more rows than the tokenizer has tokens, so a model can sample an id that no text has.
    padding = len(chatml_tokenizer) + 3
    server = ScriptedSGLang(
        chatml_tokenizer,
        [ScriptedAnswer(token_ids=[300, padding]), "ok"],
        vocab_size=len(chatml_tokenizer) + 8,
    )
    model = model_on(server.client())
    agent = make_agent(model)
    await ask(agent, "a", "b")
    assert padding in sent(server)[1]


async def test_prompt_logprobs_that_do_not_come_back_are_an_error(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, ["ok"])
    client = altering(server, lambda body: body["meta_info"].pop("input_token_logprobs"))
    with pytest.raises(SGLangDecodingError, match="logprob_start_len"):
        await asked(model_on(client, return_prompt_logprobs=True), "a")


def places_in(value, place=()):
    """Yield the path of every value in a JSON document, without the document itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, entry in inner:
        yield (*place, key)
        yield from places_in(entry, (*place, key))


@pytest.mark.parametrize(
    "config",
    [
        {"return_prompt_logprobs": True},
        {"return_logprob": False},
        {"request_fields": {"return_sampling_mask": True}, "sampling_params": {"top_k": 4}},
    ],
    ids=["prompt logprobs", "no logprobs", "sampling masks"],
)
async def test_no_value_in_an_answer_is_another_error_or_an_unreadable_file(chatml_tokenizer, config):
    server = ScriptedSGLang(chatml_tokenizer, lambda request: "hello there you")
    alteration = None

    def change(body):
        if alteration is not None:
            (*way, last), value = alteration
            for key in way:
                body = body[key]
            body[last] = value

    model = model_on(altering(server, change), **config)

    async def ask():
        model.reset()
        async for _ in model.stream([user("hi")]):
            pass
        return model.trajectory

    await ask()
    for place in places_in(server.responses[0].body):
        for value in (None, -1, 0, 2**70, 1.5, True, "", "NaN", "x", [], {}):
            alteration = place, value
            try:
                recorded = await ask()
            except SGLangClientError:
                continue
            loaded = Trajectory.from_bytes(recorded.to_bytes())
            assert loaded.turns[0].output_ids == recorded.turns[0].output_ids


@pytest.mark.parametrize(
    ("planned", "error"),
    [
        (lambda plan: None, (TypeError, "on_request returned None: return a RequestPlan, or raise")),
        *(
            (
                lambda plan, most=most: replace(plan, sampling_params={"max_new_tokens": most}),
                (ValueError, f"plan with max_new_tokens={most!r}: it must be"),
            )
            for most in (0, -1, "5", True)
        ),
        *(
            (
                lambda plan, name=name: replace(plan, sampling_params={name: "yes|no"}),
                (ValueError, f"on_request added {name} to a call that is trained: set it in the sampling_params"),
            )
            for name in ("regex", "json_schema", "ebnf", "structural_tag")
        ),
        (lambda plan: replace(plan, sampling_params=None), (TypeError, "on_request returned RequestPlan.*None")),
        (lambda plan: replace(plan, sampling_params={"stop": {"x"}}), (ValueError, r"sampling_params\['stop'\] is")),
        (lambda plan: replace(plan, sampling_params={"top_p": math.nan}), (ValueError, r"\['top_p'\] is nan")),
    ],
)
async def test_a_plan_that_cannot_be_sent_is_named(rollout, planned, error):
    server, model = rollout(["never"])
    model.on_request = lambda turn, plan: planned(plan)
    kind, told = error
    with pytest.raises(kind, match=told):
        async for _ in model.stream([user("hi")]):
            pass
    assert server.requests == []
    assert statuses(model.trajectory) == ["failed"]


async def test_a_plan_may_change_the_grammar_of_a_constrained_call(rollout):
    server, model = rollout(["yes"], sampling_params={"regex": "yes|no"})
    model.on_request = lambda turn, plan: replace(plan, sampling_params={"regex": "yes"})
    await asked(model, "q")
    assert server.requests[0].sampling_params == {"regex": "yes"}
    assert not any(model.trajectory.sequences()[0].loss_mask)


async def test_a_plan_of_numpy_values_is_sent_and_saved(rollout):
    np = pytest.importorskip("numpy")
    server, model = rollout(["a"])
    params = {"temperature": np.float32(0.5), "max_new_tokens": np.int64(7)}
    model.on_request = lambda turn, plan: replace(plan, sampling_params=params, clamped=np.bool_(True))
    await asked(model, "q")
    (turn,) = Trajectory.from_bytes(model.trajectory.to_bytes()).turns
    assert turn.sampling_params == server.requests[0].sampling_params == {"temperature": 0.5, "max_new_tokens": 7}
    assert turn.clamped is True


async def test_each_request_has_a_seed_of_its_own_on_demand(rollout):
    server, model = rollout(["a", "b", "c", "d"], random_seeds=True)
    for question in ("1", "2"):
        await asked(model, question)
    model.update_config(sampling_params={"sampling_seed": 5})
    await asked(model, "3")
    model.update_config(sampling_params={}, random_seeds=False)
    await asked(model, "4")
    seeds = [request.sampling_params.get("sampling_seed") for request in server.requests]
    assert len({*seeds[:2]}) == 2 and all(0 <= seed < 2**31 for seed in seeds[:2])
    assert seeds[2:] == [5, None]
    assert [turn.sampling_params.get("sampling_seed") for turn in model.trajectory.turns] == seeds


async def test_a_tool_result_with_an_integer_of_any_length_reaches_the_model(rollout):
    @tool
    def power() -> dict:
        """Return a power of ten."""
        return {"status": "success", "content": [{"json": {"power": 10**5000, "few": 7}}]}

    server, model = rollout([call("power"), "long"])
    agent = make_agent(model, tools=[power])
    await agent.invoke_async("10**5000?")
    assert '"1' + "0" * 5000 + '"' in server.requests[1].text
    assert '"few": 7' in server.requests[1].text
    assert len(Trajectory.from_bytes(model.trajectory.to_bytes()).turns) == len(server.requests)


async def test_a_busy_server_without_retries_is_throttling(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [])

    async def busy(request):
        if request.url.path != "/generate":
            return await server.transport().handle_async_request(request)
        return httpx.Response(503, json={"object": "error", "message": "The request queue is full.", "code": 503})

    def model(max_retries):
        client = SGLangClient("http://x", transport=httpx.MockTransport(busy), max_retries=max_retries, retry_delay=0.0)
        return model_on(client)

    with pytest.raises(ModelThrottledException):
        await make_agent(model(0)).invoke_async("a")
    with pytest.raises(SGLangThrottledError):
        await make_agent(model(1)).invoke_async("a")


@pytest.mark.parametrize("both", [True, False])
def test_exactly_one_of_client_and_base_url(chatml_tokenizer, both):
    arguments = {"client": SGLangClient("http://127.0.0.1:1"), "base_url": "http://127.0.0.1:1"} if both else {}
    with pytest.raises(ValueError, match="exactly one of client= and base_url=; " + ("both" if both else "neither")):
        SGLangModel(tokenizer=chatml_tokenizer, **arguments)


def test_an_unknown_tool_parser_names_the_known_ones(rollout):
    with pytest.raises(ValueError, match="hermes.*qwen_xml"):
        rollout([], tool_parser="nonsense")


def test_tool_parsers_are_taken_by_name_and_as_objects(rollout):
    parser = HermesToolParser()
    (_, by_object), (_, by_name) = (rollout([], tool_parser=given) for given in (parser, "qwen_xml"))
    assert by_object.tool_parser is parser
    assert type(by_name.tool_parser).__name__ == "QwenXMLToolParser"


def test_both_spellings_of_the_sampling_parameters(rollout):
    with pytest.raises(ValueError, match="an alias"):
        rollout([], params={"top_p": 1}, sampling_params={"top_p": 1})


def test_a_tokenizer_without_a_chat_template():
    class Bare:
        chat_template = None
        name_or_path = "bare-model"

    with pytest.raises(ChatTemplateError, match="'bare-model' has no chat template.*chat_template="):
        SGLangModel(tokenizer=Bare(), base_url="http://127.0.0.1:1")


async def test_a_tokenizer_that_is_not_the_served_one(chatml_tokenizer):
    server = ScriptedSGLang(build_chatml_tokenizer(with_marks=False), ["never"])
    model = model_on(
        server.client(),
        chat_template=chatml_tokenizer.chat_template + "{% if add_generation_prompt %}<think>{% endif %}",
    )
    with pytest.raises(TokenizerMismatchError, match="not the one served.*tokenizer_path"):
        await asked(model, "a")
    assert server.requests == []
    assert sum(model.token_manager.loss_mask) == 0


async def test_images_and_documents_are_rejected_with_their_path(rollout):
    server, model = rollout(["never"])
    image = {"image": {"format": "png", "source": {"bytes": b"x"}}}
    with pytest.raises(UnsupportedContentError, match=r"messages\[0\].content\[1\].*image"):
        await asked(model, [{"text": "look"}, image])
    assert server.requests == []
    assert len(model.trajectory) == 0


async def test_a_server_that_truncates_the_prompt_is_rejected(chatml_tokenizer):
    def truncate(body):
        body["meta_info"]["prompt_tokens"] -= 1

    model = model_on(altering(ScriptedSGLang(chatml_tokenizer, ["ok"]), truncate))
    with pytest.raises(SGLangDecodingError, match="allow-auto-truncate"):
        await asked(model, "a")
    assert sum(model.token_manager.loss_mask) == 0


async def test_routed_experts_that_do_not_come_back_are_an_error(rollout):
    _, model = rollout(["ok"], return_routed_experts=True)
    with pytest.raises(SGLangDecodingError, match="not returned.*--enable-return-routed-experts.*router drops"):
        await asked(model, "a")


# --- Hooks of a model: what Strands reports of an answer is recorded at once, for the right agent ---


def listened(model, *args, **kwargs):
    return make_agent(model, *args, hooks=[model.hooks], **kwargs)


def has_text(text):
    return lambda event: event.stop_response is not None and text in str(event.stop_response.message)


async def test_an_answer_lost_to_a_cancelled_task_is_discarded(rollout):
    _, model = rollout(numbered)
    agent = listened(model)

    def cancel(event):
        raise asyncio.CancelledError

    agent.add_hook(cancel, AfterModelCallEvent)
    with pytest.raises(asyncio.CancelledError):
        await agent.invoke_async("Question?")
    assert statuses(model.trajectory) == ["discarded"]


@pytest.mark.parametrize("has_hooks", [True, False])
async def test_an_answer_whose_history_is_summed_up_later_is_kept(rollout, has_hooks):
    """A summary of one exchange looks like a guardrail that replaced both of its messages."""
    _, model = rollout(numbered)
    agent = listened(model) if has_hooks else make_agent(model)
    await agent.invoke_async("Question-0?")
    agent.messages[:] = [
        user("What was said so far."),
        assistant("I see."),
    ]
    await agent.invoke_async("Question-1?")
    assert statuses(model.trajectory) == ["answered", "answered"]
    assert ("is not known" in model.trajectory.turns[0].note) != has_hooks


async def test_history_holds_the_parse_error_of_an_unparsed_call(rollout):
    server, model = rollout(["<tool_call>\n{not json}\n</tool_call>", "Sorry."])
    agent = listened(model, TOOLS)
    seen = []
    agent.add_hook(lambda event: seen.append(event.result["content"]), AfterToolCallEvent)
    await agent.invoke_async("Compute.")
    (result,) = [block["toolResult"] for block in agent.messages[2]["content"]]
    (text,) = [block["text"] for block in result["content"]]
    assert "{not json}" in text
    assert "Unknown tool" not in text
    assert text in server.requests[1].text
    assert (result["status"], seen) == ("error", [result["content"]])
    assert len(model.trajectory.sequences()) == 1


async def test_another_hooks_result_of_an_unparsed_call_stays(rollout):
    server, model = rollout(["<tool_call>\n{not json}\n</tool_call>", "Sorry."])
    agent = listened(model, TOOLS)

    def replace(event):
        event.result = {**event.result, "content": [{"text": "BETTER SAID"}]}

    agent.add_hook(replace, AfterToolCallEvent)
    await agent.invoke_async("Compute.")
    assert "BETTER SAID" in server.requests[1].text
    assert "not json" not in server.requests[1].text.partition("BETTER SAID")[0].rpartition("</tool_call>")[2]


async def test_agents_cut_at_their_first_call_resume_in_any_order(rollout):
    """Hooks recognize an agent whose id Strands forgot."""
    parts = ["ALPHA ", "BETA ", "GAMMA "]
    answers = [ScriptedAnswer(part, finish_reason="abort") for part in parts]
    _, model = rollout([*answers, "end", "end", "end"])
    agents = [listened(model) for _ in parts]
    for agent in agents:
        with pytest.raises(SGLangAbortedError):
            await agent.invoke_async("q")
    model.trajectory = Trajectory.from_bytes(model.trajectory.to_bytes())
    for turn in model.trajectory.turns:
        model.trajectory.resume(turn)
    results = [str(await agent.invoke_async()).strip() for agent in reversed(agents)]
    assert results == ["GAMMA end", "BETA end", "ALPHA end"]


async def test_copies_of_one_agent_in_one_trajectory_are_distinct(rollout):
    _, model = rollout(lambda request: "The same.")
    saved = listened(model)
    await saved.invoke_async("hello")
    copies = [listened(model) for _ in range(3)]
    for agent in copies:
        agent.load_snapshot(saved.take_snapshot(preset="session"))
    for _ in range(2):
        for agent in copies:
            await agent.invoke_async("more")
    turns = model.trajectory.turns
    assert len({turn.agent for turn in turns}) == 4
    assert all(turn.parent.agent == turn.agent for turn in turns[4:])


async def test_an_agent_made_in_an_episode_is_recorded_there(rollout, caplog):
    _, model = rollout(lambda request: "ok")

    async def episode():
        with model.episode() as trajectory:
            agent = listened(model)
            await asyncio.get_running_loop().run_in_executor(None, agent, "hi")
        return trajectory

    trajectories = await asyncio.gather(*(episode() for _ in range(3)))
    assert [len(trajectory) for trajectory in trajectories] == [1, 1, 1]
    assert len(model.trajectory) == 0
    assert not caplog.records


async def test_requests_before_an_agents_first_call_are_auxiliary(rollout, caplog):
    """A conversation manager that summarizes a restored session does this."""
    _, model = rollout(numbered)
    agent = listened(model)

    async def sum_up(event):
        async for _ in model.stream([user("Sum up.")]):
            pass

    agent.add_hook(sum_up, BeforeModelCallEvent)
    await agent.invoke_async("Question?")
    assert [turn.is_auxiliary for turn in model.trajectory.turns] == [True, False]
    assert not caplog.records


@needs_module("strands.middleware")
@pytest.mark.parametrize("helper_has_hooks", [True, False])
async def test_a_helper_asked_during_a_call_is_not_the_agent(rollout, helper_has_hooks):
    from strands.middleware import InvokeModelStage

    _, model = rollout(numbered)
    agent = listened(model)

    async def ask_first(context, call_next):
        helper = (listened if helper_has_hooks else make_agent)(model, system_prompt="You judge.")
        await helper.invoke_async("Is this a question?")
        async for event in call_next(context):
            yield event

    agent.add_middleware(InvokeModelStage, ask_first)
    for _ in range(2):
        await agent.invoke_async("Question?")
    turns = model.trajectory.turns
    assert [turn.status.value for turn in turns] == ["answered", "committed", "answered", "answered"]
    assert [turn.was_added for turn in turns] == [True if helper_has_hooks else None, True] * 2
    assert len({turn.agent for turn in turns}) == 3


async def test_the_next_call_finds_an_edit_after_the_hooks(rollout):
    _, model = rollout(numbered)
    agent = listened(model)
    await agent.invoke_async("Question-0?")
    agent.messages[1]["content"] = [{"text": "REWRITTEN"}]
    await agent.invoke_async("Question-1?")
    assert statuses(model.trajectory) == ["discarded", "answered"]


async def test_hooks_that_an_agent_has_twice_do_no_harm(rollout):
    _, model = rollout(numbered)
    agent = make_agent(model, hooks=[model.hooks, model.hooks])

    def edit(event):
        event.retry = has_text("Answer-0")(event)
        if has_text("Answer-2")(event):
            event.stop_response.message["content"] = [{"text": "REDACTED"}]

    agent.add_hook(edit, AfterModelCallEvent)
    await ask(agent, 3)
    assert statuses(model.trajectory) == ["discarded", "committed", "discarded", "answered"]


async def test_hook_reports_survive_a_file_and_a_copy(rollout):
    _, model = rollout(numbered)
    agent = listened(model)
    await agent.invoke_async("Question?")
    for kept in (Trajectory.from_bytes(model.trajectory.to_bytes()), copy.deepcopy(model.trajectory)):
        assert [turn.was_added for turn in kept.turns] == [True]
        kept.settle(agent.messages)
        assert statuses(kept) == ["final"]


async def test_hooks_keep_nothing_alive(rollout, small_heap):
    _, model = rollout(numbered)
    with model.episode() as trajectory:
        agent = listened(model)
        await agent.invoke_async("Question?")
    ended, gone = weakref.ref(trajectory), weakref.ref(agent)
    del trajectory
    gc.collect()
    assert ended() is None
    del agent
    gc.collect()
    assert gone() is None


async def test_environments_know_which_answers_were_kept(rollout):
    """The history is not settled: the answer never entered it."""
    _, model = rollout([*["<tool_call>\n{not json}\n</tool_call>"], "First.", "Second."])

    class Repeats:
        def register_hooks(self, registry, **kwargs):
            def retry(event):
                event.retry = has_text("First.")(event)

            registry.add_callback(AfterModelCallEvent, retry)

    class Env(Environment):
        def get_hooks(self):
            return [Repeats()]

    result = await Env(model_factory=lambda: model).step(Action(message="Compute."))
    assert statuses(result.observation.trajectory) == ["committed", "discarded", "final"]
    assert result.observation.trajectory.turns[1].note == "a hook retried the call"
    assert "{not json}" in str(result.observation.messages[2])


@pytest.mark.parametrize("summed_up", [True, False])
@pytest.mark.parametrize("text", ["REDACTED", "Answer-0. (checked)"])
async def test_an_answer_edited_by_another_hook_is_recognized(rollout, text, summed_up):
    _, model = rollout(numbered)
    agent = listened(model)

    def edit(event):
        if event.message["role"] == "assistant" and len(event.agent.messages) == 2:
            event.message["content"][:] = [{"text": word} for word in text.split(" ")]

    agent.add_hook(edit, MessageAddedEvent)
    await agent.invoke_async("Question-0?")
    if summed_up:
        agent.messages[:] = [user("What was said so far.")]
    await agent.invoke_async("Question-1?")
    turn = model.trajectory.turns[0]
    if text == "REDACTED":
        assert (turn.status.value, turn.was_added) == ("discarded", False)
    else:
        assert turn.was_added
        assert turn.note.startswith("kept in another form")


# === a call whose request the server aborts: with `on_abort="resume"` it continues from its tokens ===


def aborted(text):
    return ScriptedAnswer(text, finish_reason="abort")


async def cancelled_task(model, gate, **kwargs):
    task = asyncio.create_task(make_agent(model, **kwargs).invoke_async("go"))
    await gate.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def resuming(chatml_tokenizer):
    def make(answers, *, client=None, experts=None, **config):
        server = ScriptedSGLang(chatml_tokenizer, answers, experts=experts)
        client = server.client(**{"max_retries": 3, "retry_delay": 0.0, **(client or {})})
        config = {"on_abort": "resume", **config}
        return server, model_on(client, **config)

    return make


def assert_cut(model, output_ids):
    """Require that a model's only turn was cut after these tokens."""
    (turn,) = model.trajectory.turns
    assert (turn.status.value, turn.output_ids.tolist()) == ("cut", output_ids)


async def test_a_resumed_call_continues_unnoticed_by_the_agent(resuming):
    server, model = resuming([aborted("The answer "), aborted(""), aborted("is "), "4."])
    result = await asked(model, "2+2?")
    assert str(result).strip() == "The answer is 4."
    first, second, third, fourth = sent(server)
    assert second == third == first + sampled(server, 0)
    assert fourth == third + sampled(server, 2)
    (turn,) = model.trajectory.turns
    assert turn.token_ids() == fourth + sampled(server, 3)
    (sequence,) = model.trajectory.sequences()
    returned = [
        entry[0] for response in server.responses for entry in response.body["meta_info"]["output_token_logprobs"]
    ]
    assert sequence.logprobs[len(first) :] == returned
    assert sequence.loss_mask == [0] * len(first) + [1] * len(returned)
    rids = [request.rid for request in server.requests]
    assert (*turn.generation.resumed_ids, turn.generation.request_id) == tuple(rids)


async def test_every_token_has_its_weight_version(resuming):
    def update(request):
        server.weight_version = "2"
        return "New."

    server, model = resuming([aborted("Old. "), update])
    await asked(model, "go")
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
        await asked(model, "Count.")
    first = len(sampled(server, 0))
    assert [request.sampling_params["max_new_tokens"] for request in server.requests] == [20, 20 - first]
    (turn,) = model.trajectory.turns
    assert len(turn.output_ids) == 20
    assert turn.sampling_params["max_new_tokens"] == 20


async def test_an_abort_right_at_the_end_of_the_budget_ends_the_call(resuming):
    server, model = resuming([aborted("One two three")], sampling_params={"max_new_tokens": 5})
    with pytest.raises(Exception, match="max_tokens|MaxTokens|maximum") as failure:
        await asked(model, "Count.")
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


async def test_routed_experts_are_those_of_the_sampling(resuming):
    experts = ScriptedExperts(layers=2, top_k=1)
    server, model = resuming([aborted("Half "), "whole."], experts=experts, return_routed_experts=True)
    await asked(model, "go")
    generation = model.trajectory.turns[0].generation
    assert generation.expert_ids().shape == (len(model.token_manager) - 1, 2)


async def test_a_constrained_answer_starts_over(resuming):
    server, model = resuming([aborted('{"tot'), '{"total": 4}'])
    events = [event async for event in model.structured_output(Sum, [user("2+2?")])]
    assert events[-1]["output"] == Sum(total=4)
    assert sent(server)[0] == sent(server)[1]


@pytest.mark.parametrize("given", [{}, {"sampling_seed": None}])
async def test_a_random_seed_goes_with_every_kind_of_request(resuming, given):
    answers = [aborted("The "), aborted(""), "end.", '{"total": 4}', call(expression="1"), "a", "b"]
    server, model = resuming(answers, random_seeds=True, sampling_params=given)
    await asked(model, "resumed twice")
    assert [event async for event in model.structured_output(Sum, [user("structured")])]
    await stream(model, [user("forced")], tool_choice={"any": {}})
    for _ in "ab":
        await stream(model, [user("siblings")])
    seeds = [request.sampling_params["sampling_seed"] for request in server.requests]
    assert len(set(seeds)) == len(answers)
    assert all(type(seed) is int for seed in seeds)


async def test_a_server_that_only_aborts_is_given_up_in_the_end(resuming):
    server, model = resuming(lambda request: aborted(""))
    with pytest.raises(Exception, match="aborted the request") as failure:
        await asked(model, "go")
    assert termination_reason(failure.value) is TerminationReason.ABORTED
    assert len(server.requests) == 1 + 3  # the client's retries
    assert model.trajectory.turns[0].status.value == "failed"


async def test_tokens_sampled_before_a_failure_are_kept(resuming):
    server, model = resuming([aborted("Half "), *[ScriptedFault(status=500)] * 9])
    with pytest.raises(Exception, match="500"):
        await asked(model, "go")
    assert_cut(model, sampled(server, 0))


async def test_a_cancel_keeps_all_parts(resuming):
    hang = Gate("more ")
    server, model = resuming([aborted("Half "), hang])
    await cancelled_task(model, hang)
    assert_cut(model, sampled(server, 0) + sampled(server, 1))


@pytest.mark.parametrize(("sampled_text", "status"), [("more ", "cut"), (None, "failed")])
@pytest.mark.parametrize("on_abort", ["raise", "resume"])
async def test_a_call_aborted_by_closing_the_client_has_its_own_error(on_abort, sampled_text, status, resuming):
    """The error must not blame a weight update if this process closed the client."""
    hang = Gate(sampled_text)
    server, model = resuming([hang, "never asked"], on_abort=on_abort)
    running = asyncio.ensure_future(asked(model, "go"))
    await hang.reached.wait()
    await model.client.close()
    with pytest.raises(SGLangAbortedError, match="client was closed while the request ran") as failure:
        await running
    assert "weight" not in str(failure.value)
    assert termination_reason(failure.value) is TerminationReason.ABORTED
    assert len(server.requests) == 1
    (turn,) = model.trajectory.turns
    assert turn.status.value == status
    assert turn.output_ids.tolist() == sampled(server, 0)


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
        await asked(model, "go")
    assert termination_reason(failure.value) is TerminationReason.TIMEOUT
    (turn,) = model.trajectory.turns
    assert turn.status.value == "cut"
    assert turn.output_ids.tolist() == [token for i in range(3) for token in sampled(server, i)]


async def test_an_answer_under_the_users_grammar_starts_over_untrained(resuming):
    server, model = resuming([aborted('{"tot'), '{"total": 4}'], sampling_params={"json_schema": '{"type": "object"}'})
    assert str(await asked(model, "2+2?")).strip() == '{"total": 4}'
    assert sent(server)[0] == sent(server)[1]
    assert not any(model.token_manager.loss_mask)


@pytest.mark.parametrize("split", [5, 9, 12])
async def test_a_stop_string_split_by_an_abort_ends_the_answer(resuming, split):
    text = "Yes.</answer> and so on"
    server, model = resuming([aborted(text[:split]), text[split:]], sampling_params={"stop": ["</answer>"]})
    assert str(await asked(model, "2+2?")).strip() == "Yes."
    generation = model.trajectory.turns[0].generation
    assert (generation.finish_type, generation.stop_string) == ("stop", "</answer>")


async def test_an_apparent_rest_of_a_stop_string_does_not_end_it(resuming):
    answers = [aborted("a </answ"), "ing and lower>", " and more.</answer> and so on"]
    server, model = resuming(answers, sampling_params={"stop": "</answer>"})
    assert str(await asked(model, "2+2?")).strip() == "a </answing and lower> and more."
    generation = model.trajectory.turns[0].generation
    assert generation.stop_string == "</answer>"
    assert generation.output_ids.tolist() == [
        token for i in range(len(server.requests)) for token in sampled(server, i)
    ]


async def test_a_cancel_stays_a_cancel_if_parts_cannot_be_joined(resuming, monkeypatch):
    hang = Gate("more ")
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
    assert_cut(model, sampled(server, 0) + sampled(server, 1))


async def test_a_client_closed_between_requests_does_not_continue(resuming):
    pausing = asyncio.Event()
    answers = [lambda request: pausing.set() or aborted(""), "never asked"]
    server, model = resuming(answers, client={"retry_delay": 0.05})
    running = asyncio.ensure_future(asked(model, "go"))
    await pausing.wait()
    while server.responses[0] is None:
        await asyncio.sleep(0)
    await model.client.close()
    with pytest.raises(Exception, match="aborted the request|was closed"):
        await running
    assert len(server.requests) == 1


class ReservesAToken(httpx.AsyncBaseTransport):
    """A server like SGLang 0.5.10, which rejects requests that fill its context to the last token."""

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


async def test_a_server_that_reserves_the_last_token_gets_one_less(chatml_tokenizer):
    """The oldest supported SGLang does this; the first call finds out, and it is remembered."""
    server = ScriptedSGLang(chatml_tokenizer, ["One.", "Two.", "long " * 300], context_length=300)
    older = ReservesAToken(server)
    model = model_on(SGLangClient("http://x", transport=older, max_retries=0))
    agent = make_agent(model)
    for question in "ab":
        await agent.invoke_async(question)
    assert older.refused == 1
    filled = [len(r.input_ids) + r.sampling_params["max_new_tokens"] for r in server.requests]
    assert filled == [299, 299]
    assert [turn.sampling_params for turn in model.trajectory.turns] == [r.sampling_params for r in server.requests]
    with pytest.raises(MaxTokensReachedException) as end:
        await agent.invoke_async("c")
    assert termination_reason(end.value, trajectory=model.trajectory) is TerminationReason.CONTEXT_WINDOW_OVERFLOW
    with pytest.raises(ContextWindowOverflowException):
        await asked(model, "much too long " * 300)
    assert older.refused == 1


async def test_concurrent_calls_that_find_a_reserved_token_succeed(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=300)
    client = SGLangClient("http://x", transport=ReservesAToken(server), max_retries=0)
    model = model_on(client)
    await asyncio.gather(*(make_agent(model).invoke_async(question) for question in "abcdefgh"))
    assert len(server.requests) == 8


async def test_the_deadline_includes_the_first_server_check(chatml_tokenizer):
    busy = scripted(ScriptedResponse(503), **{"/v1/models": ScriptedResponse(503)})
    model = model_on(client_to(busy, max_retries=10**6, deadline=0.1))
    with pytest.raises(SGLangDeadlineError, match="deadline") as failure:
        [event async for event in model.stream(QUESTION)]
    assert termination_reason(failure.value) is TerminationReason.INFRASTRUCTURE_ERROR
    assert model.trajectory.turns[0].status.value == "failed"


@pytest.mark.parametrize(
    ("name", "values"), [("on_abort", "'raise' or 'resume'"), ("history_policy", "'append' or 'template'")]
)
def test_an_unknown_policy_is_rejected(rollout, name, values):
    with pytest.raises(ValueError, match=f"{name} must be {values}, not 'maybe'"):
        rollout([], **{name: "maybe"})


# --- resuming a cut turn later ---


async def cut(resuming, answers, **config):
    """A server, a model and an agent whose first call was aborted."""
    server, model = resuming(answers, on_abort="raise", **config)
    agent = make_agent(model)
    with pytest.raises(Exception, match="aborted the request"):
        await agent.invoke_async("2+2?")
    return server, model, agent


async def test_agents_cut_by_a_weight_update_each_resume_their_tokens(resuming):
    """Strands forgets the ids of agents whose first call fails."""
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


async def test_a_failed_first_call_stays_recorded_with_another_agent(rollout):
    _, model = rollout([ScriptedFault("status", 400), "fine"])
    with pytest.raises(SGLangHTTPError):
        await asked(model, "q")
    await asked(model, "q")
    assert statuses(model.trajectory) == ["failed", "answered"]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("config", [{}, {"return_prompt_logprobs": True}])
async def test_a_partial_rollout_continues_after_save_and_load(resuming, config, waits, tmp_path):
    server, model, agent = await cut(resuming, [aborted("The answer "), "is 4."], **config)
    if waits:
        model.trajectory.resume(model.trajectory.turns[0])
    model.trajectory.save(tmp_path / "part")
    model.trajectory = Trajectory.load(tmp_path / "part")
    if not waits:
        model.trajectory.resume(model.trajectory.turns[0])
    assert str(await agent.invoke_async()).strip() == "The answer is 4."
    first, second = sent(server)
    assert second == first + sampled(server, 0)
    (sequence,) = model.trajectory.sequences()
    assert sequence.token_ids == second + sampled(server, 1)
    assert sum(sequence.loss_mask) == len(sampled(server, 0)) + len(sampled(server, 1))
    known = [logprob is not None for logprob in model.token_manager.logprobs[1:]]
    assert all(known) is bool(config)


async def test_a_resumed_call_aborted_again_keeps_all_its_tokens(resuming):
    server, model, agent = await cut(resuming, [aborted("The "), aborted("answer "), "is 4."])
    model.trajectory.resume(model.trajectory.turns[0])
    with pytest.raises(Exception, match="aborted the request"):
        await agent.invoke_async()
    assert_cut(model, sampled(server, 0) + sampled(server, 1))
    model.trajectory.resume(model.trajectory.turns[0])
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


# --- the record of calls that were cut short from outside: cancelled tasks, `agent.cancel()`, deadlines ---


QUESTION = [user("hi")]


async def test_a_cancelled_task_leaves_a_cut_turn_with_its_tokens(rollout):
    gate = Gate("The beginning of")
    server, model = rollout([gate])
    await cancelled_task(model, gate)
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    assert isinstance(turn.cause, asyncio.CancelledError)
    assert list(turn.output_ids) == sampled(server, 0) != []
    assert len(turn.generation.logprobs) == len(turn.output_ids)
    assert server.running == []
    [sequence] = model.trajectory.sequences()
    assert sum(sequence.loss_mask) == len(turn.output_ids)


async def test_a_cancelled_task_without_samples_leaves_a_failed_turn(rollout):
    gate = Gate("")
    _, model = rollout([gate])
    await cancelled_task(model, gate)
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.FAILED
    assert isinstance(turn.cause, asyncio.CancelledError)


async def test_the_same_call_after_a_cancelled_one_starts_over(rollout):
    gate = Gate("The beginning of")
    server, model = rollout([gate, "The whole answer."])
    await cancelled_task(model, gate)
    await asked(model, "go")
    cut, answered = model.trajectory.turns
    assert sent(server)[0] == sent(server)[1]
    assert (cut.status, answered.status) == (TurnStatus.CUT, TurnStatus.ANSWERED)


async def test_agent_cancel_aborts_the_request(rollout):
    gate = Gate("The beginning of")
    server, model = rollout([call(expression="2 * 3"), gate])
    agent = make_agent(model, TOOLS)
    task = asyncio.create_task(agent.invoke_async("go"))
    await gate.reached.wait()
    agent.cancel()
    result = await task
    assert result.stop_reason == "cancelled"
    assert server.running == [] and len(server.aborted) == 1
    first, turn = model.trajectory.turns
    assert turn.parent is first
    assert turn.status is TurnStatus.CUT
    assert isinstance(turn.cause, SGLangCancelledError)
    assert list(turn.output_ids) == sampled(server, 1) != []
    assert termination_reason(result, trajectory=model.trajectory) is TerminationReason.CANCELLED


async def test_a_signal_already_set_sends_and_records_nothing(rollout):
    server, model = rollout(["never"])
    signal = threading.Event()
    signal.set()
    events = [event async for event in model.stream(QUESTION, cancel_signal=signal)]
    assert events[-1] == {"messageStop": {"stopReason": "cancelled"}}
    assert server.requests == [] and len(model.trajectory) == 0


async def test_structured_output_can_be_cancelled(rollout):
    server, model = rollout(["never"])
    signal = threading.Event()
    signal.set()
    with pytest.raises(SGLangCancelledError) as caught:
        [event async for event in model.structured_output(Sum, QUESTION, cancel_signal=signal)]
    assert server.requests == []
    assert termination_reason(caught.value) is TerminationReason.CANCELLED


async def test_a_call_past_its_deadline_is_a_cut_turn_and_a_timeout(chatml_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, [until_aborted("The beginning of", after=60)])
    model = model_on(server.client(deadline=60))
    with pytest.raises(SGLangDeadlineError) as caught:
        await asked(model, "go")
    [turn] = model.trajectory.turns
    assert turn.status is TurnStatus.CUT
    reason = termination_reason(caught.value, trajectory=model.trajectory)
    assert reason is TerminationReason.TIMEOUT
    assert outcome_of(reason, sampled_tokens=len(turn.output_ids)).slime_status == "TRUNCATED"


# --- routing keys ---


def keys(server):
    return [request.headers["x-smg-routing-key"] for request in server.requests]


async def test_all_calls_of_a_conversation_and_its_forks_have_one_key(rollout):
    server, model = rollout([call(expression="2 * 3"), "6", "six", "again"])
    agent = make_agent(model, TOOLS)
    await agent.invoke_async("go")
    fork = make_agent(model, TOOLS, messages=agent.messages[:2])
    await fork.invoke_async("and now?")
    await agent.invoke_async("more")
    assert len(server.requests) == 4
    assert len(set(keys(server))) == 1
    assert server.requests[0].body["routing_key"] == keys(server)[0]


async def test_other_conversations_and_other_episodes_have_other_keys(rollout):
    server, model = rollout(lambda request: "ok")
    await asked(model, "go")
    await asked(model, "something else")
    model.reset()
    await asked(model, "go")
    assert len(set(keys(server))) == 3


async def test_a_retried_first_call_has_the_key_that_it_had(rollout):
    server, model = rollout([ScriptedAnswer("cut", finish_reason="abort"), "ok"])
    for _ in range(2):
        await asyncio.gather(make_agent(model).invoke_async("go"), return_exceptions=True)
    assert len(server.requests) == 2 and len(set(keys(server))) == 1


async def test_a_configured_key_is_used_everywhere_and_can_change(rollout):
    server, model = rollout(lambda request: "ok", routing_key="episode-7")
    await asked(model, "go")
    await asked(model, "something else")
    model.update_config(routing_key="episode-8")
    await asked(model, "go")
    assert keys(server) == ["episode-7", "episode-7", "episode-8"]
    with pytest.raises(ValueError, match="routing_key"):
        model.update_config(routing_key="a\nb")


# --- None ---


def client_through(server, seen, *, missing=()):
    """A client of the server that notes every path, through something that lacks some of them."""

    async def pass_on(request):
        seen.append(request.url.path)
        if request.url.path in missing:
            return httpx.Response(404, json={"detail": "Not Found"})
        return await server.transport().handle_async_request(request)

    return through(pass_on)


async def test_many_models_that_start_together_ask_the_server_once(chatml_tokenizer):
    seen = []
    client = client_through(ScriptedSGLang(chatml_tokenizer, lambda request: "ok"), seen)
    models = [model_on(client) for _ in range(20)]
    await asyncio.gather(*(make_agent(model).invoke_async("hi") for model in models))
    assert (seen.count("/tokenize"), seen.count("/v1/models"), seen.count("/generate")) == (1, 1, 20)


async def test_a_router_leaves_the_match_unproven_with_one_warning(chatml_tokenizer, caplog):
    seen = []
    server = ScriptedSGLang(chatml_tokenizer, lambda request: "ok")
    client = client_through(server, seen, missing=("/tokenize", "/v1/models"))
    for _ in range(3):
        await make_agent(model_on(client)).invoke_async("hi")
    assert sum("unproven" in record.getMessage() for record in caplog.records) == 1
    assert sum("context_window_limit" in record.getMessage() for record in caplog.records) == 1
    assert "max_new_tokens" not in server.requests[0].sampling_params


async def test_a_tokenizer_that_lacks_only_a_mark_is_noticed(chatml_tokenizer, other_tokenizer):
    server = ScriptedSGLang(chatml_tokenizer, ["never"])
    with pytest.raises(TokenizerMismatchError, match="<observation>"):
        await asked(SGLangModel(tokenizer=other_tokenizer, client=server.client()), "hi")
    assert server.requests == []


# --- several servers ---


async def test_every_one_of_several_servers_is_asked_once(chatml_tokenizer):
    servers = {name: ScriptedSGLang(chatml_tokenizer, lambda request: "ok") for name in ("one", "two")}
    network = network_of(**servers)
    model = model_on(client_in(network, "one", "two"))
    for _ in range(4):
        await asked(model, "hi")
    assert sorted(hosts_of(network, "/tokenize")) == ["one", "two"]


async def test_one_server_with_another_tokenizer_is_named_in_the_error(chatml_tokenizer, other_tokenizer):
    one, two = ScriptedSGLang(other_tokenizer, ["ok"]), ScriptedSGLang(chatml_tokenizer, ["ok"])
    network = network_of(one=one, two=two)
    model = SGLangModel(tokenizer=other_tokenizer, client=client_in(network, "one", "two"))
    for _ in range(2):
        with pytest.raises(TokenizerMismatchError, match="http://two"):
            await asked(model, "hi")
    assert one.requests == two.requests == []
    assert hosts_of(network, "/tokenize").count("one") == 1  # what it answered is remembered


async def test_the_shortest_context_of_several_servers_counts(chatml_tokenizer):
    short = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=500)
    long = ScriptedSGLang(chatml_tokenizer, lambda request: "ok", context_length=900)
    model = model_on(client_in(network_of(one=long, two=short), "one", "two"))
    await asked(model, "hi")
    [request] = [*short.requests, *long.requests]
    assert request.sampling_params["max_new_tokens"] + len(request.input_ids) == 500


async def test_a_server_that_is_down_is_asked_when_it_gets_requests(chatml_tokenizer, other_tokenizer, monkeypatch):
    monkeypatch.setattr("strands_sglang.client.balancer.FIRST_PROBE_S", 0.0)
    monkeypatch.setattr("strands_sglang.client.balancer.MAX_PROBE_S", 0.0)
    network = network_of(one=ScriptedSGLang(other_tokenizer, lambda request: "ok"), two=None)
    model = SGLangModel(tokenizer=other_tokenizer, client=client_in(network, "one", "two"))
    for _ in range(3):
        assert str(await asked(model, "hi")).strip() == "ok"
    plug(network, two=ScriptedSGLang(chatml_tokenizer, lambda request: "wrong"))
    with pytest.raises(TokenizerMismatchError, match="http://two"):
        for _ in range(100):
            await asked(model, "hi")


async def test_with_all_servers_down_the_check_fails_as_for_one(chatml_tokenizer):
    network = network_of(one=None, two=None)
    model = model_on(client_in(network, "one", "two", max_retries=2))
    with pytest.raises(SGLangConnectionError, match="could not connect"):
        await asked(model, "hi")
    plug(network, **{name: ScriptedSGLang(chatml_tokenizer, ["ok"]) for name in ("one", "two")})
    assert str(await asked(model, "hi")).strip() == "ok"


async def test_a_cancelled_agent_does_not_wait_for_a_server_check(chatml_tokenizer):
    network = network_of(one=None)
    model = model_on(client_in(network, "one", retry_delay=8.0))
    signal = threading.Event()

    async def ask():
        messages = [user("hi")]
        return [event async for event in model.stream(messages, cancel_signal=signal)]

    task = asyncio.create_task(ask())
    while not network.calls:
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


@pytest.mark.parametrize("given", [{}, {"return_routed_experts": False}, {"return_routed_experts": None}])
def test_unrequested_routed_experts_may_be_missing(given):
    config, _ = ModelConfig.read(given)
    check_answer(generation(routed_experts=None), config, 5, 5)


def test_an_aborted_request_may_lack_them():
    check_answer(generation(routed_experts=None, finish_type="abort"), ASKED, 5, 5)


def test_another_number_of_expert_ids_per_token_is_an_error():
    with pytest.raises(SGLangDecodingError, match="3 ids .* per token, but 6 for the previous turn.* 18 tokens"):
        check_answer(generation(prompt_tokens=15, rows=18, width=3), ASKED, 15, 6, parent=generation())


@pytest.mark.parametrize("config", [ASKED, ModelConfig()])
def test_an_earlier_turn_without_experts_sets_no_width(config):
    check_answer(generation(), config, 5, 5, parent=generation(routed_experts=None))


@pytest.mark.parametrize("details", [None, {"device": 4, "host": 0}, {"device": 4, "host": 0, "storage": 0}])
def test_expert_rows_from_the_first_cache_tier_are_accepted(details):
    check_answer(generation(meta_json=to_json({"cached_tokens_details": details})), ASKED, 5, 5)


@pytest.mark.parametrize("tiers", [{"host": 4}, {"host": 0, "storage": 4, "storage_backend": "file"}])
def test_expert_rows_from_other_cache_tiers_are_an_error(tiers):
    answer = generation(meta_json=to_json({"cached_tokens_details": {"device": 0, **tiers}}))
    with pytest.raises(SGLangDecodingError, match="tiers.*: 4.*--enable-hierarchical-cache"):
        check_answer(answer, ASKED, 5, 5)
    check_answer(answer, ModelConfig(), 5, 5)


async def test_a_template_that_shows_no_tools_is_warned_of_once(rollout, caplog):
    """The model never calls a tool that it does not see; nothing else would say why."""

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply a by b."""
        return a * b

    prompts = (
        ("Write multiply(a, b).\nMultiply a by b.", 0),  # the tool's description
        ("Use the tool multiply.", 1),  # a name alone tells the model nothing
        ("Use the tool multiply.", 0),
    )
    for system_prompt, warnings in prompts:
        caplog.clear()
        _, model = rollout(["Hi."], chat_template=PLAIN_TEMPLATE + "{# not warned of by another test #}")
        await make_agent(model, [multiply], system_prompt=system_prompt).invoke_async("Hi!")
        assert caplog.text.count("none of its tools") == warnings


@pytest.mark.parametrize("wrong", [pathlib.Path("own.jinja"), "own.jinja", b"{{ messages }}"])
def test_a_chat_template_is_text_rather_than_a_file(wrong, rollout):
    with pytest.raises(ValueError, match="text of a Jinja template.*read_text"):
        rollout(["Hi."], chat_template=wrong)
