"""PublishedModel: the two configuration files of a checkpoint, with fewer layers or less width."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxspec.models import parse_config
from jaxspec.models.config import (
    DENSE,
    KIMI_DELTA,
    LATENT_ATTENTION,
    SHARED_FULL,
    SHARED_SLIDING,
    ModelConfig,
)

HIDDEN = 128  # channels of the residual stream of a small model
_ALIGNED = 32  # widths of a small model are multiples of it
# Counts of heads, and the counts of groups of keys that they share.
_HEADS = {
    "num_attention_heads": "num_key_value_heads",
    "linear_num_value_heads": "linear_num_key_heads",
    "mamba_num_heads": "n_groups",
    "mamba_n_heads": "mamba_n_groups",
    "num_heads": "n_groups",
}
_GLOBAL_GROUPS = "num_global_key_value_heads"  # of the same query heads, in full attention
_GROUPS = 2  # of a small model, where the published one has more
_HEADS_OF_ONE_GROUP = 16  # of a small model with Mamba2, where all heads share one group
_WIDTHS = (
    "intermediate_size",
    "block_ff_dim",
    "moe_intermediate_size",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "hidden_size_per_layer_input",
)
# The words of `layer_types` for layers in groups.
_KINDS_OF_GROUPS = {LATENT_ATTENTION: "full_attention", KIMI_DELTA: "linear_attention"}
# Sizes that follow from others, which jaxspec does not read.
_DERIVED = ("expand", "mamba_expand")


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """The files beside a checkpoint's weights that say what it computes and how it is sampled."""

    config: dict[str, Any]
    generation_config: dict[str, Any]

    def thin(self, layers: int) -> dict[str, Any]:
        """Return a config.json with fewer layers; every other size is the published one.

        The layers are the first of the published pattern. Where a kind of layer (a mixer with its
        feed-forward layer) is not among these, its first one takes the place of the last that is
        of a kind already there.

        Raises:
            ValueError: `layers` is below 1 or above the published count.
        """
        published = parse_config(self.config, self.generation_config)
        kept = _kept_layers(published, layers)
        config = copy.deepcopy(self.config)
        _keep(config.get("text_config", config), published, kept)
        return config

    def small(self, layers: int) -> dict[str, Any]:
        """Return `thin` with a residual stream of `HIDDEN` channels, to run on a laptop's CPU.

        Feed-forward layers and experts shrink with it, and heads are fewer, with as many of them
        per group. The vocabulary, the sizes of heads and the number of experts are published ones.

        Raises:
            ValueError: as `thin`.
        """
        config = self.thin(layers)
        fields = config.get("text_config", config)
        is_latent = "kv_lora_rank" in fields
        if not is_latent and not fields.get("head_dim") and "num_attention_heads" in fields:
            fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
        for heads in _HEADS:
            if heads in fields:
                _cut_heads(fields, heads)
        if fields.get(_GLOBAL_GROUPS):
            fields[_GLOBAL_GROUPS] = 1
        for width in _WIDTHS:
            if width in fields:
                share = -(-fields[width] * HIDDEN // (fields["hidden_size"] * _ALIGNED))
                fields[width] = share * _ALIGNED
        if "linear_attn_config" in fields:
            fields["linear_attn_config"]["num_heads"] = _GROUPS
        if "mamba_d_ssm" in fields:
            fields["mamba_d_ssm"] = fields["mamba_n_heads"] * fields["mamba_d_head"]
        fields["hidden_size"] = HIDDEN
        for name in _DERIVED:
            fields.pop(name, None)
        return config

    def write(self, folder: Path, config: dict[str, Any]) -> Path:
        """Write `config` as config.json, and generation_config.json; return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("config", config), ("generation_config", self.generation_config)):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        return folder


def _kept_layers(published: ModelConfig, count: int) -> list[int]:
    kinds = list(zip(published.layer_types, published.feed_forward_types, strict=True))
    if not 1 <= count <= len(kinds):
        raise ValueError(f"layers must be from 1 to the published {len(kinds)}, got {count}.")
    first_of_kinds = sorted({kinds.index(kind) for kind in kinds})
    others = [layer for layer in range(len(kinds)) if layer not in first_of_kinds]
    return sorted([*first_of_kinds, *others][:count])


def _keep(fields: dict[str, Any], published: ModelConfig, kept: list[int]) -> None:
    """Leave the `kept` layers, in whichever field the family lists them."""
    fields["num_hidden_layers"] = len(kept)
    if "num_dense_layers" in fields:
        feed_forwards = [published.feed_forward_types[layer] for layer in kept]
        fields["num_dense_layers"] = feed_forwards.count(DENSE)
    if "first_k_dense_replace" in fields:
        feed_forwards = [published.feed_forward_types[layer] for layer in kept]
        fields["first_k_dense_replace"] = feed_forwards.count(DENSE)
    if "num_kv_shared_layers" in fields:
        mixers = [published.layer_types[layer] for layer in kept]
        fields["num_kv_shared_layers"] = mixers.count(SHARED_FULL) + mixers.count(SHARED_SLIDING)
    if "linear_attn_config" in fields:
        _keep_counted_from_1(fields["linear_attn_config"], kept)
    elif "hybrid_override_pattern" in fields:
        pattern = fields["hybrid_override_pattern"]
        fields["hybrid_override_pattern"] = "".join(pattern[layer] for layer in kept)
    elif "layer_group_size" in fields:
        kinds = [published.layer_types[layer] for layer in kept]
        fields["layer_types"] = [_KINDS_OF_GROUPS[kind] for kind in kinds]
    elif "full_attn_idxs" in fields:
        attending = fields["full_attn_idxs"]
        fields["full_attn_idxs"] = [i for i, layer in enumerate(kept) if layer in attending]
    elif "layer_types" in fields:
        fields["layer_types"] = [fields["layer_types"][layer] for layer in kept]
    elif "full_attention_interval" in fields:
        fields["layer_types"] = [published.layer_types[layer] for layer in kept]


def _keep_counted_from_1(block: dict[str, Any], kept: list[int]) -> None:
    for name in ("kda_layers", "full_attn_layers"):
        block[name] = [i for i, layer in enumerate(kept, 1) if layer + 1 in block[name]]


def _cut_heads(fields: dict[str, Any], name: str) -> None:
    groups = fields[_HEADS[name]]
    if groups == 1:
        fields[name] = min(fields[name], _HEADS_OF_ONE_GROUP)
        return
    left = min(groups, _GROUPS)
    fields[name] = fields[name] // groups * left
    fields[_HEADS[name]] = left
