"""TokenHistory: the token ids of each request, in the same pages as its keys and values."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.specs import CacheSpec, MemoryLabel, Moves, PoolSizes, write_at

History = Int[Array, "pages page_size"]


@dataclasses.dataclass(frozen=True)
class TokenHistory(CacheSpec):
    """Token ids by page, int32 `[pages, page_size]`; requests that share pages share their tokens.

    Drafters that look up earlier text write the tokens of each step here. Entries after a request's
    newest token are undefined.
    """

    name: str = "tokens"
    layers: int = 1
    page_axis = 0
    labels = {"tokens": MemoryLabel("token ids", ("pages",))}

    def allocate(self, sizes: PoolSizes) -> History:
        return jnp.zeros((sizes.num_pages, sizes.page_size), jnp.int32)

    def copy(self, pool: History, moves: Moves) -> History:
        return write_at(pool, 0, moves.target_pages, pool[moves.source_pages])

    @staticmethod
    def write(
        pool: History, kv_slots: Int[Array, " tokens"], tokens: Int[Array, " tokens"]
    ) -> History:
        """Return the pool with `tokens` written at `kv_slots`.

        A KV slot is page * page_size + offset, int32; -1 is padding.
        """
        where = jnp.where(kv_slots < 0, pool.size, kv_slots)
        return pool.reshape(-1).at[where].set(tokens, mode="drop").reshape(pool.shape)

    @staticmethod
    def read_at(
        pool: History,
        page_tables: Int[Array, "slots pages"],
        slots: Int[Array, " rows"],
        indices: Int[Array, "rows places"],
    ) -> Int[Array, "rows places"]:
        """Return the tokens of each row's request at `indices`; undefined beyond its pages."""
        page, offset = jnp.divmod(indices, pool.shape[1])
        pages = page_tables.at[slots[:, None], page].get(mode="fill", fill_value=0)
        return pool[pages, offset]

    @staticmethod
    def read(
        pool: History, page_tables: Int[Array, "slots pages"], slots: Int[Array, " rows"]
    ) -> Int[Array, "rows positions"]:
        """Return all tokens of each row's request, by position."""
        positions = page_tables.shape[1] * pool.shape[1]
        return pool[page_tables[slots]].reshape(slots.shape[0], positions)
