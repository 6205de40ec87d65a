"""Chat templates with the structure of known families, written for tests, and tokenizers for them: a token per
character, and one per marker of the family."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

CHATML_TOOLS = """
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}"""
CHATML_CALLS = """
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
"""
CHATML_TOOL = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}"""

QWEN25 = CHATML_TOOLS + """{% for m in messages %}{% if m.role == 'tool' %}""" + CHATML_TOOL + """
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}""" + CHATML_CALLS + """{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# thinking is kept after the last message of the user, and left out before it; the last turn always has a block for it
QWEN3 = CHATML_TOOLS + """{% set ns = namespace(last=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{%- if m.role == 'tool' %}""" + CHATML_TOOL + """{% elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}{% set content = m.content %}
{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}""" + CHATML_CALLS + """{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA31 = """{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('only one call') }}{% endif %}{% set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{"name": "{{ call.name }}", "parameters":
{{- ' ' }}{{ call.arguments | tojson }}}<|eot_id|>{% elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}<|eot_id|>{% else %}
{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}{% if tools and loop.first %}{% for tool in tools %}
{{- tool | tojson }}
{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}<start_of_turn>developer
<start_function_response>response:{{ m.name }}{value:<escape>{{ m.content }}<escape>}<end_function_response>
{%- else %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if tools and loop.first %}{% for tool in tools %}declaration:{{ tool.function.name }}
{% endfor %}{% endif %}{{ m.content | trim }}{% for call in m.tool_calls or [] %}<start_function_call>call:
{{- call.function.name }}{{ '{' }}{% for k, v in call.function.arguments.items() %}{{ k }}:<escape>{{ v }}<escape>
{%- endfor %}}<end_function_call>{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == 0 %}
{{- '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('id') }}
{%- endif %}
{{- '[TOOL_CALLS]' }}{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}[TOOL_RESULTS]
{{- m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""

DEEPSEEK = """{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}<｜Assistant｜></think>
{{- m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}<｜tool▁call▁begin｜>
{{- call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}{% if add_generation_prompt %}
{{- '<｜Assistant｜></think>' }}{% endif %}"""

# thinking is kept until the model gives a final answer
HARMONY = """<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>{% for tool in tools or [] %}
{{- tool | tojson }}{% endfor %}{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' %}
{%- if m.tool_calls %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}{% set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.name -}}
<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}
{%- if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' }}{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- endif %}{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

PHI = """{% for tool in tools or [] %}<|tool|>{{ tool | tojson }}<|/tool|>{% endfor %}{% for m in messages %}
{{- '<|' ~ m.role ~ '|>' }}
{{- m.content }}{% if m.tool_calls %}<|tool_call|>[{% for call in m.tool_calls %}{"name": "{{ call.function.name }}",
{{- ' "arguments": ' }}{{ call.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]<|/tool_call|>
{%- endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A chat template and its tokens."""

    template: str                # in Jinja
    markers: tuple[str, ...]     # tokens of its own
    ends: tuple[str, ...]        # of them, those that end a turn
    call: str                    # how a model of it calls `add` with a=2 and b="x y"
    text: str = "It is 4."       # how it answers in plain text


JSON = '{"a": 2, "b": "x y"}'
CHATML = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
TAGGED = '<tool_call>\n{"name": "add", "arguments": ' + JSON + "}\n</tool_call><|im_end|>"
FAMILIES = {
    "Qwen2.5": Family(QWEN25, CHATML, ("<|im_end|>",), TAGGED, "It is 4.<|im_end|>"),
    "Qwen3": Family(QWEN3, (*CHATML, "<think>", "</think>"), ("<|im_end|>",), f"<think>\nhm\n</think>\n\n{TAGGED}",
                    "<think>\nno {call}\n</think>\n\nIt is 4.<|im_end|>"),
    "Llama 3.1": Family(LLAMA31, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                                  "<|eom_id|>", "<|python_tag|>"), ("<|eot_id|>", "<|eom_id|>"),
                        '<|python_tag|>{"name": "add", "parameters": ' + JSON + "}<|eom_id|>", "It is 4.<|eot_id|>"),
    "Gemma": Family(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>",
                            "<escape>"), ("<end_of_turn>",),
                    "<start_function_call>call:add{a:2,b:<escape>x y<escape>}<end_function_call><end_of_turn>",
                    "It is 4.<end_of_turn>"),
    "Mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]",
                                "[/TOOL_RESULTS]"), ("</s>",), f"[TOOL_CALLS]add[ARGS]{JSON}</s>", "It is 4.</s>"),
    "DeepSeek": Family(DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
                                  "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                                  "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"), ("<｜end▁of▁sentence｜>",),
                       f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
                       "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "It is 4.<｜end▁of▁sentence｜>"),
    "gpt-oss": Family(HARMONY, ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
                      ("<|return|>", "<|call|>"),
                      "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary "
                      f"json<|message|>{JSON}<|call|>", "<|channel|>final<|message|>It is 4.<|return|>"),
    "Phi": Family(PHI, ("<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>",
                        "<|end|>"), ("<|end|>",), '<|tool_call|>[{"name": "add", "arguments": ' + JSON +
                  "}]<|/tool_call|><|end|>", "It is 4.<|end|>"),
}


def make(family: Family) -> Any:
    """A tokenizer with this family's template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys(["<pad>", *string.printable, "｜", "▁"])
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    begin = {"bos_token": family.markers[0]} if family.markers[0] in ("<s>", "<bos>", "<|begin_of_text|>",
                                                                     "<｜begin▁of▁sentence｜>") else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token=family.ends[0], **begin,
                                        additional_special_tokens=list(family.markers))
    tokenizer.chat_template = family.template
    return tokenizer


def ends(tokenizer: Any, family: Family) -> list[int]:
    """The ids that end a turn."""
    return [int(i) for i in tokenizer.convert_tokens_to_ids(list(family.ends))]


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "One."},
                                     "b": {"type": "string", "description": "Other."}}, "required": ["a", "b"]}}}
