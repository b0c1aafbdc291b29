"""The gates of Gated DeltaNet: how much of its state a token keeps, and how much it writes."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.recurrent import kernel_math

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
    return -kernel_math.exp(log_rate) * kernel_math.softplus(a + bias), kernel_math.sigmoid(b)
