"""The feed-forward layer of a mixture whose experts live in fewer features than the stream."""

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
from jaxspec.pallas.gpu.operands import ALIGNED_COLUMNS
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.feed_forward import Router
from jaxspec.pallas.moe.latent import latent_moe_feed_forward
from jaxspec.pallas.norm.residual import Pending, Stream


class LatentMoE(nnx.Module):
    """Experts of `MoEConfig.latent_size` features, and a shared layer of all features, ungated.

    Nemotron-3 Super's and Ultra's. A projection comes before the experts, and one behind the
    weighted sum of what they put out. Each shares a product with a matrix of the shared layer.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype` is that of the weights.

        Raises:
            ValueError: the sizes are those of another layer.
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
        self.input = Linear(hidden_size, first, dtype, align=ALIGNED_COLUMNS, multiple=BLOCK_N)
        self.output = LinearOfTwo(last, hidden_size, dtype, CENTRED_COLUMNS)
        self.correction = Correction(sizes)
        self.experts = ExpertStacks(
            self.rule.num_experts,
            latent,
            sizes.intermediate_size,
            dtype,
            activation=sizes.activation,
        )

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"]
    ) -> tuple[Stream, Pending]:
        """`stream + pending`, and the layer's output for the `norm` of that, pending in turn."""
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
        """The published tensors."""
        yield from self.input.checkpoint(prefix)
        yield from self.output.checkpoint(prefix)
        yield from self.correction.checkpoint(prefix)
        yield from self.experts.checkpoint(prefix)
