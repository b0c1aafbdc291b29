"""What the selective state space of Mamba2 reads of a token."""

from typing import NamedTuple

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
    d: Float[Array, " heads"]  # what of `x` is added to the outputs
