"""PagedKV: keys and values of attention layers, in pages that requests own or share."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache.specs import Holder, Moves, PoolSizes

KV = Float[Array, "layers 2 pages page_size kv_heads head_dim"]  # keys, then values


@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of all attention layers: `[layers, 2, pages, page_size, heads, head_dim]`.

    A draft head's layers lie in the same pool, behind the trunk's: a kernel takes a whole pool and
    an index, and a second pool would be a further donated array in each step.
    """

    name: str
    layers: int
    heads: int  # key and value heads
    head_dim: int
    dtype: jnp.dtype
    by_page: ClassVar = True
    page_axis: ClassVar = 2
    labels: ClassVar = {"kv": Holder("keys and values", ("pages",))}

    def allocate(self, sizes: PoolSizes) -> KV:
        """Empty pages."""
        page = sizes.page_size, self.heads, self.head_dim
        return jnp.zeros((self.layers, 2, sizes.num_pages, *page), self.dtype)

    def copy(self, pool: KV, moves: Moves) -> KV:
        """Whole pages of all layers."""
        targets = jnp.where(moves.target_pages > 0, moves.target_pages, pool.shape[2])
        return pool.at[:, :, targets].set(pool[:, :, moves.source_pages], mode="drop")

    def holders(self, pool: KV) -> dict[str, KV]:
        """The one array."""
        return {self.name: pool}

    def partition(self) -> dict[str, int]:
        """By key and value heads."""
        return {self.name: 4}


def kv_dtype_of(word: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that keys and values are kept in when the user says `word`; None: the model's.

    Raises:
        ValueError: another word.
    """
    if word not in (None, "bfloat16", "float8_e4m3fn"):
        raise ValueError(
            f"kv_dtype must be 'bfloat16', 'float8_e4m3fn' or None, the model's, got {word!r}."
        )
    return dtype if word is None else jnp.dtype(word)
