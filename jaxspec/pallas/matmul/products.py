"""What products of a weight have in common, and what they hand on (`Delta`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import device

COLUMNS = 64  # of a block, or a piece of it: the side of tensor cores that takes 64
DTYPES = jnp.bfloat16, jnp.float16  # that tensor cores take as they come


def check_inner(features: int, weight: Float[Array, "inner outer"]) -> None:
    """Refuse a weight that is not for so many features: a kernel would read what is beside them.

    Raises:
        ValueError: it has more or fewer rows.
    """
    if weight.shape[0] != features:
        raise ValueError(
            f"A weight must have a row for each of the {features} features, but this one is "
            f"{weight.shape[0]} x {weight.shape[1]}. Give it as [features, outputs]."
        )


def matmul(
    x: Float[Array, "rows inner"], weight: Float[Array, "inner outer"], dtype: Any = None
) -> Float[Array, "rows outer"]:
    """`x @ weight` by XLA, in `dtype` or that of the operands.

    Of a product with one row XLA makes multiplications and sums on a GPU, and some of the
    multiplications it writes to memory. Twice the same row is a matrix, which it reads once (the
    kernels of a step of Qwen3.5-0.8B took an H200 1.54 ms before, and 1.27 so).
    """
    rows = x.shape[0]
    if rows == 1 and device.default_device().platform == "gpu":
        x = jnp.broadcast_to(x, (2, x.shape[1]))
    return jnp.matmul(x, weight, preferred_element_type=dtype)[:rows]


def check_gates(columns: int) -> None:
    """Refuse columns that cannot be as many gates and then as many others.

    Raises:
        ValueError: they are not even in number.
    """
    if columns % 2:
        raise ValueError(
            f"There must be as many gates as others, but {columns} columns came. Hand over both "
            "side by side."
        )


def gated(x: Float[Array, "tokens twice_features"]) -> Float[Array, "tokens features"]:
    """`silu(gate) * other` of as many gates and then others, in their dtype."""
    gate, other = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * other
