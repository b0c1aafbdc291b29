"""Root mean square normalisation, plain and zero-centred."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.layers.linear import Placement, declare


class RMSNorm(nnx.Module):
    """`x / rms(x) * w`, or `* (1 + w)` when `zero_centred`; the product in float32, cast after.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". Qwen3.5 centres all its norms
    but the output norm of Gated DeltaNet.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, *, zero_centred: bool = False):
        """`dtype`: of the weight; `eps`: added to the mean square."""
        self.eps = eps
        self.zero_centred = zero_centred
        init = jax.nn.initializers.zeros if zero_centred else jax.nn.initializers.ones
        self.weight = declare((size,), dtype, init)

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Normalised over the last axis, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        weight = self.weight[...].astype(jnp.float32)
        if self.zero_centred:
            weight = weight + 1.0
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
        return (wide * scale * weight).astype(x.dtype)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensor."""
        yield Placement(f"{prefix}.weight", self.weight.shape, self.weight)
