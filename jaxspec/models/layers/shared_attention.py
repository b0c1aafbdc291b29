"""Attention of layers without keys and values of their own, to those of an earlier layer.

The last layers of Gemma 4 E2B and E4B project queries only. They attend to the keys and values of
the last layer of their kind that has its own.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.attention import Attention, AttentionTokens, GroupedAttention
from jaxspec.models.layers.mixer import LayerInputs, Projected
from jaxspec.models.layers.window_attention import LENT, WindowAttention, WindowTokens
from jaxspec.pallas.attention.inputs import Rotation, rotate
from jaxspec.pallas.norm.rms_norm import rms_norm


class _QueriesOnly(GroupedAttention):
    """Parameters of grouped-query attention without those of keys and values."""

    _normed = ("q_norm.weight",)

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """Declare the layer.

        Raises:
            ValueError: The config has a gate of the output, or scales of keys and values.
        """
        if config.gated_attention or config.scales_kv:
            raise ValueError(
                "A layer that shares keys and values has no gate, and its keys and values have no "
                f"scales, got gated_attention={config.gated_attention} and "
                f"scales_kv={config.scales_kv}. Leave kv_cache_dtype out."
            )
        super().__init__(config, dtype)

    @staticmethod
    def _outputs(config: ModelConfig) -> dict[str, int]:
        return {"q_proj": config.num_heads * config.head_dim}

    def _queries(
        self, projected: Projected, turns: Rotation | None
    ) -> Float[Array, "tokens heads head_dim"]:
        (queries,) = self.qkv.split(projected)
        queries = queries.reshape(-1, self.config.num_heads, self.config.head_dim)
        if (norm := self._norm) is not None:
            weight = norm.weights[0]
            queries = rms_norm(queries, weight, norm.eps, zero_centred=norm.zero_centred)
        return queries if turns is None else rotate(queries, turns)

    def cache_specs(self, options: CacheOptions) -> tuple[()]:
        return ()


class SharedAttention(_QueriesOnly, Attention):
    """`Attention` to the pages of an earlier layer."""

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[AttentionTokens, Pools]:
        """Compute queries; the pools are unchanged."""
        return AttentionTokens(self._queries(projected, inputs.full_turns), None), pools


class SharedWindowAttention(_QueriesOnly, WindowAttention):
    """`WindowAttention` to the keys and values of an earlier layer."""

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[WindowTokens, Pools]:
        """Compute queries, and take the earlier layer's keys and values of the step."""
        keys, values = pools[LENT]
        if self.share.keeps:
            pools = {name: pool for name, pool in pools.items() if name != LENT}
        return WindowTokens(self._queries(projected, inputs.rotation), keys, values), pools
