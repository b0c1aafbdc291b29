"""LastKept: the last id that each row of logits keeps."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class LastKept(NamedTuple):
    """The last id that each row keeps, in the order of its logits; of equal ones the lower first.

    A comparison with it decides for every other id, so no mask is scattered back.
    """

    logit: Float[Array, " n"]
    id: Int[Array, " n"]  # int32

    @staticmethod
    def none(n: int) -> "LastKept":
        """Keep every id."""
        return LastKept(jnp.full(n, -jnp.inf), jnp.full(n, jnp.iinfo(jnp.int32).max, jnp.int32))

    def where(self, chosen: Bool[Array, " n"], other: "LastKept") -> "LastKept":
        """Return this one in the rows that are `chosen`, and `other` elsewhere."""
        return LastKept(*(jnp.where(chosen, a, b) for a, b in zip(self, other, strict=True)))

    def mask(self, logits: Float[Array, "n vocab"]) -> Float[Array, "n vocab"]:
        """Return `logits` with -inf after each row's last kept id."""
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logit, last_id = self.logit[:, None], self.id[:, None]
        is_behind = (logits < logit) | ((logits == logit) & (ids > last_id))  # no NaN is
        return jnp.where(is_behind, -jnp.inf, logits)
