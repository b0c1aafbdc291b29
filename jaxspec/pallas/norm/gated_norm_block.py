"""`GatedNorm` inside a kernel."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def in_kernel(layout: Any, heads: Any, gates: Any, weight: Any, norm: Any) -> Any:
    """Normalise and gate float32 heads in registers; the result is float32, not rounded yet.

    `layout` is the register layout of heads and gates; it must keep each head within one warp.
    `norm` has the `eps` and the `gate` of a `GatedNorm`.
    """
    root = lax.rsqrt(jnp.sum(heads * heads, axis=1) * (1 / heads.shape[1]) + norm.eps)
    root, weight = (
        plgpu.layout_cast(lax.broadcast_in_dim(x, heads.shape, (axis,)), layout)
        for axis, x in enumerate((root, weight))
    )
    gates = gates.astype(jnp.float32)
    numerator = gates if norm.gate == "silu" else 1.0
    return heads * root * weight * (numerator / (1.0 + jnp.exp(-gates)))
