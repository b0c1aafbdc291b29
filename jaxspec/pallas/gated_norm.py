"""The output norm of Gated DeltaNet: each head normed, and gated by a part of the projection."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.add_norm import rms_norm

# What a recurrence puts out, in float32, or what `GatedNorm` makes of it.
Heads = Float[Array, "tokens heads dim"] | Float[Array, "tokens features"]


@flax.struct.dataclass
class GatedNorm:
    """A norm of heads, and what gates them (Yang et al. 2024, arXiv 2412.06464).

    Each of the heads goes through `rms_norm` with `weight` (float32), and is then multiplied by
    `silu` of its columns of `gates`: those from `first` on, as many as the heads', as they come in
    the projection; the others are not read. All in float32, and rounded to the dtype of `gates`.
    """

    gates: Float[Array, "tokens columns"]
    weight: Float[Array, " dim"]
    first: int = flax.struct.field(pytree_node=False)
    eps: float = flax.struct.field(pytree_node=False)  # added to the mean square

    def split(self, tokens: int) -> "tuple[GatedNorm, GatedNorm]":
        """Of the first `tokens`, and of the others."""
        parts = self.gates[:tokens], self.gates[tokens:]
        first, others = (dataclasses.replace(self, gates=gates) for gates in parts)
        return first, others

    def check(self, features: int) -> None:
        """Refuse gates that are not for so many features of a token.

        Raises:
            ValueError: they lack columns.
        """
        if self.gates.shape[1] < self.first + features:
            raise ValueError(
                f"The gates must be columns {self.first} to {self.first + features - 1}, but there "
                f"are {self.gates.shape[1]} columns. Hand over all of the projection."
            )

    def __call__(self, heads: Heads) -> Float[Array, "tokens features"]:
        """By XLA, of what is not yet normed."""
        if heads.ndim == 2:
            return heads
        tokens, number, dim = heads.shape
        gate = self.gates[:, self.first : self.first + number * dim].reshape(heads.shape)
        gated = rms_norm(heads, self.weight, self.eps) * jax.nn.silu(gate.astype(jnp.float32))
        return gated.reshape(tokens, -1).astype(self.gates.dtype)
