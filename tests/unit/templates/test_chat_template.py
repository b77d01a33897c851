import copy
import gc
import time
import weakref

import pytest

from strands_sglang.messages import to_chat_messages
from strands_sglang.templates.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    SampledTurn,
    UnprovenContinuationError,
    get_chat_template,
)

TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculator", "description": "Computes.", "parameters": {"type": "object"}},
    }
]
CALLS = [{"toolUseId": "t0", "name": "calculator", "id": "t0"}]


def end_of(template):
    return template.tokenizer.convert_tokens_to_ids("<|im_end|>")


def opening_messages():
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]


def call_message(*calls):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": {"x": 1}}}
            for call in calls
        ],
    }


@pytest.fixture
def template(chatml_tokenizer):
    return ChatTemplate(chatml_tokenizer)


@pytest.mark.parametrize("kind", ["tool result", "two tool results", "tool result and text", "user turn"])
def test_the_continuation_is_what_the_full_render_has_after_the_turn(template, kind):
    def follow_up(kind):
        """The assistant's message, its calls, and the messages that follow it."""
        result = {"role": "tool", "content": "4", "name": "calculator", "tool_call_id": "t0"}
        user = {"role": "user", "content": "And 3+3?"}
        if kind == "tool result":
            return call_message(*CALLS), CALLS, [result]
        if kind == "two tool results":
            calls = [*CALLS, {"toolUseId": "t1", "name": "other", "id": "t1"}]
            return call_message(*calls), calls, [result, {**result, "content": "6", "tool_call_id": "t1"}]
        if kind == "tool result and text":
            return call_message(*CALLS), CALLS, [result, user]
        return {"role": "assistant", "content": "It is 4."}, [], [user]

    answer, calls, new = follow_up(kind)
    opening = template.opening(opening_messages(), TOOLS)
    whole = template.opening([*opening_messages(), answer, *new], TOOLS).token_ids
    end = end_of(template)
    # The sampled turn, as the template writes it: what stands between the opening and the end of the turn.
    start = len(opening.token_ids)
    sampled = whole[start : whole.index(end, start) + 1]

    continuation = template.continuation(SampledTurn(sampled, end, calls), new, TOOLS)
    assert opening.token_ids + sampled + continuation.token_ids == whole


def test_a_cut_turn_gets_its_missing_end_as_a_prompt_token(template):
    new = [{"role": "user", "content": "go on"}]
    ended = template.continuation(SampledTurn([5, end_of(template)], end_of(template)), new, None)
    cut = template.continuation(SampledTurn([5], None), new, None)
    assert cut.token_ids == [end_of(template), *ended.token_ids]


def test_an_end_that_was_sampled_at_the_very_limit_is_not_doubled(template):
    new = [{"role": "user", "content": "go on"}]
    cut = template.continuation(SampledTurn([5, end_of(template)], None), new, None)
    assert cut.token_ids[0] != end_of(template)


def test_of_a_turn_that_ended_in_another_token_all_but_that_token_stays(template):
    other = template.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    new = [{"role": "user", "content": "x"}]
    ended = template.continuation(SampledTurn([5, end_of(template)], end_of(template)), new, None)
    odd = template.continuation(SampledTurn([5, other], other), new, None)
    assert (odd.kept, odd.token_ids) == (1, [end_of(template), *ended.token_ids])
    assert odd.note == "the model stopped with '<|endoftext|>' where the chat template puts '<|im_end|>'"
    assert ended.kept is None


def test_another_stop_that_was_sampled_at_the_very_limit_is_replaced_too(template):
    other = template.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert template.continuation(SampledTurn([5, other], None), [{"role": "user", "content": "x"}], None).kept == 1


def test_reasoning_that_was_cut_off_is_closed_as_the_template_closes_it(template):
    new = [{"role": "user", "content": "go on"}]
    cut = template.continuation(SampledTurn(template.encode("<think>\nI was"), None, ends_in_reasoning=True), new, None)
    assert template.decode(cut.token_ids).startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user")


def test_what_a_cut_turn_already_has_of_its_end_is_not_written_twice(template):
    new = [{"role": "user", "content": "go on"}]
    cut = template.continuation(
        SampledTurn(template.encode("<think>\nI was\n"), None, ends_in_reasoning=True), new, None
    )
    assert template.decode(cut.token_ids).startswith("</think>\n\n<|im_end|>")


