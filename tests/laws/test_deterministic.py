"""A deterministic engine computes a token's logprob with the same bits, however it computes it.

`score` reads a text as a prompt. Generating the same text runs other programs, by itself or beside
others, from a cached prefix or from the first token on, with accepted and rejected drafts.
"""

import dataclasses
import json
from unittest import mock

import jax
import numpy as np
import pytest
from harness import FIXTURES, HYBRID, folder_of
from pairwise import soak

from jaxspec import LLM, SamplingParams
from jaxspec.models import parse_config
from jaxspec.models.config import NO_FEED_FORWARD, NO_MIXER, READ_SLIDING
from jaxspec.models.layers.decoder import FEED_FORWARDS, MIXERS
from jaxspec.pallas.row_tiles import carry_over_tiles
from jaxspec.plan.plan import AfterForwardPass, ForwardPass
from jaxspec.requests.sampling_features import EVERYTHING, GREEDY, LADDER
from jaxspec.runner import step, token_tiles
from jaxspec.runner.warmup import programs

GREEDY_TEXT = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=24, logprobs=0, ignore_eos=True)
LENGTHS = 70, 61
# As texts repeat, the second request drafts what the first one generated.
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3}
RATES = [0.8, 0.6, 0.4]
FAMILIES = [
    *("llama", "qwen3_5_moe", "mamba2", "nemotron_h", "falcon_h1", "lfm2", "gpt_oss"),
    *("kimi_linear", "deepseek_v3", "deepseek_v32", "granitemoehybrid", "nemotron_h_latent"),
    *("bailing_hybrid", "gemma4_moe", "gemma4_shared"),
]


OPTIMIZED = pytest.mark.usefixtures("optimized")


