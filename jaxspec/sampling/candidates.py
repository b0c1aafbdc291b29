"""The few likeliest ids of a large vocabulary, without sorting it."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

MAX_SORTED = 2048
"""Columns that are sorted as they are: XLA sorts as many of a row in one kernel of a GPU."""


def largest(
    values: Float[Array, "n width"], count: int
) -> tuple[Float[Array, "n count"], Int[Array, "n count"]]:
    """The `count` largest values of each row in descending order, and their columns (int32).

    Of equal values the lower columns come first. `count` is static, from 1 to `width`. A row with a
    NaN gets some of its columns.

    A row is cut into blocks of neighbours. The `count` blocks with the largest maxima hold all that
    is looked for: any value outside of them has `count` maxima before it. So one pass reads the
    row, and what follows reads `count` blocks of it. They are searched in the same way.
    """
    width = values.shape[1]
    if width <= MAX_SORTED:
        return _sorted(values, count)
    size = _block_size(width, count)
    padded = jnp.pad(values, ((0, 0), (0, -width % size)), constant_values=-jnp.inf)
    num_blocks = padded.shape[1] // size  # a step without prompts has no rows: -1 would divide by 0
    blocks = padded.reshape(len(values), num_blocks, size)
    if num_blocks <= count:
        return _sorted(values, count)
    _, chosen = largest(jnp.max(blocks, axis=2), count)
    # In the order of their columns: then equal values of two blocks are in that order as well.
    chosen = lax.sort(chosen, dimension=1)
    found = _take(blocks, chosen[:, :, None]).reshape(len(values), count * size)
    top, place = largest(found, count)
    return top, _take(chosen, place // size) * size + place % size


def _block_size(width: int, count: int) -> int:
    """A power of two, so that neither the maxima nor the chosen blocks are many."""
    least = max(width / MAX_SORTED, math.sqrt(width / count))
    return 1 << math.ceil(math.log2(least))


def _sorted(
    values: Float[Array, "n width"], count: int
) -> tuple[Float[Array, "n count"], Int[Array, "n count"]]:
    columns = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    # Two keys: some of XLA's sorts leave the order of equal keys open.
    negated, order = lax.sort((-values, columns), num_keys=2, dimension=1)
    return -negated[:, :count], order[:, :count]


def _take(array: Array, index: Int[Array, "n ..."]) -> Array:
    return jnp.take_along_axis(array, index, axis=1, mode="promise_in_bounds")
