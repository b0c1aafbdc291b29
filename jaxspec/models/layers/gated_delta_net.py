"""Gated DeltaNet: the recurrent token mixer of Qwen3.5."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.base import ModelInputs
from jaxspec.models.cache import HybridCache
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Linear, Placement, declare, l2_normalise, split_heads
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.rope import Rotation
from jaxspec.pallas.conv_update import conv_prefill, conv_update
from jaxspec.pallas.gdn_prefill import gdn_prefill
from jaxspec.pallas.gdn_replay import gdn_replay
from jaxspec.pallas.gdn_step import gdn_step

_Hidden = Float[Array, "tokens hidden"]


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
        self.in_proj = Linear(config.hidden_size, outputs, dtype)
        # Published transposed; the GPU kernel reads one tap of many channels at once.
        self.conv = declare((config.conv_kernel, config.conv_dim), dtype)
        # Published as A_log and dt_bias.
        self.log_decay = declare((heads,), jnp.float32, _init_log_decay)
        self.decay_bias = declare((heads,), jnp.float32, _init_decay_bias)
        # Of all norms of the model, this one is not zero-centred.
        self.norm = RMSNorm(config.linear_value_dim, config.rms_norm_eps, jnp.float32)
        self.out_proj = Linear(values, {"out_proj": config.hidden_size}, dtype)

    def __call__(
        self, x: _Hidden, inputs: ModelInputs, angles: Rotation, cache: HybridCache, layer: int
    ) -> tuple[_Hidden, HybridCache]:
        """`layer` is the index among the cache's recurrent layers; positions are not used."""
        del angles
        mixed, z, b, a = self.in_proj(x)
        mixed, cache = self._convolve(mixed, inputs, cache, layer)

        keys = self.config.linear_key_heads * self.config.linear_key_dim
        q, k, v = jnp.split(mixed.astype(jnp.float32), [keys, 2 * keys], axis=-1)
        q = l2_normalise(split_heads(q, self.config.linear_key_heads))
        k = l2_normalise(split_heads(k, self.config.linear_key_heads))
        q = q * self.config.linear_key_dim**-0.5
        v = split_heads(v, self.config.linear_value_heads)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        step = jax.nn.softplus(a.astype(jnp.float32) + self.decay_bias[...][None])
        g = -jnp.exp(self.log_decay[...])[None] * step

        out, cache = _recur((q, k, v, g, beta), x.dtype, inputs, cache, layer)
        gate = jax.nn.silu(split_heads(z, self.config.linear_value_heads).astype(jnp.float32))
        gated = (self.norm(out) * gate).reshape(x.shape[0], -1)
        (y,) = self.out_proj(gated.astype(x.dtype))
        return y, cache

    def _convolve(self, mixed, inputs, cache, layer):
        decode, prefill, split = inputs.decode, inputs.prefill, inputs.num_decode_tokens
        weight = self.conv[...].T
        rows, channels = decode.slots.shape[0], mixed.shape[1]
        rectangle = mixed[:split].reshape(rows, inputs.width, channels)
        y, conv = conv_update(
            rectangle,
            weight,
            cache.conv,
            layer,
            decode.slots,
            decode.state_offset,
            decode.query_len,
        )
        y = y.reshape(split, channels)
        if prefill is not None:
            chunks, conv = conv_prefill(
                mixed[split:],
                weight,
                conv,
                layer,
                prefill.slots,
                prefill.state_offset,
                prefill.num_computed,
                prefill.query_start,
            )
            y = jnp.concatenate([y, chunks])
        return y, dataclasses.replace(cache, conv=conv)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors, under `linear_attn.`."""
        prefix += "linear_attn."
        taps, channels = self.conv.shape
        yield from self.in_proj.checkpoint(prefix)
        yield Placement(prefix + "conv1d.weight", (channels, 1, taps), self.conv, transpose=True)
        yield Placement(prefix + "A_log", self.log_decay.shape, self.log_decay)
        yield Placement(prefix + "dt_bias", self.decay_bias.shape, self.decay_bias)
        yield from self.norm.checkpoint(prefix + "norm")
        yield from self.out_proj.checkpoint(prefix)


def _init_log_decay(key, shape, dtype):
    """Rates from 1 to 16, as in Mamba2."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _init_decay_bias(key, shape, dtype):
    """The inverse softplus of steps from 0.001 to 0.1, as in Mamba2."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))


def _recur(operands, dtype, inputs, cache, layer):
    """The delta rule over both regions; `operands` are q, k, v, g, beta, token by token.

    `dtype`: the model's.
    """
    decode, prefill, split = inputs.decode, inputs.prefill, inputs.num_decode_tokens
    rows = decode.slots.shape[0]
    rectangle = [x[:split].reshape(rows, inputs.width, *x.shape[1:]) for x in operands]
    out, cache = _verify(rectangle, decode, cache, layer)
    out = out.reshape(split, *out.shape[2:])
    if prefill is not None:
        q, k, v, g, beta = (x[split:] for x in operands)
        v = v.astype(dtype)  # which it had: chunks are products, quick in 16 bits
        chunks, states = gdn_prefill(
            q,
            k,
            v,
            g,
            beta,
            cache.states,
            layer,
            prefill.slots,
            prefill.state_offset,
            prefill.num_computed,
            prefill.query_start,
        )
        out = jnp.concatenate([out, chunks])
        cache = dataclasses.replace(cache, states=states)
    return out, cache


def _verify(operands, decode, cache, layer):
    """The rectangle's outputs; its states are kept, or what it takes to replay them."""
    q, k, v, g, beta = operands
    where = decode.slots, decode.state_offset, decode.query_len
    if cache.ring is None:
        out, states = gdn_step(q, k, v, g, beta, cache.states, layer, *where)
        return out, dataclasses.replace(cache, states=states)
    out, states, ring = gdn_replay(
        q,
        k,
        v,
        g,
        beta,
        cache.states,
        cache.ring,
        layer,
        decode.slots,
        decode.num_computed,
        decode.ring_length,
        decode.query_len,
    )
    return out, dataclasses.replace(cache, states=states, ring=ring)
