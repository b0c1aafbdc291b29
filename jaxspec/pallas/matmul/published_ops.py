"""The ops of this package for weights in 8 and 4 bits as published; their arguments are checked.

In 8 bits, activations are not rounded, unless the weight has one term. For up to 8 rows one kernel
makes e4m3 numbers of the activations in every block (`float8`). It also runs the activation or the
gated norm before the matmul. More rows would be read and computed too often, so the kernel of what
precedes makes their e4m3 numbers once, and another one multiplies those (`float8_gemm`), as it does
few rows of some weights (`float8.is_fused`): `Float8Rows` with one term has numbers made by XLA.
From 128 rows on that is a kernel for many rows (`float8_many_rows`) if it should take less time.

In 4 bits one kernel multiplies activations as they are, for all numbers of rows (`four_bits`).
"""

import jax
import jax.numpy as jnp

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import float8, float8_terms, four_bits
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.float8_gemm import Float8GemmTiling
from jaxspec.pallas.matmul.float8_many_rows import Float8ManyRowsTiling
from jaxspec.pallas.matmul.float8_terms import Terms
from jaxspec.pallas.matmul.products import BLOCK_N, matmul
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.add_norm import why_not_kernel as why_not_add_norm
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import OfDevices, Output, Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Columns, Published, Published4Bit, Published8Bit

_NORM_FEATURES = 8 * float8_terms.CHUNK  # unit of features that a block's warps share equally


def why_not_kernel(x: Stream | jax.ShapeDtypeStruct, weight: Published) -> str | None:
    """Return why no kernel can multiply rows in the dtype of `x` by `weight`, or None."""
    if isinstance(weight, Published4Bit):
        return four_bits.why_not_kernel(x, weight)
    return float8.why_not_kernel(x, weight)


def plain_matmul(op: str, x: Stream, weight: Published, terms: Terms | None = None) -> Stream:
    """Return `x @ weight` in the dtype of `x`, as part of `op`; `terms` may be those of `x`."""
    if isinstance(weight, Published4Bit):
        return _four_bits(op, x, weight)
    why = float8.why_not_kernel(x, weight)
    if not _runs_kernel(op, why, x):
        return matmul(x, weight)
    if float8.is_fused(x.shape[0], weight):
        from jaxspec.pallas.matmul.float8_kernel import matmul_kernel

        return matmul_kernel(x, weight)
    return _gemm(terms or _terms(x, weight), weight, x)


def norm_matmul(
    stream: Stream, pending: Pending, norm: Norm, weight: Published | Columns
) -> tuple[Stream, Stream]:
    parts = weight.parts if isinstance(weight, Columns) else (weight,)
    (stream, normed), terms = _add_norm(stream, pending, norm, parts[0])
    products = [
        plain_matmul("norm_matmul", normed, part, terms if part is parts[0] else None)
        if isinstance(part, Published)
        else matmul(normed, part)
        for part in parts
    ]
    return stream, products[0] if len(products) == 1 else jnp.concatenate(products, axis=1)


def split_matmul(x: Stream, weight: Published) -> Output:
    if isinstance(weight, Published4Bit):
        return _four_bits("split_matmul", x, weight, is_split=True)
    why = float8.why_not_kernel(x, weight)
    if not _runs_kernel("split_matmul", why, x):
        return matmul(x, weight)
    if float8.is_fused(x.shape[0], weight):
        from jaxspec.pallas.matmul.float8_kernel import split_matmul_kernel

        return split_matmul_kernel(x, weight)
    return _gemm(_terms(x, weight), weight, x, is_split=True)


def activated_matmul(op: str, x: Stream, weight: Published, activation: Activation) -> Output:
    """Run `gated_matmul` or `squared_relu_matmul`."""
    if isinstance(weight, Published4Bit):
        return _four_bits(op, activation(x), weight, is_split=True)
    why = float8.why_not_kernel(x, weight) or float8.why_not_split_by_kernel(weight)
    if not _runs_kernel(op, why, x):
        return split_matmul(activation(x), weight)
    if float8.is_fused(x.shape[0], weight):
        from jaxspec.pallas.matmul.float8_kernel import activated_matmul_kernel

        return activated_matmul_kernel(x, weight, activation)
    from jaxspec.pallas.matmul.float8_split_kernel import activated_split_kernel

    terms = activated_split_kernel(x, activation, weight.terms)
    return _gemm(terms, weight, x, is_split=True)


