"""How a Gated DeltaNet projection divides into heads, and what the recurrence reads of a token."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxspec.pallas.gated_delta.gates import Decay, Gates

EPS = 1e-6  # under the root of a query's or a key's length
BLOCK_CHANNELS = 512  # of a kernel's block: four a thread, so that one warp has whole heads

Keys = Float[Array, "*tokens key_heads key_dim"]
Values = Float[Array, "*tokens value_heads value_dim"]


class GdnHeads(NamedTuple):
    """How the channels of a convolution divide: queries, as many keys, and the rest values."""

    key_heads: int
    key_dim: int  # a value head has the channels left over, divided by `value_heads`
    value_heads: int


class GdnParams(NamedTuple):
    """A layer's parameters between its projection and its recurrence.

    `heads` are Python integers, so this cannot be an argument of a jitted function.
    """

    conv: Float[Array, "kernel channels"]  # taps; the last multiplies the current token
    decay: Decay
    heads: GdnHeads


class GdnTokens(NamedTuple):
    """What the recurrence reads of each token, all float32 but where an op says otherwise.

    The leading axes `*tokens` are `rows width` in a decode rectangle and `tokens` in prompt chunks.
    Value head `h` uses key head `h // (value_heads // key_heads)`.
    """

    q: Keys  # normalised and scaled
    k: Keys  # normalised
    v: Values
    g: Gates  # log decay, at most 0
    beta: Gates  # write strength


def gates_column(channels: int, heads: GdnHeads) -> int:
    """The column of a projection where b begins, behind channels and output gate."""
    return 2 * (channels - heads.key_heads * heads.key_dim)
