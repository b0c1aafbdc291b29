"""ShortConv: the last inputs of convolutions that keep nothing else (LFM2)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.checkpoints import Kept
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

    def taps_of(self, part: str) -> int | None:
        """All of it are inputs."""
        return self.taps

    def allocate_checkpoints(self, sizes: PoolSizes) -> Inputs:
        """As much as a slot has."""
        return self.allocate(sizes)

    def export(self, pool: Inputs, checkpoints: Inputs, kept: Kept, states: None) -> Inputs:
        """The row's inputs, in the rows where they lie."""
        return checkpoints.at[:, kept.target].set(pool[:, kept.rows.slots])

    def restore(
        self,
        pool: Inputs,
        checkpoints: Inputs,
        sources: Int[Array, " n"],
        slots: Int[Array, " n"],
    ) -> Inputs:
        """A row at the checkpoint's position finds its inputs in the same rows."""
        targets = jnp.where(slots > 0, slots, pool.shape[1])
        return pool.at[:, targets].set(checkpoints[:, sources], mode="drop")

    def holders(self, pool: Inputs) -> dict[str, Inputs]:
        """The one array."""
        return {self.name: pool}

    def partition(self) -> dict[str, int]:
        """By channels."""
        return {self.name: 3}
