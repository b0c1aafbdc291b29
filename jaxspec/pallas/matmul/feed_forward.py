"""Feed-forward layers, with the residual add and the norm before them; their first matmuls."""

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm, published_ops
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.products import check_inner, matmul
from jaxspec.pallas.matmul.skinny_gemm import MAX_ROWS
from jaxspec.pallas.matmul.split_matmul import gated_matmul, split_matmul, squared_relu_matmul
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Published, Weight


def feed_forward(
    stream: Stream, pending: Pending, norm: Norm, gate_up: Weight, down: Weight
) -> tuple[Stream, Pending]:
    """Add `pending` to the stream, and run a gated feed-forward layer on the norm of the sum.

    Returns the sum and the layer's output, which is pending in turn (`norm.residual`). The output
    is `down(silu(gate) * up)`; the columns of `gate_up` are the gate's, then up's (Shazeer 2020,
    "GLU Variants Improve Transformer", arXiv 2002.05202).

    For up to 8 rows, the second matmul applies the gate. Each block of the first matmul then has
    columns of gate or of up alone, and there are twice as many blocks. For more rows, the first
    matmul applies the gate, once for all blocks of the second. If `down` is a published weight in 8
    bits, what makes e4m3 numbers of its rows applies the gate; if it is one in 4 bits, XLA does.

    Raises:
        ValueError: a weight does not match its features.
    """
    if stream.shape[0] <= MAX_ROWS or isinstance(down, Published):
        stream, gate_and_up = norm_matmul(stream, pending, norm, gate_up)
        return stream, gated_matmul(gate_and_up, down)
    stream, normed = add_norm(stream, pending, norm)
    return stream, split_matmul(matmul_silu(normed, gate_up), down)


def gelu_feed_forward(
    stream: Stream, pending: Pending, norm: Norm, gate_up: Weight, down: Weight
) -> tuple[Stream, Pending]:
    """Like `feed_forward`, with the output `down(gelu(gate) * up)`; GELU is approximated by tanh.

    XLA applies the gate between the kernels of both matmuls.

    Raises:
        ValueError: a weight does not match its features.
    """
    stream, gate_and_up = norm_matmul(stream, pending, norm, gate_up)
    return stream, split_matmul(Activation.GEGLU(gate_and_up), down)


def squared_relu_feed_forward(
    stream: Stream, pending: Pending, norm: Norm, up: Weight, down: Weight
) -> tuple[Stream, Pending]:
    """Like `feed_forward`, with the output `down(relu(up)**2)` (So et al. 2021, arXiv 2109.08668).

    Raises:
        ValueError: a weight does not match its features.
    """
    if stream.shape[0] <= MAX_ROWS or isinstance(down, Published):
        stream, product = norm_matmul(stream, pending, norm, up)
        return stream, squared_relu_matmul(product, down)
    stream, normed = add_norm(stream, pending, norm)
    return stream, split_matmul(matmul_squared_relu(normed, up), down)


def matmul_silu(x: Float[Array, "tokens features"], weight: Weight) -> Float[Array, "tokens inner"]:
    """Return `silu(gate) * up`; `gate` and `up` are the halves of the columns of `x @ weight`.

    The matmul is rounded to the dtype of `x` before the gate, and the result has that dtype
    (Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202).

    One kernel computes it for 16 to 64 rows in 16 bits. The same holds for up to 256 rows if every
    block gets a multiprocessor; above 2048 features most multiprocessors must have a block
    (`gemm`).

    Raises:
        ValueError: `weight` does not match the features of `x`, or its number of columns is odd.
    """
    check_inner(x.shape[1], weight)
    Activation.SWIGLU.check(weight.outer)
    if isinstance(weight, Published):
        return Activation.SWIGLU(published_ops.plain_matmul("matmul_silu", x, weight))
    why, wave = gemm.choose(x, weight, x.shape[1], gate_up=True)
    if dispatch.runs_kernel("matmul_silu", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.gemm_kernel import matmul_silu_kernel

        return matmul_silu_kernel(x, weight.array, wave)
    return matmul_silu_reference(x, weight)


def matmul_silu_reference(x, weight):
    return Activation.SWIGLU(matmul(x, weight))


def matmul_squared_relu(
    x: Float[Array, "tokens features"], weight: Weight
) -> Float[Array, "tokens outer"]:
    """Return `relu(x @ weight) ** 2` (So et al. 2021, "Primer", arXiv 2109.08668).

    The matmul is rounded to the dtype of `x` before the square, and the result has that dtype. One
    kernel computes it for 16 to 256 rows in 16 bits, where `gemm.choose` finds one.

    Raises:
        ValueError: `weight` does not match the features of `x`.
    """
    check_inner(x.shape[1], weight)
    if isinstance(weight, Published):
        product = published_ops.plain_matmul("matmul_squared_relu", x, weight)
        return Activation.SQUARED_RELU(product)
    why, wave = gemm.choose(x, weight, x.shape[1])
    if dispatch.runs_kernel("matmul_squared_relu", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.gemm_kernel import matmul_squared_relu_kernel

        return matmul_squared_relu_kernel(x, weight.array, wave)
    return matmul_squared_relu_reference(x, weight)


def matmul_squared_relu_reference(x, weight):
    return Activation.SQUARED_RELU(matmul(x, weight))
