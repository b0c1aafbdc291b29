"""LFM2, LFM2.5 and LFM2-MoE (Liquid AI 2025): short convolutions and some attention layers."""

import dataclasses
import re

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.models.config import DENSE, FULL_ATTENTION, SHORT_CONV, SPARSE, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG, MAX_LAYERS, SIZE, number, numbers, whole, words
from jaxspec.models.layers.moe import EXPERTS, SCALE, MoEConfig
from jaxspec.models.layers.short_conv import ShortConvConfig
from jaxspec.pallas.moe.route import Routing

_OPTIONS = {"use_pos_enc": (True,), "block_use_swiglu": (True,)}
_THETA = 1e6  # used if config.json has none
_KINDS = {"conv": SHORT_CONV, "full_attention": FULL_ATTENTION}  # words of `layer_types`
_LAYER = re.compile(
    r"(model\.layers\.\d{1,4}\.)(operator_norm|ffn_norm|self_attn|feed_forward)\.(.+)"
)
_PARTS = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
}
_MATRICES = {
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "out_proj": "o_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "expert_bias": "gate.e_score_correction_bias",
}


class LFM2(Model):
    """LFM2, in the original spelling or in that of transformers 5."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        width = "intermediate_size" if fields.find("block_ff_dim", SIZE) is None else "block_ff_dim"
        config = _common(fields, width=width)
        adjusted = _adjusted(fields, config.intermediate_size)
        return dataclasses.replace(config, intermediate_size=adjusted)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        if name == "model.embedding_norm.weight":  # the final norm, despite its name
            return "model.norm.weight"
        found = _LAYER.fullmatch(name)
        if found is None:
            return name
        layer, part, rest = found.groups()
        spelled = ".".join(_MATRICES.get(word, word) for word in rest.split("."))
        return f"{layer}{_PARTS.get(part, part)}.{spelled}"


class LFM2Moe(LFM2):
    """LFM2-MoE: LFM2 with experts in all layers but the first ones."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
        dense = fields.need("num_dense_layers", whole(0, count))
        config = _common(fields, (DENSE,) * dense + (SPARSE,) * (count - dense))
        return dataclasses.replace(config, parts=(*config.parts, _experts(fields)))


def _common(
    fields: Fields,
    feed_forward_types: tuple[str, ...] | None = None,
    width: str = "intermediate_size",
) -> ModelConfig:
    """Read the fields of LFM2 with and without experts; ValueError as in `parse_config`."""
    fields.refuse_all_but(_OPTIONS)
    config = fields.common(
        _layer_types(fields),
        feed_forward_types,
        default_theta=_THETA,
        eps="norm_eps",
        intermediate_size=width,
    )
    tied = fields.find("tie_embedding", FLAG)  # takes precedence, as in transformers
    return dataclasses.replace(
        config,
        tie_word_embeddings=config.tie_word_embeddings if tied is None else tied,
        parts=(ShortConvConfig.read(fields),),
    )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Return the mixer of each layer: from a list, or the indices of attention layers."""
    count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
    listed = fields.find("layer_types", words(MAX_LAYERS))
    if listed is None:
        attending = fields.need("full_attn_idxs", numbers(MAX_LAYERS, whole(0, count - 1)))
        return tuple(FULL_ATTENTION if i in attending else SHORT_CONV for i in range(count))
    unknown = sorted(set(listed) - _KINDS.keys())
    if unknown or len(listed) != count:
        raise ValueError(
            f"config.json: `layer_types` must name {' or '.join(map(repr, _KINDS))} for each of "
            f"{count} layers; it has {len(listed)} entries"
            + (f" and the unknown kinds {shown(unknown)}" if unknown else "")
            + ". Take the config.json that was published with the weights."
        )
    return tuple(_KINDS[word] for word in listed)


def _adjusted(fields: Fields, width: int) -> int:
    """Return the width of the feed-forward layers, given the one in config.json.

    With `block_auto_adjust_ff_dim` the config's width is for layers without a gate; a gated layer
    has as many parameters at two thirds of it. The rule is that of transformers.
    """
    if not fields.need("block_auto_adjust_ff_dim", FLAG):
        return width
    factor = fields.find("block_ffn_dim_multiplier", number(1e-3, 1e3))
    multiple = fields.need("block_multiple_of", SIZE)
    wanted = int((1.0 if factor is None else factor) * (2 * width // 3))
    return -(-wanted // multiple) * multiple


def _experts(fields: Fields) -> MoEConfig:
    """Read the experts' sizes and routing: sigmoid scores with a correction, without groups."""
    num_experts = fields.need("num_experts", EXPERTS)
    scale = fields.find("routed_scaling_factor", SCALE)
    routing = Routing(
        num_experts,
        fields.need("num_experts_per_tok", whole(1, num_experts)),
        score="sigmoid",
        renormalise=fields.need("norm_topk_prob", FLAG),
        eps=1e-6,
        scale=1.0 if scale is None else float(scale),
    )
    return MoEConfig(
        routing,
        fields.need("moe_intermediate_size", SIZE),
        has_correction=fields.need("use_expert_bias", FLAG),
    )
