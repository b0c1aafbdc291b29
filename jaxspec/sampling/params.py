"""What each row asks of the sampler, as arrays."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling_params import GREEDY_BELOW

NO_TOKEN = -1
"""No token: padding, a placeholder draft, or a row whose logits leave nothing to draw."""


@flax.struct.dataclass
class SamplingInputs:
    """One entry a row of logits: how its token is drawn."""

    temperature: Float[Array, " n"]  # float32; 0 = greedy
    top_k: Int[Array, " n"]  # int32; keep the k largest, -1 or 0 = off
    top_p: Float[Array, " n"]  # float32; keep the smallest set of this mass, 1 = off
    seeds: Int[Array, " n"]  # int32; the request's own
    stop_ids: Int[Array, "n stops"]  # int32; then -1. `stops` may be 0: the mask then costs nothing
    min_len: Int[Array, " n"]  # int32; no stop id is drawn for a token of an index below this

    @property
    def is_greedy(self) -> Bool[Array, " n"]:
        """Rows that take the likeliest token."""
        return self.temperature < GREEDY_BELOW

    def repeat(self, n: int) -> "SamplingInputs":
        """The same rows for `n` positions each: row `r` is at `r * n ... r * n + n - 1`.

        This is the order in which `[rows, n, ...]` flattens. `n` is static.
        """
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, n, axis=0), self)
