"""Nemotron-H, Nemotron-3 and 3.5: Mamba2, attention without positions, squared-ReLU layers."""

import dataclasses
import re
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.models.config import (
    FULL_ATTENTION,
    LATENT_SPARSE,
    MAMBA2,
    NO_FEED_FORWARD,
    NO_MIXER,
    SPARSE,
    SQUARED_RELU,
    ModelConfig,
)
from jaxspec.models.deepseek_routing import read_routing
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, SIZE, WORD, whole, words
from jaxspec.models.layers.mamba2 import Mamba2Config, Mamba2Fields
from jaxspec.models.layers.moe import MoEConfig, shared_width
from jaxspec.models.layers.mtp_head import PREFIX, MTPHead, has_draft_head
from jaxspec.pallas.matmul.activation import Activation

_OPTIONS = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "use_bias": (False,),
    "mamba_proj_bias": (False,),
    "sliding_window": (),
    "n_shared_experts": (1,),
}
# Letter of a layer in a pattern -> its mixer and its feed-forward layer; one of them is empty.
_HALVES = {
    "M": (MAMBA2, NO_FEED_FORWARD),
    "*": (FULL_ATTENTION, NO_FEED_FORWARD),
    "-": (NO_MIXER, SQUARED_RELU),
    "E": (NO_MIXER, SPARSE),
}
# Words for layers in lists, in published checkpoints and in those of transformers 5.
_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
MAMBA2_FIELDS = Mamba2Fields(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_dim="ssm_state_size",
    conv_kernel="conv_kernel",
    conv_bias="use_conv_bias",
)
_HEAD = "*E"  # layers of the supported draft head
_HEAD_DIM = "head_dim", "attention_head_dim"  # the second in older checkpoints
_TRUNK_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(norm|mixer)\.(.+)")
_HEAD_LAYER = re.compile(r"mtp\.layers\.([01])\.(norm|mixer)\.(.+)")
_NAMES = {
    "model.embeddings.weight": "model.embed_tokens.weight",
    "model.norm_f.weight": "model.norm.weight",
    # The head's input norms and projection are in its first layer, its final norm in the last.
    "mtp.layers.0.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "mtp.layers.0.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.eh_proj.weight": "mtp.fc.weight",
    "mtp.layers.1.final_layernorm.weight": "mtp.norm.weight",
}
_PREFIXES = {MAMBA2: "mamba.", FULL_ATTENTION: "self_attn.", NO_MIXER: "mlp."}


