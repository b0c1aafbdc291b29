"""Grouped-query attention over paged keys and values, with optional rotation, norms and gate."""

from collections.abc import Iterator
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, PagedKV, Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, Projected
from jaxspec.models.layers.parameters import NO_BIAS, Placement, declare
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.attention.inputs import QKNorm, attention_inputs
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged import paged_attention
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.pallas.attention.references import Sinks
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.paging.kv_write import KVScales
from jaxspec.regions import DecodeRegion

KEY_SCALE, VALUE_SCALE = "k_scale", "v_scale"
"""Last parts of the names of a layer's scales of keys and values."""

Heads = Float[Array, "tokens heads head_dim"]


@flax.struct.dataclass
class AttentionTokens:
    """Queries and gates of tokens whose keys and values are already written to their pages."""

    queries: Heads  # after norm and rotation, if any
    gate: OutputGate | None


class GroupedAttention(nnx.Module):
    """Parameters of grouped-query attention, shared by the mixers that store keys differently.

    With `config.normed_heads` queries and keys are normalised before the rotation (Qwen3). With
    `config.gated_attention` the output is multiplied by the sigmoid of a gate (Qwen3.5): per head,
    `q_proj` outputs `head_dim` channels of query, then as many of gate. With
    `config.attention_sinks` each head has one more score in its softmax (gpt-oss). With
    `config.normed_values` values are normalised, too, and with `config.keys_are_values` they are
    the projected keys before norm and rotation, which are then projected once (Gemma 4).
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.config = config
        features, biased = config.attention_inputs or config.hidden_size, config.attention_biases
        self.qkv = Linear(features, self._outputs(config), dtype, biased=biased)
        initializers = jax.nn.initializers
        init = initializers.zeros if config.zero_centred_norms else initializers.ones
        # Norms of queries and keys in one matrix, which a kernel reads without a copy.
        shape = len(self._normed), config.head_dim
        self.norms = declare(shape, dtype, init) if config.normed_heads else None
        width = config.num_heads * config.head_dim
        self.out = Linear(width, {"o_proj": config.hidden_size}, dtype, biased=biased)
        has_sinks = config.attention_sinks
        self.sinks = declare((config.num_heads,), jnp.float32, NO_BIAS) if has_sinks else None
        # Keys and values are stored divided by these.
        self.kv_scales = declare((2,), jnp.float32, initializers.ones) if config.scales_kv else None

    pool: str
    _normed: ClassVar[tuple[str, ...]] = ("q_norm.weight", "k_norm.weight")

    @staticmethod
    def _outputs(config: ModelConfig) -> dict[str, int]:
        """Return the columns of each output of the projection."""
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        outputs = {"q_proj": 2 * width if config.gated_attention else width, "k_proj": kv_width}
        return outputs if config.keys_are_values else outputs | {"v_proj": kv_width}

    @property
    def projection(self) -> Linear:
        """Queries (with gates), keys and values."""
        return self.qkv

    @property
    def _norm(self) -> QKNorm | None:
        if self.norms is None:
            return None
        config = self.config
        return QKNorm(
            self.norms[...], config.rms_norm_eps, config.zero_centred_norms, config.normed_values
        )

    def _with_values(self, projected: Projected) -> Projected:
        """Return the projection with columns of values, which may be those of the keys."""
        if not self.config.keys_are_values:
            return projected
        _, keys = self.qkv.split(projected)
        return jnp.concatenate([projected, keys], axis=1)

    @property
    def _scales(self) -> KVScales | None:
        return None if self.kv_scales is None else self.kv_scales[...]

    @property
    def _sinks(self) -> Sinks | None:
        return None if self.sinks is None else self.sinks[...]

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        return {}

    def output(self, heads: Heads, tokens: Any) -> Pending:
        return self.out.pending(heads.reshape(heads.shape[0], self.out.in_features))

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        prefix += "self_attn."
        yield from self.qkv.checkpoint(prefix)
        if self.norms is not None:
            for row, name in enumerate(self._normed):
                yield Placement(prefix + name, self.norms.shape[1:], self.norms, index=row)
        yield from self.out.checkpoint(prefix)
        if self.sinks is not None:
            yield Placement(prefix + "sinks", self.sinks.shape, self.sinks)
        if self.kv_scales is not None:
            for index, name in enumerate((KEY_SCALE, VALUE_SCALE)):
                place = slice(index, index + 1)
                yield Placement(prefix + name, (1,), self.kv_scales, index=place)


class Attention(GroupedAttention):
    """Grouped-query attention with rotary positions (Llama), or without any (Nemotron).

    Keys and values are in pages.
    """

    pool = "kv"

    def cache_specs(self, options: CacheOptions) -> tuple[PagedKV, ...]:
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        return (PagedKV(self.pool, 1, heads, head_dim, options.kv_dtype),)

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[AttentionTokens, Pools]:
        """Compute queries and gates, and write the keys and values of all tokens to their pages."""
        config = self.config
        queries, kv = attention_inputs(
            self._with_values(projected),
            self._norm,
            inputs.full_turns,
            pools[self.pool],
            layer,
            inputs.step.kv_slots,
            heads=config.num_heads,
            gated=config.gated_attention,
            scales=self._scales,
        )
        gate = OutputGate(projected) if config.gated_attention else None
        return AttentionTokens(queries, gate), pools | {self.pool: kv}

    def decode(
        self, tokens: AttentionTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """Attend from each row's tokens to the row's pages; the pools are unchanged."""
        queries, rows = tokens.queries, inputs.decode
        heads = paged_attention(
            queries.reshape(rows.slots.shape[0], inputs.width, *queries.shape[1:]),
            pools[self.pool],
            layer,
            inputs.page_tables,
            rows,
            tokens.gate,
            self._scales,
            self._sinks,
        )
        return heads.reshape(queries.shape), pools

    def prefill(
        self, tokens: AttentionTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """Attend from each chunk's tokens to the sequence's pages; the pools are unchanged."""
        chunks = inputs.prefill
        assert chunks is not None
        heads = prefill_attention(
            tokens.queries,
            pools[self.pool],
            layer,
            inputs.page_tables,
            chunks,
            self._scales,
            self._sinks,
        )
        return heads if tokens.gate is None else tokens.gate(heads), pools

    def finish(self, heads: Heads, tokens: AttentionTokens) -> Heads:
        """Return the heads, which `decode` has gated."""
        return heads
