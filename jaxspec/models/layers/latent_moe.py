"""Mixture of experts that work on a latent projection of the residual stream."""

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.experts import ExpertStacks
from jaxspec.models.layers.linear import Linear, LinearOfTwo
from jaxspec.models.layers.moe import Correction, MoEConfig
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import CENTRED_COLUMNS, Placement
from jaxspec.pallas.gpu.device import ALIGNED_COLUMNS
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.feed_forward import Router
from jaxspec.pallas.moe.latent import latent_moe_feed_forward
from jaxspec.pallas.norm.residual import Pending, Stream


class LatentMoE(nnx.Module):
    """Experts on `MoEConfig.latent_size` features, and an ungated shared layer on all features.

    Used by Nemotron-3 Super and Ultra. One projection precedes the experts and another follows the
    weighted sum of their outputs. Each shares a matmul with a matrix of the shared layer.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """Declare the layer.

        Raises:
            ValueError: The config has no latent size, another activation, or a gated shared expert.
        """
        sizes, hidden_size = config.part(MoEConfig), config.hidden_size
        latent, shared = sizes.latent_size, sizes.shared_size
        if latent is None or sizes.gated_shared or sizes.activation is not Activation.SQUARED_RELU:
            raise ValueError(
                "A latent mixture needs a latent_size, the activation SQUARED_RELU, and a shared "
                f"layer without a gate, got {sizes}. Read another feed-forward layer (`SPARSE`)."
            )
        self.rule = sizes.rule
        first = {"gate": self.rule.num_experts, "fc1_latent_proj": latent}
        last = {"fc2_latent_proj": latent}
        if shared:
            first["shared_expert.up_proj"] = last["shared_expert.down_proj"] = shared
        self.input = Linear(
            hidden_size,
            first,
            dtype,
            align=ALIGNED_COLUMNS,
            multiple=BLOCK_N,
            in_16_bits=len(first),
        )
        self.output = LinearOfTwo(last, hidden_size, dtype, CENTRED_COLUMNS)
        self.correction = Correction(sizes)
        self.experts = ExpertStacks(
            self.rule.num_experts,
            latent,
            sizes.intermediate_size,
            dtype,
            holders=sizes.holders,
            activation=sizes.activation,
        )

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"]
    ) -> tuple[Stream, Pending]:
        return latent_moe_feed_forward(
            stream,
            pending,
            norm.operand,
            Router(self.input.operand, self.correction.operand, self.rule),
            self.experts.operand,
            self.output.operand,
            live,
        )

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.input.checkpoint(prefix)
        yield from self.output.checkpoint(prefix)
        yield from self.correction.checkpoint(prefix)
        yield from self.experts.checkpoint(prefix)
