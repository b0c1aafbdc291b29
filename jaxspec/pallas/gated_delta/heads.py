"""Heads and parameters of the gated delta rule; the inputs, gates and ring of its recurrence."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.recurrent import kernel_math

EPS = 1e-6  # under the root, in the normalisation of queries and keys
BLOCK_CHANNELS = 512  # channels per block: four per thread, so that a warp holds whole heads

Keys = Float[Array, "*tokens key_heads key_dim"]
Values = Float[Array, "*tokens value_heads value_dim"]
Gates = Float[Array, "*tokens value_heads"]
ChannelGates = Float[Array, "*tokens value_heads key_dim"]
Decay = Float[Array, "value_heads 2"]
States = Float[Array, "layers slots candidates value_heads value_dim key_dim"]
ReplayBases = Float[Array, "layers slots 1 value_heads value_dim key_dim"]


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


class ChannelParams(NamedTuple):
    """Parameters of a layer with a decay by channel, between its projection and its recurrence.

    `heads` and the columns are Python integers, so this cannot be an argument of a jitted function.
    """

    conv: Float[Array, "kernel channels"]  # taps; the last multiplies the current token
    log_rate: Float[Array, " heads"]  # float32, as the bias: see `channel_gates`
    bias: Float[Array, "heads key_dim"]
    lower_bound: float | None  # of log decays
    heads: GdnHeads  # as many of keys as of values
    f_column: int  # first column of f, the log decays' input, in its array
    b_column: int  # first column of b, the write strengths' input, in the projection


class GdnTokens(NamedTuple):
    """Inputs of the recurrence for each token, float32 unless an op documents another dtype.

    The leading axes `*tokens` are `rows width` in a decode region and `tokens` in prompt chunks.
    Value head `h` uses key head `h // (value_heads // key_heads)`. The decay is one number per head
    in Gated DeltaNet, and one per key channel in Kimi Delta Attention.
    """

    q: Keys  # normalised and scaled
    k: Keys  # normalised
    v: Values
    g: Gates | ChannelGates  # log decay, at most 0
    beta: Gates  # write strength


def gates_column(channels: int, heads: GdnHeads) -> int:
    """Return the first column of b in a projection, after the channels and the output gate."""
    return 2 * (channels - heads.key_heads * heads.key_dim)


def gates(b: Gates, a: Gates, decay: Decay) -> tuple[Gates, Gates]:
    """Return float32 log decays and write strengths.

    The log decay is `-exp(decay[:, 0]) * softplus(a + decay[:, 1])`, as in Mamba2, and the write
    strength `sigmoid(b)` (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464). `b` and `a`
    may have any float dtype. The parameters of the decay, `A_log` and `dt_bias`, are float32 and
    share one array, because a kernel takes whole arrays without a copy.
    """
    rate, bias = (jnp.broadcast_to(x, a.shape) for x in (-jnp.exp(decay[:, 0]), decay[:, 1]))
    step = jax.nn.softplus(a.astype(jnp.float32) + bias)
    return rate * step, jax.nn.sigmoid(b.astype(jnp.float32))


def gates_in_kernel(b: Any, a: Any, log_rate: Any, bias: Any) -> tuple[Any, Any]:
    """`gates` inside a kernel, on float32 registers; `log_rate`, `bias` are columns of `decay`."""
    return -kernel_math.exp(log_rate) * kernel_math.softplus(a + bias), kernel_math.sigmoid(b)


def channel_gates(
    f: ChannelGates,
    log_rate: Float[Array, " heads"],
    bias: Float[Array, "heads key_dim"],
    lower_bound: float | None = None,
) -> ChannelGates:
    """Return float32 log decays by channel: `-exp(log_rate) * softplus(f + bias)`.

    Kimi Team 2025, "Kimi Linear", arXiv 2510.26692. With a `lower_bound` (Ling-3.0), they are
    `lower_bound * sigmoid(exp(log_rate) * (f + bias))`. `f` may have any float dtype.
    """
    step = f.astype(jnp.float32) + jnp.broadcast_to(bias, f.shape)
    rate = jnp.broadcast_to(jnp.exp(log_rate)[:, None], f.shape)
    if lower_bound is not None:
        return lower_bound * jax.nn.sigmoid(rate * step)
    return -rate * jax.nn.softplus(step)


def channel_gates_in_kernel(step: Any, rate: Any, lower_bound: float | None) -> Any:
    """`channel_gates` inside a kernel, of `f + bias` and `exp(log_rate)` in float32 registers."""
    if lower_bound is not None:
        return lower_bound * kernel_math.sigmoid(rate * step)
    return -rate * kernel_math.softplus(step)


def over_state(
    decay: Float[Array, "..."], state: Float[Array, "... value_dim key_dim"]
) -> Float[Array, "..."]:
    """Give a decay per head, or per head and key channel, the axes of the state it multiplies."""
    by_head = decay.ndim == state.ndim - 2
    return decay[..., None, None] if by_head else decay[..., None, :]


@flax.struct.dataclass
class GdnRing:
    """Factors that each token added to its slot's state: `u k^T`, after a decay of `g`.

    `recurrent.replay` defines the row of each token. `k` and `u` have the replay base's dtype.
    """

    k: Float[Array, "layers slots ring key_heads key_dim"]
    u: Float[Array, "layers slots ring value_heads value_dim"]
    # Log decay, in float32 and with the axes of the tokens' decay.
    g: Float[Array, "layers slots ring value_heads"] | Float[Array, "layers slots ring heads keys"]
    window: int = flax.struct.field(pytree_node=False)  # tokens kept between steps

    @property
    def num_rows(self) -> int:
        """Rows per slot: the window, and one for each token of the widest step."""
        return self.k.shape[2]
