"""Attention of layers without keys and values of their own, to those of an earlier layer.

The last layers of Gemma 4 E2B and E4B project queries only. They attend to the keys and values of
the last layer of their kind that has its own.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.attention import Attention, AttentionTokens, GroupedAttention, Heads
from jaxspec.models.layers.mixer import LayerInputs, Projected
from jaxspec.models.layers.window_attention import LENT, WindowAttention, WindowTokens
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.attention.inputs import Rotation, rotate
from jaxspec.pallas.attention.window import window_read
from jaxspec.pallas.norm.rms_norm import rms_norm
from jaxspec.regions import TokenRegion


class QueriesOnly(GroupedAttention):
    """Parameters of grouped-query attention without those of keys and values."""

    _normed = ("q_norm.weight",)

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """Declare the layer.

        Raises:
            ValueError: The config has a gate of the output, or scales of keys and values.
        """
        if config.gated_attention:
            raise ValueError(
                "A layer that shares keys and values has no gate of its output, got "
                "gated_attention=True. Let the family read another mixer."
            )
        if config.scales_kv:
            raise ValueError(
                "Keys and values that layers share are stored without scales, and this folder has "
                "scales. Leave out kv_dtype='float8_e4m3fn': the model's own dtype needs none."
            )
        super().__init__(config, dtype)

    @staticmethod
    def _outputs(config: ModelConfig) -> dict[str, int]:
        return {"q_proj": config.num_heads * config.head_dim}

    def _queries(
        self, projected: Projected, turns: Rotation | None
    ) -> Float[Array, "tokens heads head_dim"]:
        (queries,) = self.qkv.split(projected)
        heads = self.config.num_heads, self.config.head_dim
        queries = queries.reshape(queries.shape[0], *heads)
        if (norm := self._norm) is not None:
            weight = norm.weights[0]
            queries = rms_norm(queries, weight, norm.eps, zero_centred=norm.zero_centred)
        return queries if turns is None else rotate(queries, turns)

    def _last_layer(self, pools: Pools) -> int:
        return pools[self.pool].shape[0] - 1

    def cache_specs(self, options: CacheOptions) -> tuple[()]:
        return ()


class SharedAttention(QueriesOnly, Attention):
    """`Attention` to the pages of the last layer that has its own."""

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[AttentionTokens, Pools]:
        """Compute queries; the pools are unchanged."""
        return AttentionTokens(self._queries(projected, inputs.full_turns), None), pools

    def decode(
        self, tokens: AttentionTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        return super().decode(tokens, inputs, pools, self._last_layer(pools))

    def prefill(
        self, tokens: AttentionTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        return super().prefill(tokens, inputs, pools, self._last_layer(pools))


class _FromRing(QueriesOnly, WindowAttention):
    def _from_ring(
        self, queries: Heads, inputs: ModelInputs, pools: Pools, window: int
    ) -> tuple[Heads, Pools]:
        rows = inputs.decode
        if not (count := rows.slots.shape[0]):
            return queries, pools
        heads = window_read(
            queries.reshape(count, inputs.width, *queries.shape[1:]),
            pools[self.pool],
            self._last_layer(pools),
            rows,
            window=window,
            sinks=self._sinks,
        )
        return heads.reshape(queries.shape), pools


class ReadWindowAttention(_FromRing):
    """Attention of a token that is not in the ring yet, to the rest of its window.

    The rows of a step are at the position before. Drafters run it, which have no prompts.
    """

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[WindowTokens, Pools]:
        """Compute queries; the pools are unchanged."""
        queries = self._queries(projected, inputs.rotation)
        nothing = queries[:, :0]
        return WindowTokens(queries, nothing, nothing), pools

    def decode(
        self, tokens: WindowTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """Attend to the ring; the pools are unchanged."""
        return self._from_ring(tokens.queries, inputs, pools, self.window - 1)

    def prefill(
        self, tokens: WindowTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        raise NotImplementedError("A ring does not hold what the tokens of a prompt attend to.")


class SharedWindowAttention(_FromRing):
    """`WindowAttention` to an earlier layer's keys and values, in the ring and in this step."""

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[WindowTokens, Pools]:
        """Compute queries, and take the earlier layer's keys and values of the step."""
        keys, values = pools[LENT]
        queries = self._queries(projected, inputs.rotation)
        if self.share.keeps:
            pools = {name: pool for name, pool in pools.items() if name != LENT}
            # The write depends on this layer's queries, and so on the reads of all layers before,
            # or XLA on a CPU would copy the pool. Only keys of padding change: nothing writes them.
            live = inputs.step.live[:, None, None]
            keys = jnp.where(live, keys, queries[:, : keys.shape[1]])
        return WindowTokens(queries, keys, values), pools

    def decode(
        self, tokens: WindowTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """Attend from each row's tokens to its ring, which the earlier layer has written.

        For a `TokenRegion` the last reader writes it, because new positions replace ones that these
        tokens attend to.
        """
        if isinstance(inputs.decode, TokenRegion):
            return WindowAttention.decode(self, tokens, inputs, pools, self._last_layer(pools))
        return self._from_ring(tokens.queries, inputs, pools, self.window)

    def prefill(
        self, tokens: WindowTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        return super().prefill(tokens, inputs, pools, self._last_layer(pools))
