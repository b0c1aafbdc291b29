"""PagedVectors: one vector per token and layer, in pages that requests own or share."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache.specs import CacheSpec, MemoryLabel, Moves, PoolSizes, write_at

Vectors = Float[Array, "layers pages page_size width"]


@dataclasses.dataclass(frozen=True)
class PagedVectors(CacheSpec):
    """Vectors of tokens without heads: `[layers, pages, page_size, width]`.

    Latents of keys and values, of which each serves all heads, and the keys of a token index. All
    devices of a group hold the same vectors.
    """

    width: int
    dtype: jnp.dtype
    page_axis = 1
    labels = {
        "latent": MemoryLabel("latents of keys and values", ("pages",)),
        "index": MemoryLabel("keys of the token index", ("pages",)),
    }

    def allocate(self, sizes: PoolSizes) -> Vectors:
        page = sizes.page_size, self.width
        return jnp.zeros((self.layers, sizes.num_pages, *page), self.dtype)

    def copy(self, pool: Vectors, moves: Moves) -> Vectors:
        return write_at(pool, 1, moves.target_pages, pool[:, moves.source_pages])
