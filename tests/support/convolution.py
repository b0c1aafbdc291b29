"""Rows of a verify as a convolution meets them, padding of every kind among them."""

import jax.numpy as jnp
import numpy as np


def int32(*values):
    """An index array."""
    return jnp.asarray(values, jnp.int32)


# Three tokens, two tokens; padding by slot, by length, by a slot that is not there, by a negative
# one; one token far along, and a row with position and length out of range.
ROWS = {
    "slots": int32(2, 4, 0, 3, 9, -1, 6, 1),
    "num_computed": int32(5, 0, 7, 1, 2, 0, 2**31 - 1, -3),
    "query_len": int32(3, 2, 3, 0, 3, 3, 1, 99),
}
REAL = {0: 3, 1: 2, 6: 1, 7: 99}  # tokens of the rows that are not padding
LAYERS, SLOTS = 2, 7  # of the pool


def operands(channels, dtype, width, kernel=4, spare=0):
    """Tokens, weight and pool, with NaN in every padding token and row, and in row 0's neighbour 1.

    `spare`: inputs that the pool's window has room for beyond what `width` needs.
    """
    rng = np.random.default_rng(width)
    x = rng.normal(size=(len(ROWS["slots"]), width, channels))
    for row in range(len(x)):
        x[row, REAL.get(row, 0) :] = np.nan
    x[1] = np.nan
    weight = rng.normal(size=(channels, kernel))
    pool = rng.normal(size=(LAYERS, SLOTS, kernel - 1 + width + spare, channels))
    return tuple(jnp.asarray(a, dtype) for a in (x, weight, pool))
