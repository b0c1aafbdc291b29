"""OutputGate against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.attention.output_gate import OutputGate

TOKENS, HEADS, DIM = 5, 3, 16


def case(dtype):
    """Attended heads, a projection with NaN wherever no gate is, and its gates."""
    rng = np.random.default_rng(0)
    gates = 4 * rng.normal(size=(TOKENS, HEADS, DIM))
    pairs = np.stack([np.full_like(gates, np.nan), gates], axis=2).reshape(TOKENS, -1)
    projected = np.pad(pairs, ((0, 0), (0, 7)), constant_values=np.nan)
    attended = jnp.asarray(rng.normal(size=gates.shape), dtype)
    return attended, OutputGate(jnp.asarray(projected, dtype)), jnp.asarray(gates, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_head_is_multiplied_by_the_sigmoid_of_its_gate(dtype):
    attended, gate, gates = case(dtype)
    out = jax.jit(lambda gate, attended: gate(attended))(gate, attended)
    assert out.shape == attended.shape and out.dtype == dtype
    x, y = (np.asarray(z, np.float64) for z in (attended, gates))
    eps = max(float(jnp.finfo(dtype).eps), 1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float64), x / (1 + np.exp(-y)), rtol=eps)


def test_a_split_gate_is_that_of_each_part():
    attended, gate, _ = case(jnp.float32)
    parts = zip(gate.split(2), (attended[:2], attended[2:]), strict=True)
    whole = jnp.concatenate([part(x) for part, x in parts])
    np.testing.assert_array_equal(whole, gate(attended))


def test_a_gate_that_closes_leaves_nothing_and_one_that_opens_all():
    gate = OutputGate(jnp.asarray([[np.nan, -1e9, np.nan, 1e9]]))
    np.testing.assert_array_equal(gate(jnp.full((1, 2, 1), 3.0)), [[[0.0], [3.0]]])


@pytest.mark.parametrize("sizes", [(TOKENS + 1, HEADS), (TOKENS, HEADS + 1)])
def test_a_projection_of_other_tokens_or_heads_is_refused(sizes):
    _, gate, _ = case(jnp.float32)
    gate.check(TOKENS, HEADS, DIM)
    with pytest.raises(ValueError, match=r"rows and at least \d+ columns, got \(5, 103\)"):
        gate.check(*sizes, DIM)
