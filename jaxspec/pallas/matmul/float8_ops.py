"""The ops of this package for weights in FP8 as published; their arguments are checked.

Activations are not rounded to 8 bits. The kernel multiplies any number of rows. For up to 8 it also
runs the activation or the gated norm before the matmul, in every block; more rows would be read and
computed too often.
"""

import jax.numpy as jnp

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import float8, float8_terms
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Output, Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Columns, Published8Bit


def plain_matmul(op: str, x: Stream, weight: Published8Bit) -> Stream:
    """Return `x @ weight` in the dtype of `x`, as part of `op`."""
    why = float8.why_not_kernel(x, weight)
    if not _runs_kernel(op, why, x):
        return matmul(x, weight)
    from jaxspec.pallas.matmul.float8_kernel import matmul_kernel

    return matmul_kernel(x, weight)


def norm_matmul(
    stream: Stream, pending: Pending, norm: Norm, weight: Published8Bit | Columns
) -> tuple[Stream, Stream]:
    stream, normed = add_norm(stream, pending, norm)
    if not isinstance(weight, Columns):
        return stream, plain_matmul("norm_matmul", normed, weight)
    products = [
        plain_matmul("norm_matmul", normed, part)
        if isinstance(part, Published8Bit)
        else matmul(normed, part)
        for part in weight.parts
    ]
    return stream, jnp.concatenate(products, axis=1)


def split_matmul(x: Stream, weight: Published8Bit) -> Output:
    why = float8.why_not_kernel(x, weight)
    if not _runs_kernel("split_matmul", why, x):
        return matmul(x, weight)
    from jaxspec.pallas.matmul.float8_kernel import split_matmul_kernel

    return split_matmul_kernel(x, weight)


def activated_matmul(op: str, x: Stream, weight: Published8Bit, activation: Activation) -> Output:
    """Run `gated_matmul` or `squared_relu_matmul`."""
    why = float8.why_not_kernel(x, weight) or _why_not_fused(x.shape[0])
    if not _runs_kernel(op, why, x):
        return split_matmul(activation(x), weight)
    from jaxspec.pallas.matmul.float8_kernel import activated_matmul_kernel

    return activated_matmul_kernel(x, weight, activation)


def gated_norm_matmul(heads: Heads, norm: GatedNorm, weight: Published8Bit) -> Output:
    """Run `gated_norm_matmul` for heads that are not normalized yet."""
    why = _why_not_norm(heads, norm, weight) or _why_not_fused(heads.shape[0])
    if not _runs_kernel("gated_norm_matmul", why, heads):
        return split_matmul(norm(heads), weight)
    from jaxspec.pallas.matmul.float8_kernel import gated_norm_matmul_kernel

    return gated_norm_matmul_kernel(heads, norm, weight)


def _runs_kernel(op, why, rows):
    return dispatch.runs_kernel(op, why, rows=rows.shape[0], by_choice=True)


def _why_not_fused(rows):
    return None if rows <= float8.FUSED_ROWS else f"not 1 to {float8.FUSED_ROWS} rows"


def _why_not_norm(heads, norm, weight):
    if heads.dtype != jnp.float32 or norm.weight.dtype != jnp.float32:
        return f"{heads.dtype} with a norm in {norm.weight.dtype}"
    if heads.shape[2] != float8_terms.CHUNK:
        return f"{heads.shape[1]} heads of {heads.shape[2]}"
    if norm.gates.shape[1] % 8:  # rows of a copy begin at multiples of 16 bytes
        return f"gates of {norm.gates.shape[1]} columns"
    return float8.why_not_kernel(norm.gates, weight)
