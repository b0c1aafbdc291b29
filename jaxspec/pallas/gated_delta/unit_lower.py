"""Inverse of unit lower triangular matrices, for the systems of a chunk."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.recurrent.chunks import product


@jax.custom_jvp
def unit_lower_inverse(strictly_lower: Float[Array, "... n n"]) -> Float[Array, "... n n"]:
    """Return `(1 + A)^-1` for a power of two `n`, by joining the inverses of ever larger blocks.

    Powers of `A` would grow where keys resemble each other.
    """
    half = strictly_lower.shape[-1] // 2
    if not half:
        return 1 - strictly_lower  # it is zero
    blocks = [strictly_lower[..., :half, :half], strictly_lower[..., half:, half:]]
    blocks = unit_lower_inverse(jnp.stack(blocks))
    joining = product("...ij,...jk->...ik", strictly_lower[..., half:, :half], blocks[0])
    joining = -product("...ij,...jk->...ik", blocks[1], joining)
    upper = jnp.concatenate([blocks[0], jnp.zeros_like(joining)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([joining, blocks[1]], axis=-1)], axis=-2)


@unit_lower_inverse.defjvp
def _inverse_derivative(primals, tangents):
    (strictly_lower,), (change,) = primals, tangents
    inverse = unit_lower_inverse(strictly_lower)
    return inverse, -product("...ij,...jk,...kl->...il", inverse, jnp.tril(change, -1), inverse)
