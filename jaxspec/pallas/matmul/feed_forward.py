"""Feed-forward layers of a decoder, with the residual add and the norm before them."""

from jaxspec.pallas.matmul.matmul_silu import matmul_silu
from jaxspec.pallas.matmul.matmul_squared_relu import matmul_squared_relu
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.skinny_gemm import MAX_ROWS
from jaxspec.pallas.matmul.split_matmul import gated_matmul, split_matmul, squared_relu_matmul
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Weight


def feed_forward(
    stream: Stream, pending: Pending, norm: Norm, gate_up: Weight, down: Weight
) -> tuple[Stream, Pending]:
    """Add `pending` to the stream, and run a gated feed-forward layer on the norm of the sum.

    Returns the sum and the layer's output, which is pending in turn (`norm.residual`). The output
    is `down(silu(gate) * up)`; the columns of `gate_up` are the gate's, then up's (Shazeer 2020,
    "GLU Variants Improve Transformer", arXiv 2002.05202). Rows are independent, so padding and NaN
    stay in their own row.

    For up to 8 rows, the second matmul applies the gate. Each block of the first matmul then has
    columns of gate or of up alone, and there are twice as many blocks. For more rows, the first
    matmul applies the gate, once for all blocks of the second.

    Raises:
        ValueError: a weight does not match its features.
    """
    if stream.shape[0] <= MAX_ROWS:
        stream, gate_and_up = norm_matmul(stream, pending, norm, gate_up)
        return stream, gated_matmul(gate_and_up, down)
    stream, normed = add_norm(stream, pending, norm)
    return stream, split_matmul(matmul_silu(normed, gate_up), down)


def squared_relu_feed_forward(
    stream: Stream, pending: Pending, norm: Norm, up: Weight, down: Weight
) -> tuple[Stream, Pending]:
    """Like `feed_forward`, with the output `down(relu(up)**2)` (So et al. 2021, arXiv 2109.08668).

    Raises:
        ValueError: a weight does not match its features.
    """
    if stream.shape[0] <= MAX_ROWS:
        stream, product = norm_matmul(stream, pending, norm, up)
        return stream, squared_relu_matmul(product, down)
    stream, normed = add_norm(stream, pending, norm)
    return stream, split_matmul(matmul_squared_relu(normed, up), down)
