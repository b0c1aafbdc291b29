"""Products that are added to the residual stream; as kernels split-K, that is, partial sums."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch, few_rows, gemm, products
from jaxspec.pallas.add_norm import rms_norm
from jaxspec.pallas.products import Delta, gated, matmul


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
    is_few = x.shape[0] <= few_rows.MOST_ROWS
    why = (few_rows if is_few else gemm).unsupported(x, weight, weight.shape[1])
    if not dispatch.runs_kernel("split_matmul", why, by_choice=True):
        return split_matmul_reference(x, weight)
    if is_few:
        from jaxspec.pallas.split_matmul_kernel import split_matmul_kernel

        return split_matmul_kernel(x, weight)
    from jaxspec.pallas.gemm_kernel import split_gemm_kernel

    return split_gemm_kernel(x, weight)


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
        from jaxspec.pallas.split_matmul_kernel import gated_matmul_kernel

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


def gated_norm_matmul(
    heads: Float[Array, "tokens heads dim"],
    gates: Float[Array, "tokens columns"],
    first: int,
    norm: Float[Array, " dim"],
    eps: float,
    weight: Float[Array, "inner outer"],
) -> Delta:
    """`split_matmul` of what Gated DeltaNet puts out: normed head by head, and gated.

    Each of the float32 `heads` goes through `rms_norm` with the float32 weight `norm`, and is then
    multiplied by `silu` of its columns of `gates`, all in float32 and rounded to the dtype of
    `gates`. Its columns from `first` on, as many as the heads', are the gates; the others are not
    read (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).

    One kernel of up to 8 rows where `split_matmul` is one, and heads are of 64 or 128.

    Raises:
        ValueError: `weight` is not for the heads, or `gates` lacks columns.
    """
    features = heads.shape[1] * heads.shape[2]
    products.check_inner(features, weight)
    if gates.shape[1] < first + features:
        raise ValueError(
            f"The gates must be columns {first} to {first + features - 1}, but there are "
            f"{gates.shape[1]} columns. Hand over all of the projection."
        )
    why = _unsupported(heads, gates, first, norm, weight)
    if dispatch.runs_kernel("gated_norm_matmul", why, by_choice=True):
        from jaxspec.pallas.split_matmul_kernel import gated_norm_matmul_kernel

        return gated_norm_matmul_kernel(heads, gates, norm, weight, first=first, eps=eps)
    return split_matmul(_gated_norm(heads, gates, first, norm, eps), weight)


def gated_norm_matmul_reference(heads, gates, first, norm, eps, weight):
    """What `gated_norm_matmul` gives, or its parts give when summed and rounded."""
    return matmul(_gated_norm(heads, gates, first, norm, eps), weight)


def _gated_norm(heads, gates, first, norm, eps):
    tokens, number, dim = heads.shape
    gate = gates[:, first : first + number * dim].reshape(heads.shape)
    gated = rms_norm(heads, norm, eps) * jax.nn.silu(gate.astype(jnp.float32))
    return gated.reshape(tokens, -1).astype(gates.dtype)


def _unsupported(heads, gates, first, norm, weight):
    """Why `gated_norm_matmul_kernel` does not take these operands, or None."""
    if heads.dtype != jnp.float32 or norm.dtype != jnp.float32:
        return f"{heads.dtype} with a norm in {norm.dtype}"
    if heads.shape[2] not in (64, 128) or weight.shape[0] not in (512, 1024, 2048, 4096):
        return f"{heads.shape[1]} heads of {heads.shape[2]}"
    if first % 8 or gates.shape[1] % 8:  # a thread loads up to 16 bytes
        return f"gates from column {first} of {gates.shape[1]}"
    return few_rows.unsupported(gates, weight, weight.shape[1])