def test_cut_reasoning_that_nothing_is_known_to_close_is_not_continued(chatml_tokenizer):
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    with pytest.raises(UnprovenContinuationError, match="cut off in its reasoning"):
        template.continuation(SampledTurn([5], None, ends_in_reasoning=True), [{"role": "user", "content": "x"}], None)


def test_a_generation_prompt_that_opens_reasoning_is_noticed(chatml_tokenizer):
    text = chatml_tokenizer.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    assert template.opening(opening_messages(), None).ends_with("<think>")
    new = [{"role": "user", "content": "x"}]
    end = end_of(template)
    assert template.continuation(SampledTurn([end], end), new, None).ends_with("<think>")


def test_a_closed_reasoning_block_in_the_prompt_is_not_open_reasoning(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, arguments={"enable_thinking": False})
    prompt = template.opening(opening_messages(), None)
    assert "</think>" in template.decode(prompt.token_ids)
    assert not prompt.ends_with("<think>")


def test_arguments_of_the_generation_prompt_do_not_change_the_identity(chatml_tokenizer):
    with_thinking = ChatTemplate(chatml_tokenizer, arguments={"enable_thinking": True})
    without = ChatTemplate(chatml_tokenizer, arguments={"enable_thinking": False})
    assert with_thinking.identity == without.identity


def test_arguments_that_change_the_history_change_the_identity(chatml_tokenizer):
    text = "{{ greeting or '' }}" + chatml_tokenizer.chat_template
    plain = ChatTemplate(chatml_tokenizer, chat_template=text)
    greeted = ChatTemplate(chatml_tokenizer, chat_template=text, arguments={"greeting": "hi"})
    assert plain.identity != greeted.identity


def test_a_tokenizer_without_a_template_is_refused(chatml_tokenizer):
    class Bare:
        chat_template = None
        name_or_path = "bare-model"

    with pytest.raises(ChatTemplateError, match="'bare-model' has no chat template.*chat_template="):
        ChatTemplate(Bare())


REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_refuses_system_messages_continues_conversations_without_one(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=REFUSES_SYSTEM)
    end, new = end_of(template), [{"role": "user", "content": "x"}]
    prompt = template.continuation(SampledTurn([5, end], end), new, None, has_system=False)
    assert template.decode(prompt.token_ids) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_template_refuses_of_the_stand_in_is_unproven_and_not_an_error(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=REFUSES_SYSTEM)
    end, new = end_of(template), [{"role": "user", "content": "x"}]
    with pytest.raises(UnprovenContinuationError, match="System role not supported"):
        template.continuation(SampledTurn([5, end], end), new, None, has_system=True)


