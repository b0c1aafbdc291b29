"""The output norm of Gated DeltaNet: each head normed, and gated by a part of the projection."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.norm.add_norm import rms_norm

# What a recurrence puts out: float32 heads, or, of two axes, what `GatedNorm` has made of them.
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

    def check(self, tokens: int, features: int) -> None:
        """Refuse gates and a weight that are not for so many tokens and features of each.

        Raises:
            ValueError: the gates have other rows or lack columns, or the weight is not a head's.
        """
        rows, columns = self.gates.shape
        if columns < self.first + features:
            raise ValueError(
                f"The gates must be columns {self.first} to {self.first + features - 1}, but there "
                f"are {columns} columns. Hand over all of the projection."
            )
        if rows != tokens:
            raise ValueError(
                f"There must be gates of {tokens} tokens, but these are of {rows}. Hand over the "
                "projection of the same tokens, padding too."
            )
        if features % self.weight.shape[0]:
            raise ValueError(
                f"A norm's weight must be as long as a head, but {features} features are no "
                f"multiple of {self.weight.shape[0]}. Give it one entry for each of a head's."
            )

    def __call__(self, heads: Heads) -> Float[Array, "tokens features"]:
        """By XLA, of what is not yet normed."""
        if heads.ndim == 2:
            return heads
        tokens, number, dim = heads.shape
        gate = self.gates[:, self.first : self.first + number * dim].reshape(heads.shape)
        gated = rms_norm(heads, self.weight, self.eps) * jax.nn.silu(gate.astype(jnp.float32))
        return gated.reshape(tokens, -1).astype(self.gates.dtype)
