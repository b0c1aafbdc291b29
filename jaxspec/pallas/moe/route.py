"""Routing: the experts of each token, and their weights."""

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec import checks, parallel
from jaxspec.pallas import dispatch
from jaxspec.pallas.moe import routes
from jaxspec.pallas.norm.residual import sum_parts


@dataclasses.dataclass(frozen=True)
class Routing:
    """Rule by which a layer's experts are chosen.

    Sigmoid scores, their correction and the groups follow the DeepSeek-V3 report (arXiv
    2412.19437), section 2.1.2. Qwen's layers have softmax scores, without correction or groups.
    """

    num_experts: int  # routed experts, which tokens choose from
    num_chosen: int  # routed experts per token
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # True divides the weights of the chosen experts by their sum
    eps: float = 0.0  # added to the sum of these weights
    scale: float = 1.0  # factor of the final weights
    groups: int = 1  # number of equal groups of adjacent experts
    top_groups: int = 1  # groups that a token chooses from, by the sum of their best two
    num_shared: int = 0  # shared experts, numbered after the routed ones; every token has them
    gated_shared: bool = False  # True if a column after the experts' scores gates the shared ones

    def __post_init__(self) -> None:
        """Check the sizes: groups must be equal and hold the chosen number of experts.

        Raises:
            ValueError: a size does not fit.
        """
        for name in ("num_experts", "num_chosen", "groups", "top_groups"):
            checks.integer(name, getattr(self, name), 1)
        checks.integer("num_shared", self.num_shared, 0)
        each, rest = divmod(self.num_experts, self.groups)
        if rest:
            raise ValueError(
                f"Groups must have as many experts each, but {self.num_experts} experts do not "
                f"make {self.groups} equal groups. Let `groups` divide `num_experts`."
            )
        if self.top_groups > self.groups:
            raise ValueError(
                f"A token must choose from at most all groups, {self.groups} here, got top_groups "
                f"{self.top_groups}. Lower it."
            )
        if self.top_groups < self.groups and each < 2:
            raise ValueError(
                f"Groups are compared by their best two experts, but {self.groups} groups of "
                f"{self.num_experts} experts have one each. Take fewer groups, or all of them "
                "(`top_groups`)."
            )
        if self.num_chosen > each * self.top_groups:
            raise ValueError(
                f"A token must choose at most the {each * self.top_groups} experts of its "
                f"{self.top_groups} groups, got num_chosen {self.num_chosen}. Lower it, or take "
                "more groups (`top_groups`)."
            )

    @property
    def num_columns(self) -> int:
        """Columns of the scores that are read."""
        return self.num_experts + self.gated_shared

    @property
    def none(self) -> int:
        """Expert of padding tokens, which does not exist."""
        return self.num_experts + self.num_shared

    @property
    def parts(self) -> int:
        """Experts per token, including the shared ones."""
        return self.num_chosen + self.num_shared


@flax.struct.dataclass
class Choices:
    """Experts and weights of each token: the chosen ones, best first, then the shared ones."""

    experts: Int[Array, "tokens parts"]  # int32; `Routing.none` for padding
    weights: Float[Array, "tokens parts"]  # float32; 0 for padding
    # Devices that the routed experts are shared among. With several, `experts` are those of one
    # device, and a choice of another device's expert is like one of padding.
    devices: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def has_gaps(self) -> bool:
        """True if only some choices of a token may be those of padding."""
        return self.devices > 1


def moe_route(
    scores: Float[Array, "*parts tokens columns"],
    bias: Float[Array, " experts"] | None,
    live: Bool[Array, " tokens"],
    rule: Routing,
) -> Choices:
    """Choose the experts of each token, or take those that are replayed (`pallas.moe.routes`).

    The lower expert wins ties. A live row with NaN among its experts' scores gets arbitrary
    experts, and NaN as the weight of each chosen one.

    Args:
        scores: float32. One column per routed expert, then the gate of the shared ones if there is
            one; further columns are padding. Partial sums (`moe_scores`) are summed first, always
            in one order.
        bias: float32, added to the scores for choosing experts, but not to the weights.
        live: tokens to route. The others choose no expert, so the layer's kernels read no weights
            for them.
        rule: scores, groups and weights.
    """
    if (given := routes.replayed_here()) is not None:
        return moe_route_reference(scores, bias, live, rule, given)
    if dispatch.runs_kernel("moe_route", why_not_kernel(scores, rule), rows=live.shape[0]):
        from jaxspec.pallas.moe.route_kernel import moe_route_kernel

        choices = Choices(*moe_route_kernel(scores, bias, live, rule))
    else:
        choices = moe_route_reference(scores, bias, live, rule)
    routes.record(choices.experts, rule.num_chosen)
    return choices


