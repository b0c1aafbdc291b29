"""Products that are added to the residual stream; as kernels split-K, that is, partial sums."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import few_rows, gemm, products
from jaxspec.pallas.matmul.products import gated, matmul
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Delta


def split_matmul(x: Float[Array, "tokens inner"], weight: Float[Array, "inner outer"]) -> Delta:
    """`x @ weight`: in their dtype, or as float32 partial sums over parts of `inner` (split-K).

    Of up to 8 rows in 16 bits, and 1024 or 2048 columns, one kernel makes `[parts, tokens, outer]`:
    as many blocks as there are multiprocessors, as nearly as `inner` divides, and the sum of the
    parts is left to what adds it to the residual stream, as `norm_matmul` and `add_norm` do. Of
    more, as `gemm` says, another makes them, or tokens where one part gives blocks enough.
    Otherwise XLA makes the product, `[tokens, outer]`. Rows do not meet: padding and NaN stay in
    their own.

    Raises:
        ValueError: `weight` is not for the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    is_few, hidden = x.shape[0] <= few_rows.MOST_ROWS, weight.shape[1]
    if is_few:
        why, wave = few_rows.unsupported(x, weight, hidden), None
    else:
        why, wave = gemm.choose(x, weight, hidden, most_parts=gemm.MOST_PARTS)
    if not dispatch.runs_kernel("split_matmul", why, by_choice=True):
        return split_matmul_reference(x, weight)
    if is_few:
        from jaxspec.pallas.matmul.split_matmul_kernel import split_matmul_kernel

        return split_matmul_kernel(x, weight)
    from jaxspec.pallas.matmul.gemm_kernel import split_gemm_kernel

    return split_gemm_kernel(x, weight, wave)


def split_matmul_reference(x, weight):
    """What `split_matmul` gives, or its parts give when summed and rounded."""
    return matmul(x, weight)


def gated_matmul(
    x: Float[Array, "tokens twice_inner"], weight: Float[Array, "inner outer"]
) -> Delta:
    """`split_matmul` of `silu(gate) * other`, as a gated feed-forward layer ends.

    The columns of `x` are as many gates and then as many others (Shazeer 2020, "GLU Variants
    Improve Transformer", arXiv 2002.05202). Their products are rounded to the dtype of `x`.

    One kernel of up to 8 rows where `split_matmul` is one, and a block's part of `inner` is 512,
    1024 or 1536; more rows should come gated (`matmul_silu`).

    Raises:
        ValueError: `weight` is not for half the columns of `x`, or these are not even in number.
    """
    products.check_gates(x.shape[1])
    products.check_inner(x.shape[1] // 2, weight)
    if dispatch.runs_kernel("gated_matmul", _cannot_gate(x, weight), by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import gated_matmul_kernel

        return gated_matmul_kernel(x, weight)
    return split_matmul(gated(x), weight)


def gated_matmul_reference(x, weight):
    """What `gated_matmul` gives, or its parts give when summed and rounded."""
    return matmul(gated(x), weight)


def _cannot_gate(x, weight):
    """Why `gated_matmul_kernel` does not take these operands, or None."""
    inner, outer = weight.shape
    part, rest = divmod(
        inner // few_rows.GATES, few_rows.parts_of(inner, outer, unit=few_rows.GATES)
    )
    if inner % few_rows.GATES or part > 3 or rest:  # a thread has 4 values of a row at a time
        return f"{inner} gates"
    return few_rows.unsupported(x, weight, outer)


def gated_norm_matmul(heads: Heads, norm: GatedNorm, weight: Float[Array, "inner outer"]) -> Delta:
    """`split_matmul` of what Gated DeltaNet puts out, normed head by head, and gated.

    Heads that are not normed yet, in float32, take one kernel of up to 8 rows where `split_matmul`
    is one, and heads are of 64 or 128.

    Raises:
        ValueError: `weight` is not for the heads, or `norm` is not (`GatedNorm.check`).
    """
    features = math.prod(heads.shape[1:])
    products.check_inner(features, weight)
    norm.check(heads.shape[0], features)
    if heads.ndim == 2:
        return split_matmul(heads, weight)
    why = _unsupported(heads, norm, weight)
    if dispatch.runs_kernel("gated_norm_matmul", why, by_choice=True):
        from jaxspec.pallas.matmul.split_matmul_kernel import gated_norm_matmul_kernel

        return gated_norm_matmul_kernel(heads, norm, weight)
    return split_matmul(norm(heads), weight)


def gated_norm_matmul_reference(heads, norm, weight):
    """What `gated_norm_matmul` gives, or its parts give when summed and rounded."""
    return matmul(norm(heads), weight)


def _unsupported(heads, norm, weight):
    """Why `gated_norm_matmul_kernel` does not take these operands, or None."""
    if heads.dtype != jnp.float32 or norm.weight.dtype != jnp.float32:
        return f"{heads.dtype} with a norm in {norm.weight.dtype}"
    if heads.shape[2] not in (64, 128) or weight.shape[0] not in (512, 1024, 2048, 4096):
        return f"{heads.shape[1]} heads of {heads.shape[2]}"
    if norm.first % 8 or norm.gates.shape[1] % 8:  # a thread loads up to 16 bytes
        return f"gates from column {norm.first} of {norm.gates.shape[1]}"
    return few_rows.unsupported(norm.gates, weight, weight.shape[1])
