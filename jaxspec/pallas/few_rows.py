"""Products of few rows (skinny GEMMs): which of them are kernels, and what they hand on.

A step that decodes one or two requests does little but read its weights, and much of its time is
that of kernels which begin and end. Some kernels therefore take into the products what came
between them:

* `norm_matmul` adds to the residual stream, norms it and multiplies (of more than two rows as two
  kernels, for each block would norm them all);
* `split_matmul` is split-K: it puts out partial sums, over parts of the features, which are summed
  up where they are added to the residual stream;
* `gated_matmul` gates the features of a feed-forward layer first, and `gated_norm_matmul` norms and
  gates the heads of Gated DeltaNet.

Products of more rows are `gemm`'s, and all others XLA's (`matmul`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch, mosaic

# What is still to be added to the residual stream (not the delta rule's): nothing yet, tokens in
# its dtype, or float32 partial sums, which make such tokens when summed and rounded.
Delta = Float[Array, "tokens features"] | Float[Array, "parts tokens features"] | None

COLUMNS = 64  # of a block, or a piece of it: the side of tensor cores that takes 64
MOST_ROWS = 8  # what tensor cores take at least; `gemm` takes more
HIDDEN = 1024, 2048  # of a model: with wider ones cuBLAS is near the memory's speed as it is
GATES = 512  # features that a block gates at a time
_MOST_INNER = 8192  # features, which a block must have room for if they cannot be cut
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


def parts_of(inner: int, outer: int, *, unit: int) -> int:
    """Into how many parts the features are cut: a block on nearly every multiprocessor.

    `unit`: features that stay together.
    """
    return mosaic.parts(-(-outer // COLUMNS), inner // unit)


def unsupported(
    x: Float[Array, "rows inner"], weight: Float[Array, "inner outer"], hidden: int
) -> str | None:
    """Why no kernel takes this product of a model so wide, or None."""
    if x.dtype not in DTYPES or x.dtype != weight.dtype:
        return f"{x.dtype} and {weight.dtype}"
    if hidden not in HIDDEN:
        return f"{hidden} features"
    if weight.shape[0] % 64 or weight.shape[0] > _MOST_INNER or weight.shape[1] % 32:
        return f"a weight of {weight.shape[0]} x {weight.shape[1]}"
    if not 0 < x.shape[0] <= MOST_ROWS:
        return f"not 1 to {MOST_ROWS} rows"  # last: the one that changes from program to program
    return None


def matmul(
    x: Float[Array, "rows inner"], weight: Float[Array, "inner outer"], dtype: Any = None
) -> Float[Array, "rows outer"]:
    """`x @ weight` by XLA, in `dtype` or that of the operands.

    Of a product with one row XLA makes multiplications and sums on a GPU, and some of the
    multiplications it writes to memory. Twice the same row is a matrix, which it reads once (the
    kernels of a step of Qwen3.5-0.8B took an H200 1.54 ms before, and 1.27 so).
    """
    rows = x.shape[0]
    if rows == 1 and dispatch.default_device().platform == "gpu":
        x = jnp.broadcast_to(x, (2, x.shape[1]))
    return jnp.matmul(x, weight, preferred_element_type=dtype)[:rows]


def whole(delta: Float[Array, "*parts tokens features"], dtype: Any) -> Float[Array, "tokens _"]:
    """Tokens in `dtype`: of sums over parts the sum, rounded once."""
    return delta if delta.ndim == 2 else jnp.sum(delta, axis=0).astype(dtype)


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
