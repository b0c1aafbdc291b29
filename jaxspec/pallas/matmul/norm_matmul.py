"""Residual add, RMSNorm and a product: how a layer of a decoder begins each of its halves."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul import few_rows, gemm, products
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.norm.add_norm import add_norm, add_norm_reference
from jaxspec.pallas.norm.residual import Delta

_Tokens = Float[Array, "tokens features"]


def norm_matmul(
    x: _Tokens,
    delta: Delta,
    norm: Float[Array, " features"],
    eps: float,
    weight: Float[Array, "features columns"],
    *,
    zero_centred: bool = False,
) -> tuple[_Tokens, Float[Array, "tokens columns"]]:
    """`x + delta`, rounded to the dtype of `x`, and `rms_norm` of that times `weight`.

    `delta` may be partial sums, as `split_matmul` gives them; they are summed and rounded first.
    Rows do not meet: padding and NaN stay in their own.

    One kernel for up to 2 rows of 1024 or 2048 features in 16 bits, as each of its blocks norms all
    rows; for more `add_norm` and another, of up to 8 rows `few_rows`' and of up to 256 `gemm`'s, or
    XLA's product.

    Raises:
        ValueError: `weight` is not for the features of `x`.
    """
    products.check_inner(x.shape[1], weight)
    rows, rest = x.shape[0], (x, delta, norm, eps, weight, zero_centred)
    is_few = rows <= few_rows.MOST_ROWS
    if is_few:
        why, wave = _unsupported(x, delta, norm, weight), None
    else:
        why, wave = gemm.choose(x, weight, x.shape[1])
    if not dispatch.runs_kernel("norm_matmul", why, by_choice=True):
        return composed(matmul, add_norm, *rest)
    if not is_few:
        from jaxspec.pallas.matmul.gemm_kernel import gemm_kernel

        return composed(functools.partial(gemm_kernel, wave=wave), add_norm, *rest)
    from jaxspec.pallas.matmul.norm_matmul_kernel import norm_matmul_kernel
    from jaxspec.pallas.matmul.split_matmul_kernel import matmul_kernel

    if rows > _ONE_KERNEL:
        return composed(matmul_kernel, add_norm, *rest)
    return norm_matmul_kernel(x, delta, norm, weight, eps=eps, zero_centred=zero_centred)


def norm_matmul_reference(x, delta, norm, eps, weight, *, zero_centred=False):
    """The specification of `norm_matmul`."""
    return composed(matmul, add_norm_reference, x, delta, norm, eps, weight, zero_centred)


def composed(multiply, add, x, delta, norm, eps, weight, zero_centred):
    """`norm_matmul` of a product and of `add`, which is `add_norm` or its reference."""
    x, normed = add(x, delta, norm, eps, zero_centred=zero_centred)
    return x, multiply(normed, weight)


_ONE_KERNEL = 2  # rows: of 4 it took an H200 8.3 us and of 1 6.0, where `add_norm` takes 1.6
_MOST_SUMS = 8192  # of a row, all parts': that of few rows makes no more, and a thread loads them


def _unsupported(x, delta, norm, weight):
    """Why the kernel does not take these operands, or None."""
    if delta is not None and delta.dtype != (x.dtype if delta.ndim == 2 else jnp.float32):
        return f"{x.dtype} and {delta.dtype}"
    if delta is not None and delta.ndim == 3 and delta.shape[0] * x.shape[1] > _MOST_SUMS:
        return f"{delta.shape[0]} parts"
    if norm.dtype != x.dtype:
        return f"{x.dtype} with a norm in {norm.dtype}"
    return few_rows.unsupported(x, weight, x.shape[1])
