"""Attention over the paged cache: Qwen3's, and Qwen3.5's with an output gate."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.base import ModelInputs
from jaxspec.models.cache import HybridCache
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Linear, Placement, split_heads
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.rope import Rotation, rotate
from jaxspec.pallas.paged_attention import kv_write, paged_attention
from jaxspec.pallas.prefill_attention import prefill_attention

_Hidden = Float[Array, "tokens hidden"]


def attend(
    queries: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    inputs: ModelInputs,
    cache: HybridCache,
    layer: int,
) -> tuple[Float[Array, "tokens heads head_dim"], HybridCache]:
    """Store this step's keys and values, then attend: each region with its own operation."""
    kv = kv_write(cache.kv, layer, keys, values, inputs.kv_slots)
    decode, prefill, split = inputs.decode, inputs.prefill, inputs.num_decode_tokens
    rectangle = queries[:split].reshape(decode.slots.shape[0], inputs.width, *queries.shape[1:])
    out = paged_attention(
        rectangle,
        kv,
        layer,
        inputs.page_tables,
        decode.slots,
        decode.num_computed,
        decode.query_len,
    ).reshape(split, *queries.shape[1:])
    if prefill is not None:
        chunks = prefill_attention(
            queries[split:],
            kv,
            layer,
            inputs.page_tables,
            prefill.slots,
            prefill.num_computed,
            prefill.query_start,
        )
        out = jnp.concatenate([out, chunks])
    return out, dataclasses.replace(cache, kv=kv)


class Attention(nnx.Module):
    """Grouped-query attention with normalised queries and keys and rotary positions (Qwen3)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype`: of the weights."""
        self.config = config
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        outputs = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv = Linear(config.hidden_size, outputs, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.out = Linear(width, {"o_proj": config.hidden_size}, dtype)

    def __call__(
        self, x: _Hidden, inputs: ModelInputs, angles: Rotation, cache: HybridCache, layer: int
    ) -> tuple[_Hidden, HybridCache]:
        """`layer` is the index among the cache's attention layers."""
        q, k, v = self.qkv(x)
        q = rotate(self.q_norm(split_heads(q, self.config.num_heads)), angles)
        k = rotate(self.k_norm(split_heads(k, self.config.num_kv_heads)), angles)
        v = split_heads(v, self.config.num_kv_heads)
        attended, cache = attend(q, k, v, inputs, cache, layer)
        (y,) = self.out(attended.reshape(x.shape[0], -1))
        return y, cache

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors, under `self_attn.`."""
        prefix += "self_attn."
        yield from self.qkv.checkpoint(prefix)
        yield from self.q_norm.checkpoint(prefix + "q_norm")
        yield from self.k_norm.checkpoint(prefix + "k_norm")
        yield from self.out.checkpoint(prefix)


class GatedAttention(nnx.Module):
    """Attention whose output is multiplied by the sigmoid of a gate (Qwen3.5).

    `q_proj` gives, head by head, `head_dim` channels of query and then as many of gate. The norms
    of queries and keys are zero-centred, and only the first `rotary_dim` channels are rotated.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype`: of the weights."""
        self.config = config
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        outputs = {"q_proj": 2 * width, "k_proj": kv_width, "v_proj": kv_width}
        norm = (config.head_dim, config.rms_norm_eps, dtype)
        self.qkv = Linear(config.hidden_size, outputs, dtype)
        self.q_norm = RMSNorm(*norm, zero_centred=True)
        self.k_norm = RMSNorm(*norm, zero_centred=True)
        self.out = Linear(width, {"o_proj": config.hidden_size}, dtype)

    def __call__(
        self, x: _Hidden, inputs: ModelInputs, angles: Rotation, cache: HybridCache, layer: int
    ) -> tuple[_Hidden, HybridCache]:
        """`layer` is the index among the cache's attention layers."""
        q, k, v = self.qkv(x)
        q, gate = jnp.split(split_heads(q, self.config.num_heads), 2, axis=-1)
        q = rotate(self.q_norm(q), angles)
        k = rotate(self.k_norm(split_heads(k, self.config.num_kv_heads)), angles)
        v = split_heads(v, self.config.num_kv_heads)
        attended, cache = attend(q, k, v, inputs, cache, layer)
        (y,) = self.out((attended * jax.nn.sigmoid(gate)).reshape(x.shape[0], -1))
        return y, cache

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors, under `self_attn.`."""
        prefix += "self_attn."
        yield from self.qkv.checkpoint(prefix)
        yield from self.q_norm.checkpoint(prefix + "q_norm")
        yield from self.k_norm.checkpoint(prefix + "k_norm")
        yield from self.out.checkpoint(prefix)
