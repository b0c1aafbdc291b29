"""Granite: attention in every layer, or Granite 4 with Mamba2 and experts."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.models.config import DENSE, FULL_ATTENTION, MAMBA2, SPARSE, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import MAX_LAYERS, SIZE, number, whole, words
from jaxspec.models.layers.mamba2 import Mamba2Config, Mamba2Fields
from jaxspec.models.layers.moe import MAX_EXPERTS, MoEConfig, shared_width
from jaxspec.models.layers.parameters import Placement, scaled
from jaxspec.pallas.moe.route import Routing

_OPTIONS = {
    "mamba_proj_bias": (False,),
    "normalization_function": ("rmsnorm",),
    "position_embedding_type": ("nope", "rope"),
}
# Words for mixers in published checkpoints, and in those of transformers 5.
_MIXERS = {
    "mamba": MAMBA2,
    "linear_attention": MAMBA2,
    "attention": FULL_ATTENTION,
    "full_attention": FULL_ATTENTION,
}
_FACTOR = number(1e-6, 1e6)
_THETA = 10000.0  # used if config.json has none
_LAYER = re.compile(r"(model\.layers\.\d{1,4}\.)(shared_mlp|block_sparse_moe)\.(.+)")
_SHARED = {"input_linear.weight": "gate_up_proj.weight", "output_linear.weight": "down_proj.weight"}
_EXPERTS = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "gate.weight",
}


@dataclasses.dataclass(frozen=True)
class GraniteMultipliers:
    """Constants that scale Granite's activations: a part of a `ModelConfig`.

    Each scaled activation meets a matrix or a norm's weight first, so that weight is multiplied
    instead when it is loaded, in float32.
    """

    embedding: float
    residual: float
    queries: float  # attention_multiplier * sqrt(head_dim)
    logits: float  # a divisor

    @classmethod
    def read(cls, fields: Fields, head_dim: int) -> "GraniteMultipliers":
        """Read the fields of config.json, for heads of `head_dim` channels.

        Granite's factor of attention scores replaces `1 / sqrt(head_dim)`.
        """
        return cls(
            embedding=float(fields.need("embedding_multiplier", _FACTOR)),
            residual=float(fields.need("residual_multiplier", _FACTOR)),
            queries=fields.need("attention_multiplier", _FACTOR) * math.sqrt(head_dim),
            logits=float(fields.need("logits_scaling", _FACTOR)),
        )

    def of_tensors(self, *, tied: bool) -> dict[str, float]:
        """Return the factor of each tensor, keyed by the end of its canonical name.

        With a tied embedding the output head also has the embedding's factor, and the final norm
        divides by it.
        """
        ends = ("o_proj.weight", "o_proj.bias", "mamba.out_proj.weight")
        ends += ("down_proj.weight", "down_proj")
        return {
            "embed_tokens.weight": self.embedding,
            "model.norm.weight": 1 / (self.logits * self.embedding if tied else self.logits),
            "self_attn.q_proj.weight": self.queries,
            "self_attn.q_proj.bias": self.queries,
            **dict.fromkeys(ends, self.residual),
        }


class Granite(Model):
    """Granite with attention in every layer: Llama's layers and multipliers."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        kinds = fields.attention_layer_types()
        config = fields.common(kinds, default_theta=_THETA, may_have_biases=True)
        parts = (GraniteMultipliers.read(fields, config.head_dim),)
        return dataclasses.replace(config, normed_heads=False, parts=parts)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return name

    def checkpoint(self) -> Iterator[Placement]:
        """Yield the placements of all tensors, with the multipliers as factors."""
        tied = self.trunk.embedding is None
        factors = self.config.part(GraniteMultipliers).of_tensors(tied=tied)
        return scaled(super().checkpoint(), factors)


class GraniteHybrid(Granite):
    """Granite 4, with or without experts beside a shared feed-forward layer."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        mixers = _mixers(fields)
        num_experts = fields.need("num_local_experts", whole(0, MAX_EXPERTS))
        rotates = fields.entries.get("position_embedding_type") == "rope"
        config = fields.common(
            mixers,
            (SPARSE if num_experts else DENSE,) * len(mixers),
            has_rotation=rotates,
            intermediate_size="shared_intermediate_size",
        )
        parts: tuple[Any, ...] = (GraniteMultipliers.read(fields, config.head_dim),)
        if MAMBA2 in mixers:
            parts += (Mamba2Config.read(fields, Mamba2Fields(), norm_by_group=False),)
        if num_experts:
            parts += (_experts(fields, num_experts),)
        return dataclasses.replace(config, normed_heads=False, parts=parts)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """Return a tensor's name in Qwen's spelling; without experts `shared_mlp` is the MLP."""
        found = _LAYER.fullmatch(name)
        if found is None:
            return name
        layer, part, rest = found.groups()
        if part == "block_sparse_moe":
            return f"{layer}mlp.{_EXPERTS.get(rest, rest)}"
        shared = "shared_expert." if SPARSE in config.feed_forward_types else ""
        return f"{layer}mlp.{shared}{_SHARED.get(rest, rest)}"


def _mixers(fields: Fields) -> tuple[str, ...]:
    count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
    listed = fields.need("layer_types", words(MAX_LAYERS))
    unknown = sorted(set(listed) - _MIXERS.keys())
    if unknown or len(listed) != count:
        raise ValueError(
            f"config.json: `layer_types` must name 'mamba' or 'attention' for each of {count} "
            f"layers; it has {len(listed)} entries"
            + (f" and the unknown kinds {shown(unknown)}." if unknown else ".")
        )
    return tuple(_MIXERS[word] for word in listed)


def _experts(fields: Fields, num_experts: int) -> MoEConfig:
    """Read the experts' sizes. Softmax over the chosen equals softmax over all, renormalised."""
    width = fields.need("intermediate_size", SIZE)
    return MoEConfig(
        Routing(num_experts, fields.need("num_experts_per_tok", whole(1, num_experts))),
        width,
        shared_size=fields.need("shared_intermediate_size", shared_width(width)),
    )