def test_all_calls_of_a_turn_stand_before_its_results(chatml_tokenizer):
    # This template writes how many calls a result answers.
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ (messages | selectattr('tool_calls', 'defined') | "
        "list)[-1].tool_calls | length }}]{% endif %}{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    calls = [{"toolUseId": f"t{i}", "name": "calculator", "id": f"t{i}"} for i in range(3)]
    results = [{"role": "tool", "content": "4", "tool_call_id": f"t{i}"} for i in range(3)]
    prompt = template.continuation(SampledTurn([end_of(template)], end_of(template), calls), results, None)
    assert template.decode(prompt.token_ids).startswith("[3]4<|im_end|>")


def test_a_sentinel_that_the_template_repeats_is_followed_to_its_last_place(chatml_tokenizer):
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>(again){% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    end = end_of(template)
    prompt = template.continuation(SampledTurn([5, end], end), [{"role": "user", "content": "x"}], None)
    assert template.decode(prompt.token_ids) == "x<|im_end|>"


def test_a_stop_token_that_is_text_counts_as_a_cut_and_gets_its_end(template):
    mark = template.tokenizer.convert_tokens_to_ids("</tool_call>")
    prompt = template.continuation(SampledTurn([5, mark], mark), [{"role": "user", "content": "x"}], None)
    assert prompt.token_ids[0] == end_of(template)


def test_a_template_that_is_changed_on_the_tokenizer_later_changes_nothing(chatml_tokenizer):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    template = ChatTemplate(tokenizer)
    before = template.opening(opening_messages(), None)
    tokenizer.chat_template = "HEY<|im_end|>"
    assert template.opening(opening_messages(), None) == before


def test_tokenizers_are_freed_with_their_models(chatml_tokenizer):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    template = get_chat_template(tokenizer, None, {})
    assert get_chat_template(tokenizer, None, {}) is template
    freed = weakref.ref(tokenizer)
    del tokenizer, template
    gc.collect()
    assert freed() is None


def test_what_is_no_tokenizer_is_told():
    with pytest.raises(ChatTemplateError, match="must be a Hugging Face tokenizer, not 'Qwen/Qwen3-4B'.*get_tokenizer"):
        get_chat_template("Qwen/Qwen3-4B", None, {})


def test_a_template_that_refuses_a_conversation_is_quoted(chatml_tokenizer):
    text = "{% if messages|length > 2 %}{{ raise_exception('only one exchange') }}{% endif %}<|im_end|>" + (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    with pytest.raises(ChatTemplateError, match="only one exchange"):
        template.opening([*opening_messages(), {"role": "user", "content": "x"}], None)


def test_a_template_without_an_end_of_turn_token_continues_nothing(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template="{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(UnprovenContinuationError, match="no special token"):
        template.continuation(SampledTurn([5], None), [{"role": "user", "content": "x"}], None)


MOVING = (  # as Mistral's templates do: system prompt and tools stand in front of the latest user message
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.last %}[TOOLS]{{ tools or '' }}{{ system }}{% endif %}"
    "{{ m.content }}{% elif m.role != 'system' %}{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>{% endif %}"
    "{% endfor %}"
)


def test_a_template_that_moves_the_system_prompt_is_not_continued_with_a_user_turn(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=MOVING)
    new = [{"role": "user", "content": "x"}]
    with pytest.raises(UnprovenContinuationError, match="moves the system prompt"):
        template.continuation(SampledTurn([5, end_of(template)], end_of(template)), new, None)
    without = template.continuation(SampledTurn([5, end_of(template)], end_of(template)), new, None, has_system=False)
    assert template.decode(without.token_ids) == "[TOOLS]x"


def test_a_template_that_moves_the_tools_is_not_continued_with_a_user_turn(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=MOVING)
    end, new = end_of(template), [{"role": "user", "content": "x"}]
    with pytest.raises(UnprovenContinuationError, match="moves the tools"):
        template.continuation(SampledTurn([5, end], end), new, TOOLS, has_system=False)
    result = [{"role": "tool", "content": "4", "tool_call_id": "t0"}]
    assert template.continuation(SampledTurn([5, end], end, CALLS), result, TOOLS).token_ids


ONLY_ROLES = (  # a place for results, and none for calls
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def results(count):
    return [{"role": "tool", "content": f"result {i}", "tool_call_id": f"t{i}"} for i in range(count)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_template_without_calls_goes_on_after_a_sampled_call(chatml_tokenizer, count):  # A12
    template = ChatTemplate(chatml_tokenizer, chat_template=ONLY_ROLES)
    end = end_of(template)
    calls = [{"toolUseId": f"t{i}", "name": "calculator", "id": f"t{i}"} for i in range(count)]
    prompt = template.continuation(SampledTurn([5, end], end, calls), results(count), TOOLS)
    written = "".join(f"<|im_start|>tool\nresult {i}<|im_end|>\n" for i in range(count))
    assert template.decode(prompt.token_ids) == f"\n{written}<|im_start|>assistant\n"
    assert set(template.self_check().values()) == {None}


def test_a_template_without_calls_still_renders_none_from_history(chatml_tokenizer):  # A12
    template = ChatTemplate(chatml_tokenizer, chat_template=ONLY_ROLES)
    end, called = end_of(template), call_message(*CALLS)
    with pytest.raises(ChatTemplateError, match="leaves the tool calls out"):
        template.opening([*opening_messages(), called, *results(1)], TOOLS)
    with pytest.raises(ChatTemplateError, match="leaves the tool calls out"):
        template.continuation(SampledTurn([5, end], end, CALLS), [*results(1), called, *results(1)], TOOLS)


@pytest.mark.parametrize("calls", ["", "{{ m.tool_calls or '' }}"])
def test_a_template_that_leaves_results_out_is_not_continued_with_them(chatml_tokenizer, calls):  # A12
    text = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        + calls
        + "<|im_end|>\n{% endif %}{% endfor %}"
    )
    template, end = ChatTemplate(chatml_tokenizer, chat_template=text), chatml_tokenizer.eos_token_id
    with pytest.raises(ChatTemplateError, match=r"message 0: the chat template leaves the tool results out"):
        template.continuation(SampledTurn([5, end], end, CALLS), results(1), TOOLS)


def test_a_template_that_leaves_the_system_prompt_out_is_refused(chatml_tokenizer):  # A12
    text = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    with pytest.raises(ChatTemplateError, match="leaves the system prompt out"):
        template.opening(opening_messages(), None)
    assert template.opening(opening_messages()[1:], None).token_ids


@pytest.fixture
def glm_tokenizer(chatml_tokenizer):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|observation|>", "<|assistant|>"]})
    return tokenizer


GLM = (  # the end of a turn is the next role's token
    "{% set marks = {'user': '<|user|>', 'tool': '<|observation|>', 'assistant': '<|assistant|>'} %}"
    "{% for m in messages %}{{ marks[m.role] }}\n"
    "{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_stop_token_that_is_the_next_role_is_neither_doubled_nor_lost(glm_tokenizer):
    template = ChatTemplate(glm_tokenizer, chat_template=GLM)
    observation = glm_tokenizer.convert_tokens_to_ids("<|observation|>")
    new = [{"role": "tool", "content": "4", "tool_call_id": "t0"}, {"role": "user", "content": "x"}]
    sampled = template.continuation(SampledTurn([5, observation], observation, CALLS), new, None, has_system=False)
    assert template.decode(sampled.token_ids) == "\n4<|user|>\nx<|assistant|>\n"
    cut = template.continuation(SampledTurn([5], None, CALLS), new, None, has_system=False)
    assert cut.token_ids == [observation, *sampled.token_ids]


def test_another_role_than_the_one_that_follows_is_replaced(glm_tokenizer):
    template = ChatTemplate(glm_tokenizer, chat_template=GLM)
    user, observation = glm_tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    new = [{"role": "tool", "content": "4", "tool_call_id": "t0"}]
    prompt = template.continuation(SampledTurn([5, user], user, CALLS), new, None, has_system=False)
    assert (prompt.kept, prompt.token_ids[0]) == (1, observation)


def test_no_message_is_skipped_where_the_family_is_not_known(glm_tokenizer):
    # A turn with calls ends in another token than one without, and what is taken for its end comes behind a message.
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% endif %}"
        "{{ m.content }}{{ m.tool_calls or '' }}"
        "{% if m.role != 'tool' and not m.tool_calls %}<|endoftext|>{% endif %}{% endfor %}"
    )
    template = ChatTemplate(glm_tokenizer, chat_template=text)
    assert template.family is None
    new = [{"role": "tool", "content": "4", "tool_call_id": "t0"}, {"role": "user", "content": "x"}]
    with pytest.raises(UnprovenContinuationError, match="does not end the turn"):
        template.continuation(SampledTurn([5], None, CALLS), new, None, has_system=False)


def test_a_sentinel_that_the_template_changes_is_replaced_by_another(chatml_tokenizer):
    text = chatml_tokenizer.chat_template.replace("message.content", "message.content | upper")
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    end = end_of(template)
    prompt = template.continuation(SampledTurn([5, end], end), [{"role": "user", "content": "shout"}], None)
    assert template.decode(prompt.token_ids) == "\n<|im_start|>user\nSHOUT<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_takes_arguments_as_text_gets_them_as_text(chatml_tokenizer):
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.arguments + '</tool_call>' }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    assert set(template.self_check().values()) == {None}
    opening = template.opening([{"role": "user", "content": "q"}, call_message(*CALLS)], None)
    assert '<tool_call>{"x": 1}</tool_call>' in template.decode(opening.token_ids)


def test_what_depends_on_everything_before_it_is_unproven_and_says_so(chatml_tokenizer):
    last_only = (  # numbers the results of the whole conversation
        "{% set n = namespace(results=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.tool_calls or '' }}"
        "{% if m.role == 'tool' %}{% set n.results = n.results + 1 %}{{ n.results }}: {% endif %}"
        "{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(chatml_tokenizer, chat_template=last_only)
    check = template.self_check()
    assert (check["user turn"], check["cut turn"]) == (None, None)
    assert "depends on what came before it" in check["tool result"]
    end = end_of(template)
    with pytest.raises(UnprovenContinuationError, match="depends on what came before it"):
        template.continuation(
            SampledTurn([5, end], end, CALLS), [{"role": "tool", "content": "4", "tool_call_id": "t0"}], TOOLS
        )


def test_arguments_that_matter_only_together_change_the_identity(chatml_tokenizer):
    text = "{% if a and b %}both{% endif %}" + chatml_tokenizer.chat_template
    both = ChatTemplate(chatml_tokenizer, chat_template=text, arguments={"a": True, "b": True})
    one = ChatTemplate(chatml_tokenizer, chat_template=text, arguments={"a": True, "b": False})
    assert both.identity != one.identity


def test_a_control_token_of_the_turns_own_text_stays_in_the_sequence(glm_tokenizer):
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}<|observation|>{% endfor %}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(glm_tokenizer, chat_template=text, family="chatml")
    mark = glm_tokenizer.convert_tokens_to_ids("<|observation|>")
    result = [{"role": "tool", "content": "4", "tool_call_id": "t0"}]
    assert template.continuation(SampledTurn([5, mark], mark, CALLS), result, None).kept is None


def test_the_family_can_be_named(glm_tokenizer):
    text = "{% for m in messages %}<|user|>{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}<|user|>"
    assert ChatTemplate(glm_tokenizer, chat_template=text).family is None
    named = ChatTemplate(glm_tokenizer, chat_template=text, family="glm")
    assert (named.family.name, named.stops) == ("glm", ("<|endoftext|>", "<|user|>", "<|observation|>"))


def test_a_named_family_that_cannot_be_is_refused(chatml_tokenizer):
    with pytest.raises(ValueError, match="no model family named 'gml'; the families are: .*glm"):
        ChatTemplate(chatml_tokenizer, family="gml")
    with pytest.raises(ChatTemplateError, match="family='mistral': none of its stop tokens"):
        ChatTemplate(chatml_tokenizer, family="mistral")


def test_a_template_that_strips_reasoning_behind_a_user_message_is_known_to_rewrite_history(chatml_tokenizer):
    assert ChatTemplate(chatml_tokenizer).rewrites_history()
    assert not ChatTemplate(chatml_tokenizer).rewrites_history(reasoning=False)
    assert not ChatTemplate(chatml_tokenizer).rewrites_history(tool_result=True)
    keeping = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}<|im_end|>"
    keeping += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    assert not ChatTemplate(chatml_tokenizer, chat_template=keeping).rewrites_history()


def test_the_self_check_costs_at_most_50_ms_of_cpu(chatml_tokenizer):
    ChatTemplate(chatml_tokenizer)  # compiles the template
    gc.collect()
    gc.disable()
    try:
        costs = []
        for _ in range(3):
            start = time.process_time()
            ChatTemplate(chatml_tokenizer)
            costs.append(time.process_time() - start)
    finally:
        gc.enable()
    assert min(costs) < 0.050


# --- the forms in which a template takes a turn ---

# Shows text or tool calls of a turn, and knows of no reasoning.
TEXT_OR_CALLS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# The same, and refuses two turns of one role in a row.
ALTERNATING = (
    """{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"""
    """{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}""" + TEXT_OR_CALLS
)


def thoughtful_history():
    turn = {
        "role": "assistant",
        "content": [
            {"reasoningContent": {"reasoningText": {"text": "Add them."}}},
            {"text": "Let me compute."},
            {"toolUse": {"toolUseId": "t0", "name": "calculator", "input": {"expression": "2+2"}}},
        ],
    }
    result = {"toolUseId": "t0", "status": "success", "content": [{"text": "4"}]}
    return to_chat_messages(
        [
            {"role": "user", "content": [{"text": "What is 2+2?"}]},
            turn,
            {"role": "user", "content": [{"toolResult": result}]},
        ]
    )


def test_a_full_render_has_reasoning_and_text_that_the_template_does_not_show_beside_a_call(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=TEXT_OR_CALLS)
    text = template.opening(thoughtful_history(), TOOLS).text
    shown = "<|im_start|>assistant\n<think>\nAdd them.\n</think>\n\nLet me compute.<|im_end|>\n<|im_start|>assistant\n"
    assert f"{shown}<tool_call>" in text


def test_text_that_a_template_leaves_out_in_every_form_is_refused_with_its_path(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=ALTERNATING)
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]: the chat template leaves text beside a tool call out"):
        template.opening(thoughtful_history(), TOOLS)
    silent = [{**message, "content": ""} if "tool_calls" in message else message for message in thoughtful_history()]
    for message in silent:
        message.pop("reasoning_content", None)
    assert "<tool_call>" in template.opening(silent, TOOLS).text


def test_new_messages_with_text_that_the_template_leaves_out_are_refused_too(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=ALTERNATING)
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]"):
        template.continuation(SampledTurn([7, end_of(template)], end_of(template)), thoughtful_history(), TOOLS)
