import pytest
from strands import Agent, tool
from strands.hooks import HookProvider, MessageAddedEvent
from strands.types.exceptions import EventLoopException

from strands_sglang.tool_limiter import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
    ToolIterationLimiter,
    ToolLimiter,
    limit_cause,
)
from support.agents import ScriptedModel, tool_use

RAN = []


@pytest.fixture(autouse=True)
def nothing_ran():
    RAN.clear()


@tool
def echo(word: str) -> str:
    """Say a word.

    Args:
        word: The word.
    """
    RAN.append(word)
    return word


@tool
def fail() -> str:
    """Fail."""
    raise RuntimeError("broken")


def calls(*words):
    return [tool_use(f"id-{word}", word=word) for word in words]


def agent_with(*hooks, answers):
    return Agent(model=ScriptedModel(answers), tools=[echo, fail], hooks=list(hooks), callback_handler=None)


def shape(agent):
    """The history as role and kinds of blocks."""
    return [
        f"{message['role']}:{','.join(next(iter(block)) for block in message['content'])}" for message in agent.messages
    ]


LOOP = ["user:text", "assistant:toolUse", "user:toolResult"]


async def test_the_limit_is_raised_once_the_results_of_the_last_iteration_are_in_the_history():
    limiter = ToolLimiter(max_tool_iters=2)
    agent = agent_with(limiter, answers=[calls("a"), calls("b"), "never asked for"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    cause = limit_cause(caught.value)
    assert isinstance(cause, MaxToolIterationsReachedError)
    assert "2 tool iterations" in str(cause)
    assert limiter.limit_reached is cause
    assert shape(agent) == [*LOOP, *LOOP[1:]]
    assert (limiter.tool_iter_count, limiter.iteration_count, limiter.tool_call_count) == (2, 2, 2)
    assert (limiter.message_count, RAN) == (5, ["a", "b"])


async def test_stopping_ends_the_invocation_without_an_error_or_words_that_nobody_said():
    limiter = ToolLimiter(max_tool_iters=1, on_limit="stop")
    agent = agent_with(limiter, answers=[calls("a"), "later"])
    result = await agent.invoke_async("go")
    assert result.stop_reason == "cancelled"
    assert isinstance(limiter.limit_reached, MaxToolIterationsReachedError)
    assert shape(agent) == LOOP
    assert RAN == ["a"]


@pytest.mark.parametrize("on_limit", ["raise", "stop"])
async def test_the_agent_can_be_used_again_after_the_limit(on_limit):
    limiter = ToolLimiter(max_tool_iters=1, on_limit=on_limit)
    agent = agent_with(limiter, answers=[calls("a"), "fine", calls("b"), "done"])
    try:
        await agent.invoke_async("go")
    except EventLoopException as error:
        assert limit_cause(error) is not None
    assert (await agent.invoke_async("and now?")).stop_reason == "end_turn"
    limiter.reset()
    assert limiter.limit_reached is None
    assert (limiter.tool_iter_count, limiter.tool_call_count, limiter.message_count) == (0, 0, 0)
    assert limiter.max_tool_iters == 1


async def test_counts_run_on_over_invocations_until_reset():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")
    agent = agent_with(limiter, answers=[calls("a"), "one", calls("b"), calls("c"), "two"])
    assert (await agent.invoke_async("go")).stop_reason == "end_turn"
    assert (await agent.invoke_async("go on")).stop_reason == "cancelled"
    assert limiter.tool_iter_count == 2
    limiter.reset()
    assert (await agent.invoke_async("again")).stop_reason == "end_turn"
    assert limiter.tool_iter_count == 1


async def test_parallel_calls_are_one_iteration_but_count_one_by_one_and_are_never_split():
    limiter = ToolLimiter(max_tool_calls=2)
    agent = agent_with(limiter, answers=[calls("a", "b", "c"), "never asked for"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    assert isinstance(limit_cause(caught.value), MaxToolCallsReachedError)
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (1, 3)
    assert sorted(RAN) == ["a", "b", "c"]


@pytest.mark.parametrize("limits", [{"max_tool_iters": 0}, {"max_tool_calls": 0}])
async def test_a_limit_of_zero_ends_with_the_first_results(limits):
    agent = agent_with(ToolLimiter(**limits, on_limit="stop"), answers=[calls("a"), "never asked for"])
    assert (await agent.invoke_async("go")).stop_reason == "cancelled"
    assert shape(agent) == LOOP


async def test_an_answer_without_tool_calls_reaches_no_tool_limit():
    limiter = ToolLimiter(max_tool_iters=0, max_tool_calls=0)
    agent = agent_with(limiter, answers=["hello"])
    assert (await agent.invoke_async("go")).stop_reason == "end_turn"
    assert (limiter.tool_iter_count, limiter.limit_reached) == (0, None)


async def test_failing_and_unknown_tools_count_like_any_other():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")
    answers = [[tool_use("1", "fail")], [tool_use("2", "nonexistent"), tool_use("3", word="x")], "never asked for"]
    await agent_with(limiter, answers=answers).invoke_async("go")
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (2, 3)


async def test_calls_beyond_the_parallel_limit_get_an_error_instead_of_being_run():
    limiter = ToolLimiter(max_parallel_tool_calls=2)
    agent = agent_with(limiter, answers=[calls("a", "b", "c", "d"), calls("e"), "done"])
    await agent.invoke_async("go")
    assert sorted(RAN) == ["a", "b", "e"]
    results = [block["toolResult"] for block in agent.messages[2]["content"]]
    assert [result["status"] for result in results] == ["success", "success", "error", "error"]
    assert "at most 2" in results[2]["content"][0]["text"]
    assert (limiter.tool_call_count, limiter.cancelled_tool_call_count) == (5, 2)


async def test_messages_are_counted_whatever_their_role_and_checked_when_a_user_message_lands():
    limiter = ToolLimiter(max_messages=4)
    agent = agent_with(limiter, answers=[calls("a"), calls("b"), "never asked for"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    assert isinstance(limit_cause(caught.value), MaxMessagesReachedError)
    assert limiter.message_count == len(agent.messages) == 5


async def test_a_prompt_that_is_the_last_message_allowed_ends_the_loop_before_the_model_is_asked():
    limiter = ToolLimiter(max_messages=1)
    agent = agent_with(limiter, answers=["never asked for"])
    with pytest.raises(MaxMessagesReachedError):
        await agent.invoke_async("go")
    assert shape(agent) == ["user:text"]
    assert agent.model.calls == []


async def test_with_stop_a_prompt_that_is_the_last_message_allowed_is_answered_and_nothing_is_made_up():
    limiter = ToolLimiter(max_messages=1, on_limit="stop")
    agent = agent_with(limiter, answers=[calls("a"), "never asked for"])
    result = await agent.invoke_async("go")
    assert result.stop_reason == "cancelled"
    assert shape(agent)[-1].startswith("user:")
    assert len(agent.model.calls) == 1
    assert isinstance(limiter.limit_reached, MaxMessagesReachedError)


async def test_a_limit_of_an_earlier_invocation_is_not_the_reason_of_a_later_end():
    limiter = ToolLimiter(max_tool_iters=1, on_limit="stop")
    agent = agent_with(limiter, answers=[calls("a"), "done"])
    await agent.invoke_async("go")
    assert limiter.limit_reached is not None
    await agent.invoke_async("thanks")
    assert limiter.limit_reached is None


def test_an_error_that_was_raised_while_a_limit_was_handled_is_an_error_of_its_own():
    try:
        try:
            raise MaxMessagesReachedError("limit")
        except MaxMessagesReachedError:
            raise ValueError("bug in the handler")  # noqa: B904
    except ValueError as error:
        assert limit_cause(error) is None


async def test_a_limiter_shared_by_agents_counts_what_they_do_together():
    limiter = ToolLimiter(max_tool_iters=2, on_limit="stop")
    first = agent_with(limiter, answers=[calls("a"), "done"])
    second = agent_with(limiter, answers=[calls("b"), "never asked for"])
    assert (await first.invoke_async("go")).stop_reason == "end_turn"
    assert (await second.invoke_async("go")).stop_reason == "cancelled"
    assert limiter.tool_iter_count == 2


async def test_direct_tool_calls_and_given_history_do_not_count():
    limiter = ToolLimiter(max_tool_iters=1, on_limit="stop")
    agent = agent_with(limiter, answers=["hello"])
    agent.tool.echo(word="by hand")
    assert RAN == ["by hand"]
    assert (await agent.invoke_async("go")).stop_reason == "end_turn"
    assert (limiter.tool_iter_count, limiter.message_count) == (0, 2)


async def test_other_hooks_see_the_message_that_reaches_the_limit():
    class Witness(HookProvider):
        def __init__(self):
            self.seen: list[str] = []

        def register_hooks(self, registry, **kwargs):
            registry.add_callback(MessageAddedEvent, lambda event: self.seen.append(event.message["role"]))

    witness = Witness()
    agent = agent_with(ToolLimiter(max_tool_iters=1), witness, answers=[calls("a"), "never asked for"])
    with pytest.raises(EventLoopException):
        await agent.invoke_async("go")
    assert witness.seen == ["user", "assistant", "user"]


def test_synchronous_agents_are_limited_too():
    limiter = ToolLimiter(max_tool_iters=1, on_limit="stop")
    agent = agent_with(limiter, answers=[calls("a"), "never asked for"])
    assert agent("go").stop_reason == "cancelled"


async def test_the_other_spellings_limit_the_same_way():
    assert LoopLimiter is ToolLimiter
    limiter = ToolIterationLimiter(max_iterations=1)
    agent = agent_with(limiter, answers=[calls("a"), "never asked for"])
    with pytest.raises(EventLoopException) as caught:
        await agent.invoke_async("go")
    assert isinstance(limit_cause(caught.value), MaxToolIterationsReachedError)
    assert (limiter.iteration_count, limiter.max_iterations) == (1, 1)


@pytest.mark.parametrize("name", ["max_tool_iters", "max_tool_calls", "max_parallel_tool_calls", "max_messages"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", True])
def test_limits_that_are_no_counts_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        ToolLimiter(**{name: value})


def test_bad_arguments_of_the_other_spellings_are_refused():
    with pytest.raises(ValueError, match="max_iterations"):
        ToolIterationLimiter(max_iterations=-1)
    with pytest.raises(ValueError, match="on_limit"):
        ToolLimiter(on_limit="explode")  # type: ignore[arg-type]


def test_the_cause_is_found_however_deep_it_lies():
    limit = MaxToolCallsReachedError("enough")
    assert limit_cause(limit) is limit
    assert limit_cause(EventLoopException(limit)) is limit
    try:
        try:
            try:
                raise limit
            except LoopLimitReachedError as error:
                raise EventLoopException(error) from error
        except EventLoopException as error:
            raise RuntimeError("episode ended") from error
    except RuntimeError as error:
        assert limit_cause(error) is limit


def test_other_errors_have_no_limit_as_their_cause():
    error = RuntimeError("no")
    error.__context__ = ValueError("other")
    error.__context__.__context__ = error
    assert limit_cause(error) is None
    assert limit_cause(None) is None