@pytest.fixture
def optimized(fresh_programs):
    """Let XLA fuse as it does in engines; the fusions are what could differ between programs."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def make(name="qwen3_5", dtype="bfloat16", rungs=(LADDER[-1],), **options):
    llm = LLM(
        folder_of(name),
        **{
            "dtype": dtype,
            "deterministic": True,
            "speculative_config": DRAFTS,
            "max_num_seqs": 2,
            "max_model_len": 128,
            "decode_buckets": [2],
            "prefill_buckets": [48],
            "num_pages": 24,
            "prefix_cache_share": 0.6,
            "checkpoint_interval": 16,
            "skip_tokenizer_init": True,
            **options,
        },
    )
    compile_some(llm, rungs)
    return llm


def compile_some(llm, rungs):
    """Compile the programs of these features, but those for masks of the host."""
    compiler = llm._compiler
    every = programs(compiler._runner.shapes, compiler._limits, rungs)
    some = [each for each in every if not isinstance(each, ForwardPass | AfterForwardPass)]
    compiler._in_turn(lambda: compiler._compile(some))
    compiler._served = frozenset(LADDER)


def prompts(llm, lengths=LENGTHS):
    random = np.random.default_rng(0)
    return [{"prompt_token_ids": random.integers(0, llm.vocab_size, n).tolist()} for n in lengths]


def told(outputs):
    """The ids of each output and their logprobs."""
    samples = [output.outputs[0] for output in outputs]
    return [
        (
            sample.token_ids,
            [at[id].logprob for at, id in zip(sample.logprobs, sample.token_ids, strict=True)],
        )
        for sample in samples
    ]


def scored(llm, texts, lengths=LENGTHS):
    """What `told` returns of these texts, by reading them."""
    scores = llm.score(
        [
            {"prompt_token_ids": prompt["prompt_token_ids"] + list(ids)}
            for prompt, (ids, _) in zip(prompts(llm, lengths), texts, strict=True)
        ],
        logprobs_mode="raw_logprobs",
    )
    return [
        (ids, score.token_logprobs[-len(ids) :])
        for score, (ids, _) in zip(scores, texts, strict=True)
    ]


def alone(llm, params=GREEDY_TEXT, lengths=LENGTHS):
    return told([llm.generate([prompt], params)[0] for prompt in prompts(llm, lengths)])


def accepted(llm):
    [counts] = llm.metrics()["acceptance"].values()
    return sum(counts["accepted_per_position"])


def check(llm, params=GREEDY_TEXT, lengths=LENGTHS):
    """Return the texts, which have the same bits by themselves, again, together and as prompts."""
    texts = alone(llm, params, lengths)
    again = [llm.generate([prompt], params)[0] for prompt in prompts(llm, lengths)]
    assert told(again) == texts
    assert told(llm.generate(prompts(llm, lengths), params)) == texts
    assert scored(llm, texts, lengths) == texts
    return texts, again


@pytest.mark.parametrize("dtype", ["bfloat16", soak("float32")])
def test_generated_and_scored_tokens_have_the_same_bits(dtype):
    llm = make(HYBRID, dtype)
    _, again = check(llm)
    assert all(output.num_cached_tokens >= 48 for output in again)
    assert accepted(llm) >= 40
    llm.close()


@pytest.mark.soak
@OPTIMIZED
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("params", [GREEDY_TEXT, DRAWN], ids=["greedy", "drawn"])
def test_neither_drafts_nor_chunks_nor_programs_change_a_bit(dtype, params):
    llm = make(dtype=dtype)
    texts, _ = check(llm, params)
    llm.close()
    plain = make(
        dtype=dtype,
        speculative_config=None,
        decode_buckets=[1, 2],
        prefill_buckets=[16, 32],
        max_model_len=112,
        steps_per_dispatch=2,
        rungs=(LADDER[-1], GREEDY if params is GREEDY_TEXT else EVERYTHING),
    )
    assert check(plain, params)[0] == texts
    silent = dataclasses.replace(params, logprobs=None)
    silent_outputs = plain.generate(prompts(plain), silent)
    assert [output.outputs[0].token_ids for output in silent_outputs] == [ids for ids, _ in texts]
    plain.close()


@pytest.mark.soak
@OPTIMIZED
def test_a_preemption_changes_no_bit():
    llm = make(num_pages=11)
    texts = alone(llm)
    before = llm.metrics()["num_preemptions"]
    assert told(llm.generate(prompts(llm), GREEDY_TEXT)) == texts
    assert llm.metrics()["num_preemptions"] > before
    assert scored(llm, texts) == texts
    llm.close()


@pytest.mark.soak
@OPTIMIZED
def test_an_imported_request_has_the_bits_of_its_score():
    llm = make()
    texts = alone(llm)
    states = [llm.prefill(prompt, GREEDY_TEXT) for prompt in prompts(llm)]
    llm.reset_prefix_cache()
    for state, text in zip(states, texts, strict=True):
        assert state.num_computed == len(state.prompt_token_ids) - 1
        deltas = list(llm.import_request(state))
        ids = [id for delta in deltas for id in delta.token_ids]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        found = [entry[id].logprob for entry, id in zip(entries, ids, strict=True)]
        assert (ids, found) == text
    assert scored(llm, texts) == texts
    llm.close()


@pytest.mark.soak
@OPTIMIZED
def test_the_width_of_page_tables_changes_no_bit():
    """Attention reads 128 positions, or 256 once a request is longer."""
    lengths = 120, 150
    llm = make(max_model_len=300, num_pages=48)
    texts, _ = check(llm, lengths=lengths)
    llm.close()
    plain = make(max_model_len=500, num_pages=48, speculative_config=None)
    assert alone(plain, lengths=lengths) == texts
    plain.close()


def test_the_families_have_every_type_of_layer():
    folders = [FIXTURES / name for name in ("qwen3_5", *FAMILIES)]
    configs = [parse_config(json.loads((each / "config.json").read_text())) for each in folders]
    mixers = {kind for config in configs for kind in config.layer_types}
    feed_forwards = {kind for config in configs for kind in config.feed_forward_types}
    assert mixers - {NO_MIXER} == set(MIXERS) - {READ_SLIDING}  # of a drafter alone
    assert feed_forwards - {NO_FEED_FORWARD} == set(FEED_FORWARDS)


@pytest.mark.soak
@OPTIMIZED
@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_layer_has_the_same_bits(name):
    llm = make(name)
    check(llm)
    llm.close()


@pytest.mark.soak
@OPTIMIZED
def test_drafts_of_an_assistant_change_no_bit():
    """Accepted as often as those of a trained one; the text is of drafts, so these recur, too."""
    assistant = {"method": "assistant", "model": str(FIXTURES / "gemma4_assistant")}
    assistant |= {"synthetic_acceptance_rates": RATES}
    llm = make("gemma4_shared", speculative_config={**DRAFTS, **assistant})
    check(llm, dataclasses.replace(GREEDY_TEXT, seed=3))  # which drafts are accepted is drawn
    assert accepted(llm) >= 40
    llm.close()


@pytest.mark.soak
@OPTIMIZED
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "kimi_linear", "nemotron_h", "gemma4_moe"])
def test_tiles_of_several_tokens_have_the_same_bits(name, monkeypatch):
    """As on a GPU; in bfloat16, whose roundings hide how LLVM compiles the rows of a tile."""

    def in_tiles(*args, size, **options):
        return carry_over_tiles(*args, size=8, **options)

    spy = mock.Mock(side_effect=in_tiles)
    monkeypatch.setattr(token_tiles, "carry_over_tiles", spy)
    llm = make(name)
    assert spy.called  # no program of another engine is used
    check(llm)
    llm.close()


def prompts_in_chunks(model, inputs, pools, taps, *, page_size):
    return model.forward(inputs, pools, taps)


@pytest.mark.soak
@OPTIMIZED
def test_prompts_in_chunks_are_seen(monkeypatch):
    planted = mock.Mock(side_effect=prompts_in_chunks)
    monkeypatch.setattr(step, "forward_in_tiles", planted)
    llm = make(dtype="float32")
    assert planted.called
    texts = alone(llm)
    assert scored(llm, texts) != texts
    llm.close()
