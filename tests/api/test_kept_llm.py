"""One call completes prompts, with an LLM that is kept."""

import pytest

import jaxspec
from jaxspec import SamplingParams
from jaxspec.api import llm as llm_module
from jaxspec.plan.plan import Program

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPT = "def fibonacci(n):"


@pytest.mark.soak
def test_one_prompt_gives_one_output_and_a_list_a_list(short_model):
    single = jaxspec.generate(PROMPT, short_model, GREEDY)
    several = jaxspec.generate([PROMPT], short_model, GREEDY, max_num_seqs=1)
    assert single.outputs[0].token_ids == several[0].outputs[0].token_ids
    assert single.prompt == PROMPT and single.outputs[0].finish_reason == "length"
    assert single.prompt_token_ids == several[0].prompt_token_ids
    (kept,) = llm_module._DEFAULT_LLMS.values()
    assert len([p for p in kept._runner._programs if isinstance(p, Program)]) <= 5


@pytest.mark.soak
def test_an_llm_is_kept_for_equal_options_and_given_up_for_others(short_model):
    def kept(**options):
        jaxspec.generate(PROMPT, short_model, GREEDY, max_num_seqs=1, **options)
        (llm,) = llm_module._DEFAULT_LLMS.values()
        return llm

    first = kept(speculative_config=None)
    assert kept(speculative_config=None) is first is not kept(speculative_config="auto")
