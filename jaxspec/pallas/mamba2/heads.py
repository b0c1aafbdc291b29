"""How a Mamba2 projection divides into heads, and a layer's parameters behind it."""

from typing import NamedTuple

import flax.struct
from jaxtyping import Array, Float

BLOCK_CHANNELS = 256  # of a kernel's block: two a thread, as in `conv_update`


class Mamba2Heads(NamedTuple):
    """The heads of a layer, and the groups that share `B` and `C`.

    A projection has its columns side by side: `channels` of the convolution, which are `x` of all
    heads, `B` of all groups and `C` of all groups; then a gate z for each of `features`; then a
    step size for each head. Columns behind them are padding.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int

    @property
    def features(self) -> int:
        """Columns of `x`, and as many of z."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.features + 2 * self.groups * self.state_dim

    @property
    def steps_column(self) -> int:
        """The column of a projection where the step sizes begin."""
        return self.channels + self.features

    @property
    def columns(self) -> int:
        """Columns of a projection that mean something."""
        return self.steps_column + self.heads


@flax.struct.dataclass
class Mamba2Params:
    """A layer's parameters between its projection and its recurrence."""

    conv: Float[Array, "kernel channels"]  # taps; the last multiplies the current token
    bias: Float[Array, " channels"] | None  # of the convolution
    # Float32 columns A_log, dt_bias and D, in one array because a kernel takes whole arrays
    # without a copy.
    rates: Float[Array, "heads 3"]
    heads: Mamba2Heads = flax.struct.field(pytree_node=False)


def key_block(heads: Mamba2Heads) -> int:
    """Channels of B or of C in a block, which must not span both: one group alone has 128."""
    keys = heads.groups * heads.state_dim
    return BLOCK_CHANNELS if keys % BLOCK_CHANNELS == 0 else BLOCK_CHANNELS // 2
