"""Heads and parameters of a Mamba2 layer, and the inputs and ring of its recurrence."""

from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK_CHANNELS = 256  # channels per block: two per thread, as in `conv_update`

States = Float[Array, "layers slots candidates heads head_dim state_dim"]
ReplayBases = Float[Array, "layers slots 1 heads head_dim state_dim"]
Outputs = Float[Array, "*tokens heads head_dim"]


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


@flax.struct.dataclass
class Mamba2Ring:
    """Factors of each token's update of the state: `dt x B^T` after a decay by `exp(A dt)`.

    `recurrent.replay` defines the order of the rows. `x` and `b` have the dtype of the replay base.
    """

    x: Float[Array, "layers slots ring heads head_dim"]
    b: Float[Array, "layers slots ring groups state_dim"]
    dt: Float[Array, "layers slots ring heads"]  # float32
    window: int = flax.struct.field(pytree_node=False)  # tokens kept between steps

    @property
    def num_rows(self) -> int:
        """Rows per slot: the window, and one for each token of the widest step."""
        return self.x.shape[2]
