"""Matmul by XLA, and checks of operands, for all matmul ops."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec import device
from jaxspec.pallas.matmul import float8_terms
from jaxspec.weight import Columns, Float8, Published, Published8Bit, Weight

BLOCK_N = 64  # columns of the weight per wgmma: its M
_DENSE_COLUMNS = 4096  # columns of a published weight that are in float32 at a time
DTYPES = jnp.bfloat16, jnp.float16  # multiplied by tensor cores without a conversion


def matmul(
    x: Float[Array, "rows inner"], weight: Weight | Columns, dtype: Any = None
) -> Float[Array, "rows outer"]:
    """Return `x @ weight`, computed by XLA, in `dtype` or that of the operands.

    On a GPU a single row is duplicated. XLA turns a matmul of one row into multiplications and
    sums, and writes some of the multiplications to memory; a matmul of two rows is a GEMM, which
    reads the weight once.

    A `Float8` weight is converted to float32, as a copy. A published weight in 8 or 4 bits is too,
    some columns at a time, and multiplied in float32 without rounding its entries. Activations are
    rounded to 8 bits first if the weight has one term.
    """
    if isinstance(weight, Columns):
        return jnp.concatenate([matmul(x, part, dtype) for part in weight.parts], axis=1)
    if isinstance(weight, Published):
        is_rounded = isinstance(weight, Published8Bit)
        seen = float8_terms.as_multiplied(x, weight) if is_rounded else x.astype(jnp.float32)
        return _published_matmul(seen, weight).astype(dtype or x.dtype)
    if isinstance(weight, Float8):
        return matmul(x.astype(jnp.float32), weight.dense()).astype(dtype or x.dtype)
    rows = x.shape[0]
    if rows == 1 and device.default_device().platform == "gpu":
        x = jnp.broadcast_to(x, (2, x.shape[1]))
    return jnp.matmul(x, weight.array, preferred_element_type=dtype)[:rows]


def _published_matmul(x, weight):
    products = [
        jnp.matmul(x, weight.dense(start, _DENSE_COLUMNS).array, precision=lax.Precision.HIGHEST)
        for start in range(0, weight.outer, _DENSE_COLUMNS)
    ]
    return jnp.concatenate(products, axis=1)


def check_inner(features: int, weight: Weight | Columns) -> None:
    """Check that `weight` has a row for each feature; a kernel would read out of bounds.

    Raises:
        ValueError: the weight has more or fewer rows.
    """
    if weight.inner != features:
        raise ValueError(
            f"A weight must have a row for each of the {features} features, but this one is "
            f"{weight.inner} x {weight.outer}. Give it as [features, outputs]."
        )


def why_not_dtypes(x: Float[Array, "rows inner"], weight: Weight) -> str | None:
    """Return why tensor cores cannot multiply these operands without a conversion, or None."""
    if x.dtype not in DTYPES or x.dtype != weight.dtype:
        return f"{x.dtype} and {weight.dtype}"
    return None
