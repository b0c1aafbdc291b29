"""Chat templates that treat earlier messages otherwise than the last ones, and tokenizers."""

import json
import shutil

from jaxspec.api.loading import EMBEDDED_MODEL

# In the manner of Qwen3.5's: what was thought before the user's last message is dropped, results of
# tools come as the user's, and a prompt ends with the thought's beginning.
DROPS_THINKING = """\
{%- set users = namespace(left=messages | selectattr('role', 'equalto', 'user') | list | length) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set users.left = users.left - 1 -%}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if users.left == 0 -%}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' -}}{% endif -%}
"""
KEEPS_ALL = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif -%}
"""
PLAIN = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor -%}
{%- if add_generation_prompt %}assistant:{% endif -%}
"""
ONE_MESSAGE = (
    "{{ raise_exception('one message') if messages | length > 1 }}{{ messages[0].content }}"
)


def words_folder(path, template):
    """The embedded model's tokenizer, which splits into words, with the tokens of chats; NFC."""
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", path)
    settings = json.loads((path / "tokenizer.json").read_text())
    settings["normalizer"] = {"type": "NFC"}
    (end,) = settings["added_tokens"]
    names = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    settings["added_tokens"] += [
        end | {"id": 2048 + n, "content": name} for n, name in enumerate(names)
    ]
    (path / "tokenizer.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(template)
    return path
