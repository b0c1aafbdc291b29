"""The kernel of attention_inputs compiles for an H200: no spills, no copy of the pool."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.inputs import QKNorm, attention_inputs

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize(("gated", "normed"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [*ATTENTION.values(), AttentionShape(4, 1, 64)], ids=str)
def test_attention_inputs(h200, monkeypatch, capfd, shape, dtype, gated, normed):
    """The projection, which the kernel reads in two shapes, is not copied either.

    As in the published models all of a head is rotated, or a quarter where it has a gate.
    """
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(qkv, norm, angles, kv, slots):
        for layer in range(2):
            queries, kv = attention_inputs(
                qkv, norm, angles, kv, layer, slots, heads=shape.heads, gated=gated
            )
            qkv = jnp.sin(qkv) * queries[0, 0, 0]
        return queries, kv

    tokens, half = 64, shape.head_dim // (8 if gated else 2)
    columns = ((1 + gated) * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = array(tokens, columns, dtype=dtype)
    norm = None
    if normed:
        norm = QKNorm(array(2, shape.head_dim, dtype=dtype), eps=1e-6, zero_centred=gated)
    angles, slots = (array(tokens, half),) * 2, array(tokens, dtype=jnp.int32)
    pool = array(2, 2, 32768, 16, shape.kv_heads, shape.head_dim, dtype=dtype)
    compiled = compile_for(h200, monkeypatch, step, (qkv, norm, angles, pool, slots), donated=3)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "transpose(" not in compiled.as_text()
