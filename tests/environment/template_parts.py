"""Chat templates that behave as those of thirteen model families do, in our own words: roles, ends of turns, tools,
reasoning.

The special tokens and the shapes of calls are the families' interface and so are theirs; texts around them are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from posttrain.engine.model.tiny_models import raw_bytes
from posttrain.environment.templates.renderer import History, Renderer


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, the one that ends a turn, and what is known of it."""

    template: str
    specials: tuple[str, ...]
    stops: tuple[str, ...]
    format: str | None
    call: str = ""
    """The call look_up(city="Oslo") as this family's models write it."""
    thought: str = ""
    """How its models begin a turn with reasoning."""
    user: str = ""
    """What the proof says when a user answers the policy; '' where turns append."""
    tool: str = ""


CHATML = ("<|im_start|>", "<|im_end|>")
_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ messages[0]['content'] ~ '\n' if messages[0]['role'] == 'system' else '' }}"
    "You have these tools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n{% endif %}"
)
_RESPONSE = (
    "{% elif m['role'] == 'tool' %}{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{%"
    " endif %}\n<tool_response>\n{{ m['content'] }}\n</tool_response>{% if loop.last or messages[loop.index0 +"
    " 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}{% endif %}"
)
_GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_JSON_CALL = "{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}"

QWEN25 = (
    _TOOLS
    + "{% for m in messages %}{% if m['role'] == 'system' %}{% if not loop.first %}<|im_start|>system\n{{ m['content']"
    " }}<|im_end|>\n{% endif %}{% elif m['role'] == 'user' %}<|im_start|>user\n{{ m['content'] }}<|im_end|>\n{% elif"
    " m['role'] == 'assistant' %}<|im_start|>assistant{% if m['content'] %}\n{{ m['content'] }}{% endif %}{% for c in"
    " m['tool_calls'] or [] %}\n<tool_call>\n"
    + _JSON_CALL
    + "\n</tool_call>{% endfor %}<|im_end|>\n"
    + _RESPONSE
    + "{% endfor %}"
    + _GENERATE
)
QWEN3 = (
    _TOOLS
    + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0"
    " %}{% endif %}{% endfor %}{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>user\n{{ m['content']"
    " }}<|im_end|>\n{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}{% set why ="
    " m['reasoning_content'] or '' %}{% if '</think>' in content %}{% set why ="
    " content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% set content ="
    " content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n{% if loop.index0 > ns.last and"
    " (loop.last or why) %}<think>\n{{ why.strip('\n') }}\n</think>\n\n{% endif %}{{ content.lstrip('\n') }}{% for c"
    " in m['tool_calls'] or [] %}{% if content or not loop.first %}\n{% endif %}<tool_call>\n"
    + _JSON_CALL
    + "\n</tool_call>{% endfor %}<|im_end|>\n"
    + _RESPONSE
    + "{% endfor %}"
    + _GENERATE
)
CODER = QWEN25.replace(
    _JSON_CALL,
    "<function={{ c['function']['name'] }}>\n{% for k, v in c['function']['arguments'].items() %}<parameter={{ k"
    " }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>",
)
LLAMA3 = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nTools:{% for t in tools %}\n{{ t |"
    " tojson }}{% endfor %}<|eot_id|>{% endif %}{% for m in messages %}{% if m['tool_calls'] %}{% if m['tool_calls'] |"
    " length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}{% set f = m['tool_calls'][0]['function']"
    ' %}<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ f[\'name\'] }}", "parameters": {{'
    " f['arguments'] | tojson }}}<|eot_id|>{% elif m['role'] == 'tool'"
    " %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m['content'] | tojson }}<|eot_id|>{% else"
    " %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endif %}{% endfor"
    " %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA4 = (
    "<|begin_of_text|>{% if tools %}<|header_start|>system<|header_end|>\n\nTools:{% for t in tools %}\n{{ t | tojson"
    " }}{% endfor %}<|eot|>{% endif %}{% for m in messages %}<|header_start|>{{ 'ipython' if m['role'] == 'tool' else"
    " m['role'] }}<|header_end|>\n\n{% if m['tool_calls'] %}<|python_start|>[{% for c in m['tool_calls'] %}{{"
    " c['function']['name'] }}({% for k, v in c['function']['arguments'].items() %}{{ k }}={{ v | tojson }}{{ ', ' if"
    " not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|python_end|>{% else %}{{ m['content'] }}{%"
    " endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0"
    " %}{% endif %}{% endfor %}{% for m in messages %}{% if m['role'] == 'user' %}{% if tools and loop.index0 =="
    " ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {% if"
    " loop.index0 == ns.last and messages[0]['role'] == 'system' %}{{ messages[0]['content']"
    " }}\n\n{% endif %}{{ m['content']"
    " }}[/INST]{% elif m['tool_calls'] %}[TOOL_CALLS] [{% for c in m['tool_calls'] %}{% if c['id'] | length != 9 %}{{"
    " raise_exception('ids of calls have 9 characters') }}{% endif %}{\"name\": \"{{ c['function']['name'] }}\","
    " \"arguments\": {{ c['function']['arguments'] | tojson }}, \"id\": \"{{ c['id'] }}\"}{{ ', ' if not loop.last }}{%"
    " endfor %}]</s>{% elif m['role'] == 'tool' %}{% if not messages[loop.index0 - 1]['tool_calls'] and"
    " messages[loop.index0 - 1]['role'] != 'tool' %}{{ raise_exception('a result needs a call') }}{% endif"
    ' %}[TOOL_RESULTS] {"content": {{ m[\'content\'] | tojson }}, "call_id": "{{ m[\'tool_call_id\']'
    " }}\"}[/TOOL_RESULTS]{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and"
    " assistant take turns') }}{% endif %}{% if m['role'] == 'user' %}<s>[INST] {{ m['content'] | trim }} [/INST]{%"
    " else %} {{ m['content'] | trim }} </s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in"
    " messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate')"
    " }}{% endif %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim"
    " }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}{% if m['role'] in ['user', 'assistant', 'system'] %}<|{{ m['role'] }}|>\n{{ m['content']"
    " }}<|end|>\n{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages"
    " %}{% if m['role'] == 'system' %}{{ m['content'] }}{% elif m['role'] == 'user'"
    " %}<｜User｜>{{ m['content'] }}{% elif m['tool_calls']"
    " %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m['tool_calls'] %}<｜tool▁call▁begin｜>{{ c['type']"
    " }}<｜tool▁sep｜>{{ c['function']['name'] }}\n```json\n{{ '' + c['function']['arguments']"
    " }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% elif m['role'] == 'assistant'"
    " %}<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}<｜end▁of▁sentence｜>{% elif m['role'] == 'tool'"
    " %}<｜tool▁output▁begin｜>{{ m['content'] }}<｜tool▁output▁end｜>{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
COMMAND = (
    "<BOS_TOKEN>{% if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ tools | tojson }}<|END_OF_TURN_TOKEN|>{% endif"
    " %}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m['role'] == 'user' %}<|USER_TOKEN|>{{ m['content'] }}{%"
    " elif m['tool_calls'] %}<|CHATBOT_TOKEN|><|START_ACTION|>[{% for c in m['tool_calls'] %}{\"tool_call_id\": \"{{"
    " loop.index0 }}\", \"tool_name\": \"{{ c['function']['name'] }}\", \"parameters\": {{ c['function']['arguments'] |"
    " tojson }}}{{ ', ' if not loop.last }}{% endfor %}]<|END_ACTION|>{% elif m['role'] == 'tool'"
    " %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m['content'] }}<|END_TOOL_RESULT|>{% else"
    " %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m['content'] }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor"
    " %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m['role'] =="
    " 'tool' %}{% if messages[loop.index0 - 1]['role'] != 'tool' %}<|observation|>{% endif %}\n<tool_response>\n{{"
    " m['content'] }}\n</tool_response>{% else %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% for c in m['tool_calls'] or"
    " [] %}<tool_call>{{ c['function']['name'] }}\n{% for k, v in c['function']['arguments'].items() %}<arg_key>{{ k"
    " }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}{% if"
    " '<|channel|>' in m['content'] %}{{ raise_exception('channels are written by the template') }}{% endif %}{% if"
    " m['role'] == 'user' %}<|start|>user<|message|>{{ m['content'] }}<|end|>{% elif m['role'] == 'tool'"
    " %}<|start|>functions.{{ m['name'] or 'x' }} to=assistant<|channel|>commentary<|message|>{{ m['content'] | tojson"
    " }}<|end|>{% elif m['tool_calls'] %}{% if m['thinking'] %}<|start|>assistant<|channel|>analysis<|message|>{{"
    " m['thinking'] }}<|end|>{% endif %}{% set f = m['tool_calls'][0]['function']"
    " %}<|start|>assistant<|channel|>commentary to=functions.{{ f['name'] }} <|constrain|>json<|message|>{{"
    " f['arguments'] | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m['content']"
    " }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_OSLO = '{"city": "Oslo"}'
FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        QWEN25,
        CHATML,
        ("<|im_end|>",),
        "hermes",
        f'<tool_call>\n{{"name": "look_up", "arguments": {_OSLO}}}\n</tool_call>',
    ),
    "qwen3": Family(
        QWEN3,
        CHATML,
        ("<|im_end|>",),
        "hermes",
        f'<tool_call>\n{{"name": "look_up", "arguments": {_OSLO}}}\n</tool_call>',
        thought="<think>\nhm\n</think>\n\n",
        user="rewrites history",
    ),
    "qwen3-coder": Family(
        CODER,
        CHATML,
        ("<|im_end|>",),
        "coder",
        "<tool_call>\n<function=look_up>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    ),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        "llama",
        f'{{"name": "look_up", "parameters": {_OSLO}}}',
    ),
    "llama4": Family(
        LLAMA4,
        ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>"),
        ("<|eot|>",),
        "pythonic",
        '<|python_start|>[look_up(city="Oslo")]<|python_end|>',
    ),
    "mistral": Family(
        MISTRAL,
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
        ),
        ("</s>",),
        "mistral",
        f'[TOOL_CALLS] [{{"name": "look_up", "arguments": {_OSLO}, "id": "call00000"}}]',
    ),
    "llama2": Family(LLAMA2, ("<s>", "</s>"), ("</s>",), None, tool="refused messages"),
    "gemma": Family(
        GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), None, tool="refused messages"
    ),
    "phi": Family(
        PHI, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), ("<|end|>",), None, tool="refused messages"
    ),
    "deepseek": Family(
        DEEPSEEK,
        (
            *(
                "<｜begin▁of▁sentence｜>",
                "<｜end▁of▁sentence｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
            ),
            *(
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁output▁begin｜>",
                "<｜tool▁output▁end｜>",
            ),
        ),
        ("<｜end▁of▁sentence｜>",),
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{_OSLO}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        thought="hm\n</think>\n\n",
        user="rewrites history",
        tool="rewrites history",
    ),
    "command": Family(
        COMMAND,
        (
            *(
                "<BOS_TOKEN>",
                "<|START_OF_TURN_TOKEN|>",
                "<|END_OF_TURN_TOKEN|>",
                "<|USER_TOKEN|>",
                "<|CHATBOT_TOKEN|>",
                "<|SYSTEM_TOKEN|>",
            ),
            *(
                "<|START_ACTION|>",
                "<|END_ACTION|>",
                "<|START_RESPONSE|>",
                "<|END_RESPONSE|>",
                "<|START_TOOL_RESULT|>",
                "<|END_TOOL_RESULT|>",
            ),
        ),
        ("<|END_OF_TURN_TOKEN|>",),
        "cohere",
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "look_up", "parameters": {_OSLO}}}]<|END_ACTION|>',
    ),
    "glm": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|user|>", "<|observation|>"),
        "glm",
        "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    ),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        ("<|return|>", "<|call|>"),
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look_up"
        f" <|constrain|>json<|message|>{_OSLO}",
        user="channels are written by the template",
    ),
}


def tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Bytes, and the family's special tokens whole."""
    made = raw_bytes()
    made.add_special_tokens({"additional_special_tokens": list(family.specials)})  # type: ignore[dict-item]
    # a line end behind a tag is otherwise left out
    made.chat_template = family.template.replace("%}\n", "%}{{ '\\n' }}")
    return made


def renderer(family: Family, history: History = "append") -> Renderer:
    words = tokenizer(family)
    return Renderer(words, [words.convert_tokens_to_ids(s) for s in family.stops], history=history)
