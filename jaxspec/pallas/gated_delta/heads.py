"""Heads and parameters of a Gated DeltaNet layer, and the inputs of its recurrence."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxspec.pallas.gated_delta.gates import Decay, Gates

EPS = 1e-6  # under the root, in the normalisation of queries and keys
BLOCK_CHANNELS = 512  # channels per block: four per thread, so that a warp holds whole heads

Keys = Float[Array, "*tokens key_heads key_dim"]
Values = Float[Array, "*tokens value_heads value_dim"]


class GdnHeads(NamedTuple):
    """Division of a convolution's channels: queries, as many keys, then values."""

    key_heads: int
    key_dim: int  # value heads share the remaining channels equally
    value_heads: int


class GdnParams(NamedTuple):
    """Parameters of a layer between its projection and its recurrence.

    `heads` holds Python integers, so this cannot be an argument of a jitted function.
    """

    conv: Float[Array, "kernel channels"]  # taps; the last multiplies the current token
    decay: Decay
    heads: GdnHeads


class GdnTokens(NamedTuple):
    """Inputs of the recurrence for each token, float32 unless an op documents another dtype.

    The leading axes `*tokens` are `rows width` in a decode region and `tokens` in prompt chunks.
    Value head `h` uses key head `h // (value_heads // key_heads)`.
    """

    q: Keys  # normalised and scaled
    k: Keys  # normalised
    v: Values
    g: Gates  # log decay, at most 0
    beta: Gates  # write strength


def gates_column(channels: int, heads: GdnHeads) -> int:
    """Return the first column of b in a projection, after the channels and the output gate."""
    return 2 * (channels - heads.key_heads * heads.key_dim)
