"""DeepSeekBase: the common base of DeepSeek and GLM, with a draft head as the last layer."""

import re
from collections.abc import Collection

import jax.numpy as jnp

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.models.config import DENSE, SPARSE, ModelConfig, RopeConfig, YarnScaling
from jaxspec.models.deepseek_routing import DEEPSEEK, RoutingFields, read_routing
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, SIZE, whole
from jaxspec.models.layer_fields import FEED_FORWARDS, listed_kinds
from jaxspec.models.layers.moe import MoEConfig, shared_unit
from jaxspec.models.layers.mtp_head import PREFIX, MTPHead, has_draft_head

OPTIONS = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "swiglu_limit": (),
    "sliding_window": (),
}
"""Options that change the output, with the values that the layers implement."""

_LAYER_COUNT = whole(1, MAX_LAYERS)
_DENSE_COUNT = whole(0, MAX_LAYERS)
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(.+)")
# Tensors of the draft head's layer that are no part of its decoder layer.
_HEAD = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
_DERIVED = ".rotary_emb.inv_freq"  # computed from config.json instead


class DeepSeekBase(Model):
    """Experts in all but the first layers; the layer after the last is an MTP draft head."""

    copies = {
        PREFIX + "embed_tokens.weight": "model.embed_tokens.weight",
        PREFIX + "lm_head.weight": "lm_head.weight",
    }

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """See `Model`. With a checkpoint, its tensors decide whether there is a draft head."""
        super().__init__(config, dtype, tensors)
        if has_draft_head(config, tensors):
            self.draft_head = MTPHead(config, self.trunk.layers, dtype)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """Return a tensor's name in Qwen's spelling; the draft head is the layer after the last."""
        if name.endswith(_DERIVED):
            return None
        found = _LAYER.fullmatch(name)
        if found is None:
            return name
        number, rest = int(found[1]), found[2]
        layer = f"model.layers.{found[1]}."
        if number == len(config.layer_types):
            if rest in _HEAD:
                return PREFIX + _HEAD[rest]
            layer = PREFIX + "layers.0."
        return layer + rest.replace("mlp.shared_experts.", "mlp.shared_expert.")


def layer_count(fields: Fields, mixer_words: tuple[str, ...]) -> int:
    """Return the number of trunk layers.

    Raises:
        ValueError: `layer_types` has another length, or a word that is not in `mixer_words`.
    """
    count = fields.need("num_hidden_layers", _LAYER_COUNT)
    listed_kinds(fields, "layer_types", {word: word for word in mixer_words}, count)
    return count


def draft_layer_count(fields: Fields) -> int:
    return fields.find("num_nextn_predict_layers", whole(0, 1)) or 0


def feed_forward_types(fields: Fields, count: int) -> tuple[str, ...]:
    """Return the feed-forward type of each layer; either field suffices, and both must agree."""
    kinds = listed_kinds(fields, "mlp_layer_types", FEED_FORWARDS, count)
    read = fields.need if kinds is None else fields.find
    dense = read("first_k_dense_replace", _DENSE_COUNT)
    by_number = tuple(DENSE if layer < (dense or 0) else SPARSE for layer in range(count))
    if kinds is None:
        return by_number
    if dense is not None and by_number != kinds:
        raise ValueError(
            f"config.json: `mlp_layer_types` and `first_k_dense_replace` mean the same, and "
            f"differ: {shown(list(kinds))} and {dense}. Take the config.json that was published "
            "with the weights."
        )
    return kinds


def score_growth(rope: RopeConfig | None) -> float:
    """Return the factor of scores of latent attention that YaRN adds."""
    scaling = rope and rope.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        return scaling.growth(scaling.mscale_all_dim) ** 2
    return 1.0


def read_experts(
    fields: Fields, names: RoutingFields = DEEPSEEK, shared: str = "n_shared_experts"
) -> MoEConfig:
    """Read the experts' sizes; the shared experts are one of their joint width.

    Args:
        fields: The entries of config.json.
        names: Names of the routing's fields.
        shared: Name of the field with the number of shared experts.
    """
    width = fields.need("moe_intermediate_size", SIZE)
    count = fields.find(shared, whole(0, 64)) or 0
    return MoEConfig(
        read_routing(fields, names),
        width,
        shared_size=count * width,
        has_correction=True,
        width_unit=shared_unit(fields.scheme()),
    )
