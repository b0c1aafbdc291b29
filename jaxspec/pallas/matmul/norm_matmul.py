"""Residual add, RMSNorm and matmul: the start of each half of a decoder layer."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul import gemm, products, published_ops, skinny_gemm
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.norm.add_norm import add_norm, add_norm_reference
from jaxspec.pallas.norm.reduce_add_norm import settled
from jaxspec.pallas.norm.residual import OfDevices, Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Columns, Published, Weight

# Maximum rows of the fused kernel. With more rows it is faster to normalize once, in a separate
# kernel (measured in `benchmarks/results/kernels_h200.json`, ops norm_matmul and add_norm).
_MAX_FUSED_ROWS = 2
# Maximum columns of a weight for up to 8 rows: one wave of blocks. With more columns XLA is faster
# (same results, gate_up of the 2B).
_MAX_COLUMNS = device.MULTIPROCESSORS * products.BLOCK_N
# Maximum partial sums per row in the fused kernel, over all parts: they are held in registers.
MAX_SUMS = 8192


def norm_matmul(
    stream: Stream, pending: Pending, norm: Norm, weight: Weight | Columns
) -> tuple[Stream, Float[Array, "tokens columns"]]:
    """Return `stream + pending`, rounded to the stream's dtype, and the norm of it times `weight`.

    `pending` is None, tokens, or partial sums, which are summed and rounded first
    (`norm.residual`).

    One kernel computes everything for 1 or 2 rows of 1024 or 2048 features in 16 bits; each block
    normalizes all rows. For more rows, more than `MAX_SUMS` sums per row, or parts of several
    devices (`reduce_add_norm`), `add_norm` runs before the matmul. That matmul uses `skinny_gemm`
    for up to 8 rows, `gemm` for up to 256, and otherwise XLA. It also uses XLA for up to 8 rows
    with more columns than one wave of blocks has, 8,448. A published weight in 8 or 4 bits
    runs `published_ops`.

    Raises:
        ValueError: `weight` does not match the features of the stream.
    """
    rows, features = stream.shape
    products.check_inner(features, weight)
    pending = settled(stream, pending, norm)
    if isinstance(weight, Published | Columns):
        return published_ops.norm_matmul(stream, pending, norm, weight)
    added = None if isinstance(pending, OfDevices) else pending  # what the fused kernel would add
    is_skinny = rows <= skinny_gemm.MAX_ROWS
    if is_skinny:
        why, wave = why_not_skinny(stream, added, norm, weight), None
    else:
        why, wave = gemm.choose(stream, weight, features)
    runs_kernel = dispatch.runs_kernel("norm_matmul", why, rows=rows, by_choice=True)
    sums = added.shape[0] * features if added is not None and added.ndim == 3 else 0
    if runs_kernel and rows <= _MAX_FUSED_ROWS and sums <= MAX_SUMS and added is pending:
        from jaxspec.pallas.matmul.norm_matmul_kernel import norm_matmul_kernel

        return norm_matmul_kernel(stream, added, norm, weight.array)
    stream, normed = add_norm(stream, pending, norm)
    if not runs_kernel:
        return stream, matmul(normed, weight)
    if is_skinny:
        from jaxspec.pallas.matmul.split_matmul_kernel import matmul_kernel

        return stream, matmul_kernel(normed, weight.array)
    from jaxspec.pallas.matmul.gemm_kernel import gemm_kernel

    return stream, gemm_kernel(normed, weight.array, wave)


def norm_matmul_reference(stream, pending, norm, weight):
    stream, normed = add_norm_reference(stream, pending, norm)
    return stream, matmul(normed, weight)


def why_not_skinny(stream, pending, norm, weight):
    expected = stream.dtype if pending is None or pending.ndim == 2 else jnp.float32
    if pending is not None and pending.dtype != expected:
        return f"{stream.dtype} and {pending.dtype}"
    if norm.weight.dtype != stream.dtype:
        return f"{stream.dtype} with a norm in {norm.weight.dtype}"
    if weight.outer > _MAX_COLUMNS:
        return f"{weight.outer} columns"
    return skinny_gemm.why_not_kernel(stream, weight, stream.shape[1])
