"""Per-layer embeddings: each layer adds a projection of an embedding of its own (Gemma 4 E2B)."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Embedding, Linear
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement
from jaxspec.pallas.norm import residual
from jaxspec.pallas.norm.residual import Stream

PerLayer = Float[Array, "tokens features"]


@dataclasses.dataclass(frozen=True)
class PerLayerSizes:
    """Sizes of per-layer embeddings: a part of a `ModelConfig`."""

    features: int  # per layer
    vocab_size: int


class PerLayerEmbedding(nnx.Module):
    """The inputs of all layers: half from the token's id, half from the first layer's input."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        sizes, count = config.part(PerLayerSizes), len(config.layer_types)
        self.shape = count, sizes.features
        columns = count * sizes.features
        self.table = Embedding(sizes.vocab_size, columns, dtype)
        self.projection = Linear(config.hidden_size, {"per_layer_model_projection": columns}, dtype)
        # The published model divides the projection by the root of the hidden size. The norm undoes
        # that but for its epsilon.
        self.norm = RMSNorm(sizes.features, config.rms_norm_eps * config.hidden_size, dtype)

    def __call__(
        self, tokens: Int[Array, " tokens"], embedded: Stream
    ) -> Float[Array, "tokens layers features"]:
        """Return each layer's input."""
        shape = len(tokens), *self.shape
        (projected,) = self.projection(embedded)
        of_stream = self.norm(projected.reshape(shape)).astype(jnp.float32)
        of_ids = self.table(tokens).reshape(shape).astype(jnp.float32) * self.shape[1] ** 0.5
        return ((of_stream + of_ids) * 0.5**0.5).astype(embedded.dtype)

    def checkpoint(self) -> Iterator[Placement]:
        yield from self.table.checkpoint("model.embed_tokens_per_layer.weight")
        yield from self.projection.checkpoint("model.")
        yield from self.norm.checkpoint("model.per_layer_projection_norm")


class PerLayerInput(nnx.Module):
    """The part of a layer that adds its own input to the stream, through a gate of the stream."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        features, hidden = config.part(PerLayerSizes).features, config.hidden_size
        self.gate = Linear(hidden, {"per_layer_input_gate": features}, dtype)
        self.projection = Linear(features, {"per_layer_projection": hidden}, dtype)
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype)

    def __call__(self, stream: Stream, output: Stream, own: PerLayer) -> tuple[Stream, Stream]:
        """Return the stream with a layer's output added, and the output of this part."""
        stream = residual.add(stream, output)
        (gate,) = self.gate(stream)
        (projected,) = self.projection(jax.nn.gelu(gate, approximate=True) * own)
        return stream, self.norm(projected)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.gate.checkpoint(prefix)
        yield from self.projection.checkpoint(prefix)
        yield from self.norm.checkpoint(prefix + "post_per_layer_input_norm")
