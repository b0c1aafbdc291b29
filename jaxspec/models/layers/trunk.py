"""Trunk: embedding, decoder layers, final norm and output head of every family."""

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxspec.cache import Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.decoder import DecoderLayer, residual_norm
from jaxspec.models.layers.linear import Embedding, LMHead
from jaxspec.models.layers.mixer import LayerInputs, Stream
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.per_layer_input import PerLayerEmbedding, PerLayerSizes
from jaxspec.models.model_inputs import ForwardOutput, ModelInputs
from jaxspec.pallas.norm import residual

LAYERS = "model.layers."  # prefix of tensor names, before the layer's index


class Trunk(nnx.Module):
    """A model without its draft head. The layers are unrolled, one module each.

    A scan over stacked weights would be 2 to 3 times as slow.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, tied: bool):
        """Declare the layers; `tied`: the output head's weight is also the embedding."""
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embedding = None if tied else Embedding(*size, dtype)
        layers: list[DecoderLayer] = []
        for kinds in zip(config.layer_types, config.feed_forward_types, strict=True):
            layers.append(DecoderLayer(config, *kinds, layers, dtype))
        self.layers = nnx.List(layers)
        has_own_inputs = config.find_part(PerLayerSizes) is not None
        self.per_layer = PerLayerEmbedding(config, dtype) if has_own_inputs else None
        self.norm = residual_norm(config, dtype)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, dtype, config.devices)

    def embed(self, tokens: Int[Array, " tokens"]) -> Stream:
        table, factor = self.embedding, self.config.embedding_factor
        embedded = self.lm_head.embed(tokens) if table is None else table(tokens)
        return embedded if factor == 1.0 else embedded * jnp.asarray(factor, embedded.dtype)

    def layer_inputs(self, inputs: ModelInputs, embedded: Stream) -> LayerInputs:
        """Return the inputs of all layers, given those of the first one."""
        own = None if self.per_layer is None else self.per_layer(inputs.tokens, embedded)
        return LayerInputs.of(inputs, self.config.rope, self.config.full_rope, own)

    @property
    def lookups(self) -> tuple[Embedding, ...]:
        """Tables of which a token reads one row. A tied embedding is an output head, too."""
        tables = self.embedding, self.per_layer and self.per_layer.table
        return tuple(table for table in tables if table is not None)

    def forward(
        self, inputs: ModelInputs, pools: Pools, taps: tuple[int, ...] = ()
    ) -> tuple[ForwardOutput, Pools]:
        count = len(self.layers)
        if wrong := [tap for tap in taps if not 0 <= tap <= count]:
            raise ValueError(
                f"A tap must be the index of a layer, 0 to {count - 1} in this model, or {count} "
                f"behind the last one, got {wrong}. Tap the residual stream at one of those."
            )
        stream, pending, tapped = self.embed(inputs.tokens), None, {}
        layer_inputs = self.layer_inputs(inputs, stream)
        for index, layer in enumerate(self.layers):
            if index in taps:
                pending = residual.reduced(pending)  # once: the tap and the layer both read it
                tapped[index] = residual.add(stream, pending)
            stream, pending, pools = layer(stream, pending, layer_inputs, pools)
        tapped[count], hidden = self.norm.add(stream, pending)
        aux_hidden = jnp.concatenate([tapped[tap] for tap in taps], axis=1) if taps else None
        return ForwardOutput(hidden, aux_hidden), pools

    def checkpoint(self) -> Iterator[Placement]:
        embeddings = "model.embed_tokens.weight"
        if self.embedding is None:
            yield from self.lm_head.checkpoint(embeddings)
        else:
            yield from self.embedding.checkpoint(embeddings)
            yield from self.lm_head.checkpoint("lm_head.weight")
        if self.per_layer is not None:
            yield from self.per_layer.checkpoint()
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint(f"{LAYERS}{index}.")
        yield from self.norm.checkpoint("model.norm")
