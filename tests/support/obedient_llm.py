"""A model for client programs: it does what its prompt says, and sees nothing but the prompt.

The prompt is rendered by the server from whatever a client sent, so an answer is right only if the
messages, tools and results of the client reached the template.
"""

import json
import re
from collections.abc import Iterator

from scripted_llm import ScriptedLLM, ScriptedStream

# In the manner of Qwen3.5's: a system message is first or refused, calls are tags.
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{- raise_exception('System message must be at the beginning.') -}}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'tool' %}{{ '<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{ m.content or '' }}{% endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) -}}
{{- '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- for tool in tools or [] -%}
{{- '<|tool|>' + (tool.function | tojson) + '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
"""
_CALL = re.compile(r"\bCALL (\S+) (\{.*\})")
_SAY = re.compile(r"\bSAY (.*?)(?:<\|im_end\|>)?$", re.MULTILINE)
_OFFERED = re.compile(r"^<\|tool\|>(.*)$", re.MULTILINE)
# The second form is that of smolagents, which sends results as the user's words.
_RESULT = re.compile(
    r"<tool_response>\n(.*?)\n</tool_response>|\bObservation:\n(.*?)(?=<\|im_end\|>|\nNew task:)",
    re.DOTALL,
)


def reply(prompt: str) -> str:
    """Return the answer to a rendered prompt.

    Orders are lines after the last result: `CALL name {"argument": value}` is obeyed if such a tool
    is offered, and `SAY text` if nothing is to be called. Without orders, the last result is
    repeated.
    """
    results = list(_RESULT.finditer(prompt))
    recent = prompt[results[-1].end() :] if results else prompt
    offered = {json.loads(tool)["name"] for tool in _OFFERED.findall(prompt)}
    calls = [found for order in _CALL.finditer(recent) if (found := _order(*order.groups()))]
    calls = [(name, arguments) for name, arguments in calls if name in offered]
    if calls:
        return "I shall.\n" + "\n".join(_call(name, given) for name, given in calls)
    if said := _SAY.findall(recent):
        return said[-1]
    if not results:
        return "There is no result."
    answer = f"It says: {next(filter(None, results[-1].groups()), '').strip()}"
    return _call("final_answer", {"answer": answer}) if "final_answer" in offered else answer


def _order(name: str, arguments: str) -> tuple[str, dict] | None:
    """Return an order, or None if it is only quoted, as in requests for the title of a chat."""
    try:
        return name, json.loads(arguments)
    except json.JSONDecodeError:
        return None


def _call(name: str, arguments: dict) -> str:
    written = ""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        written += f"<parameter={key}>\n{text}\n</parameter>\n"
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def _pieces(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


class ObedientLLM(ScriptedLLM):
    """`prompts` keeps every rendered prompt."""

    max_model_len = 200_000

    def __init__(self):
        super().__init__([], TEMPLATE)
        self.prompts: list[str] = []

    async def submit_chat(self, *args, **options):
        stream = await super().submit_chat(*args, **options)
        self.prompts.append(stream.prompt)
        pieces = _pieces(reply(stream.prompt), 7)
        return ScriptedStream(stream.prompt, stream.prompt_token_ids, [*pieces], "stop")
