"""The first product of a gated feed-forward layer, and the gate."""

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm
from jaxspec.pallas.matmul.products import check_gates, check_inner, gated, matmul


def matmul_silu(
    x: Float[Array, "tokens features"], weight: Float[Array, "features twice_inner"]
) -> Float[Array, "tokens inner"]:
    """`silu(gate) * other`, as a gated feed-forward layer begins, in the dtype of `x`.

    The columns of `x @ weight` are as many gates and then others (Shazeer 2020, "GLU Variants
    Improve Transformer", arXiv 2002.05202). They are rounded before they are multiplied. Rows do
    not meet: padding and NaN stay in their own.

    One kernel of 16 to 64 rows in 16 bits, and of up to 256 if each of its blocks then has a
    multiprocessor, and with more than 2048 features most of these a block (`gemm`).

    Raises:
        ValueError: `weight` is not for the features of `x`, or its columns are not even in number.
    """
    check_inner(x.shape[1], weight)
    check_gates(weight.shape[1])
    why, wave = gemm.choose(x, weight, x.shape[1], gates=True)
    if dispatch.runs_kernel("matmul_silu", why, by_choice=True):
        from jaxspec.pallas.matmul.gemm_kernel import matmul_silu_kernel

        return matmul_silu_kernel(x, weight, wave)
    return matmul_silu_reference(x, weight)


def matmul_silu_reference(x, weight):
    """The specification of `matmul_silu`."""
    return gated(matmul(x, weight))
