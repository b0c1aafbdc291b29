"""Choice of kernels for matmuls of 1 to 8 rows (skinny GEMMs).

A step that decodes one or two requests does little but read weights, and starting and ending its
kernels takes much of its time. So some kernels also run the operations before the matmul:

* `norm_matmul` adds to the residual stream, normalizes the sum and multiplies. Each block
  normalizes all rows, so it is one kernel for one or two rows, and two kernels for more;
* `split_matmul` is split-K: it returns partial sums over parts of the features, which the next
  residual add sums up;
* `gated_matmul` and `squared_relu_matmul` first apply the activation of a feed-forward layer;
* `gated_norm_matmul` first normalizes and gates the heads of Gated DeltaNet.

`gemm` handles matmuls of more rows, XLA all others (`products.matmul`). The bounds below were
measured on an H200: `benchmarks/results/kernels_h200.json`, ops norm_matmul, split_matmul,
gated_matmul.
"""

from jaxtyping import Array, Float

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.products import BLOCK_N, why_not_dtypes
from jaxspec.weight import Weight

MAX_ROWS = 8  # the smallest N of wgmma
HIDDEN = 1024, 2048  # widths of models; in wider ones cuBLAS reads near the memory bandwidth
# `gated_norm_matmul` also wins in Kimi-Linear, where XLA runs four kernels, and `split_matmul` in
# Kimi-Linear, mamba2-2.7b and Nemotron-3-Nano, where XLA runs two; `norm_matmul` ties
# (`benchmarks/results/decode_h200.json`).
GATED_NORM_HIDDEN = *HIDDEN, 2304
SPLIT_HIDDEN = *GATED_NORM_HIDDEN, 2560, 2688
GATE_UNIT = 512  # features gated by a block at a time
_MAX_INNER = 8192  # a block stores all features of the rows if the matmul is not split


def num_parts(inner: int, outer: int, *, unit: int) -> int:
    """Return the number of split-K parts that gives nearly every multiprocessor a block.

    `unit` adjacent features stay in one part.
    """
    return device.parts(-(-outer // BLOCK_N), inner // unit)


def why_not_kernel(
    x: Float[Array, "rows inner"],
    weight: Weight,
    hidden: int,
    widths: tuple[int, ...] = HIDDEN,
) -> str | None:
    """Return why no kernel takes this matmul in a model of width `hidden`, or None.

    `widths` are those of the models in which the kernel is faster than XLA.
    """
    if why := why_not_dtypes(x, weight):
        return why
    if hidden not in widths:
        return f"{hidden} features"
    if weight.inner % 64 or weight.inner > _MAX_INNER or weight.outer % 32:
        return f"a weight of {weight.inner} x {weight.outer}"
    if x.shape[0] > MAX_ROWS:  # checked last: only the rows differ between programs
        return f"not 1 to {MAX_ROWS} rows"
    return None
