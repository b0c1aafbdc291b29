"""Dense feed-forward layers: gated, or with squared ReLU and without a gate."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import CENTRED_COLUMNS, Placement
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.feed_forward import (
    feed_forward,
    gelu_feed_forward,
    squared_relu_feed_forward,
)
from jaxspec.pallas.norm.residual import Pending, Stream


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, "GLU Variants Improve Transformer").

    With `config.activation` GEGLU it has GELU in place of SiLU.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.activation = config.activation
        self.gate_up = Linear(hidden_size, outputs, dtype, joined_name="gate_up_proj")
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, dtype)

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"]
    ) -> tuple[Stream, Pending]:
        gate_up, down = self.gate_up.operand, self.down.operand
        run = gelu_feed_forward if self.activation is Activation.GEGLU else feed_forward
        return run(stream, pending, norm.operand, gate_up, down)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.gate_up.checkpoint(prefix)
        yield from self.down.checkpoint(prefix)


class DoubleGatedMLP(GatedMLP):
    """A `GatedMLP` of twice the width (Gemma 4 E2B)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        super().__init__(
            dataclasses.replace(config, intermediate_size=2 * config.intermediate_size), dtype
        )


class SquaredReluMLP(nnx.Module):
    """`down(relu(up(x))**2)` (So et al. 2021, "Primer", arXiv 2109.08668)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.up = Linear(hidden_size, {"up_proj": intermediate_size}, dtype)
        self.down = Linear(
            intermediate_size, {"down_proj": hidden_size}, dtype, init=CENTRED_COLUMNS
        )

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"]
    ) -> tuple[Stream, Pending]:
        up, down = self.up.operand, self.down.operand
        return squared_relu_feed_forward(stream, pending, norm.operand, up, down)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.up.checkpoint(prefix)
        yield from self.down.checkpoint(prefix)