def gated_norm_matmul(heads: Heads, norm: GatedNorm, weight: Published) -> Output:
    """Run `gated_norm_matmul` for heads that are not normalized yet."""
    if isinstance(weight, Published4Bit):
        return _four_bits("gated_norm_matmul", norm(heads), weight, is_split=True)
    why = _why_not_norm(heads, norm, weight) or float8.why_not_split_by_kernel(weight)
    if not _runs_kernel("gated_norm_matmul", why, heads):
        return split_matmul(norm(heads), weight)
    if float8.is_fused(heads.shape[0], weight):
        from jaxspec.pallas.matmul.float8_kernel import gated_norm_matmul_kernel

        return gated_norm_matmul_kernel(heads, norm, weight)
    from jaxspec.pallas.matmul.float8_split_kernel import gated_norm_split_kernel

    terms = gated_norm_split_kernel(heads, norm, weight.terms)
    return _gemm(terms, weight, norm.gates, is_split=True)


def _four_bits(op, x, weight, *, is_split=False):
    if not _runs_kernel(op, four_bits.why_not_kernel(x, weight), x):
        return matmul(x, weight)
    from jaxspec.pallas.matmul.four_bits_kernel import four_bits_kernel

    return four_bits_kernel(x, weight, is_split=is_split)


def _terms(x, weight):
    if float8.why_not_split_by_kernel(weight):
        return float8_terms.of_whole_rows(x)
    from jaxspec.pallas.matmul.float8_split_kernel import split_kernel

    return split_kernel(x, weight.terms)


def _gemm(terms: Terms, weight, x, *, is_split=False):
    """Multiply `terms` of as many rows as `x` by the kernel that should be faster."""
    tokens, sizes = x.shape[0], (weight.inner, weight.outer, weight.terms)
    tiling = Float8GemmTiling.of(tokens, *sizes, is_split=is_split)
    many = Float8ManyRowsTiling.of(tokens, *sizes, is_split=is_split)
    if many is None or many.clocks(*sizes) > tiling.clocks(*sizes):
        from jaxspec.pallas.matmul.float8_gemm_kernel import gemm_kernel

        return gemm_kernel(terms, weight, tokens=tokens, dtype=x.dtype, tiling=tiling)
    from jaxspec.pallas.matmul.float8_many_rows_kernel import many_rows_kernel

    return many_rows_kernel(terms, weight, tokens=tokens, dtype=x.dtype, tiling=many)


def _runs_kernel(op, why, rows):
    return dispatch.runs_kernel(op, why, rows=rows.shape[0], by_choice=True)


def _add_norm(stream, pending, norm, weight):
    """Return `add_norm`, and the terms of its result if one kernel makes both for `weight`."""
    is_split = _splits_norm(stream, pending, norm, weight)
    if not is_split or not dispatch.runs_kernel("add_norm", None, rows=stream.shape[0]):
        return add_norm(stream, pending, norm), None
    from jaxspec.pallas.matmul.float8_norm_kernel import add_norm_split_kernel

    stream, normed, terms = add_norm_split_kernel(stream, pending, norm, weight.terms)
    return (stream, normed), terms


def _splits_norm(stream, pending, norm, weight):
    """Return whether a kernel of `add_norm` can make e4m3 numbers of the norm for `weight`."""
    if not isinstance(weight, Published8Bit) or float8.is_fused(stream.shape[0], weight):
        return False
    if pending is None or isinstance(pending, OfDevices) or stream.shape[1] % _NORM_FEATURES:
        return False
    why = float8.why_not_kernel(stream, weight) or float8.why_not_split_by_kernel(weight)
    return not (why or why_not_add_norm(stream, pending, norm))


def _why_not_norm(heads, norm, weight):
    if heads.dtype != jnp.float32 or norm.weight.dtype != jnp.float32:
        return f"{heads.dtype} with a norm in {norm.weight.dtype}"
    if heads.shape[2] != float8_terms.CHUNK:
        return f"{heads.shape[1]} heads of {heads.shape[2]}"
    if norm.first % BLOCK_N or norm.gates.shape[1] % BLOCK_N:  # columns that are copied at a time
        return f"gates from column {norm.first} of {norm.gates.shape[1]}"
    return float8.why_not_kernel(norm.gates, weight)
