"""Chat templates of a checkpoint in a plan, against transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.compiler.checkpoint import checkpoint_hashes
from outrider.compiler.identity import engines_key
from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import CheckpointError, RequestError
from tests import tokenizer_families as families
from tests.compiler.checkpoint_texts import checkpoint, loaded, prompt_ids, read

# Templates with what those of the families do, each kind of thing once.
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- set begins = messages[0].content if messages[0].content is string else messages[0].content[0].text -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set begins, rest = '', messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Turns go from user to model and back") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
    {{ begins + '\n\n' if loop.first and begins -}}
    {%- if message['content'] is string -%}
        {{ message.content | trim }}
    {%- elif message.content is iterable -%}
        {%- for part in message.content if part.type == 'text' -%}{{ part['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception('No content') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
QWEN = """{%- set ns = namespace(last=messages|length - 1, text="Today is " ~ strftime_now('%B %d, %Y')) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools if messages | selectattr("role", "equalto", "user") | list %}
        {%- for key, value in tool.function.items() if key != 'return' %}
            {{- key + ': ' }}{{- value | tojson(ensure_ascii=True) if value is not string else value }}
        {%- endfor %}
    {%- endfor %}
    {{- "<|im_end|>\\n" + tools | tojson(indent=4) }}
{%- endif %}
{%- for document in documents or [] %}{{- loop.index0 ~ ' ' ~ document.title ~ '\\n' ~ document['text'] }}{%- endfor %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not (message.content.startswith('<r>')) %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is not defined %}{%- continue %}{%- endif %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if reasoning and loop.index0 > ns.last %}
        {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if message.tool_calls %}{{- message.tool_calls | map(attribute='function') | list | tojson }}{%- endif %}
    {%- generation %}{{- message.content.lstrip('\\n') }}{%- set inner = 1 %}{%- endgeneration %}
    {{- '' if inner is defined else '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- ns.text + '<|im_start|>assistant\\n' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
HARMONY = """{#- Macros, tests and filters. -#}
{%- macro kind(spec) -%}
    {%- if spec.type == 'array' -%}{{ kind(spec['items']) }}[]
    {%- elif spec.enum -%}{{ '"' + spec.enum | join('" | "') + '"' }}
    {%- else -%}{{ spec.type | default('any', true) }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Date: " + strftime_now("%Y-%m-%d") + "\\n" }}
{{- "Reasoning: " + (reasoning_effort | default('medium')) + "<|end|>" }}
{%- set options = dict(a=1, b=dict.fromkeys(['x'], 2)) -%}
{{- options | tojson(separators=(',', ':'), sort_keys=True) }}
{%- for tool in tools or [] -%}
    {%- for name, spec in tool.function.parameters.properties | dictsort -%}
        {{- "// " ~ name ~ ": " ~ kind(spec) ~ ("" if loop.last else ", ") -}}
    {%- endfor -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "thinking" in message -%}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" ~ message.content ~ "<|return|>" }}
    {%- else -%}
        {{- "<|start|>" + message.role + "<|message|>" ~ message.content ~ "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
{{ pad_token }}{{ image_token }}"""
BLOCKS = """{# White space around blocks is taken up. #}
{{ 'tools' if tools is not none }} {{ documents is defined }}
{% for message in messages %}
  {% if message.role == 'user' %}
    {{ message.content }}
    {% elif true %}
  {{ message.role }}: {{ message.content | trim }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}
"""
PROPERTIES = {"b": {"type": "array", "items": {"enum": ["x", "y"]}}, "a": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOL = {
    "type": "function",
    "function": {"name": "lire", "description": "Lit « é » & <x>", "parameters": PARAMETERS},
}
USER = {"role": "user", "content": "  Où est <l'été> & 日本?\n"}
CALL = {"id": "abc", "type": "function", "function": {"name": "lire", "arguments": {"a": 1, "b": ["é"]}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [{"role": "system", "content": "Sois bref."}, USER],
    "turns": [USER, {"role": "assistant", "content": " Ici.\n"}, {"role": "user", "content": "<r>Merci 😀"}],
    "roles do not alternate": [USER, USER],
    "reasoning": [
        USER,
        {"role": "assistant", "content": "\nIci.", "reasoning": "\nHm.\n", "tool_calls": None},
        {"role": "user", "content": "<r>"},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
    ],
    "calls": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"é": 1}', "tool_call_id": "abc", "name": "lire"},
        {"role": "assistant", "content": "Fait."},
        USER,
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " Un "}, {"type": "text", "text": "deux"}]}],
}
VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"tools": [TOOL]},
    {"documents": [{"title": "T", "text": "é"}, {"title": "U", "text": "x"}], "tools": [TOOL]},
    {"enable_thinking": False, "thinking": True, "controls": {"length": "short"}, "reasoning_effort": "low"},
)
SHAPES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str, dict[str, Any]]] = {
    "gemma": (families.gemma, GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}),
    "qwen": (families.qwen, QWEN, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "gpt-oss": (
        families.gpt_oss, HARMONY,
        {"eos_token": "<|return|>", "pad_token": "<|endoftext|>", "extra_special_tokens": {"image_token": "<|call|>"}},
    ),
    "blocks": (families.olmo, BLOCKS, {"eos_token": "<|endoftext|>"}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_chats_are_rendered_and_encoded_as_in_transformers(shape: str, tmp_path: Path) -> None:
    """All conversations with all variables. Nothing is put before what the template has written: one `<bos>`, not
    two."""
    make, template, special = SHAPES[shape]
    folder = checkpoint(tmp_path / "checkpoint", make(), special | {"chat_template": template})
    tokenizer, oracle = loaded(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    rendered = 0
    for name, messages in CONVERSATIONS.items():
        for variables in VARIABLES:
            for prompt in (True, False):
                if name == "parts" and shape != "gemma":
                    continue
                try:
                    asked = {"tokenize": False, "add_generation_prompt": prompt} | variables
                    expected = oracle.apply_chat_template(messages, **asked)
                except (TemplateError, TypeError):
                    with pytest.raises(RequestError):
                        tokenizer.apply_chat_template(messages, prompt, variables)
                    continue
                assert tokenizer.apply_chat_template(messages, prompt, variables) == expected
                rendered += 1
    assert rendered >= 24
    ids = oracle.apply_chat_template(CONVERSATIONS["turns"], add_generation_prompt=True, return_dict=False)
    assert prompt_ids(CONVERSATIONS["turns"], tokenizer) == ids
    bos = oracle.bos_token_id
    assert bos is None or ids.count(bos) == (1 if "bos_token" in template else 0)
    assert tokenizer.encode("the end") == oracle("the end").input_ids


READS_TOOLS = "{% for t in tools %}{{ t.function.name }}{% endfor %}"
LOOP = "{% for m in messages %}%s{% endfor %}"
OF_TOOLS = LOOP.replace(
    "%s", "{% if m.role == 'tool' %}[{{ m.content | tojson }}]{% else %}{{ m.content }}{{ m.thinking }}{% endif %}"
)
MIXED = LOOP.replace(
    "%s", "{% if m.role == 'system' %}{{ '[S]' + m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
)
TRIMMED = LOOP.replace("%s", "[{{ m.role }}] {{ m.content | trim }}")
OF_PARTS = LOOP.replace("%s", "{% for part in m.content %}<{{ part.text }}>{% endfor %}")
RAISING = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + TRIMMED
SEVERAL = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
PARTS_OF_X = [{"type": "text", "text": "x"}]
SYSTEM, TEXT = {"role": "system", "content": "S"}, {"role": "user", "content": "x"}
PARTS = TEXT | {"content": PARTS_OF_X}


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        *[
            (OF_TOOLS, [TEXT, {"role": "tool", "content": content}])
            for content in ({"t": 21}, [{"t": 21}], PARTS_OF_X, "x", [])
        ],
        *[(OF_TOOLS, [TEXT, {"role": "assistant", key: "T"}, TEXT]) for key in ("thinking", "reasoning_content")],
        (OF_TOOLS, [{"role": "user", "content": [{"type": "image", "url": "x"}, *PARTS_OF_X]}]),
        (MIXED, [SYSTEM, PARTS]),
        (LOOP.replace("%s", "{{ m.content | string | upper }}"), [TEXT]),
    ],
)
def test_other_contents_reach_a_template_as_in_transformers(
    template: str, messages: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "checkpoint", families.qwen(), {"chat_template": template})
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert loaded(folder).apply_chat_template(messages, False) == expected


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (TRIMMED, [{"role": "user", "content": SEVERAL}], "[user] a b"),  # transformers prints lists as Python does
        (OF_PARTS, [{"role": "user", "content": SEVERAL}], "<a>< b>"),
        (OF_PARTS, [TEXT], "<x>"),
        (RAISING, [SYSTEM, {"role": "user", "content": SEVERAL}], "[system] S[user] a b"),
        (MIXED, [SYSTEM, TEXT], "[S]Sx"),
        (MIXED, [SYSTEM | {"content": PARTS_OF_X}, PARTS], "[S]xx"),
        (MIXED, [SYSTEM, PARTS, TEXT], "[S]Sxx"),
        (READS_TOOLS + LOOP.replace("%s", "{{ m.content | trim }}"), [SYSTEM, PARTS], "lireSx"),
        (READS_TOOLS + LOOP.replace("%s", "{{ m.content[0].text }}"), [SYSTEM, TEXT], "lireSx"),
        (LOOP.replace("%s", "{{ m.content | upper }}"), [PARTS], "X"),
    ],
)
def test_a_form_is_learnt_by_role_and_with_what_the_request_has(
    template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    chat = ChatTemplate(template, source="t")
    for _ in range(2):
        assert chat.render(messages, True, {"tools": [TOOL]}) == expected


def named(default: str | None, tool_use: str | None, folder: Path, as_files: bool) -> dict[str, Any]:
    """Settings with, or files of, two templates."""
    both = {name: text for name, text in (("default", default), ("tool_use", tool_use)) if text is not None}
    if not as_files:
        return {"chat_template": [{"name": name, "template": text} for name, text in both.items()]}
    (folder / "additional_chat_templates").mkdir(parents=True)
    files = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
    for name, text in both.items():
        (folder / files[name]).write_text(text, encoding="utf-8")
    return {"chat_template": "of the settings"}


@pytest.mark.parametrize("as_files", [True, False])
def test_conversations_with_tools_have_the_template_that_is_named_for_them(as_files: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    settings = named("plain{{ tools }}", "tools{{ tools }}{{ eos_token }}", folder, as_files)
    checkpoint(folder, families.qwen(), settings | {"eos_token": "<|im_end|>"})
    tokenizer, oracle = loaded(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for variables in ({}, {"tools": [TOOL]}, {"tools": []}, {"tools": None}):
        expected = oracle.apply_chat_template([USER], tokenize=False, **variables)
        assert tokenizer.apply_chat_template([USER], True, variables) == expected
    assert tokenizer.check_chat(tools=True) is not tokenizer.check_chat()
    alone = tmp_path / "alone"
    tokenizer = loaded(checkpoint(alone, families.qwen(), named(None, "tools{{ tools | length }}", alone, True)))
    assert tokenizer.apply_chat_template([USER], True, {"tools": [TOOL]}) == "tools1"
    with pytest.raises(RequestError, match="has no chat template"):
        tokenizer.apply_chat_template([USER])


def test_a_template_for_tools_is_checked_and_identifies_the_checkpoint_and_no_engine(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    settings = named("plain", "{% if tools %}{{ tools[0].function.name }}{% endif %}", folder, as_files=True)
    checkpoint(folder, families.qwen(), settings)
    before = checkpoint_hashes(folder)
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    file.write_text("{{ 1 / 0 }}", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text("{}")
    after = checkpoint_hashes(folder)
    assert before != after
    assert engines_key(before, {}, {}) == engines_key(after, {}, {})
    with pytest.raises(CheckpointError, match=r"tool_use.jinja failed on these messages .* division by zero"):
        read(folder)
