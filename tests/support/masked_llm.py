"""A model that writes random texts of a request's grammar, for clients of the server."""

import random

from grammar_walks import continued, tokenizer_with
from llguidance import LLMatcher
from scripted_llm import ScriptedLLM, ScriptedStream

from jaxspec.grammar import Grammar
from jaxspec.requests.sampling_params import SamplingParams

HERMES = """\
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- for tool in tools or [] %}{{ '<tool_call>' + (tool | tojson) + '</tool_call>\\n' }}{% endfor -%}
{{- '<|im_start|>assistant\\n' -}}
"""
THINKING = HERMES + "{{- '<think>\\n' -}}{# </think> #}"
_ENDINGS = ('"', "}", "]", '"}', "\n</parameter>\n", "</function>\n", "\n</tool_call>", "</think>")


class MaskedLLM(ScriptedLLM):
    """Free answers are "Free."; `seed` numbers the answers."""

    def __init__(self, template: str = HERMES):
        super().__init__([], template)
        self._masks = tokenizer_with()
        self.seed = 0

    async def submit_chat(self, messages, sampling_params=None, **options):
        stream = await super().submit_chat(messages, sampling_params, **options)
        return self._answered(stream)

    async def submit(self, prompt, sampling_params=None, **options):
        return self._answered(await super().submit(prompt, sampling_params, **options))

    def _answered(self, stream: ScriptedStream) -> ScriptedStream:
        assert isinstance(self.params, SamplingParams)
        grammar, text = Grammar.of(self.params, self.tokenizer, stream.prompt), "Free."
        if grammar is not None and grammar.source is not None:
            self.seed += 1
            matcher = LLMatcher(self._masks, grammar.source)
            text = continued(matcher, self._masks, random.Random(self.seed), _ENDINGS)
        pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
        return ScriptedStream(stream.prompt, stream.prompt_token_ids, pieces, "stop")
