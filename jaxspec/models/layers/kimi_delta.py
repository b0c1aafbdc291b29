"""Kimi Delta Attention: the recurrent token mixer of Kimi-Linear and Ling-3.0."""

import dataclasses
from collections.abc import Iterator

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache import PerSlot, Pools, RecurrentPool, Ring
from jaxspec.models.config import ModelConfig, share
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import SIZE, whole
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, Projected, rectangle
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare, draw_rates
from jaxspec.models.layers.recurrent_mixer import RecurrentMixer
from jaxspec.pallas.gated_delta.heads import ChannelParams, GdnHeads, GdnRing
from jaxspec.pallas.gated_delta.inputs import gdn_inputs_by_channel, tokens_by_channel
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.pallas.gated_delta.replay import gdn_replay, replayed_states
from jaxspec.pallas.gated_delta.step import gdn_scan, gdn_step
from jaxspec.pallas.matmul.grouped_matmul import grouped_matmul
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.recurrent.conv_update import conv_prefill
from jaxspec.pallas.recurrent.token_scan import conv_scan
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion

TAPS = whole(2, 64)
"""Taps of a causal convolution."""


@dataclasses.dataclass(frozen=True)
class KimiDeltaConfig:
    """Sizes of a Kimi Delta Attention layer: a part of a `ModelConfig`."""

    heads: int  # of queries, keys and values alike
    head_dim: int
    conv_kernel: int  # taps of the causal convolution
    # Channels between the two matrices of the decay, and of the output gate; None means one matrix.
    rank: int | None
    lower_bound: float | None = None  # of log decays; None means that there is none

    @classmethod
    def read(cls, fields: Fields) -> "KimiDeltaConfig":
        """Read the sizes from `linear_attn_config`, or from the fields of transformers 5."""
        block = fields.block("linear_attn_config")
        names = "num_heads", "head_dim", "short_conv_kernel_size"
        if not block.entries:
            block = fields
            names = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
        heads, head_dim, taps = names
        width = block.need(head_dim, SIZE)
        return cls(block.need(heads, SIZE), width, block.need(taps, TAPS), rank=width)

    def local(self, devices: int) -> "KimiDeltaConfig":
        """Return the sizes that each of `devices` devices holds."""
        heads = share(self.heads, devices, "the number of Kimi Delta Attention heads")
        return dataclasses.replace(self, heads=heads)

    @property
    def channels(self) -> int:
        """Channels of all heads, equally many of queries, keys and values."""
        return self.heads * self.head_dim


@flax.struct.dataclass
class KimiDeltaTokens:
    """The projection of each token, and arrays with its decay and its output gate.

    With one matrix for each, both are columns of the projection.
    """

    projected: Projected
    decay: Float[Array, "*tokens decay_columns"]
    gates: Float[Array, "*tokens gate_columns"]


