"""mamba2_prefill's kernels compile to sm_90a code that neither spills nor copies the pool."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.prefill import mamba2_prefill
from jaxspec.pallas.mamba2.tokens import Mamba2Tokens
from jaxspec.regions import PrefillRegion

OPTIMIZED = True  # as for a user

CASES = [  # shape, dtypes of tokens and of states, tokens: 256 are one tile a sequence
    *((shape, jnp.bfloat16, jnp.float32, 2048) for shape in MAMBA2.values()),
    (MAMBA2["nemotron-3-nano"], jnp.bfloat16, jnp.float32, 256),
    (MAMBA2["nemotron-3-nano"], jnp.bfloat16, jnp.float16, 2048),
    (MAMBA2["nemotron-3-nano"], jnp.float16, jnp.float32, 2048),
    (Mamba2Shape(4, 2, 128, 64), jnp.bfloat16, jnp.bfloat16, 2048),
    (Mamba2Shape(4, 2, 128, 128), jnp.bfloat16, jnp.float32, 2048),
]


@pytest.mark.parametrize(("shape", "dtype", "states_dtype", "num_tokens"), CASES, ids=str)
def test_the_kernels_compile(h200, monkeypatch, capfd, shape, dtype, states_dtype, num_tokens):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(tokens, states, chunks):
        for layer in range(2):
            out, states = mamba2_prefill(tokens, states, layer, chunks)
            tokens = tokens._replace(x=out.astype(dtype))
        return tokens.x, states

    x = array(num_tokens, shape.heads, shape.head_dim, dtype=dtype)
    b = array(num_tokens, shape.groups, shape.state_dim, dtype=dtype)
    a = array(shape.heads)
    tokens = Mamba2Tokens(x, array(num_tokens, shape.heads), a, b, b, a)
    state, seqs = (shape.heads, shape.head_dim, shape.state_dim), 3
    pool = array(2, 257, 4, *state, dtype=states_dtype)
    index, start = array(seqs, dtype=jnp.int32), array(seqs + 1, dtype=jnp.int32)
    chunks = PrefillRegion(index, index, start, index)
    compiled = compile_for(h200, monkeypatch, step, (tokens, pool, chunks), donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "while(" not in compiled.as_text()  # which the host would wait for
