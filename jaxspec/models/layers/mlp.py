"""The gated feed-forward layer."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.layers.linear import Linear, Placement


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: jnp.dtype):
        """`dtype`: of the weights."""
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(hidden_size, outputs, dtype)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, dtype)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """In the dtype of `x`."""
        gate, up = self.gate_up(x)
        (y,) = self.down(jax.nn.silu(gate) * up)
        return y

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        yield from self.gate_up.checkpoint(prefix)
        yield from self.down.checkpoint(prefix)
