"""What is still to be added to the residual stream, which the next norm adds."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

# What is still to be added to the residual stream (not the delta rule's): nothing yet, tokens in
# its dtype, or float32 partial sums, which make such tokens when summed and rounded.
Delta = Float[Array, "tokens features"] | Float[Array, "parts tokens features"] | None


def whole(delta: Float[Array, "*parts tokens features"], dtype: Any) -> Float[Array, "tokens _"]:
    """Tokens in `dtype`: of sums over parts the sum, rounded once."""
    return delta if delta.ndim == 2 else jnp.sum(delta, axis=0).astype(dtype)
