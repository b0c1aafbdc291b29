"""Residual add and RMSNorm: what every layer of a decoder does before its mixer and its MLP."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.norm.residual import Delta, whole

_Tokens = Float[Array, "tokens features"]


def add_norm(
    x: _Tokens,
    delta: Delta,
    weight: Float[Array, " features"],
    eps: float,
    *,
    zero_centred: bool = False,
) -> tuple[_Tokens, _Tokens]:
    """`x + delta`, rounded to their dtype, and `rms_norm` of that, as one kernel.

    `delta` may be float32 sums over parts, which are summed and rounded first, or None for nothing
    (`products.Delta`); the norm is then XLA's. Rows do not meet: padding and NaN stay in their own.
    The kernel takes float32, bfloat16 and float16, the weight in any of them too, and 512 to 8192
    features, a multiple of 512.
    """
    if delta is None:
        return x, rms_norm(x, weight, eps, zero_centred=zero_centred)
    is_small = x.shape[1] < 512  # nobody waits for it
    if dispatch.runs_kernel("add_norm", _unsupported(x, delta, weight), by_choice=is_small):
        from jaxspec.pallas.norm.add_norm_kernel import add_norm_kernel

        return add_norm_kernel(x, delta, weight, eps=eps, zero_centred=zero_centred)
    return add_norm_reference(x, delta, weight, eps, zero_centred=zero_centred)


def add_norm_reference(x, delta, weight, eps, *, zero_centred=False):
    """The specification of `add_norm`."""
    total = x if delta is None else x + whole(delta, x.dtype)
    return total, rms_norm(total, weight, eps, zero_centred=zero_centred)


def rms_norm(
    x: Float[Array, "*batch features"],
    weight: Float[Array, " features"],
    eps: float,
    *,
    zero_centred: bool = False,
) -> Float[Array, "*batch features"]:
    """`x / rms(x) * w` over the last axis, or `* (1 + w)`; in float32, then cast to `x`'s dtype.

    `rms(x)` is the root of the mean square plus `eps`. Zhang and Sennrich 2019, "Root Mean Square
    Layer Normalization".
    """
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    if zero_centred:
        weight = weight + 1.0
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return (wide * scale * weight).astype(x.dtype)


_DTYPES = jnp.float32, jnp.bfloat16, jnp.float16
_MOST = 8192  # features: a thread keeps 64 of them, of three arrays, in registers


def _unsupported(x, delta, weight):
    """Why `add_norm_kernel` does not take these operands, or None."""
    expected = x.dtype if delta.ndim == 2 else jnp.float32
    if delta.dtype != expected or x.dtype not in _DTYPES or weight.dtype not in _DTYPES:
        return f"{x.dtype} and {delta.dtype} with a weight in {weight.dtype}"
    if x.shape[1] % (4 * device.THREADS) or x.shape[1] > _MOST:
        return f"{x.shape[1]} features"
    return None
