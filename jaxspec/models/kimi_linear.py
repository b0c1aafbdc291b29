"""Kimi-Linear: Kimi Delta Attention, and latent attention without positions in some layers."""

import dataclasses
import re

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.models.config import DENSE, KIMI_DELTA, LATENT_ATTENTION, SPARSE, ModelConfig
from jaxspec.models.deepseek_routing import RoutingFields, read_routing
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, SIZE, numbers, whole
from jaxspec.models.layer_fields import FEED_FORWARDS, listed_kinds, listed_mixers
from jaxspec.models.layers.kimi_delta import KimiDeltaConfig
from jaxspec.models.layers.latent_attention import LatentAttentionConfig
from jaxspec.models.layers.moe import MoEConfig, shared_unit

_OPTIONS = {
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "use_grouped_topk": (True,),
    "num_nextn_predict_layers": (0,),
}
_ROUTING = RoutingFields(
    experts="num_experts",
    chosen="num_experts_per_token",
    renormalise="moe_renormalize",
    groups="num_expert_group",
)
_LISTS = "kda_layers", "full_attn_layers"  # published lists of layers, counted from 1
_EXPERTS = re.compile(r"(model\.layers\.\d{1,4}\.)block_sparse_moe\.(.+)")
_MATRICES = {
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "shared_experts": "shared_expert",
}


class KimiLinear(Model):
    """Kimi-Linear, in the published spelling or in that of transformers 5.

    Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv
    2510.26692.
    """

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        mixers = _mixers(fields)
        feed_forwards = _feed_forward_types(fields, len(mixers))
        config = fields.common(
            mixers,
            feed_forwards,
            has_rotation=False,
            head_dim=fields.need("qk_rope_head_dim", SIZE),
            max_positions=fields.need("model_max_length", whole(1, 2**31 - 1)),
        )
        parts = (LatentAttentionConfig.read(fields),)
        if KIMI_DELTA in mixers:
            parts = (KimiDeltaConfig.read(fields), *parts)
        if SPARSE in feed_forwards:
            parts = (*parts, _experts(fields))
        return dataclasses.replace(config, normed_heads=False, parts=parts)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        found = _EXPERTS.fullmatch(name)
        if found is None:
            return name
        layer, rest = found.groups()
        return f"{layer}mlp." + ".".join(_MATRICES.get(word, word) for word in rest.split("."))


def _mixers(fields: Fields) -> tuple[str, ...]:
    """Return the mixer of each layer: from a list of words, or two lists of layers."""
    count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
    listed = listed_mixers(fields, count)
    if listed is not None:
        return listed
    block = fields.block("linear_attn_config")
    linear, full = (block.need(name, numbers(MAX_LAYERS, whole(1, count))) for name in _LISTS)
    if sorted(linear + full) != list(range(1, count + 1)):
        raise ValueError(
            f"config.json: `linear_attn_config` must name each of layers 1 to {count} once, in "
            f"`{_LISTS[0]}` or in `{_LISTS[1]}`, got {shown(linear)} and {shown(full)}. Take the "
            "config.json that was published with the weights."
        )
    return tuple(KIMI_DELTA if i in set(linear) else LATENT_ATTENTION for i in range(1, count + 1))


def _feed_forward_types(fields: Fields, count: int) -> tuple[str, ...]:
    """Return the feed-forward type of each layer: from a list, or the place of the first experts.

    After the first dense layers, every `moe_layer_freq`-th layer has experts, counted from 0.
    """
    listed = listed_kinds(fields, "mlp_layer_types", FEED_FORWARDS, count)
    if listed is not None:
        return listed
    dense = fields.need("first_k_dense_replace", whole(0, MAX_LAYERS))
    interval = fields.find("moe_layer_freq", whole(1, MAX_LAYERS)) or 1
    return tuple(SPARSE if i >= dense and i % interval == 0 else DENSE for i in range(count))


def _experts(fields: Fields) -> MoEConfig:
    """Read the experts' sizes; the shared experts are one of their joint width."""
    width = fields.need("moe_intermediate_size", SIZE)
    count = fields.find("num_shared_experts", whole(0, 64)) or 0
    return MoEConfig(
        read_routing(fields, _ROUTING),
        width,
        shared_size=count * width,
        has_correction=True,
        width_unit=shared_unit(fields.scheme()),
    )
