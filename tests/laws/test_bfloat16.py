"""In bfloat16 the way in which a request is computed changes no token, and its logprobs little.

Kept prefixes, preemption, another engine and `score` compute the same numbers in other programs and
other chunks. They agree as long as each program rounds where the model says (`XLA_OPTIONS`).
"""

import numpy as np
import pytest
from harness import FIXTURES

from jaxspec import LLM, SamplingParams
from jaxspec.requests.sampling_features import EVERYTHING, LADDER
from jaxspec.runner.warmup import programs

BOUND = 0.03  # nats, of a token's logprob; 1e-6 is seen
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)


def make():
    llm = LLM(
        FIXTURES / "nemotron_h",
        dtype="bfloat16",
        max_num_seqs=2,
        max_model_len=128,
        decode_buckets=[2],
        prefill_buckets=[16, 48],
        num_pages=11,
        speculative_config=None,
        enable_prefix_caching=True,
        prefix_cache_share=0.6,
        checkpoint_interval=16,
        steps_per_dispatch=1,
        skip_tokenizer_init=True,
    )
    compiler = llm._compiler
    compiler._in_turn(
        lambda: compiler._compile(
            programs(compiler._runner.shapes, compiler._limits, [LADDER[-1], EVERYTHING])
        )
    )
    compiler._served = frozenset(LADDER)
    return llm


@pytest.fixture(scope="module")
def llm():
    return make()


@pytest.fixture(scope="module")
def prompts(llm):
    random = np.random.default_rng(0)
    lengths = 70, 61
    return [{"prompt_token_ids": random.integers(0, llm.vocab_size, n).tolist()} for n in lengths]


def told(output):
    (sample,) = output.outputs
    logprobs = [at[id].logprob for at, id in zip(sample.logprobs, sample.token_ids, strict=True)]
    return list(sample.token_ids), np.array(logprobs)


@pytest.fixture(scope="module")
def alone(llm, prompts):
    """Ids and logprobs of each prompt by itself, computed from its first token on."""
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    return [told(output) for output in outputs]


def check(outputs, alone):
    for output, (ids, logprobs) in zip(outputs, alone, strict=True):
        found, others = told(output)
        assert found == ids
        np.testing.assert_allclose(others, logprobs, rtol=0, atol=BOUND)


@pytest.mark.soak
def test_a_kept_prefix_changes_no_token(llm, prompts, alone):
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts[::-1] for _ in range(2)]
    assert all(output.num_cached_tokens >= 48 for output in outputs[1::2])
    check([outputs[2], outputs[0]], alone)
    check([outputs[3], outputs[1]], alone)


@pytest.mark.soak
def test_a_preemption_changes_no_token(llm, prompts, alone):
    before = llm.metrics()["num_preemptions"]
    outputs = llm.generate(prompts, PARAMS)
    assert llm.metrics()["num_preemptions"] > before
    check(outputs, alone)


@pytest.mark.soak
def test_another_engine_goes_on_with_the_same_tokens(llm, prompts, alone):
    other = make()
    for prompt, (ids, _) in zip(prompts, alone, strict=True):
        with llm.stream(prompt, PARAMS, request_id="moves") as pieces:
            found = list(next(pieces).token_ids)
            state = llm.export_request("moves")
            found += [id for piece in pieces for id in piece.token_ids]
        assert 0 < len(found) < PARAMS.max_tokens
        found += [id for piece in other.import_request(state) for id in piece.token_ids]
        assert found == ids
    other.close()


@pytest.mark.soak
def test_score_gives_the_logprobs_of_what_was_generated(llm, prompts, alone):
    for prompt, (ids, logprobs) in zip(prompts, alone, strict=True):
        (score,) = llm.score([{"prompt_token_ids": prompt["prompt_token_ids"] + ids}])
        scored = np.array(score.token_logprobs[-len(ids) :])
        np.testing.assert_allclose(scored, logprobs, rtol=0, atol=BOUND)