class NemotronH(Model):
    """Nemotron-H. Each layer is either one mixer or one feed-forward layer."""

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """See `Model`. With a checkpoint, its tensors decide whether there is a draft head.

        Raises:
            ValueError: There is a head, but config.json has no sizes for it.
        """
        super().__init__(config, dtype, tensors)
        if has_draft_head(config, tensors):
            _check_has_sizes_of_head(config)
            self.draft_head = MTPHead(config, self.trunk.layers, dtype)

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """Read the common fields, the type of each layer, and the sizes of the types that occur.

        A draft head that config.json declares counts as layers that occur.
        """
        fields.refuse_all_but(_OPTIONS)
        is_latent = fields.find("moe_latent_size", SIZE) is not None
        sparse = LATENT_SPARSE if is_latent else SPARSE
        pattern = _layers(fields)
        num_draft_layers = _draft_layers(fields)
        letters = pattern + _HEAD * num_draft_layers
        mixers, feeds = zip(*(_HALVES[letter] for letter in pattern), strict=True)
        config = fields.common(
            mixers,
            tuple(sparse if feed == SPARSE else feed for feed in feeds),
            has_attention="*" in letters,
            has_rotation=False,
            head_dim=fields.need_either(_HEAD_DIM, SIZE) if "*" in letters else None,
            eps="layer_norm_epsilon",
        )
        parts: list[Any] = (
            [Mamba2Config.read(fields, MAMBA2_FIELDS, norm_by_group=True)] if "M" in pattern else []
        )
        return dataclasses.replace(
            config,
            normed_heads=False,
            num_draft_layers=num_draft_layers,
            draft_feed_forward_type=sparse,
            parts=(*parts, _experts(fields)) if "E" in letters else tuple(parts),
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """Return a tensor's name in Qwen's spelling; the prefix follows from the layer's type."""
        if name.startswith("backbone."):
            name = "model." + name.removeprefix("backbone.")
        if found := _HEAD_LAYER.fullmatch(name):
            number, part, rest = found.groups()
            return _spelled("mtp.layers.0.", (FULL_ATTENTION, NO_MIXER)[int(number)], part, rest)
        found = _TRUNK_LAYER.fullmatch(name)
        if found is None or int(found[1]) >= len(config.layer_types):
            return _NAMES.get(name, name)
        number, part, rest = found.groups()
        return _spelled(f"model.layers.{number}.", config.layer_types[int(number)], part, rest)


def _spelled(layer: str, mixer: str, part: str, rest: str) -> str:
    """Return the name of a tensor of a layer's norm, mixer or feed-forward layer."""
    if part == "norm":
        norm = "post_attention_layernorm" if mixer == NO_MIXER else "input_layernorm"
        return f"{layer}{norm}.{rest}"
    return layer + _PREFIXES[mixer] + rest.replace("shared_experts.", "shared_expert.")


def _layers(fields: Fields) -> str:
    """Return the letter of each layer; ValueError if there is no pattern or it is invalid."""
    pattern = _pattern(fields, "hybrid_override_pattern", "layers_block_type")
    if pattern is None:
        raise ValueError(
            "config.json must give `hybrid_override_pattern` or `layers_block_type`, and does not. "
            "Take the config.json that was published with the weights."
        )
    count = fields.find("num_hidden_layers", whole(1, MAX_LAYERS))
    if not pattern or len(pattern) > MAX_LAYERS or count not in (None, len(pattern)):
        raise ValueError(
            f"config.json: `hybrid_override_pattern` or `layers_block_type` must name each of "
            f"{'the' if count is None else count} layers, 1 to {MAX_LAYERS:,}, got "
            f"{len(pattern):,}. Take the config.json that was published with the weights."
        )
    return pattern


def _pattern(fields: Fields, letters: str, listed: str) -> str | None:
    """Return the layers' letters from either field, which must agree; None if both are missing."""
    spelled, named = fields.find(letters, WORD), fields.find(listed, words(MAX_LAYERS))
    in_letters = None if named is None else [_LETTERS.get(word, word) for word in named]
    if spelled is not None and in_letters not in (None, list(spelled)):
        raise ValueError(
            f"config.json: `{letters}` and `{listed}` mean the same, and differ: {shown(spelled)} "
            f"and {shown(named)}. Take the config.json that was published with the weights."
        )
    pattern = in_letters if spelled is None else spelled
    if pattern is None:
        return None
    if unknown := sorted(set(pattern) - _HALVES.keys()):
        raise ValueError(
            f"config.json: `{letters}` must have letters of {''.join(_HALVES)!r}, or `{listed}` "
            f"words of {', '.join(_LETTERS)}, got {shown(unknown)}. Use a checkpoint whose layers "
            "are of these kinds."
        )
    return "".join(pattern)


def _draft_layers(fields: Fields) -> int:
    """Return the number of declared draft heads; ValueError if their layers are not supported."""
    head = _pattern(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    count = fields.find("num_nextn_predict_layers", whole(0, 1)) or 0
    if count and head not in (None, _HEAD):
        raise ValueError(
            f"config.json: `mtp_hybrid_override_pattern` or `mtp_layers_block_type` must be "
            f"{_HEAD!r}, attention and experts, got {shown(head)}, which jaxspec does not "
            "implement. Use a checkpoint whose draft head has these layers, or one without a head."
        )
    return count


def _check_has_sizes_of_head(config: ModelConfig) -> None:
    """Raise ValueError if config.json lacks the sizes of the draft head's layers."""
    if config.num_heads and config.find_part(MoEConfig) is not None:
        return
    raise ValueError(
        "config.json must promise the draft head that the checkpoint has, and give the sizes of "
        "its attention and experts, which the layers before it lack: `num_nextn_predict_layers` "
        "1, `num_attention_heads`, `num_key_value_heads`, `head_dim`, `n_routed_experts`, "
        "`num_experts_per_tok`, `moe_intermediate_size` and others. Take the config.json that was "
        f"published with the weights, or a checkpoint without tensors of `{PREFIX}`."
    )


def _experts(fields: Fields) -> MoEConfig:
    """Read the experts' sizes and routing, which is that of DeepSeek-V3."""
    width = fields.need("moe_intermediate_size", SIZE)
    shared = fields.need("moe_shared_expert_intermediate_size", shared_width(width))
    latent = fields.find("moe_latent_size", SIZE)
    return MoEConfig(
        read_routing(fields),
        width,
        shared_size=shared,
        has_correction=True,
        activation=Activation.SQUARED_RELU,
        latent_size=latent,
    )
