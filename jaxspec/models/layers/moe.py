"""The feed-forward layer of a mixture of experts."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import SIZE, whole
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.feed_forward import Router, moe_feed_forward
from jaxspec.pallas.moe.route import Routing
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.weight import DenseExperts

_EXPERTS = whole(1, 4096)
_MAX_SHARED = 64  # times the width of an expert; one or two are published
# Options that change the output, and their values that the layer computes.
_OPTIONS = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1, 1.0),
    "moe_latent_size": (),
    "swiglu_limit": (),
}


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The experts of a layer and how they are chosen: a part of a `ModelConfig`."""

    routing: Routing  # of the experts that compete
    intermediate_size: int  # of an expert
    shared_size: int = 0  # of the expert that every token has; 0: there is none

    @classmethod
    def read(cls, fields: Fields, *, renormalise: bool, shared: bool) -> "MoEConfig":
        """The sizes in Qwen's fields; `shared`: the family has a shared expert, with a gate.

        Raises:
            ValueError: a field is missing, malformed or not implemented.
        """
        fields.refuse_all_but(_OPTIONS)
        # transformers 5 renames the first to the second for some families.
        num_experts = fields.need_either(("num_experts", "num_local_experts"), _EXPERTS)
        num_chosen = fields.need("num_experts_per_tok", whole(1, num_experts))
        width = fields.need("moe_intermediate_size", SIZE)
        wide = whole(1, _MAX_SHARED * width)
        return cls(
            Routing(num_experts, num_chosen, renormalise=renormalise),
            intermediate_size=width,
            shared_size=fields.need("shared_expert_intermediate_size", wide) if shared else 0,
        )

    @property
    def rule(self) -> Routing:
        """The routing with the shared expert in it, cut into experts of the others' size."""
        num_shared = -(-self.shared_size // self.intermediate_size)
        return dataclasses.replace(self.routing, num_shared=num_shared, gated_shared=num_shared > 0)


class MoE(nnx.Module):
    """Feed-forward layers among which a router chooses, and one that every token has, gated.

    Shazeer et al. 2017, arXiv 1701.06538. All are gated feed-forward layers, in two stacks. The
    shared one may be wider than the others. It is the sum of slices of their width, which lie
    behind them in the stacks, and the last of which is padded with zeros.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype` is that of the weights."""
        self.sizes = sizes = config.part(MoEConfig)
        self.rule = rule = sizes.rule
        scores = {"gate": rule.num_experts}
        if rule.gated_shared:
            scores["shared_expert_gate"] = 1
        self.router = Linear(config.hidden_size, scores, dtype, multiple=BLOCK_N)
        features, width = config.hidden_size, sizes.intermediate_size
        self.gate_up = declare((rule.none, 2 * width, features), dtype)
        self.down = declare((rule.none, features, width), dtype)

    def __call__(
        self, stream: Stream, pending: Pending, norm: RMSNorm, live: Bool[Array, " tokens"]
    ) -> tuple[Stream, Pending]:
        """`stream + pending`, and the layer's output for the `norm` of that, pending in turn."""
        return moe_feed_forward(
            stream,
            pending,
            norm.operand,
            Router(self.router.operand, None, self.rule),
            DenseExperts(self.gate_up[...]),
            DenseExperts(self.down[...]),
            live,
        )

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        features, width = self.down.shape[1:]
        gate_and_up = {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width)}
        yield from self.router.checkpoint(prefix)
        yield self._stack(prefix + "experts.", "gate_up_proj", self.gate_up, gate_and_up)
        yield self._stack(
            prefix + "experts.", "down_proj", self.down, {"down_proj": slice(0, features)}
        )
        yield from self._shared(prefix + "shared_expert.")

    def _stack(
        self, prefix: str, name: str, param: nnx.Param, matrices: Mapping[str, slice]
    ) -> Placement:
        """All experts that compete in one tensor; or a tensor for each of their `matrices`.

        `matrices`: the names of these, and the rows of an expert that each is.
        """
        count, (outer, inner) = self.rule.num_experts, param.shape[1:]

        def one_by_one() -> Iterator[Placement]:
            for expert in range(count):
                for matrix, rows in matrices.items():
                    yield Placement(
                        f"{prefix}{expert}.{matrix}.weight",
                        (rows.stop - rows.start, inner),
                        param,
                        index=(expert, rows),
                    )

        shape = count, outer, inner
        return Placement(prefix + name, shape, param, index=slice(count), instead=one_by_one)

    def _shared(self, prefix: str) -> Iterator[Placement]:
        """The slices of the shared expert: rows of its gate and up, columns of its down."""
        features, width = self.down.shape[1:]
        size = self.sizes.shared_size
        for number, start in enumerate(range(0, size, width)):
            expert = self.rule.num_experts + number
            part = slice(start, min(start + width, size))
            held = part.stop - start
            for name, first in ("gate_proj", 0), ("up_proj", width):
                yield Placement(
                    f"{prefix}{name}.weight",
                    (size, features),
                    self.gate_up,
                    index=(expert, slice(first, first + held)),
                    part=part,
                )
            yield Placement(
                f"{prefix}down_proj.weight",
                (features, size),
                self.down,
                index=(expert, ..., slice(held)),
                part=(..., part),
            )
