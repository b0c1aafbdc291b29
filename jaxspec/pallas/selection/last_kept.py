"""Truncation of rows of logits after a last kept id, as in top-k and top-p."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class LastKept(NamedTuple):
    """Last id that each row keeps, in descending order of logits; ties in ascending order of ids.

    Comparing every other id with it replaces a mask that would have to be scattered back.
    """

    logit: Float[Array, " n"]
    id: Int[Array, " n"]  # int32

    @staticmethod
    def none(n: int) -> "LastKept":
        """Return an instance that keeps every id."""
        return LastKept(jnp.full(n, -jnp.inf), jnp.full(n, jnp.iinfo(jnp.int32).max, jnp.int32))

    def where(self, chosen: Bool[Array, " n"], other: "LastKept") -> "LastKept":
        """Select `self` in the rows that are `chosen`, `other` elsewhere."""
        return LastKept(*(jnp.where(chosen, a, b) for a, b in zip(self, other, strict=True)))

    def mask(self, logits: Float[Array, "n vocab"]) -> Float[Array, "n vocab"]:
        """Set the logits of ids after each row's last kept id to -inf."""
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logit, last_id = self.logit[:, None], self.id[:, None]
        is_behind = (logits < logit) | ((logits == logit) & (ids > last_id))  # False for NaN
        return jnp.where(is_behind, -jnp.inf, logits)
