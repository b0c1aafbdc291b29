"""Gemma4Assistant: the published draft model of each Gemma 4, which reads the target's cache."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxspec.cache import Pools
from jaxspec.models.checkpoint_module import CheckpointModule
from jaxspec.models.config import (
    FULL_ATTENTION,
    READ_SLIDING,
    SHARED_FULL,
    SLIDING_ATTENTION,
    ModelConfig,
)
from jaxspec.models.fields import Fields
from jaxspec.models.gemma4 import Gemma4
from jaxspec.models.kinds import SIZE
from jaxspec.models.layers.decoder import DecoderLayer, residual_norm
from jaxspec.models.layers.linear import Linear, LMHead
from jaxspec.models.layers.mixer import LayerInputs, Stream
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.trunk import LAYERS
from jaxspec.models.model_inputs import ModelInputs

_READING = {FULL_ATTENTION: SHARED_FULL, SLIDING_ATTENTION: READ_SLIDING}
# Fields of parts that no assistant has, with the values that turn them off.
_NO_PARTS = {
    "hidden_size_per_layer_input": (0,),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (False,),
}
# Tensors of E2B's and E4B's that choose the ids to score: centroids of clusters, and their ids.
_CLUSTERS = "masked_embedding."
_EMBEDDINGS = "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class AssistantConfig:
    """Settings of an assistant beyond those of a model."""

    target_hidden_size: int


class Gemma4Assistant(CheckpointModule):
    """A few Gemma 4 layers of queries only, on the keys and values of the target's last layers.

    A pass takes a token's embedding and the target's output before it, and returns an output of the
    target's size for the next pass. All passes of a step attend to the same positions. Published
    files of E2B and E4B have clusters of ids, of which only some are scored; this class scores all
    ids.
    """

    draft_method: ClassVar[str] = "assistant"
    copies: ClassVar[Mapping[str, str]] = {"lm_head.weight": _EMBEDDINGS}

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        self.config = config
        size, target = config.hidden_size, config.part(AssistantConfig).target_hidden_size
        self.before = Linear(2 * target, {"pre_projection": size}, dtype, in_16_bits=1)
        layers: list[DecoderLayer] = []
        for kinds in zip(config.layer_types, config.feed_forward_types, strict=True):
            layers.append(DecoderLayer(config, *kinds, layers, dtype))
        self.layers = nnx.List(layers)
        self.norm = residual_norm(config, dtype)
        self.after = Linear(size, {"post_projection": target}, dtype, in_16_bits=1)
        self.lm_head = LMHead(size, config.vocab_size, dtype, config.devices)

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """Read the layers' fields as Gemma 4's, and an `AssistantConfig`.

        Raises:
            ValueError: A field is missing, malformed or not implemented.
        """
        fields.refuse_all_but(_NO_PARTS)
        if fields.tie_word_embeddings is False:
            raise ValueError(
                "config.json: `tie_word_embeddings` must be true in an assistant of Gemma 4, got "
                "false: it has one table of embeddings, which is its output head. Take the "
                "config.json that was published with the weights."
            )
        others = {"num_kv_shared_layers": 0, "text_config": None}
        others["final_logit_softcapping"] = None  # of the target: transformers does not apply it
        own = Fields({**fields.entries, **others})
        config = Gemma4.parse_config(own)
        fields.sizes.update(own.sizes)
        target = AssistantConfig(fields.need("backbone_hidden_size", SIZE))
        return dataclasses.replace(
            config,
            layer_types=tuple(_READING[kind] for kind in config.layer_types),
            parts=(*config.parts, target),
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return None if name.startswith(_CLUSTERS) else Gemma4.canonical_name(name, config)

    def __call__(
        self,
        embedded: Stream,
        hidden: Stream,
        positions: Int[Array, " rows"],
        rows: ModelInputs,
        pools: Pools,
    ) -> tuple[Stream, Stream]:
        """Run one pass over one token per row.

        Args:
            embedded: The target's embeddings of the tokens.
            hidden: The target's outputs before them, or an earlier pass's output.
            positions: Position of each row's newest token, which all its passes have.
            rows: The rows, each with the last position that is in the pools.
            pools: The target's pools, which are not changed.

        Returns:
            The output, of the target's hidden size, and the input of `lm_head`.
        """
        config = self.config
        (stream,), pending = self.before(jnp.concatenate([embedded, hidden], axis=-1)), None
        layer_inputs = LayerInputs.of(
            dataclasses.replace(rows, positions=positions), config.rope, config.full_rope
        )
        for layer in self.layers:
            stream, pending, _ = layer(stream, pending, layer_inputs, pools)
        _, scored = self.norm.add(stream, pending)
        (output,) = self.after(scored)
        return output, scored

    def checkpoint(self) -> Iterator[Placement]:
        yield from self.before.checkpoint("")
        for index, layer in enumerate(self.layers):
            for each in layer.checkpoint(f"{LAYERS}{index}."):
                is_query_norm = each.name.endswith(".self_attn.q_norm.weight")
                yield each.scaled(math.sqrt(each.shape[0])) if is_query_norm else each
        yield from self.norm.checkpoint("model.norm")
        yield from self.after.checkpoint("")
        yield from self.lm_head.checkpoint(_EMBEDDINGS)
