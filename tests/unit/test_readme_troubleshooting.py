"""Everything in the README's section on trouble is what a user in that trouble gets to see."""

from __future__ import annotations

import copy
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from strands import Agent

from strands_sglang import SGLangClient, SGLangModel
from strands_sglang.testing import ScriptedAnswer, ScriptedSGLang
from support.agents import make_agent
from support.readme import README, blocks, names_in_code, table

ROWS = table("Troubleshooting", "What you see", "Why, and what to do")
Provocation = Callable[[Any], Awaitable[SGLangModel | None]]

HTML = httpx.MockTransport(lambda request: httpx.Response(200, html="<html>It works!</html>"))


def refuse(request):
    raise httpx.ConnectError("connection refused", request=request)


class WithoutTokenize(httpx.AsyncBaseTransport):
    """A server behind a router that does not know `/tokenize`."""

    def __init__(self, server):
        self.inner = server.transport()

    async def handle_async_request(self, request):
        if request.url.path == "/tokenize":
            return httpx.Response(404, json={"detail": "Not Found"}, request=request)
        return await self.inner.handle_async_request(request)


def other_tokenizer(tokenizer):
    """A tokenizer with one more special token, and with the same template."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"cls_token": "<|other|>"})
    return other


def base_tokenizer(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    return other


async def ask(model, prompt="Hi!", **kwargs):
    await make_agent(model, **kwargs).invoke_async(prompt)


def scripted(tokenizer, *answers, **kwargs):
    server = ScriptedSGLang(tokenizer, answers or ["Hello."], **kwargs)
    return SGLangModel(tokenizer=tokenizer, client=server.client())


def on_transport(tokenizer, transport):
    client = SGLangClient("http://server:30000", transport=transport, max_retries=1, retry_delay=0)
    return SGLangModel(tokenizer=tokenizer, client=client)


# What brings a user into each row's trouble: a function that makes the model, and one that uses it.
PROVOCATIONS = {
    "`pass exactly one of client= and base_url=`": (lambda tokenizer: SGLangModel(tokenizer=tokenizer), ask),
    "`has no chat template`": (
        lambda tokenizer: SGLangModel(tokenizer=base_tokenizer(tokenizer), base_url="http://server:30000"),
        ask,
    ),
    "`there is no tool parser named`": (
        lambda tokenizer: SGLangModel(tokenizer=tokenizer, base_url="http://server:30000", tool_parser="hermse"),
        ask,
    ),
    "`base_url ... ends in /v1`": (
        lambda tokenizer: SGLangModel(tokenizer=tokenizer, base_url="http://server:30000/v1"),
        ask,
    ),
    "`no server has ever answered there`": (
        lambda tokenizer: on_transport(tokenizer, httpx.MockTransport(refuse)),
        ask,
    ),
    "`is this an SGLang server?`": (lambda tokenizer: on_transport(tokenizer, HTML), ask),
    "`is not the one served at`": (
        lambda tokenizer: SGLangModel(
            tokenizer=other_tokenizer(tokenizer), client=ScriptedSGLang(tokenizer, ["Hello."]).client()
        ),
        ask,
    ),
    "`the tokenizer's match is unproven` (log)": (
        lambda tokenizer: on_transport(tokenizer, WithoutTokenize(ScriptedSGLang(tokenizer, ["Hello."]))),
        ask,
    ),
    "`no room is left for an answer`": (lambda tokenizer: scripted(tokenizer, context_length=5), ask),
    "`Unable to trim conversation context!`": (
        lambda tokenizer: scripted(tokenizer, context_length=5),
        lambda model: Agent(model=model, callback_handler=None).invoke_async("Hi!"),
    ),
    "`cannot put a ... block in front of the model`": (
        scripted,
        lambda model: ask(model, [{"image": {"format": "png", "source": {"bytes": b"PNG"}}}]),
    ),
    "`MaxTokensReachedException`": (
        lambda tokenizer: scripted(tokenizer, ScriptedAnswer("Hello", finish_reason="length")),
        ask,
    ),
    "`the server aborted the request`": (
        lambda tokenizer: scripted(tokenizer, ScriptedAnswer("Hello", finish_reason="abort")),
        ask,
    ),
}


def test_there_is_a_provocation_for_every_row():
    assert [row["What you see"] for row in ROWS] == list(PROVOCATIONS)


@pytest.mark.parametrize("seen", PROVOCATIONS)
async def test_a_user_in_trouble_sees_what_the_readme_says(seen, chatml_tokenizer, caplog):
    nothing_sampled = [row["What you see"] for row in ROWS[:7]] + ["`no room is left for an answer`"]
    make, use = PROVOCATIONS[seen]
    model = None
    told = []
    try:
        model = make(chatml_tokenizer)
        await use(model)
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    told += caplog.messages

    [phrase] = names_in_code(seen)
    pattern = ".*".join(re.escape(part) for part in phrase.split("..."))
    assert any(re.search(pattern, message) for message in told), told
    if model is not None and seen in nothing_sampled:
        assert not any(model.token_manager.loss_mask)
        assert all(turn.generation is None for turn in model.trajectory.turns)


async def test_the_cause_of_a_history_that_cannot_be_trimmed_holds_the_numbers(chatml_tokenizer):
    model = scripted(chatml_tokenizer, context_length=5)
    with pytest.raises(Exception, match="Unable to trim conversation context!") as raised:
        await Agent(model=model, callback_handler=None).invoke_async("Hi!")
    assert "context 5" in str(raised.value.__cause__)


async def test_the_turns_say_why_a_second_sequence_appeared(chatml_tokenizer, capsys):
    model = scripted(chatml_tokenizer, "One.", "Two.", "Three.", "Four.")
    agent = make_agent(model)
    await agent.invoke_async("First?")
    await agent.invoke_async("Second?")
    agent.messages[0]["content"][0]["text"] = "Third?"
    await agent.invoke_async("Fourth?")
    agent.system_prompt = "Be long."
    await agent.invoke_async("Fifth?")
    assert len(model.trajectory.sequences()) == 3

    [snippet] = [block for block in blocks("python") if block.section == "Troubleshooting"]
    snippet.run({"model": model})
    printed = capsys.readouterr().out
    explained = README.read_text(encoding="utf-8").partition("**A second sequence appeared.**")[2]
    explained = explained.partition("```\n\n")[2].partition("\n## ")[0]
    for reason in [name for name in names_in_code(explained) if " " in name]:
        assert reason in printed
