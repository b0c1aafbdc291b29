"""Gated DeltaNet: the recurrent token mixer of Qwen3.5."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Conv, PerSlot, Pools, Recurrent, RecurrentPool, Ring
from jaxspec.models.base import ModelInputs
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Linear, Placement, declare
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.rope import Rotation
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay
from jaxspec.pallas.gated_delta.gates import gates
from jaxspec.pallas.gated_delta.heads import GdnHeads
from jaxspec.pallas.gated_delta.inputs import gdn_inputs, split_qkv
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.pallas.gated_delta.replay import GdnRing
from jaxspec.pallas.gated_delta.step import gdn_step
from jaxspec.pallas.matmul.products import COLUMNS
from jaxspec.pallas.matmul.split_matmul import gated_norm_matmul
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Delta
from jaxspec.pallas.recurrent.conv_update import conv_prefill
from jaxspec.regions import DecodeRegion

_Projected = Float[Array, "tokens outputs"]
_Rectangle = Float[Array, "rows width outputs"]


class GatedDeltaNet(nnx.Module):
    """Projections, a short causal convolution, the gated delta rule, a gated norm, a projection.

    Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464. Decay, write strength, recurrence
    and output norm are float32 whatever the dtype of the weights.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype`: of the weights, but the decay's and the norm's."""
        self.config = config
        heads = config.linear_value_heads
        values = heads * config.linear_value_dim
        outputs = {
            "in_proj_qkv": config.conv_dim,
            "in_proj_z": values,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        # Of the 0.8B's 8,224 columns a kernel's last tile would have 32, in rows of 64 bytes.
        self.in_proj = Linear(config.hidden_size, outputs, dtype, multiple=COLUMNS)
        # Published transposed; the GPU kernel reads one tap of many channels at once.
        self.conv = declare((config.conv_kernel, config.conv_dim), dtype)
        # Published as A_log and dt_bias; one matrix, which the kernel gets without a copy.
        self.decay = declare((heads, 2), jnp.float32, _init_decay)
        # Of all norms of the model, this one is not zero-centred.
        self.norm = RMSNorm(config.linear_value_dim, config.rms_norm_eps, jnp.float32)
        self.out_proj = Linear(values, {"out_proj": config.hidden_size}, dtype)

    @property
    def projection(self) -> Linear:
        """What the normed residual stream is multiplied with first, all side by side."""
        return self.in_proj

    def __call__(
        self, projected: _Projected, inputs: ModelInputs, angles: Rotation, pools: Pools,
        layer: int,
    ) -> tuple[Delta, Pools]:  # fmt: skip
        """What is to be added to the residual stream, given what `projection` makes of it.

        `layer` is the index among the pool's layers; positions are not used.
        """
        del angles
        split = inputs.num_decode_tokens
        norm, pool = self._norm_of(projected), pools["recurrent"]
        of_decode, of_prefill = norm.split(split)
        rectangle = projected[:split].reshape(-1, inputs.width, projected.shape[1])
        out, pool = pool.policy.decode(self, rectangle, pool, inputs.decode, layer)
        if inputs.prefill is not None:
            chunks, pool = self._prefill(projected[split:], inputs.prefill, pool, layer)
            out = jnp.concatenate([of_decode(out), of_prefill(chunks)])
        delta = gated_norm_matmul(out, norm, self.out_proj.weight[...])
        return delta, pools | {"recurrent": pool}

    def _norm_of(self, projected: _Projected) -> GatedNorm:
        """The output norm; its gates lie behind the channels."""
        weight, eps = self.norm.weight[...], self.norm.eps
        return GatedNorm(projected, weight, first=self.config.conv_dim, eps=eps)

    @property
    def _heads(self) -> GdnHeads:
        config = self.config
        return GdnHeads(config.linear_key_heads, config.linear_key_dim, config.linear_value_heads)

    def step(
        self, projected: _Rectangle, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Heads, RecurrentPool]:
        """The heads of a verify that keeps the state after each token; see `Recurrence.step`."""
        operands = projected, self.conv[...].T, self.decay[...], pool.conv
        where = layer, rows.slots, rows.num_computed, rows.query_len
        q, k, v, g, beta, conv = gdn_inputs(*operands, *where, self._heads)
        where = layer, rows.slots, rows.state_offset, rows.query_len
        out, states = gdn_step(q, k, v, g, beta, pool.states, *where)
        return out.reshape(-1, *out.shape[2:]), dataclasses.replace(pool, conv=conv, states=states)

    def replay(
        self, projected: _Rectangle, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Heads, RecurrentPool]:
        """The heads of a verify that keeps what replays it; see `Recurrence.replay`."""
        norm = self._norm_of(projected.reshape(-1, projected.shape[2]))
        operands = projected, self.conv[...].T, self.decay[...], pool.conv, pool.states, pool.ring
        where = layer, rows.slots, rows.num_computed, rows.ring_length, rows.query_len
        out, conv, states, ring = gdn_conv_replay(*operands, *where, self._heads, norm)
        pool = dataclasses.replace(pool, conv=conv, states=states, ring=ring)
        return out.reshape(-1, *out.shape[2:]), pool

    def _prefill(self, projected, prefill, pool, layer):
        """The chunks' outputs; convolution and state of each sequence stand at its last token."""
        slots, progress = prefill.slots, (prefill.num_computed, prefill.query_start)
        mixed, _, b, a = self.in_proj.split(projected)
        g, beta = gates(b, a, self.decay[...])
        y, conv = conv_prefill(mixed, self.conv[...].T, pool.conv, layer, slots, *progress)
        q, k, v = split_qkv(y, self._heads)
        v = v.astype(mixed.dtype)  # which it had: chunks are products, quick in 16 bits
        where = layer, slots, prefill.state_offset, *progress
        out, states = gdn_prefill(q, k, v, g, beta, pool.states, *where)
        return out, dataclasses.replace(pool, conv=conv, states=states)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors, under `linear_attn.`."""
        prefix += "linear_attn."
        taps, channels = self.conv.shape
        yield from self.in_proj.checkpoint(prefix)
        yield Placement(prefix + "conv1d.weight", (channels, 1, taps), self.conv, transpose=True)
        for column, name in enumerate(("A_log", "dt_bias")):
            yield Placement(prefix + name, self.decay.shape[:1], self.decay, index=(..., column))
        yield from self.norm.checkpoint(prefix + "norm")
        yield from self.out_proj.checkpoint(prefix)


def recurrent_spec(config: ModelConfig, options: CacheOptions) -> Recurrent:
    """The pool of all Gated DeltaNet layers of a model."""
    value_heads, value_dim = config.linear_value_heads, config.linear_value_dim
    key_heads, key_dim = config.linear_key_heads, config.linear_key_dim
    factors = (
        PerSlot((key_heads, key_dim), options.state_dtype),  # k
        PerSlot((value_heads, value_dim), options.state_dtype),  # u
        PerSlot((value_heads,), jnp.dtype("float32")),  # g
    )
    return Recurrent(
        layers=config.num_linear_attention_layers,
        conv=Conv(config.conv_kernel, config.conv_dim, options.dtype),
        state=PerSlot((value_heads, value_dim, key_dim), options.state_dtype),
        ring=Ring(GdnRing, factors),
        policy=options.states,
    )


def _init_decay(key, shape, dtype):
    """As in Mamba2: rates from 1 to 16, and the inverse softplus of steps from 0.001 to 0.1."""
    of_rate, of_step = jax.random.split(key)
    rate = jax.random.uniform(of_rate, shape[:1], dtype, 1.0, 16.0)
    step = jnp.exp(jax.random.uniform(of_step, shape[:1], dtype, math.log(1e-3), math.log(1e-1)))
    return jnp.stack([jnp.log(rate), step + jnp.log(-jnp.expm1(-step))], axis=1)
