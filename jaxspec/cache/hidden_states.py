"""HiddenStates: the residual stream of each computed token, in the pages of its request."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.specs import (
    CacheSpec,
    MemoryLabel,
    Moves,
    PoolSizes,
    write_at,
    write_tokens,
)

States = Float[Array, "pages page_size features"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenStates(CacheSpec):
    """Residual stream at some layers, concatenated: `[pages, page_size, features]`.

    Requests that share pages share the states of their tokens. A request's newest token has no
    state, because it is not computed yet; its row and all rows after it are undefined.
    """

    name: str = "hidden_states"
    layers: int = 1
    features: int
    dtype: jnp.dtype
    page_axis = 0
    labels = {"hidden_states": MemoryLabel("hidden states", ("pages",))}

    def allocate(self, sizes: PoolSizes) -> States:
        return jnp.zeros((sizes.num_pages, sizes.page_size, self.features), self.dtype)

    def copy(self, pool: States, moves: Moves) -> States:
        return write_at(pool, 0, moves.target_pages, pool[moves.source_pages])

    @staticmethod
    def write(
        pool: States, kv_slots: Int[Array, " tokens"], states: Float[Array, "tokens features"]
    ) -> States:
        """Return the pool with `states` written at `kv_slots` (`write_tokens`)."""
        return write_tokens(pool, kv_slots, states)
