"""Gated DeltaNet: the recurrent token mixer of Qwen3-Next and Qwen3.5."""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Conv, PerSlot, Pools, Recurrent, RecurrentPool, Ring
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields, check_groups
from jaxspec.models.kinds import SIZE
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, flat, rectangle
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare, draw_rates
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay
from jaxspec.pallas.gated_delta.gates import gates
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams, GdnTokens
from jaxspec.pallas.gated_delta.inputs import gdn_inputs, split_qkv
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.pallas.gated_delta.replay import replayed_states
from jaxspec.pallas.gated_delta.ring import GdnRing
from jaxspec.pallas.gated_delta.step import gdn_step
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.recurrent.conv_update import conv_prefill
from jaxspec.regions import DecodeRegion

_Projected = Float[Array, "tokens columns"]
_Finished = Float[Array, "tokens features"]


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """The sizes of a Gated DeltaNet layer: a part of a `ModelConfig`."""

    key_heads: int  # queries have as many; each serves `value_heads // key_heads` value heads
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int  # taps of the causal convolution
    by_key_head: bool = False  # published so: each key head's rows, then those of the next

    @classmethod
    def read(cls, fields: Fields, *, by_key_head: bool) -> "GatedDeltaNetConfig":
        """The sizes in Qwen's fields.

        Raises:
            ValueError: a field is missing or malformed, or key heads can't share value heads.
        """
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

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.values


