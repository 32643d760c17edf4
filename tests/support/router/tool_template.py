"""A chat template as Qwen3.5's: tools, calls as tags, tool results, and reasoning that the prompt opens."""

TOOL_TEMPLATE = r"""
{%- macro call(tool_call) -%}
    {{- '<tool_call>\n<function=' ~ tool_call.function.name ~ '>\n' -}}
    {%- for name, value in tool_call.function.arguments|items -%}
        {{- '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value | tojson) ~ '\n</parameter>\n' -}}
    {%- endfor -%}
    {{- '</function>\n</tool_call>' -}}
{%- endmacro -%}
{%- set has_system = messages[0].role == 'system' -%}
{%- if has_system or tools -%}
    {{- '<|im_start|>system\n' ~ (messages[0].content if has_system else '') -}}
    {%- for tool in tools or [] -%}{{- '\n' ~ tool | tojson -}}{%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages if not (has_system and message == messages[0]) -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n<think>\n' ~ (message.reasoning_content or '') | trim ~ '\n</think>\n\n' -}}
        {{- message.content | trim -}}
        {%- for tool_call in message.tool_calls or [] -%}
            {{- ('\n\n' if message.content | trim else '') if loop.first else '\n' -}}{{- call(tool_call) -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|im_start|>user' -}}
        {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' -}}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\n' -}}
    {%- elif message.role in ['system', 'user'] -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' -}}
    {%- else -%}
        {{- raise_exception('unknown role ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n<think>\n' ~ ('\n</think>\n\n' if enable_thinking is false else '') -}}
{%- endif -%}
"""
