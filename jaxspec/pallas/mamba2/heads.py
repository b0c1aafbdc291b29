"""Heads of a Mamba2 projection, and a layer's parameters after the projection."""

from typing import NamedTuple

import flax.struct
from jaxtyping import Array, Float

BLOCK_CHANNELS = 256  # channels per block: two per thread, as in `conv_update`


class Mamba2Heads(NamedTuple):
    """Heads of a layer, and the groups that share `B` and `C`.

    The columns of a projection are, side by side: the `channels` of the convolution (`x` of all
    heads, `B` of all groups and `C` of all groups), a gate z for each of `features`, and a step
    size for each head. Further columns are padding.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int

    @property
    def features(self) -> int:
        """Columns of `x`, and of z."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.features + 2 * self.groups * self.state_dim

    @property
    def steps_column(self) -> int:
        """First column of a projection's step sizes."""
        return self.channels + self.features

    @property
    def columns(self) -> int:
        """Columns of a projection, without padding."""
        return self.steps_column + self.heads


@flax.struct.dataclass
class Mamba2Params:
    """Parameters of a layer between its projection and its recurrence."""

    conv: Float[Array, "kernel channels"]  # taps; the last multiplies the current token
    bias: Float[Array, " channels"] | None  # bias of the convolution
    # Float32 columns A_log, dt_bias and D, in one array because a kernel takes whole arrays without
    # a copy.
    rates: Float[Array, "heads 3"]
    heads: Mamba2Heads = flax.struct.field(pytree_node=False)


def key_block(heads: Mamba2Heads) -> int:
    """Return the channels per block of B or C, which must not span both: one group has 128."""
    keys = heads.groups * heads.state_dim
    return BLOCK_CHANNELS if keys % BLOCK_CHANNELS == 0 else BLOCK_CHANNELS // 2
