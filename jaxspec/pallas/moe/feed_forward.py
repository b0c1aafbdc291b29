"""Mixture-of-experts feed-forward layer, with the residual add and the norm before it."""

import flax.struct
from jaxtyping import Array, Bool, Float

from jaxspec import parallel
from jaxspec.pallas.moe.experts import Experts, held_features, moe_experts
from jaxspec.pallas.moe.route import Routing, moe_route, own_choices
from jaxspec.pallas.moe.scores import moe_scores
from jaxspec.pallas.norm import residual
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Weight


@flax.struct.dataclass
class Router:
    """Weights of a layer's router, and the rule by which experts are chosen."""

    weight: Weight  # columns of the scores, see `moe_route`
    bias: Float[Array, " experts"] | None  # float32; added to the scores for choosing experts only
    rule: Routing = flax.struct.field(pytree_node=False)
    offset: Float[Array, " columns"] | None = None  # added to the scores, of choice and weights


def moe_feed_forward(
    stream: Stream,
    pending: Pending,
    norm: Norm,
    router: Router,
    experts: Experts,
    live: Bool[Array, " tokens"],
) -> tuple[Stream, Pending]:
    """Add `pending` to the stream, and run the chosen experts on the norm of the sum.

    Returns the sum and the layer's output, which is pending in turn. A token's output is the sum
    over its `experts`, each times its weight, and may be returned in parts (`moe_experts`). Tokens
    that are not `live` choose no expert and get zeros.

    Raises:
        ValueError: the experts' weights do not match the stream, each other or the router.
    """
    check(stream.shape[1], stream.shape[1], router, experts)
    stream, normed = add_norm(stream, pending, norm)
    scores = moe_scores(normed, router.weight)
    if router.offset is not None:
        scores = residual.shifted(scores, router.offset.astype(scores.dtype))
    choices = moe_route(scores, router.bias, live, router.rule)
    choices = own_choices(choices, router.rule, held(router.rule, experts))
    return stream, moe_experts(normed, experts, choices)


def held(rule: Routing, experts: Experts) -> int:
    """Return the number of routed experts on this device."""
    return experts.number - rule.num_shared


def check(features: int, width: int, router: Router, experts: Experts) -> None:
    """Check that the operands of a layer fit together; the kernels would read out of bounds.

    The router reads the stream's `features`, and the experts read `width` features. In a group of
    devices each may hold an equal share of the routed experts.

    Raises:
        ValueError: the experts or the router have another shape.
    """
    rule = router.rule
    up, down = ((w.num_experts, w.outer, w.inner) for w in (experts.up, experts.down))
    inner, number = experts.width, rule.none
    if held(rule, experts) * parallel.size() == rule.num_experts:
        number = experts.number
    wanted = (
        (number, experts.activation.pieces * inner, held_features(width, experts.up)),
        (number, width, held_features(inner, experts.down)),
    )
    if (up, down) != wanted:
        raise ValueError(
            f"The weights of {rule.num_experts} experts that compete and {rule.num_shared} slices "
            f"of shared ones for {width} features must be {list(wanted[0])} and {list(wanted[1])}, "
            f"got {list(up)} and {list(down)}. Stack the experts that compete, then the slices."
        )
    if (router.weight.inner, router.weight.outer >= rule.num_columns) != (features, True):
        gate = " and the gate of the shared ones" if rule.gated_shared else ""
        raise ValueError(
            f"A router of {rule.num_experts} experts{gate} must be {features} x "
            f"{rule.num_columns} or wider, got {router.weight.inner} x {router.weight.outer}."
        )
