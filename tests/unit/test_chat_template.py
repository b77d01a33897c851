import copy
import gc
import weakref

import pytest

from strands_sglang.chat_template import (
    ChatTemplate,
    ChatTemplateError,
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


@pytest.mark.parametrize("kind", ["tool result", "two tool results", "tool result and text", "user turn"])
def test_the_continuation_is_what_the_full_render_has_after_the_turn(template, kind):
    answer, calls, new = follow_up(kind)
    opening = template.opening(opening_messages(), TOOLS)
    whole = template.opening([*opening_messages(), answer, *new], TOOLS).token_ids
    end = end_of(template)
    # The sampled turn, as the template writes it: what stands between the opening and the end of the turn.
    start = len(opening.token_ids)
    sampled = whole[start : whole.index(end, start) + 1]

    continuation = template.continuation(sampled, end, calls, new, TOOLS)
    assert opening.token_ids + sampled + continuation.token_ids == whole


def test_a_cut_turn_gets_its_missing_end_as_a_prompt_token(template):
    new = [{"role": "user", "content": "go on"}]
    ended = template.continuation([5, end_of(template)], end_of(template), [], new, None)
    cut = template.continuation([5], None, [], new, None)
    assert cut.token_ids == [end_of(template), *ended.token_ids]


def test_an_end_that_was_sampled_at_the_very_limit_is_not_doubled(template):
    new = [{"role": "user", "content": "go on"}]
    cut = template.continuation([5, end_of(template)], None, [], new, None)
    assert cut.token_ids[0] != end_of(template)


def test_a_turn_that_ended_in_another_token_is_not_continued(template):
    other = template.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    with pytest.raises(UnprovenContinuationError, match="endoftext.*im_end"):
        template.continuation([5, other], other, [], [{"role": "user", "content": "x"}], None)


def test_a_generation_prompt_that_opens_reasoning_is_noticed(chatml_tokenizer):
    text = chatml_tokenizer.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    assert template.opening(opening_messages(), None).ends_with("<think>")
    new = [{"role": "user", "content": "x"}]
    end = end_of(template)
    assert template.continuation([end], end, [], new, None).ends_with("<think>")


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
    prompt = template.continuation([5, end], end, [], new, None, has_system=False)
    assert template.decode(prompt.token_ids) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_template_refuses_of_the_stand_in_is_unproven_and_not_an_error(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=REFUSES_SYSTEM)
    end, new = end_of(template), [{"role": "user", "content": "x"}]
    with pytest.raises(UnprovenContinuationError, match="System role not supported"):
        template.continuation([5, end], end, [], new, None, has_system=True)


def test_all_calls_of_a_turn_stand_before_its_results(chatml_tokenizer):
    # This template writes how many calls a result answers.
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ (messages | selectattr('tool_calls', 'defined') | "
        "list)[-1].tool_calls | length }}]{% endif %}{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    calls = [{"toolUseId": f"t{i}", "name": "calculator", "id": f"t{i}"} for i in range(3)]
    results = [{"role": "tool", "content": "4", "tool_call_id": f"t{i}"} for i in range(3)]
    prompt = template.continuation([end_of(template)], end_of(template), calls, results, None)
    assert template.decode(prompt.token_ids).startswith("[3]4<|im_end|>")


def test_a_sentinel_that_the_template_repeats_is_followed_to_its_last_place(chatml_tokenizer):
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>(again){% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(chatml_tokenizer, chat_template=text)
    end = end_of(template)
    prompt = template.continuation([5, end], end, [], [{"role": "user", "content": "x"}], None)
    assert template.decode(prompt.token_ids) == "x<|im_end|>"


def test_a_stop_token_that_is_text_counts_as_a_cut_and_gets_its_end(template):
    mark = template.tokenizer.convert_tokens_to_ids("</tool_call>")
    prompt = template.continuation([5, mark], mark, [], [{"role": "user", "content": "x"}], None)
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
        template.continuation([5], None, [], [{"role": "user", "content": "x"}], None)


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
        template.continuation([5, end_of(template)], end_of(template), [], new, None)
    without = template.continuation([5, end_of(template)], end_of(template), [], new, None, has_system=False)
    assert template.decode(without.token_ids) == "[TOOLS]x"


def test_a_template_that_moves_the_tools_is_not_continued_with_a_user_turn(chatml_tokenizer):
    template = ChatTemplate(chatml_tokenizer, chat_template=MOVING)
    end, new = end_of(template), [{"role": "user", "content": "x"}]
    with pytest.raises(UnprovenContinuationError, match="moves the tools"):
        template.continuation([5, end], end, [], new, TOOLS, has_system=False)
    result = [{"role": "tool", "content": "4", "tool_call_id": "t0"}]
    assert template.continuation([5, end], end, CALLS, result, TOOLS).token_ids


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
    sampled = template.continuation([5, observation], observation, CALLS, new, None, has_system=False)
    assert template.decode(sampled.token_ids) == "\n4<|user|>\nx<|assistant|>\n"
    cut = template.continuation([5], None, CALLS, new, None, has_system=False)
    assert cut.token_ids == [observation, *sampled.token_ids]


def test_another_role_than_the_one_that_follows_is_not_continued(glm_tokenizer):
    template = ChatTemplate(glm_tokenizer, chat_template=GLM)
    user = glm_tokenizer.convert_tokens_to_ids("<|user|>")
    new = [{"role": "tool", "content": "4", "tool_call_id": "t0"}]
    with pytest.raises(UnprovenContinuationError, match="stopped with '<|user|>'"):
        template.continuation([5, user], user, CALLS, new, None, has_system=False)


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
    with pytest.raises(UnprovenContinuationError, match="control token stands between"):
        template.continuation([5], None, CALLS, new, None, has_system=False)
