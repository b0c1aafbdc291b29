"""Greedy token of each row: the matmul with the output head, and the argmax of its scores."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch, row_tiles
from jaxspec.pallas.matmul import products
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.scores import PartialArgmax, combine, mask_columns
from jaxspec.weight import Float8, Weight, to_float8

_MIN_ROWS = 8  # minimum rows of a 16-bit matmul
_MIN_FEATURES = 1024  # minimum features of one; below this XLA is as fast
_DENSE_TILE, _FLOAT8_TILE = (64, 64), (128, 8)  # (features, columns) per copy


def argmax_matmul(
    x: Float[Array, "rows features"],
    weight: Weight,
    forbidden: Int[Array, "rows n"],
) -> Int[Array, " rows"]:
    """Return the column (int32) of the largest entry of each row of `x @ weight`, in float32.

    A row where an allowed score is NaN, or where no allowed score is finite, returns -1
    (`NO_TOKEN`). Arguments and errors are those of `best_columns`.
    """
    return best_columns(x, weight, forbidden).winner


def best_columns(
    x: Float[Array, "rows features"],
    weight: Weight,
    forbidden: Int[Array, "rows n"],
) -> PartialArgmax:
    """Return the argmax of each row of `x @ weight`, in float32; the lowest column wins ties.

    For 8 or more rows in 16 bits, one kernel keeps the scores in registers. XLA writes and reads
    them: 254 MB for 256 rows and a vocabulary of 248,320.

    A `Float8` weight has half the bytes. The kernel then rounds `x` to 8 bits too, so another
    column with a nearly equal score may win.

    Args:
        x: activations.
        weight: output head, with one row per feature of `x`.
        forbidden: columns (int32) that each row skips. Numbers that are not columns, such as -1,
            forbid nothing.

    Raises:
        ValueError: `weight` does not match the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    why = why_not_kernel(x, weight)
    if row_tiles.is_deterministic():  # the greedy token is that of the logits that are reported
        why = "a deterministic engine"
    if not dispatch.runs_kernel("argmax_matmul", why, rows=x.shape[0], by_choice=True):
        return _best_columns(x, weight, forbidden)
    from jaxspec.pallas.matmul.argmax_matmul_kernel import argmax_matmul_kernel

    if isinstance(weight, Float8):
        x, _ = to_float8(x, axis=1)  # positive scales of rows and weight: the same argmax
    return argmax_matmul_kernel(x, weight, forbidden)


def gains_from_float8(weight: Weight) -> bool:
    """Return True if `argmax_matmul` is faster here with `weight` in 8 bits (`Float8.of`)."""
    runs_kernels = dispatch.kernels_here()[1] is None
    is_large = weight.inner >= _MIN_FEATURES and weight.dtype in products.DTYPES
    return runs_kernels and is_large and _why_not_shape(weight, _FLOAT8_TILE) is None


def argmax_matmul_reference(x, weight, forbidden):
    return _best_columns(x, weight, forbidden).winner


def _best_columns(x, weight, forbidden):
    scores = mask_columns(matmul(x, weight, jnp.float32), forbidden)
    columns = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return combine(PartialArgmax(scores, columns, -jnp.abs(scores)), axis=1)


def why_not_kernel(x, weight):
    rows, features = x.shape
    if isinstance(weight, Float8):
        if x.dtype not in products.DTYPES:
            return f"{x.dtype} for 8 bits"
        return _why_not_shape(weight, _FLOAT8_TILE)
    if why := products.why_not_dtypes(x, weight):
        return why
    if features < _MIN_FEATURES:
        return f"{features} features"
    if why := _why_not_shape(weight, _DENSE_TILE):
        return why
    if rows < _MIN_ROWS:  # checked last: only the rows differ between programs
        return f"less than {_MIN_ROWS} rows"
    return None


def _why_not_shape(weight, tile):
    if weight.inner % tile[0] or weight.outer % tile[1]:
        return f"a weight of {weight.inner} x {weight.outer}"
    return None
