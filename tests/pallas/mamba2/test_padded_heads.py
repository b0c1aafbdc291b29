"""States may have more rows per head than x, as for heads of 80 in pools for 128."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import MAMBA2
from regions import decode_region, prefill_region
from replays import pools

POOL = (2, 6, 4, *MAMBA2.state(MAMBA2.small))
ROWS = decode_region([2, 3], 4, state_offset=1)
CHUNKS = prefill_region([2, 3], [0, 70, 90], num_computed=1)


@pytest.mark.parametrize(
    ("run", "batch", "region"),
    [
        (MAMBA2.step.run, (2, 4), ROWS),
        (MAMBA2.prefill.reference, (200,), CHUNKS),
        (MAMBA2.prefill.run, (200,), CHUNKS),
    ],
    ids=["step", "prefill, token by token", "prefill, chunked"],
)
def test_the_rest_is_zeros_and_stays_so(run, batch, region):
    rng, head_dim = np.random.default_rng(7), MAMBA2.small.head_dim
    narrow = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    wide = jnp.pad(narrow, [(0, 0)] * 4 + [(0, 3), (0, 0)])
    tokens = MAMBA2.draw(rng, *batch)
    want, expected = run(tokens, narrow, 1, region)
    out, after = run(tokens, wide, 1, region)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(after[..., :head_dim, :], expected, atol=1e-6)
    assert not np.any(after[..., head_dim:, :])


def test_the_rest_of_a_ring_is_zeros_and_stays_so():
    rng, head_dim = np.random.default_rng(7), MAMBA2.small.head_dim
    states, ring = pools(MAMBA2, lambda dims: rng.normal(size=dims), width=4, window=8)
    wide = jnp.pad(states, [(0, 0)] * 4 + [(0, 3), (0, 0)])
    wide_ring = dataclasses.replace(ring, x=jnp.pad(ring.x, [(0, 0)] * 4 + [(0, 3)]))
    tokens, rows = MAMBA2.draw(rng, 2, 4), decode_region([2, 3], 4, ring_length=[3, 8])
    want, *expected = MAMBA2.replay.run(tokens, states, ring, 1, rows)
    out, *after = MAMBA2.replay.run(tokens, wide, wide_ring, 1, rows)
    np.testing.assert_allclose(out, want, atol=1e-6)
    for pool, narrow in ((after[0], expected[0]), (after[1].x, expected[1].x)):
        own, rest = jnp.split(pool, [head_dim], axis=4)
        np.testing.assert_allclose(own, narrow, atol=1e-6)
        assert not np.any(rest)
