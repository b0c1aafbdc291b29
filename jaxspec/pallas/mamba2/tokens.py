"""Inputs of Mamba2's selective state space for each token."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Mamba2Tokens(NamedTuple):
    """Tokens after convolution, bias and softplus; head `h` has group `h // (heads // groups)`.

    The leading axes `*tokens` are `rows width` in a decode rectangle and `tokens` in prompt chunks.
    `dt`, `a` and `d` are float32; `x`, `b` and `c` have the dtype of the convolution's output,
    float32 or 16 bits.
    """

    x: Float[Array, "*tokens heads head_dim"]
    dt: Float[Array, "*tokens heads"]  # step sizes, positive
    a: Float[Array, " heads"]  # decay rates, negative
    b: Float[Array, "*tokens groups state_dim"]
    c: Float[Array, "*tokens groups state_dim"]
    d: Float[Array, " heads"]  # skip factors: outputs get `d * x` added

    def padded_to(self, head_dim: int) -> "Mamba2Tokens":
        """Pad `x` with zeros for states with more rows per head than `x` has.

        Kernels need heads of 64 or 128, but Nemotron-H's have 80. The padded rows of states and
        outputs are zeros; the ops drop those of the outputs.
        """
        missing = head_dim - self.x.shape[-1]
        if not missing:
            return self
        return self._replace(x=jnp.pad(self.x, [(0, 0)] * (self.x.ndim - 1) + [(0, missing)]))
