"""Selection of the largest logits of a large vocabulary, without sorting it."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

MAX_SORTED = 2048
"""Largest width that is sorted directly: XLA sorts up to this width in one GPU kernel."""


def largest(
    values: Float[Array, "n width"], count: int
) -> tuple[Float[Array, "n count"], Int[Array, "n count"]]:
    """Return the `count` largest values of each row in descending order, and their columns (int32).

    Among equal values, lower columns come first. `count` is static, from 1 to `width`. For a row
    with a NaN, arbitrary columns of it are returned.

    A row is split into blocks of adjacent columns. The `count` blocks with the largest maxima
    contain the result: every value outside of them is preceded by `count` maxima. One pass over the
    row finds the maxima; the rest of the work reads only `count` blocks, which are searched in the
    same way.
    """
    width = values.shape[1]
    if width <= MAX_SORTED:
        return _sorted(values, count)
    size = _block_size(width, count)
    padded = jnp.pad(values, ((0, 0), (0, -width % size)), constant_values=-jnp.inf)
    num_blocks = padded.shape[1] // size  # not -1 below: a step without prompts has no rows
    blocks = padded.reshape(len(values), num_blocks, size)
    if num_blocks <= count:
        return _sorted(values, count)
    _, chosen = largest(jnp.max(blocks, axis=2), count)
    # In column order, so that equal values of two blocks are in column order too.
    chosen = lax.sort(chosen, dimension=1)
    found = _take(blocks, chosen[:, :, None]).reshape(len(values), count * size)
    top, place = largest(found, count)
    return top, _take(chosen, place // size) * size + place % size


def _block_size(width: int, count: int) -> int:
    """Return a power of two that keeps both the maxima and the chosen blocks few."""
    least = max(width / MAX_SORTED, math.sqrt(width / count))
    return 1 << math.ceil(math.log2(least))


def _sorted(
    values: Float[Array, "n width"], count: int
) -> tuple[Float[Array, "n count"], Int[Array, "n count"]]:
    columns = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    # Two keys: some of XLA's sorts are not stable.
    negated, order = lax.sort((-values, columns), num_keys=2, dimension=1)
    return -negated[:, :count], order[:, :count]


def _take(array: Array, index: Int[Array, "n ..."]) -> Array:
    return jnp.take_along_axis(array, index, axis=1, mode="promise_in_bounds")
