"""The kernel for heads of 512 compiles for an H200: few spills, no copy of the pool."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import WIDE_ATTENTION
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.paged import paged_attention
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.regions import DecodeRegion, PrefillRegion

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("model", WIDE_ATTENTION)
def test_decoding_and_prompts(h200, monkeypatch, capfd, model):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(decoded, prompts, kv, tables, rows, chunks):
        for layer in range(2):
            decoded = paged_attention(decoded, kv, layer, tables, rows)
            prompts = prefill_attention(prompts, kv, layer, tables, chunks)
        return decoded, prompts, kv

    shape, index, starts = WIDE_ATTENTION[model], *(array(n, dtype=jnp.int32) for n in (8, 9))
    heads = shape.heads, shape.head_dim
    decoded, prompts = (array(*n, *heads, dtype=jnp.bfloat16) for n in ((64, 4), (2048,)))
    pool = array(2, 2, 32768, 16, shape.kv_heads, shape.head_dim, dtype=jnp.bfloat16)
    rows = DecodeRegion(*[array(64, dtype=jnp.int32)] * 5)
    chunks = PrefillRegion(slots=index, num_computed=index, query_start=starts, state_offset=index)
    operands = decoded, prompts, pool, array(65, 256, dtype=jnp.int32), rows, chunks
    compiled = compile_for(h200, monkeypatch, step, operands, donated=2)
    assert_lean(compiled, capfd.readouterr().out, pool, spills=64)
