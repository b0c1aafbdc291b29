"""Rows of a verify step as a convolution sees them, padding of every kind among them."""

import jax.numpy as jnp
import numpy as np
from regions import decode_region

# Three tokens, two tokens; padding by slot, by length, by a slot that is not there, by a negative
# one; one token far along, and a row with position and length out of range.
ROWS = decode_region(
    slots=[2, 4, 0, 3, 9, -1, 6, 1],
    num_computed=[5, 0, 7, 1, 2, 0, 2**31 - 1, -3],
    query_len=[3, 2, 3, 0, 3, 3, 1, 99],
)
REAL = {0: 3, 1: 2, 6: 1, 7: 99}  # row -> its tokens, for the rows that are not padding
LAYERS, SLOTS = 2, 7  # of the pool


def operands(channels, dtype, width, kernel=4, spare=0):
    """Tokens, taps and pool; padding tokens and rows are NaN, and so is row 1, beside row 0.

    `spare`: inputs that the pool's window holds beyond what `width` needs.
    """
    rng = np.random.default_rng(width)
    x = rng.normal(size=(len(ROWS.slots), width, channels))
    for row in range(len(x)):
        x[row, REAL.get(row, 0) :] = np.nan
    x[1] = np.nan
    weight = rng.normal(size=(kernel, channels))
    pool = rng.normal(size=(LAYERS, SLOTS, kernel - 1 + width + spare, channels))
    return tuple(jnp.asarray(a, dtype) for a in (x, weight, pool))