class GatedDeltaNet(nnx.Module):
    """Projections, a short causal convolution, the gated delta rule, a gated norm, a projection.

    Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464. Decay, write strength, recurrence
    and output norm are float32 whatever the dtype of the weights.
    """

    pool = "recurrent"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype`: of the weights, but the decay's and the norm's."""
        self.sizes = sizes = config.part(GatedDeltaNetConfig)
        outputs = {
            "in_proj_qkv": sizes.conv_dim,
            "in_proj_z": sizes.values,
            "in_proj_b": sizes.value_heads,
            "in_proj_a": sizes.value_heads,
        }
        # Padded to whole tiles of a kernel: otherwise the last tile of the 0.8B's 8,224 columns
        # has 32, which are copied in rows of 64 bytes.
        self.in_proj = Linear(config.hidden_size, outputs, dtype, multiple=BLOCK_N)
        # Published transposed; the GPU kernel reads one tap of many channels at once.
        self.conv = declare((sizes.conv_kernel, sizes.conv_dim), dtype)
        # Published as A_log and dt_bias; a kernel gets the one matrix without a copy.
        self.decay = declare((sizes.value_heads, 2), jnp.float32, _init_decay)
        # This norm is never zero-centred.
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps, jnp.float32)
        self.out_proj = Linear(sizes.values, {"out_proj": config.hidden_size}, dtype)

    @property
    def projection(self) -> Linear:
        """Channels of the convolution, output gate z, b and a."""
        return self.in_proj

    def cache_specs(self, options: CacheOptions) -> tuple[Recurrent]:
        """A layer's state, inputs of its convolution, and what a token adds to the state."""
        sizes, dtype = self.sizes, options.state_dtype
        factors = (
            PerSlot((sizes.key_heads, sizes.key_dim), dtype),  # k
            PerSlot((sizes.value_heads, sizes.value_dim), dtype),  # u
            PerSlot((sizes.value_heads,), jnp.dtype("float32")),  # g
        )
        spec = Recurrent(
            name=self.pool,
            layers=1,
            conv=Conv(sizes.conv_kernel, sizes.conv_dim, options.dtype),
            state=PerSlot((sizes.value_heads, sizes.value_dim, sizes.key_dim), dtype),
            ring=Ring(GdnRing, factors),
            policy=options.states,
        )
        return (spec,)

    def prepare(
        self, projected: _Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[_Projected, Pools]:
        """The projection as it is: each region's operation begins with the convolution."""
        return projected, pools

    def decode(
        self, projected: _Projected, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """The rectangle's heads, computed as the state policy says: by `step` or by `replay`."""
        pool = pools[self.pool]
        heads, pool = pool.policy.decode(self, projected, pool, inputs.decode, layer)
        return heads, pools | {self.pool: pool}

    def step(
        self, projected: _Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Heads, RecurrentPool]:
        """The rectangle's heads under the snapshot policy: the state after each token is kept."""
        projected = rectangle(projected, rows)
        tokens, conv = gdn_inputs(projected, self._params, pool.conv, layer, rows)
        heads, states = gdn_step(tokens, pool.states, layer, rows)
        return flat(heads), dataclasses.replace(pool, conv=conv, states=states)

    def replay(
        self, projected: _Projected, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Heads, RecurrentPool]:
        """The rectangle's heads under the replay policy: a ring keeps what each token adds."""
        heads, conv, states, ring = gdn_conv_replay(
            rectangle(projected, rows),
            self._params,
            pool.conv,
            pool.states,
            pool.ring,
            layer,
            rows,
            self._gated_norm(projected),
        )
        return flat(heads), dataclasses.replace(pool, conv=conv, states=states, ring=ring)

    def prefill(
        self, projected: _Projected, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Finished, Pools]:
        """The chunks' normed heads; convolution and state of each sequence stand at its end."""
        chunks, pool = inputs.prefill, pools[self.pool]
        assert chunks is not None
        mixed, _, b, a = self.in_proj.split(projected)
        g, beta = gates(b, a, self.decay[...])
        y, conv = conv_prefill(mixed, self.conv[...], pool.conv, layer, chunks)
        q, k, v = split_qkv(y, self._heads)
        v = v.astype(mixed.dtype)  # its dtype before the convolution: 16-bit products are quick
        tokens = GdnTokens(q, k, v, g, beta)
        heads, states = gdn_prefill(tokens, pool.states, layer, chunks)
        pool = dataclasses.replace(pool, conv=conv, states=states)
        return self.finish(heads, projected), pools | {self.pool: pool}

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        """See `Mixer.states`."""
        pool = pools[self.pool]
        return {self.pool: pool.policy.states(self, pool, rows, layer)}

    def replayed(self, pool: RecurrentPool, rows: DecodeRegion, layer: int) -> Array:
        """See `Recurrence.replayed`."""
        return replayed_states(pool.states, pool.ring, layer, rows)

    def finish(self, heads: Heads, projected: _Projected) -> _Finished:
        """The heads normed and gated, unless `replay`'s kernel has done it."""
        return self._gated_norm(projected)(heads)

    def output(self, heads: Heads, projected: _Projected) -> Pending:
        """The output projection, with the gated norm of heads that are not finished."""
        return self.out_proj.after_gated_norm(heads, self._gated_norm(projected))

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors, under `linear_attn.`."""
        prefix += "linear_attn."
        taps, channels = self.conv.shape
        by_key_head = self.sizes.by_key_head
        yield from (self._by_key_head if by_key_head else self.in_proj.checkpoint)(prefix)
        yield Placement(prefix + "conv1d.weight", (channels, 1, taps), self.conv, transpose=True)
        for column, name in enumerate(("A_log", "dt_bias")):
            yield Placement(prefix + name, self.decay.shape[:1], self.decay, index=(..., column))
        yield from self.norm.checkpoint(prefix + "norm")
        yield from self.out_proj.checkpoint(prefix)

    def _by_key_head(self, prefix: str) -> Iterator[Placement]:
        """The projections as Qwen3-Next has them: q, k, v and z of a key head, b and a of one."""
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

    def _gated_norm(self, projected: _Projected) -> GatedNorm:
        """The norm of these tokens' heads; its gates z lie behind the convolution's channels."""
        norm = self.norm.operand
        return GatedNorm(projected, norm.weight, first=self.sizes.conv_dim, eps=norm.eps)


def _init_decay(key, shape, dtype):
    return jnp.stack(draw_rates(key, shape[0], dtype), axis=1)
