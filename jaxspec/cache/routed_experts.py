"""RoutedExperts: the experts of each computed token, in the pages of its request."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.specs import (
    CacheSpec,
    MemoryLabel,
    Moves,
    Pools,
    PoolSizes,
    write_at,
    write_tokens,
)

Routes = Int[Array, "pages page_size layers top_k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedExperts(CacheSpec):
    """Experts chosen by each layer with experts, best first: `[pages, page_size, layers, top_k]`.

    Requests that share pages share the routes of their tokens. A request's newest token has none,
    because it is not computed yet; its row and all rows after it are undefined.
    """

    name: str = "routed_experts"
    top_k: int
    num_experts: int
    page_axis = 0
    labels = {"routed_experts": MemoryLabel("experts of tokens", ("pages",))}

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint8 if self.num_experts <= 256 else jnp.uint16)

    def allocate(self, sizes: PoolSizes) -> Routes:
        return jnp.zeros((sizes.num_pages, sizes.page_size, self.layers, self.top_k), self.dtype)

    def copy(self, pool: Routes, moves: Moves) -> Routes:
        return write_at(pool, 0, moves.target_pages, pool[moves.source_pages])

    @staticmethod
    def write(
        pools: Pools, kv_slots: Int[Array, " tokens"], layers: Sequence[Int[Array, "tokens top_k"]]
    ) -> Pools:
        """Return the pools with the experts of each layer written at `kv_slots`.

        A KV slot is page * page_size + offset, int32; -1 is padding.
        """
        pool = pools[RoutedExperts.name]
        return pools | {
            RoutedExperts.name: write_tokens(pool, kv_slots, jnp.stack(tuple(layers), axis=1))
        }
