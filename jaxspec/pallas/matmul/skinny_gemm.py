"""Products of 1 to 8 rows (skinny GEMMs): which of them are kernels.

A step that decodes one or two requests does little but read its weights, and the start and end of
its kernels take much of its time. Some kernels therefore do what comes before the product, too:

* `norm_matmul` adds to the residual stream, norms the sum and multiplies. Each of its blocks norms
  all rows, so it is one kernel for one or two rows, and two kernels for more;
* `split_matmul` is split-K: it puts out partial sums over parts of the features, which the addition
  to the residual stream sums up;
* `gated_matmul` and `squared_relu_matmul` first activate the features of a feed-forward layer;
* `gated_norm_matmul` first norms and gates the heads of Gated DeltaNet.

Products of more rows are `gemm`'s, and all others XLA's (`products.matmul`). The bounds below were
measured on an H200: `benchmarks/results/kernels_h200.json`, ops norm_matmul, split_matmul,
gated_matmul.
"""

from jaxtyping import Array, Float

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.products import BLOCK_N, why_not_dtypes
from jaxspec.weight import Weight

MAX_ROWS = 8  # the smallest N of wgmma
HIDDEN = 1024, 2048  # widths of models; in wider ones cuBLAS reads near the memory's speed
# `split_matmul` wins in mamba2-2.7b and Nemotron-3-Nano, too, where XLA makes two kernels of it;
# `norm_matmul` ties (`benchmarks/results/decode_h200.json`).
SPLIT_HIDDEN = *HIDDEN, 2560, 2688
GATE_UNIT = 512  # features that a block gates at a time
_MAX_INNER = 8192  # a block must have room for the rows of a product that is not split


def num_parts(inner: int, outer: int, *, unit: int) -> int:
    """The number of parts of the features that gives nearly every multiprocessor a block.

    `unit` features stay together.
    """
    return device.parts(-(-outer // BLOCK_N), inner // unit)


def why_not_kernel(
    x: Float[Array, "rows inner"],
    weight: Weight,
    hidden: int,
    widths: tuple[int, ...] = HIDDEN,
) -> str | None:
    """Why no kernel takes this product in a model of width `hidden`, or None.

    `widths`: of the models in which it is faster than XLA's.
    """
    if why := why_not_dtypes(x, weight):
        return why
    if hidden not in widths:
        return f"{hidden} features"
    if weight.inner % 64 or weight.inner > _MAX_INNER or weight.outer % 32:
        return f"a weight of {weight.inner} x {weight.outer}"
    if x.shape[0] > MAX_ROWS:  # the last check: rows alone change from program to program
        return f"not 1 to {MAX_ROWS} rows"
    return None
