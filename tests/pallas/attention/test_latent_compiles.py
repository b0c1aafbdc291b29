"""The kernel of attention over latents compiles for an H200: no spills, no copy of the pool."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.latent import latent_attention, latent_prefill_attention
from jaxspec.regions import DecodeRegion, PrefillRegion

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize(
    ("heads", "rows", "width"),
    [(128, 64, 1), (128, 64, 4), (32, 64, 1), (20, 64, 4), (16, 1, 8)],
    ids=[
        "DeepSeek",
        "DeepSeek, verification",
        "Kimi",
        "GLM, verification",
        "one row of eight devices",
    ],
)
def test_latent_attention(h200, monkeypatch, capfd, heads, rows, width):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(queries, pool, tables, rows):
        total = 0.0
        for layer in range(2):
            out = latent_attention(queries, pool, layer, tables, rows, value_dim=512, scale=0.07)
            total += jnp.sum(out.astype(jnp.float32))
        return total, pool

    index = array(rows, dtype=jnp.int32)
    region = DecodeRegion(index, index, index, index, index)
    queries = array(rows, width, heads, 576, dtype=jnp.bfloat16)
    pool = array(2, 32768, 16, 576, dtype=jnp.bfloat16)
    operands = queries, pool, array(65, 512, dtype=jnp.int32), region
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)


@pytest.mark.parametrize("heads", [128, 32, 20, 16], ids=["DeepSeek", "Kimi", "GLM", "of eight"])
def test_latent_prefill_attention(h200, monkeypatch, capfd, heads):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(queries, pool, tables, chunks):
        total = 0.0
        for layer in range(2):
            out = latent_prefill_attention(
                *(queries, pool, layer, tables, chunks), value_dim=512, scale=0.07
            )
            total += jnp.sum(out.astype(jnp.float32))
        return total, pool

    index, starts = (array(n, dtype=jnp.int32) for n in (8, 9))
    chunks = PrefillRegion(slots=index, num_computed=index, query_start=starts, state_offset=index)
    queries = array(512, heads, 576, dtype=jnp.bfloat16)
    pool = array(2, 65536, 16, 576, dtype=jnp.bfloat16)
    operands = queries, pool, array(65, 512, dtype=jnp.int32), chunks
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)
