"""Small real tokenizers, trained on the spot: byte-level BPE with a ChatML template, as the Qwen family has it."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# In Qwen3's vocabulary these are single tokens, but not special ones: decoding keeps them.
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")

_VOCAB_SIZE = 1500

_SENTENCES = (
    "You are a helpful assistant. Answer the question of the user in one short sentence.",
    "The quick brown fox jumps over the lazy dog while the other animals are watching.",
    "What is 17 times 23? Please use the calculator tool and tell me the result.",
    "Let me think about this step by step before I answer. First, I need to call the calculator.",
    'You may call one or more tools. {"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}',
    '{"type": "function", "function": {"name": "search", "description": "Search the web for a query", "parameters": '
    '{"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}',
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
    "The weather in Paris is sunny today, with 21 degrees and a light wind from the west.",
    "system\nuser\nassistant\ntool\n\n# Tools\n\n",
    "The result of the calculation is 391. The answer is 42. There was an error: unknown tool, invalid JSON.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va très bien, señor. 日本語 中文 🙂",
)

CHATML_TEMPLATE = """\
{%- set system_text = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- system_text + '\\n\\n' if system_text else '' }}
    {{- '# Tools\\n\\nThese functions can be called, as often as needed:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nWrite each call as a JSON object between two marks:\\n<tool_call>\\n' }}
    {{- '{"name": "the function", "arguments": {"the": "arguments"}}\\n</tool_call><|im_end|>\\n' }}
{%- elif system_text %}
    {{- '<|im_start|>system\\n' + system_text + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last_question=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set state.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > state.last_question and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}
"""


@functools.cache
def build_chatml_tokenizer(*, with_marks: bool = True) -> PreTrainedTokenizerFast:
    """A ChatML tokenizer with about 1,500 tokens; built once per process and shared, so don't change it.

    Args:
        with_marks: Whether `<tool_call>`, `<think>` and so on are tokens of their own. Without, they are ordinary text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE - len(MARKS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Numbers give the merges that separate "12" and "123"; without repetition BPE finds nothing worth merging.
    numbers = [" ".join(str(n * step) for n in range(1, 200)) for step in (1, 7, 13, 101)]
    tokenizer.train_from_iterator([*_SENTENCES, *numbers] * 2, trainer)
    if with_marks:
        tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML_TEMPLATE
    return fast
