"""Matmuls that each have columns of the tokens for themselves: second matrices of low rank."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import products, skinny_gemm
from jaxspec.pallas.matmul.products import BLOCK_N, matmul
from jaxspec.weight import Weight

_MAX_INNER = 512  # a block has all of a group's features in shared memory


def grouped_matmul(
    x: Float[Array, "tokens columns"], starts: Sequence[int], weights: Sequence[Weight]
) -> tuple[Float[Array, "tokens outer"], ...]:
    """Return `x[:, start : start + weight.inner] @ weight` for each group: a start and a weight.

    One kernel computes all products of up to 8 rows in 16 bits, if the weights have one size and
    groups start at multiples of 64 columns, and reads the columns in place. For one row, XLA runs
    two kernels per group: one pads the row, and one multiplies.

    Args:
        x: The columns of all groups, in any order and with others between.
        starts: First column of each group.
        weights: The weight of each group.

    Returns:
        The product of each group, in the dtype of `x`.

    Raises:
        ValueError: `x` lacks columns of a group, there is no weight, or the starts have another
            number.
    """
    if not weights or len(starts) != len(weights):
        raise ValueError(
            f"Each of one or more weights needs a start, got {len(starts)} starts and "
            f"{len(weights)} weights."
        )
    for start, weight in zip(starts, weights, strict=True):
        if not 0 <= start <= x.shape[1] - weight.inner:
            raise ValueError(
                f"A weight of {weight.inner} x {weight.outer} multiplies columns of x from {start} "
                f"on, and x has {x.shape[1]} columns."
            )
    why = why_not_kernel(x, starts, weights)
    if not dispatch.runs_kernel("grouped_matmul", why, rows=x.shape[0], by_choice=True):
        return grouped_matmul_reference(x, starts, weights)
    from jaxspec.pallas.matmul.grouped_matmul_kernel import grouped_matmul_kernel

    arrays = tuple(weight.array for weight in weights)
    return grouped_matmul_kernel(x, arrays, starts=tuple(starts))


def grouped_matmul_reference(x, starts, weights):
    return tuple(
        matmul(x[:, start : start + weight.inner], weight)
        for start, weight in zip(starts, weights, strict=True)
    )


def why_not_kernel(x, starts, weights):
    first, *others = weights
    if why := next(filter(None, (products.why_not_dtypes(x, weight) for weight in weights)), None):
        return why
    inner, outer = first.inner, first.outer
    if any((other.inner, other.outer) != (inner, outer) for other in others):
        return "weights of several sizes"
    if inner % 64 or inner > _MAX_INNER or outer % BLOCK_N:
        return f"weights of {inner} x {outer}"
    # A copy has rows at multiples of 16 bytes, and begins at a tile of 64 columns.
    if x.shape[1] % 8 or any(start % 64 for start in starts):
        return f"columns from {tuple(starts)} on of {x.shape[1]}"
    if x.shape[0] > skinny_gemm.MAX_ROWS:  # checked last: only the rows differ between programs
        return f"not 1 to {skinny_gemm.MAX_ROWS} rows"
    return None
