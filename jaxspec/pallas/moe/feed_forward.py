"""The feed-forward layer of a mixture of experts, with the addition and the norm before it."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.moe.experts import moe_experts
from jaxspec.pallas.moe.route import Routing, moe_route
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import DenseExperts, Weight


@flax.struct.dataclass
class Router:
    """What scores a layer's experts, and how they are chosen."""

    weight: Weight  # its columns are those of the scores, see `moe_route`
    bias: Float[Array, " experts"] | None  # float32; added to the scores that are compared
    rule: Routing = flax.struct.field(pytree_node=False)


def moe_feed_forward(
    stream: Stream,
    pending: Pending,
    norm: Norm,
    router: Router,
    gate_up: DenseExperts,
    down: DenseExperts,
    live: Bool[Array, " tokens"],
) -> tuple[Stream, Pending]:
    """`stream + pending`, and the layer's output for the norm of that, which is then pending.

    Each expert is a gated feed-forward layer, `down(silu(gate) * up)`; the rows of `gate_up` are
    those of the gate, then those of up. A token's output is the sum over its experts, each times
    its weight, and stays in parts (`moe_experts`). Tokens that are not `live` choose no expert and
    get zeros.

    Raises:
        ValueError: the experts' weights do not fit the stream, each other or the router.
    """
    _check(stream, router, gate_up, down)
    stream, normed = add_norm(stream, pending, norm)
    scores = matmul(normed, router.weight, jnp.float32)
    choices = moe_route(scores, router.bias, live, router.rule)
    return stream, moe_experts(normed, gate_up, down, choices)


def _check(stream: Stream, router: Router, gate_up: DenseExperts, down: DenseExperts) -> None:
    """ValueError where the operands of a layer do not fit together."""
    rule, features = router.rule, stream.shape[1]
    held = rule.none
    wanted = (held, 2 * down.inner, features), (held, features, down.inner)
    if (gate_up.array.shape, down.array.shape) != wanted:
        raise ValueError(
            f"The weights of {rule.num_experts} experts that compete and {rule.num_shared} slices "
            f"of shared ones for {features} features must be {list(wanted[0])} and "
            f"{list(wanted[1])}, got {list(gate_up.array.shape)} and {list(down.array.shape)}. "
            "Stack the experts that compete, then the slices."
        )
    if (router.weight.inner, router.weight.outer >= rule.num_columns) != (features, True):
        gate = " and the gate of the shared ones" if rule.gated_shared else ""
        raise ValueError(
            f"A router of {rule.num_experts} experts{gate} must be {features} x "
            f"{rule.num_columns} or wider, "
            f"got {router.weight.inner} x {router.weight.outer}."
        )
