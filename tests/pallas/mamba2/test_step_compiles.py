"""mamba2_step's kernel compiles to sm_90a code that neither spills nor copies the pool."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas.mamba2.step_kernel import mamba2_step_kernel
from jaxspec.pallas.mamba2.tokens import Mamba2Tokens
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user

CASES = [  # shape, dtypes of states and of tokens, width
    (MAMBA2["nemotron-3-nano"], dtype, x_dtype, width)
    for dtype, x_dtype in (
        (jnp.float32, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.bfloat16),
    )
    for width in (1, 4, 8)
] + [
    *((MAMBA2["nemotron-h-8b"], jnp.float32, jnp.bfloat16, width) for width in (1, 4, 8)),
    (Mamba2Shape(4, 2, 128, 64), jnp.float32, jnp.bfloat16, 8),
    (Mamba2Shape(4, 2, 128, 64), jnp.float16, jnp.float32, 1),
]


@pytest.mark.parametrize(("shape", "dtype", "x_dtype", "width"), CASES, ids=str)
def test_the_kernel_compiles(h200, monkeypatch, capfd, shape, dtype, x_dtype, width):
    def step(tokens, states, rows):
        for layer in range(2):
            out, states = mamba2_step_kernel(tokens, states, jnp.int32(layer), rows)
            tokens = tokens._replace(x=out.astype(x_dtype))
        return out, states

    num_rows = 4
    x = array(num_rows, width, shape.heads, shape.head_dim, dtype=x_dtype)
    b = array(num_rows, width, shape.groups, shape.state_dim, dtype=x_dtype)
    a = array(shape.heads)
    tokens = Mamba2Tokens(x, array(num_rows, width, shape.heads), a, b, b, a)
    pool = array(2, 9, 8, shape.heads, shape.head_dim, shape.state_dim, dtype=dtype)
    rows = DecodeRegion(*[array(num_rows, dtype=jnp.int32)] * 5)
    compiled = compile_for(h200, monkeypatch, step, (tokens, pool, rows), donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)
