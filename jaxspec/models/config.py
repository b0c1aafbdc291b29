"""ModelConfig: a model's sizes, and `Fields`: the config.json that a family reads them from."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"

_Part = TypeVar("_Part")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base, and how many channels of a head it rotates."""

    theta: float
    rotary_dim: int  # the first of the head's `head_dim` channels


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a model. Hashable.

    These fields are common to the families. What only some mixers or feed-forward layers need is
    one of `parts`: a frozen dataclass that stands beside the layer and is found by its type.
    """

    architecture: str  # e.g. Qwen3_5ForCausalLM, or the model_type where config.json names none
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    layer_types: tuple[str, ...]  # a key of `layers.decoder.MIXERS` for each layer
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # generation_config.json's, then config.json's
    tie_word_embeddings: bool | None  # None: config.json does not say
    gated_attention: bool = False  # each query head comes with a gate of its output
    zero_centred_norms: bool = False  # RMS norms multiply by `1 + weight`
    num_draft_layers: int = 0  # by config.json, which may promise layers that a checkpoint lacks
    parts: tuple[Any, ...] = ()

    def part(self, kind: type[_Part]) -> _Part:
        """The one of `parts` that is a `kind`.

        Raises:
            ValueError: the family did not read such a part.
        """
        for part in self.parts:
            if isinstance(part, kind):
                return part
        raise ValueError(
            f"A layer needs the sizes of {kind.__name__}, but {self.architecture} was read without "
            "them. Let the family's parse_config put them in `parts`."
        )

    @property
    def num_full_attention_layers(self) -> int:
        """Layers of the trunk that keep keys and values."""
        return self.layer_types.count(FULL_ATTENTION)

    @property
    def num_linear_attention_layers(self) -> int:
        """Layers of the trunk that keep a recurrent state."""
        return self.layer_types.count(LINEAR_ATTENTION)

    def is_tied(self, tensors: Collection[str]) -> bool:
        """Whether the embedding serves as output head: the checkpoint has no `lm_head.weight`.

        Where config.json says the two are separate, an absent head is a missing tensor.
        """
        return "lm_head.weight" not in tensors and self.tie_word_embeddings is not False


class Fields(dict[str, Any]):
    """The entries of a config.json in any published spelling, with errors that name the field.

    A vision-language config's `text_config` counts, and its top level fills in what that lacks.
    Each family's `parse_config` makes a `ModelConfig` of them.
    """

    def __init__(self, published: Mapping[str, Any], generation: Mapping[str, Any] | None = None):
        """`published`: config.json's content; `generation`: generation_config.json's, if any.

        Raises:
            ValueError: config.json names no model.
        """
        text = published.get("text_config") or {}
        super().__init__({**published, **text})
        self.architecture = _architecture(published)
        self.eos_token_ids = _eos(generation or {}, text, published)
        # A vision-language config carries the flag on both levels, and one of them may be stale.
        self.tie_word_embeddings = _either(text, published, "tie_word_embeddings")

    def need(self, name: str) -> Any:
        """The entry, or a ValueError that it is missing."""
        if self.get(name) is None:
            raise ValueError(
                f"config.json must give `{name}`, and does not. Take the config.json that was "
                "published with the weights."
            )
        return self[name]

    def size(self, name: str) -> int:
        """The entry, or a ValueError that it is missing or no positive integer."""
        value = self.need(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: `{name}` must be a positive integer, got {value!r}.")
        return value

    def refuse_all_but(self, expected: Mapping[str, tuple[Any, ...]]) -> None:
        """ValueError for an option that changes the output and has none of the `expected` values.

        An absent option is as the family's code assumes.
        """
        for name, accepted in expected.items():
            value = self.get(name)
            if value is not None and value not in accepted:
                wanted = " or ".join(map(repr, accepted)) or "absent"
                raise ValueError(
                    f"config.json: `{name}` must be {wanted}, got {value!r:.80}, which jaxspec "
                    "does not implement; without it the output would be wrong. Use a checkpoint "
                    "that does not need it."
                )

    def layer_types(self) -> tuple[str, ...]:
        """The mixer of each layer, in Qwen's fields: listed, or attention at an interval.

        Without a field for recurrent layers all are attention.
        """
        count = self.size("num_hidden_layers")
        if self.get("layer_types"):
            kinds = tuple(self["layer_types"])
        elif self.get("linear_num_value_heads") is None:
            kinds = (FULL_ATTENTION,) * count
        else:
            interval = self.get("full_attention_interval") or 4
            kinds = tuple(
                LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(count)
            )
        unknown = sorted(set(kinds) - {FULL_ATTENTION, LINEAR_ATTENTION})
        if unknown or len(kinds) != count:
            raise ValueError(
                f"config.json: `layer_types` must name {FULL_ATTENTION!r} or {LINEAR_ATTENTION!r} "
                f"for each of {count} layers; it has {len(kinds)} entries"
                + (f" and the unknown kinds {unknown}." if unknown else ".")
            )
        return kinds

    def rope(self, head_dim: int, default_partial: float) -> RopeConfig:
        """The rotation of a head; `default_partial`: the share of it that the family rotates."""
        nested = self.get("rope_parameters") or self.get("rope_scaling") or {}
        kind = nested.get("rope_type") or nested.get("type") or "default"
        # For text the three position rows of multimodal RoPE are equal, which is plain RoPE.
        if kind not in ("default", "mrope"):
            raise ValueError(
                f"config.json: the rope type must be 'default', got {kind!r}, which jaxspec does "
                "not implement. Remove the scaling to run within the original context length."
            )
        theta = nested.get("rope_theta") or self.need("rope_theta")
        partial = nested.get("partial_rotary_factor") or self.get("partial_rotary_factor")
        rotary_dim = int(head_dim * (partial or default_partial))
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} rotates "
                f"{rotary_dim} channels; it must be an even number in 2..{head_dim}."
            )
        return RopeConfig(float(theta), rotary_dim)

    def common(
        self, layer_types: tuple[str, ...], *, default_partial_rotary: float = 1.0
    ) -> ModelConfig:
        """What every family reads alike; a family adds its own by `dataclasses.replace`.

        `layer_types`: the mixer of each layer, keys of `layers.decoder.MIXERS`;
        `default_partial_rotary`: the share of a head that is rotated unless config.json says.

        Raises:
            ValueError: a field is missing, malformed or not implemented.
        """
        self.refuse_all_but(_COMMON_OPTIONS)
        hidden_size, num_heads = self.size("hidden_size"), self.size("num_attention_heads")
        head_dim = self.get("head_dim") or hidden_size // num_heads
        num_kv_heads = self.size("num_key_value_heads")
        check_groups(num_heads, num_kv_heads, "num_attention_heads, num_key_value_heads")
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.size("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=self.rope(head_dim, default_partial_rotary),
            rms_norm_eps=float(self.need("rms_norm_eps")),
            layer_types=layer_types,
            max_position_embeddings=self.size("max_position_embeddings"),
            eos_token_ids=self.eos_token_ids,
            tie_word_embeddings=self.tie_word_embeddings,
        )


# Options of any family that change the output, and their values that the layers compute.
_COMMON_OPTIONS = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "layer_scale": (False,),
    "quantization_config": (),
}


def read_fields(folder: Path) -> Fields:
    """The fields of the checkpoint in `folder`.

    Raises FileNotFoundError without a config.json, ValueError where it is not JSON or names no
    model.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"A model folder must hold a config.json, and {folder} has none. Give the folder of a "
            "Hugging Face checkpoint (config.json, *.safetensors, tokenizer files) or its hub id."
        )
    return Fields(_read_json(path), _read_json(generation) if generation.is_file() else {})


def check_groups(num_heads: int, num_groups: int, names: str) -> None:
    """ValueError if `num_heads` query or value heads can't share `num_groups` key heads evenly."""
    if num_heads % num_groups:
        raise ValueError(
            f"config.json: {names}: {num_heads} is not a multiple of {num_groups}, as grouped "
            "heads need."
        )


def _architecture(published: Mapping[str, Any]) -> str:
    text = published.get("text_config") or {}
    named = published.get("architectures") or text.get("architectures") or [None]
    architecture = named[0] or published.get("model_type") or text.get("model_type")
    if not architecture:
        raise ValueError(
            "config.json must name the model in `architectures` or `model_type`, and has neither. "
            "Take the config.json that was published with the weights."
        )
    return str(architecture)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, and is not: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a JSON object, got {type(content).__name__}. Download it again."
        )
    return content


def _eos(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        found = source.get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(ids))


def _either(text: Mapping[str, Any], published: Mapping[str, Any], name: str) -> bool | None:
    flags = [bool(source[name]) for source in (text, published) if source.get(name) is not None]
    return any(flags) if flags else None
