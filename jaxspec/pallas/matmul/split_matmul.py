"""Matmuls whose output is pending: the next norm adds it to the residual stream.

Their kernels are split-K: they return float32 partial sums over parts of the features. A published
weight in 8 or 4 bits runs `published_ops`, for any number of rows.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import gemm, products, published_ops, skinny_gemm
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Pending
from jaxspec.weight import Published, Weight


def split_matmul(x: Float[Array, "tokens inner"], weight: Weight) -> Pending:
    """Return `x @ weight`: tokens in their dtype, or float32 partial sums over parts of `inner`.

    For up to 8 rows in 16 bits, and `skinny_gemm.SPLIT_HIDDEN` columns, one kernel returns `[parts,
    tokens, outer]`, with a block for nearly every multiprocessor. `norm_matmul` and `add_norm` sum
    the parts when they add them to the residual stream. For 16 to 256 rows a kernel of `gemm`
    returns partial sums, or tokens if one part has enough blocks. Otherwise XLA returns tokens,
    `[tokens, outer]`.

    Raises:
        ValueError: `weight` does not match the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    if isinstance(weight, Published):
        return published_ops.split_matmul(x, weight)
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
    """Reference for `split_matmul`; as in those below, the parts are summed and rounded."""
    return matmul(x, weight)


def gated_matmul(x: Float[Array, "tokens twice_inner"], weight: Weight) -> Pending:
    """Return `split_matmul` of `silu(gate) * up`; columns of `x` are the gate's, then up's.

    It ends a gated feed-forward layer (Shazeer 2020, "GLU Variants Improve Transformer", arXiv
    2002.05202). The gated features are rounded to the dtype of `x` before the matmul.

    One kernel computes it for up to 8 rows in 16 bits and `skinny_gemm.HIDDEN` columns, if a
    block's part of `inner` is 512, 1024 or 1536. For more rows, `matmul_silu` should apply the gate
    instead.

    Raises:
        ValueError: `weight` does not match half the columns of `x`, or their number is odd.
    """
    Activation.SWIGLU.check(x.shape[1])
    products.check_inner(x.shape[1] // 2, weight)
    if isinstance(weight, Published):
        return published_ops.activated_matmul("gated_matmul", x, weight, Activation.SWIGLU)
    why = why_not_gate(x, weight)
    if dispatch.runs_kernel("gated_matmul", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import gated_matmul_kernel

        return gated_matmul_kernel(x, weight.array)
    return split_matmul(Activation.SWIGLU(x), weight)


def gated_matmul_reference(x, weight):
    return matmul(Activation.SWIGLU(x), weight)


def squared_relu_matmul(x: Float[Array, "tokens inner"], weight: Weight) -> Pending:
    """Return `split_matmul` of `relu(x)**2` (So et al. 2021, "Primer", arXiv 2109.08668).

    The square is rounded to the dtype of `x` before the matmul. One kernel computes it under the
    conditions of `gated_matmul`. For more rows, `matmul_squared_relu` should apply the square
    instead.

    Raises:
        ValueError: `weight` does not match the columns of `x`.
    """
    products.check_inner(x.shape[1], weight)
    if isinstance(weight, Published):
        activation = Activation.SQUARED_RELU
        return published_ops.activated_matmul("squared_relu_matmul", x, weight, activation)
    why = why_not_gate(x, weight)
    if dispatch.runs_kernel("squared_relu_matmul", why, rows=x.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import squared_relu_matmul_kernel

        return squared_relu_matmul_kernel(x, weight.array)
    return split_matmul(Activation.SQUARED_RELU(x), weight)


def squared_relu_matmul_reference(x, weight):
    return matmul(Activation.SQUARED_RELU(x), weight)


def why_not_gate(x, weight):
    units, rest = divmod(weight.inner, skinny_gemm.GATE_UNIT)
    parts = skinny_gemm.num_parts(weight.inner, weight.outer, unit=skinny_gemm.GATE_UNIT)
    # A thread gates four adjacent features at a time, at most three times.
    if rest or units % parts or units // parts > 3:
        return f"{weight.inner} gates"
    return skinny_gemm.why_not_kernel(x, weight, weight.outer)


def gated_norm_matmul(heads: Heads, norm: GatedNorm, weight: Weight) -> Pending:
    """Return `split_matmul` of the output of Gated DeltaNet, after its gated norm.

    `heads` with two axes are already normalized (`Heads`), and are multiplied directly. One kernel
    computes it for up to 8 rows of float32 heads of 64 or 128 channels, with
    `skinny_gemm.GATED_NORM_HIDDEN` columns.

    Raises:
        ValueError: `weight` or `norm` does not match the heads (`GatedNorm.check`).
    """
    features = math.prod(heads.shape[1:])
    products.check_inner(features, weight)
    norm.check(heads.shape[0], features)
    if heads.ndim == 2:
        return split_matmul(heads, weight)
    if isinstance(weight, Published):
        return published_ops.gated_norm_matmul(heads, norm, weight)
    why = why_not_norm(heads, norm, weight)
    if dispatch.runs_kernel("gated_norm_matmul", why, rows=heads.shape[0], by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import gated_norm_matmul_kernel

        return gated_norm_matmul_kernel(heads, norm, weight.array)
    return split_matmul(norm(heads), weight)


def gated_norm_matmul_reference(heads, norm, weight):
    return matmul(norm(heads), weight)


def why_not_norm(heads, norm, weight):
    if heads.dtype != jnp.float32 or norm.weight.dtype != jnp.float32:
        return f"{heads.dtype} with a norm in {norm.weight.dtype}"
    if heads.shape[2] not in (64, 128) or weight.inner not in (512, 1024, 2048, 4096):
        return f"{heads.shape[1]} heads of {heads.shape[2]}"
    if norm.first % 8 or norm.gates.shape[1] % 8:  # vectors of 16 bytes
        return f"gates from column {norm.first} of {norm.gates.shape[1]}"
    widths = skinny_gemm.GATED_NORM_HIDDEN
    return skinny_gemm.why_not_kernel(norm.gates, weight, weight.outer, widths)
