"""A dense feed-forward layer and a mixture of experts on the same stream, each with its norms."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxspec import parallel
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.experts import ExpertStacks
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mlp import GatedMLP
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.output_norms import normed
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.experts import moe_experts
from jaxspec.pallas.moe.feed_forward import Router, check, held
from jaxspec.pallas.moe.route import Choices, moe_route, own_choices
from jaxspec.pallas.moe.scores import moe_scores
from jaxspec.pallas.norm import residual
from jaxspec.pallas.norm.residual import Pending, Stream


class DenseAndSparse(nnx.Module):
    """The sum of a dense layer's normed output and the experts' normed output (Gemma 4).

    The dense layer reads the layer's norm of the stream. The experts and their router read two
    other norms of it. The weight of a chosen expert is multiplied by the expert's learned scale.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        sizes = config.part(MoEConfig)
        size, self.rule = config.hidden_size, sizes.rule
        self.dense = GatedMLP(config, dtype)
        self.dense_norm, self.experts_norm, self.input_norm, self.router_norm = (
            RMSNorm(size, config.rms_norm_eps, dtype) for _ in range(4)
        )
        number = self.rule.num_experts
        self.router = Linear(size, {"gate": number}, dtype, multiple=BLOCK_N, in_16_bits=1)
        self.scales = declare((number,), dtype, jax.nn.initializers.ones)
        self.experts = ExpertStacks(
            number,
            size,
            sizes.intermediate_size,
            dtype,
            holders=sizes.holders,
            activation=sizes.activation,
        )

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"]
    ) -> tuple[Stream, Pending]:
        stream, dense = self.dense(stream, pending, norm, live)
        experts, router = self.experts.operand, Router(self.router.operand, None, self.rule)
        check(stream.shape[1], stream.shape[1], router, experts)
        choices = self._choices(stream, live)
        choices = own_choices(choices, self.rule, held(self.rule, experts))
        sparse = moe_experts(self.input_norm(stream), experts, choices)
        output = normed(residual.of_devices(dense), self.dense_norm)
        output += normed(residual.of_devices(sparse), self.experts_norm)
        if parallel.in_group():  # whole on each device: the sum over devices takes one of them
            output = jnp.where(parallel.first_of(1) == 0, output, 0)
        return stream, output

    def _choices(self, stream: Stream, live: Bool[Array, " tokens"]) -> Choices:
        scores = moe_scores(self.router_norm(stream), self.router.operand)
        choices = moe_route(scores, None, live, self.rule)
        # Padding has an expert out of range, and a weight of 0.
        scales = self.scales[...].astype(jnp.float32).at[choices.experts].get(mode="clip")
        return dataclasses.replace(choices, weights=choices.weights * scales)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.dense.checkpoint(prefix)
        yield from self.dense_norm.checkpoint(prefix + "dense_norm")
        yield from self.experts_norm.checkpoint(prefix + "experts_norm")
        yield from self.input_norm.checkpoint(prefix + "input_norm")
        yield Placement(
            prefix + "router.scale", self.router_norm.weight.shape, self.router_norm.weight
        )
        yield from self.router.checkpoint(prefix)
        yield Placement(prefix + "router.per_expert_scale", self.scales.shape, self.scales)
        yield from self.experts.checkpoint(prefix)