class KimiDelta(RecurrentMixer):
    """Input projection, causal convolution, delta rule with a decay by channel, gated norm, output.

    Kimi Team 2025, "Kimi Linear", arXiv 2510.26692. There, the decay and the output gate are
    projected twice, through few channels; in Ling-3.0 once, and the decay is bounded. Decay, write
    strength, recurrence and output norm are float32, whatever the dtype of the weights.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """Declare the parameters, in `dtype` except those of the decay and the norm (float32)."""
        self.sizes = sizes = config.part(KimiDeltaConfig)
        outputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), sizes.channels)
        if sizes.rank is None:
            outputs |= dict.fromkeys(("g_proj", "f_proj"), sizes.channels)
        else:
            outputs |= dict.fromkeys(("g_a_proj", "f_a_proj"), sizes.rank)
        outputs |= {"b_proj": sizes.heads}
        # Errors of the decay would accumulate in the state.
        in_16_bits = 2 if sizes.rank is None else 3
        self.in_proj = Linear(
            config.hidden_size, outputs, dtype, multiple=BLOCK_N, in_16_bits=in_16_bits
        )
        self.conv = declare((sizes.conv_kernel, 3 * sizes.channels), dtype)
        self.decay_proj = _second(sizes, "f_b_proj", dtype)
        self.gate_proj = _second(sizes, "g_b_proj", dtype)
        self.log_rate = declare((sizes.heads,), jnp.float32, _init_rates)
        self.step_bias = declare((sizes.channels,), jnp.float32, _init_steps)
        self.norm = RMSNorm(sizes.head_dim, config.rms_norm_eps, jnp.float32)
        self.out_proj = Linear(sizes.channels, {"o_proj": config.hidden_size}, dtype)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        return (self.sizes.channels,) * 3

    def cached(self, dtype: jnp.dtype) -> tuple[PerSlot, Ring]:
        head = self.sizes.heads, self.sizes.head_dim
        factors = PerSlot(head, dtype), PerSlot(head, dtype), PerSlot(head, jnp.dtype("float32"))
        return PerSlot((*head, self.sizes.head_dim), dtype), Ring(GdnRing, factors)  # k, u, g

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[KimiDeltaTokens, Pools]:
        """Multiply with the second matrices of the decay and of the output gate, if there are."""
        if self.decay_proj is None or self.gate_proj is None:
            return KimiDeltaTokens(projected, projected, projected), pools
        weights = self.decay_proj.operand, self.gate_proj.operand
        *_, g, f, _ = self.in_proj.starts
        decay, gates = grouped_matmul(projected, (f, g), weights)
        return KimiDeltaTokens(projected, decay, gates), pools

    def step_heads(
        self, projected: KimiDeltaTokens, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        tokens, conv = self._decode_inputs(projected, pool, rows, layer)
        heads, states = gdn_step(tokens, pool.states, layer, rows)
        return heads, conv, states

    def replay_heads(
        self, projected: KimiDeltaTokens, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array, GdnRing]:
        tokens, conv = self._decode_inputs(projected, pool, rows, layer)
        norm = self.output_norm(projected)
        heads, states, ring = gdn_replay(tokens, pool.states, pool.ring, layer, rows, norm)
        return heads, conv, states, ring

    def scan_heads(
        self, projected: KimiDeltaTokens, pool: RecurrentPool, rows: TokenRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        channels = projected.projected[:, : self.conv.shape[1]]
        y, conv = conv_scan(channels, self.conv[...], pool.conv, layer, rows)
        heads, states = gdn_scan(self._inputs(y, projected), pool.states, layer, rows)
        return heads, conv, states

    def prefill_heads(
        self, projected: KimiDeltaTokens, pool: RecurrentPool, chunks: PrefillRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        channels = projected.projected[:, : self.conv.shape[1]]
        y, conv = conv_prefill(channels, self.conv[...], pool.conv, layer, chunks)
        tokens = self._inputs(y, projected)
        # Their dtype before the convolution, for fast 16-bit matmuls.
        tokens = tokens._replace(v=tokens.v.astype(channels.dtype))
        heads, states = gdn_prefill(tokens, pool.states, layer, chunks)
        return heads, conv, states

    def _decode_inputs(self, tokens, pool, rows, layer):
        """Return the recurrence's inputs for a rectangle, and the convolution pool."""
        projected, f = (rectangle(x, rows) for x in (tokens.projected, tokens.decay))
        return gdn_inputs_by_channel(projected, f, self._params, pool.conv, layer, rows)

    def _inputs(self, y, tokens):
        """Return the recurrence's inputs, given the convolution's outputs."""
        return tokens_by_channel(y, tokens.projected, tokens.decay, self._params)

    @property
    def _params(self):
        heads, head_dim = self.sizes.heads, self.sizes.head_dim
        return ChannelParams(
            self.conv[...],
            self.log_rate[...],
            self.step_bias[...].reshape(heads, head_dim),
            self.sizes.lower_bound,
            GdnHeads(heads, head_dim, heads),
            f_column=0 if self.decay_proj is not None else self.in_proj.starts[-2],
            b_column=self.in_proj.starts[-1],
        )

    def replayed(self, pool: RecurrentPool, rows: DecodeRegion, layer: int) -> Array:
        return replayed_states(pool.states, pool.ring, layer, rows)

    def output_norm(self, projected: KimiDeltaTokens) -> GatedNorm:
        norm = self.norm.operand
        first = 0 if self.decay_proj is not None else self.in_proj.starts[-3]
        return GatedNorm(projected.gates, norm.weight, first, norm.eps, gate="sigmoid")

    def output(self, heads: Heads, projected: KimiDeltaTokens) -> Pending:
        """Apply the output projection, after the gated norm if the heads are not finished."""
        return self.out_proj.after_gated_norm(heads, self.output_norm(projected))

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        prefix += "self_attn."
        channels, taps = self.sizes.channels, self.sizes.conv_kernel
        yield from self.in_proj.checkpoint(prefix)
        for part, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d")):
            yield Placement(
                f"{prefix}{name}.weight",
                (channels, 1, taps),
                self.conv,
                transpose=True,
                index=(..., slice(part * channels, (part + 1) * channels)),
            )
        rates: tuple[int, ...] = (self.sizes.heads,)
        if self.decay_proj is not None and self.gate_proj is not None:
            yield from self.decay_proj.checkpoint(prefix)
            yield from self.gate_proj.checkpoint(prefix)
            rates = (1, 1, self.sizes.heads, 1)
        yield Placement(prefix + "A_log", rates, self.log_rate)
        yield Placement(prefix + "dt_bias", (channels,), self.step_bias)
        yield from self.norm.checkpoint(prefix + "o_norm")
        yield from self.out_proj.checkpoint(prefix)


def _second(sizes: KimiDeltaConfig, name: str, dtype: jnp.dtype) -> Linear | None:
    """Return the second matrix of a decay or output gate; None if there is only one."""
    if sizes.rank is None:
        return None
    return Linear(sizes.rank, {name: sizes.channels}, dtype, in_16_bits=1)


def _init_rates(key, shape, dtype):
    return draw_rates(key, shape[0], dtype)[0]


def _init_steps(key, shape, dtype):
    return draw_rates(key, shape[0], dtype)[1]
