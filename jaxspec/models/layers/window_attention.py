"""Grouped-query attention over a sliding window of positions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Pools, WindowKV
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.attention import GroupedAttention, Heads
from jaxspec.models.layers.mixer import LayerInputs, Projected
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.attention.inputs import queries_keys_values
from jaxspec.pallas.attention.window import window_attention, window_prefill, window_scan
from jaxspec.regions import TokenRegion

_KVHeads = Float[Array, "tokens kv_heads head_dim"]


LENT = "lent_window"
"""Key of a step's keys and values in `Pools`, from the layer that lends them to the last reader.

They are not a pool: the entry exists within one forward pass.
"""


@dataclasses.dataclass(frozen=True)
class WindowShare:
    """How a layer takes part in a `SharedWindow`."""

    lends: bool = False  # later layers attend to its keys and values
    keeps: bool = True  # it writes the prompts' keys and values to the ring


@dataclasses.dataclass(frozen=True)
class SharedWindow:
    """Layers that attend to one layer's window: a part of a `ModelConfig`.

    The last one writes the keys and values of prompts, which replace positions that all of them
    read.
    """

    first: int  # layer that computes keys and values
    last: int  # last layer that attends to them

    def of_layer(self, index: int) -> WindowShare:
        return WindowShare(index == self.first, not self.first <= index < self.last)


@flax.struct.dataclass
class WindowTokens:
    """Queries, keys and values of tokens, after norm and rotation, if any."""

    queries: Heads
    keys: _KVHeads
    values: _KVHeads


class WindowAttention(GroupedAttention):
    """Attention of each token to the `config.window` newest positions, its own included.

    Keys and values are in a ring per slot, so they take the memory of one window (`WindowKV`).
    """

    pool = "window_kv"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """Declare the layer.

        Raises:
            ValueError: The config has no window, or a gate of the output.
        """
        if config.window is None or config.gated_attention:
            raise ValueError(
                f"Sliding attention needs a window and has no gate, got {config.window} and "
                f"gated_attention={config.gated_attention}. Let the family read another mixer."
            )
        super().__init__(config, dtype)
        self.window = config.window
        self.share = config.find_part(WindowShare) or WindowShare()

    def cache_specs(self, options: CacheOptions) -> tuple[WindowKV, ...]:
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        return (WindowKV(self.pool, 1, self.window, heads, head_dim, options.kv_dtype),)

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[WindowTokens, Pools]:
        """Compute queries, keys and values, which `decode` and `prefill` write."""
        config = self.config
        heads = config.num_kv_heads, config.head_dim
        tokens = queries_keys_values(
            self._with_values(projected),
            self._norm,
            inputs.rotation,
            heads,
            config.num_heads,
            gated=False,
        )
        if self.share.lends:
            pools = pools | {LENT: tokens[1:]}
        return WindowTokens(*tokens), pools

    def decode(
        self, tokens: WindowTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """Write the rectangle's keys and values to the rows' rings, and attend."""
        rows = inputs.decode
        count = rows.slots.shape[0]
        if not count:
            return tokens.queries, pools
        if isinstance(rows, TokenRegion):
            return self._read(window_scan, tokens, pools, layer, rows)
        rectangle = jax.tree.map(lambda x: x.reshape(count, inputs.width, *x.shape[1:]), tokens)
        heads, pools = self._attended(window_attention, rectangle, pools, layer, rows)
        return heads.reshape(tokens.queries.shape), pools

    def prefill(
        self, tokens: WindowTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """Attend from each chunk's tokens, and write its newest keys and values to the ring."""
        chunks = inputs.prefill
        assert chunks is not None
        return self._read(window_prefill, tokens, pools, layer, chunks)

    def _read(
        self, op: Callable[..., Any], tokens: WindowTokens, pools: Pools, layer: int, region: Any
    ) -> tuple[Heads, Pools]:
        """Attend with an op that replaces positions of the ring which its tokens attend to."""
        heads, written = self._attended(op, tokens, pools, layer, region)
        return heads, written if self.share.keeps else pools

    def _attended(
        self, op: Callable[..., Any], tokens: WindowTokens, pools: Pools, layer: int, region: Any
    ) -> tuple[Heads, Pools]:
        heads, pool = op(
            tokens.queries,
            tokens.keys,
            tokens.values,
            pools[self.pool],
            layer,
            region,
            window=self.window,
            scales=self._scales,
            sinks=self._sinks,
        )
        return heads, pools | {self.pool: pool}

    def finish(self, heads: Heads, tokens: WindowTokens) -> Heads:
        return heads
