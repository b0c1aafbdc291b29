"""MTPHead: the multi-token-prediction draft head of Qwen, Nemotron-3 and DeepSeek."""

from collections.abc import Collection, Iterable, Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.decoder import DecoderLayer, residual_norm
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, Stream
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.model_inputs import ModelInputs, Selection
from jaxspec.pallas.norm.residual import Pending

PREFIX = "mtp."  # prefix of the head's tensors


def has_draft_head(config: ModelConfig, tensors: Collection[str] | None) -> bool:
    """Return whether a checkpoint's tensors have a head; without tensors config.json decides."""
    if tensors is None:
        return config.num_draft_layers > 0
    return any(name.startswith(PREFIX) for name in tensors)


class MTPHead(nnx.Module):
    """One attention layer over a token's embedding and the hidden state of the previous token.

    The hidden state is the trunk's output after the final norm; in recursion, the head's output
    after `norm` (DeepSeek-V3 report, arXiv 2412.19437, section 2.2).
    """

    def __init__(self, config: ModelConfig, trunk: Iterable[DecoderLayer], dtype: jnp.dtype):
        """Declare the head; `trunk` are the layers before it."""
        self.config = config
        size = config.hidden_size
        self.embedding_norm = residual_norm(config, dtype)
        self.hidden_norm = residual_norm(config, dtype)
        self.fc = Linear(2 * size, {"fc": size}, dtype, in_16_bits=1)
        # In the pool, its keys and values follow those of the trunk.
        kinds = config.draft_mixer_type, config.draft_feed_forward_type
        self.layer = DecoderLayer(config, *kinds, trunk, dtype)
        self.norm = residual_norm(config, dtype)

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        return (self.layer,)

    def __call__(
        self, embedded: Stream, hidden: Stream, inputs: ModelInputs, pools: Pools
    ) -> tuple[Stream, Pools]:
        layer_inputs = LayerInputs.of(inputs, self.config.rope)
        stream, pending, pools = self.layer(
            self._combine(embedded, hidden), None, layer_inputs, pools
        )
        return self._normed(stream, pending), pools

    def select(
        self,
        embedded: Stream,
        hidden: Stream,
        inputs: ModelInputs,
        pools: Pools,
        selection: Selection,
    ) -> tuple[Float[Array, "selected hidden"], Pools]:
        """See `DraftHead`. Keys and values are written for all tokens."""
        layer_inputs = LayerInputs.of(inputs, self.config.rope)
        stream, pending, pools = self.layer.select(
            self._combine(embedded, hidden), None, layer_inputs, pools, selection
        )
        return self._normed(stream, pending), pools

    def _combine(self, embedded: Stream, hidden: Stream) -> Stream:
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        (stream,) = self.fc(jnp.concatenate(both, axis=-1))
        return stream

    def _normed(self, stream: Stream, pending: Pending) -> Stream:
        _, hidden = self.norm.add(stream, pending)
        return hidden

    def checkpoint(self) -> Iterator[Placement]:
        yield from self.embedding_norm.checkpoint(PREFIX + "pre_fc_norm_embedding")
        yield from self.hidden_norm.checkpoint(PREFIX + "pre_fc_norm_hidden")
        yield from self.fc.checkpoint(PREFIX)
        yield from self.layer.checkpoint(PREFIX + "layers.0.")
        yield from self.norm.checkpoint(PREFIX + "norm")
