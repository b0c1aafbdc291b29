"""Products of few rows (skinny GEMMs): which of them are kernels.

A step that decodes one or two requests does little but read its weights, and much of its time is
that of kernels which begin and end. Some kernels therefore take into the products what came
between them:

* `norm_matmul` adds to the residual stream, norms it and multiplies (of more than two rows as two
  kernels, for each block would norm them all);
* `split_matmul` is split-K: it puts out partial sums, over parts of the features, which are summed
  up where they are added to the residual stream;
* `gated_matmul` gates the features of a feed-forward layer first, and `gated_norm_matmul` norms and
  gates the heads of Gated DeltaNet.

Products of more rows are `gemm`'s, and all others XLA's (`products.matmul`).
"""

from jaxtyping import Array, Float

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.products import COLUMNS, DTYPES

MOST_ROWS = 8  # what tensor cores take at least; `gemm` takes more
HIDDEN = 1024, 2048  # of a model: with wider ones cuBLAS is near the memory's speed as it is
GATES = 512  # features that a block gates at a time
_MOST_INNER = 8192  # features, which a block must have room for if they cannot be cut


def parts_of(inner: int, outer: int, *, unit: int) -> int:
    """Into how many parts the features are cut: a block on nearly every multiprocessor.

    `unit`: features that stay together.
    """
    return device.parts(-(-outer // COLUMNS), inner // unit)


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
