"""Fields: the entries of a config.json, from which a family makes its `ModelConfig`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checks import shown
from jaxspec.files import read_json
from jaxspec.gguf import is_gguf
from jaxspec.models.config import (
    ATTENTION_PROJECTIONS,
    DENSE,
    DENSE_AND_SPARSE,
    DOUBLE_DENSE,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    SLIDING_ATTENTION,
    SPARSE,
    SQUARED_RELU,
    ModelConfig,
)
from jaxspec.models.kinds import (
    FLAG,
    MAX_LAYERS,
    OBJECT,
    SIZE,
    TOKEN_IDS,
    WORD,
    Block,
    number,
    numbers,
    whole,
    words,
)
from jaxspec.models.quantised.scheme import FIELD, FILES, Scheme
from jaxspec.models.rope_fields import read_rope

_MAX_ARCHITECTURES = 8
_WITH_DENSE = {DENSE, DOUBLE_DENSE, SQUARED_RELU, DENSE_AND_SPARSE}
_LAYERS = whole(1, MAX_LAYERS)
_LAYER_INDICES = numbers(MAX_LAYERS, whole(0, MAX_LAYERS - 1))
_VOCABULARY = whole(1, 2**24)
_POSITIONS = whole(1, 2**31 - 1)
_EPS = number(1e-12, 0.1)

# Options of any family that change the output, with the values that the layers implement.
_COMMON_OPTIONS = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "layer_scale": (False,),
    "quantization": (),  # mlx's; other formats are in quantization_config
}


class Fields(Block):
    """The entries of a config.json in any published spelling; errors name the field.

    The `text_config` of a vision-language config takes precedence, and the top level provides what
    it lacks. Methods, and the readers of families and layers, raise ValueError for fields that are
    missing, malformed or not implemented.
    """

    def __init__(
        self,
        published: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        *,
        remedy: str | None = None,
        quantised: tuple[str, Mapping[str, Any]] | None = None,
    ):
        """Read the entries that all families share.

        Args:
            published: Content of config.json.
            generation: Content of generation_config.json, if any.
            remedy: See `Block`; for sources other than a config.json.
            quantised: Name and content of a file that replaces a missing `quantization_config`.

        Raises:
            ValueError: No model is named, or one of the shared fields has the wrong kind.
        """
        top = Block(published)
        text = top.block("text_config")
        given = {name: value for name, value in text.entries.items() if value is not None}
        super().__init__({**published, **given}, remedy=remedy)
        self.architecture = _architecture(top, text)
        self._quantised = quantised
        generated = Block(generation or {}, file="generation_config.json")
        self.eos_token_ids = _joined(generated, text, top)
        # A vision-language config has the flag on both levels, and one of them may be stale.
        flags = [block.find("tie_word_embeddings", FLAG) for block in (text, top)]
        self.tie_word_embeddings = True if True in flags else False if False in flags else None

    def scheme(self) -> Scheme | None:
        """Return the formats of quantised weights; None for weights of 16 or 32 bits."""
        if self.find(FIELD, OBJECT) is not None:
            return Scheme.of(self.entries[FIELD])
        if self._quantised is None:
            return None
        file, content = self._quantised
        return Scheme.of(content, file, "")

    def layer_types(self) -> tuple[str, ...]:
        """Return the mixer of each layer from Qwen's fields: a list, or attention at an interval.

        All layers are attention if there is no field for recurrent layers.
        """
        count = self.need("num_hidden_layers", _LAYERS)
        interval = self.find("full_attention_interval", _LAYERS) or 4
        listed = self.find("layer_types", words(MAX_LAYERS))
        if listed is not None:
            kinds = tuple(listed)
        elif self.find("linear_num_value_heads", SIZE) is None:
            kinds = (FULL_ATTENTION,) * count
        else:
            kinds = tuple(
                LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(count)
            )
        unknown = sorted(set(kinds) - {FULL_ATTENTION, LINEAR_ATTENTION})
        if unknown or len(kinds) != count:
            raise ValueError(
                f"config.json: `layer_types` must name {FULL_ATTENTION!r} or {LINEAR_ATTENTION!r} "
                f"for each of {count} layers; it has {len(kinds)} entries"
                + (f" and the unknown kinds {shown(unknown)}." if unknown else ".")
            )
        return kinds

    def attention_layer_types(self) -> tuple[str, ...]:
        """Return `layer_types` of a family with attention in every layer; others are refused."""
        kinds = self.layer_types()
        if others := kinds.count(LINEAR_ATTENTION):
            raise ValueError(
                f"{self.architecture} has attention layers only, but config.json's layer_types "
                f"name {others} recurrent ones. Check `architectures`."
            )
        return kinds

    def feed_forward_types(self) -> tuple[str, ...]:
        """Return the feed-forward type of each layer from Qwen's fields.

        Every `decoder_sparse_step`-th layer has experts, unless it is in `mlp_only_layers`.
        """
        step = self.find("decoder_sparse_step", _LAYERS) or 1
        dense = self.find("mlp_only_layers", _LAYER_INDICES) or []
        return tuple(
            DENSE if index in dense or (index + 1) % step else SPARSE
            for index in range(self.need("num_hidden_layers", _LAYERS))
        )

    def common(
        self,
        layer_types: tuple[str, ...],
        feed_forward_types: tuple[str, ...] | None = None,
        *,
        has_attention: bool = True,
        has_rotation: bool = True,
        may_have_biases: bool = False,
        default_partial_rotary: float = 1.0,
        default_theta: float | None = None,
        head_dim: int | None = None,
        eps: str = "rms_norm_eps",
        intermediate_size: str = "intermediate_size",
        max_positions: int | None = None,
    ) -> ModelConfig:
        """Read the fields that all families share; a family adds others with `dataclasses.replace`.

        Args:
            layer_types: Mixer of each layer, a key of `layers.decoder.MIXERS`.
            feed_forward_types: Likewise a key of `FEED_FORWARDS`; None means all layers are dense.
            has_attention: False for a model without attention, which has no fields for heads.
            has_rotation: False for attention without rotary positions.
            may_have_biases: True if `attention_bias` gives all projections of attention a bias.
            default_partial_rotary: Rotated share of a head if config.json has none.
            default_theta: Base of the rotation if config.json has none; None makes the field
                mandatory.
            head_dim: Channels per head, for families that read it themselves.
            eps: Name of the field with the norms' epsilon.
            intermediate_size: Name of the field with the width of dense layers.
            max_positions: Maximum sequence length, for families without such a field.

        Raises:
            ValueError: A field is missing, malformed or not implemented.
        """
        biases = may_have_biases and self.find("attention_bias", FLAG)
        implemented = {"attention_bias": (biases,)} if biases else {}
        if SLIDING_ATTENTION in layer_types:  # then the family has read it
            implemented["use_sliding_window"] = (True,)
        self.refuse_all_but(_COMMON_OPTIONS | implemented)
        self.scheme()
        hidden_size = self.need("hidden_size", SIZE)
        heads = self._heads(hidden_size, head_dim) if has_attention else (0, 0, 0)
        rope = None
        if has_attention and has_rotation:
            rope = read_rope(self, heads[2], default_partial_rotary, default_theta)
        vocab_size = self.need("vocab_size", _VOCABULARY)
        max_positions = max_positions or self.need("max_position_embeddings", _POSITIONS)
        feed_forward_types = feed_forward_types or (DENSE,) * len(layer_types)
        has_dense = not _WITH_DENSE.isdisjoint(feed_forward_types)
        if beyond := [i for i in self.eos_token_ids if i >= vocab_size]:
            raise ValueError(
                f"config.json and generation_config.json: `eos_token_id` must be in the vocabulary "
                f"of {vocab_size:,} ids, 0 to {vocab_size - 1}, got {shown(beyond)}. Take the "
                "files that were published with the weights."
            )
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self.need(intermediate_size, SIZE) if has_dense else 0,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            rope=rope,
            rms_norm_eps=float(self.need(eps, _EPS)),
            layer_types=layer_types,
            feed_forward_types=feed_forward_types,
            max_position_embeddings=max(max_positions, 0 if rope is None else rope.extended_length),
            eos_token_ids=self.eos_token_ids,
            tie_word_embeddings=self.tie_word_embeddings,
            attention_biases=ATTENTION_PROJECTIONS if biases else (),
        )

    def _heads(self, hidden_size: int, head_dim: int | None) -> tuple[int, int, int]:
        """Return the numbers of query heads and of key-value heads, and the channels per head."""
        num_heads = self.need("num_attention_heads", SIZE)
        num_kv_heads = self.need("num_key_value_heads", SIZE)
        check_groups(num_heads, num_kv_heads, "num_attention_heads, num_key_value_heads")
        given = self.find("head_dim", SIZE) if head_dim is None else head_dim
        if given is None and hidden_size % num_heads:
            raise ValueError(
                f"config.json must give `head_dim`, because hidden_size {hidden_size} is not a "
                f"multiple of num_attention_heads {num_heads}. Take the config.json that was "
                "published with the weights."
            )
        return num_heads, num_kv_heads, hidden_size // num_heads if given is None else given


def read_fields(folder: Path, overrides: Mapping[str, Any] | None = None) -> Fields:
    """Read the fields of the checkpoint in `folder`; `overrides` replaces entries of config.json.

    Raises:
        FileNotFoundError: There is no config.json.
        ValueError: It or a file beside it is not valid JSON, or no model is named.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    if not os.path.lexists(path):
        way_out = (
            "Give the folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer "
            "files) or its hub id."
        )
        if (file := next(filter(is_gguf, sorted(folder.glob("*"))), None)) is not None:
            way_out = f"To load the GGUF file in it, give its path: {file}."
        raise FileNotFoundError(
            f"A model folder must hold a config.json, and {folder} has none. {way_out}"
        )
    published = overridden(read_json(path), overrides or {})
    beside = (folder / name for name in FILES if os.path.lexists(folder / name))
    quantised = next(((path.name, read_json(path)) for path in beside), None)
    generated = read_json(generation) if os.path.lexists(generation) else {}
    return Fields(published, generated, quantised=quantised)


