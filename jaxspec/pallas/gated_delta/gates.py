"""The gates of Gated DeltaNet: how much of its state a token keeps, and how much it writes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Gates = Float[Array, "*tokens value_heads"]
Decay = Float[Array, "value_heads 2"]


def gates(b: Gates, a: Gates, decay: Decay) -> tuple[Gates, Gates]:
    """Float32 log decay `-exp(decay[:, 0]) softplus(a + decay[:, 1])`, and strength `sigmoid(b)`.

    Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464; the decay is Mamba2's. `b` and `a`
    may have any float dtype. The two parameters of the decay, `A_log` and `dt_bias`, are float32
    and lie in one array because a kernel takes whole arrays without a copy.
    """
    rate, bias = (jnp.broadcast_to(x, a.shape) for x in (-jnp.exp(decay[:, 0]), decay[:, 1]))
    step = jax.nn.softplus(a.astype(jnp.float32) + bias)
    return rate * step, jax.nn.sigmoid(b.astype(jnp.float32))


def in_kernel(b: Any, a: Any, log_rate: Any, bias: Any) -> tuple[Any, Any]:
    """`gates` in a kernel, on float32 registers; `log_rate` and `bias` are `decay`'s columns."""
    return -_exp(log_rate) * _softplus(a + bias), _sigmoid(b)


# Under `approx_math` a kernel's exp(x) is 2^(x log2 e), whose error grows with x, and its
# log(1 + u) loses a small u. The functions below are right to a few units in the last place.


def _exp(x):
    """`exp(x)`, at least 2^-126 (Cody and Waite 1980): 2^whole is made from bits."""
    x = jnp.maximum(x, -87.0)
    whole = jnp.round(x * 1.4426950408889634)
    # log 2 comes in two parts, the first so short that its product with `whole` is exact.
    rest = (x - whole * 0.693359375) - whole * -2.12194440e-4
    power = lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return power * jnp.exp(rest)


def _softplus(x):
    """`log(1 + exp(x)) = max(x, 0) + log1p(u)`, u = exp(-|x|), log1p(u) = 2 artanh(u / (2 + u))."""
    u = _exp(-jnp.abs(x))
    s = u / (2.0 + u)  # at most 1/3, so terms after s^15 are below a rounding
    square, series = s * s, 1 / 15
    for power in range(13, 0, -2):
        series = series * square + 1 / power
    return jnp.maximum(x, 0.0) + 2.0 * s * series


def _sigmoid(x):
    u = _exp(-jnp.abs(x))
    return jnp.where(x >= 0, 1.0, u) / (1.0 + u)
