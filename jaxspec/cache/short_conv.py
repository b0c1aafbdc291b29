"""ShortConv: the last inputs of convolutions without any other state (LFM2)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.checkpoints import BySlot, SavedState
from jaxspec.cache.specs import MemoryLabel, Moves, PoolSizes, write_at

Inputs = Float[Array, "layers slots conv_ring channels"]


@dataclasses.dataclass(frozen=True)
class ShortConv(BySlot):
    """A ring of inputs per slot: `[layers, slots, taps - 1 + width, channels]`.

    The input at position p is in row p modulo the ring's length (`conv_update`). The input of a
    rejected draft is overwritten by the next token at its position, so no policy is needed.
    """

    taps: int
    channels: int
    dtype: jnp.dtype
    labels = {"short_conv": MemoryLabel("inputs of short convolutions", ("slots",))}

    def allocate(self, sizes: PoolSizes) -> Inputs:
        """Return empty rings; rows that a step reads and rows that it writes are disjoint."""
        rows = self.taps - 1 + sizes.width
        return jnp.zeros((self.layers, sizes.num_slots, rows, self.channels), self.dtype)

    def copy(self, pool: Inputs, moves: Moves) -> Inputs:
        """Copy whole slots: a row at the same position reads the same rows of the ring."""
        return write_at(pool, 1, moves.target_slots, pool[:, moves.source_slots])

    def taps_of(self, part: str) -> int:
        return self.taps

    def allocate_checkpoints(self, sizes: PoolSizes) -> Inputs:
        return self.allocate(sizes)

    def export(self, pool: Inputs, checkpoints: Inputs, saved: SavedState, states: None) -> Inputs:
        """Copy the row's ring without rotating it."""
        return checkpoints.at[:, saved.target].set(pool[:, saved.rows.slots])

    def restore(
        self,
        pool: Inputs,
        checkpoints: Inputs,
        sources: Int[Array, " n"],
        slots: Int[Array, " n"],
    ) -> Inputs:
        """Copy whole rings: a row at the checkpoint's position reads the same rows of the ring."""
        return write_at(pool, 1, slots, checkpoints[:, sources])
