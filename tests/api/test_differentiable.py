"""`differentiable`: the logprobs of an engine, and what cannot be trained."""

import asyncio
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES, HYBRID, folder_of, prompts

import jaxspec
from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.models import load_model, unread
from jaxspec.models.layers.weight_form import Form, Grain
from jaxspec.models.layers.weight_matrix import matrices_of
from jaxspec.parallel import Group

OPTIONS = {"dtype": "float32", "max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
OPTIONS |= {"max_model_len": 64}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm():
    with LLM(folder_of(HYBRID), speculative_config=DRAFTS, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def made(llm):
    """The function, compiled once for all texts of these tests."""
    made = jaxspec.differentiable(llm)
    return SimpleNamespace(params=made.params, made=made, logprobs=jax.jit(made.logprobs))


def padded(texts):
    tokens = np.zeros((3, 64), np.int32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    return tokens, np.array([len(text) for text in texts] + [0] * (3 - len(texts)))


@pytest.mark.soak
def test_they_are_the_scores_of_the_engine(llm, made):
    texts = prompts(3, seed=3, longest=50)
    found = made.logprobs(made.params, *padded(texts))
    scores = llm.score([{"prompt_token_ids": list(text)} for text in texts])
    for own, text, scored in zip(np.asarray(found), texts, scores, strict=True):
        want = scored.token_logprobs[1:]
        np.testing.assert_allclose(own[: len(text) - 1], want, rtol=0, atol=1e-5)


@pytest.mark.soak
def test_they_are_the_logprobs_of_generated_tokens(llm, made):
    """With drafts: most of these tokens were verified several at a time."""
    params = SamplingParams(temperature=0.8, max_tokens=24, logprobs=0, seed=1)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts(3, seed=4)], params)
    texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
    found = np.asarray(made.logprobs(made.params, *padded(texts)))
    for own, text, each in zip(found, texts, outputs, strict=True):
        want = each.outputs[0].token_logprobs
        start = len(text) - len(want)
        np.testing.assert_allclose(own[start - 1 : len(text) - 1], want, rtol=0, atol=1e-5)


@pytest.mark.soak
def test_a_step_of_gradient_ascent_makes_a_text_likelier(made):
    tokens, lengths = padded(prompts(3, seed=5, longest=50))

    @jax.jit
    def total(params):
        return jax.value_and_grad(lambda p: made.made.logprobs(p, tokens, lengths).sum())(params)

    before, gradient = total(made.params)
    norm = sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient))
    better = jax.tree.map(lambda leaf, slope: leaf + slope / norm, made.params, gradient)
    assert 0 < float(total(better)[0] - before) < 2


@pytest.mark.soak
def test_master_parameters_may_have_more_digits_than_the_model():
    model = load_model(FIXTURES / "lfm2", jnp.bfloat16)
    made = jaxspec.differentiable(model)
    tokens, lengths = np.arange(24).reshape(2, 12), np.array([12, 7])
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), made.params)
    logprobs = jax.jit(lambda params: made.logprobs(params, tokens, lengths))
    rounded, exact = logprobs(made.params), logprobs(wide)
    assert rounded.dtype == exact.dtype == jnp.float32
    assert 0 < np.abs(rounded - exact).max() < 0.3


def test_an_async_llm_shares_its_parameters():
    async def params_of():
        async with AsyncLLM(folder_of(HYBRID), **OPTIONS) as llm:
            return jaxspec.differentiable(llm).params

    found, want = asyncio.run(params_of()), load_model(folder_of(HYBRID), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, found, jaxspec.differentiable(want).params)


@pytest.mark.parametrize(
    ("tokens", "lengths", "temperature"),
    [
        (np.zeros((2, 3)), np.ones(2, int), 1.0),
        (np.zeros((2, 3), int), np.ones(2), 1.0),
        (np.zeros(3, int), np.ones(1, int), 1.0),
        (np.zeros((2, 3), int), np.ones(3, int), 1.0),
        (np.zeros((0, 3), int), np.ones(0, int), 1.0),
        (np.zeros((2, 0), int), np.ones(2, int), 1.0),
        (np.zeros((2, 3), int), np.ones(2, int), 0.0),
        (np.zeros((2, 3), int), np.ones(2, int), float("nan")),
        (np.zeros((2, 3), int), np.ones(2, int), "warm"),
        (np.zeros((2, 3), int), np.ones(2, int), jnp.ones(2)),
    ],
)
def test_bad_arguments_are_refused(made, tokens, lengths, temperature):
    for call in (made.made.logprobs, made.made.draft_logprobs):
        with pytest.raises(ValueError, match="must be"):
            call(made.params, tokens, lengths, temperature)


def test_models_without_a_head_have_no_draft_logprobs():
    made = jaxspec.differentiable(load_model(FIXTURES / "lfm2", jnp.float32))
    with pytest.raises(ValueError, match="draft head"):
        made.draft_logprobs(made.params, np.ones((1, 4), int), np.ones(1, int))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="got 'lfm2'"):
        jaxspec.differentiable("lfm2")


def test_a_closed_engine_is_refused():
    llm = LLM(folder_of(HYBRID), **OPTIONS)
    llm.close()
    with pytest.raises(RuntimeError):
        jaxspec.differentiable(llm)


@pytest.mark.parametrize(("grain", "bits"), [(Grain.ROWS, 8), (Grain.FLOAT4, 4)])
def test_weights_that_stay_in_few_bits_are_refused(grain, bits):
    with unread(FIXTURES / "lfm2", jnp.dtype("bfloat16")) as found:
        matrices_of(found.model)[0].hold(Form(grain))
        with pytest.raises(ValueError, match=f"1 of .* in {bits} bits"):
            jaxspec.differentiable(found.model)


def test_a_share_of_a_model_is_refused():
    opened = unread(FIXTURES / "llama", jnp.dtype("float32"), group=Group(2))
    with opened as found, pytest.raises(ValueError, match="2 share"):
        jaxspec.differentiable(found.model)


def test_a_dense_model_has_no_experts_to_replay(made):
    tokens, lengths = padded(prompts(3))
    with pytest.raises(ValueError):
        made.made.logprobs(
            made.params, tokens, lengths, routed_experts=np.zeros((3, 63, 4, 2), np.uint8)
        )


@pytest.mark.parametrize(
    "experts", [np.zeros((3, 64, 2, 3), np.uint8), np.zeros((3, 63, 2, 3), np.float32)]
)
def test_experts_of_another_shape_or_kind_are_refused(experts):
    """nemotron_h has two layers with experts, of which tokens choose three."""
    made = jaxspec.differentiable(load_model(FIXTURES / "nemotron_h", jnp.float32))
    tokens, lengths = padded(prompts(3))
    with pytest.raises(ValueError):
        made.logprobs(made.params, tokens, lengths, routed_experts=experts)
