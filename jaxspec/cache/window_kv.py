"""WindowKV: the newest keys and values of attention with a sliding window."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.checkpoints import BySlot, SavedState
from jaxspec.cache.specs import MemoryLabel, Moves, PoolSizes, write_at
from jaxspec.pallas.attention.ring_tables import ring_length

KV = Float[Array, "layers slots ring 2 kv_heads head_dim"]  # keys, then values


@dataclasses.dataclass(frozen=True)
class WindowKV(BySlot):
    """Rings of positions, one per slot: `[layers, slots, ring, 2, heads, head_dim]`.

    A ring has a window and a step's tokens, rounded up to whole pages (`ring_length`). Position p
    is in row p modulo the ring's length (`window_attention`), so a request of any length has the
    memory of one window. Positions behind the window are overwritten by new ones, and those of a
    rejected draft by the next token there, so no policy is needed.
    """

    window: int  # positions that a token sees, its own included
    heads: int  # key and value heads
    head_dim: int
    dtype: jnp.dtype
    labels = {"window_kv": MemoryLabel("keys and values of sliding windows", ("slots",))}

    def allocate(self, sizes: PoolSizes) -> KV:
        ring = ring_length(self.window, sizes.width)
        shape = self.layers, sizes.num_slots, ring, 2, self.heads, self.head_dim
        return jnp.zeros(shape, self.dtype)

    def copy(self, pool: KV, moves: Moves) -> KV:
        """Copy whole slots: a row at the same position reads the same rows of the ring."""
        return write_at(pool, 1, moves.target_slots, pool[:, moves.source_slots])

    def taps_of(self, part: str) -> int:
        return self.window  # an imported ring has zeros before the window

    def allocate_checkpoints(self, sizes: PoolSizes) -> KV:
        return self.allocate(sizes)

    def export(self, pool: KV, checkpoints: KV, saved: SavedState, states: None) -> KV:
        """Copy the row's ring without rotating it."""
        return checkpoints.at[:, saved.target].set(pool[:, saved.rows.slots])

    def restore(
        self, pool: KV, checkpoints: KV, sources: Int[Array, " n"], slots: Int[Array, " n"]
    ) -> KV:
        """Copy whole rings: a row at the checkpoint's position reads the same rows of the ring."""
        return write_at(pool, 1, slots, checkpoints[:, sources])
