"""RMSNorm, and the parameters of one norm as ops take them."""

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@flax.struct.dataclass
class Norm:
    """Parameters of one `rms_norm`."""

    weight: Float[Array, " features"]
    eps: float = flax.struct.field(pytree_node=False)  # added to the mean square
    # If True, multiply by `1 + weight`.
    zero_centred: bool = flax.struct.field(pytree_node=False, default=False)

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Normalise `x` over its last axis, in its dtype."""
        return rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)


def rms_norm(
    x: Float[Array, "*batch features"],
    weight: Float[Array, " features"],
    eps: float,
    *,
    zero_centred: bool = False,
) -> Float[Array, "*batch features"]:
    """Return `x / sqrt(mean(x ** 2) + eps) * weight` over the last axis, in the dtype of `x`.

    Computed in float32. A zero-centred norm multiplies by `1 + weight`. Zhang and Sennrich 2019,
    "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    if zero_centred:
        weight = weight + 1.0
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return (wide * scale * weight).astype(x.dtype)