def overridden(published: Any, overrides: Mapping[str, Any]) -> Any:
    """Return `published` with the entries of `overrides` in place of its own.

    Objects in both are merged entry by entry. Content that is no object is returned unchanged.
    """
    if not isinstance(published, Mapping):
        return published
    return {**published} | {
        name: overridden(published.get(name) or {}, value) if isinstance(value, Mapping) else value
        for name, value in overrides.items()
    }


def check_groups(num_heads: int, num_groups: int, names: str) -> None:
    """Raise ValueError unless `num_heads` is a multiple of `num_groups` (grouped heads)."""
    if num_heads % num_groups:
        raise ValueError(
            f"config.json: {names}: {num_heads} is not a multiple of {num_groups}, as grouped "
            "heads need."
        )


def _architecture(top: Block, text: Block) -> str:
    blocks = (top, text)
    lists = [block.find("architectures", words(_MAX_ARCHITECTURES)) or [] for block in blocks]
    types = [block.find("model_type", WORD) for block in blocks]
    for name in (*(listed[0] for listed in lists if listed), *types):
        if name:
            return name
    raise ValueError(
        "config.json must name the model in `architectures` or `model_type`, and has neither. "
        "Take the config.json that was published with the weights."
    )


def _joined(*blocks: Block) -> tuple[int, ...]:
    """Return the ids under `eos_token_id` in all `blocks`, without duplicates."""
    ids: list[int] = []
    for block in blocks:
        found = block.find("eos_token_id", TOKEN_IDS)
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(ids))
