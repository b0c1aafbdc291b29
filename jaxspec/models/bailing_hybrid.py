"""Ling-3.0 (`bailing_hybrid`): Kimi Delta Attention, and gated latent attention in some layers."""

import dataclasses
import itertools

from jaxspec.checks import shown
from jaxspec.models.config import DENSE, KIMI_DELTA, LATENT_ATTENTION, SPARSE, ModelConfig
from jaxspec.models.deepseek_base import (
    OPTIONS,
    DeepSeekBase,
    draft_layer_count,
    feed_forward_types,
    read_experts,
    score_growth,
)
from jaxspec.models.deepseek_routing import DEEPSEEK, RoutingFields
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG, MAX_LAYERS, SIZE, Kind, number, whole
from jaxspec.models.layer_fields import listed_mixers
from jaxspec.models.layers.kimi_delta import TAPS, KimiDeltaConfig
from jaxspec.models.layers.latent_attention import LatentAttentionConfig

_OPTIONS = OPTIONS | {
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "routing_group_score_top_k": (2,),
    "scale_router_input": (False,),
    "gated_attention_proj_granularity_type": ("head_wise",),
    "rope_interleave": (True,),
    "use_mla_nope": (False,),
    "no_kda_lora": (True,),
    "use_kda_lora": (False,),
    "num_kv_heads_for_linear_attn": (0,),
    "mtp_use_kda": (False,),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
    "use_nGPT": (False,),
    "up_proj_norm": (False,),
    "value_norm": (False,),
}
_PUBLISHED = dataclasses.replace(DEEPSEEK, experts="num_experts")
_SAVED = RoutingFields(  # by transformers 5
    experts="num_experts",
    chosen="num_experts_per_token",
    renormalise="moe_renormalize",
    groups="num_expert_group",
)
_LENGTH = whole(1, 2**31 - 1)
_BOUND = number(-100, -1e-3)
_EXPERTS = "expert", "share_expert"
_LIMIT = number(0, 1e3)
_LIMITS: Kind[list[float | None]] = Kind(
    f"a list of at most {MAX_LAYERS:,}, each null or {_LIMIT.words}",
    lambda value: (
        isinstance(value, list)
        and len(value) <= MAX_LAYERS
        and all(limit is None or _LIMIT.holds(limit) for limit in value)
    ),
)
# Parts of published names, in order, and ours.
_WORDS = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    ".final_layernorm.": ".shared_head.norm.",  # of the draft head
}


class BailingHybrid(DeepSeekBase):
    """Ling-3.0, in the published spelling of config.json or in that of transformers 5.

    Kimi Delta Attention with a bounded decay, gated latent attention as the last layer of each
    group, and the experts and the draft head of DeepSeek-V3.
    """

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        mixers = _mixers(fields)
        rotated = fields.need("qk_rope_head_dim", SIZE)
        config = fields.common(
            mixers,
            feed_forward_types(fields, len(mixers)),
            head_dim=rotated,
            max_positions=fields.find("model_max_length", _LENGTH),
        )
        assert config.rope is not None
        # `partial_rotary_factor` refers to `head_dim`, which is that of the delta rule.
        rope = dataclasses.replace(config.rope, rotary_dim=rotated)
        attention = LatentAttentionConfig.read(fields, growth=score_growth(rope), gated=True)
        is_saved = "num_experts_per_token" in fields.entries
        experts = read_experts(fields, _SAVED if is_saved else _PUBLISHED, "num_shared_experts")
        width = (
            fields.find("moe_shared_expert_intermediate_size", SIZE) or experts.intermediate_size
        )
        experts = dataclasses.replace(
            experts,
            shared_size=experts.shared_size // experts.intermediate_size * width,
            limits=_limits(fields, config.feed_forward_types),
        )
        delta = (_delta_rule(fields),) if KIMI_DELTA in mixers else ()
        return dataclasses.replace(
            config,
            rope=rope,
            normed_heads=False,
            num_draft_layers=draft_layer_count(fields),
            draft_mixer_type=LATENT_ATTENTION,
            draft_feed_forward_type=SPARSE,
            parts=(*delta, attention, experts),
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        for word, other in _WORDS.items():
            name = name.replace(word, other)
        return DeepSeekBase.canonical_name(name, config)


def _mixers(fields: Fields) -> tuple[str, ...]:
    """Return the mixer of each layer: from a list of words, or the number of layers of a group."""
    count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
    listed = listed_mixers(fields, count)
    if listed is not None:
        return listed
    size = fields.need("layer_group_size", whole(1, MAX_LAYERS))
    return tuple(KIMI_DELTA if (i + 1) % size else LATENT_ATTENTION for i in range(count))


def _limits(fields: Fields, feed_forwards: tuple[str, ...]) -> tuple[tuple[float, float], ...]:
    """Return the limits of each layer's routed experts and shared expert; none if all are 0."""
    routed, shared = (fields.find(f"{name}_swiglu_limit_list", _LIMITS) or [] for name in _EXPERTS)
    if any(limit for limit, kind in zip(routed, feed_forwards, strict=False) if kind == DENSE):
        raise ValueError(
            "config.json: `expert_swiglu_limit_list` must have no limits of dense layers, got "
            f"{shown(routed)}, which jaxspec does not implement. Take the config.json that was "
            "published with the weights."
        )
    pairs = itertools.zip_longest(routed, shared)
    limits = tuple((float(one or 0), float(other or 0)) for one, other in pairs)
    return limits if any(map(any, limits)) else ()


def _delta_rule(fields: Fields) -> KimiDeltaConfig:
    """Read the sizes of the delta rule; by default it has the attention's number of heads."""
    is_bounded = fields.find("kda_safe_gate", FLAG) is not False
    return KimiDeltaConfig(
        heads=fields.find("linear_num_heads", SIZE) or fields.need("num_attention_heads", SIZE),
        head_dim=fields.find("linear_head_dim", SIZE) or fields.need("head_dim", SIZE),
        conv_kernel=fields.find("linear_conv_kernel_dim", TAPS)
        or fields.need("short_conv_kernel_size", TAPS),
        rank=None,
        lower_bound=float(fields.need("kda_lower_bound", _BOUND)) if is_bounded else None,
    )
