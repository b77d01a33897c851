"""Chat templates for random histories: one that moves the tools, so that not every continuation can be proven."""

from __future__ import annotations

MOVING_TEMPLATE = """\
{%- set state = namespace(last_question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set state.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- macro show_tools() %}
    {%- if tools %}
        {{- '<|im_start|>system\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson + '\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endmacro %}
{%- if state.last_question < 0 %}
    {{- show_tools() }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.index0 == state.last_question %}
        {{- show_tools() }}
    {%- endif %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML that shows the tools in front of the last question, wherever that is, as Mistral's first templates do."""
