"""Gates of Gated DeltaNet: the decay of the state, and the write strength, of each token."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.recurrent import kernel_math

Gates = Float[Array, "*tokens value_heads"]
Decay = Float[Array, "value_heads 2"]


def gates(b: Gates, a: Gates, decay: Decay) -> tuple[Gates, Gates]:
    """Return float32 log decays and write strengths.

    The log decay is `-exp(decay[:, 0]) * softplus(a + decay[:, 1])`, as in Mamba2, and the write
    strength `sigmoid(b)` (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464). `b` and `a`
    may have any float dtype. The parameters of the decay, `A_log` and `dt_bias`, are float32 and
    share one array, because a kernel takes whole arrays without a copy.
    """
    rate, bias = (jnp.broadcast_to(x, a.shape) for x in (-jnp.exp(decay[:, 0]), decay[:, 1]))
    step = jax.nn.softplus(a.astype(jnp.float32) + bias)
    return rate * step, jax.nn.sigmoid(b.astype(jnp.float32))


def in_kernel(b: Any, a: Any, log_rate: Any, bias: Any) -> tuple[Any, Any]:
    """`gates` inside a kernel, on float32 registers; `log_rate`, `bias` are columns of `decay`."""
    return -kernel_math.exp(log_rate) * kernel_math.softplus(a + bias), kernel_math.sigmoid(b)
