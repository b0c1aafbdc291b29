"""Products whose output is pending: the next norm adds it to the residual stream.

As kernels they are split-K: they put out float32 partial sums over parts of the features.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm, products, skinny_gemm
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Pending
from jaxspec.weight import Weight


def split_matmul(x: Float[Array, "tokens inner"], weight: Weight) -> Pending:
    """`x @ weight` as tokens in their dtype, or as float32 partial sums over parts of `inner`.

    For up to 8 rows in 16 bits, and 1024, 2048 or 2688 columns, one kernel makes `[parts, tokens,
    outer]`, with a block for nearly every multiprocessor. `norm_matmul` and `add_norm` sum the
    parts up when they add them to the residual stream. For 16 to 256 rows a kernel of `gemm` makes
    partial sums, or tokens where one part gives blocks enough. Otherwise XLA makes tokens,
    `[tokens, outer]`. Rows are independent, so padding and NaN stay in their own row.

    Raises:
        ValueError: `weight` is not for the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    is_skinny, hidden = x.shape[0] <= skinny_gemm.MAX_ROWS, weight.outer
    if is_skinny:
        widths = skinny_gemm.SPLIT_HIDDEN
        why, wave = skinny_gemm.why_not_kernel(x, weight, hidden, widths), None
    else:
        why, wave = gemm.choose(x, weight, hidden, max_parts=gemm.MAX_PARTS)
    if not dispatch.runs_kernel("split_matmul", why, rows=x.shape[0], by_choice=True):
        return split_matmul_reference(x, weight)
    if is_skinny:
        from jaxspec.pallas.matmul.split_matmul_kernel import split_matmul_kernel

        return split_matmul_kernel(x, weight.array)
    from jaxspec.pallas.matmul.gemm_kernel import split_gemm_kernel

    return split_gemm_kernel(x, weight.array, wave)


def split_matmul_reference(x, weight):
    """What the parts of `split_matmul` make when they are summed and rounded."""
    return matmul(x, weight)


def gated_matmul(x: Float[Array, "tokens twice_inner"], weight: Weight) -> Pending:
    """`split_matmul` of `silu(gate) * up`; the columns of `x` are those of gate, then those of up.

    A gated feed-forward layer ends so (Shazeer 2020, "GLU Variants Improve Transformer", arXiv
    2002.05202). What is gated is rounded to the dtype of `x` before the product.

    It is one kernel for up to 8 rows, where `split_matmul` is one and a block's part of `inner` is
    512, 1024 or 1536. More rows should come gated, from `matmul_silu`.

    Raises:
        ValueError: `weight` is not for half the columns of `x`, or their number is odd.
    """
    Activation.SWIGLU.check(x.shape[1])
    products.check_inner(x.shape[1] // 2, weight)
    why = why_not_gate(x, weight)
    if dispatch.runs_kernel("gated_matmul", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import gated_matmul_kernel

        return gated_matmul_kernel(x, weight.array)
    return split_matmul(Activation.SWIGLU(x), weight)


def gated_matmul_reference(x, weight):
    """What the parts of `gated_matmul` make when they are summed and rounded."""
    return matmul(Activation.SWIGLU(x), weight)


def squared_relu_matmul(x: Float[Array, "tokens inner"], weight: Weight) -> Pending:
    """`split_matmul` of `relu(x)**2` (So et al. 2021, "Primer", arXiv 2109.08668).

    The square is rounded to the dtype of `x` before the product. It is one kernel where
    `gated_matmul` is one. More rows should come squared, from `matmul_squared_relu`.

    Raises:
        ValueError: `weight` is not for the columns of `x`.
    """
    products.check_inner(x.shape[1], weight)
    why = why_not_gate(x, weight)
    if dispatch.runs_kernel("squared_relu_matmul", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import squared_relu_matmul_kernel

        return squared_relu_matmul_kernel(x, weight.array)
    return split_matmul(Activation.SQUARED_RELU(x), weight)


def squared_relu_matmul_reference(x, weight):
    """What the parts of `squared_relu_matmul` make when they are summed and rounded."""
    return matmul(Activation.SQUARED_RELU(x), weight)


def why_not_gate(x, weight):
    """Why no kernel activates these operands before the product, or None."""
    units, rest = divmod(weight.inner, skinny_gemm.GATE_UNIT)
    parts = skinny_gemm.num_parts(weight.inner, weight.outer, unit=skinny_gemm.GATE_UNIT)
    # A thread gates four neighbouring features at a time, and no more than three times.
    if rest or units % parts or units // parts > 3:
        return f"{weight.inner} gates"
    return skinny_gemm.why_not_kernel(x, weight, weight.outer)


def gated_norm_matmul(heads: Heads, norm: GatedNorm, weight: Weight) -> Pending:
    """`split_matmul` of the output of Gated DeltaNet, after its gated norm.

    `heads` of two axes are normed already (`Heads`), and are multiplied as they are. It is one
    kernel for up to 8 rows of float32 heads of 64 or 128 channels, where `split_matmul` is one.

    Raises:
        ValueError: `weight` is not for the heads, or `norm` is not (`GatedNorm.check`).
    """
    features = math.prod(heads.shape[1:])
    products.check_inner(features, weight)
    norm.check(heads.shape[0], features)
    if heads.ndim == 2:
        return split_matmul(heads, weight)
    why = why_not_norm(heads, norm, weight)
    if dispatch.runs_kernel("gated_norm_matmul", why, rows=heads.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import gated_norm_matmul_kernel

        return gated_norm_matmul_kernel(heads, norm, weight.array)
    return split_matmul(norm(heads), weight)


def gated_norm_matmul_reference(heads, norm, weight):
    """What the parts of `gated_norm_matmul` make when they are summed and rounded."""
    return matmul(norm(heads), weight)


def why_not_norm(heads, norm, weight):
    """Why `gated_norm_matmul_kernel` does not take these operands, or None."""
    if heads.dtype != jnp.float32 or norm.weight.dtype != jnp.float32:
        return f"{heads.dtype} with a norm in {norm.weight.dtype}"
    if heads.shape[2] not in (64, 128) or weight.inner not in (512, 1024, 2048, 4096):
        return f"{heads.shape[1]} heads of {heads.shape[2]}"
    if norm.first % 8 or norm.gates.shape[1] % 8:  # a thread loads up to 16 bytes
        return f"gates from column {norm.first} of {norm.gates.shape[1]}"
    return skinny_gemm.why_not_kernel(norm.gates, weight, weight.outer)
