"""The routing of DeepSeek-V3 in config.json: sigmoid scores, a correction, groups of experts."""

import dataclasses

from jaxspec.models.fields import Fields, check_groups
from jaxspec.models.kinds import FLAG, whole
from jaxspec.models.layers.moe import EXPERTS, SCALE
from jaxspec.pallas.moe.route import Routing


@dataclasses.dataclass(frozen=True)
class RoutingFields:
    """Names of the routing's fields."""

    experts: str = "n_routed_experts"
    chosen: str = "num_experts_per_tok"
    renormalise: str = "norm_topk_prob"
    scale: str = "routed_scaling_factor"
    groups: str = "n_group"
    top_groups: str = "topk_group"


DEEPSEEK = RoutingFields()


def read_routing(fields: Fields, names: RoutingFields = DEEPSEEK) -> Routing:
    """Read the routing; without fields of groups, tokens choose from all experts.

    Raises:
        ValueError: A field is missing or malformed, or the experts do not make equal groups.
    """
    num_experts = fields.need(names.experts, EXPERTS)
    groups = fields.find(names.groups, whole(1, num_experts)) or 1
    check_groups(num_experts, groups, f"{names.experts}, {names.groups}")
    top_groups = fields.find(names.top_groups, whole(1, groups)) or 1
    reachable = num_experts // groups * top_groups
    return Routing(
        num_experts,
        fields.need(names.chosen, whole(1, reachable)),
        score="sigmoid",
        renormalise=fields.need(names.renormalise, FLAG),
        eps=1e-20,
        scale=float(fields.need(names.scale, SCALE)),
        groups=groups,
        top_groups=top_groups,
    )