def why_not_kernel(scores, rule):
    if scores.dtype != jnp.float32 or rule.num_experts % 8:
        return f"{rule.num_experts} experts in {scores.dtype}"
    return None


def own_choices(choices: Choices, rule: Routing, held: int) -> Choices:
    """Return the choices of one device's experts: `held` of the routed ones, and all shared ones.

    Its experts are numbered from 0. On the second of two devices that share experts 0 to 7, a token
    that chose experts 6, 1 and the shared expert 8 has experts 2, none and 4, where none is 5.

    All devices must have the same scores to the last bit, or an expert may be left out: scores are
    computed from a sum over devices, which is the same on each of them.
    """
    if held == rule.num_experts:
        return choices
    experts, own = choices.experts, choices.experts - parallel.first_of(held)
    is_own = (own >= 0) & (own < held)
    is_common = experts >= rule.num_experts  # shared experts, and padding
    experts = jnp.where(is_own, own, held + rule.num_shared)
    experts = jnp.where(is_common, choices.experts - rule.num_experts + held, experts)
    weights = jnp.where(is_own | is_common, choices.weights, 0.0)
    return Choices(experts.astype(jnp.int32), weights, rule.num_experts // held)


def moe_route_reference(scores, bias, live, rule, given=None):
    """Route by XLA.

    `given` are experts in place of the best ones, `[tokens, chosen]`. Their weights are computed
    from all scores. One that is not among the routed experts makes the weights NaN.
    """
    scores = sum_parts(scores, jnp.float32)
    logits = scores[:, : rule.num_experts].astype(jnp.float32)
    by_softmax = rule.score == "softmax"
    score = jax.nn.softmax(logits, axis=1) if by_softmax else jax.nn.sigmoid(logits)
    compared = score if bias is None else score + bias[None, :]
    has_nan = jnp.any(jnp.isnan(compared), axis=1, keepdims=True)
    if rule.top_groups < rule.groups:
        compared = jnp.where(_in_top_groups(compared, rule), compared, -jnp.inf)
    if given is None:
        _, experts = lax.top_k(compared, rule.num_chosen)
    else:
        are_experts = (given >= 0) & (given < rule.num_experts)
        has_nan |= ~jnp.all(are_experts, axis=1, keepdims=True)
        experts = jnp.where(are_experts, given, 0)
    weights = jnp.take_along_axis(score, experts, axis=1)
    if rule.renormalise:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + rule.eps)
    weights = jnp.where(has_nan, jnp.nan, weights * rule.scale)
    if rule.num_shared:
        gate = jnp.ones(scores.shape[0], jnp.float32)
        if rule.gated_shared:
            gate = jax.nn.sigmoid(scores[:, rule.num_experts].astype(jnp.float32))
        shared = rule.num_experts + jnp.arange(rule.num_shared, dtype=jnp.int32)[None, :]
        of_all = scores.shape[0], rule.num_shared
        experts = jnp.concatenate([experts, jnp.broadcast_to(shared, of_all)], axis=1)
        weights = jnp.concatenate([weights, jnp.broadcast_to(gate[:, None], of_all)], axis=1)
    return Choices(
        experts=jnp.where(live[:, None], experts, rule.none).astype(jnp.int32),
        weights=jnp.where(live[:, None], weights, 0.0),
    )


def _in_top_groups(
    compared: Float[Array, "tokens experts"], rule: Routing
) -> Bool[Array, "tokens experts"]:
    grouped = compared.reshape(compared.shape[0], rule.groups, rule.num_experts // rule.groups)
    best_two, _ = lax.top_k(grouped, 2)
    _, groups = lax.top_k(jnp.sum(best_two, axis=2), rule.top_groups)
    chosen = jnp.any(groups[:, :, None] == jnp.arange(rule.groups)[None, None, :], axis=1)
    return jnp.repeat(chosen, grouped.shape[2], axis=1)
