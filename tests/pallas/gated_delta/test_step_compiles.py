"""gdn_step's kernel compiles to sm_90a code that neither spills nor copies the pool."""

import jax
import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.step_kernel import gdn_step_kernel
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user
ROWS = 4


def operands(shape, width, dtype, candidates):
    """Tokens, the pool of two layers, rows."""
    key = array(ROWS, width, shape.key_heads, shape.key_dim)
    value = array(ROWS, width, shape.value_heads, shape.value_dim)
    gate = array(ROWS, width, shape.value_heads)
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    pool = array(2, 9, candidates, *state, dtype=dtype)
    rows = DecodeRegion(*[array(ROWS, dtype=jnp.int32)] * 5)
    return GdnTokens(key, key, value, gate, gate), pool, rows


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 2, 64, 64)], ids=str)
def test_the_kernel_compiles(h200, monkeypatch, capfd, shape, dtype, width):
    def step(tokens, states, rows):
        for layer in range(2):
            out, states = gdn_step_kernel(tokens, states, jnp.int32(layer), rows)
            tokens = tokens._replace(v=out)
        return out, states

    tokens, pool, rows = operands(shape, width, dtype, candidates=8)
    compiled = compile_for(h200, monkeypatch, step, (tokens, pool, rows), donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)


def test_a_pool_is_written_in_place_by_several_steps_too(h200, monkeypatch):
    """As in a program of `steps_per_dispatch` steps, where the pool goes round a loop."""

    def step(states, tokens, rows):
        def once(states, _):
            out, states = gdn_step_kernel(tokens, states, jnp.int32(0), rows)
            return states, out

        return jax.lax.scan(once, states, length=3)

    tokens, pool, rows = operands(GDN["qwen3.5-9b"], 1, jnp.float32, candidates=1)
    compiled = compile_for(h200, monkeypatch, step, (pool, tokens, rows), donated=0)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.size * 4
    assert memory.temp_size_in_bytes < pool.size / 8
