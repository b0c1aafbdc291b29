"""LFM2 and LFM2.5 (Liquid AI 2025): short convolutions, and attention in some layers."""

import dataclasses
import re

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.models.config import FULL_ATTENTION, SHORT_CONV, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG, MAX_LAYERS, SIZE, number, numbers, whole, words
from jaxspec.models.layers.short_conv import ShortConvConfig

# Options that change the output, and their values that the layers compute.
_OPTIONS = {"use_pos_enc": (True,), "block_use_swiglu": (True,)}
_THETA = 1e6  # where config.json does not give it
_KINDS = {"conv": SHORT_CONV, "full_attention": FULL_ATTENTION}  # by the words of `layer_types`
_LAYER = re.compile(r"^(model\.layers\.\d{1,4}\.)([a-z_]+\.(?:[a-z0-9_]+(?=\.))?)")
_PARTS = {
    "operator_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


class LFM2(Model):
    """An LFM2 checkpoint, in the spelling that was published first or in that of transformers 5."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """The common fields, the kind of each layer, and the widths.

        Raises:
            ValueError: a field is missing, malformed or not implemented.
        """
        fields.refuse_all_but(_OPTIONS)
        width = "intermediate_size" if fields.find("block_ff_dim", SIZE) is None else "block_ff_dim"
        config = fields.common(
            _layer_types(fields), default_theta=_THETA, eps="norm_eps", width=width
        )
        return dataclasses.replace(
            config,
            intermediate_size=_adjusted(fields, config.intermediate_size),
            tie_word_embeddings=_tied(fields),
            parts=(ShortConvConfig.read(fields),),
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """A published tensor's name in Qwen's spelling."""
        if name == "model.embedding_norm.weight":  # that of the output, whatever it is called
            return "model.norm.weight"
        return _LAYER.sub(lambda found: found[1] + _PARTS.get(found[2], found[2]), name)


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """The mixer of each layer: listed, or those that attend by their indices.

    Raises:
        ValueError: a field is malformed, neither is there, or not each layer has a known mixer.
    """
    count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
    listed = fields.find("layer_types", words(MAX_LAYERS))
    if listed is None:
        name = "full_attn_idxs"
        attending = fields.need(name, numbers(MAX_LAYERS, whole(0, count - 1)))
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


def _tied(fields: Fields) -> bool | None:
    """Whether the embedding serves as output head, by either flag; None: config.json is silent."""
    tied = fields.find("tie_embedding", FLAG)
    return fields.tie_word_embeddings if tied is None else tied


def _adjusted(fields: Fields, width: int) -> int:
    """The width of the feed-forward layers, given the one that config.json has.

    With `block_auto_adjust_ff_dim` that is the width of layers without a gate. With one, two thirds
    make as many parameters. The rule is that of transformers.
    """
    if not fields.need("block_auto_adjust_ff_dim", FLAG):
        return width
    factor = fields.find("block_ffn_dim_multiplier", number(1e-3, 1e3))
    multiple = fields.need("block_multiple_of", SIZE)
    wanted = int((1.0 if factor is None else factor) * (2 * width // 3))
    return -(-wanted // multiple) * multiple
