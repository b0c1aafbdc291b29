"""The parts that products share: the product by XLA, and the checks."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import device
from jaxspec.weight import Float8, Weight

BLOCK_N = 64  # columns of the weight that one product of a block takes: the M of wgmma
DTYPES = jnp.bfloat16, jnp.float16  # the dtypes that tensor cores multiply without a conversion


def matmul(
    x: Float[Array, "rows inner"], weight: Weight, dtype: Any = None
) -> Float[Array, "rows outer"]:
    """`x @ weight` by XLA, in `dtype` or that of the operands.

    On a GPU one row becomes two equal rows. XLA turns a product with a single row into
    multiplications and sums, and writes some of the multiplications to memory; a product of two
    rows is a matrix product, which reads the weight once.

    A weight in 8 bits is multiplied in float32, as a copy.
    """
    if isinstance(weight, Float8):
        return matmul(x.astype(jnp.float32), weight.dense()).astype(dtype or x.dtype)
    rows = x.shape[0]
    if rows == 1 and device.default_device().platform == "gpu":
        x = jnp.broadcast_to(x, (2, x.shape[1]))
    return jnp.matmul(x, weight.array, preferred_element_type=dtype)[:rows]


def check_inner(features: int, weight: Weight) -> None:
    """Refuse a weight for another number of features; a kernel would read beyond the operands.

    Raises:
        ValueError: the weight has more or fewer rows than there are features.
    """
    if weight.inner != features:
        raise ValueError(
            f"A weight must have a row for each of the {features} features, but this one is "
            f"{weight.inner} x {weight.outer}. Give it as [features, outputs]."
        )


def why_not_dtypes(x: Float[Array, "rows inner"], weight: Weight) -> str | None:
    """Why tensor cores do not multiply these operands as they are, or None."""
    if x.dtype not in DTYPES or x.dtype != weight.dtype:
        return f"{x.dtype} and {weight.dtype}"
    return None
