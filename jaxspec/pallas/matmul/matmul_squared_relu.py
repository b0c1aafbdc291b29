"""First matmul of a feed-forward layer without a gate, fused with the squared ReLU."""

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import check_inner, matmul
from jaxspec.weight import Weight


def matmul_squared_relu(
    x: Float[Array, "tokens features"], weight: Weight
) -> Float[Array, "tokens outer"]:
    """Return `relu(x @ weight) ** 2` (So et al. 2021, "Primer", arXiv 2109.08668).

    The matmul is rounded to the dtype of `x` before the square, and the result has that dtype. Rows
    are independent, so padding and NaN stay in their own row. One kernel computes it for 16 to 256
    rows in 16 bits, where `gemm.choose` finds one.

    Raises:
        ValueError: `weight` does not match the features of `x`.
    """
    check_inner(x.shape[1], weight)
    why, wave = gemm.choose(x, weight, x.shape[1])
    if dispatch.runs_kernel("matmul_squared_relu", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.gemm_kernel import matmul_squared_relu_kernel

        return matmul_squared_relu_kernel(x, weight.array, wave)
    return matmul_squared_relu_reference(x, weight)


def matmul_squared_relu_reference(x, weight):
    return Activation.SQUARED_RELU(matmul(x, weight))
