"""Updates of models with published vocabularies, heads and experts, in mid-generation."""

import dataclasses

import numpy as np
import pytest
from pairwise import soak
from real_models import make_llm, write_small

from jaxspec import SamplingParams

PROMPT = {"prompt_token_ids": [*range(1000, 1020), *range(1000, 1020)]}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDS = ("embed_tokens.weight", "lm_head.weight")
NAMES = ("qwen3.5-0.8b", soak("nemotron-3.5-lightning-30b-a3b"), soak("lfm2-8b-a1b"))


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_what_follows_an_update_is_of_the_new_weights(name, tmp_path):
    """As the text so far is continued by them, also after a sleep; an update back undoes it."""
    with make_llm(write_small(name, tmp_path), max_model_len=128, skip_tokenizer_init=True) as llm:
        whole = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        old = llm.export_weights()
        new = {
            name: np.roll(each, 7, axis=0) if name.endswith(ENDS) else each
            for name, each in old.items()
        }
        with llm.stream(PROMPT, PARAMS) as deltas:
            first = next(deltas)
            update = llm.update_weights(new, mode="recompute")
            llm.sleep()
            llm.wake_up()
            rest = list(deltas)
        tokens = [token for delta in (first, *rest) for token in delta.token_ids]
        spans = [span for delta in (first, *rest) for span in delta.weight_versions]
        place = sum(span.end - span.start for span in spans if span.version != update.version)
        assert 0 < place < len(tokens) == PARAMS.max_tokens
        assert tokens[:place] == whole[:place]
        so_far = {"prompt_token_ids": [*PROMPT["prompt_token_ids"], *tokens[:place]]}
        left = dataclasses.replace(PARAMS, max_tokens=len(tokens) - place)
        assert tokens[place:] == llm.generate(so_far, left)[0].outputs[0].token_ids
        llm.update_weights(old)
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == whole
