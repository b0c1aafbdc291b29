"""gdn_prefill's kernels compile to sm_90a code that neither spills nor copies the pool."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.regions import PrefillRegion

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize(
    ("dtype", "states_dtype"),
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.float16),
        (jnp.float16, jnp.float32),
    ],
)
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 2, 64, 64)], ids=str)
def test_the_kernels_compile(h200, monkeypatch, capfd, shape, dtype, states_dtype):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(tokens, states, chunks):
        for layer in range(2):
            out, states = gdn_prefill(tokens, states, layer, chunks)
            tokens = tokens._replace(v=out.astype(dtype))
        return tokens.v, states

    num_tokens, seqs = 128, 3
    key = array(num_tokens, shape.key_heads, shape.key_dim)
    value = array(num_tokens, shape.value_heads, shape.value_dim, dtype=dtype)
    gate = array(num_tokens, shape.value_heads)
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    pool = array(2, 65, 4, *state, dtype=states_dtype)
    index, start = array(seqs, dtype=jnp.int32), array(seqs + 1, dtype=jnp.int32)
    chunks = PrefillRegion(index, index, start, index)
    operands = (GdnTokens(key, key, value, gate, gate), pool, chunks)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "while(" not in compiled.as_text()  # which the host would wait for
