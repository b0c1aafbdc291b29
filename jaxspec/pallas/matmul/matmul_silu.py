"""First matmul of a gated feed-forward layer, fused with the gate."""

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import check_inner, matmul
from jaxspec.weight import Weight


def matmul_silu(x: Float[Array, "tokens features"], weight: Weight) -> Float[Array, "tokens inner"]:
    """Return `silu(gate) * up`; `gate` and `up` are the halves of the columns of `x @ weight`.

    The matmul is rounded to the dtype of `x` before the gate, and the result has that dtype
    (Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202). Rows are independent, so
    padding and NaN stay in their own row.

    One kernel computes it for 16 to 64 rows in 16 bits. The same holds for up to 256 rows if every
    block gets a multiprocessor; above 2048 features most multiprocessors must have a block
    (`gemm`).

    Raises:
        ValueError: `weight` does not match the features of `x`, or its number of columns is odd.
    """
    check_inner(x.shape[1], weight)
    Activation.SWIGLU.check(weight.outer)
    why, wave = gemm.choose(x, weight, x.shape[1], gate_up=True)
    if dispatch.runs_kernel("matmul_silu", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.gemm_kernel import matmul_silu_kernel

        return matmul_silu_kernel(x, weight.array, wave)
    return matmul_silu_reference(x, weight)


def matmul_silu_reference(x, weight):
    return Activation.SWIGLU(matmul(x, weight))
