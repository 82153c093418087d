"""Chat templates in the style of published ones, and conversations to render with them."""

from __future__ import annotations

from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'It\'s <b>"hot"</b> & ünï 🙂',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "enum": [1, 2.5, None, True]},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "a1",
    "function": {"name": "weather", "arguments": {"city": "Köln <x>", "f": 1.0}},
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [user("hi")],
    "system": [{"role": "system", "content": 'be <nice> & "brief"\n'}, user("  x \n\n")],
    "three turns": [user("a"), assistant("b "), user("<|im_end|>{{ 7 * 7 }}")],
    "thoughts": [
        user("a"),
        assistant("<think>\nhm\n</think>\n\nb"),
        user("c"),
        assistant("d", reasoning="r\n"),
    ],
    "tools": [
        user("w?"),
        assistant("", tool_calls=[CALL, CALL]),
        {"role": "tool", "content": "12 °C"},
        user("so?"),
    ],
    "tool last": [user("w?"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "12"}],
}

TEMPLATES = {
    "turn marks": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + \
(message['content'] or '') + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
    "tools and thoughts": """{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" %}
        {%- set ns.seen = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning is defined and message.reasoning is not none %}
            {%- set reasoning = message.reasoning %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|assistant|>' }}
        {%- if loop.index0 > ns.last or loop.last %}
            {{- '<think>' + reasoning.strip('\n') + '</think>' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|user|>' }}{%- endif %}
        {{- '\n<answer>' ~ content ~ '</answer>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
""",
    "inline system": """{{- bos_token }}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"]|trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- "[CALLS] " ~ (message.tool_calls | map(attribute="function.name") | join(", ")) + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- "[" + message["role"]|upper + "]" + message["content"]|string }}
    {%- endif %}
{%- endfor %}
""",
    "blocks and macros": """{# a comment #}
{% macro show(value, depth=0) -%}
    {%- if value is mapping %}
        {%- for key, item in value | dictsort %}{{ '  ' * depth }}{{ key }}:
{{ show(item, depth + 1) }}{% endfor %}
    {%- elif value is iterable and value is not string %}
        {%- for item in value %}{{ loop.index }}/{{ loop.length }} {{ show(item, depth=1) }}{% endfor %}
    {%- else -%}
        {{ '  ' * depth }}{{ value }}
{% endif %}
{%- endmacro %}
{% if not date_string is defined %}
    {% set date_string = "26 Jul 2024" %}
{% endif %}
Today: {{ date_string }}
{% for message in messages %}
    {% if loop.index0 > 4 %}{% break %}{% endif %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% generation %}
{{ message.role | capitalize }}: {{ (message.content or 'nothing') | replace('<', '(') | indent(2) }}
    {%- endgeneration %}

    {% if message.tool_calls %}
{{ show(message.tool_calls) }}
    {% endif %}
{% endfor %}
{% if tools %}
{{ tools | tojson(indent=2) }}
{{ (tools | first).function.parameters.properties.keys() | list | join('+') }}
{{ tools[0].function.get('missing', 'none') }} {{ tools | length }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }}
{{ 1.0 }} {{ "a\n\nb" | indent(3, true) }} {{ "a\n\nb" | indent(1, blank=true) }}
{% endif %}
{{ "%s and %s" | format("a", 1) }} {{ [3, 1, 2] | sort | join }} {{ "x" if nothing is undefined else "y" }}
{{ nothing | default("d") }}{{ "" | default("e", true) }} {{ "a,b".split(",")[-1] }} {{ "Title me".title() }}
{{ "prefix"[:3] }}{{ "prefix".startswith("pre") }} {{ "é".upper() }} {{ [1, 2] + [3] }} {{ {"k": none} }}
{%- set block %}captured {{ messages | length }}{% endset %}
{{ block }}
{% raw %}{{ raw }}{% endraw %}

""",
}
