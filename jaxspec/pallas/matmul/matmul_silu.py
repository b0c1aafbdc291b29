"""The first product of a gated feed-forward layer, and the gate."""

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import check_inner, matmul
from jaxspec.weight import Weight


def matmul_silu(x: Float[Array, "tokens features"], weight: Weight) -> Float[Array, "tokens inner"]:
    """`silu(gate) * up`, where `gate` and `up` are the halves of the columns of `x @ weight`.

    The product is rounded to the dtype of `x` before the gate, and the result is in that dtype
    (Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202). Rows are independent, so
    padding and NaN stay in their own row.

    It is one kernel for 16 to 64 rows in 16 bits. It is one for up to 256 rows, too, if each of its
    blocks then has a multiprocessor of its own; above 2048 features most multiprocessors must have
    a block (`gemm`).

    Raises:
        ValueError: `weight` is not for the features of `x`, or its number of columns is odd.
    """
    check_inner(x.shape[1], weight)
    Activation.SWIGLU.check(weight.outer)
    why, wave = gemm.choose(x, weight, x.shape[1], gate_up=True)
    if dispatch.runs_kernel("matmul_silu", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.gemm_kernel import matmul_silu_kernel

        return matmul_silu_kernel(x, weight.array, wave)
    return matmul_silu_reference(x, weight)


def matmul_silu_reference(x, weight):
    """The specification of `matmul_silu`."""
    return Activation.SWIGLU(matmul(x, weight))
