"""PagedKV and PagedVectors: data of tokens in pages that requests own or share."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache.specs import CacheSpec, MemoryLabel, Moves, PoolSizes, write_at

Vectors = Float[Array, "layers pages page_size width"]
KV = Float[Array, "layers 2 pages page_size kv_heads head_dim"]  # keys, then values


@dataclasses.dataclass(frozen=True)
class PagedKV(CacheSpec):
    """Keys and values of all attention layers: `[layers, 2, pages, page_size, heads, head_dim]`.

    The layers of a draft head are in the same pool, after those of the trunk: kernels take a whole
    pool and a layer index, and a second pool would be a further donated array in each step.
    """

    heads: int  # key and value heads
    head_dim: int
    dtype: jnp.dtype
    page_axis = 2
    labels = {"kv": MemoryLabel("keys and values", ("pages",))}

    def allocate(self, sizes: PoolSizes) -> KV:
        page = sizes.page_size, self.heads, self.head_dim
        return jnp.zeros((self.layers, 2, sizes.num_pages, *page), self.dtype)

    def copy(self, pool: KV, moves: Moves) -> KV:
        return write_at(pool, 2, moves.target_pages, pool[:, :, moves.source_pages])


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


def kv_dtype_of(word: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of keys and values for the option `word`; None means the model's `dtype`.

    Raises:
        ValueError: another word.
    """
    if word not in (None, "bfloat16", "float8_e4m3fn"):
        raise ValueError(
            f"kv_dtype must be 'bfloat16', 'float8_e4m3fn' or None, the model's, got {word!r}."
        )
    return dtype if word is None else jnp.dtype(word)
