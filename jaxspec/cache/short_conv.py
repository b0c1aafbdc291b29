"""ShortConv: the last inputs of convolutions that keep nothing else (LFM2)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache.specs import Holder, Moves, PoolSizes

Inputs = Float[Array, "layers slots conv_ring channels"]


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """A ring of inputs for each slot: `[layers, slots, taps - 1 + width, channels]`.

    The input at a position lies in the row of that position (`conv_update`). So the input of a
    rejected draft is overwritten by whatever comes to its position, and there is no state for a
    policy to take back.
    """

    name: str
    layers: int
    taps: int
    channels: int
    dtype: jnp.dtype
    labels: ClassVar = {"short_conv": Holder("inputs of short convolutions", ("slots",))}

    def allocate(self, sizes: PoolSizes) -> Inputs:
        """Empty slots; the inputs that a step reads, and those that it writes, have rows apart."""
        rows = self.taps - 1 + sizes.width
        return jnp.zeros((self.layers, sizes.num_slots, rows, self.channels), self.dtype)

    def copy(self, pool: Inputs, moves: Moves) -> Inputs:
        """Whole slots: a row at the same position finds its inputs in the same rows."""
        targets = jnp.where(moves.target_slots > 0, moves.target_slots, pool.shape[1])
        return pool.at[:, targets].set(pool[:, moves.source_slots], mode="drop")

    def holders(self, pool: Inputs) -> dict[str, Inputs]:
        """The one array."""
        return {self.name: pool}

    def partition(self) -> dict[str, int]:
        """By channels."""
        return {self.name: 3}
