"""Mixture of experts: the feed-forward layer, its config, and the correction of its scores."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxspec.models.config import ModelConfig, share
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import SIZE, Kind, number, whole
from jaxspec.models.layers.experts import ExpertStacks
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.models.quantised.scheme import PER_ROW, PER_TENSOR, Scheme
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.feed_forward import Router, moe_feed_forward
from jaxspec.pallas.moe.route import Routing
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.weight import PUBLISHED_BLOCK

# Bounds for all families, far above published values.
MAX_EXPERTS = 4096
EXPERTS = whole(1, MAX_EXPERTS)
SCALE = number(1e-3, 1e3)  # factor of the chosen experts' output
_WIDTHS = 64  # the kernels take experts whose width is a multiple
_MAX_SHARED = 64  # limit of shared width / expert width, which is 1 or 2 in published models
_OPTIONS = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1, 1.0),
    "moe_latent_size": (),
    "swiglu_limit": (),
}


def shared_width(width: int) -> Kind[int]:
    """Kind of the shared expert's width, beside experts of `width`."""
    return whole(1, _MAX_SHARED * width)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing of a layer's experts: a part of a `ModelConfig`."""

    routing: Routing  # without the shared expert
    intermediate_size: int  # width of an expert
    shared_size: int = 0  # width of the shared expert; 0 if there is none
    gated_shared: bool = False  # the shared expert has a gate, a column of the router
    has_correction: bool = False  # scores are corrected for the choice (`Correction`)
    activation: Activation = Activation.SWIGLU
    has_biases: bool = False  # the router and both matmuls of an expert have a bias
    inputs_first: bool = False  # stacks are published as `[experts, inputs, outputs]`
    # Limits of the activation, of routed experts and of the shared one, of each layer of the model;
    # 0 means none, and so do layers beyond the last.
    limits: tuple[tuple[float, float], ...] = ()
    latent_size: int | None = None  # input features of experts; None means the hidden size
    # How a group of devices shares routed experts: whole ones, or the width of each. None means by
    # width, unless the share of it would be no multiple of `width_unit`.
    whole_experts: bool | None = None
    width_unit: int = _WIDTHS
    holders: int = 1  # devices that whole experts are shared among; these sizes are those of one

    @classmethod
    def read(cls, fields: Fields, *, renormalise: bool, shared: bool) -> "MoEConfig":
        """Read the sizes from Qwen's fields. `shared`: the family has a gated shared expert."""
        fields.refuse_all_but(_OPTIONS)
        # transformers 5 uses the second name for some families.
        num_experts = fields.need_either(("num_experts", "num_local_experts"), EXPERTS)
        num_chosen = fields.need("num_experts_per_tok", whole(1, num_experts))
        width = fields.need("moe_intermediate_size", SIZE)
        wide = shared_width(width)
        return cls(
            Routing(num_experts, num_chosen, renormalise=renormalise),
            intermediate_size=width,
            shared_size=fields.need("shared_expert_intermediate_size", wide) if shared else 0,
            gated_shared=shared,
            width_unit=shared_unit(fields.scheme()),
        )

    def of_layer(self, index: int) -> "MoEConfig":
        """Return the config of the model's layer `index`: with one pair of limits, or none."""
        return dataclasses.replace(self, limits=self.limits[index : index + 1])

    def local(self, devices: int) -> "MoEConfig":
        """Return the sizes that each of `devices` devices holds.

        A device holds a share of the shared expert's width, and a share of the routed experts or
        of the width of each.

        Raises:
            ValueError: A size cannot be shared.
        """
        width, number = self.intermediate_size, self.routing.num_experts
        whole = self.whole_experts
        if whole is None:
            whole = width % (self.width_unit * devices) > 0 and number % devices == 0
        if whole:
            share(number, devices, "num_experts")
        else:
            width = share(width, devices, "moe_intermediate_size")
        return dataclasses.replace(
            self,
            intermediate_size=width,
            shared_size=share(self.shared_size, devices, "the width of the shared expert"),
            holders=devices if whole else 1,
        )

    @property
    def rule(self) -> Routing:
        """The routing with the shared expert, cut into slices of the other experts' width.

        A shared expert beside latent experts is not sliced (`LatentMoE`).
        """
        if self.latent_size is not None:
            return self.routing
        num_shared = -(-self.shared_size // self.intermediate_size)
        gated = self.gated_shared and num_shared > 0
        return dataclasses.replace(self.routing, num_shared=num_shared, gated_shared=gated)


def shared_unit(scheme: Scheme | None) -> int:
    """Return the width of which a share has no cut block in FP8, which no kernel would multiply."""
    has_blocks = scheme is not None and scheme.grains - {PER_ROW, PER_TENSOR}
    return PUBLISHED_BLOCK if has_blocks else _WIDTHS


def sharing_experts(config: ModelConfig, whole: bool | None) -> ModelConfig:
    """Return the config of a model whose routed experts a group of devices shares in this way.

    See `MoEConfig.whole_experts`.

    Raises:
        ValueError: Whole experts are wanted of a model without any.
    """
    sizes = config.find_part(MoEConfig)
    if sizes is None and whole:
        raise ValueError(
            f"enable_expert_parallel is for mixtures of experts, and {config.architecture} has "
            "none. Leave it out: tensor_parallel_size alone shares the model."
        )
    if sizes is None:
        return config
    chosen = dataclasses.replace(sizes, whole_experts=whole)
    parts = tuple(chosen if part is sizes else part for part in config.parts)
    return dataclasses.replace(config, parts=parts)


class MoE(nnx.Module):
    """Routed experts, and a shared expert that processes every token.

    Shazeer et al. 2017, arXiv 1701.06538. All weights are in two stacks (`ExpertStacks`).
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        sizes = config.part(MoEConfig)
        self.rule = rule = sizes.rule
        scores = {"gate": rule.num_experts}
        if rule.gated_shared:
            scores["shared_expert_gate"] = 1
        self.router = Linear(
            config.hidden_size,
            scores,
            dtype,
            multiple=BLOCK_N,
            in_16_bits=len(scores),
            biased=("gate",) if sizes.has_biases else (),
        )
        self.correction = Correction(sizes)
        self.experts = ExpertStacks(
            rule.num_experts,
            config.hidden_size,
            sizes.intermediate_size,
            dtype,
            holders=sizes.holders,
            shared_width=sizes.shared_size,
            activation=sizes.activation,
            has_biases=sizes.has_biases,
            inputs_first=sizes.inputs_first,
            limits=next(iter(sizes.limits), (0.0, 0.0)),
        )

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"]
    ) -> tuple[Stream, Pending]:
        return moe_feed_forward(
            stream,
            pending,
            norm.operand,
            Router(
                self.router.operand, self.correction.operand, self.rule, self.router.bias_operand
            ),
            self.experts.operand,
            live,
        )

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.router.checkpoint(prefix)
        yield from self.correction.checkpoint(prefix)
        yield from self.experts.checkpoint(prefix)


class Correction(nnx.Module):
    """Optional bias of the experts' scores, used only to choose among them.

    DeepSeek-V3 report (arXiv 2412.19437), section 2.1.2. It is always float32, because it decides
    between scores that are close together.
    """

    def __init__(self, sizes: MoEConfig):
        """Declare the values, if `sizes` have a correction."""
        shape, zeros = (sizes.routing.num_experts,), jax.nn.initializers.zeros
        self.values = declare(shape, jnp.dtype("float32"), zeros) if sizes.has_correction else None

    @property
    def operand(self) -> Float[Array, " experts"] | None:
        return None if self.values is None else self.values[...]

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        if self.values is not None:
            name = f"{prefix}gate.e_score_correction_bias"
            yield Placement(name, self.values.shape, self.values)
