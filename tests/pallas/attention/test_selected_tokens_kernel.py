"""Attention to selected tokens by the kernel: interpreted, compiled for an H200, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from selected_cases import (
    LAYER,
    Sizes,
    check_rows,
    check_tokens,
    decode_case,
    prompt_case,
)
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.attention import latent, selected_tokens, wide_kernel
from jaxspec.pallas.attention.token_index import TokenIndex
from jaxspec.regions import DecodeRegion, PrefillRegion

OPTIMIZED = True  # as for a user
SMALL = Sizes(heads=16, rank=128, shared=64, page_size=16, table=14, dtype="bfloat16")
PUBLISHED = {"index_heads": 64, "index_dim": 128, "dtype": "bfloat16"}


@functools.partial(jax.jit, static_argnums=(0, 2))
def attended(op, operands, rank, index):
    queries, latents, *others = operands
    return op(queries, latents, LAYER, *others, value_dim=rank, scale=0.07, index=index)


@pytest.fixture
def interpreted(interpreter, monkeypatch):
    """Run the ops with their kernels in Mosaic's interpreter; no races are found."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    kernel = functools.partial(wide_kernel.latent_attention_kernel, interpret=interpreter)
    monkeypatch.setattr(wide_kernel, "latent_attention_kernel", kernel)
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)
    attended.clear_cache()
    yield
    attended.clear_cache()
    assert not get_races().races_found


@pytest.mark.parametrize(("width", "top_k"), [(1, 100), (3, 64)])
def test_rows_attend_to_the_selected_tokens_without_races(interpreted, width, top_k):
    operands, index = decode_case(SMALL, (224, 1, 90), width, top_k)
    expected = attended(latent.latent_attention_reference, operands, SMALL.rank, index)
    out = attended(latent.latent_attention, operands, SMALL.rank, index)
    check_rows(out, expected, operands[-1], tolerance=0.04)


def test_prompts_attend_to_the_selected_tokens_without_races(interpreted, monkeypatch):
    monkeypatch.setattr(selected_tokens, "_TILE", 8)
    operands, index, real = prompt_case(SMALL, (11, 1, 5), (150, 0, 98), 100)
    expected = attended(latent.latent_prefill_attention_reference, operands, SMALL.rank, index)
    out = attended(latent.latent_prefill_attention, operands, SMALL.rank, index)
    check_tokens(out, expected, real, tolerance=0.04)


def published_index(*tokens):
    queries = array(*tokens, 64, 128, dtype=jnp.bfloat16)
    keys = array(2, 2**18, 16, 128, dtype=jnp.bfloat16)
    return TokenIndex(queries, array(*tokens, 64), keys, 2048)


def compiled_lean(h200, monkeypatch, capfd, op, queries, region, index):
    """Two layers of `op` at V3.2's sizes compile without spills and without a copy of a pool."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(queries, pools, tables, region, index):
        latents, keys = pools
        total, index = 0.0, TokenIndex(index.queries, index.weights, keys, index.top_k)
        for layer in range(2):
            operands = queries, latents, layer, tables, region
            out = op(*operands, value_dim=512, scale=0.07, index=index)
            total += jnp.sum(out.astype(jnp.float32))
        return total, pools

    pools = array(2, 2**18, 16, 576, dtype=jnp.bfloat16), index.keys
    operands = queries, pools, array(65, 512, dtype=jnp.int32), region
    index = TokenIndex(index.queries, index.weights, array(0), index.top_k)
    compiled = compile_for(h200, monkeypatch, step, (*operands, index), donated=1)
    return compiled, capfd.readouterr().out, pools


@pytest.mark.parametrize(("heads", "width"), [(128, 4), (16, 1)], ids=["DeepSeek", "of eight"])
def test_rows_compile(h200, monkeypatch, capfd, heads, width):
    rows = array(16, dtype=jnp.int32)
    queries, index = array(16, width, heads, 576, dtype=jnp.bfloat16), published_index(16, width)
    operands = latent.latent_attention, queries, DecodeRegion(*[rows] * 5), index
    assert_lean(*compiled_lean(h200, monkeypatch, capfd, *operands))


def test_prompts_compile(h200, monkeypatch, capfd):
    index, starts = (array(n, dtype=jnp.int32) for n in (8, 9))
    chunks = PrefillRegion(slots=index, num_computed=index, query_start=starts, state_offset=index)
    queries = array(512, 128, 576, dtype=jnp.bfloat16)
    operands = latent.latent_prefill_attention, queries, chunks, published_index(512)
    assert_lean(*compiled_lean(h200, monkeypatch, capfd, *operands))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [(128, 1), (128, 4), (16, 4)])
@pytest.mark.parametrize("lengths", [(8192, 1, 2500), (2048, 5, 700)], ids=["long", "short"])
def test_on_a_gpu_rows_attend_to_the_selected_tokens(heads, width, lengths):
    dispatch._chosen.pop("latent_attention", None)
    sizes = Sizes(heads=heads, rank=512, shared=64, page_size=16, table=512, **PUBLISHED)
    operands, index = decode_case(sizes, lengths, width, 2048)
    expected = attended(latent.latent_attention_reference, operands, 512, index)
    out = attended(latent.latent_attention, operands, 512, index)
    check_rows(out, expected, operands[-1], tolerance=0.04)
    assert dispatch.implementations()["latent_attention"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 16])
def test_on_a_gpu_prompts_attend_to_the_selected_tokens(heads):
    dispatch._chosen.pop("latent_prefill_attention", None)
    sizes = Sizes(heads=heads, rank=512, shared=64, page_size=16, table=256, **PUBLISHED)
    operands, index, real = prompt_case(sizes, (300, 1, 70), (3000, 0, 2010), 2048)
    expected = attended(latent.latent_prefill_attention_reference, operands, 512, index)
    out = attended(latent.latent_prefill_attention, operands, 512, index)
    check_tokens(out, expected, real, tolerance=0.04)
    assert dispatch.implementations()["latent_prefill_attention"] == ("kernel",)
