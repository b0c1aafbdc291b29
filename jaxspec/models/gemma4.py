"""Gemma 4: attention over a window with full attention between, dense or with experts.

In E2B and E4B the last layers attend to keys and values of earlier ones, and each layer has
embeddings of its own.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.models.config import (
    DENSE,
    DENSE_AND_SPARSE,
    DOUBLE_DENSE,
    FULL_ATTENTION,
    SHARED_FULL,
    SHARED_SLIDING,
    SLIDING_ATTENTION,
    FullAttention,
    ModelConfig,
    ProportionalScaling,
    RopeConfig,
)
from jaxspec.models.fields import Fields, check_groups
from jaxspec.models.kinds import FLAG, MAX_LAYERS, OBJECT, SIZE, Block, number, whole
from jaxspec.models.layers.moe import EXPERTS, MoEConfig
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.per_layer_input import PerLayerSizes
from jaxspec.models.layers.window_attention import SharedWindow
from jaxspec.models.rope_fields import read_plain_rope
from jaxspec.models.window_fields import WINDOW, listed_attention
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.route import Routing
from jaxspec.weight import Weight

_OPTIONS = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": ("vision",),  # between the tokens of an image
}
_FEATURES = whole(0, 2**20)
_VOCABULARY = whole(1, 2**24)
_FULL = FULL_ATTENTION, SHARED_FULL
_SHARED = {FULL_ATTENTION: SHARED_FULL, SLIDING_ATTENTION: SHARED_SLIDING}
_INTERVAL = 6  # every sixth layer has full attention, and the last one
_CAP = number(1e-3, 1e6)
_KV_HEADS = "num_key_value_heads"
_TEXT = ("model.language_model.", "model.")
_TOWERS = (
    *("model.vision_tower.", "model.vision_embedder.", "model.embed_vision."),
    *("model.audio_tower.", "model.embed_audio."),
)
_LAYER = re.compile(r"(model\.layers\.(\d{1,4})\.)(.+)")
_NAMES = {  # of a layer's tensors
    "pre_feedforward_layernorm_2.weight": "mlp.input_norm.weight",
    "post_feedforward_layernorm_1.weight": "mlp.dense_norm.weight",
    "post_feedforward_layernorm_2.weight": "mlp.experts_norm.weight",
    "router.proj.weight": "mlp.gate.weight",
}
_MOVED = ("router.", "experts.")  # into `mlp.`
# Tensors of layers that share keys and values: published, and not read.
_UNREAD = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


@dataclasses.dataclass(frozen=True)
class LogitCap:
    """Bound of logits, `cap * tanh(logits / cap)`: a part of a `ModelConfig`."""

    cap: float


class Gemma4(Model):
    """Gemma 4 E2B, E4B, 12B, 26B-A4B and 31B, as text models.

    Two factors are applied to weights when these are loaded: of the router's inputs, the inverse
    square root of the hidden size; and of queries, the square root of the head size, which undoes
    the factor of attention scores. The products are rounded to the dtype.
    """

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        kinds = _kinds(fields)
        slides = SLIDING_ATTENTION in kinds
        has_experts = fields.find("enable_moe_block", FLAG) or False
        config = fields.common(
            kinds, _feed_forwards(fields, kinds, has_experts), has_rotation=False
        )
        parts: list[Any] = [_experts(fields)] if has_experts else []
        if cap := fields.find("final_logit_softcapping", _CAP):
            parts.append(LogitCap(float(cap)))
        if SHARED_SLIDING in kinds:
            first, last = (
                max(i for i, kind in enumerate(kinds) if kind == each)
                for each in (SLIDING_ATTENTION, SHARED_SLIDING)
            )
            parts.append(SharedWindow(first, last))
        if features := fields.find("hidden_size_per_layer_input", _FEATURES):
            ids = fields.need("vocab_size_per_layer_input", _VOCABULARY)
            parts.append(PerLayerSizes(features, ids))
        return dataclasses.replace(
            config,
            embedding_factor=math.sqrt(config.hidden_size),
            rope=_window_rope(fields, config.head_dim),
            full_attention=_full_attention(fields, config),
            window=fields.need("sliding_window", WINDOW) if slides else None,
            normed_values=True,
            normed_outputs=True,
            activation=Activation.GEGLU,
            parts=tuple(parts),
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        if name.startswith(_TOWERS):
            return None
        for prefix in _TEXT:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
                break
        found = _LAYER.fullmatch(name)
        if found is None:
            return name
        layer, index, rest = found.groups()
        kind = dict(enumerate(config.layer_types)).get(int(index))
        if kind in _SHARED.values() and rest.startswith(_UNREAD):
            return None
        rest = _NAMES.get(rest, f"mlp.{rest}" if rest.startswith(_MOVED) else rest)
        return layer + rest

    def checkpoint(self) -> Iterator[Placement]:
        """Yield the placements of all tensors, with the factors of queries and routers."""
        root = math.sqrt(self.config.hidden_size)
        for each in super().checkpoint():
            if each.name.endswith(".self_attn.q_norm.weight"):
                each = each.scaled(math.sqrt(each.shape[0]))
            elif each.name.endswith(".mlp.router.scale"):
                each = each.scaled(1 / root)
            yield each

    def logits(
        self, hidden: Float[Array, "n hidden"], columns: Weight | None = None
    ) -> Float[Array, "n ids"]:
        """See `Model`. `greedy_tokens` needs no bound: it keeps the order, up to roundings."""
        logits, bound = super().logits(hidden, columns), self.config.find_part(LogitCap)
        return logits if bound is None else bound.cap * jnp.tanh(logits / bound.cap)


def _kinds(fields: Fields) -> tuple[str, ...]:
    kinds = listed_attention(fields)
    if kinds is None:
        count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
        pair = SLIDING_ATTENTION, FULL_ATTENTION
        kinds = tuple(pair[i % _INTERVAL == 0 or i == count] for i in range(1, count + 1))
    own = len(kinds) - (fields.find("num_kv_shared_layers", whole(0, len(kinds) - 1)) or 0)
    if missing := sorted(set(kinds) - set(kinds[:own])):
        raise ValueError(
            "config.json: `num_kv_shared_layers` must leave a layer of each kind its own keys and "
            f"values, got {len(kinds) - own} of {len(kinds)} layers, which leaves no {missing[0]}. "
            "Take the config.json that was published with the weights."
        )
    return (*kinds[:own], *(_SHARED[kind] for kind in kinds[own:]))


def _feed_forwards(fields: Fields, kinds: tuple[str, ...], has_experts: bool) -> tuple[str, ...]:
    is_wide = fields.find("use_double_wide_mlp", FLAG) or False
    if is_wide and has_experts:
        raise ValueError(
            "config.json: `use_double_wide_mlp` must be false with `enable_moe_block`: layers with "
            "experts have one width. Take the config.json that was published with the weights."
        )
    if has_experts:
        return (DENSE_AND_SPARSE,) * len(kinds)
    wide = _SHARED.values() if is_wide else ()
    return tuple(DOUBLE_DENSE if kind in wide else DENSE for kind in kinds)


def _rope_block(fields: Fields, kind: str) -> Block:
    fields.need("rope_parameters", OBJECT)
    ropes = fields.block("rope_parameters")
    ropes.need(kind, OBJECT)
    return ropes.block(kind)


def _window_rope(fields: Fields, head_dim: int) -> RopeConfig:
    block = _rope_block(fields, SLIDING_ATTENTION)
    block.refuse_all_but({"rope_type": ("default",), "partial_rotary_factor": (1, 1.0)})
    return read_plain_rope(block, head_dim)


def _full_attention(fields: Fields, config: ModelConfig) -> FullAttention:
    heads, head_dim = _full_sizes(fields, config)
    check_groups(config.num_heads, heads, "num_attention_heads, num_global_key_value_heads")
    block = _rope_block(fields, FULL_ATTENTION)
    block.refuse_all_but({"rope_type": ("proportional",), "factor": (1, 1.0)})
    turning = read_plain_rope(block, head_dim)
    rope = RopeConfig(turning.theta, head_dim, ProportionalScaling(turning.rotary_dim // 2))
    shared = fields.find("attention_k_eq_v", FLAG) or False
    return FullAttention(heads, head_dim, rope, keys_are_values=shared)


def _full_sizes(fields: Fields, config: ModelConfig) -> tuple[int, int]:
    """Return the key-value heads of full attention, and their channels.

    They are two fields, or, as transformers saves them, one object per layer.
    """
    if fields.find("per_layer_config", OBJECT) is None:
        head_dim = fields.need("global_head_dim", SIZE)
        own = fields.find("num_global_key_value_heads", SIZE)
        is_read = fields.find("attention_k_eq_v", FLAG)  # as in transformers
        return (own if own and is_read else config.num_kv_heads), head_dim
    layers = fields.block("per_layer_config")
    full = {str(i) for i, kind in enumerate(config.layer_types) if kind in _FULL}
    sizes = set()
    for index in layers.entries:
        layer = layers.block(index)
        layer.refuse_all_but(dict.fromkeys(layer.entries.keys() - {"head_dim", _KV_HEADS}, ()))
        heads = layer.find(_KV_HEADS, SIZE) or config.num_kv_heads
        sizes.add((heads, layer.find("head_dim", SIZE) or config.head_dim))
    if set(layers.entries) != full or len(sizes) != 1:
        raise ValueError(
            "config.json: `per_layer_config` must give the layers with full attention the same "
            f"sizes, and no others, got {shown(layers.entries)}. Take the config.json that was "
            "published with the weights."
        )
    return sizes.pop()


def _experts(fields: Fields) -> MoEConfig:
    """Read the experts' sizes. Softmax over the chosen equals softmax over all, renormalised."""
    num_experts = fields.need("num_experts", EXPERTS)
    chosen = fields.need("top_k_experts", whole(1, num_experts))
    return MoEConfig(
        Routing(num_experts, chosen),
        fields.need("moe_intermediate_size", SIZE),
        activation=Activation.GEGLU,
    )
