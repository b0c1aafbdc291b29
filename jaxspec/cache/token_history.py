"""TokenHistory: the token ids of every request, in the same pages as its keys and values."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.specs import Holder, Moves, PoolSizes

History = Int[Array, "pages page_size"]


@dataclasses.dataclass(frozen=True)
class TokenHistory:
    """Token ids by page, int32 `[pages, page_size]`: requests that share pages share their tokens.

    A drafter that reads what was said before writes each step's tokens here. Behind a request's
    newest token lies junk.
    """

    name: str = "tokens"
    layers: int = 1
    by_page: ClassVar = True
    page_axis: ClassVar = 0
    labels: ClassVar = {"tokens": Holder("token ids", ("pages",))}

    def allocate(self, sizes: PoolSizes) -> History:
        """Empty pages."""
        return jnp.zeros((sizes.num_pages, sizes.page_size), jnp.int32)

    def copy(self, pool: History, moves: Moves) -> History:
        """Whole pages."""
        targets = jnp.where(moves.target_pages > 0, moves.target_pages, pool.shape[0])
        return pool.at[targets].set(pool[moves.source_pages], mode="drop")

    def holders(self, pool: History) -> dict[str, History]:
        """The one array."""
        return {self.name: pool}

    def partition(self) -> dict[str, int]:
        """Nothing: every device of a mesh needs all ids."""
        return {}

    @staticmethod
    def write(
        pool: History, kv_slots: Int[Array, " tokens"], tokens: Int[Array, " tokens"]
    ) -> History:
        """The pool with `tokens` at `kv_slots` (int32, page * page_size + offset; -1: nowhere)."""
        where = jnp.where(kv_slots < 0, pool.size, kv_slots)
        return pool.reshape(-1).at[where].set(tokens, mode="drop").reshape(pool.shape)

    @staticmethod
    def read_at(
        pool: History,
        page_tables: Int[Array, "slots pages"],
        slots: Int[Array, " rows"],
        indices: Int[Array, "rows places"],
    ) -> Int[Array, "rows places"]:
        """The tokens of each row's request at some indices; junk for one that no page has."""
        page, offset = jnp.divmod(indices, pool.shape[1])
        pages = page_tables.at[slots[:, None], page].get(mode="fill", fill_value=0)
        return pool[pages, offset]

    @staticmethod
    def read(
        pool: History, page_tables: Int[Array, "slots pages"], slots: Int[Array, " rows"]
    ) -> Int[Array, "rows positions"]:
        """The tokens of each row's request, by their index in it."""
        positions = page_tables.shape[1] * pool.shape[1]
        return pool[page_tables[slots]].reshape(slots.shape[0], positions)
