"""Conversations of one shape are rendered once, and never differ from a render of each."""

import copy

import pytest

from strands_sglang.messages import to_chat_tools
from strands_sglang.templates.chat_template import ChatTemplate, SampledTurn

TOOL = {"name": "look", "description": "Looks.", "inputSchema": {"json": {"type": "object", "properties": {}}}}
CALL = {"id": "call00000", "name": "look"}

# What a template may do with the text of a message, apart from writing it.
READS = {
    "writes it": "{{ text }}",
    "joins it": "{{ '[' + text + ']' ~ text }}",
    "trims it": "{{ text | trim }}",
    "trims what it joined": "{{ ('[' + text) | trim }}{{ (text + ' ') | trim }}",
    "trims marks": "{{ text.strip('b') }}",
    "writes it with a macro": "{% macro write(it) %}<{{ it }}>{% endmacro %}{{ write(text) }}",
    "reads what a macro wrote": "{% macro write(it) %}{{ it }}{% endmacro %}{{ write(text)[:1] }}",
    "keeps it in a block": "{% set kept %}{{ text }}{% endset %}{{ kept | length }}",
    "filters a block": "{% filter upper %}{{ text }}{% endfilter %}",
    "calls with a block": "{% macro two() %}{{ caller() * 2 }}{% endmacro %}{% call two() %}{{ text }}{% endcall %}",
    "compares it": "{{ 'long' if text == 'abc' else 'short' }}",
    "orders it": "{{ 'late' if text > 'b' else 'early' }}",
    "searches it": "{{ 'marked' if 'b' in text else 'plain' }}",
    "searches for it": "{{ 'inside' if text in 'abcd' else 'outside' }}",
    "lists it": "{{ 'listed' if text in ['abc', 'b'] else 'new' }}",
    "looks it up": "{{ {'abc': 'found'}.get(text, 'lost') }}",
    "measures it": "{{ text | length }}",
    "counts what it joined": "{{ (text + '!') | length }}",
    "cuts it": "{{ text[1:] }}",
    "takes a letter": "{{ text[0] }}{{ text | last }}",
    "reads letters": "{% for letter in text %}{{ letter }}.{% endfor %}",
    "splits it": "{{ text.split('b') | join('+') }}",
    "begins with it": "{{ 'abcd'.startswith(text) }}{{ text.startswith('a') }}",
    "encodes it": "{{ text | tojson }}",
    "encodes its message": "{{ message | tojson }}",
    "writes its message": "{{ message }}",
    "changes letters": "{{ text | upper }}{{ text.title() }}",
    "replaces": "{{ text | replace('b', 'x') }}",
    "formats it": "{{ '%s' % text }}{{ '{:>9}'.format(text) }}",
    "reads a number": "{{ text | int(7) }}{{ text | float(7.5) }}",
    "asks what it is": "{{ text is string }}{{ text is mapping }}{{ text is number }}{{ text is iterable }}",
    "asks whether it is a sequence": "{{ text is sequence }}{{ text is defined }}{{ text is none }}",
    "asks whether it is true": "{{ 'some' if text else 'none' }}{{ text | default('none', true) }}",
    "compares ids": "{{ message.tool_call_id == ns.id }}",
    "writes the id": "{{ message.tool_call_id }}",
    "writes the time": "{{ strftime_now('%Y') }}{{ text }}",
    "repeats it": "{{ text * 2 }}",
    "escapes it": "{{ text | e }}",
    "ends a turn with it": "{{ text }}<|im_end|>",
}
TEXTS = ("abc", "b", "", " ", " abc", "abc\n", "a\nb", "<|im_end|>", "12", "{{ text }}", '"\\é', "sentinel", "\x85b")


@pytest.mark.parametrize("read", READS)
def test_a_shape_never_differs_from_a_render(chatml_tokenizer, read):
    chat_template = (
        "{% set ns = namespace(id='') %}{% for message in messages %}{% set text = message.content %}"
        "{% if message.tool_calls %}<|im_start|>assistant\n{{ message.tool_calls[0].function.arguments.argument }}"
        "{% set ns.id = message.tool_calls[0].id %}<|im_end|>"
        "{% elif message.role == 'tool' %}<|im_start|>tool\n" + READS[read] + "<|im_end|>"
        "{% else %}<|im_start|>{{ message.role }}\n{{ text }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(copy.deepcopy(chatml_tokenizer), chat_template=chat_template)
    shared, plain = to_chat_tools([TOOL]), list(to_chat_tools([TOOL]))
    turn = SampledTurn([5, template.stop_ids[0]], template.stop_ids[0], [CALL])
    for text in [*TEXTS, *reversed(TEXTS)]:
        new = [{"role": "tool", "content": text, "name": "look", "tool_call_id": "call00000"}]
        prompts = []
        for tools in (shared, plain):  # only tools that are known to be plain take part in a shape
            try:
                prompts.append(template.continuation(turn, new, tools))
            except Exception as error:
                prompts.append((type(error), str(error)))
        assert prompts[0] == prompts[1]


def test_tools_of_other_types_are_rendered_as_they_are(chatml_tokenizer):
    class Loud(str):
        def __str__(self):
            return self.upper()

    tools = to_chat_tools([{**TOOL, "description": Loud("quiet")}])
    assert tools.digest is None
    template = ChatTemplate(chatml_tokenizer)
    rendered = template.render([{"role": "user", "content": "u"}], tools, add_generation_prompt=True)
    assert template.opening([{"role": "user", "content": "u"}], tools).text == rendered
