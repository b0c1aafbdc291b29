"""Pages of the keys and values that prompt chunks over a sliding window attend to."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas.recurrent.conv_ring import ring_place
from jaxspec.regions import PrefillRegion, owner_of

PAGE = 64
"""Positions per page: a tile of the kernel, or half of one, so a tile is one or two copies."""


@dataclasses.dataclass(frozen=True)
class WindowPages:
    """Keys and values that a step's chunks attend to, in pages that follow each other.

    Chunk s has those in the ring before it, its history, then its own:

        sequence      ... p6 p7 p8 | t9 t10 t11    9 computed, of which the ring holds 3
        its pages      p6 p7 p8 t9 | t10 t11 .  .   pages of 4; `chunks` counts positions from p6
    """

    kv: Float[Array, "1 2 pages page kv_heads head_dim"]  # a `KVPool` of one layer
    tables: Int[Array, "seqs+1 width"]  # chunk s has table s + 1; padding has table 0
    chunks: PrefillRegion  # the chunks that use these tables

    @classmethod
    def of(
        cls,
        new: Float[Array, "2 tokens kv_heads head_dim"],
        pool: Float[Array, "layers slots ring 2 kv_heads head_dim"],
        layer: int,
        chunks: PrefillRegion,
        kept: int,
    ) -> "WindowPages":
        """Return the pages of `new` and of up to `kept` positions before each chunk.

        All indices are the same for all layers, so XLA computes them once.
        """
        _, num_slots, ring, *_ = pool.shape
        num_tokens, num_seqs = new.shape[1], len(chunks.slots)
        is_live = chunks.is_live(num_slots)
        history = jnp.clip(chunks.num_computed, 0, kept)
        # Clamped, because the host's numbers may be out of bounds.
        length = jnp.where(is_live, jnp.clip(chunks.query_len, 0, num_tokens), 0)
        count = jnp.where(is_live, (history + length + PAGE - 1) // PAGE, 0)
        end = jnp.cumsum(count, dtype=jnp.int32)
        first = end - count

        page = jnp.arange((num_tokens + num_seqs * (kept + PAGE - 1)) // PAGE, dtype=jnp.int32)
        seq = owner_of(page, end)
        place = (page - first[seq])[:, None] * PAGE + jnp.arange(PAGE, dtype=jnp.int32)[None, :]
        offset = place - history[seq][:, None]  # in the chunk
        # Indices of unused elements are clamped to one position, which stays in the GPU's cache.
        own = chunks.query_start[seq][:, None] + jnp.clip(offset, 0, length[seq][:, None] - 1)
        own = jnp.clip(own, 0, num_tokens - 1)
        earlier = chunks.num_computed[seq][:, None] + jnp.clip(offset, -kept, -1)
        earlier = ring_place(earlier, ring)
        slot = jnp.clip(chunks.slots, 0, num_slots - 1)[seq][:, None]
        # The barriers keep XLA from computing indices for every element that it gathers, and from
        # reading the ring again for `newest`: it would copy the pool for that.
        own, earlier, slot = lax.optimization_barrier((own[None], earlier[None], slot[None]))
        kind = jnp.arange(2, dtype=jnp.int32)[:, None, None]
        found, held = new[kind, own], pool[layer, slot, earlier, kind]
        kv = jnp.where((offset >= 0)[None, ..., None, None], found, held)
        kv = lax.optimization_barrier(kv)

        width = -(-(kept + num_tokens) // PAGE)
        tables = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        number = jnp.arange(1, num_seqs + 1, dtype=jnp.int32)
        region = dataclasses.replace(
            chunks, slots=jnp.where(is_live, number, 0), num_computed=history
        )
        return cls(kv[None], jnp.pad(tables, ((1, 0), (0, 0))), region)

    def newest(self, kept: int) -> Float[Array, "seqs kept 2 kv_heads head_dim"]:
        """Return the last `kept` keys and values of each chunk; zeros before its first position."""
        size = self.chunks.num_computed + self.chunks.query_len
        place = size[:, None] + jnp.arange(-kept, 0, dtype=jnp.int32)[None, :]
        pages, page = self.kv.shape[2:4]
        rows = self.kv[0].reshape(2, pages * page, *self.kv.shape[4:])
        row = self.tables[1:, :1] * PAGE + jnp.maximum(place, 0)
        row = lax.optimization_barrier(jnp.clip(row, 0, rows.shape[1] - 1)[..., None])
        found = rows[jnp.arange(2, dtype=jnp.int32)[None, None], row]
        is_there = (place >= 0)[..., None, None, None]
        return jnp.where(is_there, found, jnp.zeros((), found.dtype))
