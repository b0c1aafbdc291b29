"""gdn_step against the recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.gdn_step import gdn_step, gdn_step_reference

LAYERS, SLOTS, CANDIDATES, KEY_HEADS, VALUE_HEADS, VALUE_DIM, KEY_DIM = 2, 5, 4, 2, 6, 5, 8
POOL = (LAYERS, SLOTS, CANDIDATES, VALUE_HEADS, VALUE_DIM, KEY_DIM)

step = jax.jit(gdn_step, static_argnums=6)


def operands(rng, *batch):
    """q, k, v, g, beta for tokens of the given batch shape, as a layer makes them."""
    q, k = (rng.normal(size=(*batch, KEY_HEADS, KEY_DIM)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(*batch, VALUE_HEADS, VALUE_DIM))
    g = -rng.exponential(size=(*batch, VALUE_HEADS))
    beta = rng.random(size=(*batch, VALUE_HEADS))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def oracle(state, q, k, v, g, beta):
    """Outputs and states after each token; `state` [value_heads, value_dim, key_dim]."""
    state, outputs, states = state.astype(np.float64), [], []
    group = VALUE_HEADS // KEY_HEADS
    for t in range(len(q)):
        out = np.empty(v[t].shape)
        for head in range(VALUE_HEADS):
            key, query = k[t, head // group], q[t, head // group]
            decayed = np.exp(g[t, head]) * state[head]
            write = beta[t, head] * (v[t, head] - decayed @ key)
            state[head] = decayed + np.outer(write, key)
            out[head] = state[head] @ query
        outputs.append(out)
        states.append(state.copy())
    return np.array(outputs), np.array(states)


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def test_a_state_rolled_back_equals_a_state_never_advanced():
    rng = np.random.default_rng(0)
    states = jnp.zeros(POOL)
    true = {slot: np.zeros(POOL[3:]) for slot in (1, 3, 4)}
    offset = dict.fromkeys(true, 0)
    for _ in range(20):
        rows = rng.permutation(list(true))  # rows may change every step; slots stay
        query_len = rng.integers(0, CANDIDATES + 1, size=3)
        tokens = operands(rng, 3, CANDIDATES)
        out, states = step(
            *tokens, states, 1, int32(*rows), int32(*(offset[r] for r in rows)), int32(*query_len)
        )
        for row, slot in enumerate(rows):
            if real := query_len[row]:
                expected, after = oracle(true[slot], *(x[row, :real] for x in tokens))
                np.testing.assert_allclose(out[row, :real], expected, atol=1e-5)
                offset[slot] = int(rng.integers(0, real))  # drafts accepted
                true[slot] = after[offset[slot]]
                np.testing.assert_allclose(states[1, slot, offset[slot]], true[slot], atol=1e-5)
    assert not np.any(states[0])


@pytest.mark.parametrize("width", range(1, 10))
def test_all_tokens_at_once_equal_one_after_the_other(width):
    rng = np.random.default_rng(width)
    states = jnp.asarray(rng.normal(size=(1, 4, width, *POOL[3:])), jnp.float32)
    tokens = operands(rng, 3, width)
    index = int32(3, 1, 2), int32(width - 1, 0, width // 2), int32(width, 1, width // 2)
    out, after = step(*tokens, states, 0, *index)
    want, expected = jax.jit(gdn_step_reference, static_argnums=6)(*tokens, states, 0, *index)
    for row, count in enumerate(index[2]):
        np.testing.assert_allclose(out[row, :count], want[row, :count], atol=2e-6)
    np.testing.assert_allclose(after, expected, atol=2e-6)


def test_padding_is_inert():
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = [jnp.full_like(x, jnp.nan) for x in operands(rng, 5, CANDIDATES)]
    garbage = int32(10**6, -5, 2**31 - 1, -(2**31), 7)
    slots, query_len = int32(0, 0, 3, -2, 10**6), int32(4, 0, 0, 4, 4)
    _, after = step(*tokens, jnp.asarray(states), 1, slots, garbage, query_len)
    np.testing.assert_array_equal(after, states)


def test_a_padding_token_is_never_stored():
    rng = np.random.default_rng(2)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = operands(rng, 2, CANDIDATES)
    for x in tokens:
        x[0, 2:] = np.nan  # row 0 has two tokens
        x[1] = np.nan  # row 1 is padding
    out, after = step(*tokens, jnp.asarray(states), 1, int32(2, 0), int32(0, 0), int32(2, 4))
    assert np.isfinite(after).all() and np.isfinite(out[0, :2]).all()
    np.testing.assert_array_equal(after[1, 2, 2:], states[1, 2, 2:])


def test_more_tokens_than_candidates_are_refused():
    tokens = operands(np.random.default_rng(0), 1, CANDIDATES + 1)
    with pytest.raises(ValueError, match="num_drafts >= 4"):
        gdn_step(*tokens, jnp.zeros(POOL), 0, *[int32(1)] * 3)
