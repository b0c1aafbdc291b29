"""Norms of the outputs of a layer's two halves, before these are added to the residual stream."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.pallas.norm import residual
from jaxspec.pallas.norm.residual import Pending, Stream


class OutputNorms(nnx.Module):
    """A norm after the mixer, one after the feed-forward layer, and a factor of the layer's sum."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.of_mixer, self.of_feed_forward = (RMSNorm(size, eps, dtype) for _ in range(2))
        self.scalar = declare((1,), dtype, jax.nn.initializers.ones)

    def after_mixer(self, pending: Pending) -> Float[Array, "tokens features"]:
        return normed(pending, self.of_mixer)

    def after_feed_forward(self, pending: Pending) -> Float[Array, "tokens features"]:
        return normed(pending, self.of_feed_forward)

    def scaled(self, stream: Stream, output: Stream) -> tuple[Stream, Stream]:
        """Return both terms of the layer's sum, times its factor."""
        factor = self.scalar[...].reshape(())
        return stream * factor, output * factor

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.of_mixer.checkpoint(prefix + "post_attention_layernorm")
        yield from self.of_feed_forward.checkpoint(prefix + "post_feedforward_layernorm")
        yield Placement(prefix + "layer_scalar", (1,), self.scalar)


def normed(pending: Pending, norm: RMSNorm) -> Float[Array, "tokens features"]:
    """Return the norm of an output, after the sums over its parts and over devices."""
    output = residual.reduced(pending)
    assert output is not None
    return norm(residual.sum_parts(output, norm.weight.dtype))
