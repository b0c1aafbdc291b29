"""HiddenStates: the residual stream of every computed token, in the pages of its request."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.specs import Holder, Moves, PoolSizes

States = Float[Array, "pages page_size features"]


@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """What a token has at some layers, side by side: `[pages, page_size, features]`.

    Requests that share pages share the states of their tokens. A request's newest token is not
    computed yet, so it has none; behind it lies junk.
    """

    features: int
    dtype: jnp.dtype
    name: str = "hidden_states"
    layers: int = 1
    by_page: ClassVar = True
    page_axis: ClassVar = 0
    labels: ClassVar = {"hidden_states": Holder("hidden states", ("pages",))}

    def allocate(self, sizes: PoolSizes) -> States:
        """Empty pages."""
        return jnp.zeros((sizes.num_pages, sizes.page_size, self.features), self.dtype)

    def copy(self, pool: States, moves: Moves) -> States:
        """Whole pages."""
        targets = jnp.where(moves.target_pages > 0, moves.target_pages, pool.shape[0])
        return pool.at[targets].set(pool[moves.source_pages], mode="drop")

    def holders(self, pool: States) -> dict[str, States]:
        """The one array."""
        return {self.name: pool}

    def partition(self) -> dict[str, int]:
        """Nothing: the residual stream is whole on every device of a mesh."""
        return {}

    @staticmethod
    def write(
        pool: States, kv_slots: Int[Array, " tokens"], states: Float[Array, "tokens features"]
    ) -> States:
        """The pool with `states` at `kv_slots` (int32, page * page_size + offset; -1: nowhere)."""
        num_pages, page_size, features = pool.shape
        rows = pool.reshape(num_pages * page_size, features)
        where = jnp.where(kv_slots < 0, rows.shape[0], kv_slots)
        return rows.at[where].set(states.astype(pool.dtype), mode="drop").reshape(pool.shape)
