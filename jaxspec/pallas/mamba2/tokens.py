"""What the selective state space of Mamba2 reads of a token."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Mamba2Tokens(NamedTuple):
    """Tokens after convolution, bias and softplus; head `h` has group `h // (heads // groups)`.

    The leading axes `*tokens` are `rows width` in a decode rectangle and `tokens` in prompt chunks.
    `dt`, `a` and `d` are float32; `x`, `b` and `c` come as the convolution leaves them, in float32
    or 16 bits.
    """

    x: Float[Array, "*tokens heads head_dim"]
    dt: Float[Array, "*tokens heads"]  # step sizes, positive
    a: Float[Array, " heads"]  # rates of decay, negative
    b: Float[Array, "*tokens groups state_dim"]
    c: Float[Array, "*tokens groups state_dim"]
    d: Float[Array, " heads"]  # the outputs get `d * x` added

    def padded_to(self, head_dim: int) -> "Mamba2Tokens":
        """The tokens with zeros behind `x`, for states with more rows a head than `x` has.

        Kernels want heads of 64 or 128, but Nemotron-H's have 80. What the zeros add to a state,
        and its outputs in those rows, are zeros that the ops cut off.
        """
        missing = head_dim - self.x.shape[-1]
        if not missing:
            return self
        return self._replace(x=jnp.pad(self.x, [(0, 0)] * (self.x.ndim - 1) + [(0, missing)]))
