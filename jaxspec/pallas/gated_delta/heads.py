"""How the columns of a Gated DeltaNet projection divide into heads."""

from typing import NamedTuple

EPS = 1e-6  # under the root of a query's or a key's length


class GdnHeads(NamedTuple):
    """How the channels of a convolution divide: queries, as many keys, and the rest values."""

    key_heads: int
    key_dim: int  # of a value head: the channels left over, divided by `value_heads`
    value_heads: int


def gates_column(channels: int, heads: GdnHeads) -> int:
    """The column of a projection where b begins, behind channels and output gate."""
    return 2 * (channels - heads.key_heads * heads.key_dim)


_CHANNELS = 512  # of a block: four a thread, so that one warp has whole heads
