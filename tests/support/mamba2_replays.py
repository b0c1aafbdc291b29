"""Rows of every kind for the kernels that replay Mamba2, and how they are compared."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from recurrences import MAMBA2
from regions import decode_region
from replays import LAYERS, pools

from jaxspec.pallas.mamba2.conv_replay import mamba2_conv_replay, mamba2_conv_replay_reference
from jaxspec.pallas.mamba2.replay_kernel import mamba2_conv_replay_kernel
from jaxspec.pallas.recurrent.conv_ring import past_rows

SLOTS, WINDOW = 7, 12

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

conv_replay = jax.jit(mamba2_conv_replay, static_argnums=5)
conv_reference = jax.jit(mamba2_conv_replay_reference, static_argnums=5)


def conv_kernel(*operands, **options):
    *operands, layer, rows = operands
    return mamba2_conv_replay_kernel(*operands, jnp.int32(layer), rows, **options)


def counted_pools(rng, shape, dtype, width, pad=0):
    """States and ring; NaN where no token counts. `pad`: rows of a state that no head has."""

    def make(dims):
        return 0.3 * rng.normal(size=dims)

    states, ring = pools(MAMBA2, make, shape, dtype, width=width, window=WINDOW, slots=SLOTS)
    counted = np.zeros((SLOTS, ring.num_rows), bool)
    for row in REAL:
        slot, end, length = (int(x[row]) for x in (ROWS.slots, ROWS.num_computed, ROWS.ring_length))
        counted[slot, [place % ring.num_rows for place in range(end - length, end)]] = True
    ring = jax.tree.map(
        lambda x: jnp.where(counted[None, :, :, *[None] * (x.ndim - 3)], x, jnp.nan), ring
    )
    states = jnp.pad(states, [(0, 0)] * 4 + [(0, pad), (0, 0)])
    return states, dataclasses.replace(ring, x=jnp.pad(ring.x, [(0, 0)] * 4 + [(0, pad)]))


def conv_case(shape, x_dtype, dtype, width, *, kernel=4, spare=0, pad=0):
    """All operands; NaN in padding, in row 0's neighbour 1, and in all that no live row may read.

    `spare`: rows of the convolution's ring that nobody needs. `pad`: as in `counted_pools`.
    """
    rng, channels = np.random.default_rng(width), shape.conv_dim
    x = rng.normal(size=(len(ROWS.slots), width, channels))
    for row in range(len(x)):
        x[row, REAL.get(row, 0) :] = np.nan
    x[1] = np.nan
    weight = jnp.asarray(0.5 * rng.normal(size=(kernel, channels)), x_dtype)
    projected, params = MAMBA2.projection(rng, shape, jnp.asarray(x, x_dtype), weight)
    conv_rows = kernel - 1 + width + spare
    conv = np.full((LAYERS, SLOTS, conv_rows, channels), np.nan)
    places = past_rows(ROWS.num_computed, kernel - 1, conv_rows)
    for row in REAL:
        conv[1, ROWS.slots[row], places[row]] = rng.normal(size=(kernel - 1, channels))
    held = counted_pools(rng, shape, dtype, width, pad)
    return projected, params, jnp.asarray(conv, x_dtype), *held, 1, ROWS


def check_conv(run, shape, x_dtype, dtype, width, *, bias=True, **options):
    """`run` is the reference in what it puts out and in every element of the pools."""
    projected, params, *others = conv_case(shape, x_dtype, dtype, width, **options)
    operands = projected, params if bias else params.replace(bias=None), *others
    out, conv, after, ring = run(*operands)
    # On a GPU XLA would drop the casts to 16 bits and back that the specification has.
    *arrays, layer, rows = operands
    host = jax.devices("cpu")[0]
    with jax.default_device(host):
        arrays, rows = jax.device_put((arrays, rows), host)
        want, kept, folded, appended = conv_reference(*arrays, layer, rows)
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (conv, kept)))
    eps = max(float(jnp.finfo(x).eps) for x in (x_dtype, dtype))
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
