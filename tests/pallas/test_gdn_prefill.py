"""gdn_prefill, chunked, against the token-by-token reference, and that against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.gdn_prefill import gdn_prefill, gdn_prefill_reference

LAYERS, SLOTS, CANDIDATES, KEY_HEADS, VALUE_HEADS, VALUE_DIM, KEY_DIM = 2, 6, 3, 2, 4, 5, 8
POOL = (LAYERS, SLOTS, CANDIDATES, VALUE_HEADS, VALUE_DIM, KEY_DIM)
TOKENS = 200

chunked = jax.jit(gdn_prefill, static_argnums=6)
sequential = jax.jit(gdn_prefill_reference, static_argnums=6)


def operands(rng, decay):
    q, k = (rng.normal(size=(TOKENS, KEY_HEADS, KEY_DIM)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(TOKENS, VALUE_HEADS, VALUE_DIM))
    g = -decay * rng.exponential(size=(TOKENS, VALUE_HEADS)) ** 3
    beta = rng.random(size=(TOKENS, VALUE_HEADS))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def oracle(state, q, k, v, g, beta):
    """Outputs and the last state, in float64."""
    state, outputs, group = state.astype(np.float64), [], VALUE_HEADS // KEY_HEADS
    for t in range(len(q)):
        key, query = (np.repeat(x[t].astype(np.float64), group, axis=0) for x in (k, q))
        state = np.exp(g[t].astype(np.float64))[:, None, None] * state
        write = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, key))
        state = state + write[:, :, None] * key[:, None, :]
        outputs.append(np.einsum("hvk,hk->hv", state, query))
    return np.array(outputs).reshape(-1, VALUE_HEADS, VALUE_DIM), state


def int32(*values):
    return jnp.asarray(values, jnp.int32)


LENGTHS = [
    [200, 0, 0, 0, 0],
    [64, 64, 1, 63, 8],
    [65, 0, 127, 3, 5],
    [1, 2, 3, 4, 5],
    [0, 0, 0, 0, 0],
]


@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_both_forms_equal_the_recurrence(lengths, decay):
    rng = np.random.default_rng(0)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = operands(rng, decay)
    start = np.concatenate([[0], np.cumsum(lengths)])
    for x in tokens:
        x[start[-1] :] = np.nan  # padding
    slots, offset, computed = [1, 5, 2, 4, 3], [0, 2, 1, 0, 2], [0, 9, 0, 4, 1]
    expected, pool = np.zeros(tokens[2].shape), states.astype(np.float64)
    for seq, slot in enumerate(slots):
        mine = slice(start[seq], start[seq + 1])
        initial = states[1, slot, offset[seq]] if computed[seq] else np.zeros(POOL[3:])
        expected[mine], final = oracle(initial, *(x[mine] for x in tokens))
        if lengths[seq]:
            pool[1, slot, 0] = final
    indices = (int32(*x) for x in (slots, offset, computed, start))
    arguments = (*tokens, jnp.asarray(states), 1, *indices)
    for form in (sequential, chunked):
        out, after = form(*arguments)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        np.testing.assert_allclose(after, pool, atol=1e-5)


@pytest.mark.parametrize("form", [sequential, chunked])
def test_padding_is_inert(form):
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = [jnp.full_like(x, jnp.nan) for x in operands(rng, 1.0)]
    slots, start = int32(0, -2, 3, 10**6), int32(0, 70, 80, 80, 90)
    garbage = int32(10**6, -5, 2**31 - 1, -(2**31))
    out, after = form(*tokens, jnp.asarray(states), 1, slots, garbage, garbage, start)
    np.testing.assert_array_equal(after, states)
    np.testing.assert_array_equal(out, np.zeros(out.shape))
