"""The gated feed-forward layer."""

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.layers.linear import Linear, Placement
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.pallas.matmul.feed_forward import feed_forward
from jaxspec.pallas.norm.residual import Delta


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: jnp.dtype):
        """`dtype`: of the weights."""
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(hidden_size, outputs, dtype)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, dtype)

    def __call__(
        self, x: Float[Array, "tokens hidden"], delta: Delta, norm: RMSNorm
    ) -> tuple[Float[Array, "tokens hidden"], Delta]:
        """The residual stream with `delta`, and what this layer, fed with its `norm`, adds."""
        weights = norm.weight[...], norm.eps, self.gate_up.weight[...], self.down.weight[...]
        return feed_forward(x, delta, *weights, zero_centred=norm.zero_centred)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        yield from self.gate_up.checkpoint(prefix)
        yield from self.down.checkpoint(prefix)
