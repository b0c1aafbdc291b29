"""Gated DeltaNet: the recurrent token mixer of Qwen3-Next and Qwen3.5."""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.cache import PerSlot, RecurrentPool, Ring
from jaxspec.models.config import ModelConfig, share
from jaxspec.models.fields import Fields, check_groups
from jaxspec.models.kinds import SIZE
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import Projected, rectangle
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare, draw_rates
from jaxspec.models.layers.recurrent_mixer import RecurrentMixer
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams, GdnRing, GdnTokens, gates
from jaxspec.pallas.gated_delta.inputs import gdn_inputs, split_qkv
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.pallas.gated_delta.replay import replayed_states
from jaxspec.pallas.gated_delta.step import gdn_scan, gdn_step
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.recurrent.conv_update import conv_prefill
from jaxspec.pallas.recurrent.token_scan import conv_scan
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Sizes of a Gated DeltaNet layer: a part of a `ModelConfig`."""

    key_heads: int  # also of queries; each is shared by `value_heads // key_heads` value heads
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int  # taps of the causal convolution
    by_key_head: bool = False  # rows of the checkpoint's projections are grouped by key head

    @classmethod
    def read(cls, fields: Fields, *, by_key_head: bool) -> "GatedDeltaNetConfig":
        """Read the sizes from Qwen's fields; key heads must divide the value heads."""
        sizes = cls(
            key_heads=fields.need("linear_num_key_heads", SIZE),
            value_heads=fields.need("linear_num_value_heads", SIZE),
            key_dim=fields.need("linear_key_head_dim", SIZE),
            value_dim=fields.need("linear_value_head_dim", SIZE),
            conv_kernel=fields.need("linear_conv_kernel_dim", SIZE),
            by_key_head=by_key_head,
        )
        check_groups(sizes.value_heads, sizes.key_heads, "linear_num_{value,key}_heads")
        return sizes

    def local(self, devices: int) -> "GatedDeltaNetConfig":
        """Return the sizes that each of `devices` devices holds."""
        return dataclasses.replace(
            self,
            key_heads=share(self.key_heads, devices, "linear_num_key_heads"),
            value_heads=share(self.value_heads, devices, "linear_num_value_heads"),
        )

    @property
    def values(self) -> int:
        """Total channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of the convolution: queries, keys, values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.values

    @property
    def conv_dim(self) -> int:
        return sum(self.conv_parts)


class GatedDeltaNet(RecurrentMixer):
    """Input projection, causal convolution, gated delta rule, gated norm, output projection.

    Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464. Decay, write strength, recurrence
    and output norm are float32, whatever the dtype of the weights.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """Declare the parameters, in `dtype` except those of the decay and the norm (float32)."""
        self.sizes = sizes = config.part(GatedDeltaNetConfig)
        outputs = {
            "in_proj_qkv": sizes.conv_dim,
            "in_proj_z": sizes.values,
            "in_proj_b": sizes.value_heads,
            "in_proj_a": sizes.value_heads,
        }
        # Padded to whole kernel tiles: otherwise the last tile of the 0.8B's 8,224 columns has 32,
        # which are copied in rows of only 64 bytes.
        # Errors of decay and write strength would accumulate in the state.
        self.in_proj = Linear(config.hidden_size, outputs, dtype, multiple=BLOCK_N, in_16_bits=2)
        # Transposed on load; the GPU kernel reads one tap of many channels at once.
        self.conv = declare((sizes.conv_kernel, sizes.conv_dim), dtype)
        # A_log and dt_bias of the checkpoint, in one matrix that a kernel reads without a copy.
        self.decay = declare((sizes.value_heads, 2), jnp.float32, _init_decay)
        # This norm is never zero-centred.
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps, jnp.float32)
        self.out_proj = Linear(sizes.values, {"out_proj": config.hidden_size}, dtype)

    @property
    def conv_parts(self) -> tuple[int, ...]:
        return self.sizes.conv_parts

    def cached(self, dtype: jnp.dtype) -> tuple[PerSlot, Ring]:
        sizes = self.sizes
        value = sizes.value_heads, sizes.value_dim
        factors = (
            PerSlot((sizes.key_heads, sizes.key_dim), dtype),  # k
            PerSlot(value, dtype),  # u
            PerSlot((sizes.value_heads,), jnp.dtype("float32")),  # g
        )
        return PerSlot((*value, sizes.key_dim), dtype), Ring(GdnRing, factors)

    def step_heads(
        self, projected: Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        projected = rectangle(projected, rows)
        tokens, conv = gdn_inputs(projected, self._params, pool.conv, layer, rows)
        heads, states = gdn_step(tokens, pool.states, layer, rows)
        return heads, conv, states

    def replay_heads(
        self, projected: Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array, GdnRing]:
        tokens, norm = rectangle(projected, rows), self.output_norm(projected)
        held = pool.conv, pool.states, pool.ring
        return gdn_conv_replay(tokens, self._params, *held, layer, rows, norm)

    def scan_heads(
        self, projected: Projected, pool: RecurrentPool, rows: TokenRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        mixed, _, b, a = self.in_proj.split(projected)
        y, conv = conv_scan(mixed, self.conv[...], pool.conv, layer, rows)
        tokens = GdnTokens(*split_qkv(y, self._heads), *gates(b, a, self.decay[...]))
        heads, states = gdn_scan(tokens, pool.states, layer, rows)
        return heads, conv, states

    def prefill_heads(
        self, projected: Projected, pool: RecurrentPool, chunks: PrefillRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        mixed, _, b, a = self.in_proj.split(projected)
        g, beta = gates(b, a, self.decay[...])
        y, conv = conv_prefill(mixed, self.conv[...], pool.conv, layer, chunks)
        q, k, v = split_qkv(y, self._heads)
        v = v.astype(mixed.dtype)  # its dtype before the convolution, for fast 16-bit matmuls
        heads, states = gdn_prefill(GdnTokens(q, k, v, g, beta), pool.states, layer, chunks)
        return heads, conv, states

    def replayed(self, pool: RecurrentPool, rows: DecodeRegion, layer: int) -> Array:
        return replayed_states(pool.states, pool.ring, layer, rows)

    def output_norm(self, projected: Projected) -> GatedNorm:
        """Return the norm of these tokens' heads; its gates z follow the convolution's channels."""
        norm = self.norm.operand
        return GatedNorm(projected, norm.weight, first=self.sizes.conv_dim, eps=norm.eps)

    def output(self, heads: Heads, projected: Projected) -> Pending:
        """Apply the output projection, after the gated norm if the heads are not finished."""
        return self.out_proj.after_gated_norm(heads, self.output_norm(projected))

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        prefix += "linear_attn."
        taps, channels = self.conv.shape
        segments = 0, self.conv_parts
        if self.sizes.by_key_head:
            yield from self._by_key_head(prefix)
        else:
            qkv, *others = self.in_proj.checkpoint(prefix)
            yield from (dataclasses.replace(qkv, segments=segments), *others)
        yield Placement(
            prefix + "conv1d.weight",
            (channels, 1, taps),
            self.conv,
            transpose=True,
            segments=segments,
        )
        for column, name in enumerate(("A_log", "dt_bias")):
            yield Placement(prefix + name, self.decay.shape[:1], self.decay, index=(..., column))
        yield from self.norm.checkpoint(prefix + "norm")
        yield from self.out_proj.checkpoint(prefix)

    def _by_key_head(self, prefix: str) -> Iterator[Placement]:
        """Place Qwen3-Next's projections, whose rows are q, k, v, z (or b, a) per key head."""
        sizes, weight, start = self.sizes, self.in_proj.weight, 0
        served = sizes.value_heads // sizes.key_heads
        values = served * sizes.value_dim
        qkvz = sizes.key_dim, sizes.key_dim, values, values
        for name, counts in ("in_proj_qkvz", qkvz), ("in_proj_ba", (served, served)):
            shape = sizes.key_heads, sum(counts)
            rows = np.arange(math.prod(shape)).reshape(shape)
            for part in np.split(rows, np.cumsum(counts)[:-1], axis=1):
                yield Placement(
                    f"{prefix}{name}.weight",
                    (rows.size, weight.shape[0]),
                    weight,
                    transpose=True,
                    index=(..., slice(start, start + part.size)),
                    part=part.ravel(),
                )
                start += part.size

    @property
    def _heads(self) -> GdnHeads:
        return GdnHeads(self.sizes.key_heads, self.sizes.key_dim, self.sizes.value_heads)

    @property
    def _params(self) -> GdnParams:
        return GdnParams(self.conv[...], self.decay[...], self._heads)


def _init_decay(key, shape, dtype):
    return jnp.stack(draw_rates(key, shape[0], dtype), axis=1)
