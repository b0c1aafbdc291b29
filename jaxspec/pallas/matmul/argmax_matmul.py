"""The greedy token of each row: the product with the output head, and the argmax of its scores."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import products
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.scores import PartialArgmax, combine, mask_columns
from jaxspec.weight import Float8, Weight, to_float8

_MIN_ROWS = 8  # of a product in 16 bits
_MIN_FEATURES = 1024  # the same; below it XLA is as fast
_DENSE_TILE, _FLOAT8_TILE = (64, 64), (128, 8)  # features and columns that are copied together


def argmax_matmul(
    x: Float[Array, "rows features"],
    weight: Weight,
    forbidden: Int[Array, "rows n"],
) -> Int[Array, " rows"]:
    """The column (int32) of the largest entry of each row of `x @ weight`, in float32.

    The lowest column wins among equal scores. A row's `forbidden` columns (int32) are passed over;
    numbers that are no columns, such as -1, forbid nothing. A row where an allowed score is NaN, or
    where no allowed score is finite, gives -1 (`NO_TOKEN`).

    From 8 rows on, in 16 bits, it is one kernel that keeps the scores in registers: 256 rows of a
    vocabulary of 248,320 are 254 MB, which XLA writes and reads again.

    A weight in 8 bits (`Float8`) has half the bytes. The kernel then rounds `x` to 8 bits too, so
    that another column may win whose score is all but equal.

    Raises:
        ValueError: `weight` is not for the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    why = why_not_kernel(x, weight)
    if not dispatch.runs_kernel("argmax_matmul", why, rows=x.shape[0], by_choice=True):
        return argmax_matmul_reference(x, weight, forbidden)
    from jaxspec.pallas.matmul.argmax_matmul_kernel import argmax_matmul_kernel

    if isinstance(weight, Float8):
        x, _ = to_float8(x, axis=1)  # scales, of rows as of the weight, change no argmax
    return argmax_matmul_kernel(x, weight, forbidden)


def gains_from_float8(weight: Weight) -> bool:
    """Whether `argmax_matmul` is faster here with `weight` in 8 bits (`Float8.of`)."""
    runs_kernels = dispatch.kernels_here()[1] is None
    is_large = weight.inner >= _MIN_FEATURES and weight.dtype in products.DTYPES
    return runs_kernels and is_large and _why_not_shape(weight, _FLOAT8_TILE) is None


def argmax_matmul_reference(x, weight, forbidden):
    """The specification of `argmax_matmul`."""
    scores = mask_columns(matmul(x, weight, jnp.float32), forbidden)
    columns = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return combine(PartialArgmax(scores, columns, -jnp.abs(scores)), axis=1)


def why_not_kernel(x, weight):
    """Why `argmax_matmul_kernel` does not take these operands, or None."""
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
    if rows < _MIN_ROWS:  # the last check: rows alone change from program to program
        return f"less than {_MIN_ROWS} rows"
    return None


def _why_not_shape(weight, tile):
    if weight.inner % tile[0] or weight.outer % tile[1]:
        return f"a weight of {weight.inner} x {weight.outer}"
    return None
