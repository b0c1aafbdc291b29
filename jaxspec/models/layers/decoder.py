"""DecoderLayer: a token mixer, a feed-forward layer, or both; the tables of both types."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import CacheOptions, CacheSpec, Pools
from jaxspec.models.config import (
    DENSE,
    DENSE_AND_SPARSE,
    DOUBLE_DENSE,
    FULL_ATTENTION,
    KIMI_DELTA,
    LATENT_ATTENTION,
    LATENT_SPARSE,
    LINEAR_ATTENTION,
    MAMBA2,
    NO_FEED_FORWARD,
    NO_MIXER,
    PARALLEL,
    READ_SLIDING,
    SHARED_FULL,
    SHARED_SLIDING,
    SHORT_CONV,
    SLIDING_ATTENTION,
    SPARSE,
    SQUARED_RELU,
    ModelConfig,
)
from jaxspec.models.layers.attention import Attention
from jaxspec.models.layers.dense_and_sparse import DenseAndSparse
from jaxspec.models.layers.gated_delta_net import GatedDeltaNet
from jaxspec.models.layers.kimi_delta import KimiDelta
from jaxspec.models.layers.latent_attention import LatentAttention
from jaxspec.models.layers.latent_moe import LatentMoE
from jaxspec.models.layers.mamba2 import Mamba2
from jaxspec.models.layers.mixer import FeedForward, LayerInputs, Mixer, Projected, Stream
from jaxspec.models.layers.mlp import DoubleGatedMLP, GatedMLP, SquaredReluMLP
from jaxspec.models.layers.moe import MoE
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.output_norms import OutputNorms
from jaxspec.models.layers.parallel import Parallel
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.per_layer_input import PerLayer, PerLayerInput, PerLayerSizes
from jaxspec.models.layers.shared_attention import (
    QueriesOnly,
    ReadWindowAttention,
    SharedAttention,
    SharedWindowAttention,
)
from jaxspec.models.layers.short_conv import ShortConv
from jaxspec.models.layers.window_attention import WindowAttention
from jaxspec.models.model_inputs import ModelInputs, Selection
from jaxspec.pallas.norm import residual
from jaxspec.pallas.norm.residual import Pending

# Entry of `ModelConfig.layer_types` -> mixer.
MIXERS: dict[str, Callable[[ModelConfig, jnp.dtype], Mixer[Any]]] = {
    FULL_ATTENTION: Attention,
    SLIDING_ATTENTION: WindowAttention,
    SHARED_FULL: SharedAttention,
    SHARED_SLIDING: SharedWindowAttention,
    READ_SLIDING: ReadWindowAttention,
    LATENT_ATTENTION: LatentAttention,
    KIMI_DELTA: KimiDelta,
    LINEAR_ATTENTION: GatedDeltaNet,
    MAMBA2: Mamba2,
    PARALLEL: Parallel,
    SHORT_CONV: ShortConv,
}

# Entry of `ModelConfig.feed_forward_types` -> feed-forward layer.
FEED_FORWARDS: dict[str, Callable[[ModelConfig, jnp.dtype], FeedForward]] = {
    DENSE: GatedMLP,
    DOUBLE_DENSE: DoubleGatedMLP,
    SQUARED_RELU: SquaredReluMLP,
    SPARSE: MoE,
    DENSE_AND_SPARSE: DenseAndSparse,
    LATENT_SPARSE: LatentMoE,
}


def residual_norm(config: ModelConfig, dtype: jnp.dtype) -> RMSNorm:
    zero_centred = config.zero_centred_norms
    return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, zero_centred=zero_centred)


class DecoderLayer(nnx.Module):
    """A token mixer, a feed-forward layer, or both; each adds its output to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        mixer: str,
        feed_forward: str,
        earlier: Iterable["DecoderLayer"],
        dtype: jnp.dtype,
    ):
        """Make the layer.

        Args:
            config: The model's sizes.
            mixer: A key of `MIXERS`, or NO_MIXER.
            feed_forward: A key of `FEED_FORWARDS`, or NO_FEED_FORWARD.
            earlier: The model's layers before this one.
            dtype: Dtype of the weights.
        """
        earlier = tuple(earlier)
        config = config.of_layer(len(earlier))
        mixes, feeds = mixer != NO_MIXER, feed_forward != NO_FEED_FORWARD
        own = config.of_mixer(mixer)
        self.mixer: Mixer[Any] | None = MIXERS[mixer](own, dtype) if mixes else None
        self.owns_cache = not isinstance(self.mixer, QueriesOnly)
        # Decoding reads the ring that it has just written. A later write by prompts would not
        # depend on that read, so XLA on a CPU would copy the pool.
        self.prompts_first = isinstance(self.mixer, WindowAttention) and self.mixer.share.keeps
        if self.mixer is not None:
            self.input_norm = residual_norm(config, dtype)
            pools = [layer.mixer.pool for layer in earlier if layer.mixer is not None]
            self.cache_layer = pools.count(self.mixer.pool)
        make = FEED_FORWARDS[feed_forward] if feeds else None
        self.feed_forward: FeedForward | None = None if make is None else make(config, dtype)
        if feeds:
            self.feed_forward_norm = residual_norm(config, dtype)
        self.output_norms = OutputNorms(config, dtype) if config.normed_outputs else None
        self.index = len(earlier)
        has_own_input = config.find_part(PerLayerSizes) is not None
        self.per_layer_input = PerLayerInput(config, dtype) if has_own_input else None

    def __call__(
        self, stream: Stream, pending: Pending, inputs: LayerInputs, pools: Pools
    ) -> tuple[Stream, Pending, Pools]:
        """Return the stream, the output still to be added to it, and the updated pools.

        `pending` is None before the first layer. The next norm adds it to the stream, in one
        kernel, which for few rows also includes the matmul after the norm.
        """
        if self.mixer is None:
            return *self._feed(stream, pending, inputs.step, self._own(inputs)), pools
        stream, projected = self.mixer.projection.after_norm(stream, pending, self.input_norm)
        return self.after_projection(stream, projected, inputs, pools)

    def _own(self, inputs: LayerInputs) -> PerLayer | None:
        return None if inputs.per_layer is None else inputs.per_layer[:, self.index]

    def select(
        self,
        stream: Stream,
        pending: Pending,
        inputs: LayerInputs,
        pools: Pools,
        selection: Selection,
    ) -> tuple[Stream, Pending, Pools]:
        """Like `__call__`, but return only the selected tokens.

        The layer must have a mixer that stores nothing about a token after `prepare`. That holds
        for attention, not for recurrent mixers.
        """
        assert self.mixer is not None
        stream, projected = self.mixer.projection.after_norm(stream, pending, self.input_norm)
        return self.after_projection(stream, projected, inputs, pools, selection)

    def after_projection(
        self,
        stream: Stream,
        projected: Projected,
        inputs: LayerInputs,
        pools: Pools,
        selection: Selection | None = None,
    ) -> tuple[Stream, Pending, Pools]:
        """Run the rest of the layer on the output of `mixer.projection`.

        With a `selection` as `select`, otherwise as `__call__`.
        """
        assert self.mixer is not None
        tokens, pools = self.mixer.prepare(projected, inputs, pools, self.cache_layer)
        step, per_token = inputs.step, (stream, tokens, self._own(inputs))
        if selection is not None:
            step = selection.inputs
            per_token = jax.tree.map(lambda x: x[selection.index], per_token)
        stream, tokens, own = per_token
        pending, pools = self._mix(tokens, step, pools)
        return *self._feed(stream, pending, step, own), pools

    def _mix(self, tokens: Any, inputs: ModelInputs, pools: Pools) -> tuple[Pending, Pools]:
        """Run decode and prefill separately, and one output projection for both."""
        mixer, split, layer = self.mixer, inputs.num_decode_tokens, self.cache_layer
        assert mixer is not None
        rectangle = jax.tree.map(lambda x: x[:split], tokens)
        if inputs.prefill is None:
            heads, pools = mixer.decode(rectangle, inputs, pools, layer)
            return self._mixed(heads, tokens), pools
        flat = jax.tree.map(lambda x: x[split:], tokens)
        if self.prompts_first:
            chunks, pools = mixer.prefill(flat, inputs, pools, layer)
            heads, pools = mixer.decode(rectangle, inputs, pools, layer)
        else:
            heads, pools = mixer.decode(rectangle, inputs, pools, layer)
            chunks, pools = mixer.prefill(flat, inputs, pools, layer)
        heads = jnp.concatenate([mixer.finish(heads, rectangle), chunks])
        return self._mixed(heads, tokens), pools

    def _mixed(self, heads: jax.Array, tokens: Any) -> Pending:
        assert self.mixer is not None
        pending = residual.of_devices(self.mixer.output(heads, tokens))
        return pending if self.output_norms is None else self.output_norms.after_mixer(pending)

    def _feed(
        self, stream: Stream, pending: Pending, inputs: ModelInputs, own: PerLayer | None
    ) -> tuple[Stream, Pending]:
        if self.feed_forward is None:
            return stream, pending
        norm = self.feed_forward_norm
        stream, pending = self.feed_forward(stream, pending, norm, inputs.live)
        pending = residual.of_devices(pending)
        if self.output_norms is None:
            return stream, pending
        output = self.output_norms.after_feed_forward(pending)
        if self.per_layer_input is not None:
            assert own is not None
            stream, output = self.per_layer_input(stream, output, own)
        return self.output_norms.scaled(stream, output)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        if self.mixer is not None:
            yield from self.input_norm.checkpoint(prefix + "input_layernorm")
            yield from self.mixer.checkpoint(prefix)
        if self.feed_forward is not None:
            # Gemma's names differ from Qwen's: there the norm after attention is of its output.
            name = "post_attention" if self.output_norms is None else "pre_feedforward"
            yield from self.feed_forward_norm.checkpoint(f"{prefix}{name}_layernorm")
            yield from self.feed_forward.checkpoint(prefix + "mlp.")
        if self.output_norms is not None:
            yield from self.output_norms.checkpoint(prefix)
        if self.per_layer_input is not None:
            yield from self.per_layer_input.checkpoint(prefix)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """Return one layer of each of the mixer's pools."""
        return () if self.mixer is None else self.mixer.cache_specs(options)
