"""The largest entries of long rows, exactly, with one pass over them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_BLOCK = 128  # columns


class TopN(NamedTuple):
    """The largest entries of each row, descending; the lower column first among equals."""

    values: Float[Array, "rows n"]
    columns: Int[Array, "rows n"]  # int32; -1 where the row has fewer than n


def top_n(x: Float[Array, "rows columns"], n: int) -> TopN:
    """The `n` largest entries of each row of `x`. A NaN counts as -inf.

    A block of columns that has one of them has a larger maximum than all but `n - 1` other blocks,
    or the same maximum and a lower index. So the `n` best blocks by their maxima have all of them,
    and only their entries are compared: `x` is read once for the maxima, then 128 `n` entries of
    each row. A vocabulary of 248,320 ids has 1,940 blocks.
    """
    num_columns = x.shape[1]
    num_blocks = num_columns // _BLOCK
    if num_blocks <= n:
        return _best(_number(x), jnp.broadcast_to(_iota(num_columns)[None, :], x.shape), n)
    whole = num_blocks * _BLOCK
    maxima = jnp.max(_number(x[:, :whole]).reshape(len(x), num_blocks, _BLOCK), axis=2)
    # In the order of the columns, so that the lower one is found first among equals.
    blocks = jnp.sort(lax.top_k(maxima, n)[1], axis=1)
    inside = (blocks[:, :, None] * _BLOCK + _iota(_BLOCK)[None, None, :]).reshape(len(x), -1)
    rest = whole + _iota(num_columns - whole)[None, :]
    behind = jnp.broadcast_to(rest, (len(x), num_columns - whole))
    columns = jnp.concatenate([inside, behind], axis=1)
    return _best(_number(jnp.take_along_axis(x, columns, axis=1)), columns, n)


def _best(values: Float[Array, "rows some"], columns: Int[Array, "rows some"], n: int) -> TopN:
    """The `n` largest of candidates whose columns ascend."""
    count = min(n, values.shape[1])
    best, place = lax.top_k(values, count)  # the first among equals
    padding = (0, 0), (0, n - count)
    return TopN(
        jnp.pad(best, padding, constant_values=-jnp.inf),
        jnp.pad(jnp.take_along_axis(columns, place, axis=1), padding, constant_values=-1),
    )


def _number(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` as `lax.top_k` orders it by value: to that, a NaN is the largest and -0 less than 0."""
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(x == 0, 0.0, x))


def _iota(n: int) -> Int[Array, " n"]:
    return jnp.arange(n, dtype=jnp.int32)
