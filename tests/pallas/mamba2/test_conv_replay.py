"""mamba2_conv_replay: the two ops it is made of; kernel = reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import heads_of, projection
from regions import decode_region

from benchmarks.measure.shapes import Mamba2Shape
from jaxspec.pallas.mamba2.conv_replay import mamba2_conv_replay, mamba2_conv_replay_reference
from jaxspec.pallas.mamba2.inputs import mamba2_inputs_reference
from jaxspec.pallas.mamba2.replay import mamba2_replay_reference
from jaxspec.pallas.mamba2.ring import Mamba2Ring
from jaxspec.pallas.recurrent.conv_ring import past_rows

LAYERS, SLOTS, WINDOW = 2, 7, 12
TINY = Mamba2Shape(4, 2, head_dim=5, state_dim=8)

# Three tokens on a ring that goes round its end, two tokens; padding by slot, by length, by a slot
# that is not there, by a negative one; one token on a full ring, which folds; a length out of range
# on an empty one; on a ring of one token.
ROWS = decode_region(
    slots=[2, 4, 0, 3, 9, -1, 6, 1, 5],
    query_len=[3, 2, 3, 0, 3, 3, 1, 99, 1],
    num_computed=[2**20 + 3, 40, -(2**31), 1, 2, 2**31 - 1, 31, 5, 18],
    ring_length=[WINDOW - 3, 3, 10**6, 1, -5, 2**31 - 1, WINDOW, 0, 1],
)
REAL = {0: 3, 1: 2, 6: 1, 7: 99, 8: 1}  # tokens of the rows that are not padding

compiled = functools.partial(jax.jit, static_argnums=5)
reference = compiled(mamba2_conv_replay_reference)


def case(shape, x_dtype, dtype, width, kernel=4, spare=0, pad=0):
    """All operands; NaN in padding, in row 0's neighbour 1, and in all that no live row may read.

    `spare`: rows of the convolution's ring that nobody needs. `pad`: rows of a state that no head
    of the tokens has.
    """
    rng, heads = np.random.default_rng(width), heads_of(shape)
    x = rng.normal(size=(len(ROWS.slots), width, heads.channels))
    for row in range(len(x)):
        x[row, REAL.get(row, 0) :] = np.nan
    x[1] = np.nan
    weight = jnp.asarray(0.5 * rng.normal(size=(kernel, heads.channels)), x_dtype)
    projected, params = projection(rng, heads, jnp.asarray(x, x_dtype), weight)

    conv_rows, ring_rows = kernel - 1 + width + spare, WINDOW + width
    conv = np.full((LAYERS, SLOTS, conv_rows, heads.channels), np.nan)
    counted = np.zeros((SLOTS, ring_rows), bool)
    places = past_rows(ROWS.num_computed, kernel - 1, conv_rows)
    for row in REAL:
        slot, end, length = (int(y[row]) for y in (ROWS.slots, ROWS.num_computed, ROWS.ring_length))
        conv[1, slot, places[row]] = rng.normal(size=(kernel - 1, heads.channels))
        counted[slot, [p % ring_rows for p in range(end - length, end)]] = True

    def pool(dtype, *dims, padded=None):
        values = 0.3 * rng.normal(size=(LAYERS, SLOTS, *dims))
        if dims[0] == ring_rows:
            values[:, ~counted] = np.nan
        if padded is not None:
            values = np.pad(
                values, [(0, pad if axis == padded else 0) for axis in range(values.ndim)]
            )
        return jnp.asarray(values, dtype)

    states = pool(dtype, 1, *heads[:2], heads.state_dim, padded=4)
    ring = Mamba2Ring(
        x=pool(dtype, ring_rows, *heads[:2], padded=4),
        b=pool(dtype, ring_rows, heads.groups, heads.state_dim),
        dt=abs(pool(jnp.float32, ring_rows, heads.heads)),
        window=WINDOW,
    )
    return projected, params, jnp.asarray(conv, x_dtype), states, ring


def check(run, *operands):
    """`run` is the reference in what it puts out and in every element of the pools."""
    states = operands[3]
    out, conv, after, ring = run(*operands, 1, ROWS)
    want, kept, folded, appended = reference(*operands, 1, ROWS)
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (conv, kept)))
    eps = max(float(jnp.finfo(y.dtype).eps) for y in (operands[0], states))
    # The convolution may round to a neighbour, and what follows from it.
    loose = 2e-5 if eps < 1e-6 else 4 * eps
    pairs = zip(jax.tree.leaves((after, ring)), jax.tree.leaves((folded, appended)), strict=True)
    for mine, theirs in pairs:
        mine, theirs = (np.asarray(y, np.float32) for y in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=loose, atol=loose)
    for row, count in REAL.items():
        got, wanted = np.asarray(out)[row, :count], np.asarray(want)[row, :count]
        assert np.isnan(wanted).all() == (row == 1)
        np.testing.assert_allclose(got, wanted, rtol=loose, atol=loose)


def test_the_op_is_what_its_parts_are():
    operands = case(TINY, jnp.float32, jnp.float32, 3)
    got = compiled(mamba2_conv_replay)(*operands, 1, ROWS)
    projected, params, conv, states, ring = operands
    tokens, conv = mamba2_inputs_reference(projected, params, conv, 1, ROWS)
    out, states, ring = mamba2_replay_reference(tokens, states, ring, 1, ROWS)
    for mine, theirs in zip(
        jax.tree.leaves(got), jax.tree.leaves((out, conv, states, ring)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_states_may_have_more_rows_a_head_than_x():
    operands = case(TINY, jnp.float32, jnp.float32, 3, pad=3)
    assert operands[3].shape[4] == TINY.head_dim + 3
    check(compiled(mamba2_conv_replay), *operands)


def test_errors_are_those_of_its_parts():
    projected, params, conv, states, ring = case(TINY, jnp.float32, jnp.float32, 3)

    def run(projected, conv, ring):
        return mamba2_conv_replay(projected, params, conv, states, ring, 1, ROWS)

    with pytest.raises(ValueError, match="num_drafts >= 2"):
        run(projected, conv[:, :, 1:], ring)
    with pytest.raises(ValueError, match="Pass the whole projection"):
        run(projected[..., :52], conv, ring)
    with pytest.raises(ValueError, match="Build it with at least 15"):
        run(projected, conv, jax.tree.map(lambda pool: pool[:, :, :14], ring))
